"""Run records: what a tracker shows of a results directory, as plain values: one for each case, one for each suite run.

Records hold nothing but what the results file holds, and the same results give the same records, whenever and wherever
they are made.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from harness.report import RATIOS_FILE, REPORT_FILE, read_ratios
from harness.result import Parity, Result, Status, logs_of, replace_non_finite
from harness.workload import TRAINING_OPTIONS

SUITES_EXPERIMENT = "meshmark/suites"
MAX_SERIES_POINTS = 50
MAX_PARAM_LENGTH = 500  # the smallest limit among the servers in use
MAX_TAG_LENGTH = 5000
MAX_LOGS = 32  # of a case: a thousand ranks say the same
MAX_LOG_BYTES = 2**16
SOFTWARE = ("torch", "numpy", "python", "os", "threads_per_rank")  # of an environment: what people can name
RATIO_FIGURES = ("ratio", "floor_ratio", "overhead_ratio", "rounds", "spread")

Series = Mapping[str, Sequence[tuple[int, float]]]  # name -> (step, value)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. (`suite_run`, `case_id`) says which it is; `case_id` is empty for the suite run itself. `artifacts` are
    file names with their text; `finished` is False where the case failed."""

    experiment: str
    suite_run: str
    case_id: str
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float]
    series: Series = field(default_factory=dict)
    artifacts: Mapping[str, str]
    finished: bool
    started: float  # seconds since the epoch
    ended: float

    @property
    def digest(self) -> str:
        """A hash of everything in it: a run that bears another one is out of date."""
        return _hash(json.dumps(asdict(self), sort_keys=True))


def experiment_of(workload: str) -> str:
    """The experiment that a workload's runs belong to: `meshmark/gpt` for `gpt:size=17m`, whatever the options, so that
    one chart can show a model at several sizes; `meshmark/file.builder` for a user's own."""
    path, colon, rest = workload.rpartition(".py:")
    head = f"{Path(path).name}.{rest.partition(':')[0]}" if colon else workload.partition(":")[0]
    return "meshmark/" + re.sub(r"[^\w.-]", "_", head)


def suite_run_of(result: Result, directory: Path) -> str:
    """The suite run a result belongs to; one that was not given any goes by its directory's name."""
    return result.suite_run or directory.resolve().name


def case_record(result: Result, directory: Path) -> RunRecord:
    """The record of one case. ValueError or TypeError if its samples are not as documented."""
    series, dropped = _series(result.samples)
    parity, not_finite = _parity_metrics(result.parity)
    not_finite += dropped
    if result.parity is not None:
        parity["parity.finite"] = float(not not_finite)
    options = _workload_options(result.case.workload)
    libraries = result.environment.get("libraries") or {}
    tags = {
        **_shared_tags([result]),
        "implementation": result.case.implementation,
        "strategy": result.strategy,
        "role": result.case.role,
        "status": result.status,
        "reason": result.reason,
        "other_work": result.other_work,
        "culprit": result.culprit,
        "verdict": result.verdict,
        "lane": result.parity and result.parity.lane,
        "explanation": result.parity and result.parity.explanation,
        "not_finite": ", ".join(not_finite),
        "device": (result.environment.get("device") or {}).get("kind"),
        "suite_cases": result.num_suite_cases or None,
        "emulated": bool(result.environment.get("emulated", False)),
        "libraries": " ".join(f"{name}=={version}" for name, version in libraries.items()),
    }
    return RunRecord(
        experiment=experiment_of(result.case.workload),
        suite_run=suite_run_of(result, directory),
        case_id=result.case.id,
        name=f"{result.case.label} {result.case.layout}"[:MAX_PARAM_LENGTH],
        tags=_tag_values(tags),
        params=_params(
            {
                **_flat({name: value for name, value in result.case.to_json().items() if name != "is_unplaced"}),
                **options,
                **_flat({"libraries": libraries}),
                **_flat(
                    {"environment": {name: result.environment[name] for name in SOFTWARE if name in result.environment}}
                ),
            }
        ),
        metrics={**_axes(result, options), **parity, **_floats(result.metrics), **_canary(result)},
        series=series,
        artifacts={
            "result.json": json.dumps(replace_non_finite(result.to_json()), allow_nan=False),
            **_logs(logs_of(directory, result.case)),
        },
        finished=result.is_harmless,
        started=result.started,
        ended=result.started + result.duration_seconds,
    )


def _canary(result: Result) -> dict[str, float]:
    """What the machine was worth in the case's session."""
    return _floats({f"canary.{name}": value for name, value in (result.environment.get("canary") or {}).items()})


def _logs(directory: Path) -> dict[str, str]:
    """What ranks and their libraries wrote, the end of each log: `logs/timed/rank-0.log`. Empty ones are left out."""
    found = {}
    for path in sorted(directory.glob("*/rank-*.log"))[:MAX_LOGS]:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            text = file.read().decode(errors="replace")
        if text.strip():
            found[f"logs/{path.relative_to(directory)}"] = text
    return found


def suite_runs(results: Sequence[Result], directory: Path) -> dict[str, list[Result]]:
    """The results of a directory by their suite run, the latest suite run last."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.started):
        suite_run = suite_run_of(result, directory)
        groups[suite_run] = [*groups.pop(suite_run, []), result]
    return groups


def suite_record(suite_run: str, results: Sequence[Result], directory: Path | None) -> RunRecord:
    """The record of a suite run: how many cases ended how, and the report and ratio table that lie in `directory`.
    ValueError if the ratio table is broken."""
    files = [directory / name for name in (REPORT_FILE, RATIOS_FILE)] if directory else []
    artifacts = {path.name: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    finished = all(result.is_harmless for result in results)
    counts = {f"cases.{status}": sum(result.status == status for result in results) for status in get_args(Status)}
    name = next((result.suite for result in results if result.suite), "")
    return RunRecord(
        experiment=SUITES_EXPERIMENT,
        suite_run=suite_run,
        case_id="",
        name=suite_run if suite_run.startswith(name) else f"{name} {suite_run}",
        tags=_tag_values(
            {**_shared_tags(results), "status": "ok" if finished else "failed", **_description(artifacts)}
        ),
        # A resumed suite run has had several sessions; its last one speaks for it.
        metrics=_floats(
            {
                "cases": len(results),
                **counts,
                **_ratio_metrics(directory),
                **next((canary for result in reversed(results) if (canary := _canary(result))), {}),
            }
        ),
        artifacts=artifacts,
        finished=finished,
        started=min(result.started for result in results),
        ended=max(result.started + result.duration_seconds for result in results),
    )


def _description(artifacts: Mapping[str, str]) -> dict[str, str]:
    """The report, where MLflow shows a run's description as Markdown; half a table would be worse than none."""
    report = artifacts.get(REPORT_FILE, "")
    return {"mlflow.note.content": report if len(report) <= MAX_TAG_LENGTH else f"See the artifact {REPORT_FILE}."}


def _shared_tags(results: Sequence[Result]) -> dict[str, Any]:
    """The tags a case has in common with its suite run; of several values, all that occur."""

    def of_environment(name: str) -> str:
        values = (result.environment.get(name) for result in results)
        return " ".join(dict.fromkeys(_text(value) for value in values if value is not None))

    names = ("machine_fingerprint", "environment_fingerprint", "commit", "dirty")
    suites = dict.fromkeys(result.suite for result in results)
    return {"suite": " ".join(suites), **{name: of_environment(name) for name in names}}


def _ratio_metrics(directory: Path | None) -> dict[str, float]:
    """`ratio/ddp native.ddp world 2 gpt size 17m`: the figure, then which row of the table it stands in."""
    metrics = {}
    for row in read_ratios(directory) if directory else []:
        where = (row["implementation"], f"world {row['world_size']}", row.get("workload", ""))
        parts = [*dict.fromkeys((row["strategy"], row.get("comparison") or row["strategy"])), *where]
        key = re.sub(r"[^\w.: -]+", " ", " ".join(str(part).replace("/", ".") for part in parts)).strip()
        for figure in RATIO_FIGURES:
            value = _number(row.get(figure))
            if value is not None and math.isfinite(value):
                metrics[f"{figure}/{_shortened(key, 200)}"] = value
    return metrics


def _axes(result: Result, workload_options: Mapping[str, str]) -> dict[str, float]:
    """Params are texts, so what people filter by as a number is a metric too."""
    layout, topology = result.case.layout, result.case.placed
    numbers = {name: _number(value) for name, value in workload_options.items()}
    return _floats(
        {
            "layout.data": layout.data,
            "layout.shard": layout.shard_degree,
            "layout.tensor": layout.tensor,
            "layout.pipeline": layout.pipeline,
            "layout.world_size": layout.world_size,
            "topology.num_nodes": topology.num_nodes,
            "topology.ranks_per_node": topology.ranks_per_node,
            **({"topology.link_mbits": topology.link_mbits} if topology.link_mbits is not None else {}),
            "topology.delay_ms": topology.delay_ms,
            **{name: value for name, value in numbers.items() if value is not None and math.isfinite(value)},
        }
    )


def _workload_options(workload: str) -> dict[str, str]:
    """`gpt:size=17m,seed=3` as workload.size and training.seed."""
    _, colon, rest = workload.rpartition(".py:")
    options = (rest if colon else workload).partition(":")[2]
    pairs = (part.partition("=") for part in options.split(",") if part)
    return {
        f"{'training' if key.strip() in TRAINING_OPTIONS else 'workload'}.{key.strip()}": value.strip()
        for key, _, value in pairs
    }


def _parity_metrics(parity: Parity | None) -> tuple[dict[str, float], list[str]]:
    """The finite figures, and the others as `name=value`: a tracker changes what is not finite."""
    if parity is None:
        return {}, []
    metrics: dict[str, float] = {}
    not_finite = []
    for name, value in asdict(parity).items():
        number = _number(value)
        if number is None or name == "tolerance":
            continue
        if math.isfinite(number):
            metrics[f"parity.{name}"] = number
        else:
            not_finite.append(f"parity.{name}={number}")
    return metrics, not_finite


def _series(samples: Mapping[str, Any]) -> tuple[dict[str, list[tuple[int, float]]], list[str]]:
    """What `samples` holds by step, and the series in which some values are not finite (they are left out).

    `losses` and `reference_losses` hold the global loss of each parity step, `step_seconds` the seconds of each timed
    step for each rank; the slowest rank is the step.
    """
    losses = _numbers(samples.get("losses"))
    reference = _numbers(samples.get("reference_losses"))
    ranks = [_numbers(rank) for rank in samples.get("step_seconds") or ()]
    values = {
        "loss": losses,
        "loss.difference": [own - true for own, true in zip(losses, reference, strict=False)],
        "step.seconds": [max(step) for step in zip(*ranks, strict=False)],
    }
    series = {name: _thinned([p for p in enumerate(points) if math.isfinite(p[1])]) for name, points in values.items()}
    not_finite = [name for name, points in values.items() if not all(map(math.isfinite, points))]
    return {name: points for name, points in series.items() if points}, not_finite


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_SERIES_POINTS, evenly spread, with the first and the last."""
    if len(points) <= MAX_SERIES_POINTS:
        return points
    last = len(points) - 1
    return [points[round(index * last / (MAX_SERIES_POINTS - 1))] for index in range(MAX_SERIES_POINTS)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        flat |= _flat(item, f"{name}.") if isinstance(item, Mapping) else {name: item}
    return flat


def _params(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _shortened(_text(value), MAX_PARAM_LENGTH) for name, value in values.items()}


def _tag_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Tags that say nothing are left out."""
    texts = {name: _text(value) for name, value in values.items() if value not in (None, "")}
    return {name: _shortened(text, MAX_TAG_LENGTH) for name, text in texts.items()}


def _text(value: Any) -> str:
    """A value as people type it: text bare, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(replace_non_finite(value), sort_keys=True)


def _shortened(text: str, length: int) -> str:
    """`text`, or its beginning and a hash of the whole where it is longer than `length`."""
    if len(text) <= length:
        return text
    ending = f" sha256 {_hash(text)}"
    return text[: length - len(ending)] + ending


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _numbers(values: Iterable[Any] | None) -> list[float]:
    return [float(value) for value in values or ()]


def _number(value: Any) -> float | None:
    """A number, also one written as text ("nan" in a results file); None for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

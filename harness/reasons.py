"""Reasons: what to say in words beside the figures: why a case is not ok, and what its figures rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.measure import straggler
from harness.result import Parity, Result


def reasons(result: Result) -> list[str]:
    """Why a case is not ok: first which case, then one line for each thing that is known about it."""
    case = result.case
    lines = [f"{result.shown_status}: {case.label}, {case.layout}, {case.workload}, {case.precision}"]
    parity = result.parity
    parted = parity is not None and not parity.ok
    reason = result.reason or (parity.explanation if parity is not None and parted else None)
    if reason:
        lines.append(" ".join(reason.split()))
    if parity is not None and parted:
        if parity.explanation not in (None, reason):
            lines.append(f"explained by: {parity.explanation}")
        lines += _gap(parity)
    return lines


def departures(result: Result) -> list[str]:
    """What figures must not hide: where a case does other work than its recipe says, where it ran with another value
    than an option asked for, and which of its ranks kept the others waiting."""
    facts = result.environment.get("facts") or {}
    samples = result.samples.get("fixed_work_seconds") or []
    slow = straggler.find(samples, processors_a_rank=_processors_a_rank(result))
    case = result.case
    work = [] if result.other_work is None else [f"{case.label}, {case.layout}: other work: {result.other_work}"]
    others = [
        f"{case.label}, {case.layout}: ran with {name}={facts[name]}"
        + (f" ({facts[f'{name}_fallback']})" if f"{name}_fallback" in facts else "")
        for name, value in case.options.items()
        if name in facts and str(facts[name]) != str(value)
    ]
    return [*work, *others, *([] if slow is None else [f"{case.label}, {case.layout}: {slow}"])]


def _processors_a_rank(result: Result) -> float:
    """1 where each rank has at least one of its own, or a device, or where nobody knows."""
    case, environment = result.case, result.environment
    if (environment.get("device") or {}).get("kind") != "cpu":
        return 1.0
    num_ranks = case.world_size if environment.get("emulated") else case.placed.ranks_per_node
    return min(1.0, float(environment.get("logical_cores") or num_ranks) / num_ranks)


def unpredicted(results: Iterable[Result]) -> list[str]:
    """One line for each implementation and each reason: why cells of its predictions are empty."""
    lines: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for figure, reason in result.unpredicted.items():
            figures = lines.setdefault((result.case.label, reason), [])
            if figure not in figures:
                figures.append(figure)
    return [f"{label} predicts no {' and no '.join(figures)} because {why}" for (label, why), figures in lines.items()]


def beyond_the_textbook(results: Iterable[Result]) -> list[str]:
    """One line for each reason: who sends more than the textbook of the strategy because of it."""
    lines: dict[str, list[str]] = {}
    for result in results:
        if result.beyond_the_textbook is not None:
            whose = lines.setdefault(result.beyond_the_textbook, [])
            if result.case.label not in whose:
                whose.append(result.case.label)
    return [f"more than the textbook is sent under {', '.join(whose)}, because {why}" for why, whose in lines.items()]


def shown_parity(result: Result, verdicts: Mapping[str, str]) -> str:
    """What a table says of parity, in its words for "ok" and "failed"; nothing of a floor, which trains nothing, of
    the reference, nor of what was not measured."""
    is_measured = result.case.role in ("subject", "peer") and result.status in ("ok", "parity failed")
    if not is_measured and result.parity is None:
        return "-"
    words = [verdicts.get(result.parity_verdict, result.parity_verdict)]
    return ", ".join([*words, *(["other work"] if result.other_work else [])])


def _gap(parity: Parity) -> list[str]:
    differences = {
        "loss": parity.loss_max_relative,
        "gradient norm": parity.gradient_norm_max_relative,
        "gradients": parity.gradient_max_relative,
        "parameters": parity.parameter_max_relative,
    }
    if parity.evaluation_loss_relative is not None:
        differences["evaluation loss"] = parity.evaluation_loss_relative
    # Results read back from a file hold "nan" and "inf" as text.
    lines = ["off by, relative: " + ", ".join(f"{name} {float(value):.1e}" for name, value in differences.items())]
    if parity.tolerance:
        allowed = ", ".join(f"{name} {float(value):.1e}" for name, value in parity.tolerance.items())
        lines.append(f"allowed ({parity.lane}): {allowed}")
    if not parity.replicas_bit_equal:
        lines.append("replicas differ between ranks")
    return lines

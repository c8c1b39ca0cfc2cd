"""Tracking: fills MLflow from a results directory, and reads runs back. The only file that imports mlflow.

The results file is the truth and MLflow a copy of it that may come late: `upload` brings the copy up to date however
often it is called, and a tracking server that is down costs one line of warning and nothing else. For each run it finds

    nothing               created, filled, marked complete last
    an incomplete run     replaced: an upload died on the way
    another content       replaced: the case was run again
    the same content      left alone

Runs are flat, since nested ones leave MLflow's table and charts empty. A case's run lies in the experiment of its
workload (`meshmark/gpt`), a suite run's in `meshmark/suites`.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from harness.one_line import one_line
from harness.result import RESULTS_FILE, read
from harness.run_record import RunRecord, case_record, suite_record, suite_runs

DEFAULT_STORE = "sqlite:///mlflow.db"
ARTIFACTS_DIRECTORY = "mlartifacts"
EVERY_EXPERIMENT = "meshmark/%"
SUITE_RUN_TAG = "meshmark.suite_run"
CASE_ID_TAG = "meshmark.case_id"
COMPLETE_TAG = "meshmark.complete"  # holds the digest of what was uploaded

# One call of log_batch takes 1000 things, at most 100 of them params and 100 tags.
_MAX_METRICS, _MAX_PARAMS, _MAX_TAGS = 800, 100, 100
_LOCK_DEADLINE_SECONDS = 120.0
_LOCKED_WAITS_SECONDS = (0.1, 0.5, 2.0)
_LOCKED_SECONDS = 15.0  # MLflow waits for twenty in most places, and not at all in others
# By itself MLflow waits for minutes for a server that is down. What the user has set stays.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
# By itself MLflow's UI guesses, and may open an experiment among prompts and traces.
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_NOISY_LOGGERS = ("mlflow", "alembic", "urllib3")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class UploadReport:
    """What an upload did: the experiments it wrote to, and how many runs (one a case, one a suite run) were sent, found
    up to date, or failed. `message` is one line for people."""

    experiments: tuple[str, ...]
    uploaded: int
    already_there: int
    failed: int
    message: str


def store_uri(tracking_uri: str | None = None) -> str:
    """The store that is used: the one given, or MLFLOW_TRACKING_URI (MLflow's own variable, which its users expect to
    work), or a SQLite file in the current directory; a SQLite file by its absolute path."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_STORE
    database = _sqlite_file(uri)
    if database is None:
        return uri
    _, question_mark, query = uri.partition("?")
    return f"sqlite:///{database}{question_mark}{query}"


def upload(directory: Path, *, tracking_uri: str | None = None, within_seconds: float = math.inf) -> UploadReport:
    """Bring MLflow up to date with the results in `directory`, as far as that can be begun `within_seconds`. ValueError
    if there are no results to read; whatever else goes wrong is told in the report."""
    results = read(directory)
    suites = suite_runs(results, directory)
    latest = next(reversed(suites), None)
    records: list[Callable[[], RunRecord]] = [
        *(functools.partial(case_record, result, directory) for result in results),
        *(
            functools.partial(suite_record, name, group, directory if name == latest else None)
            for name, group in suites.items()
        ),
    ]
    hint = f"Nothing is lost: `meshmark upload {directory}` sends them later"
    return _send_all(records, store_uri(tracking_uri), directory / RESULTS_FILE, hint, within_seconds)


def send(records: Sequence[RunRecord], *, kept: Path, tracking_uri: str | None = None) -> UploadReport:
    """Bring MLflow up to date with records of another kind: comparisons, micro-benchmarks. Whatever goes wrong is told
    in the report. `kept` is the file that holds the same; writers of this machine take turns at it."""
    made = [functools.partial(_itself, record) for record in records]
    return _send_all(made, store_uri(tracking_uri), kept, f"All of it is in {kept}")


def _itself(record: RunRecord) -> RunRecord:
    return record


def _send_all(
    records: Sequence[Callable[[], RunRecord]], uri: str, file: Path, hint: str, within_seconds: float = math.inf
) -> UploadReport:
    """`hint` says what to do about those that failed; none is begun after `within_seconds`."""
    until = time.monotonic() + within_seconds
    experiments: dict[str, str] = {}  # name -> id
    problems: list[str] = []
    uploaded = already_there = 0
    database = _sqlite_file(uri)
    lock = file if database is None else database.with_name(f"{database.name}.lock")
    try:
        # One writer: nobody else searches and creates the same runs, or the database, in between.
        with _locked(lock), _client(uri) as client:
            _patiently(_answers, client)
            for make_record in records:
                if time.monotonic() > until:
                    problems.append(f"the store is slow, and took more than {within_seconds:g} s")
                    break
                try:
                    record = make_record()
                    if record.experiment not in experiments:
                        experiments[record.experiment] = _patiently(_experiment_id, client, uri, record.experiment)
                    if _patiently(_bring_up_to_date, client, experiments[record.experiment], record):
                        uploaded += 1
                    else:
                        already_there += 1
                except Exception as error:
                    problems.append(_cause(error))
                    _answers(client)
    except Exception as error:
        problems.append(_cause(error))
    failed = len(records) - uploaded - already_there
    message = f"MLflow at {_shown(uri)}: {uploaded} runs uploaded, {already_there} already there"
    if failed:
        message += f", {failed} failed: {problems[0]}. {hint}"
    return UploadReport(
        experiments=tuple(experiments),
        uploaded=uploaded,
        already_there=already_there,
        failed=failed,
        message=message,
    )


def read_runs(
    experiment: str = EVERY_EXPERIMENT, *, suite: str | None = None, tracking_uri: str | None = None
) -> list[dict[str, Any]]:
    """Every complete run of the experiments whose name is like `experiment` (`%` stands for anything), the latest first
    within each; with `suite` those of that suite only. Each run is flat: `experiment` and its `experiment_id`,
    `run_id`, `run_name`, `status` (MLflow's), `started` and `ended` (seconds since the epoch), and `tags.<name>`,
    `params.<name>`, `metrics.<name>` (a series by its last value).

    Empty while there is no store. ConnectionError if it cannot be read.
    """
    uri = store_uri(tracking_uri)
    database = _sqlite_file(uri)
    if database is not None and not database.exists():
        return []
    of_suite = "" if suite is None else f"tags.suite = {_quoted(suite)}"
    try:
        with _client(uri) as client:
            return [
                _flat(found, run)
                for found in _pages(client.search_experiments, filter_string=f"name LIKE '{experiment}'")
                for run in _pages(client.search_runs, [found.experiment_id], filter_string=of_suite)
                if COMPLETE_TAG in run.data.tags
            ]
    except Exception as error:
        raise ConnectionError(f"MLflow at {_shown(uri)} cannot be read: {_cause(error)}") from error


def set_tags(tags: Mapping[str, Mapping[str, str]], *, tracking_uri: str | None = None) -> None:
    """Gives runs, by their ids, tags that say what became known of them later; uploading the same results again leaves
    them. ConnectionError if the store does not take them."""
    uri = store_uri(tracking_uri)
    try:
        with _client(uri) as client:
            for run_id, of_run in tags.items():
                for name, value in of_run.items():
                    _patiently(client.set_tag, run_id, name, value)
    except Exception as error:
        raise ConnectionError(f"MLflow at {_shown(uri)} cannot be written: {_cause(error)}") from error


def read_artifacts(run_ids: Sequence[str], name: str, *, tracking_uri: str | None = None) -> dict[str, str]:
    """The text of the artifact `name` of each run that has it, by the run's id. ConnectionError if the store cannot be
    read."""
    uri = store_uri(tracking_uri)
    found = {}
    try:
        with _client(uri) as client, tempfile.TemporaryDirectory() as directory:
            for run_id in run_ids:
                if any(entry.path == name for entry in client.list_artifacts(run_id)):
                    path = client.download_artifacts(run_id, name, directory)
                    found[run_id] = Path(path).read_text(encoding="utf-8")
    except Exception as error:
        raise ConnectionError(f"MLflow at {_shown(uri)} cannot be read: {_cause(error)}") from error
    return found


def log_artifact(run_id: str, name: str, text: str, *, tracking_uri: str | None = None) -> None:
    """Puts a text beside a run's others, in place of an earlier one. ConnectionError if the store does not take it."""
    uri = store_uri(tracking_uri)
    try:
        with _client(uri) as client:
            client.log_text(run_id, text, name)
    except Exception as error:
        raise ConnectionError(f"MLflow at {_shown(uri)} cannot be written: {_cause(error)}") from error


def change_experiment_tags(
    change: Callable[[str, str, Mapping[str, str]], Mapping[str, str]],
    *,
    tracking_uri: str | None = None,
) -> None:
    """Sets what `change` makes of each of our experiments' id, name and tags. ConnectionError if the store does not
    take it."""
    uri = store_uri(tracking_uri)
    try:
        with _client(uri) as client:
            for found in _pages(client.search_experiments, filter_string=f"name LIKE '{EVERY_EXPERIMENT}'"):
                for key, value in change(found.experiment_id, found.name, found.tags).items():
                    if found.tags.get(key) != value:
                        _patiently(client.set_experiment_tag, found.experiment_id, key, value)
    except Exception as error:
        raise ConnectionError(f"MLflow at {_shown(uri)} cannot be written: {_cause(error)}") from error


def _flat(experiment: Any, run: Any) -> dict[str, Any]:
    return {
        "experiment": experiment.name,
        "experiment_id": experiment.experiment_id,
        "run_id": run.info.run_id,
        "run_name": run.info.run_name,
        "status": run.info.status,
        "started": run.info.start_time / 1000,
        "ended": run.info.end_time / 1000,
        **{f"tags.{name}": value for name, value in run.data.tags.items()},
        **{f"params.{name}": value for name, value in run.data.params.items()},
        **{f"metrics.{name}": value for name, value in run.data.metrics.items()},
    }


def _answers(client: Any) -> None:
    """Raises if the store is at fault, rather than what was sent to it."""
    client.search_experiments(max_results=1)


def _experiment_id(client: Any, uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            location = _artifact_location(uri, name)
            return str(client.create_experiment(name, artifact_location=location, tags=_EXPERIMENT_TAGS))
        except Exception:
            found = client.get_experiment_by_name(name)  # Another writer may have been faster.
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _bring_up_to_date(client: Any, experiment_id: str, record: RunRecord) -> bool:
    """Whether anything had to be sent."""
    conditions = [f"tags.`{SUITE_RUN_TAG}` = {_quoted(record.suite_run)}"]
    if record.case_id:
        conditions.append(f"tags.`{CASE_ID_TAG}` = {_quoted(record.case_id)}")
    found = list(_pages(client.search_runs, [experiment_id], filter_string=" AND ".join(conditions)))
    current = [run for run in found if run.data.tags.get(COMPLETE_TAG) == record.digest]
    for run in found:
        if run not in current[:1]:
            client.delete_run(run.info.run_id)
    if not current:
        _send(client, experiment_id, record)
    return not current


def _send(client: Any, experiment_id: str, record: RunRecord) -> None:
    from mlflow.entities import Metric, Param, RunTag

    started, ended = round(record.started * 1000), round(record.ended * 1000)
    identity = {SUITE_RUN_TAG: record.suite_run, **({CASE_ID_TAG: record.case_id} if record.case_id else {})}
    run = client.create_run(experiment_id, start_time=started, tags=identity, run_name=record.name)
    points = [(name, 0, value) for name, value in record.metrics.items()]
    points += [(name, step, value) for name, series in record.series.items() for step, value in series]
    metrics = [Metric(name, value, ended, step) for name, step, value in points]
    params = [Param(name, value) for name, value in record.params.items()]
    tags = [RunTag(name, value) for name, value in record.tags.items()]
    while metrics or params or tags:
        client.log_batch(run.info.run_id, metrics[:_MAX_METRICS], params[:_MAX_PARAMS], tags[:_MAX_TAGS])
        metrics, params, tags = metrics[_MAX_METRICS:], params[_MAX_PARAMS:], tags[_MAX_TAGS:]
    for name, text in record.artifacts.items():
        client.log_text(run.info.run_id, text, name)
    client.set_terminated(run.info.run_id, "FINISHED" if record.finished else "FAILED", ended)
    client.set_tag(run.info.run_id, COMPLETE_TAG, record.digest)


def _pages(search: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(*arguments, page_token=token, **options)
        yield from page
        token = page.token
        if not token:
            return


def _patiently(call: Callable[..., T], *arguments: Any) -> T:
    """`call`, again while another program (MLflow's own UI, say) holds the SQLite file, unless MLflow itself has waited
    for it all along."""
    began = time.monotonic()
    for wait_seconds in _LOCKED_WAITS_SECONDS:
        try:
            return call(*arguments)
        except Exception as error:
            if "database is locked" not in str(error) or time.monotonic() - began > _LOCKED_SECONDS:
                raise
            time.sleep(wait_seconds)
    return call(*arguments)


@contextmanager
def _client(uri: str) -> Iterator[Any]:
    """A client of the store at `uri`, while MLflow keeps quiet, does not report home and gives up in good time."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    added = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    levels: dict[str, int] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient  # Sets up its loggers, so they can only be silenced after it.

            for name in _NOISY_LOGGERS:
                levels[name] = logging.getLogger(name).level
                logging.getLogger(name).setLevel(logging.CRITICAL)
            yield MlflowClient(tracking_uri=uri)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes of this machine. TimeoutError if another one does not let go."""
    # Read-only, so that results on a write-protected disk can be uploaded.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + _LOCK_DEADLINE_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}: another upload has held it for {_LOCK_DEADLINE_SECONDS:g} s") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _sqlite_file(uri: str) -> Path | None:
    """The database file of `sqlite:///relative` or `sqlite:////absolute`; None for any other store."""
    scheme, _, rest = uri.partition(":///")
    path = rest.partition("?")[0]
    return Path(path).resolve() if scheme == "sqlite" and path else None


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Beside the SQLite file, in the current directory for another database; a server has a place of its own."""
    database = _sqlite_file(uri)
    if database is None and urlsplit(uri).scheme.partition("+")[0] not in ("postgresql", "mysql", "mssql"):
        return None
    beside = Path.cwd() if database is None else database.parent
    return (beside / ARTIFACTS_DIRECTORY / experiment).as_uri()


def _quoted(text: str) -> str:
    """`text` in MLflow's filter language, which knows no escapes."""
    if "'" not in text:
        return f"'{text}'"
    if '"' not in text:
        return f'"{text}"'
    raise ValueError(f"expected a name with one kind of quotation mark at most, got {text!r}")


def _shown(uri: str) -> str:
    """`uri` without the password it may hold."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def _cause(error: Exception) -> str:
    """What went wrong, without the request around it: a refused connection or a full disk lies deep in the chain."""
    told: BaseException = error
    below: BaseException | None = error
    while below is not None:
        told = below if isinstance(below, OSError) else told
        below = below.__cause__ or (None if below.__suppress_context__ else below.__context__)
    text = one_line(str(told))
    return f"{type(told).__name__}: {text if len(text) <= 200 else text[:200] + '...'}"

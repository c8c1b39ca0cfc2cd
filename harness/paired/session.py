"""A session: one build's process that times cases when told to, each in fresh ranks. Run by path, as

    BUILD/python -P harness/paired/session.py          with the build's code as PYTHONPATH

Requests come as lines of JSON on standard input, `{"case": ..., "directory": ..., "device": ...}`; each is answered by
one on standard output. It ends with its input, or with the process that started it. Of the build's harness it uses
what revisions have in common; of this one, nothing: it may run under a revision that knows nothing of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class NoProgress:
    """Whatever this revision's runner tells, nobody hears it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


def timed(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the case's timed steps alone; `seconds` is its median step, where it has one."""
    from harness import runner
    from harness.case import Case, Measurement, Suite

    known = {field.name for field in fields(Measurement)}
    data = dict(request["case"])
    data["measurement"] = {name: value for name, value in data["measurement"].items() if name in known}
    case = Case.from_json(data)
    if data["is_unplaced"]:  # of which some revisions know nothing: they would run it on an emulated node
        case = replace(case, topology=None)
    others = {name: 0 for name in known if name.endswith("_steps") and name not in ("warm_up_steps", "timed_steps")}
    case = replace(case, measurement=replace(case.measurement, rounds=1, **others))
    given = {} if request["device"] == "cpu" else {"device": request["device"]}
    suite = Suite(name="paired", cases=(case,))
    (result,) = runner.run(suite, Path(request["directory"]), progress=NoProgress(), **given)
    return {
        "case_id": result.case.id,
        "status": result.status,
        "reason": result.reason,
        "seconds": result.metrics.get("step.median_seconds"),
        "steps": result.samples.get("step_seconds"),
    }


def _interrupt(_signal: int, _frame: Any) -> None:
    """The runner cleans up as after Ctrl-C."""
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    # Ranks and libraries may write to standard output; the answers go where they do not.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = timed(json.loads(line))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"status": "failed", "reason": reason, "seconds": None, "traceback": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGTERM)

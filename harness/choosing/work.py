"""Work: which model is trained with which batch, whatever the way: only the same work can be compared by its speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

# How a rank goes through its batch: parity holds whatever they are.
_SETTINGS = ("num_micro_batches", "activation_checkpointing")
_BATCH = "global_batch_size"


def options_of(workload: str) -> dict[str, str]:
    """`gpt:size=17m,seed=3` as {"size": "17m", "seed": "3"}."""
    pairs = (part.partition("=") for part in _split(workload)[1].split(",") if part)
    return {key.strip(): value.strip() for key, _, value in pairs}


def work_of(workload: str) -> str:
    """The workload without what only says how a rank goes through it."""
    return _without(workload, _SETTINGS)


def model_of(workload: str) -> str:
    """The workload without its batch, too: the same for every case of a weak scaling."""
    return _without(workload, (*_SETTINGS, _BATCH))


def settings_of(workload: str) -> str:
    """What `work_of` leaves out, for people: `num_micro_batches=4`."""
    return " ".join(f"{key}={value}" for key, value in options_of(workload).items() if key in _SETTINGS)


def shown(workload: str) -> str:
    """For people: `gpt size=17m global_batch_size=4`, a user's own by its file's name."""
    head, _ = _split(workload)
    path, colon, builder = head.rpartition(".py:")
    name = f"{PurePath(path).name}.py:{builder}" if colon else head
    return " ".join([name, *(f"{key}={value}" for key, value in options_of(workload).items())])


def is_asked_for(workload: str, asked: str) -> bool:
    """Whether the work is of the model that somebody asks for: the same builder, and every option that is named."""
    options = options_of(workload)
    return _split(workload)[0] == _split(asked)[0] and all(
        options.get(key) == value for key, value in options_of(asked).items()
    )


def batch_of(workload: str) -> int | None:
    """The global batch size where the workload's text names it."""
    text: Mapping[str, str] = options_of(workload)
    return int(text[_BATCH]) if text.get(_BATCH, "").isdigit() else None


def _without(workload: str, names: tuple[str, ...]) -> str:
    head, _ = _split(workload)
    kept = [f"{key}={value}" for key, value in options_of(workload).items() if key not in names]
    return f"{head}:{','.join(kept)}" if kept else head


def _split(workload: str) -> tuple[str, str]:
    """The builder, and the text of its options."""
    path, colon, rest = workload.rpartition(".py:")
    name, _, options = (rest if colon else workload).partition(":")
    return (f"{path}.py:{name}" if colon else name), options

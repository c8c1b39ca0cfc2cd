"""What `meshmark inspect` shows, as text, held against figures made by hand."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from harness import inspection
from harness.inspection import PipelineRequest, short


def shown(text: str, num_ranks: int | None = None, **others: Any) -> list[list[str]]:
    """The report's lines as words."""
    pipeline = None
    if num_ranks is not None:
        request = {"partition": "flops", "options": {}, "draws": False} | others.pop("request", {})
        pipeline = PipelineRequest(num_ranks=num_ranks, **request)
    written = StringIO()
    inspection.show(
        Console(width=160, file=written),
        inspection.inspect(text, pipeline=pipeline, **{"precision": "fp32", "num_micro_batches": None} | others),
    )
    return [line.split() for line in written.getvalue().splitlines()]


def row(lines: list[list[str]], *first: str) -> list[str]:
    """What follows `first` in the only line that begins with it."""
    (found,) = (line[len(first) :] for line in lines if line[: len(first)] == list(first))
    return found


def test_blocks_alike_are_one_row_and_tied_weights_count_once() -> None:
    """Of 12,704 parameters a block under AdamW in fp32 16 bytes each; 2 * 16 tokens, width 32, fp32."""
    lines = shown("gpt:size=tiny,tied=true", num_micro_batches=4)
    assert row(lines, "embedding")[:4] == ["1", "Embedding", "8,704", "0.133"]
    assert row(lines, "block0-1")[:6] == ["2", "Block", "12,704", "0.194", "2x16x32", "0.00391"]
    assert row(lines, "head")[:5] == ["1", "Head", "64", "+", "tied"]
    assert row(lines, "total")[:3] == ["4", "34,176", "0.521"]
    assert row(lines, "tied:")[0] == "embedding.token.weight"


def test_the_cut_and_its_schedule() -> None:
    """The first stage holds two micro-batches of 2 samples: 4,096 bytes of the embedding, 66,560 of the block."""
    lines = shown("gpt:size=tiny,num_micro_batches=4", 2, request={"options": {"schedule": "1f1b"}, "draws": True})
    assert row(lines, "0", "0") == ["embedding", "-", "block0", "21,408", "38.3", "0.327", "2", "0.135", "0.461"]
    assert row(lines, "1", "1")[-3] == "1"
    assert row(lines, "rank", "0")[:6] == ["0F0", "0F1", "...", "...", "0B0", "0B0"]
    imbalances = {line[0]: line[1:] for line in lines if line and line[0] in ("uniform", "parameters", "flops")}
    assert imbalances["uniform"][:3] == ["2", "2", "0"]


def test_time_is_measured_where_it_is_asked_for() -> None:
    assert not any(line[:1] == ["time"] for line in shown("gpt:size=tiny", 2))
    lines = shown("gpt:size=tiny", 2, request={"partition": "time"})
    assert len(row(lines, "time")) == 2 + 5


def test_a_workload_without_a_chain_is_shown_and_not_cut() -> None:
    lines = shown("convnet")
    assert row(lines, "total")[0] == "4"
    assert row(lines, "no", "chain:")[:2] == ["the", "workload"]
    with pytest.raises(ValueError, match="--pipeline: workload convnet has no chain"):
        shown("convnet", 2)


def test_a_model_that_needs_values_shows_its_parameters_and_why() -> None:
    first, second = shown("awkward:kind=reused")
    assert "105 parameters" in " ".join(first)
    assert " ".join(second).startswith("no table of blocks: 0 cannot be run without values: DataDependentOutput")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.b.first", "a.b.layers.0", "a.b.norm + a.head"], ["b.first", "b.layers.0", "b.norm + head"]),
        (["0", "1"], ["0", "1"]),
        (["model.blocks.0", "model.blocks.1"], ["0", "1"]),
        (["model"], ["model"]),
    ],
)
def test_names_go_without_what_they_share(names: list[str], expected: list[str]) -> None:
    assert short(names) == expected


def test_names_that_look_like_markup_stay_what_they_are() -> None:
    written = StringIO()
    table = inspection._table("own.py:[/] [bold]", "as wide as the title above it")
    Console(width=160, file=written).print(table)
    assert "own.py:[/] [bold]" in written.getvalue()

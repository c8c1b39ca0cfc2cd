"""The page about topologies: its figures from the results, its sentences from the figures, whatever they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.result import Parity, Result
from harness.topology import Placement, Topology
from harness.topology_page import page, spans_topologies
from harness.topology_sentences import sentences

PAIRS = Layout(data=4, shard=2)


def result(
    name: str,
    layout: Layout,
    seconds: float,
    *,
    nodes: int = 1,
    sent: float | None = None,
    foreseen: float | None = None,
    placement: Placement = "contiguous",
    mbits: float | None = None,
    **fields: Any,
) -> Result:
    metrics = {"step.median_seconds": seconds, "throughput.tokens_per_second": 100.0 / seconds}
    figures = {
        "communication.node_wire_bytes_per_step": sent,
        "communication.predicted_node_wire_bytes_per_step": foreseen,
        "communication.exposed_ratio": 0.25,
    }
    metrics |= {key: value for key, value in figures.items() if value is not None}
    case = Case(
        workload="gpt:size=tiny",
        implementation=name,
        layout=layout,
        topology=Topology.of(4, nodes, link_mbits=mbits, placement=placement),
        options=fields.pop("options", {}),
    )
    facts = fields.pop("facts", {})
    return Result(
        case=case, status="ok", reason=None, environment={"facts": facts}, metrics=metrics, suite="topologies", **fields
    )


def run(*, pairs_inside: float = 0.25, pairs_across: float = 1.0) -> list[Result]:
    slow: dict[str, Any] = {"nodes": 2, "mbits": 200.0}
    inside: Placement = "shard_group_inside_node"
    return [
        result("native.ddp", Layout(data=4), 0.1),
        result("native.ddp", Layout(data=4), 0.1, options={"hierarchical": "off"}),
        result("native.zero", PAIRS, 0.1, strategy="zero_3"),
        result("native.pipeline", Layout(pipeline=4), 0.1),
        result("native.ddp", Layout(data=4), 0.12, nodes=2, sent=4e6, foreseen=4e6),
        result("native.ddp", Layout(data=4), 0.2, sent=4.04e6, foreseen=4e6, facts={"levels": "2 nodes of 2"}, **slow),
        result("native.ddp", Layout(data=4), 0.3, sent=6e6, foreseen=6e6, options={"hierarchical": "off"}, **slow),
        result("native.zero", PAIRS, pairs_inside, sent=5e6, foreseen=4e6, placement=inside, strategy="zero_3", **slow),
        result(
            "native.zero", PAIRS, pairs_across, sent=9e6, foreseen=9e6, placement="scattered", strategy="zero_3", **slow
        ),
        result("native.pipeline", Layout(pipeline=4), 0.11, sent=1e6, **slow),
    ]


def test_a_run_on_one_node_alone_is_about_something_else() -> None:
    assert spans_topologies(run())
    assert not spans_topologies(run()[:4])
    assert not spans_topologies(run()[4:])


def test_sentences_are_made_of_the_figures() -> None:
    said = sentences(run())
    where = "2x2 at 200 Mbit/s"
    assert said == [
        f"{where}, shard groups inside nodes: `native.zero` (data=4 shard=2, shard_group_inside_node) keeps 0.40 and "
        "sends 5.00 MB; shard groups across nodes, in one level: `native.zero` (data=4 shard=2, scattered) keeps 0.10 "
        "and sends 9.00 MB; every case inside keeps more than any across.",
        f"{where}, least leaves a node under `native.pipeline` (pipeline=4) (1.00 MB), then under `native.ddp` "
        "(data=4) (4.04 MB); most under `native.zero` (data=4 shard=2, scattered) (9.00 MB).",
        f"{where}, most is lost by `native.zero` (data=4 shard=2, scattered) keeps 0.10 and sends 9.00 MB, "
        "`native.ddp hierarchical=off` (data=4) keeps 0.33 and sends 6.00 MB, least by `native.pipeline` (pipeline=4) "
        "keeps 0.91 and sends 1.00 MB, `native.ddp` (data=4) keeps 0.50 and sends 4.04 MB.",
        f"{where}, `native.ddp` (data=4) in two levels (2 nodes of 2) keeps 0.50 and sends 4.04 MB, in one 0.33 and "
        "6.00 MB: its step is 1.50 times as fast.",
        "4 of 5 cases put within 3% of the closed form on a node's link; farthest is `native.zero` (data=4 shard=2, "
        "shard_group_inside_node) on 2x2 at 200 Mbit/s shard_group_inside_node with 25.0%.",
    ]


def test_figures_against_what_is_usually_said_are_told_as_they_are() -> None:
    said = sentences(run(pairs_inside=2.0))
    assert said[0].endswith("every case across keeps more than any inside.")


def test_each_library_is_compared_with_itself() -> None:
    """A step that is slow on one node keeps much of its throughput wherever its groups lie."""
    slow = result("torch.fsdp", Layout(data=4), 1.0, strategy="zero_3")
    inside: dict[str, Any] = {
        "sent": 4e6,
        "placement": "shard_group_inside_node",
        "strategy": "zero_3",
        "nodes": 2,
        "mbits": 200.0,
    }
    across: dict[str, Any] = {"sent": 9e6, "strategy": "zero_3", "nodes": 2, "mbits": 200.0}
    of_torch = [
        slow,
        result("torch.fsdp", PAIRS, 1.0, strategy="zero_3"),
        result("torch.fsdp", PAIRS, 1.1, **inside),
        result("torch.fsdp", Layout(data=4), 1.5, **across),
    ]
    of_another = [
        result("other.zero", Layout(data=4), 1.0, strategy="zero_3"),
        result("other.zero", Layout(data=4), 1.0, **across),
    ]
    said = sentences([*run(), *of_torch, *of_another])[0]
    assert "other.zero" not in said
    assert said.endswith("every case inside keeps more than any across of its library.")


def test_how_far_steps_spread_is_said_where_there_are_enough() -> None:
    first, *others = run()
    steps = [0.09, 0.1, 0.11, 0.12, 0.13]  # quartiles 0.095, 0.11, 0.125, by the exclusive method
    sampled = replace(first, samples={"step_seconds": [steps, [0.01] * 5]})
    assert sentences([sampled, *others])[-2].startswith("Half of a case's steps lie within 27% of each other")


def test_how_many_were_held_against_one_process_is_said() -> None:
    first, second, *others = run()
    held = Parity(
        ok=True,
        lane="fp32",
        loss_max_relative=0.0,
        gradient_norm_max_relative=0.0,
        gradient_max_relative=0.0,
        parameter_max_relative=0.0,
        worst_parameter=None,
        first_bad_step=None,
        explanation=None,
        replicas_bit_equal=True,
    )
    parted = replace(second, parity=replace(held, ok=False), status="parity failed")
    said = sentences([replace(first, parity=held), parted, *others])
    assert "1 of 2 cases that were held against one process train its model." in said


def test_every_way_has_its_row_in_each_table() -> None:
    text = page(run(), Path("results/topologies-1"))
    assert "| way | tokens/s on one node | 2x2 | 2x2 at 200 Mbit/s |" in text
    assert "| `native.ddp` (data=4) | 1,000 | 0.83 | 0.50 |" in text
    assert "| `native.zero` (data=4 shard=2, scattered) | 1,000 | - | 0.10 |" in text
    assert "| `native.ddp` (data=4) | 4.00 (4.00) | 4.04 (4.00) |" in text
    assert "| `native.zero` (data=4 shard=2, shard_group_inside_node) | - | 5.00 (4.00)! |" in text
    assert "| `native.pipeline` (pipeline=4) | - | 1.00 |" in text
    assert "| `native.pipeline` (pipeline=4) | 25.0 | - | 25.0 |" in text
    assert "`meshmark compare results/topologies-1`" in text


@pytest.mark.parametrize("left_out", [range(1), range(4, 10)])
def test_what_was_not_measured_is_left_out(left_out: range) -> None:
    few = [each for index, each in enumerate(run()) if index not in left_out]
    assert page(few, Path("r")).startswith("# Topologies")

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from harness.layout import Coordinates, Layout
from harness.mesh import Mesh
from harness.topology import Topology

CPU = torch.device("cpu")


def test_a_ranks_own_view() -> None:
    layout = Layout(data=2, tensor=2)
    mesh = Mesh(layout, Topology(num_nodes=2, ranks_per_node=2), 3, CPU)
    assert mesh.coordinates == Coordinates(data=1, tensor=1, pipeline=0)
    assert (mesh.ranks("data"), mesh.ranks("tensor")) == ((1, 3), (2, 3))
    assert (mesh.on_one_node("data"), mesh.on_one_node("tensor")) == (False, True)


def test_layout_and_topology_must_agree() -> None:
    with pytest.raises(ValueError, match="layout data=3 needs 3 ranks, topology 1x2 has 2"):
        Mesh(Layout(data=3), Topology(ranks_per_node=2), 0, CPU)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_groups_are_made_once_for_each_lane_and_end_with_the_mesh() -> None:
    mesh = Mesh(Layout(), Topology(ranks_per_node=1), 0, CPU)
    first = mesh.group("data")
    assert mesh.group("data") is first
    assert mesh.group("data", lane=1) is not first
    assert dist.get_process_group_ranks(first) == [0]
    mesh.close()
    assert mesh.group("data") is not first
    assert mesh.device_mesh().mesh_dim_names == ("pipeline", "data", "tensor")

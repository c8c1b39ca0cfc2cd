"""Results of a small world: a model whose states are 10 + 10 + 20 MiB with 4 MiB of activations."""

from __future__ import annotations

from typing import Any

from harness.case import Case, Role
from harness.layout import Layout
from harness.result import Parity, Result
from harness.topology import Topology

MIB = 2**20
WORK = "gpt:size=17m,global_batch_size=4"
MACHINE = "machine-a"
HELD = Parity(
    ok=True,
    lane="fp32",
    loss_max_relative=1e-8,
    gradient_norm_max_relative=1e-8,
    gradient_max_relative=1e-7,
    parameter_max_relative=1e-7,
    worst_parameter="head.weight",
    first_bad_step=None,
    explanation=None,
    replicas_bit_equal=True,
    tolerance={"loss": 2e-6, "gradient_norm": 2e-6, "gradient": 6e-5, "parameter": 3e-5},
)
PARTED = Parity(
    **{
        **HELD.__dict__,
        "ok": False,
        "loss_max_relative": 0.5,
        "first_bad_step": 1,
        "explanation": "every gradient is 2 x the right one: not divided by the data degree (2)",
    }
)


def result(
    name: str,
    layout: Layout | None = None,
    *,
    strategy: str = "data_parallel",
    states_mib: tuple[float, float, float] = (10, 10, 20),
    peak_mib: float | None = 44,
    speed: float | None = 1000,
    exposed: float | None = 0.2,
    sent_mib: float | None = 10,
    node_mib: float | None = None,
    bubble: float | None = None,
    workload: str = WORK,
    topology: Topology | None = None,
    options: Any = None,
    role: Role = "subject",
    parity: Parity | None = HELD,
    machine: str = MACHINE,
    metrics: Any = None,
    samples: Any = None,
    **fields: Any,
) -> Result:
    parameters, gradients, optimizer = states_mib
    known = {
        "memory.parameter_bytes": parameters * MIB,
        "memory.gradient_bytes": gradients * MIB,
        "memory.optimizer_bytes": optimizer * MIB,
        "memory.activation_bytes": 4 * MIB,
        "memory.peak_allocated_bytes.max_rank": None if peak_mib is None else peak_mib * MIB,
        "throughput.tokens_per_second": speed,
        "communication.exposed_ratio": exposed,
        "communication.busy_ratio": exposed,
        "communication.bytes_per_step": None if sent_mib is None else sent_mib * MIB,
        "communication.node_wire_bytes_per_step": None if node_mib is None else node_mib * MIB,
        "pipeline.bubble_ratio": bubble,
        **(metrics or {}),
    }
    return Result(
        **{
            "case": Case(
                workload=workload,
                implementation=name,
                layout=layout or Layout(data=2),
                topology=topology,
                options=options or {},
                role=role,
            ),
            "status": "ok",
            "metrics": {key: float(value) for key, value in known.items() if value is not None},
            "parity": parity,
            "samples": samples or {"losses": [5.0, 4.5], "reference_losses": [5.0, 4.500001]},
            "strategy": strategy,
            "suite": "sharding",
            "suite_run": "sharding-20300101",
            "started": 1_735_689_600.0,
            "environment": {
                "device": {"kind": "cpu", "name": "a processor"},
                "physical_cores": 2,
                "machine_fingerprint": machine,
                "torch": "2.13.0",
                "commit": "0123456789abcdef",
            },
            **fields,
        }
    )


REFERENCE = result("reference", Layout(), strategy="single", role="reference", speed=800, exposed=None, sent_mib=None)
DATA_PARALLEL = result("native.ddp")
PEER = result("torch.ddp", speed=900, exposed=0.28, role="peer")
STAGE_1 = result(
    "native.zero", strategy="zero_1", options={"stage": 1}, states_mib=(10, 10, 10), peak_mib=34, speed=950
)
STAGE_2 = result(
    "native.zero", strategy="zero_2", options={"stage": 2}, states_mib=(10, 5, 10), peak_mib=29, speed=700, exposed=0.4
)
STAGE_3 = result(
    "native.zero", strategy="zero_3", options={"stage": 3}, states_mib=(5, 5, 10), peak_mib=24, speed=600, exposed=0.5
)
FLOOR = result(
    "native.floor", strategy="compute_only", role="floor", parity=None, speed=1500, exposed=None, sent_mib=None
)
WRONG = result(
    "deepspeed.zero", strategy="zero_2", speed=2000, peak_mib=20, status="parity failed", parity=PARTED, role="peer"
)
MISSING = result(
    "fairscale.oss",
    strategy="zero_1",
    status="unavailable",
    reason="FairScale is not installed",
    parity=None,
    peak_mib=None,
    speed=None,
    exposed=None,
    sent_mib=None,
    role="peer",
)
CLIPPED = result(
    "deepspeed.zero",
    strategy="zero_1",
    options={"clipping": "default"},
    speed=3000,
    exposed=0.01,
    peak_mib=21,
    other_work="gradients are clipped at 1,\nDeepSpeed's default",
    role="peer",
)
ON_ONE_NODE = (REFERENCE, DATA_PARALLEL, PEER, STAGE_1, STAGE_2, STAGE_3, FLOOR, WRONG, MISSING)

SLOW_LINK = Topology(num_nodes=2, ranks_per_node=2, link_mbits=200)
ACROSS = result(
    "native.zero",
    Layout(data=4),
    strategy="zero_3",
    options={"stage": 3},
    topology=SLOW_LINK,
    states_mib=(2.5, 2.5, 5),
    peak_mib=16,
    speed=100,
    exposed=0.9,
    node_mib=60,
)
IN_PAIRS = result(
    "native.zero",
    Layout(data=4, shard=2),
    strategy="zero_3",
    options={"stage": 3},
    topology=SLOW_LINK,
    states_mib=(5, 5, 10),
    peak_mib=26,
    speed=300,
    exposed=0.6,
    node_mib=20,
)
EVERYTHING = (*ON_ONE_NODE, ACROSS, IN_PAIRS)

"""The one interface between the harness and whose code trains: an Implementation, one instance on each rank."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from harness.layout import Layout
from harness.loading import load_from_file
from harness.mesh import Mesh
from harness.parameters import LogicalParameter, MemoryCategory
from harness.pipeline_marks import PredictedPipeline
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload

Phase = Literal["forward", "backward", "reduce", "optimizer"]
Prediction = Literal["states", "peak", "bytes"]
"""What is predicted of a rank: its parameters, gradients and optimizer states, its highest peak, what it sends."""


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one optimizer step tells, on this rank; tensors stay on the device, so that nothing waits for them.

    `loss_sum` is the sum over this rank's valid targets (only where the loss lives: the last pipeline stage) and
    `num_tokens` their count. `gradient_norm` is global and before clipping, None where it was not asked for.
    """

    loss_sum: Tensor | None
    num_tokens: int
    gradient_norm: Tensor | None
    skipped: bool
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationOutput:
    """What an evaluation tells on this rank, as StepOutput tells it of a step."""

    loss_sum: Tensor | None
    num_tokens: int


Preparation = Callable[[nn.Module, Mapping[str, Tensor]], Callable[[Tensor], None]]
"""What a dry run does with its model and the places of its gradients, by name, all of them without memory; yields what
is to be told the loss before backward."""


@dataclass(frozen=True, kw_only=True)
class DryStep:
    """A step of one rank on tensors without memory: `take` takes it, with one that is shaped as `batch`. `held` are its
    tensors that lie in what the rank holds between steps, `held_bytes` by its closed form; all others come and go."""

    held_bytes: int
    held: Sequence[Tensor]
    batch: Batch
    take: Callable[[Batch], None]


class Implementation(ABC):
    """One way to train a workload on a layout. Options are the keyword arguments of its `__init__`, with defaults.

    `module` is what the rank trains. The gradient norm is computed when the recipe needs it or while
    `tracks_gradient_norm` is set (parity steps), never else.
    """

    strategy: ClassVar[str]
    """What it does, whoever wrote it: implementations of one strategy are compared with each other. Where an option
    decides, see `strategy_of`."""
    strategy_option: ClassVar[str | None] = None
    """The option that decides its strategy, if one does: beside the strategy's name it says nothing more."""
    transport_option: ClassVar[str | None] = None
    """The option that decides whether ranks exchange over the process group or over `shared_memory`, if one does; a
    fact of that name tells over which they did. What memory that ranks share gains stands apart in tables."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """The distributions beside torch that it is made of: their versions are part of what a result is about."""
    sends_by_the_book: ClassVar[bool] = False
    """Whether its closed form of bytes is its strategy's textbook, where harness/textbook.py has none."""
    makes_gradients: ClassVar[bool] = False
    """Whether autograd makes the gradients in backward, and they go before the next forward; else they have a place."""

    module: nn.Module
    tracks_gradient_norm: bool = False

    @classmethod
    def unavailable(cls) -> str | None:
        """Why the library it needs cannot be used on this machine, or None. Called before any process starts."""
        return None

    @classmethod  # noqa: B027  most have nothing to prepare
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """What has to be done once on a machine before ranks start, so that no deadline counts it: a library's
        compilation. Whatever it raises makes the case unavailable, with the first line of why."""

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        """What is wrong with the values of these options, which have the right types, or None. Called before any
        process starts; where something is wrong, nothing of the suite runs."""
        return None

    @classmethod
    def strategy_of(cls, options: Mapping[str, Any]) -> str:
        """Its strategy under these options."""
        return cls.strategy

    @classmethod
    def comparable_strategies(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The strategies that it stands beside as a peer, its own first: one that keeps gathered parameters until
        backward also rivals those that never shard them."""
        return (cls.strategy_of(options),)

    @classmethod
    def is_floor(cls, options: Mapping[str, Any]) -> bool:
        """Whether under these options it exchanges nothing, on purpose: it trains no model then."""
        return False

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        """Why this combination cannot run, or None. Called before any process starts."""
        return None

    @classmethod
    def other_work(cls, workload: Workload, layout: Layout, options: Mapping[str, Any]) -> str | None:
        """What these options have it do otherwise than the workload's recipe says (another divisor of the loss,
        clipping, optimizer or precision of what is reduced), or None. Such a case is labelled, and its time is no
        measure for others, whether or not the parity steps show the difference."""
        return None

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Bytes per rank by category from the closed form of the strategy (each of the rank that holds most of it), or
        None."""
        return None

    @classmethod
    def predicted_late_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int:
        """How many of the predicted bytes come in the course of backward alone, as it frees activations, and go before
        the next forward: a dry run that is prepared accounts for them as they come."""
        if not cls._makes_gradients_late(workload):
            return 0
        return (cls.predicted_memory(workload, parameters, layout, options) or {}).get("gradients", 0)

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        """Where a rank computes otherwise than autograd left to itself, which makes each gradient beside the place
        where it belongs; and the late bytes, as they come."""
        return _without_gradients if cls._makes_gradients_late(workload) else as_it_is

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]] | None:
        """Where a rank has only a part of the model, or one unit of it at a time: of each rank that may need most what
        makes its step of the whole model, built without memory, which it may cut; none where that is not known. None
        where every rank runs the whole model, one micro-batch after another: the harness does so by itself, see
        `dry_run_preparation`."""
        return None if layout.tensor * layout.pipeline == 1 else ()

    @classmethod
    def _makes_gradients_late(cls, workload: Workload) -> bool:
        """Not where a second micro-batch's forward finds those of the first, nor where autograd casts them."""
        alike = workload.precision.gradient == workload.precision.compute
        return cls.makes_gradients and alike and workload.training.num_micro_batches == 1

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """Bytes one rank sends in one step, from the closed form of the strategy (the largest rank's), or None."""
        return None

    @classmethod
    def beyond_the_textbook(cls, device: torch.device, options: Mapping[str, Any]) -> str | None:
        """Why a rank sends more in a step on such devices than the textbook of its strategy has it send
        (harness/textbook.py), for those who wonder: what follows "because". None where it does not, or nobody knows."""
        return None

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        """Bytes that each rank sends to each other one in one step, on gloo, from the closed form of the strategy, or
        None. What does not grow with the model may be left out."""
        return None

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        """Why what it does not predict is not known, for those who wonder about an empty cell: what follows "because".
        A dry run that fails says so by itself."""
        return {}

    @classmethod
    def predicted_pipeline(
        cls, workload: Workload, layout: Layout, options: Mapping[str, Any]
    ) -> PredictedPipeline | None:
        """What theory says of its schedule, where it has one, or None."""
        return None

    @abstractmethod
    def __init__(
        self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, **options: Any
    ) -> None: ...

    @abstractmethod
    def train_step(self, batch: Batch) -> StepOutput:
        """One optimizer step on this rank's share. Collective over the mesh."""

    def evaluate(self, batch: Batch) -> EvaluationOutput | None:
        """The loss of this rank's share, of any number of micro-batches, with the model in evaluation mode; None where
        the implementation does not evaluate. Training goes on afterwards as if nothing had happened
        (harness/evaluation.py). Collective over the mesh."""
        return None

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step, normalised, *before* clipping, whole, by logical name, on the CPU; a
        parameter that nobody used is absent. Collective; never timed."""

    @abstractmethod
    def full_parameters(self) -> dict[str, Tensor]:
        """The weights (the fp32 masters where there are any), whole, by logical name, on the CPU. Collective; never
        timed."""

    def full_buffers(self) -> dict[str, Tensor]:
        """The model's buffers, by name, on the CPU. Collective; never timed."""
        return {name: buffer.detach().cpu().clone() for name, buffer in self.module.named_buffers()}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]] | None:
        """What the optimizer remembers of each parameter that it trains: by logical name, then by torch's name for it:
        `exp_avg`, `exp_avg_sq` and the scalar `step` of AdamW, `momentum_buffer` of SGD, zeros before its first update.
        Whole, on the CPU, whatever was sharded; a parameter of which nothing is remembered, or without elements, is
        absent. Collective; never timed. None from an implementation that does not tell."""
        return None

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        """The parameters, by name, of which it takes a gradient for granted in every step: where the first one leaves
        one out, the harness says so by name (harness/required_gradients.py). None by itself; one without elements has
        no gradient to take."""
        return {}

    def facts(self) -> Mapping[str, str]:
        """What it settled on that its options do not tell (a fallback it took, say); kept in the result."""
        return {}

    def replicated_tensors(self) -> Iterable[Tensor]:
        """What every rank of the data axis must hold bit for bit alike between steps."""
        return self.module.parameters()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        """The tensors this rank holds between steps, by category; the harness counts each storage once. A tensor that
        lies in memory the allocator did not hand out (a mapping) belongs here too."""
        return {"parameters": self.module.parameters()}

    def close(self) -> None:  # noqa: B027  most have nothing to release
        """Release what outlives the object: mappings, threads, engines."""


def phase(name: Phase) -> AbstractContextManager[Any]:
    """Marks a part of `train_step` for the instruments; costs about a microsecond when none is looking."""
    return torch.profiler.record_function(f"meshmark.{name}")


def lending(category: MemoryCategory) -> AbstractContextManager[Any]:
    """Marks allocations within a step as memory of the category: for what comes and goes while the step is on its way,
    so that `memory_tensors` cannot list it."""
    return torch.profiler.record_function(f"meshmark.lending.{category}")


def as_it_is(model: nn.Module, gradients: Mapping[str, Tensor]) -> Callable[[Tensor], None]:
    """The preparation that changes nothing."""
    return lambda loss: None


def _without_gradients(model: nn.Module, gradients: Mapping[str, Tensor]) -> Callable[[Tensor], None]:
    for parameter in model.parameters():
        parameter.grad = None
    return lambda loss: None


class CollectiveObserver(Protocol):
    """Where a transport that bypasses torch.distributed reports its collectives to the communication instrument.

    While `null` is set the transport must complete everything at once and move nothing. In a delayed step, which plays
    a longer link, an operation has `arrived` some time after its launch: until then it must not complete, and hold up
    nobody but whoever waits for it.
    """

    @property
    def null(self) -> bool: ...

    def launched(self, operation: str, ranks: tuple[int, ...], tensor: Tensor, wire_bytes: int, transport: str) -> int:
        """A collective on `tensor` starts now; returns a ticket."""
        ...

    def arrived(self, ticket: int) -> bool:
        """Whether what the peers have put in may be looked at. A transport that does not ask is not delayed."""
        ...

    def completed(self, ticket: int) -> None:
        """It has completed."""
        ...

    def blocked(self, ticket: int) -> AbstractContextManager[None]:
        """While inside, the caller does nothing but wait for, or itself carry out, this collective."""
        ...


def load(name: str) -> type[Implementation]:
    """The class behind `native.ddp` (`impls/native/ddp.py`) or `path/to/file.py:Class`. ValueError for an unknown name;
    ImportError, or whatever its library raises, if the file cannot be imported."""
    if ".py:" in name:
        found = load_from_file(name)
        if not (inspect.isclass(found) and issubclass(found, Implementation)):
            raise ValueError(f"implementation {name!r}: expected a subclass of Implementation, got {found!r}")
        return found
    if name not in names():
        raise ValueError(f"implementation {name!r}: expected one of {', '.join(names())}, or path/to/file.py:Class")
    module = importlib.import_module(f"impls.{name}")
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Implementation) and value.__module__ == module.__name__
    ]
    assert len(classes) == 1, f"{module.__file__} must define one Implementation, found {len(classes)}"
    return classes[0]


def names() -> list[str]:
    """Every implementation found under impls/, by name."""
    package = importlib.import_module("impls")
    found = []
    for family in pkgutil.iter_modules(package.__path__):
        if not family.ispkg:
            found.append(family.name)
            continue
        inside = importlib.import_module(f"impls.{family.name}").__path__
        found += [f"{family.name}.{module.name}" for module in pkgutil.iter_modules(inside) if not module.ispkg]
    return sorted(found)


def options_of(implementation: type[Any]) -> dict[str, Any]:
    """The option names of an implementation with their defaults; with its parent's where it takes `**options` to pass
    them on."""
    fixed = {"self", "workload", "layout", "mesh", "device"}
    passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    options: dict[str, Any] = {}
    for kind in implementation.__mro__:
        if "__init__" in vars(kind):
            parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
            own = {p.name: p.default for p in parameters if p.name not in fixed and p.kind not in passed_on}
            options = own | options
            if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
                break
    return options

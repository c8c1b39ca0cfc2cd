"""What a rank should need, before anything runs: the strategy's closed form for its states, and for activations a dry
run on tensors without memory, of one micro-batch or, where the implementation has dry steps, of a rank's whole step.

The dry run executes forward and backward under torch's FakeTensorMode, where each operation yields shapes only, and
counts the storages alive. It sees what the device's kernels save for backward, the choice of attention kernel included,
but not what a kernel allocates and frees within itself, nor what the optimizer needs while it steps. A library that
looks out for such tensors may take another path: transformers then builds the attention mask it would else do without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.implementation import DryStep, Implementation, Preparation, as_it_is, phase
from harness.layout import Layout
from harness.measure.attribution import MARK_PREFIX
from harness.measure.memory import METRIC_NAMES
from harness.parameters import LogicalParameter, logical_parameters
from harness.tensors_in_use import tensors_in
from harness.workload import MicroBatch, Workload

_CPU = torch.device("cpu")
_FORWARD = f"{MARK_PREFIX}forward"
_LENDING = f"{MARK_PREFIX}lending."


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Bytes of one micro-batch beyond parameters, their gradients, buffers and the batch itself: alive when forward
    ends (what backward will read, and the loss), and at most alive during forward and backward. Or the reason why they
    are not known."""

    activation_bytes: int | None = None
    peak_bytes: int | None = None
    reason: str | None = None


def dry_run(
    workload: Workload, num_samples: int, *, device: torch.device = _CPU, prepare: Preparation = as_it_is
) -> DryRun:
    """One micro-batch of `num_samples` of the whole model in one process, on tensors without memory. Gradients are
    taken to exist already, as they do under a strategy that keeps them in flat buffers."""
    if num_samples < 1:
        raise ValueError(f"memory: num_samples must be at least 1, got {num_samples}")
    with _reasons() as failed:
        sample = workload.dataset.sample(0)
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
            return _run(workload, sample, num_samples, device, prepare)
    return failed[0]


def dry_run_of_ranks(
    workload: Workload, steps: Sequence[Callable[[nn.Module], DryStep]], *, device: torch.device = _CPU
) -> DryRun:
    """A whole step of each of `steps`: of the ranks the most activations, and the highest peak, in which what a rank
    holds between steps is contained."""

    if not steps:
        return DryRun(reason="no rank's step is known")
    with _reasons() as failed, torch.random.fork_rng(devices=[]):
        taken = [_take(workload, make, device) for make in steps]
        return DryRun(
            activation_bytes=max(activations for activations, _ in taken), peak_bytes=max(peak for _, peak in taken)
        )
    return failed[0]


def predicted(
    workload: Workload,
    implementation: type[Implementation],
    layout: Layout,
    options: Mapping[str, Any],
    *,
    device: torch.device = _CPU,
) -> dict[str, float]:
    """`memory.predicted_*_bytes`, each of the rank that needs most of it; what is not known is absent.

    The states are the strategy's closed form. Where there are no dry steps the peak is the sum of the states and the
    most that a micro-batch needs beside them; of states that come late, as activations go, it counts what the dry run
    has come to hold by then. Elsewhere activations and the peak are those of the ranks' dry steps.
    """
    return predicted_with_reason(workload, implementation, layout, options, device=device)[0]


def predicted_with_reason(
    workload: Workload,
    implementation: type[Implementation],
    layout: Layout,
    options: Mapping[str, Any],
    *,
    device: torch.device = _CPU,
) -> tuple[dict[str, float], str | None]:
    """As `predicted`; and where there is no peak, what the dry run says about it."""
    states = implementation.predicted_memory(workload, registry(workload), layout, options)
    figures: dict[str, float] = {}
    for category, num_bytes in (states or {}).items():
        figures[f"memory.predicted_{METRIC_NAMES[category]}"] = num_bytes
    steps = implementation.dry_steps(workload, registry(workload), layout, options)
    if steps is not None:
        run = dry_run_of_ranks(workload, steps, device=device)
        if run.activation_bytes is not None and run.peak_bytes is not None:
            figures["memory.predicted_activation_bytes"] = run.activation_bytes
            figures["memory.predicted_peak_bytes"] = run.peak_bytes
        return figures, run.reason
    prepare = implementation.dry_run_preparation(workload, registry(workload), layout, options)
    run = dry_run(workload, largest_micro_batch(workload, layout.data), device=device, prepare=prepare)
    if run.activation_bytes is not None:
        figures["memory.predicted_activation_bytes"] = run.activation_bytes
    if run.peak_bytes is not None and states is not None:
        late = implementation.predicted_late_bytes(workload, registry(workload), layout, options)
        figures["memory.predicted_peak_bytes"] = sum(states.values()) - late + run.peak_bytes
    return figures, run.reason or (None if states is not None else "its states are not known")


def registry(workload: Workload) -> tuple[LogicalParameter, ...]:
    """The workload's parameters, without the memory to hold them."""
    with FakeTensorMode():
        return logical_parameters(fake_model(workload, _CPU), workload.decays)


def largest_micro_batch(workload: Workload, data_degree: int) -> int:
    """The most samples that any of `data_degree` ranks feeds forward at once."""
    of_all_ranks = -(-workload.training.global_batch_size // workload.training.num_micro_batches)
    return -(-of_all_ranks // data_degree)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while they are alive; `apart` do not count. `bytes_of` are
    those of each `owner`: whoever that was when they were made."""

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self.owner: object = None
        self.bytes_of: Counter[object] = Counter()
        self._apart = [tensor.untyped_storage() for tensor in apart]  # held, so that their ids stay theirs
        self._alive: dict[int, Any] = {id(storage): storage for storage in self._apart}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As harness.tensors_in_use.Operations: to skip the compiler is to import it."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: UntypedStorage) -> None:
        if id(storage) not in self._alive:
            num_bytes = storage.nbytes()
            self._alive[id(storage)] = ref(storage, partial(self._forget, id(storage), num_bytes, self.owner))
            self.bytes += num_bytes
            self.bytes_of[self.owner] += num_bytes
            self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int, num_bytes: int, owner: object, _: Any) -> None:
        del self._alive[key]
        self.bytes -= num_bytes
        self.bytes_of[owner] -= num_bytes


class PhasedStorages(LiveStorages):
    """Tells activations from the rest as the memory instrument does (harness/measure/attribution.py): made in a forward
    mark, lent for no other purpose, and alive at its end. `most_activations` is the most of them at a time."""

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__(apart)
        self.most_activations = 0
        self._marks: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.profiler._record_function_enter_new.default:
            self._marks.append(args[0])
        elif func is torch.ops.profiler._record_function_exit._RecordFunction and self._marks.pop() == _FORWARD:
            self.most_activations = max(self.most_activations, self.bytes_of[_FORWARD])
        self.owner = next((mark for mark in reversed(self._marks) if mark.startswith((_FORWARD, _LENDING))), None)
        return output


@contextmanager
def _reasons() -> Iterator[list[DryRun]]:
    """A user's model may do anything that has no meaning without values: read one, call another library."""
    failed: list[DryRun] = []
    try:
        yield failed
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        failed.append(DryRun(reason=f"the model does not run without values: {type(error).__name__}: {reason}"))


def _take(workload: Workload, make: Callable[[nn.Module], DryStep], device: torch.device) -> tuple[int, int]:
    """Bytes of activations, and of everything, at most."""
    without_values = FakeTensorMode(allow_non_fake_inputs=True)
    with without_values:
        module = fake_model(workload, device)
    _keep_random_states(workload, module, device)
    step = make(module)  # which may look at the model in other ways
    with without_values:
        micro_batches = tuple(
            replace(one, inputs=_zeros_like(one.inputs, device), targets=_zeros_like(one.targets, device))
            for one in step.batch.micro_batches
        )
        of_batch = [tensor for one in micro_batches for tensor in (one.inputs, one.targets)]
        with PhasedStorages([*step.held, *of_batch]) as live:
            step.take(replace(step.batch, micro_batches=micro_batches))
    return live.most_activations, step.held_bytes + live.peak


def _run(
    workload: Workload, sample: tuple[Tensor, Tensor], num_samples: int, device: torch.device, prepare: Preparation
) -> DryRun:
    model = fake_model(workload, device)
    _keep_random_states(workload, model, device)
    inputs, targets = (
        _in_compute_precision(workload, torch.zeros((num_samples, *tensor.shape), dtype=tensor.dtype, device=device))
        for tensor in sample
    )
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    tell_loss = prepare(model, gradients)
    with PhasedStorages([*parameters, *gradients.values(), *model.buffers(), inputs, targets]) as live:
        micro_batch = MicroBatch(inputs=inputs, targets=targets, num_tokens=1, seed=0)
        with phase("forward"):
            loss = workload.loss_sum(model, micro_batch)
        tell_loss(loss)
        loss.backward()
    return DryRun(activation_bytes=live.most_activations, peak_bytes=live.peak)


def fake_model(workload: Workload, device: torch.device) -> nn.Module:
    """The model on `device` in compute precision; inside FakeTensorMode, whose tensors Module.to() cannot convert."""
    model = replace(workload, weights=None, fixed_dtypes=True).build_model()
    converted: dict[Tensor, Tensor] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in converted:
                tensor = _in_compute_precision(workload, parameter.detach()).to(device)
                converted[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            setattr(module, name, converted[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _in_compute_precision(workload, buffer).to(device))
    return model


def _zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.zeros_like(tensor, device=device)


def _in_compute_precision(workload: Workload, tensor: Tensor) -> Tensor:
    cast = tensor.is_floating_point() and not workload.fixed_dtypes
    return tensor.to(workload.precision.compute) if cast else tensor


def _keep_random_states(workload: Workload, model: nn.Module, device: torch.device) -> None:
    """What torch's checkpoint keeps beside a block's inputs and no operation yields: the CPU generator's state."""
    if not workload.training.activation_checkpointing or device.type != "cpu":
        return
    num_bytes = torch.get_rng_state().nbytes

    def keep(block: nn.Module, inputs: object, outputs: object) -> None:
        """Until the block's backward is over, which it is for sure when the gradient of its input is there."""
        state = [torch.empty(num_bytes, dtype=torch.uint8)]
        given, made = ([t for t in tensors_in(value) if t.requires_grad] for value in (inputs, outputs))
        for tensor in (given or made)[:1]:
            tensor.register_hook(lambda gradient: state.clear())

    for block in workload.blocks(model):
        block.register_forward_hook(keep)

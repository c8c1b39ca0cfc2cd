"""Workload: model + data + loss + optimizer + global batch: the work that every implementation must do identically.

Two rules live here because breaking them is what most parallel training bugs are:
a loss is a *sum* over tokens together with the *count* of the whole global batch, divided once;
a batch is a pure function of (seed, step), of which each data rank takes its own slice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import random_regions
from harness.data import IGNORE_INDEX, Dataset, shuffled_index
from harness.overlaps import kept_tensors, share_elements
from harness.parameters import decay_matrices
from harness.precision import PRECISIONS, Precision
from harness.sequence_cuts import check_positions
from harness.tensor_plan import TensorPlanner, check_divides, check_hooks, check_ties, resolve
from harness.tensor_regions import check_regions
from harness.typed_values import quoted
from harness.uninitialised import Uninitialised

OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine"]
Scaling = Literal["none", "linear", "sqrt"]
_Check = tuple[str, str, Callable[[Any], bool]]


def _is_integer(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(names: str, choices: tuple[str, ...]) -> _Check:
    return names, f"one of {', '.join(choices)}", lambda value: value in choices


# Field names, what each must be, and whether a value is.
_RECIPE_CHECKS: tuple[_Check, ...] = (
    ("global_batch_size num_micro_batches total_steps", "an integer of at least 1", lambda x: _is_integer(x, 1)),
    ("warmup_steps", "an integer of at least 0", lambda x: _is_integer(x, 0)),
    ("seed", "an integer", _is_integer),
    ("base_global_batch_size", "an integer of at least 1, or none", lambda x: x is None or _is_integer(x, 1)),
    _one_of("optimizer", get_args(OptimizerName)),
    _one_of("schedule", get_args(ScheduleName)),
    _one_of("learning_rate_scaling", get_args(Scaling)),
    (
        "learning_rate weight_decay epsilon momentum final_learning_rate_ratio",
        "a finite number of at least 0",
        lambda x: _is_number(x) and 0 <= x < math.inf,
    ),
    ("beta1 beta2", "a number of at least 0 and below 1", lambda x: _is_number(x) and 0 <= x < 1),
    ("clip_norm", "a number above 0, or none", lambda x: x is None or (_is_number(x) and x > 0)),
    ("skip_nonfinite activation_checkpointing", "true or false", lambda x: isinstance(x, bool)),
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training recipe of a workload, the same for every implementation.

    `clip_norm` bounds the global gradient norm; `skip_nonfinite` skips a step whose global norm is not finite, on all
    ranks together (the learning rate follows *successful* updates only). `learning_rate_scaling` multiplies the rate by
    global_batch_size / base_global_batch_size (linear: Goyal et al. 2017) or its square root (Hoffer et al. 2017).
    """

    global_batch_size: int = 8
    num_micro_batches: int = 1
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    learning_rate_scaling: Scaling = "none"
    base_global_batch_size: int | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    clip_norm: float | None = None
    skip_nonfinite: bool = False
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    total_steps: int = 1000
    final_learning_rate_ratio: float = 0.1
    activation_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for names, expected, is_valid in _RECIPE_CHECKS:
            for name in names.split():
                if not is_valid(value := getattr(self, name)):
                    raise ValueError(f"{name} must be {expected}, got {quoted(value)}")
        if self.num_micro_batches > self.global_batch_size:
            raise ValueError(
                f"num_micro_batches must be at most global_batch_size, got {self.num_micro_batches} micro-batches "
                f"for a global batch of {self.global_batch_size}"
            )
        if self.learning_rate_scaling != "none" and self.base_global_batch_size is None:
            raise ValueError(
                f"learning_rate_scaling={self.learning_rate_scaling} needs base_global_batch_size, got none"
            )

    def learning_rate_at(self, num_updates: int) -> float:
        """The learning rate of the update that follows `num_updates` successful ones."""
        peak = self.learning_rate
        if self.learning_rate_scaling != "none" and self.base_global_batch_size:
            ratio = self.global_batch_size / self.base_global_batch_size
            peak *= ratio if self.learning_rate_scaling == "linear" else math.sqrt(ratio)
        if num_updates < self.warmup_steps:
            return peak * (num_updates + 1) / self.warmup_steps
        if self.schedule == "constant":
            return peak
        done = min(1.0, (num_updates - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        falling = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return peak * (self.final_learning_rate_ratio + (1.0 - self.final_learning_rate_ratio) * falling)

    @property
    def checks_norm(self) -> bool:
        """Whether the recipe itself needs the global gradient norm at each step."""
        return self.clip_norm is not None or self.skip_nonfinite

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The running means that the optimizer keeps of each element, as torch calls them."""
        if self.optimizer == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum > 0 else ()

    @property
    def num_moments(self) -> int:
        return len(self.moment_names)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one data rank feeds forward at once. `num_tokens` counts its valid targets; `seed` fixes its dropout."""

    inputs: Tensor  # (samples, ...)
    targets: Tensor  # (samples, ...)
    num_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One data rank's share of one optimizer step. `global_num_tokens` is the divisor of the loss: the valid targets of
    all ranks and micro-batches together."""

    step: int
    micro_batches: tuple[MicroBatch, ...]
    global_num_tokens: int

    @property
    def num_tokens(self) -> int:
        """This share's valid targets."""
        return sum(micro_batch.num_tokens for micro_batch in self.micro_batches)

    def to(self, device: torch.device) -> Batch:
        """The same share on another device."""
        moved = (
            replace(micro_batch, inputs=micro_batch.inputs.to(device), targets=micro_batch.targets.to(device))
            for micro_batch in self.micro_batches
        )
        return self if device.type == "cpu" else replace(self, micro_batches=tuple(moved))


def count_targets(targets: Tensor) -> int:
    """How many targets count: those not ignored where targets are class indices, else one per sample."""
    if targets.dtype.is_floating_point:
        return len(targets)
    return int((targets != IGNORE_INDEX).sum())


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over valid targets of the cross-entropy of `outputs` (..., classes) in at least fp32; a scalar."""
    logits = outputs.flatten(0, -2)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def children_of_sequential(model: nn.Module) -> Sequence[nn.Module]:
    """The blocks of a model that is an nn.Sequential; any other model is one block."""
    return list(model.children()) if isinstance(model, nn.Sequential) else [model]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`model` builds the module with fp32 weights from torch's default generator. `loss` is a sum over valid targets.
    `blocks` are the units that activation checkpointing recomputes and sharding strategies gather. `tensor_plan` says
    how tensor parallelism may cut the model; without it only whole models are trained. `chain` yields
    the model's blocks where each takes what the one before gives, and nothing else: what a pipeline may cut.

    `uses_random_numbers` says that a forward draws some, from torch's default generator, and `draws_in_regions` that it
    does so between layers that the tensor plan cuts. `depends_on_chunks` says that a sample's result depends on which
    samples share its micro-batch or on the order of random numbers (local BatchNorm, dropout): the reference then
    replays the very chunks of the data ranks.
    `leaves_parameters_unused` says that some step does not reach every trainable parameter on every rank.
    `fixed_dtypes` keeps the dtypes the model was built with, whatever the precision.
    """

    name: str
    model: Callable[[], nn.Module]
    dataset: Dataset
    training: Training = field(default_factory=Training)
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
    count: Callable[[Tensor], int] = count_targets
    decays: Callable[[str, Tensor], bool] = decay_matrices
    blocks: Callable[[nn.Module], Sequence[nn.Module]] = children_of_sequential
    tensor_plan: TensorPlanner | None = None
    chain: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    unit: Literal["tokens", "samples"] = "tokens"
    uses_random_numbers: bool = False
    draws_in_regions: bool = False
    depends_on_chunks: bool = False
    synchronise_batch_norm: bool = False
    leaves_parameters_unused: bool = False
    fixed_dtypes: bool = False
    flops_per_unit: float | None = None
    precision: Precision = PRECISIONS["fp32"]
    weights: Path | None = None

    def build_model(self) -> nn.Module:
        """The module on the CPU with its starting weights (read from `weights` where given), in compute precision. A
        parameter whose elements do not fill one piece of memory, each once, is made contiguous; ValueError where it
        shares some with another parameter or with a tensor that a module keeps. A cast gives every parameter, and every
        buffer, memory of its own, whatever it shared."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.training.seed)
            model = self.model()
        if self.weights is not None:
            model.load_state_dict(torch.load(self.weights, weights_only=True, mmap=True))
        _refuse_shared_gaps(model)
        if not self.fixed_dtypes:
            model.to(self.precision.compute)
        _close_gaps(model)
        return self.ready_to_train(model)

    def ready_to_train(self, model: nn.Module) -> nn.Module:
        """`model`, with what the recipe and the comparison ask of its blocks."""
        self.checkpoint_activations(model)
        if self.uses_random_numbers and self.chain is not None:
            random_regions.give_states(self.chain(model))
        return model.train()

    def checkpoint_activations(self, model: nn.Module) -> None:
        """Has the blocks of `model` computed again in backward, where the recipe says so."""
        if self.training.activation_checkpointing:
            _refuse_batch_norm(model)
            for block in self.blocks(model):
                # The instance attribute shadows the method: parameter names stay as they are.
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def model_without_memory(self) -> nn.Module:
        """The module as the builder makes it, on torch's meta device."""
        with torch.device("meta"), Uninitialised():
            return self.model()

    def buffer_bytes(self) -> int:
        """What the module's buffers take in compute precision."""
        return sum(
            buffer.numel() * self.dtype_in_training(buffer.dtype).itemsize
            for buffer in self.model_without_memory().buffers()
        )

    def dtype_in_training(self, dtype: torch.dtype) -> torch.dtype:
        """What becomes of a tensor of the model or of a sample that is built in `dtype`."""
        return self.precision.compute if dtype.is_floating_point and not self.fixed_dtypes else dtype

    def batch(self, step: int, *, data_rank: int = 0, data_degree: int = 1) -> Batch:
        """The share of `data_rank` in optimizer step `step` (from 0). Micro-batch i of the whole is the union of the
        ranks' micro-batches i, so every data degree sees the same samples in the same order."""
        size, num_micro_batches = self.training.global_batch_size, self.training.num_micro_batches
        micro_batches = []
        for index in range(num_micro_batches):
            first, last = _share(size, index, num_micro_batches)
            lower, upper = _share(last - first, data_rank, data_degree)
            positions = range(step * size + first + lower, step * size + first + upper)
            # A rank without samples borrows one, at weight zero, so that it takes part in every collective.
            inputs, targets = self._samples(positions or range(positions.start, positions.start + 1))
            micro_batches.append(
                MicroBatch(
                    inputs=inputs,
                    targets=targets,
                    num_tokens=self.count(targets) if positions else 0,
                    seed=((self.training.seed * 1_000_003 + step) * 8191 + data_rank) * 1021 + index,
                )
            )
        return Batch(step=step, micro_batches=tuple(micro_batches), global_num_tokens=self.global_num_tokens(step))

    def global_num_tokens(self, step: int) -> int:
        """The number of valid targets in the whole global batch of `step`."""
        size = self.training.global_batch_size
        indices = (
            shuffled_index(position, len(self.dataset), self.training.seed)
            for position in range(step * size, (step + 1) * size)
        )
        return sum(self.count(self.dataset.sample(index)[1].unsqueeze(0)) for index in indices)

    def begin_forward(self, micro_batch: MicroBatch) -> None:
        """What comes draws the random numbers of this micro-batch."""
        if self.uses_random_numbers:
            random_regions.begin(micro_batch.seed)

    def loss_sum(self, model: Callable[[Tensor], Tensor], micro_batch: MicroBatch) -> Tensor:
        """Forward through `model` (the module or whatever wraps it) and the *sum* of the losses; a scalar."""
        self.begin_forward(micro_batch)
        loss = self.loss(model(micro_batch.inputs), micro_batch.targets)
        return loss if micro_batch.num_tokens else loss * 0.0

    def fits_tensor_degree(self, tensor_degree: int, *, cuts_sequence: bool = False) -> str | None:
        """Why the model cannot be cut among `tensor_degree` ranks, or None; with `cuts_sequence` what lies between the
        cut layers is cut along the sequence."""
        if self.tensor_plan is None:
            return f"workload {self.name} has no tensor plan: it does not say which layers to cut, and how"
        if self.draws_in_regions and tensor_degree > 1:
            return "dropout within a cut layer draws other masks than one process does, so that nothing can be compared"
        model = in_compute_precision(self, self.model_without_memory())
        smallest = self.training.global_batch_size // self.training.num_micro_batches
        try:
            plan = resolve(model, self.tensor_plan(model))
            check_divides(model, plan, tensor_degree)
            check_ties(model, plan)
            if tensor_degree > 1:
                check_hooks(model, plan)
                inputs = self._samples(range(min(max(smallest, 1), 2)))[0]
                check_regions(model, plan, inputs, cuts_sequence=cuts_sequence)
            if tensor_degree > 1 and cuts_sequence:
                model = in_compute_precision(self, self.model_without_memory())
                check_positions(model, plan, self.blocks(model), inputs)
        except ValueError as error:
            return str(error)
        return None

    def fits_data_degree(self, data_degree: int) -> str | None:
        """Why the global batch cannot be shared out over `data_degree` ranks, or None."""
        smallest = self.training.global_batch_size // self.training.num_micro_batches
        if smallest < data_degree and (self.depends_on_chunks or self.synchronise_batch_norm):
            return (
                f"batch statistics need a sample on every rank: a micro-batch of {smallest} samples "
                f"cannot be shared by {data_degree} data ranks"
            )
        return None

    def _samples(self, positions: range) -> tuple[Tensor, Tensor]:
        samples = [
            self.dataset.sample(shuffled_index(position, len(self.dataset), self.training.seed))
            for position in positions
        ]
        inputs, targets = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
        return inputs.to(self.dtype_in_training(inputs.dtype)), targets.to(self.dtype_in_training(targets.dtype))


def _close_gaps(model: nn.Module) -> None:
    """torch's fused optimizers take a parameter's memory for one piece on the CPU: they step what lies between the
    elements of a column cut out of a matrix, say, and not all of them. Casts close such gaps in any case."""
    for parameter in model.parameters():
        if _has_gaps(parameter):
            parameter.data = parameter.data.contiguous()


def _refuse_shared_gaps(model: nn.Module) -> None:
    """Closing them would part the parameter from whoever has its elements as well."""
    gapped = {name: parameter for name, parameter in model.named_parameters() if _has_gaps(parameter)}
    others = [*model.named_parameters(), *kept_tensors(model)] if gapped else []
    for name, parameter in gapped.items():
        for other, tensor in others:
            if tensor is not parameter and share_elements(parameter, tensor):
                raise ValueError(
                    f"parameter {name} has gaps between its elements and shares some of them with {other}: expected it "
                    f"contiguous, or alone"
                )


def _has_gaps(parameter: Tensor) -> bool:
    return torch.empty_like(parameter, device="meta").stride() != parameter.stride()  # kept where they are dense


def _refuse_batch_norm(model: nn.Module) -> None:
    """A recomputed forward would update the running statistics a second time."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ValueError(f"activation_checkpointing updates BatchNorm's running statistics twice; {name} has some")


def _share(length: int, index: int, count: int) -> tuple[int, int]:
    """[first, last) of part `index` when `length` things are cut into `count` parts that differ by at most one."""
    return length * index // count, length * (index + 1) // count


TRAINING_OPTIONS = frozenset(f.name for f in fields(Training))


def in_compute_precision(workload: Workload, model: nn.Module) -> nn.Module:
    """`model` with the dtypes that it is trained in, in training mode."""
    if not workload.fixed_dtypes:
        model.to(workload.precision.compute)
    return model.train()


def in_precision(workload: Workload, precision: str, weights: Path | None = None) -> Workload:
    """The same work in another precision, starting from the weights in the file `weights`. Where a workload fixes its
    dtypes, gradients have those of their parameters and there are no masters."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    chosen = PRECISIONS[precision]
    if workload.fixed_dtypes:
        chosen = replace(chosen, gradient=chosen.compute, master=None)
    return replace(workload, precision=chosen, weights=weights)

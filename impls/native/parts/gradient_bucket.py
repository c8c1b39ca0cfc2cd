"""One bucket of one rank under data parallel: where gradients gather, are summed and are stepped from.

[Note: Small gradients] Python's attention to one gradient costs more than copying a small one. Those stay where
autograd made them, in `parameter.grad`, until their bucket is due, and come over together; large ones are written to
the bucket by their layer, or copied while they are still in the cache.

[Note: Unused parameters] A parameter unused on some ranks counts as zero there; one unused on all must keep no
gradient at all: no decay, no momentum. Telling the two apart takes no further exchange: an unused parameter's
first element is sent as -0.0, a used one's never is, and only -0.0 + -0.0 is -0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.workload import Workload
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import BucketPlan, Segment, flatten_parameters, view_like
from impls.native.parts.flat_optimizer import FlatOptimizer


class GradientBucket:
    """One bucket of one rank: its gradients (num_elements,), its optimizer, and how far this step has come. Gradients
    of fewer than `small_bytes` are small."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        gradients: Tensor,
        workload: Workload,
        device: torch.device,
        *,
        small_bytes: int,
    ) -> None:
        self.plan = plan
        self.gradients = gradients
        self.parameters = {s.parameter.name: parameters[s.parameter.name] for s in plan.segments}
        flat = flatten_parameters(plan, self.parameters, device)
        self.optimizer = FlatOptimizer(plan, flat, workload.training, workload.precision.master)
        self.gradient_views = {
            segment.parameter.name: view_like(gradients, segment, parameters[segment.parameter.name])
            for segment in plan.segments
        }
        self.small = {name: self.parameters[name] for name, v in self.gradient_views.items() if v.nbytes < small_bytes}
        self.filled: set[str] = set()
        self.unused: set[str] = set()
        self.announcements = Announcements(segment.parameter.name for segment in plan.segments)
        self.pieces: Sequence[Piece] = ()
        self.scale_left: Tensor | None = None  # by which clipping has divided the gradients
        self._pointers = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        self._segments = {segment.parameter.name: segment for segment in plan.segments}
        starts = [segment.start for segment in plan.segments if segment.start < segment.stop]
        self._first_elements = torch.tensor(starts, dtype=torch.int64, device=gradients.device)
        self._zeros = torch.zeros(len(starts), dtype=gradients.dtype, device=gradients.device)

    def start_step(self) -> None:
        self.filled.clear()
        self.unused = set()
        self.scale_left = None
        self.announcements.begin()
        for parameter in self.small.values():
            parameter.grad = None  # from a backward pass outside of any step

    def gather(self) -> None:
        """See [Note: Small gradients]: copies the first of a step, adds the later micro-batches'."""
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        further: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, parameter in self.small.items():
            if (gradient := parameter.grad) is None:
                continue
            parameter.grad = None
            views, gradients = further if name in self.filled else fresh
            views.append(self.gradient_views[name])
            gradients.append(gradient)
            self.filled.add(name)
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        if further[0]:
            torch._foreach_add_(*further)

    def mark_unused(self) -> None:
        """See [Note: Unused parameters]."""
        if self._first_elements.numel():
            self.gradients.index_add_(0, self._first_elements, self._zeros)  # -0.0 + 0.0 is 0.0
        for segment in self._locally_unused():
            self.gradients[segment.start : segment.stop].zero_()
            self.gradients[segment.start : segment.start + 1].fill_(-0.0)

    def take(self, pieces: Sequence[Piece]) -> None:
        """The sum is there: keeps its pieces and finds out which parameters nobody used."""
        self.pieces = pieces
        self.unused = {segment.parameter.name for segment in self._locally_unused() if self._is_marked(segment)}

    def update(self, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        self.scale_left = self.optimizer.step(
            self.pieces, learning_rate, gradient_scale=gradient_scale, unused=self.unused
        )

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Copies on the CPU of the sums in this rank's own buffer as they were before clipping, of used parameters."""
        for name, view in self.gradient_views.items():
            if name not in self.unused:
                yield name, view.cpu().clone() if self.scale_left is None else (view * self.scale_left).cpu()

    def whole(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by name, with a copy on the CPU of what `flat` (num_elements,) says of it: the optimizer's
        masters, say."""
        for name, parameter in self.parameters.items():
            yield name, view_like(flat, self._segments[name], parameter).cpu().clone()

    def replaced(self, current: Mapping[str, nn.Parameter]) -> str | None:
        """The first parameter that is another one, or has other memory, among the model's `current` ones."""
        for name, pointer in self._pointers.items():
            parameter = current.get(name)
            if parameter is not self.parameters[name] or (parameter.numel() and parameter.data_ptr() != pointer):
                return name
        return None

    def _locally_unused(self) -> list[Segment]:
        if len(self.filled) == len(self._segments):
            return []
        return [segment for name, segment in self._segments.items() if name not in self.filled]

    def _is_marked(self, segment: Segment) -> bool:
        if segment.start == segment.stop:
            return True
        piece = next(piece for piece in self.pieces if piece.start <= segment.start < piece.stop)
        first = piece.values[segment.start - piece.start]
        return bool(first.eq(0) & first.signbit())


class Announcements:
    """Of the parameters named, as autograd announces their gradients. One that is announced again (each re-entrant
    checkpoint is a backward of its own) may be so once more: then `all_are_made` is not known before backward ends."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.begin()

    def begin(self) -> None:
        self._awaited, self._came_again = set(self._names), False

    def announce(self, name: str) -> None:
        self._came_again |= name not in self._awaited
        self._awaited.discard(name)

    @property
    def all_are_made(self) -> bool:
        return not self._awaited and not self._came_again


def refusal_of_late(whose: str, name: str) -> str:
    return (
        f"{whose}: {name} got a further gradient after its bucket's reduction had begun; where re-entrant checkpoints "
        f"use it several times, pass use_reentrant=False"
    )

"""Whether what lies between the regions of a tensor plan works on each position of a sequence by itself, found by a
pass without values: with sequence parallelism a rank has a piece of the sequence there.

    first cut block -> [ region ] -> norms, sums, uncut layers: position by position -> [ region ] -> ... -> head

Gradients of uncut parameters are summed over ranks where these see pieces of the sequence or slices, and nowhere else:
a parameter that is used on both sides of a border, or past the head, is refused as well.

The pass is made with a length that nothing else in the model has, so that in every tensor the dims that go along the
sequence are known by their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.tensor_plan import ResolvedPlan, RowParallel, VocabularyParallel
from harness.tensors_in_use import storage_key, tensors_in

_META = torch.device("meta")
_SEQUENCE_DIM = 1
_MAKES_NEW = ("new_", "empty", "zeros", "ones", "full")
# These take a dim to say where elements are to be found, and bring none of them together.
_REARRANGES = {
    *("transpose", "permute", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes", "unbind", "t"),
    *("stack", "expand", "alias", "detach"),
}
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}  # where the left factor stands
_MIXES = ("batch_norm", "group_norm", "convolution", "attention", "fft", "lstm", "gru", "rnn")


class _Part(Enum):
    """Of the pass."""

    BEFORE = "before the sequence is cut"
    BETWEEN = "where a rank has a piece of the sequence"
    AFTER = "past the head, where it is whole again"


class AcrossSequence(ValueError):
    """A model whose sequence cannot be cut; the message is the reason, in one line."""


def check_positions(model: nn.Module, plan: ResolvedPlan, blocks: Sequence[nn.Module], inputs: Tensor) -> None:
    """AcrossSequence, which names the module, where something between the input of the first of `blocks` that holds a
    region and the vocabulary-parallel head, without which nothing joins the pieces, brings positions of the sequence
    together, or meets what is as long as all of it. `model` lies on the meta device and keeps the hooks that watch it;
    `inputs` (samples, length, ...)."""
    heads = {
        name
        for name, role in plan.roles.items()
        if isinstance(role, VocabularyParallel) and isinstance(model.get_submodule(name), nn.Linear)
    }
    if not heads:
        raise AcrossSequence(
            "sequence_parallel needs a vocabulary-parallel head, which puts the sequence together again: the tensor "
            "plan has none"
        )
    regions = [model.get_submodule(region) for region in plan.regions]
    with_regions = [block for block in blocks if any(region in set(block.modules()) for region in regions)]
    if not with_regions:
        raise AcrossSequence("sequence_parallel: no block of the workload holds a module of cut layers")
    length = _length_of_its_own(model, inputs)
    watch = _Watch(model, plan, with_regions[0], heads, length)
    try:
        with _META, watch:
            outputs = model(inputs.narrow(_SEQUENCE_DIM, 0, length).to(_META))
    except AcrossSequence:
        raise
    except Exception as error:  # whatever a model does with tensors that have no values
        raise AcrossSequence(
            "sequence_parallel: whether what lies between cut layers works position by position cannot be seen: the "
            f"model does not run without values ({type(error).__name__})"
        ) from error
    if watch.pieces_in(outputs):
        raise AcrossSequence("sequence_parallel: the model yields a piece of the sequence, past the head that joins it")


def _length_of_its_own(model: nn.Module, inputs: Tensor) -> int:
    """The largest prime up to the sequences' length that divides no other size."""
    if inputs.ndim < 2:
        raise AcrossSequence(f"sequence_parallel: expected inputs (samples, length, ...), got {tuple(inputs.shape)}")
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {len(inputs), *inputs.shape[2:]}
    longest = inputs.shape[_SEQUENCE_DIM]
    for length in range(longest, 1, -1):
        is_prime = all(length % factor for factor in range(2, length))
        if is_prime and not any(size % length == 0 for size in sizes if size):
            return length
    raise AcrossSequence(
        f"sequence_parallel: sequences of {longest} are too short to tell their positions from the model's other sizes"
    )


class _Watch(TorchDispatchMode):
    """Follows the pieces through a pass. Tensors are known by their storage."""

    def __init__(
        self, model: nn.Module, plan: ResolvedPlan, first_block: nn.Module, heads: set[str], length: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no annotations
        self._length = length
        self._pieces: set[int] = set()
        self._kept: list[Tensor] = []  # so that no storage's address is used twice
        self._entered: list[str] = []  # the modules that the pass is in
        self._num_whole = 0  # of them those in which the sequence is whole
        self._part = _Part.BEFORE
        cut = {f"{name}.weight" for name in plan.roles}
        cut |= {f"{name}.bias" for name, role in plan.roles.items() if not isinstance(role, RowParallel)}
        self._uncut = {
            storage_key(parameter): name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in cut
        }
        self._used_in: dict[int, _Part] = {}  # by storage: of parameters, and where what is no piece was made
        for name, module in model.named_modules():
            joins = name in heads or name in plan.regions
            module.register_forward_pre_hook(partial(self._enter, name, joins), prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(self._leave, joins, name in heads))
        first_block.register_forward_pre_hook(self._split, prepend=True, with_kwargs=True)

    def pieces_in(self, value: object) -> list[Tensor]:
        return [tensor for tensor in tensors_in(value) if storage_key(tensor) in self._pieces]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As harness.tensors_in_use.Operations: to skip the compiler is to import it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pieces = [] if self._num_whole else self.pieces_in((args, kwargs))
        name = func._schema.name.rpartition("::")[2].rstrip("_")
        if pieces:
            self._check(name, func, args, kwargs)
        self._check_parts(name, (args, kwargs), bool(pieces))
        output = func(*args, **kwargs)
        self._kept.extend(tensors_in(output))
        if pieces:
            self._take(name, output)
        elif not self._num_whole:
            for tensor in tensors_in(output):
                self._used_in.setdefault(storage_key(tensor), self._part)
        return output

    def _check_parts(self, name: str, given: object, meets_piece: bool) -> None:
        """Gradients of what an operation is given are summands where they are summed, and whole elsewhere."""
        part = _Part.BETWEEN if self._num_whole else self._part
        for tensor in tensors_in(given):
            key = storage_key(tensor)
            if key in self._pieces:
                continue
            if (parameter := self._uncut.get(key)) is not None:
                first = self._used_in.setdefault(key, part)
                if first is not part:
                    raise AcrossSequence(f"sequence_parallel: {parameter} is used {first.value}, and {part.value}")
                if part is _Part.AFTER:
                    raise AcrossSequence(
                        f"sequence_parallel: {parameter} is used {part.value}: expected no parameters there"
                    )
            elif tensor.requires_grad and key in self._used_in:
                if meets_piece and self._used_in[key] is _Part.BEFORE:
                    self._refuse(f"{name} meets a tensor {self._shape(tensor)} made {_Part.BEFORE.value}")
                if part is _Part.AFTER and self._used_in[key] is _Part.BETWEEN:
                    raise AcrossSequence(
                        f"sequence_parallel: {name} takes {part.value}, a tensor {self._shape(tensor)} that was made "
                        f"{self._used_in[key].value}"
                    )

    def _check(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """What is given to an operation on pieces."""
        for tensor in tensors_in((args, kwargs)):
            if storage_key(tensor) not in self._pieces and self._along(tensor):
                self._refuse(f"{name} meets a tensor {self._shape(tensor)} of the whole sequence")
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if any(mixing in name for mixing in _MIXES):
            self._refuse(f"{name} works across positions")
        if any(size % self._length == 0 for size in given.get("normalized_shape", ())):
            self._refuse(f"{name} normalises over positions")
        if name in _PRODUCTS and args[_PRODUCTS[name]].shape[-1] % self._length == 0:
            self._refuse(f"{name} sums over positions")
        dims = [given[key] for key in ("dim", "dims") if given.get(key) is not None]
        flat = {dim for value in dims for dim in (value if isinstance(value, list | tuple) else [value])}
        for tensor in self.pieces_in(args[:1]) if name not in _REARRANGES else ():
            if self._along(tensor) & {dim % tensor.ndim for dim in flat}:
                self._refuse(f"{name} works along the sequence")

    def _take(self, name: str, output: object) -> None:
        """What comes of pieces is pieces, if the sequence is in it, once."""
        for tensor in tensors_in(output):
            num_along = len(self._along(tensor))
            if not num_along and name.startswith(_MAKES_NEW):
                continue  # it takes no more than the dtype from them
            if num_along != 1 and tensor.numel():
                self._refuse(f"{name} {'pairs positions' if num_along else 'brings positions together'}")
            self._pieces.add(storage_key(tensor))

    def _along(self, tensor: Tensor) -> set[int]:
        """The dims that go along the sequence."""
        return {dim for dim, size in enumerate(tensor.shape) if size and size % self._length == 0}

    def _shape(self, tensor: Tensor) -> str:
        along = self._along(tensor)
        return f"({', '.join('length' if dim in along else str(size) for dim, size in enumerate(tensor.shape))})"

    def _refuse(self, what: str) -> None:
        where = next((name for name in reversed(self._entered) if name), "the model")
        raise AcrossSequence(
            f"sequence_parallel: {where} {what} between cut layers, where a rank has a piece of the sequence: expected "
            f"what works on each position by itself"
        )

    def _split(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._part is not _Part.BEFORE:
            raise AcrossSequence(
                "sequence_parallel: the first block with cut layers is called more than once, and cuts the sequence "
                "each time: expected one call"
            )
        self._part = _Part.BETWEEN
        activations = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        self._pieces |= {storage_key(tensor) for tensor in activations[:1]}

    def _enter(self, name: str, joins: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._entered.append(name)
        if joins and not self._num_whole and len({storage_key(t) for t in self.pieces_in((args, kwargs))}) > 1:
            self._refuse("is given a second piece beside its input")
        self._num_whole += joins

    def _leave(self, joins: bool, is_head: bool, module: nn.Module, args: Any, output: Any) -> None:
        self._entered.pop()
        self._num_whole -= joins
        if is_head:
            self._part = _Part.AFTER
        if joins and not is_head and not self._num_whole:
            self._pieces |= {storage_key(tensor) for tensor in tensors_in(output)}

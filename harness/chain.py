"""A workload's model as a chain of blocks that can be cut into stages: who holds what, and what crosses the borders.

Each block takes what the one before gives and nothing else. A pass without values checks that: a block that looks at
what an earlier one was given or has made, past the border, or at another block's parameter is refused by name, and so
is a buffer that one block writes and another uses: each stage would have its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.tensors_in_use import Operations, storage_key, tensors_in
from harness.workload import Workload, in_compute_precision

Border = tuple["TensorShape", ...]
"""The tensors that cross a border with one micro-batch, in order."""

_CHANGED_LEAF = "leaf Variable that requires grad is being used in an in-place operation"  # in torch's message
_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """`carries_gradient` if the stage after sends its gradient back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    carries_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, carries_gradient=tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The blocks of `model` in order, and what each is called in it."""

    model: nn.Module
    blocks: tuple[nn.Module, ...]
    names: tuple[str, ...]


class NoChain(ValueError):
    """A model that cannot be cut into stages; the message is the reason, in one line."""


def why_not(workload: Workload, num_stages: int, *, max_tensors: int | None = None) -> str | None:
    """Why the model cannot be cut into `num_stages` of which each hands on at most `max_tensors`, or None."""
    try:
        chain = chain_of(workload)
        num_blocks = len(chain.blocks)
        if workload.synchronise_batch_norm:
            return "BatchNorm would have to be synchronised by each stage for itself, which no stage does yet"
        if num_blocks < num_stages:
            return f"{num_stages} stages need as many blocks, got the {num_blocks} of {workload.name}"
        if workload.uses_random_numbers and (name := _made_anew(chain)) is not None:
            return (
                f"pipeline: the block of {name} is no module of the model itself, so that one process cannot draw its "
                f"random numbers: have the model hold and call it"
            )
        found = borders(workload, workload.batch(0).micro_batches[0].inputs)
        for name, border in zip(chain.names, found, strict=True):
            if max_tensors is not None and len(border) > max_tensors:
                return f"pipeline: {name} may hand on at most {max_tensors} tensors, got {len(border)}"
    except NoChain as error:
        return str(error)
    return None


def chain_of(workload: Workload, build: Callable[[], nn.Module] | None = None) -> Chain:
    """The chain of the model that `build` makes; by itself that is one on the meta device, in compute precision.
    NoChain where the workload names no blocks, they cannot be built, or a parameter belongs to none of them."""
    if workload.chain is None:
        raise NoChain(f"workload {workload.name} has no chain: it does not say which blocks follow each other")
    with reasons("pipeline: the chain cannot be built without values"):
        model = in_compute_precision(workload, workload.model_without_memory()) if build is None else build()
        blocks = tuple(workload.chain(model))
    names = _names(model, blocks)
    of_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in of_blocks:
            raise NoChain(f"pipeline: parameter {name} belongs to none of the blocks {', '.join(names)}")
    return Chain(model=model, blocks=blocks, names=names)


def run_blocks(blocks: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What comes out of `blocks`, one after another, as in nn.Sequential: several tensors are one tuple."""
    value = as_value(inputs)
    for block in blocks:
        value = block(value)
    return list(value) if isinstance(value, tuple | list) else [value]


def as_value(tensors: Sequence[Tensor]) -> Any:
    """How a block, or the loss, gets what the block before has handed on."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def run_block(chain: Chain, index: int, inputs: Sequence[Tensor], how: str = "without values") -> list[Tensor]:
    """What comes out of block `index`; whatever it raises is a NoChain that names it, and `how` it was run."""
    name = chain.names[index]
    try:
        with reasons(f"pipeline: {name} cannot be run {how}"):
            outputs = run_blocks([chain.blocks[index]], inputs)
    except NoChain as error:
        if _CHANGED_LEAF in str(error):
            told = "changes in place what it is given, which a stage receives: use operations out of place there"
            raise NoChain(f"pipeline: {name} {told} (inplace=False)") from error
        raise
    for tensor in outputs:
        if not isinstance(tensor, Tensor):
            raise NoChain(f"pipeline: {name}: blocks may hand on tensors, got {type(tensor).__name__}")
    return outputs


def as_received(handed: Sequence[Tensor]) -> list[Tensor]:
    """What a stage has of the tensors that the one before hands on: leaves."""
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in handed]


def borders(
    workload: Workload, inputs: Tensor, build: Callable[[], nn.Module] | None = None, *, evaluates: bool = False
) -> tuple[Border, ...]:
    """What each block of the chain hands to the next, and the last one yields, for a micro-batch like `inputs`, in
    training or where the model `evaluates`; `build` as for `chain_of`. NoChain where a block needs more than that, or
    cannot be run without values."""
    chain = chain_of(workload, build)
    for module in (chain.model, *chain.blocks) if evaluates else ():
        module.eval()
    parameters = {storage_key(p): name for name, p in chain.model.named_parameters()}
    buffers = _SharedBuffers(chain)
    made_by: dict[int, int] = {}  # storage: the block that made it
    kept: list[Tensor] = [inputs.to(_META)]  # so that no storage's address is used twice
    handed, given = kept[:], storage_key(kept[0])
    found: list[Border] = []
    for index, block in enumerate(chain.blocks):
        own = {storage_key(tensor) for tensor in (*block.parameters(), *handed)}

        def note(value: object, index: int = index, own: set[int] = own) -> None:
            for tensor in tensors_in(value):
                storage = storage_key(tensor)
                if storage in own or buffers.note(storage, index):
                    continue
                user = chain.names[index]
                if storage == given:
                    raise NoChain(f"pipeline: {user} uses what {chain.names[0]} is given, past the blocks between them")
                if storage in parameters:
                    raise NoChain(f"pipeline: {user} uses {parameters[storage]}, which is another block's")
                if made_by.get(storage, index) != index:
                    maker = chain.names[made_by[storage]]
                    raise NoChain(f"pipeline: {user} uses what {maker} has made, past the blocks between them")

        def made(value: object, index: int = index) -> None:
            for tensor in tensors_in(value):
                made_by.setdefault(storage_key(tensor), index)
                kept.append(tensor)

        recorded = torch.no_grad() if evaluates else nullcontext()
        with recorded, torch.device(_META), Operations(note, made):
            handed = run_block(chain, index, handed)
        buffers.end_block(index)
        found.append(tuple(map(TensorShape.of, handed)))
        handed = as_received(handed)
    return tuple(found)


class _SharedBuffers:
    """Which blocks use which buffers, and which of them write there. NoChain where another one uses what one writes."""

    def __init__(self, chain: Chain) -> None:
        self._blocks = chain.names
        self._buffers = {storage_key(buffer): (name, buffer) for name, buffer in chain.model.named_buffers()}
        self._versions = {storage: buffer._version for storage, (_, buffer) in self._buffers.items()}
        self._users: dict[int, dict[int, None]] = {}
        self._writers: dict[int, int] = {}

    def note(self, storage: int, index: int) -> bool:
        """Whether it is a buffer's, which block `index` then uses."""
        if storage in self._buffers:
            self._users.setdefault(storage, {})[index] = None
        return storage in self._buffers

    def end_block(self, index: int) -> None:
        """After each block's forward."""
        for storage, (name, buffer) in self._buffers.items():
            if buffer._version != self._versions[storage]:
                self._versions[storage], self._writers[storage] = buffer._version, index
            writer = self._writers.get(storage)
            other = next((user for user in self._users.get(storage, ()) if user != writer), None)
            if writer is not None and other is not None:
                raise NoChain(
                    f"pipeline: {self._blocks[writer]} writes the buffer {name}, which {self._blocks[other]} uses: "
                    f"each stage would have its own"
                )


def holders_of(
    model: nn.Module, blocks: Sequence[nn.Module], stages: Sequence[range], rank_of: Sequence[int]
) -> dict[str, list[int]]:
    """The ranks whose stages use each parameter, by its first name; `rank_of` says where each stage is."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[str, list[int]] = {}
    for rank, of_stage in zip(rank_of, stages, strict=True):
        for index in of_stage:
            for parameter in blocks[index].parameters():
                ranks = holders.setdefault(first[id(parameter)], [])
                if rank not in ranks:
                    ranks.append(rank)
    return holders


def keep_parameters(model: nn.Module, names: Collection[str]) -> None:
    """Lets go of all other parameters."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if first[id(parameter)] not in names:
                setattr(module, kind, None)


@contextmanager
def reasons(doing: str) -> Iterator[None]:
    """Turns whatever a user's module raises into a NoChain of one line, `doing` before it."""
    try:
        yield
    except NoChain:
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise NoChain(f"{doing}: {type(error).__name__}: {told}") from error


def _made_anew(chain: Chain) -> str | None:
    """The first block that `Workload.chain` makes itself: the model's own forward does not call it."""
    modules = set(chain.model.modules())
    return next((name for name, block in zip(chain.names, chain.blocks, strict=True) if block not in modules), None)


def _names(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """A block that only holds modules of the model together is called by those that have parameters."""
    by_module = {module: name for name, module in model.named_modules()}
    names = []
    for index, block in enumerate(blocks):
        inner = [by_module[m] for m in block.children() if m in by_module and any(True for _ in m.parameters())]
        names.append(by_module.get(block) or " + ".join(inner) or f"block {index}")
    return tuple(names)

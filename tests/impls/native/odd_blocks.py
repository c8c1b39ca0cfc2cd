"""Workloads whose blocks do more than hand a tensor on: a loss kept for later, outputs in a plain dataclass, writes to
their own parameters, function transforms, views kept from construction; and BatchNorm over all ranks beside parameters
that some use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.data import shuffled_index
from harness.datasets import Tensors
from harness.workload import Training, Workload

WIDTH, SIDE_WIDTH = 6, 29
Blocks = Callable[[nn.Module], list[nn.Module]]


class Routed(nn.Module):
    """Keeps a loss of its own, made of the router's weight after the output: autograd turns to it first."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(WIDTH, 2) / 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(x @ self.router, dim=-1)
        output: Tensor = x + sum(shares[:, [i]] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))
        self.balance = (torch.softmax(torch.tanh(x) @ self.router, dim=-1).square() * self.experts[0].bias[:2]).sum()
        return output


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.head(x), torch.stack([block.balance for block in self.blocks]).sum()


@dataclass
class State:
    hidden: Tensor


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2), nn.Parameter(torch.randn(WIDTH))

    def forward(self, state: State) -> State:
        return State(state.hidden + torch.tanh(state.hidden @ self.weight + self.bias))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Packing() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        return state.hidden


class Clamped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Mirrored(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mirrors = [self.weight.detach().t()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.mirrors[0]


class Normed(nn.Module):
    """Synchronised BatchNorm, and layers beside it that a rank uses if it has a positive sample."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.sometimes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.after(torch.tanh(self.norm(self.before(x))))
        return _with_sometimes(self.sometimes, x, output)


class Parcel:
    """Nobody looks into it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class PackedNorm(nn.Module):
    """Synchronised BatchNorm in a block that nobody sees a tensor leave: a rank without a positive sample uses no
    parameter of it behind the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, affine=False)
        self.sometimes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, parcel: Parcel) -> Parcel:
        output = torch.tanh(self.norm(self.before(parcel.hidden)))
        return Parcel(_with_sometimes(self.sometimes, parcel.hidden, output))


class Sometimes(nn.Module):
    """Only a rank with a positive sample uses it, or calls it at all."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, parcel: Parcel) -> Parcel:
        return Parcel(_with_sometimes(self.sometimes, parcel.hidden, parcel.hidden))


class FrozenNorm(nn.BatchNorm1d):
    """Never trains, whatever the model does."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


class PackedNorms(nn.Module):
    """Norms in blocks, and in the model itself between blocks that not every rank calls; some that stay as they are,
    and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in (*[PackedNorm] * 3, *[Sometimes] * 2, PackedNorm))
        self.frozen = nn.ModuleList(FrozenNorm(WIDTH, affine=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH, affine=False) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.frozen:
            x = _beside_sign(x, norm(x))
        # The same statistics twice in a forward.
        parcel = Parcel(_beside_sign(x, self.norms[0](torch.tanh(self.norms[0](x)))))
        for block, norm in zip(self.blocks, self.norms[1:], strict=True):
            if isinstance(block, PackedNorm) or _uses_sometimes(x):
                parcel = block(parcel)
            parcel = Parcel(_beside_sign(x, norm(parcel.hidden)))
        return parcel.hidden


def _uses_sometimes(x: Tensor) -> bool:
    return x.is_meta or bool((x[:, 0] > 0).any())


def _beside_sign(x: Tensor, output: Tensor) -> Tensor:
    """`output` with the first column of `x`, which says what a rank uses."""
    return torch.cat([x[:, [0]], output[:, 1:]], dim=-1)


def _with_sometimes(layers: nn.ModuleList, x: Tensor, output: Tensor) -> Tensor:
    if _uses_sometimes(x):
        positive = x[:, [0]].detach().sign().clamp(min=0)
        for layer in layers:
            output = output + positive * torch.tanh(layer(x))
    return _beside_sign(x, output)


class WithSide(nn.Module):
    """Gives out a second output, which the loss does not use, and multiplies by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = torch.sparse.mm(torch.eye(WIDTH, dtype=x.dtype).to_sparse(), x.t()).t() if not x.is_meta else x
        return x, torch.softmax(x[:, :1].expand(-1, SIDE_WIDTH) * 1.5, dim=-1)


class Noted(nn.Linear):
    """Puts a loss of its own, made after its output, into the list that it is given, and saves under hooks of its own:
    copies on another device, or, as here, the very tensors."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, losses: list[Tensor]) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            output = torch.tanh(super().forward(x))
            losses.append((torch.tanh(x) @ self.weight).square().sum())
        return output


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noted() for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses=losses)
        return x, torch.stack(losses).sum()


class Transformed(nn.Linear):
    """Adds the gradient of an energy, as score models do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight + self.bias).square().sum()

        output: Tensor = x - torch.func.grad(energy)(x)
        return output


def transformed() -> Workload:
    return _workload(lambda: nn.Sequential(*(Transformed() for _ in range(4))), lambda model: list(model.children()))


def noting() -> Workload:
    return _workload(Noting, lambda model: list(model.blocks), _squares_and_own)


def with_side() -> Workload:
    return _workload(
        WithSide, lambda model: list(model.blocks), lambda outputs, wanted: (outputs[0] - wanted).square().sum()
    )


def mixture(activation_checkpointing: bool = False) -> Workload:
    return _workload(
        Mixture,
        lambda model: list(model.blocks),
        _squares_and_own,
        activation_checkpointing=activation_checkpointing,
    )


def packed(activation_checkpointing: bool = False) -> Workload:
    return _workload(Packed, lambda model: list(model.blocks), activation_checkpointing=activation_checkpointing)


def clamped() -> Workload:
    return _workload(lambda: nn.Sequential(*(Clamped() for _ in range(3))), lambda model: list(model.children()))


def mirrored() -> Workload:
    return _workload(lambda: nn.Sequential(Mirrored(), Mirrored()), lambda model: list(model.children()))


def normed(num_micro_batches: int = 1) -> Workload:
    """On two ranks one has positive samples, and the other has none."""
    return _workload(
        lambda: nn.Sequential(*(Normed() for _ in range(4))),
        lambda model: list(model.children()),
        num_micro_batches=num_micro_batches,
        synchronise_batch_norm=True,
    )


def packed_norms(num_micro_batches: int = 1) -> Workload:
    """As `normed`."""
    return _workload(
        PackedNorms,
        lambda model: list(model.blocks),
        num_micro_batches=num_micro_batches,
        synchronise_batch_norm=True,
    )


def _squares(outputs: Tensor, wanted: Tensor) -> Tensor:
    return (outputs - wanted).square().sum()


def _squares_and_own(outputs: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    return _squares(outputs[0], wanted) + outputs[1]


def _workload(
    model: Callable[[], nn.Module],
    blocks: Blocks,
    loss: Callable[..., Tensor] = _squares,
    *,
    num_micro_batches: int = 1,
    synchronise_batch_norm: bool = False,
    activation_checkpointing: bool = False,
) -> Workload:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = (torch.randn(64, WIDTH, generator=generator) for _ in range(2))
    if synchronise_batch_norm:
        position_of = torch.tensor([shuffled_index(position, 64, seed=0) for position in range(64)]).argsort()
        is_second_rank = position_of // (8 // num_micro_batches) % 2
        inputs[:, 0] = inputs[:, 0].abs() * (1 - 2 * is_second_rank)
    return Workload(
        name="odd_blocks",
        model=model,
        dataset=Tensors(inputs, targets),
        loss=loss,
        training=Training(
            global_batch_size=16,
            learning_rate=1e-2,
            num_micro_batches=num_micro_batches,
            activation_checkpointing=activation_checkpointing,
        ),
        unit="samples",
        blocks=blocks,
        synchronise_batch_norm=synchronise_batch_norm,
    )

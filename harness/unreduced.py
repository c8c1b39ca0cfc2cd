"""Gradients that no rank has summed: what each parameter, or each element of a shard, holds is one rank's share alone.

Unlike a missing all-reduce, which leaves rank 0's share everywhere (harness.hypotheses), an owner that steps what was
never reduced to it leaves another rank's share in another place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from harness.shares import Share

IsExplained = Callable[[str, Tensor], bool]
"""Whether a gradient that is given in its place closes the gap of the named one."""


def whose_shares(
    gradients: Mapping[str, Tensor], shares: Sequence[Share], is_explained: IsExplained, unit: str
) -> str | None:
    """What `gradients` of one step are made of, where that is single ranks' shares; completes "every gradient ..."."""
    for factor, of_ranks in _scaled_sums(shares, unit):
        pieces = {name: _of_ranks(gradient, name, of_ranks) for name, gradient in gradients.items()}
        if all(any(is_explained(name, piece) for piece in pieces[name]) for name in pieces):
            return f"is one rank's share alone{factor}"
        if all(is_explained(name, _nearest(gradients[name], pieces[name])) for name in pieces):
            return f"is, element by element, one rank's share alone{factor}"
    return None


def _scaled_sums(shares: Sequence[Share], unit: str) -> Iterator[tuple[str, list[dict[str, Tensor]]]]:
    """Each rank's own sum of gradients, over the global count; then times the number of ranks, as a mean over ranks
    that was left out expects it; then over its own count."""
    ranks = sorted({share.data_rank for share in shares})
    if len(ranks) == 1:
        return
    total = sum(share.num_tokens for share in shares)
    counts = {rank: sum(share.num_tokens for share in shares if share.data_rank == rank) for rank in ranks}
    scales = {
        "": dict.fromkeys(ranks, 1 / total),
        f", multiplied by the data degree ({len(ranks)})": dict.fromkeys(ranks, len(ranks) / total),
        f", divided by its own {unit} count ({', '.join(map(str, counts.values()))})": {
            rank: 1 / count if count else 0.0 for rank, count in counts.items()
        },
    }
    for text, scale in scales.items():
        sums: dict[int, dict[str, Tensor]] = {rank: {} for rank in ranks}
        for share in shares:
            own = sums[share.data_rank]
            for name, gradient in share.gradients.items():
                part = gradient.double() * scale[share.data_rank]
                own[name] = own[name] + part if name in own else part
        yield text, list(sums.values())


def _of_ranks(gradient: Tensor, name: str, of_ranks: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """(ranks, ...): a rank that does not use the parameter has zeros."""
    return torch.stack([own.get(name, torch.zeros_like(gradient, dtype=torch.float64)) for own in of_ranks])


def _nearest(gradient: Tensor, pieces: Tensor) -> Tensor:
    """Of each element that rank's which comes closest."""
    nearest = (pieces - gradient.double()).abs().min(0).indices
    return pieces.gather(0, nearest.unsqueeze(0)).squeeze(0)

"""Workloads that are unfriendly on purpose, tiny, one property each: `awkward:kind=tied`.

A right implementation equals one process on all of them. Each kind's docstring says which property it holds it to.
"""

from __future__ import annotations

from harness.models._options import check_choice
from harness.models.awkward import counts, recipe, state, use, weights
from harness.workload import Workload

_BUILDERS = {
    builder.__name__: builder
    for builder in (
        counts.unequal_tokens,
        counts.uneven_samples,
        counts.padding_micro_batch,
        counts.few_micro_batches,
        counts.vocabulary,
        weights.tied,
        weights.alias,
        weights.biases,
        weights.odd_shapes,
        weights.frozen,
        weights.decay_groups,
        weights.gqa,
        weights.non_contiguous,
        weights.mixed_dtypes,
        use.unused,
        use.reused,
        use.rank_dependent,
        use.sometimes_unused,
        state.batch_norm,
        state.synchronised_batch_norm,
        state.dropout,
        state.buffers,
        recipe.sgd,
        recipe.clipped,
        recipe.schedule,
        recipe.checkpointed,
        recipe.nonfinite,
    )
}
KINDS = tuple(_BUILDERS)


def workload(kind: str = "unequal_tokens") -> Workload:
    """The workload of one of KINDS, with a training recipe of its own. ValueError for any other kind."""
    check_choice("kind", kind, KINDS)
    return _BUILDERS[kind]()


def description(kind: str) -> str:
    """One line: what the kind is, and what it holds an implementation to."""
    check_choice("kind", kind, KINDS)
    return (_BUILDERS[kind].__doc__ or "").splitlines()[0]

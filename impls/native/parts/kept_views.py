"""Views of parameters that a module keeps from its construction (`self.transposed = self.weight.t()`): once parameters
live in flat buffers, such a view shows their old memory, which nobody trains."""

from __future__ import annotations

from torch import Tensor, nn

from harness.overlaps import Extent, extent_of, kept_tensors, overlap, share_elements


class KeptViews:
    """Those of `module` as it was built, to be looked for before its parameters are taken over. ValueError if
    parameters have elements in common: they would be torn apart."""

    def __init__(self, module: nn.Module, whose: str) -> None:
        self._module, self._whose = module, whose
        placed = sorted((extent_of(parameter), name) for name, parameter in module.named_parameters())
        parameters = dict(module.named_parameters())
        near: list[tuple[Extent, str]] = []  # those that reach as far as the next one's begin
        for extent, other in placed:
            near = [(before, one) for before, one in near if before.end > extent.begin]
            for _, one in near:
                if share_elements(parameters[one], parameters[other]):
                    raise ValueError(
                        f"{whose}: expected parameters that share no memory, got {one} and {other}, which do; "
                        f"make them one"
                    )
            near.append((extent, other))
        self._suspects: dict[str, tuple[Tensor, str]] = {}  # where it is kept: the view and its parameter
        for place, tensor in kept_tensors(module):
            kept = extent_of(tensor)
            for extent, name in placed:
                if overlap(kept, extent) and share_elements(tensor, parameters[name]):
                    self._suspects[place] = tensor, name
                    break

    def check(self) -> None:
        """After a forward, which may have put others in their place. RuntimeError if one is kept still."""
        still = dict(kept_tensors(self._module)) if self._suspects else {}
        for place, (view, parameter) in self._suspects.items():
            if still.get(place) is view:
                raise RuntimeError(
                    f"{self._whose}: {place} was made of parameter {parameter} when the model was built, and "
                    f"parameters have moved to flat buffers since: make it in forward"
                )
        self._suspects = {}

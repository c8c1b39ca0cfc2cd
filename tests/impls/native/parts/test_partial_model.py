"""Models of which a rank builds its own parameters alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from harness import models
from harness.datasets import Tensors
from harness.workload import Workload, in_precision
from impls.native.parts.partial_model import build_partly

CPU = torch.device("cpu")


def stored(text: str, directory: Path, precision: str = "fp32") -> Workload:
    """The workload, its starting weights in a file."""
    path = directory / "weights.pt"
    torch.save(models.load(text).build_model().state_dict(), path)
    return in_precision(models.load(text), precision, path)


def memory(model: nn.Module) -> int:
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}.values())


def test_only_the_parameters_named_take_memory(tmp_path: Path) -> None:
    workload = stored("gpt:size=tiny,tied=true,activation_checkpointing=true", tmp_path, "bf16")
    whole = workload.build_model()
    names = {name for name, _ in whole.named_parameters() if name.startswith(("block1.", "embedding.token"))}
    partly = build_partly(workload, names, CPU)
    assert partly.get_parameter("head.vocabulary.weight") is partly.get_parameter("embedding.token.weight")
    own = sum(whole.get_parameter(name).nbytes for name in names)
    num_others = len(list(whole.parameters())) - len(names)
    assert memory(partly) == own + 2 * num_others
    for (name, made), expected in zip(partly.named_parameters(), whole.parameters(), strict=True):
        assert (made.shape, made.dtype, made.requires_grad) == (expected.shape, torch.bfloat16, expected.requires_grad)
        assert name not in names or torch.equal(made, expected)
    assert "forward" in vars(partly.get_submodule("block1")), "it is computed again in backward"


def test_frozen_and_oddly_laid_out_parameters_stay_so(tmp_path: Path) -> None:
    for kind in ("frozen", "non_contiguous", "mixed_dtypes"):
        workload = stored(f"awkward:kind={kind}", tmp_path)
        whole = workload.build_model()
        partly = build_partly(workload, dict(whole.named_parameters()), CPU)
        for made, expected in zip(partly.parameters(), whole.parameters(), strict=True):
            assert torch.equal(made, expected)
            assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())
            assert made.requires_grad == expected.requires_grad


def test_marks_on_parameters_stay_and_hooks_too(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        made[0].weight.never_decays = True  # type: ignore[assignment]
        return made

    def hooked() -> nn.Module:
        made = model()
        made[0].weight.register_hook(lambda gradient: 3 * gradient)
        return made

    path = tmp_path / "weights.pt"
    torch.save(model().state_dict(), path)
    workload = Workload(name="own", model=model, dataset=Tensors(torch.zeros(1), torch.zeros(1)), weights=path)
    partly = build_partly(workload, {"0.weight"}, CPU)
    assert memory(partly) < memory(workload.build_model())
    assert getattr(partly.get_parameter("0.weight"), "never_decays", False)
    partly = build_partly(replace(workload, model=hooked), {"0.weight"}, CPU)
    partly.get_parameter("0.weight").sum().backward()
    assert partly.get_parameter("0.weight").grad is not None
    assert torch.equal(partly.get_parameter("0.weight").grad, torch.full((3, 3), 3.0))


def test_a_model_that_keeps_more_than_parameters_is_built_whole(tmp_path: Path) -> None:
    workload = stored("convnet", tmp_path)
    assert memory(build_partly(workload, (), CPU)) == memory(workload.build_model())
    assert memory(build_partly(replace(workload, weights=None), (), CPU)) == memory(workload.build_model())

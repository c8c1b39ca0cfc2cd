"""Plans are checked against the model before anything is cut."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from harness import models
from harness.implementation import load
from harness.layout import Layout
from harness.tensor_plan import ColumnParallel, RowParallel, VocabularyParallel, resolve


def model() -> nn.Module:
    return nn.ModuleDict({"stem": nn.Linear(4, 4), "inner": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))})


def test_the_module_around_a_row_parallel_layer_is_a_region() -> None:
    plan = resolve(model(), {"inner.0": ColumnParallel(), "inner.1": RowParallel()})
    assert plan.regions == ("inner",)
    assert plan.region_of("inner.0") == "inner"
    assert plan.region_of("stem") is None


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"outer.*": RowParallel()}, r"expected 'outer\.\*' to name a module of the model, it names none"),
        ({"inner": RowParallel()}, "'inner' is RowParallel, which takes Linear, got Sequential at inner"),
        ({"inner": VocabularyParallel()}, "takes Linear or Embedding, got Sequential at inner"),
        ({"stem": ColumnParallel()}, "stem is column-parallel, and no row-parallel layer beside it sums up"),
    ],
    ids=str,
)
def test_plans_that_do_not_fit_name_the_module(plan: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(model(), plan)


def test_llama_is_planned_by_transformers_own_plan() -> None:
    workload = models.load("llama:size=tiny")
    assert workload.tensor_plan is not None
    built = workload.model_without_memory()
    plan = resolve(built, workload.tensor_plan(built))
    assert plan.roles["causal.model.layers.1.self_attn.k_proj"] == ColumnParallel(unit=8)
    assert plan.roles["causal.model.layers.0.mlp.down_proj"] == RowParallel()
    assert plan.roles["causal.lm_head"] == plan.roles["causal.model.embed_tokens"] == VocabularyParallel()
    assert len(plan.regions) == 4


@pytest.mark.parametrize("name", ["native.tensor", "native.hybrid", "torch.tensor", "torch.hybrid"])
@pytest.mark.parametrize(
    ("left_out", "role"), [("head.vocabulary", "embedding.token"), ("embedding.token", "head.vocabulary")]
)
def test_a_tie_of_which_the_plan_names_one_module_is_refused_by_everyone(name: str, left_out: str, role: str) -> None:
    whole = models.load("gpt:size=tiny,tied=true")
    assert whole.tensor_plan is not None
    planner = whole.tensor_plan
    half = replace(whole, tensor_plan=lambda model: {k: v for k, v in planner(model).items() if k != left_out})
    reason = load(name).unsupported(half, Layout(tensor=2, data=2 if "hybrid" in name else 1), torch.device("cpu"), {})
    assert reason is not None
    assert reason.startswith(f"tensor plan: {left_out}.weight is tied to {role}.weight, which is cut, and has no role")


def test_a_cut_parameter_with_a_hook_is_refused() -> None:
    whole = models.load("gpt:size=tiny")

    def hooked(name: str) -> str | None:
        def model() -> nn.Module:
            made = whole.model()
            made.get_parameter(name).register_hook(lambda gradient: 3 * gradient)
            return made

        return replace(whole, model=model).fits_tensor_degree(2)

    cut = next(
        name for name, _ in whole.model_without_memory().named_parameters() if name.endswith("vocabulary.weight")
    )
    assert str(hooked(cut)).startswith(f"tensor plan: {cut} is cut, and has a hook on its gradient")
    assert hooked(next(name for name, p in whole.model_without_memory().named_parameters() if "norm" in name)) is None

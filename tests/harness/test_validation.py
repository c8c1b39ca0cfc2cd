from typing import Any, Literal

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.validation import allows, check, check_device, described


def case(**fields: Any) -> Case:
    return Case(**{"workload": "gpt", "implementation": "native.ddp", "layout": Layout(data=2), **fields})


def test_a_right_case_passes() -> None:
    check([case(options={"reduction": "ring"}), case(implementation="torch.ddp", workload="convnet")])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"workload": "bert"}, "workload 'bert': expected one of"),
        ({"workload": "gpt:size=vast"}, "size must be one of"),
        ({"workload": "gpt:batch=3"}, "unknown option batch"),
        ({"workload": 3}, "workload must be text, got 3"),
        ({"implementation": "native.dpp"}, "implementation 'native.dpp': expected one of"),
        ({"implementation": "no/file.py:Mine"}, "expected an existing Python file"),
        ({"precision": "fp8"}, "precision must be one of fp64, fp32, bf16, bf16_fp32_gradients, got 'fp8'"),
        ({"options": {"reducton": "ring"}}, "option reducton: native.ddp takes "),
        ({"options": {"reduction": "rign"}}, "option reduction: native.ddp expects one of all_reduce"),
        (
            {"options": {"transport": None}},
            "native.ddp expects one of process_group, shared_memory, got none",
        ),
        ({"options": {"bucket_bytes": "many"}}, "option bucket_bytes: native.ddp expects int, got 'many'"),
        ({"options": {"bucket_bytes": 0}}, "native.ddp: bucket_bytes must be at least 1, got 0"),
        (
            {"options": {"reduction": "none"}},
            "it exchanges nothing and trains no model: expected the role floor, got sub",
        ),
        ({"implementation": "native.floor", "role": "peer"}, "expected the role floor, got peer"),
        ({"role": "floor"}, "expected an implementation that exchanges nothing in the role floor, got one that does"),
        (
            {"options": {"reduction": "none", "transport": "shared_memory"}, "role": "floor"},
            "native.ddp: reduction=none sums nothing, got transport=shared_memory to sum it through",
        ),
        ({"options": {"small_bytes": -1}}, "native.ddp: small_bytes must be at least 0, got -1"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected_and_given(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match="case ") as caught:
        check([case(), case(**fields)])
    assert expected in str(caught.value)


def test_a_gpu_is_asked_for_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: expected a CUDA device on this machine, found none"):
        check_device("cuda")


def test_a_missing_library_is_left_to_the_run(tmp_path: Any) -> None:
    path = tmp_path / "needs_more.py"
    path.write_text("import no_such_library\n")
    check([case(implementation=f"{path}:Mine", options={"anything": 1})])


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (Literal["a", "b"], ["a"], ["c", 1]),
        (int, [3], ["3", True, 3.0]),
        (float, [3, 0.5], ["3", True]),
        (bool, [True], [1, "true"]),
        (int | None, [3, None], ["none"]),
        (list[int], ["whatever an annotation says that nobody here can judge"], []),
    ],
)
def test_a_value_is_held_against_the_annotation(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    assert all(allows(hint, value) for value in right)
    assert not any(allows(hint, value) for value in wrong)


def test_an_annotation_is_described_in_words() -> None:
    assert described(Literal["a", "b"]) == "one of a, b"
    assert described(int | None) == "int or none"

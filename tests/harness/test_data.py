import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.data import shuffled_index
from harness.datasets import Tensors, TokenWindows, digits, open_text, standard_library_text


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_each_epoch_visits_every_sample_once_in_another_order(length: int) -> None:
    epochs = [[shuffled_index(epoch * length + i, length, seed=3) for i in range(length)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length > 2:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != [shuffled_index(i, length, seed=4) for i in range(length)]


def test_order_does_not_depend_on_what_was_asked_before() -> None:
    positions = [0, 70, 5, 700, 6, 0, 350]
    forwards = [shuffled_index(position, 50, seed=1) for position in positions]
    backwards = [shuffled_index(position, 50, seed=1) for position in reversed(positions)]
    assert forwards == backwards[::-1]


def test_windows_pair_each_token_with_the_next_one() -> None:
    windows = TokenWindows(np.arange(11, dtype=np.uint16), sequence_length=5, vocabulary_size=11, source="numbers")
    assert len(windows) == 2
    inputs, targets = windows.sample(1)
    assert inputs.tolist() == [5, 6, 7, 8, 9]
    assert targets.tolist() == [6, 7, 8, 9, 10]
    assert inputs.dtype == targets.dtype == torch.int64


def test_standard_library_is_real_text_with_a_fingerprint() -> None:
    text = standard_library_text()
    assert len(text) == 4 << 20
    assert b"def " in text.tobytes() and b"\0" not in text.tobytes()
    assert standard_library_text() is text
    windows = open_text("stdlib", sequence_length=128, vocabulary_size=256)
    assert windows.fingerprint == hashlib.sha256(text.tobytes()).hexdigest()[:16] + "-128"


def test_text_file_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("né!?".encode())
    windows = open_text(str(path), sequence_length=4, vocabulary_size=256)
    inputs, targets = windows.sample(0)
    assert inputs.tolist() == [0x6E, 0xC3, 0xA9, 0x21]
    assert targets.tolist() == [0xC3, 0xA9, 0x21, 0x3F]


def test_token_file_is_read_as_uint16(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.array([1, 50256, 3, 4, 5], dtype="<u2").tofile(path)
    windows = open_text(str(path), sequence_length=2, vocabulary_size=50257)
    assert len(windows) == 2
    assert [t.tolist() for t in windows.sample(0)] == [[1, 50256], [50256, 3]]
    assert windows.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()[:16] + "-2"


def test_fingerprint_changes_with_any_token(tmp_path: Path) -> None:
    fingerprints = set()
    for content in (b"abcdef", b"abcdeg"):
        (tmp_path / "text.txt").write_bytes(content)
        fingerprints.add(open_text(str(tmp_path / "text.txt"), sequence_length=2, vocabulary_size=256).fingerprint)
    assert len(fingerprints) == 2


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("short.txt", b"abc", "a window of 8 tokens and the next one needs 9 tokens, got 3"),
        ("empty.txt", b"", "a window of 8 tokens and the next one needs 9 tokens, got 0"),
        ("empty.bin", b"", "a window of 8 tokens and the next one needs 9 tokens, got 0"),
        ("odd.bin", b"123", "uint16 tokens need an even number of bytes, got 3"),
        ("large.bin", np.array([7] * 9 + [300], dtype="<u2").tobytes(), "below the vocabulary size 256, got 300"),
    ],
)
def test_unfit_text_says_what_was_expected(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        open_text(str(path), sequence_length=8, vocabulary_size=256)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_missing_text_is_named() -> None:
    with pytest.raises(ValueError, match=r"text must be stdlib or an existing file, got 'no/such\.txt'"):
        open_text("no/such.txt", sequence_length=8, vocabulary_size=256)


def test_token_beyond_the_head_of_a_file_is_caught_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.datasets._CHECKED_TOKENS", 4)
    tokens = np.array([1, 2, 3, 4, 5, 99, 7], dtype=np.uint16)
    windows = TokenWindows(tokens, sequence_length=3, vocabulary_size=10, source="tokens")
    assert windows.sample(0)[0].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="below the vocabulary size 10, got 99"):
        windows.sample(1)


def test_tensors_pair_rows_and_refuse_unlike_numbers() -> None:
    data = Tensors(torch.arange(6.0).reshape(3, 2), torch.tensor([4, 5, 6]))
    assert len(data) == 3
    assert data.sample(1)[0].tolist() == [2.0, 3.0] and data.sample(1)[1].item() == 5
    changed = Tensors(torch.arange(6.0).reshape(3, 2), torch.tensor([4, 5, 7]))
    assert data.fingerprint != changed.fingerprint
    with pytest.raises(ValueError, match="got 3 and 2"):
        Tensors(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="got 0 and 0"):
        Tensors(torch.zeros(0), torch.zeros(0))


def test_digits_are_the_real_ones() -> None:
    data = digits()
    image, target = data.sample(0)
    assert len(data) == 1797
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32
    assert image.min() == 0.0 and 0.9 < image.max() <= 1.0
    assert target.item() == 0 and target.dtype == torch.int64
    assert digits() is data

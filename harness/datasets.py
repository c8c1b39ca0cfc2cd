"""The datasets at hand: windows over a text, tensors held in memory, scikit-learn's digits."""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STANDARD_LIBRARY = "stdlib"
_STANDARD_LIBRARY_BYTES = 4 << 20
_CHECKED_TOKENS = 4 << 20
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_MACHINE_SPECIFIC = "_sysconfigdata"

Tokens = NDArray[np.unsignedinteger[Any]]


class TokenWindows:
    """Consecutive windows of `sequence_length` tokens as inputs, the tokens one further as targets; both int64.

    `source` names the text in errors. ValueError if there are too few tokens for one window, or if a token does not fit
    into the vocabulary (looked for in the first four million tokens here, and in every window as it is read).
    """

    def __init__(self, tokens: Tokens, *, sequence_length: int, vocabulary_size: int, source: str) -> None:
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._vocabulary_size = vocabulary_size
        self._source = source
        if len(self) < 1:
            raise ValueError(
                f"text {source!r}: a window of {sequence_length} tokens and the next one needs {sequence_length + 1} "
                f"tokens, got {len(tokens)}"
            )
        self._check(tokens[:_CHECKED_TOKENS])

    @functools.cached_property
    def fingerprint(self) -> str:
        """The head of the text's sha256, and the window's length."""
        digest = hashlib.sha256(np.ascontiguousarray(self._tokens).data).hexdigest()
        return f"{digest[:16]}-{self._sequence_length}"

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._sequence_length

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * self._sequence_length
        window = self._tokens[first : first + self._sequence_length + 1]
        self._check(window)
        tokens = torch.from_numpy(window.astype(np.int64))
        return tokens[:-1], tokens[1:]

    def _check(self, tokens: Tokens) -> None:
        largest = int(tokens.max())
        if largest >= self._vocabulary_size:
            raise ValueError(
                f"text {self._source!r}: tokens must be below the vocabulary size {self._vocabulary_size}, "
                f"got {largest}"
            )


def open_text(text: str, *, sequence_length: int, vocabulary_size: int) -> TokenWindows:
    """Windows over `stdlib` (the Python standard library's own sources, a token a byte), over a text file (a token a
    byte) or over a `.bin` file of little-endian uint16 tokens; files are mapped, not read. ValueError if there is no
    such file, or if it does not fit the window or the vocabulary."""
    if text == STANDARD_LIBRARY:
        tokens: Tokens = standard_library_text()
    else:
        path = Path(str(text))
        if not path.is_file():
            raise ValueError(f"text must be {STANDARD_LIBRARY} or an existing file, got {str(text)!r}")
        dtype = np.dtype("<u2") if path.suffix == ".bin" else np.dtype("u1")
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise ValueError(f"text {text!r}: uint16 tokens need an even number of bytes, got {size}")
        # An empty file cannot be mapped.
        tokens = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
    return TokenWindows(tokens, sequence_length=sequence_length, vocabulary_size=vocabulary_size, source=text)


@functools.cache
def standard_library_text() -> NDArray[np.uint8]:
    """The first 4 MiB of the Python standard library's sources, without its tests, by directory and name. The same for
    one release of Python; the fingerprint tells releases apart."""
    content = bytearray()
    for directory, subdirectories, files in os.walk(sysconfig.get_paths()["stdlib"]):
        subdirectories[:] = sorted(set(subdirectories) - _SKIPPED_DIRECTORIES)
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith(_MACHINE_SPECIFIC):
                content += Path(directory, file).read_bytes()
        if len(content) >= _STANDARD_LIBRARY_BYTES:
            break
    return np.frombuffer(bytes(content[:_STANDARD_LIBRARY_BYTES]), dtype=np.uint8)


class Tensors:
    """Samples held in memory: row i of `inputs` with row i of `targets`. ValueError if not as many, or none."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets) or not len(inputs):
            raise ValueError(f"expected as many inputs as targets, and some, got {len(inputs)} and {len(targets)}")
        self._inputs = inputs
        self._targets = targets

    @functools.cached_property
    def fingerprint(self) -> str:
        """The head of the sha256 of all samples."""
        digest = hashlib.sha256()
        for tensor in (self._inputs, self._targets):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._inputs)

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


@functools.cache
def digits() -> Tensors:
    """The 1797 handwritten digits that scikit-learn brings along: images (1, 8, 8) in [0, 1], targets 0 to 9."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    return Tensors(
        torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 8, 8) / 16.0,
        torch.from_numpy(targets).to(torch.int64),
    )

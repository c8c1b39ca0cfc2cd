"""What needs FairScale itself runs where it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from impls.fairscale.parts import library
from tests.conftest import Instrumented


@pytest.fixture(scope="session")
def fairscale() -> None:
    if reason := library.why_unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def instrumented(fairscale: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instrumented]:
    ranks = Instrumented(tmp_path_factory.mktemp("instrumented"))
    yield ranks
    ranks.close()

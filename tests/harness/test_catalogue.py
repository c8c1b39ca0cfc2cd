"""The catalogue: what people wrote of their suites and workloads is shown as they wrote it."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from harness import catalogue


def shown(renderable: Any) -> str:
    file = StringIO()
    Console(file=file, width=160).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize("words", ["[bold]", "sizes [/] and more", "takes [1, 2]"])
def test_descriptions_that_look_like_markup_stay_what_they_are(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = SimpleNamespace(cases=(1, 2, 3), description=words)
    monkeypatch.setattr(catalogue.suites, "names", lambda: ["own"])
    monkeypatch.setattr(catalogue.suites, "load", lambda name: suite)
    assert words in shown(catalogue.suites_table())
    monkeypatch.setattr(catalogue.implementation, "names", lambda: ["own"])
    monkeypatch.setattr(catalogue.implementation, "load", lambda name: None)
    monkeypatch.setattr(catalogue.support, "refusals", lambda loaded: [("scalars", words)])
    assert words in shown(catalogue.refusals_table())

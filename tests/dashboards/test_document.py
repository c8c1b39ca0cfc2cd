"""The document: one file that needs nothing else, in which text from results cannot become markup."""

from __future__ import annotations

import json
import re
import sys

import pytest

from dashboards import data
from dashboards.document import document
from harness.result import Result
from tests.harness.choosing.scenes import EVERYTHING, result

plotly = pytest.importorskip("plotly", reason="plotly is an extra: pip install 'meshmark[dashboards]'")

HOSTILE = """</script><script>alert(1)</script>"'<b>bold</b>&amp;<!--{{data}}"""


def made(*results: Result) -> str:
    return document(data.studies(results), results)


def test_it_asks_nothing_of_any_network() -> None:
    text = made(*EVERYTHING)
    without_plotly = text.replace(re.search(r"<script>\s*/\*\*\s*\* plotly.*?</script>", text, re.DOTALL)[0], "")  # type: ignore[index]
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", without_plotly)
    assert text.count("plotly.js v") == 1, "it lies in it once"
    assert "default-src 'none'" in text


def source(*results: Result) -> list[str]:
    written = re.search(r'id="data">(.*?)</script>', made(*results), re.DOTALL)
    assert written is not None
    lines: list[str] = json.loads(written[1])["source"]
    return lines


def test_it_names_every_machine_and_commit_and_no_number_that_nobody_knows() -> None:
    assert source(*EVERYTHING) == [
        "sharding-20300101",
        "a processor, 2 cores, torch 2.13.0",
        "2025-01-01",
        "commit 0123456789",
    ]
    environment = {**EVERYTHING[0].environment, "physical_cores": None, "torch": "2.14.0", "commit": "fedcba9876543210"}
    other = {**environment, "machine_fingerprint": "machine-b"}
    assert source(*EVERYTHING, result("native.ddp", environment=other, suite_run="later"))[:3] == [
        "sharding-20300101, later",
        "machine machine-a: a processor, 2 cores, torch 2.13.0",
        "machine machine-b: a processor, torch 2.14.0",
    ]
    assert source(result("native.ddp", environment=environment))[1] == "a processor, torch 2.14.0"
    assert source(*EVERYTHING, result("native.ddp", environment=other))[-1] == "commits 0123456789, fedcba9876"


def test_it_says_which_cases_are_of_which_run() -> None:
    part = result("native.ddp", suite_run="sharding-20300102", started=1.9e9, num_suite_cases=len(EVERYTHING))
    assert source(*EVERYTHING, part)[:2] == [
        "sharding-20300101, sharding-20300102",
        "suite sharding: 1 case of sharding-20300102, 10 of sharding-20300101",
    ]


def test_text_of_results_stays_in_its_place() -> None:
    hostile = result("native.ddp", reason=HOSTILE, status="failed", options={"note": HOSTILE}, suite=HOSTILE)
    text = made(hostile)
    assert "<script>alert" not in text
    assert text.count("</script>") == made(result("native.ddp")).count("</script>")
    written = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert written is not None
    (study,) = json.loads(written[1])["studies"]
    assert HOSTILE in study["choose"]["places"][0]["candidates"][0]["label"]


def test_every_figure_is_one_that_plotly_knows() -> None:
    """Names of attributes are checked by plotly itself; colours are still names here."""
    from plotly.graph_objects import Figure

    written = re.search(r'id="data">(.*?)</script>', made(*EVERYTHING), re.DOTALL)
    assert written is not None
    figures = [
        block
        for study in json.loads(written[1])["studies"]
        for page in study["pages"]
        for block in page
        if block["kind"] == "figure"
    ]
    assert figures
    for figure in figures:
        without_names = json.loads(re.sub(r'"@[\w -]+"', '"#123456"', json.dumps(figure)))
        traces = [{k: v for k, v in trace.items() if k != "label_last"} for trace in without_names["traces"]]
        Figure(data=traces, layout=without_names["layout"])


def test_without_plotly_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ValueError, match=r"needs plotly: pip install 'meshmark\[dashboards\]'"):
        made(result("native.ddp"))

"""MLflow's own page, served by a real server: the view for choosing, and the dashboard among the artifacts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import tracking
from harness.choosing import dashboards, sources, tracker_views
from harness.launch.fork_server import end_with_parent
from harness.result import append
from tests.dashboards.test_browser import browser  # noqa: F401  a fixture
from tests.harness.choosing.scenes import EVERYTHING
from tests.ports import free_port

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
_STARTS_WITHIN_SECONDS = 120
_SHOWS_WITHIN_MS = 60_000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server whose store has a suite run, its dashboard and its view."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    results = tmp_path / "results"
    results.mkdir()
    for one in EVERYTHING:
        append(results, replace(one, metrics={**one.metrics, "step.median_seconds": 0.1}))  # no chart without figures
    tracking.upload(results)
    found = sources.from_store(sources.case_runs_in_store())
    assert dashboards.publish(dashboards.made(found, ()), ["sharding-20300101"]) == ["sharding-20300101"]
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking.store_uri()]
    with Path("server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  nothing else runs in this process
        )
        try:
            _wait_for(address, process)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            assert process.poll() is None, Path("server.log").read_text()
            time.sleep(0.3)
    pytest.fail(f"no server after {_STARTS_WITHIN_SECONDS} s: {Path('server.log').read_text()}")


def test_a_real_servers_page_shows_the_view_and_the_dashboard(server: str, browser: Any) -> None:  # noqa: F811
    runs = tracking.read_runs()
    case = next(run for run in runs if sources.case_id(run))
    of_suite = next(run for run in runs if not sources.case_id(run))
    page = browser.new_page(viewport={"width": 1500, "height": 1800})
    view = f"{server}/#/experiments/{case['experiment_id']}/runs?viewStateShareKey={tracker_views.KEY}"
    page.goto(view)
    page.get_by_text("Sort: throughput.tokens_per_second").wait_for(timeout=_SHOWS_WITHIN_MS)
    header = "[role=columnheader]:has-text('communication.bytes_per_step')"
    page.locator(header).first.wait_for(timeout=_SHOWS_WITHIN_MS)
    assert page.get_by_text("native.zero stage=3").count()
    assert not page.get_by_text("native.floor").count(), "the fastest of all trains nothing"
    page.get_by_role("link", name="Dashboard of sharding-20300101").wait_for(timeout=_SHOWS_WITHIN_MS)
    page.goto(f"{view}&compareRunsMode=CHART")
    charts = page.get_by_test_id("experiment-view-compare-runs-chart-area")
    charts.get_by_text("Choosing a strategy", exact=True).wait_for(timeout=_SHOWS_WITHIN_MS)
    charts.locator(".js-plotly-plot").nth(5).wait_for(timeout=_SHOWS_WITHIN_MS)
    assert "Choosing a strategy (6)" in " ".join(charts.inner_text().split()), (
        "name and number are elements of their own"
    )
    drawn = [plot.locator(".point").count() for plot in charts.locator(".js-plotly-plot").all()]
    assert len(drawn) == 6
    assert min(drawn) >= 8, f"points or bars of each chart, one a run: {drawn}"
    assert "Error loading shared view state" not in page.content()
    page.goto(f"{server}/#/experiments/{of_suite['experiment_id']}/runs/{of_suite['run_id']}/artifacts/dashboard.html")
    inner = page.frame_locator("iframe")
    inner.locator("#ranking tbody tr").first.wait_for(timeout=_SHOWS_WITHIN_MS)
    assert inner.locator(".answer .best").text_content()
    page.close()

"""The page in a real browser: what its form asks for is what the ranking says, and nothing leaves the machine."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dashboards import data
from dashboards.document import document
from harness.choosing.candidates import one_process
from harness.choosing.ranking import rank, thresholds
from harness.layout import Layout
from harness.result import Result
from tests.harness.choosing.scenes import CLIPPED, EVERYTHING, HELD, MACHINE, MIB, WORK, result

pytestmark = pytest.mark.browser
PAGES = ("choose", "memory", "communication", "scaling", "parity", "pipeline", "history")
PHONE = {"width": 360, "height": 780}
SMALL_PHONE = {"width": 320, "height": 640}
DESK = {"width": 1180, "height": 900}
HOSTILE = """</script><script>window.broken = 1</script><img src=x onerror="window.broken = 1">"'<b>bold</b>{{data}}"""
ACTIONS = [
    [[{"action": name, "begin": begin, "end": end} for name, begin, end in of_rank]]
    for of_rank in ([("0F0", 0, 1), ("0B0", 4, 6)], [("1F0", 1, 2), ("1B0", 2, 4)])
]
PIPELINE = result(
    "native.pipeline",
    Layout(pipeline=2),
    strategy="pipeline_parallel",
    bubble=0.5,
    states_mib=(5, 5, 10),
    peak_mib=25,
    speed=640,
    samples={"pipeline": {"actions": ACTIONS}},
)
ON_FOUR = result("native.ddp", Layout(data=4), speed=1400)
RESULTS = (*EVERYTHING, PIPELINE, ON_FOUR)


@dataclass
class Visit:
    """A page that was opened, and what it did besides."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def turn_to(self, name: str) -> None:
        self.page.click(f"nav button[data-page={name}]")

    def ranking(self) -> list[tuple[str, str, str, str]]:
        """What the table shows: rank, name, why, state."""
        rows = self.page.evaluate(
            """[...document.querySelectorAll("#ranking tbody tr")].map((row) => [
                ...[".rank", ".name", ".why"].map((part) => row.querySelector(part).textContent), row.dataset.state])"""
        )
        return [tuple(row) for row in rows]

    def ask(self, field_name: str, value: str) -> None:
        """Where there is but one answer, the form has given it."""
        select = self.page.locator(f"#{field_name}")
        if select.is_enabled():
            select.select_option(value)
        assert select.input_value() == value


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed here")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed here")
    with api.sync_playwright() as playwright:
        # A container's root has no sandbox to offer.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


def visit(browser: Any, path: Path, **options: Any) -> Visit:
    page = browser.new_page(**{"viewport": DESK, **options})
    made = Visit(page=page)
    page.on("console", lambda message: made.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: made.complaints.append(str(error)))
    page.on("request", lambda request: made.requests.append(request.url))
    page.goto(path.as_uri())
    return made


def written(directory: Path, *results: Result) -> Path:
    path = directory / "dashboard.html"
    path.write_text(document(data.studies(results), results), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("dashboard"), *RESULTS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE, SMALL_PHONE], ids=["desk", "phone", "small phone"])
def test_every_page_shows_itself_in_any_light_and_size(
    browser: Any, dashboard: Path, scheme: str, viewport: dict[str, int]
) -> None:
    seen = visit(browser, dashboard, viewport=viewport, color_scheme=scheme)
    for name in PAGES:
        seen.turn_to(name)
        section = seen.page.locator(f"#page-{name}")
        assert section.is_visible()
        assert section.locator("h2").text_content().lower() == name
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], name
        hidden = section.evaluate(
            "(all) => [...all.querySelectorAll('.table')].map((t) => t.scrollWidth - t.clientWidth)"
        )
        assert viewport is DESK or all(pixels <= 0 for pixels in hidden), f"{name}: of each table so much is not seen"
        for plot in section.locator(".plot").all():
            if plot.is_visible():
                assert plot.locator("svg.main-svg").count(), f"{name}: a figure was not drawn"
    assert seen.page.locator("#page-pipeline .plot").count() == 1
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")
    assert seen.complaints == []
    assert seen.requests == [dashboard.as_uri()], "it asks nobody"
    seen.page.close()


def test_whatever_the_form_asks_is_answered_as_the_ranking_says(browser: Any, dashboard: Path) -> None:
    """All places, and memory on both sides of every threshold."""
    seen = visit(browser, dashboard)
    (study,) = data.studies(RESULTS)
    alone = one_process(study.candidates, WORK, "fp32", MACHINE)
    places = dict.fromkeys(one.place for one in study.candidates)
    asked = 0
    for place in places:
        seen.ask("devices", str(place.num_devices))
        seen.ask("nodes", str(place.num_nodes))
        seen.ask("link", place.link or "within the node")
        members = [one for one in study.candidates if one.place == place]
        for limit in (0.0, *thresholds(members, alone)):
            for mib in {max(0.0, limit / MIB - 0.001), limit / MIB, limit / MIB + 0.001}:
                seen.page.fill("#memory", f"{mib!r}")
                expected = [
                    (str(one.rank or ""), one.candidate.label, one.why, one.state)
                    for one in rank(members, mib * MIB, alone)
                ]
                assert seen.ranking() == expected, f"{place} with {mib} MiB"
                asked += 1
    assert len(places) >= 5
    assert asked > 50
    assert seen.complaints == []
    seen.page.close()


@pytest.mark.parametrize("viewport", [DESK, SMALL_PHONE], ids=["desk", "small phone"])
def test_names_in_the_figure_lie_on_no_other(browser: Any, tmp_path: Path, viewport: dict[str, int]) -> None:
    """A front of many that are nearly alike; the fastest has its name."""
    crowd = [
        result(
            "native.zero",
            strategy="zero_1",
            options={"stage": 1, "bucket_bytes": 1000000 + number},
            states_mib=(10, 10, 10),
            peak_mib=34 + number / 10,
            speed=900 + 5 * number,
        )
        for number in range(14)
    ]
    seen = visit(browser, written(tmp_path, *RESULTS, *crowd), viewport=viewport)
    seen.page.select_option("#devices", "2")
    boxes = seen.page.evaluate(
        """[...document.querySelectorAll('#choices .annotation-text')].map((one) => {
            const { left, right, top, bottom } = one.getBoundingClientRect();
            return [one.textContent, left, right, top, bottom]; })"""
    )
    names = [name for name, *_ in boxes]
    assert "native.ddp" in names
    assert len(names) >= 3
    for (a, *one), (b, *other) in itertools.combinations(boxes, 2):
        beside = one[1] <= other[0] + 1 or other[1] <= one[0] + 1
        above = one[3] <= other[2] + 4 or other[3] <= one[2] + 4  # a box is higher than its letters
        assert beside or above, f"{a} lies on {b}"
    assert all(right <= viewport["width"] and left >= 0 for _, left, right, *_ in boxes)
    assert seen.complaints == []
    seen.page.close()


def test_units_best_answer_and_what_is_greyed(browser: Any, dashboard: Path) -> None:
    seen = visit(browser, dashboard)
    seen.page.select_option("#devices", "2")
    seen.page.fill("#memory", "40")
    assert seen.page.locator(".answer .best").text_content() == "native.zero stage=1"
    seen.page.select_option("#memory-unit", "GiB")
    assert seen.page.locator(".answer .best").text_content() == "native.ddp"
    greyed = seen.page.locator("#ranking tr.greyed .name").all_text_contents()
    assert greyed == ["deepspeed.zero", "fairscale.oss"], "failures are there, with their reasons"
    seen.page.select_option("#memory-unit", "MiB")
    seen.page.fill("#memory", "1")
    assert seen.page.locator(".answer").text_content().startswith("Nothing fitsThe smallest, native.zero stage=3")
    seen.page.close()


def test_other_work_is_greyed_and_labelled_and_never_the_answer(browser: Any, tmp_path: Path) -> None:
    seen = visit(browser, written(tmp_path, *RESULTS, CLIPPED))
    seen.page.select_option("#devices", "2")
    for mib in ("40", "22"):
        seen.page.fill("#memory", mib)
        assert "clipping" not in seen.page.locator(".answer .best").text_content()
        (row,) = [row for row in seen.ranking() if "clipping" in row[1]]
        assert row[0] == ""
        assert row[2:] == ("Other work: gradients are clipped at 1, DeepSpeed's default", "other work")
    own = seen.page.locator("#ranking tr[data-state='other work']")
    assert "greyed" in own.get_attribute("class")
    assert own.locator(".badge").text_content() == "same model, other work"
    assert seen.complaints == []
    seen.page.close()


def test_what_is_beyond_its_own_tolerance_is_crossed_within_another_s_band(browser: Any, tmp_path: Path) -> None:
    def run(name: str, tolerance: float) -> Result:
        held = replace(HELD, tolerance={**HELD.tolerance, "loss": tolerance})
        samples = {"losses": [4.0, 4.0, 4.00004], "reference_losses": [4.0, 4.0, 4.0]}
        return result(name, parity=held, samples=samples)

    seen = visit(browser, written(tmp_path, run("native.ddp", 2e-6), run("torch.ddp", 5e-5)))
    seen.turn_to("parity")
    assert seen.page.locator("#page-parity .legend").text_content().endswith("beyond what its case is allowed")
    assert seen.page.locator("#page-parity .plot .point").count() == 3 + 3 + 1
    boxes = seen.page.evaluate(
        """[...document.querySelectorAll('#page-parity .annotation-text')].map((one) => {
            const { top, bottom } = one.getBoundingClientRect();
            return [one.textContent, top, bottom]; })"""
    )
    (every, below, _), (some, _, above) = boxes
    assert (every, some) == ("allowed to every case: 2.0e-06", "allowed to some: 5.0e-05")
    assert above <= below, "one above its limit, the other below"
    assert seen.complaints == []
    seen.page.close()


def test_tables_sort_by_any_column_with_what_is_unknown_last(browser: Any, dashboard: Path) -> None:
    seen = visit(browser, dashboard)
    seen.turn_to("memory")
    table = seen.page.locator("#page-memory table")
    header = table.locator("th", has_text="peak").first

    def peaks() -> list[float]:
        texts = table.locator("tbody tr td:nth-child(3)").all_text_contents()
        return [float(text) for text in texts if text != "-"]

    header.click()
    assert peaks() == sorted(peaks())
    header.focus()
    seen.page.keyboard.press("Enter")
    assert peaks() == sorted(peaks(), reverse=True)
    assert header.get_attribute("aria-sort") == "descending"
    seen.page.close()


def test_light_and_dark_change_and_the_address_names_the_page(browser: Any, dashboard: Path) -> None:
    seen = visit(browser, dashboard, color_scheme="light")
    seen.turn_to("parity")
    assert seen.page.url.endswith("#parity")
    seen.page.click("#theme")
    assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"
    again = seen.page.url
    seen.page.goto("about:blank")
    seen.page.goto(again)
    assert seen.page.locator("#page-parity").is_visible()
    seen.page.close()


def test_text_that_looks_like_markup_stays_text(browser: Any, tmp_path: Path) -> None:
    hostile = result("native.ddp", options={"note": HOSTILE}, workload=WORK, suite=HOSTILE, suite_run=HOSTILE)
    failed = result("torch.ddp", status="failed", reason=HOSTILE, role="peer")
    seen = visit(browser, written(tmp_path, *RESULTS, hostile, failed))
    for name in PAGES:
        seen.turn_to(name)
    assert seen.page.evaluate("window.broken") is None
    assert seen.page.locator("main img, main b:has-text('bold')").count() == 0
    seen.turn_to("choose")
    seen.page.select_option("#devices", "2")
    shown = seen.page.locator("#ranking").text_content()
    assert f"native.ddp note={HOSTILE}" in shown
    assert HOSTILE in seen.page.locator("footer").text_content()
    drawn = seen.page.evaluate("[...document.querySelectorAll('#choices svg text')].map((one) => one.textContent)")
    assert all("&lt;" not in text for text in drawn)
    assert seen.complaints == []
    seen.page.close()


def test_on_paper_every_page_is_there(browser: Any, dashboard: Path) -> None:
    seen = visit(browser, dashboard, color_scheme="dark")
    pdf = seen.page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    num_sheets = pdf.count(b"/Type /Page\n") or pdf.count(b"/Type /Page")
    assert num_sheets >= len(PAGES), "each page begins a sheet"
    seen.page.emulate_media(media="print")
    for name in PAGES:
        assert seen.page.locator(f"#page-{name}").is_visible()
    assert not seen.page.locator("nav").is_visible()
    assert seen.complaints == []
    seen.page.close()


def test_a_frame_without_rights_shows_it_too(browser: Any, dashboard: Path, tmp_path: Path) -> None:
    """That is how MLflow shows an artifact."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe sandbox="allow-scripts" src="{dashboard.as_uri()}" style="width: 1000px; height: 800px"></iframe>'
    )
    seen = visit(browser, frame)
    inner = seen.page.frame_locator("iframe")
    inner.locator("nav button[data-page=memory]").click()
    assert inner.locator("#page-memory .bars").first.is_visible()
    assert [line for line in seen.complaints if "error" in line.lower()] == []
    seen.page.close()

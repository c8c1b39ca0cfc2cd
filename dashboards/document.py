"""The document: all pages in one HTML file, which asks nothing of any network.

Everything that came from results lies in it as JSON, where no markup can begin, and is shown as text.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboards import choose, communication, history, memory, parity, pipeline, scaling
from dashboards.data import Study, same_model
from harness.choosing import origins
from harness.choosing.candidates import latest
from harness.choosing.work import model_of
from harness.result import Result, replace_non_finite

_ASSETS = Path(__file__).parent / "assets"
_PAGES = (memory, communication, scaling, parity, pipeline, history)


def document(found: Sequence[Study], results: Sequence[Result], *, notes: Sequence[str] = ()) -> str:
    """The HTML file. ValueError where plotly, an extra, is not installed."""
    data = {
        "source": _source(results, notes),
        "pages": [choose.TITLE, *(page.TITLE for page in _PAGES)],
        "studies": [_study(study, found) for study in found],
    }
    written = json.dumps(replace_non_finite(data), allow_nan=False, separators=(",", ":"))
    # Inside a script element only `<` could end it.
    written = written.replace("<", "\\u003c")
    parts = {
        "title": html.escape(_title(found)),
        "style": (_ASSETS / "page.css").read_text(encoding="utf-8"),
        "plotly": _plotly(),
        "data": written,
        "scripts": "\n".join(
            f"<script>{(_ASSETS / name).read_text(encoding='utf-8')}</script>"
            for name in ("blocks.js", "figures.js", "choose.js", "page.js")
        ),
    }
    frame = (_ASSETS / "page.html").read_text(encoding="utf-8")
    # In one pass, so that nothing which was put in is taken for a place.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], frame)


def _title(found: Sequence[Study]) -> str:
    suites = dict.fromkeys(suite for study in found for suite in study.suites)
    return f"Meshmark: {', '.join(suites)}" if suites else "Meshmark"


def _study(study: Study, found: Sequence[Study]) -> Mapping[str, Any]:
    alike = same_model(study, found, model_of)
    return {
        "title": study.title,
        "machine": study.machine,
        "choose": choose.choices(study),
        "pages": [page.blocks(study, alike) if page is scaling else page.blocks(study) for page in _PAGES],
    }


def _source(results: Sequence[Result], notes: Sequence[str]) -> list[str]:
    """Where the figures come from, a line each."""
    shown = latest(results)
    dates = sorted({time.strftime("%Y-%m-%d", time.gmtime(r.started)) for r in shown if r.started})
    lines = [
        origins.suite_runs(shown),
        *origins.completed(results),
        *origins.on_machines(shown),
        " to ".join(dict.fromkeys((*dates[:1], *dates[-1:]))),
        origins.commits(shown),
    ]
    return [line for line in (*lines, *notes) if line]


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError("a dashboard needs plotly: pip install 'meshmark[dashboards]'") from error
    text: str = get_plotlyjs()
    return text.replace("</script", "<\\/script")

"""README's figures of a run of a suite, between the comments that mark them: the table of strategies and libraries."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from harness.comparison_page import matrix_meaning, matrix_table
from harness.library_matrix import matrix
from harness.measured_on import measured_on
from harness.ratios import ratio_rows
from harness.result import Result

_END = "<!-- end of figures -->"
_WIDTH = 120


def with_figures(readme: str, results: Sequence[Result]) -> str:
    """The text with what stands between `<!-- figures: SUITE; from PAGE -->` and the end of these figures made anew;
    the comments stay. ValueError unless the results are of one suite, it is marked there once, and has strategies with
    peers beside."""
    suites = list(dict.fromkeys(result.suite for result in results if result.suite))
    if len(suites) != 1:
        raise ValueError(f"expected results of one suite, got {len(suites)}: {', '.join(suites) or 'no name'}")
    marks = list(re.finditer(rf"<!-- figures: {re.escape(suites[0])}(?:; from ([^>]*?))? -->\n", readme))
    if len(marks) != 1:
        raise ValueError(f"expected `<!-- figures: {suites[0]}; from PAGE -->` once, found it {len(marks)} times")
    (mark,) = marks
    end = readme.find(_END, mark.end())
    if end < 0 or "<!-- figures:" in readme[mark.end() : end]:
        raise ValueError(f"expected `{_END}` after the figures of {suites[0]}, found none")
    return readme[: mark.end()] + "\n".join(figures(results, page=mark[1])) + "\n" + readme[end:]


def figures(results: Sequence[Result], *, page: str | None) -> list[str]:
    """The lines. `page` is the file that has every setting, relative to README."""
    lines = matrix(results)
    if not lines:
        raise ValueError("expected strategies with a subject and a peer side by side, got none")
    said = [matrix_meaning(lines), *(f"{_capital(line)}." for line in (*measured_on(results), _timing(results)))]
    table, *notes = "\n".join(matrix_table(lines)).split("\n\n")
    found = [*_wrapped(" ".join(said)), "", *table.splitlines()]
    for note in notes:
        found += ["", *_wrapped(note)]
    last = []
    if page is not None and page.endswith(".md"):
        last.append(
            f"[{page}]({page}) has every setting: its time over peer and floor, tokens/s, memory by category beside "
            "the prediction, bytes beside prediction and textbook, busy and exposed communication, parity, and the "
            "commits it was measured at."
        )
    if not any(result.environment.get("emulated") for result in results):
        last.append("Links between processes of one machine are fast; where yours are slower, the bytes weigh more.")
    return [*found, *(["", *_wrapped(" ".join(last))] if last else [])]


def _timing(results: Sequence[Result]) -> str:
    """How often the cases of a line were timed, and in which order."""
    rows = ratio_rows(results)
    rounds = sorted({int(row["rounds"]) for row in rows}) or [0]
    number = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    if not all(row["in_turns"] for row in rows):
        return f"{number} rounds a case, not all of which took turns"
    return f"{number} rounds that took turns; one row a comparison"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)

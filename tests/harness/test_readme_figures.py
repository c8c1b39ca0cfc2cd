"""README's table made anew between its marks, and nothing else of README."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.readme_figures import with_figures
from tests.harness.test_library_matrix import PEER, result
from tests.harness.test_ratios import timed

README = """# Title

<!-- figures: smoke; from `a command` -->
other figures
<!-- end of figures -->

before
<!-- figures: peers; from dashboards/peers.md -->
an old table
<!-- end of figures -->
after
"""
ENVIRONMENT = {"device": {"name": "a processor"}, "logical_cores": 2, "threads_per_rank": 1, "torch": "2.13.0"}
RUN = [
    replace(
        one,
        suite="peers",
        environment=ENVIRONMENT,
        samples=timed("x", "peer", [[seconds]] * 12).samples,
    )
    for one, seconds in ((result("native.zero", "subject", 0.2, case={"options": {"a": 1}}), 0.2), (PEER, 0.4))
]


def test_the_table_and_what_it_rests_on_stand_between_the_marks() -> None:
    before, _, rest = with_figures(README, RUN).partition("<!-- figures: peers; from dashboards/peers.md -->\n")
    made, _, after = rest.partition("<!-- end of figures -->")
    assert before == README.partition("<!-- figures: peers")[0]
    assert after == "\nafter\n"
    text, table, settings, last = made.rstrip("\n").split("\n\n")
    assert table.splitlines() == [
        "| strategy | work | native | torch |",
        "| --- | --- | ---: | ---: |",
        "| zero_2 | `gpt`, data=2, fp32 | 200 ms (0.5) a | 400 ms (1.00) |",
    ]
    assert settings == "a: `native.zero a=1`"
    assert " ".join(text.split()).endswith(
        "Measured on: a processor, 2 cores, 1 thread(s) a rank, torch 2.13.0. 12 rounds that took turns; one row a "
        "comparison."
    )
    assert last.startswith("[dashboards/peers.md](dashboards/peers.md) has every setting")
    assert all(len(line) <= 120 for line in f"{text}\n{last}".splitlines())
    assert with_figures(with_figures(README, RUN), RUN) == with_figures(README, RUN)


@pytest.mark.parametrize(
    ("readme", "run", "message"),
    [
        ("nothing", RUN, "expected `<!-- figures: peers; from PAGE -->` once, found it 0 times"),
        (README * 2, RUN, "found it 2 times"),
        (README.replace("<!-- end of figures -->\nafter", "after"), RUN, "expected .* after the figures of peers"),
        (README, [*RUN, replace(RUN[0], suite="smoke")], "expected results of one suite, got 2: peers, smoke"),
        (README, RUN[:1], "expected strategies with a subject and a peer side by side, got none"),
    ],
)
def test_what_cannot_be_made_anew_is_refused(readme: str, run: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_figures(readme, run)  # type: ignore[arg-type]

"""Text in Markdown: whatever somebody typed is shown as it was typed, and no cell ends before its time."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from harness.markdown import code, fenced, plain, plain_row, table_row

HOSTILE = (
    '<img src=x onerror="alert(1)">',
    "a | b",
    r"a \| b \\| c \\",
    "`code` and ``more``",
    "*strong* _weak_ **both** ~gone~ stage_3_plan __init__",
    "[link](https://example.org) ![image](x) <https://example.org>",
    "&lt;b&gt; &amp; &#60; a & b",
    "gpt:size=17m,global_batch_size=4",
)


def shown(markdown: str) -> str:
    """What a reader sees of it: GitHub's rules for tables and for text that is struck out."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    kinds = [child for token in tokens for child in token.children or []]
    assert {child.type for child in kinds} <= {"text", "text_special", "softbreak"}, "no markup"
    return "".join(child.content for child in kinds)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_was_typed_is_what_is_shown(text: str) -> None:
    assert shown(plain(text)) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_is_one_cell(text: str) -> None:
    table = "\n".join([plain_row(["name", "why"]), plain_row(["---", "---"]), plain_row([text, "well"])])
    tokens = MarkdownIt("commonmark").enable("table").parse(table)
    cells = [tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "td_open"]
    assert len(cells) == 2
    assert shown(cells[0]) == text


def test_lines_become_one() -> None:
    assert plain("first\n  second\t third") == "first second third"


def test_code_in_a_table_keeps_its_bars() -> None:
    (line,) = table_row([code("a|b"), "**c**"]).splitlines()
    assert line == r"| `a\|b` | **c** |"


@pytest.mark.parametrize("text", ["plain", "a`b", "`", "``x", "x```", " spaced "])
def test_code_is_code_whatever_is_in_it(text: str) -> None:
    (paragraph,) = (token for token in MarkdownIt().parse(code(text)) if token.type == "inline")
    (child,) = paragraph.children or []
    assert (child.type, child.content.strip()) == ("code_inline", text.strip())


def test_a_block_ends_where_its_text_does() -> None:
    text = "Traceback\n```\n<b>\n````\nend"
    lines = fenced(text)
    (block,) = MarkdownIt().parse("\n".join(lines))
    assert (block.type, block.content, block.info) == ("fence", f"{text}\n", "text")
    assert re.fullmatch("`{5}", lines[-1])

"""One line of whatever was told."""

from harness.one_line import one_line


def test_line_breaks_go_and_an_error_without_words_has_its_name() -> None:
    assert one_line("a\n  b\tc ") == "a b c"
    assert one_line(ValueError("expected a,\ngot b")) == "expected a, got b"
    assert one_line(TimeoutError()) == "TimeoutError"
    assert one_line("") == ""

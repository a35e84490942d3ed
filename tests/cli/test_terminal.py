"""Text on a terminal is no wider than the terminal; in a pipe a fact stays on one line."""

from __future__ import annotations

import sys

import pytest

from trt_engine.cli.output import wrap_for_terminal, wrap_lines

LINE = "  outputs   output0: largest difference 0.3 (0.00063 of the largest value), mean 0.243, cosine 0.999979, same"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_long_line_goes_on_under_its_own_column(width: int) -> None:
    lines = wrap_lines(f"short\n{LINE}", width).split("\n")
    assert lines[0] == "short" and lines[1].startswith("  outputs   output0: largest")
    assert all(len(line) <= width for line in lines)
    assert all(line.startswith(" " * 12) and line[12] != " " for line in lines[2:]) and len(lines) > 2
    assert " ".join(" ".join(lines[1:]).split()) == " ".join(LINE.split())


def test_what_has_no_column_and_no_blank_stays_whole() -> None:
    path = "/" + "a" * 120
    assert wrap_lines(path, 60) == path
    assert wrap_lines(f"see {path}", 60).split("\n")[-1].strip() == path


def test_a_pipe_gets_whole_lines_and_a_terminal_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert wrap_for_terminal(LINE) == LINE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert max(map(len, wrap_for_terminal(LINE).split("\n"))) <= 70

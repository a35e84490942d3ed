"""Text on a terminal is no wider than the terminal; in a pipe a fact stays on one line."""

from __future__ import annotations

import random
import sys

import pytest

from trt_engine.command_line.output import wrap_for_terminal, wrap_lines
from trt_engine.reporting.document import Table
from trt_engine.reporting.text import render_result

LINE = "  outputs   output0: largest difference 0.3 (0.00063 of the largest value), mean 0.243, cosine 0.999979, same"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_long_line_goes_on_under_its_own_column(width: int) -> None:
    lines = wrap_lines(f"short\n{LINE}", width).split("\n")
    assert lines[0] == "short" and lines[1].startswith("  outputs   output0: largest")
    assert all(len(line) <= width for line in lines)
    assert all(line.startswith(" " * 12) and line[12] != " " for line in lines[2:]) and len(lines) > 2
    assert " ".join(" ".join(lines[1:]).split()) == " ".join(LINE.split())


def test_a_pipe_gets_whole_lines_and_a_terminal_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert wrap_for_terminal(LINE) == LINE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert max(map(len, wrap_for_terminal(LINE).split("\n"))) <= 70


@pytest.mark.parametrize("seed", range(20))
def test_a_table_fits_the_terminal_with_all_its_cells_in_their_columns(seed: int) -> None:
    draw = random.Random(seed)
    columns = tuple(f"column{at}" for at in range(draw.randint(2, 12)))
    left = frozenset(at for at in range(len(columns)) if at == 0 or draw.random() < 0.3)

    def cell(row: int, at: int) -> str:
        return " ".join(f"r{row}c{at}w{word}" for word in range(draw.randint(1, 9))) if at in left else f"{row}.{at}"

    rows = tuple(tuple(cell(row, at) for at in range(len(columns))) for row in range(3))
    lines = render_result([Table("", columns, rows, left)], 80).split("\n")
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines).split()
    assert set(text) == {"*"} & set(text) | {word for row in (columns, *rows) for one in row for word in one.split()}
    ends = [
        line.rindex(name) + len(name)
        for name in columns
        for line in lines
        if name in line.split() and int(name[6:]) not in left
    ]
    numbers = [
        line.index(f" 0.{at}") + len(f" 0.{at}")
        for at in range(len(columns))
        for line in lines
        if f"0.{at}" in line.split()
    ]
    assert ends == numbers, "numbers stand under their headings"

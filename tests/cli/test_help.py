"""The help of every verb: in groups, its values named, its defaults in one style, no wider than the terminal;
as is any text on one.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from itertools import pairwise

import click
import pytest

from trt_engine import errors
from trt_engine.cli.main import run
from trt_engine.cli.verbs_table import VERBS, help_text
from trt_engine.command_line.output import wrap_for_terminal, wrap_lines
from trt_engine.command_line.verb_command import GROUPS
from trt_engine.reporting.document import Table
from trt_engine.reporting.text import render_result

PAGES = [*([name] for name in VERBS), ["cache", "list"], ["cache", "prune"]]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def read(words: list[str], columns: int = 100) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run([*words, "--help"]) == 0
        return capsys.readouterr().out

    return read


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_no_line_is_wider_than_the_terminal(words: list[str], page: Callable[..., str]) -> None:
    assert not [line for line in page(words, 60).splitlines() if len(line) > 60]


def test_the_groups_stand_in_their_order_the_verbs_own_options_first(page: Callable[..., str]) -> None:
    for verb in ("bench", "profile", "compare", "size", "build"):
        found = re.findall(r"^(\w+):$", page([verb]), re.MULTILINE)
        assert found == [group for group in GROUPS if group in found]
        assert {"Input", "Build", "Output", "Advanced"} <= set(found)
    text = page(["profile"])
    assert text.index("--profiler") < text.index("--backend") < text.index("--out") < text.index("--option")


def test_a_long_example_is_broken_so_that_a_shell_joins_it(page: Callable[..., str]) -> None:
    text = page(["build"], 60)
    assert "trt-engine build model.onnx --batch 1:8:64 \\\n" in text
    assert "\\\n        -o model.engine.onnx\n" in text


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_each_line_of_an_example_begins_a_command_or_continues_one(words: list[str], page: Callable[..., str]) -> None:
    """What is pasted from the help is a command."""
    for block in re.findall(r"(?:^    trt-engine .*\n)(?:.+\n)*", page(words, 60), re.MULTILINE):
        for line, following in pairwise([*block.splitlines(), ""]):
            assert re.match(r"    trt-engine | {8}\S", line), block
            assert line.endswith("\\") == following.startswith(" " * 8), block


def test_the_help_names_every_exit_code_of_the_errors() -> None:
    named = re.search(r"Exit codes: (.*?)\.$", help_text(), re.DOTALL)
    assert named is not None
    codes = {int(code) for code in re.findall(r"\d+", named[1])}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]
    assert codes == {0, *(kind.exit_code for kind in kinds)}


def test_every_verb_shares_the_help(page: Callable[..., str]) -> None:
    from trt_engine.cli.click_app import cli
    from trt_engine.command_line.verb_command import Verb

    for name in VERBS:
        command = cli.get_command(click.Context(cli), name)
        for one in command.commands.values() if isinstance(command, click.Group) else [command]:
            assert isinstance(one, Verb), name


def test_h_is_the_help_of_a_verb_that_was_first_made_on_its_own() -> None:
    from trt_engine.command_line.options import verb

    @verb()
    def alone() -> None:
        """Alone."""

    assert alone.get_help_option(click.Context(alone)) is not None  # click keeps what this context asks for
    assert "-h" in alone.make_parser(click.Context(alone, help_option_names=["-h", "--help"]))._short_opt


@pytest.mark.parametrize(("typed", "meant"), [("trt", "tensorrt"), ("ort", "onnxruntime"), ("trtexe", "trtexec")])
def test_a_backend_by_another_name_is_answered_with_its_own(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["build", "net.onnx", "-b", typed]) == 2
    assert f"hint: did you mean `{meant}`?" in capsys.readouterr().err


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

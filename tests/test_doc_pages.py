"""The pages that messages name come with the package, and `trt-engine docs` prints them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trt_engine.cli.main import run
from trt_engine.command_line.trtexec_table import OPTIONS
from trt_engine.doc_pages import list_pages

ROOT = Path(__file__).parents[1]
NAMES = {item.name for item in list_pages()}
_FILE = re.compile(r"docs/([\w./-]+?\.(?:md|json))")
_COMMAND = re.compile(r"trt-engine docs ([a-z][\w./-]*\w)")


def texts(path: Path) -> Iterator[tuple[str, bool]]:
    """Every text of a module, and whether it is a docstring; that of a command is its help, which users read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    notes = set()
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                is_help = isinstance(node, ast.FunctionDef) and "cli" in path.parts
                notes |= set() if is_help else {id(child.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, id(node) in notes


SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_a_message_names_a_command_that_prints_the_page_and_never_a_file_of_the_tree() -> None:
    named = 0
    for path in SOURCES:
        if "docs" not in path.read_text(encoding="utf-8"):
            continue
        for text, is_note in texts(path):
            if not is_note:
                assert not _FILE.search(text), f"{path}: say `trt-engine docs NAME` in {text!r}"
            for name in _COMMAND.findall(text):
                named += 1
                assert name in NAMES, f"{path}: `trt-engine docs {name}` prints nothing"
    assert named > 5


def test_pages_that_readme_and_pages_name_exist() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in _COMMAND.findall(path.read_text(encoding="utf-8")):
            assert name in NAMES, f"{path.name}: `trt-engine docs {name}` prints nothing"


def test_every_page_of_the_tree_is_printed_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    files = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".json")]
    assert len(NAMES) == len(files) + 3 > 40
    for page in list_pages():
        assert run(["docs", page.name]) == 0
        expected = page.text if page.path is None else page.path.read_text(encoding="utf-8")
        assert capsys.readouterr().out == expected.rstrip("\n") + "\n"
        assert expected.startswith(f"# {page.title}") or page.path is not None


def test_every_option_of_trtexec_is_on_a_page_written_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", "reference/trtexec"]) == 0
    named = set(re.findall(r"`(--?[\w-]+)(?:=VALUE)?`", capsys.readouterr().out))
    assert {option.spelling for option in OPTIONS.values()} <= named


def test_the_settings_are_a_page_written_from_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", "reference/settings"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Settings\n") and "| `max_batch` | `--max-batch` |" in out
    assert "## -O of tensorrt, trtexec" in out


def test_without_a_name_the_pages_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^vision +Declared pre- and post-processing$", out, re.MULTILINE)
    assert run(["docs", "docs/vision.md"]) == 0 and capsys.readouterr().out.startswith("# Declared")


def test_a_page_that_is_not_there_is_a_usage_error_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", "visoin"]) == 2
    assert capsys.readouterr().err == "error: unknown page `visoin`\nhint: did you mean `vision`?\n"
    assert run(["docs", "../README"]) == 2
    assert "hint: `trt-engine docs` lists the pages" in capsys.readouterr().err

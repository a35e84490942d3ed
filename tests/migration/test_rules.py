"""The rules of `migrate`, each by its examples: what it finds, what it leaves alone, what it mends."""

from __future__ import annotations

import ast
import json
from pathlib import Path, PurePath

import pytest

import trt_engine as te
from migration.examples import EXAMPLES, Example
from trt_engine.command_line.trtexec_table import OPTIONS
from trt_engine.errors import UsageError
from trt_engine.verbs.migrate import cpp_source, rules, shell
from trt_engine.verbs.migrate.source import Source, file_kind

RULES = {rule.id: rule for rule in rules.all_rules()}
CASES = [
    pytest.param(rule, example, id=f"{rule}-{at}-{example.file}")
    for rule, examples in EXAMPLES.items()
    for at, example in enumerate(examples)
]
FIXED = [case for case in CASES if case.values[1].fixed is not None]


def write(folder: Path, example: Example, text: str) -> Path:
    if example.file.endswith((".cpp", ".h")) and not cpp_source.is_available():
        pytest.skip("the C++ parser (extra `migrate`) is not installed")
    path = folder / example.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found(path: Path, rule: str) -> int:
    report = te.migrate(path, rules=(rule,))
    assert not report.files_skipped and report.files_checked == 1
    return len(report.findings)


def test_every_rule_has_an_example_and_every_example_a_rule() -> None:
    assert set(EXAMPLES) == set(RULES)
    for rule in RULES.values():
        mends = bool(rule.rename or rule.drop or rule.precision)
        assert not mends or any(example.fixed is not None for example in EXAMPLES[rule.id]), rule.id


def test_every_removed_name_has_one_rule() -> None:
    removed = json.loads(Path(rules.__file__).with_name("removed_names.json").read_text())
    for language, releases in removed.items():
        for since, names in releases.items():
            by_name = [name for rule in RULES.values() if rule.since == since for name in rule.names[language]]
            assert sorted(by_name) == sorted(names)


def test_every_option_that_trtexec_lost_has_a_rule() -> None:
    known = rules.rules_between((8, 6), (11, 4))
    lost = {name for name, option in OPTIONS.items() if option.last is not None and not option.last.startswith("11")}
    of_9 = {"--nativeInstanceNorm", "--ni"}  # releases before 10.0 are not told apart here
    assert lost - known.trtexec.keys() == of_9


@pytest.mark.parametrize(("rule", "example"), CASES)
def test_a_rule_finds_what_it_is_for_and_not_what_looks_like_it(rule: str, example: Example, tmp_path: Path) -> None:
    assert found(write(tmp_path, example, example.hit), rule) >= 1
    assert found(write(tmp_path, example, example.miss), rule) == 0


def test_a_rule_finds_it_where_another_file_of_the_project_has_the_import(tmp_path: Path) -> None:
    for rule, example in (case.values for case in CASES):
        text = example.hit.replace("#include <NvInfer.h>", '#include "common.hpp"\nstatic ICudaEngine* made;')
        text = text.replace("import tensorrt as trt", "from tools.compat import *\nlogger = trt.Logger()")
        count = found(write(tmp_path, example, example.hit), rule)
        assert found(write(tmp_path, example, text), rule) == count, (rule, text)


@pytest.mark.parametrize(("rule", "example"), FIXED)
def test_what_a_rule_mends_parses_and_is_left_alone_the_second_time(
    rule: str, example: Example, tmp_path: Path
) -> None:
    path = write(tmp_path, example, example.hit)
    shown = te.migrate(path, diff=True)
    assert path.read_text() == example.hit and shown.diff
    report = te.migrate(path, fix=True)
    assert report.diff == shown.diff and report.files_fixed == (str(path),)
    assert path.read_text() == example.fixed
    assert rule not in {item.rule for item in report.findings}
    again = te.migrate(path, fix=True)
    assert not again.diff and not again.files_fixed and again.findings == report.findings
    if path.suffix == ".py":
        ast.parse(path.read_text())
    if path.suffix == ".cpp":
        parser, _ = cpp_source._parser()
        assert not parser.parse(path.read_bytes()).root_node.has_error


@pytest.mark.parametrize(
    "example", [case.values[1] for case in FIXED if "trtexec" in case.values[1].hit], ids=lambda one: one.hit[:60]
)
def test_a_mended_command_has_only_options_of_trtexec_11(example: Example, tmp_path: Path) -> None:
    path = tmp_path / PurePath(example.file).name
    path.write_text(example.hit)
    te.migrate(path, fix=True)
    (command,) = shell.find_commands(path.read_text())
    for word in command.words:
        if word.value.startswith("-"):
            last = OPTIONS[word.option].last
            assert last is None or last.startswith("11"), word.value


def test_releases_choose_the_rules() -> None:
    assert rules.parse_release("10.x") == (10, 16) and rules.parse_release("11") == (11, 0)
    assert rules.parse_release("8") == (8, 6)
    later = {rule.id for rule in rules.rules_between((10, 0), (11, 4)).rules}
    first = {rule.id for rule in rules.rules_between((8, 6), (10, 16)).rules}
    assert later & first == {"trtexec-pool-unit"} and later | first == set(RULES)
    assert not rules.rules_between((11, 0), (11, 4)).rules
    for wrong in ("7.2", "12", "eleven", "", "10.-1", "-10.0", "1_0.0"):
        with pytest.raises(UsageError, match="is not a release"):
            rules.parse_release(wrong)
    with pytest.raises(UsageError, match="newer"):
        rules.rules_between((11, 0), (10, 0))


def test_a_fix_waits_for_the_release_that_has_the_new_name(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import tensorrt as trt\nb = trt.Builder(g)\ne = b.build_engine(n, c)\n")
    assert not te.migrate(path, to_release="10.3", diff=True).diff
    assert "build_engine_with_config" in (te.migrate(path, to_release="10.6", diff=True).diff or "")


def test_the_kind_of_a_file_is_that_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("#!/usr/bin/env bash\n")
    (tmp_path / "data").write_text("x")
    assert file_kind(tmp_path / "run") == "shell" and file_kind(tmp_path / "data") is None
    assert Source(PurePath("x"), "a\nbé c").place(4) == (2, 3)

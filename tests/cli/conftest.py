"""Every error that a test of the command line meets: an option that its hint names exists where the hint says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial

import click
import pytest

from trt_engine.cli import click_app
from trt_engine.cli.main import run
from trt_engine.cli.verbs_table import VERBS
from trt_engine.command_line.output import OutputOptions
from trt_engine.errors import TrtEngineError

_OPTION = re.compile(r"(?<![\w-])(?:--[a-zA-Z][\w-]*|-[a-zA-Z])")
_OWN = frozenset(VERBS)
"""Without those that tests add."""


def unknown_options(hint: str, command: str) -> list[str]:
    """The options in a hint that exist neither on the verb of `command`, nor on one that the hint names."""
    verbs = [*shlex.split(command)[1:2], *re.findall(r"`trt-engine (\w+)", hint), *["build"] * ("rebuild" in hint)]
    if not verbs or verbs[0] not in _OWN:
        return []
    snippets = re.findall(r"`((?:trt-engine )?[^`]*)`", hint)
    ours = [text.partition(" -- ")[0] for text in snippets if text.startswith(("-", "trt-engine "))]
    known = set().union(*map(_options, verbs))
    found = [name for text in ours for name in _OPTION.findall(text) if name not in known]
    return [name for name in found if name not in command and name.lower() == name]  # what was typed, trtexec's


def _options(verb: str) -> set[str]:
    command = click_app.cli.get_command(click.Context(click_app.cli), verb)
    return set() if command is None else click_app._option_names(command) | {"--help", "-h", "--version"}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """A command line without the program's name: its exit code, stdout and stderr."""

    def typed(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trt-engine", *map(str, args)])
        capsys.readouterr()
        return _call(capsys, *args)

    return typed


@pytest.fixture
def infer(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`trt-engine infer` with these arguments: its exit code, stdout and stderr."""
    return partial(_call, capsys, "infer")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The same of `trt-engine inspect`."""
    return partial(_call, capsys, "inspect")


def _call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    return run([*map(str, args)]), *capsys.readouterr()


@pytest.fixture(autouse=True)
def _hints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lacking: list[str] = []
    fail = click_app.print_error

    def checked(
        error: TrtEngineError, talk: OutputOptions, cause: BaseException | None = None, *, command: str = ""
    ) -> int:
        lacking.extend(f"{name} (hint: {error.hint})" for name in unknown_options(error.hint or "", command))
        return fail(error, talk, cause, command=command)

    monkeypatch.setattr(click_app, "print_error", checked)
    yield
    assert not lacking

"""A stand-in trtexec on this machine, and our command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trt_engine.cli.main import run
from trtexec.stand_in import V10, write_trtexec


class Done(NamedTuple):
    """How a verb ended."""

    code: int
    out: str
    err: str


Verb = Callable[..., Done]
Tool = Callable[..., Path]


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Verb:
    """`verb("build", "m.onnx", "--json")` in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Done:
        words = [str(arg) for arg in args]
        monkeypatch.setattr(sys, "argv", ["trt-engine", *words])  # what a document says was typed
        capfd.readouterr()
        return Done(run(words), *capfd.readouterr())

    return call


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a trtexec of a version and a behaviour where ours finds it; may be called again for another one."""
    count = 0

    def put(version: tuple[int, int, int, int] = V10, **behaviour: Any) -> Path:
        nonlocal count
        count += 1
        path = write_trtexec(tmp_path / f"bin{count}", version, **behaviour)
        monkeypatch.setenv("TRT_ENGINE_TRTEXEC", str(path))
        return path

    return put

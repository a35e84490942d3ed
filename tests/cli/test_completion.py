"""Completion: a script each shell reads, and answers that are the verbs, options and choices there are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trt_engine.cli import click_app
from trt_engine.cli.main import run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_goes_to_stdout_and_how_to_install_it_to_stderr(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert "_TRT_ENGINE_COMPLETE" in out and f"{shell}_complete" in out
    assert f"trt-engine completion {shell}" in err


def test_an_error_of_choices_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion"]) == 2
    assert "Choose from: bash, zsh, fish\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zsh", "fish"))]
)  # `make test-full` installs the two
def test_the_script_is_one_the_shell_can_read(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert run(["completion", shell, "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    script = tmp_path / "script"
    script.write_text(out)
    subprocess.run([shell, "-n", str(script)], check=True)


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == "error: `shell` cannot be `tcsh`\nhint: expected one of `bash`, `zsh`, `fish`\n"


Complete = Callable[[str, int], list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """The answers to bash's function, given in this process; that of bash itself is the last test's."""

    def answers(words: str, position: int) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(position))
        assert click_app.complete("bash_complete") == 0
        return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()]

    return answers


def test_the_beginning_of_a_verb_gives_the_verb(complete: Complete) -> None:
    assert complete("trt-engine si", 1) == ["size"]


def test_options_choices_and_actions_complete(complete: Complete) -> None:
    assert complete("trt-engine cache prune --o", 3) == ["--older-than"]
    assert complete("trt-engine cache p", 2) == ["prune"]
    assert complete("trt-engine build x.onnx --precision bf", 4) == ["bf16"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("trt-engine build x.onnx --backend t", ["tensorrt", "tensorrt-rtx", "trtexec"]),
        ("trt-engine build x.onnx -b onn", ["onnxruntime"]),
        ("trt-engine bench x.onnx --device cu", ["cuda:0"]),
        ("trt-engine bench x.onnx --protocol trtexec", ["trtexec10", "trtexec11"]),
        ("trt-engine bench x.onnx --providers t", ["tensorrt", "tensorrt-rtx"]),
        ("trt-engine build x.onnx --preprocess y", ["yolo"]),
        ("trt-engine quantize x.onnx --to nv", ["nvfp4"]),
        ("trt-engine quantize x.onnx --target onnxruntime-c", ["onnxruntime-cpu", "onnxruntime-cuda"]),
        ("trt-engine report run --format m", ["md"]),
    ],
)
def test_values_complete(words: str, found: list[str], complete: Complete) -> None:
    assert complete(words, len(words.split()) - 1) == found


def test_bash_itself_completes_the_verb(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (tmp_path / "trt-engine").write_text(f'#!/bin/sh\nexec {sys.executable} -m trt_engine "$@"\n')
    (tmp_path / "trt-engine").chmod(0o755)
    program = """
        eval "$(trt-engine completion bash -q)"
        COMP_WORDS=(trt-engine si) COMP_CWORD=1 COMPREPLY=()
        _trt_engine_completion trt-engine
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", program],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "size"

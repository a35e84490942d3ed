"""Every option of trtexec 8.6 to 11.1 typed at our verbs: taken, translated, or answered with what to type."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from onnx_models import FLOAT, node, save
from trt_engine.cli.click_app import cli
from trt_engine.cli.main import run
from trt_engine.command_line.trtexec_table import (
    OPTIONS,
    FileArgument,
    IgnoredOption,
    RejectedOption,
    SameOption,
    TrtexecOption,
)

PARAMETERS = {
    verb: {name for item in cli.get_command(click.Context(cli), verb).params for name in item.opts}  # type: ignore[union-attr]
    for verb in ("build", "bench", "profile")
}

VALUES = {
    "--onnx": "net.onnx", "--loadEngine": "net.onnx", "--saveEngine": "made/net.onnx", "--timingCacheFile": "timing.cache",
    "--minShapes": "images:1x3x8x8", "--optShapes": "images:2x3x8x8", "--maxShapes": "images:4x3x8x8",
    "--shapes": "images:1x3x8x8", "--memPoolSize": "workspace:1024,dlaSRAM:1", "--tacticSources": "+CUBLAS,-CUDNN",
    "--preview": "+aliasedPluginIO1003", "--tilingOptimizationLevel": "2", "--sparsity": "enable",
    "--profilingVerbosity": "detailed", "--nvtxMode": "verbose", "--hardwareCompatibilityLevel": "ampere+",
    "--runtimePlatform": "WindowsAMD64", "--allocationStrategy": "runtime", "--weightStreamingBudget": "40%",
    "--device": "cpu", "--percentile": "90,95", "--setBuildRoute": "-knob=1", "--leanDLLPath": "libnvinfer_lean.so",
    "--refitFromOnnx": "net.onnx", "--staticPlugins": "a.so", "--dynamicPlugins": "a.so", "--plugins": "a.so",
    "--setPluginsToSerialize": "a.so", "--profile": "0",
}  # fmt: skip
"""What is typed behind the options that take no number."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trtexec_options")
    save(
        place / "net.onnx",
        [node("Relu", "images", "y")],
        {"images": (FLOAT, ["batch", 3, 8, 8])},
        {"y": (FLOAT, ["batch", 3, 8, 8])},
    )
    return place


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder / "store"))


def typed(option: TrtexecOption) -> list[str]:
    """The option and what has to stand beside it, as trtexec takes them."""
    words = [f"{option.spelling}={VALUES.get(option.spelling, '2')}" if option.takes_value else option.spelling]
    if option.spelling in ("--minShapes", "--maxShapes"):
        words += [f"{other}={VALUES[other]}" for other in ("--minShapes", "--maxShapes") if other != option.spelling]
    if isinstance(option.translation, FileArgument) and option.spelling not in ("--onnx", "--loadEngine"):
        raise AssertionError(option)
    return words


CASES = [(option, "build") for option in OPTIONS.values()]
CASES += [(option, "bench") for option in OPTIONS.values() if option.for_verb("bench") != option.for_verb("build")]


@pytest.mark.parametrize(("option", "verb"), CASES, ids=lambda it: it if isinstance(it, str) else it.spelling)
def test_every_option_of_trtexec_is_taken_translated_or_answered(
    option: TrtexecOption, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meaning = option.for_verb(verb)
    model = [] if isinstance(meaning, FileArgument) else ["net.onnx"]
    code = run([verb, *model, *typed(option), "--dry-run"])
    _, err = capsys.readouterr()
    assert "did you mean" not in err and "lists the options" not in err and "unexpected" not in err and code != 1, err
    left_out = option.measuring_only and verb == "build"
    if isinstance(meaning, RejectedOption) and not left_out:
        assert code == 2 and f"`trt-engine {verb}` does not support trtexec's `{option.spelling}`" in err
        assert f"hint: {meaning.hint}" in err
    elif isinstance(meaning, IgnoredOption) and not left_out:
        assert code == 0 and f"`{option.spelling}`: {meaning.reason}" in err
    elif option.spelling == "--dryRun":  # our `--dry-run` in capitals
        assert code == 0
    elif isinstance(meaning, SameOption) and not left_out:
        assert code == 0 and option.spelling in {*PARAMETERS[verb], "-h", "--help", "--profile"}, err
    elif "does not support" in err:
        assert code == 2 and re.search(r"hint: `trt-engine \w+", err), err
    elif "is ignored" in err:
        assert code == 0
    else:
        assert isinstance(meaning, FileArgument) or "is translated from trtexec: `" in err, err
        assert code in (0, 6), err  # 6: a precision that this graph does not have


def test_all_refused_options_of_a_line_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "net.onnx", "--best", "--calib", "c.cache", "--int8", "--saveEngine=e.onnx"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: `trt-engine build` does not support trtexec's `--best`, `--calib`"
    assert hint.startswith("hint: `--best`: gone in TensorRT 11") and "`--calib`: TensorRT's calibration caches" in hint


def test_trtexecs_command_line_without_a_verb_names_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--loadEngine=net.engine", "--duration=3"]) == 2
    assert "`trt-engine bench --loadEngine=net.engine --duration=3`" in capsys.readouterr().err


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["build", "net.onnx", *words, "--dry-run"]) == 0
    return capsys.readouterr().err


def test_a_tensorrt_setting_is_left_out_for_another_backend_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    err = said(capsys, "--builderOptimizationLevel=4", "--memPoolSize=workspace:1024")
    assert "onnxruntime has no `-O optimization_level`" in err and "onnxruntime has no such setting" in err


def test_shapes_of_several_profiles_keep_to_their_profile(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--profile=0", "--minShapes=images:1x3x8x8", "--optShapes=images:1x3x8x8", "--maxShapes=images:1x3x8x8",
        "--profile=1", "--minShapes=images:2x3x8x8", "--optShapes=images:4x3x8x8", "--maxShapes=images:8x3x8x8",
    ]  # fmt: skip
    assert run(["build", "net.onnx", *words, "--dry-run", "--json"]) == 0
    profiles = json.loads(capsys.readouterr().out)["profiles"]
    assert [profile["ranges"]["images"]["max"][0] for profile in profiles] == [1, 8]


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["quantize", "--int8"], "--to int8"),
        (["cast", "--fp16"], "--to fp16"),
        (["size", "--fp16"], "--precision fp16"),
    ],
)
def test_precisions_are_translated_for_the_verb(
    words: list[str], ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([words[0], "net.onnx", *words[1:], "--dry-run"])
    assert f"is translated from trtexec: `{ours}`" in capsys.readouterr().err


def test_a_plan_suffix_on_another_backend_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    err = said(capsys, "--saveEngine=m.engine")
    assert "`m.engine` will be a file of the backend `onnxruntime` (.onnx), not a TensorRT plan" in err
    assert "no TensorRT plan" not in said(capsys, "-o", "m.engine.onnx")

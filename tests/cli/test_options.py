"""Options come from settings: the right type, the default shown once, the value only when it was typed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from trt_engine.cli.click_app import cli
from trt_engine.cli.main import run
from trt_engine.cli.verbs_table import VERBS
from trt_engine.command_line import options, verb_command
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import settings
from trt_engine.errors import UsageError
from trt_engine.verbs.size.config import SizeConfig

ALL = (BuildConfig, RuntimeConfig, BenchConfig, SizeConfig)


@dataclass(frozen=True)
class Call:
    """What a verb made of its options, one config at a time."""

    config: type
    made: list[Any] = field(default_factory=list)


@pytest.fixture
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """A verb `takes` that has the options of one config class and keeps what it makes of them."""
    kept = Call(request.param)

    @options.verb()
    @options.config_options(kept.config)
    def takes(**values: Any) -> None:
        kept.made.append(options.config_from(kept.config, values))
        assert not values, "every value was taken"

    module = ModuleType("trt_engine.verbs.takes.command")
    module.command = takes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trt_engine.verbs.takes.command", module)
    monkeypatch.setitem(VERBS, "takes", "a verb for tests")
    yield kept


def config(name: type) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", [name], indirect=True)


# ------------------------------------------------------------------------------------------------ what is typed


@pytest.mark.parametrize("call", ALL, indirect=True)
def test_nothing_typed_is_every_default(call: Call) -> None:
    assert run(["takes"]) == 0
    assert call.made == [call.config()]


@pytest.mark.parametrize("call", ALL, indirect=True)
def test_the_help_shows_every_flag_and_every_default_once(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["takes", "--help"]) == 0
    text = re.sub(r"\s+", " ", re.sub(r"-\n\s+", "-", capsys.readouterr().out))
    for item in settings(call.config):
        for flag in item.flags:
            assert all(one in text for one in flag.split("/")), flag
    assert "None" not in text and "()" not in text and "{}" not in text
    assert "(default" not in text and text.count("[default: ") >= sum(
        "[default: " in item.help for item in settings(call.config)
    )
    assert "minShapes" not in text, "trtexec's spellings are accepted, not advertised"


@config(BuildConfig)
@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["--precision", "fp16", "--batch", "1:8:64"], {"precision": "fp16", "batch": (1, 8, 64)}),
        (["--no-parity"], {"parity": False}),
        (["--parity"], {"parity": True}),
        (["--parity-rtol", "0.01"], {"parity_rtol": 0.01}),
        (["-O", "a=1", "--option", "b-c=2"], {"options": {"a": "1", "b_c": "2"}}),
        (["--workspace", "32768MiB"], {"workspace_mib": 32768}),
        (["--workspace", "32GiB"], {"workspace_mib": 32768}),
        (["--providers", "cuda, cpu"], {"providers": ("cuda", "cpu")}),
        (["--allow-fallback"], {"allow_fallback": True}),
        (["--allowFallback"], {"allow_fallback": True}),
        (["-b", "fake", "--device", "cuda:0"], {"backend": "fake", "device": "cuda:0"}),
        (["--shapes", "'a:0':1x3,b:[2,2]"], {"shapes": {"a:0": (1, 3), "b": (2, 2)}}),
        (
            ["--profile", "x:1,2,4", "--profile", "x:4,8,16"],
            {"profiles": (Profile({"x": ShapeRange((1,), (2,), (4,))}), Profile({"x": ShapeRange((4,), (8,), (16,))}))},
        ),
    ],
)
def test_what_is_typed_for_a_build_is_what_is_meant(call: Call, args: list[str], values: dict[str, Any]) -> None:
    assert run(["takes", *args]) == 0
    assert call.made == [BuildConfig(**values)]


@config(BenchConfig)
@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["--duration", "200ms", "--warmup", "0.1"], {"duration_s": 0.2, "warmup_s": 0.1}),
        (["--batch", "8", "--iterations", "10"], {"batch": 8, "iterations": 10}),
        (["--transfers", "--no-graph"], {"transfers": True, "graph": False}),
        (["--no-transfers", "--spin"], {"transfers": False, "spin": True}),
        (["--percentile", "50,99.9"], {"percentiles": (50.0, 99.9)}),
        (["--inputs", "a.npz"], {"inputs": Path("a.npz")}),
        (["--strict", "--seed", "3"], {"strict": True, "seed": 3}),
    ],
)
def test_what_is_typed_for_a_measurement_is_what_is_meant(call: Call, args: list[str], values: dict[str, Any]) -> None:
    assert run(["takes", *args]) == 0
    assert call.made == [BenchConfig(**values)]


@config(BenchConfig)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--duration", "fast"], "cannot read the duration `fast`"),
        (["--duration", "-1"], "cannot read the duration `-1`"),
        (["--batch", "0"], "`--batch` is 0, expected 1 or more"),
        (["--batch", "1.5"], "`1.5` is not a valid integer"),
        (["--percentile", "101"], "not all between 0 and 100"),
        (["--percentile", "p99"], "cannot read the percentiles `p99`"),
        (["--protocol", "trtexec12"], "`--protocol` cannot be `trtexec12`"),
        (["--shapes", "1x3"], "cannot read the shape"),
        (["--warmUp=200", "--warmup", "1"], "`--warmup` and `--warmUp` are the same option"),
        (["--useCudaGraph", "--noCudaGraph"], "`--useCudaGraph` and `--noCudaGraph` contradict each other"),
        (["--warmUp=fast"], "expected trtexec's milliseconds"),
        (["--warm-up", "1"], "has no option `--warm-up`"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_with_a_hint(
    call: Call, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["takes", *args]) == 2
    err = capsys.readouterr().err
    assert words in err and "\nhint: " in err and "Traceback" not in err
    assert not call.made


# ------------------------------------------------------------------------------------------------ trtexec's spellings


@config(BenchConfig)
@pytest.mark.parametrize(
    ("args", "values", "said"),
    [
        (["--warmUp=200"], {"warmup_s": 0.2}, "`--warmUp=200` is translated from trtexec: `--warmup 200ms`"),
        (["--idleTime=5"], {"idle_s": 0.005}, "`--idleTime=5` is translated from trtexec: `--idle 5ms`"),
        (["--useCudaGraph"], {"graph": True}, "`--useCudaGraph` is translated from trtexec: `--graph`"),
        (["--use-cuda-graph"], {"graph": True}, "`--useCudaGraph` is translated from trtexec: `--graph`"),
        (["--noDataTransfers", "--noSpinWait"], {"transfers": False, "spin": False}, "`--no-transfers`"),
    ],
)
def test_a_spelling_of_trtexec_is_understood_as_trtexec_does_and_that_is_said(
    call: Call, args: list[str], values: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["takes", *args]) == 0
    assert call.made == [BenchConfig(**values)]
    assert said in capsys.readouterr().err


@config(BuildConfig)
@pytest.mark.parametrize(
    ("args", "values"),
    [
        (
            ["--minShapes=x:1x3,y:1", "--optShapes=x:4x3,y:4", "--maxShapes=x:8x3,y:8"],
            {"profiles": (Profile({"x": ShapeRange((1, 3), (4, 3), (8, 3)), "y": ShapeRange((1,), (4,), (8,))}),)},
        ),
        (
            ["--min-shapes=x:1x3", "--max-shapes=x:8x3"],
            {"profiles": (Profile({"x": ShapeRange((1, 3), (8, 3), (8, 3))}),)},
        ),
        (["--optShapes=x:4x3"], {"profiles": (Profile({"x": ShapeRange((4, 3), (4, 3), (4, 3))}),)}),
        (
            ["-b", "tensorrt", "--memPoolSize=workspace:32768MiB"],
            {"backend": "tensorrt", "workspace_mib": 32768},
        ),  # 32768 bytes to trtexec 10.1 and later
        (["-b", "tensorrt", "--memPoolSize=workspace:64"], {"backend": "tensorrt", "workspace_mib": 64}),
        (["--memPoolSize=workspace:64"], {}),  # ONNX Runtime has no builder to give it to
        (["--fp16"], {"precision": "fp16"}),
    ],
)
def test_a_build_is_spelled_as_trtexec_spells_it_too(call: Call, args: list[str], values: dict[str, Any]) -> None:
    assert run(["takes", *args]) == 0
    assert call.made == [BuildConfig(**values)]


@config(BuildConfig)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-b", "tensorrt", "--memPoolSize=workspace:99999999999999GiB"], "more than any machine has"),
        (["--memPoolSize=tacticSharedMemory:1"], "the memory pool `tacticSharedMemory` cannot be set here"),
        (["--fp16", "--int8"], "`--fp16` and `--int8` contradict each other"),
        (["--minShapes=x:8", "--maxShapes=x:1"], "not min <= opt <= max"),
        (["--minShapes=x:8"], "input `x` has no `--optShapes` and no `--maxShapes`"),
        (["--maxShapes=x:8"], "input `x` has no `--minShapes` and no `--optShapes`"),
        (["--minShapes=x:1", "--optShapes=x:8"], "input `x` has no `--maxShapes`"),
        (["--minShapes=x:1,y:1", "--optShapes=x:2", "--maxShapes=x:8"], "input `y` has no `--optShapes`"),
        (["--profile", "x:1,2,4", "--optShapes=x:1"], "`--profile` and `--optShapes` are the same option"),
    ],
)
def test_what_is_typed_as_trtexec_and_makes_no_sense_is_refused(
    call: Call, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["takes", *args]) == 2
    assert words in capsys.readouterr().err


@config(BenchConfig)
def test_what_was_understood_is_not_said_when_quiet_and_never_on_stdout(
    call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["takes", "--warmUp=200", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------ the smaller pieces


def test_a_verb_can_leave_settings_out() -> None:
    @click.command()
    @options.config_options(BenchConfig, leave_out=("seed",))
    def verb(**values: Any) -> None: ...

    names = {item.name for item in verb.params}
    assert "seed" not in names and "duration_s" in names


def test_a_verb_that_measures_has_each_setting_once_and_what_running_and_building_share_goes_to_both() -> None:
    made = []

    @click.command()
    @options.bench_options(leave_out=("strict",))
    def verb(**values: Any) -> None:
        made.append((options.config_from(BenchConfig, values), *options.engine_configs(values)))

    names = [item.name for item in verb.params if not getattr(item, "hidden", False)]
    assert len(names) == len(set(names)) and "strict" not in names and "parity" not in names
    typed = ["--batch", "8", "--device", "fake:0", "--allow-fallback", "-O", "a=1", "-b", "fake", "--precision", "fp16"]
    verb.main(typed, standalone_mode=False)
    verb.main([], standalone_mode=False)
    shared: dict[str, Any] = {"device": "fake:0", "allow_fallback": True, "options": {"a": "1"}}
    build = BuildConfig(backend="fake", precision="fp16", **shared)
    assert made == [
        (BenchConfig(batch=8), RuntimeConfig(**shared), build, {"backend": "fake", "precision": "fp16"}),
        (BenchConfig(), RuntimeConfig(), BuildConfig(), {}),
    ]


def test_the_command_is_spelled_so_that_it_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/trt-engine", "size", "my model.onnx"])
    assert options.command_line() == "trt-engine size 'my model.onnx'"


def test_a_second_value_of_an_option_that_takes_one_is_refused_by_every_verb() -> None:
    """Click keeps the last one in silence."""
    refused = 0
    for name in VERBS:
        command = cli.get_command(click.Context(cli), name)
        if not isinstance(command, verb_command.Verb):
            continue
        for param in command.params:
            if not isinstance(param, click.Option) or param.is_flag or param.count or param.multiple:
                continue
            args = [param.opts[0], *["one"] * param.nargs, param.opts[0], *["another"] * param.nargs]
            with pytest.raises(UsageError, match="takes one value and is given 2"):
                command.make_context(name, args)
            refused += 1
    assert refused > 300


def test_an_empty_value_is_refused_by_every_option_and_argument_of_every_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An empty path is the working folder, an empty backend the default: a variable that is not set goes unnoticed."""
    ctx = click.Context(cli)
    for verb in cli.list_commands(ctx):
        command = cli.get_command(ctx, verb)
        assert command is not None
        arguments = [item for item in command.params if isinstance(item, click.Argument)]
        for item in command.params:
            if isinstance(item, click.Option) and (item.is_flag or item.count):
                continue
            words = ["" if other is item else "x" for other in arguments]
            if isinstance(item, click.Option):
                words += [max(item.opts, key=len), *[""] * item.nargs]
            assert run([verb, *words]) == 2
            assert "is given an empty value" in capsys.readouterr().err, (verb, words)
    assert run(["build", "--onnx=", "--fp16"]) == 2
    assert "`--onnx` is given an empty value" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["build .", "build /", "migrate x --sarif ."])
def test_a_folder_without_a_name_is_a_folder(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert run(words.split()) in (2, 3, 4)
    assert "is a folder, expected a" in capsys.readouterr().err

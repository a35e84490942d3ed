"""`build --backend trtexec`: what is proved, what is said, and what each way of failing leaves behind."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models as models
from patience import HANG_S, runs, text_of, until
from trt_engine.backends.trtexec import program
from trt_engine.backends.trtexec.build import TrtexecBuilder
from trt_engine.config.build import BuildConfig
from trt_engine.engine import Engine
from trt_engine.errors import BuildError
from trt_engine.graph.load import open_model
from trt_engine.plan_header import plan_header
from trt_engine.protocols import BuildPaths
from trtexec.conftest import Done, Tool, Verb
from trtexec.stand_in import V10, V11

BOTH = pytest.mark.parametrize("version", [V10, V11], ids=["10.16", "11.1"])
ONE = pytest.mark.parametrize("version", [V10, pytest.param(V11, marks=pytest.mark.slow)], ids=["10.16", "11.1"])
"""The same code for both: one with every test run, the other with what is slow."""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.conv_net(tmp_path / "net.onnx")


@pytest.fixture
def build(verb: Verb, net: Path) -> Verb:
    """`build("--workspace", "8GiB")` of the small network into `net.engine`."""

    def call(*args: object, precision: str = "fp32", parity: str = "--no-parity") -> Done:
        return verb(
            "build", net, "--backend", "trtexec", "--precision", precision, "--batch", "1:2:4", "-o", "net.engine", parity,
            *args,
        )  # fmt: skip

    return call


def logs(store: Path) -> list[str]:
    return [path.read_text() for path in sorted((store / "logs").iterdir()) if path.suffix == ".log"]


def commands(store: Path) -> list[str]:
    """The builds' command lines, in the order they ran."""
    every = [line for text in logs(store) for line in text.splitlines() if line.startswith("# ")]
    return [line for line in every if "--saveEngine" in line]


def left(folder: Path) -> set[str]:
    """Files, without programs, models and what the store keeps for good."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not re.match(r"bin\d|.*\.onnx$", name)}


def notes(folder: Path) -> dict[str, str]:
    return Engine.open(folder / "net.engine").passport.build.notes


# ------------------------------------------------------------------------------------------------ what is built


@BOTH
def test_a_build_is_proved_and_its_log_kept(
    version: Any, tool: Tool, build: Verb, tmp_path: Path, own_store: Path
) -> None:
    tool(version)
    done = build("--json", parity="--parity")
    assert done.code == 0, done.err
    engine = Engine.open(tmp_path / "net.engine")
    passport = engine.passport
    assert (passport.backend, passport.device) == ("trtexec", "cuda:0")
    header = plan_header(engine.path)
    assert header is not None and header.version == passport.requirements.version == ".".join(map(str, version))
    assert (passport.requirements.gpu, passport.requirements.compute_capability) == ("NVIDIA H200", "9.0")
    assert passport.precision.shares["fp32"].layers == 1.0
    assert passport.parity is not None
    assert passport.build.notes["typing"] == "strong"
    assert passport.build.warnings == ()
    (text,) = logs(own_store)
    assert text.startswith("# ") and "&&&& RUNNING" in text and "&&&& PASSED" in text
    (command,) = commands(own_store)
    assert ("--stronglyTyped" in command) is (version is V10)
    for word in ("--noTF32", "--skipInference", "--memPoolSize=workspace:32768 ", "--maxShapes=images:4x3x8x8"):
        assert word in command


def test_the_version_and_the_program_are_part_of_the_key(tool: Tool, build: Verb) -> None:
    tool(V10)
    first = json.loads(build("--json", "--dry-run").out)["key"]
    tool(V11)
    assert json.loads(build("--json", "--dry-run").out)["key"] != first


def test_the_second_build_takes_the_store_and_a_forced_one_the_timing_cache(
    tool: Tool, build: Verb, own_store: Path
) -> None:
    tool(V10)
    assert build().code == 0
    (cache,) = [path for path in (own_store / "timing").iterdir() if path.suffix != ".lock"]
    size = cache.stat().st_size
    assert "Could not read cache from" in logs(own_store)[0]
    assert "the store has this engine" in build().err
    assert cache.stat().st_size == size
    assert build("--rebuild").code == 0
    assert cache.stat().st_size == size + 1
    assert "Could not read cache from" not in logs(own_store)[0]  # the log of the latest build


@ONE
def test_half_precision_is_written_into_the_graph_and_no_flag_is_passed(
    version: Any, tool: Tool, build: Verb, tmp_path: Path, own_store: Path
) -> None:
    tool(version)
    done = build(precision="fp16")
    assert done.code == 0, done.err
    assert set(Engine.open(tmp_path / "net.engine").passport.precision.shares) == {"fp16"}
    assert "--fp16" not in commands(own_store)[0]


@BOTH
def test_fp32_built_in_silence_is_found_out(version: Any, tool: Tool, build: Verb, tmp_path: Path) -> None:
    tool(version, builds_fp32=True)
    done = build("--json", precision="fp16")
    assert done.code == 6
    assert "fp16" in done.err and json.loads(done.out)["error"]["type"] == "PrecisionError"
    assert left(tmp_path) == set()


@pytest.mark.slow
@ONE
def test_a_plan_with_host_code_is_counted_and_proved_and_later_runs_after_a_yes(
    version: Any, tool: Tool, build: Verb, verb: Verb, tmp_path: Path
) -> None:
    tool(version)
    done = build("-O", "version_compatible=on", parity="--parity")
    assert done.code == 0, done.err
    passport = Engine.open(tmp_path / "net.engine").passport
    assert passport.precision.shares["fp32"].layers == 1.0 and passport.parity is not None
    measure = ("bench", "net.engine", "--duration", "50ms", "--warmup", "10ms")
    assert verb(*measure, "-O", "allow_host_code=on").code == 0
    refused = verb(*measure)
    assert refused.code != 0 and "allow_host_code=on" in refused.err


@pytest.mark.slow
@BOTH
def test_inputs_with_colons_and_several_profiles_come_through(
    version: Any, tool: Tool, verb: Verb, tmp_path: Path, own_store: Path
) -> None:
    tool(version)
    row = (models.FLOAT, ["batch", 4])
    path = models.save(tmp_path / "odd.onnx", [models.node("Relu", "in:0", "out:0")], {"in:0": row}, {"out:0": row})
    done = verb(
        "build", path, "--backend", "trtexec", "-o", "odd.engine",
        "--profile", "in:0:1x4,2x4,4x4", "--profile", "in:0:8x4,8x4,16x4",
    )  # fmt: skip
    assert done.code == 0, done.err
    words = commands(own_store)[0]
    assert words.index("--profile=0") < words.index(":1x4") < words.index("--profile=1") < words.index(":16x4")
    np.save(tmp_path / "x.npy", np.linspace(-1, 1, 48, dtype=np.float32).reshape(12, 4))
    assert verb("infer", "odd.engine", "--input", "x.npy", "-o", "y.npy").code == 0  # the second profile's
    given = np.load(tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "y.npy"), np.maximum(given, 0))


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize("size", ["32768MiB", "32GiB", "32 GB"])
def test_no_size_is_ever_passed_with_a_suffix(
    size: str, tool: Tool, build: Verb, tmp_path: Path, own_store: Path
) -> None:
    tool(V10)
    done = build("--workspace", size)
    assert done.code == 0, done.err
    assert "--memPoolSize=workspace:32768 " in commands(own_store)[0]
    assert notes(tmp_path)["workspace_mib"] == "32768"


def test_a_workspace_read_as_32_kib_stops_it_before_a_tactic_runs(tool: Tool, build: Verb, tmp_path: Path) -> None:
    tool(V10, workspace_as_bytes=True, tacticsFile=str(tmp_path / "tactics"))
    done = build()
    assert done.code == 3
    assert "`workspace` as 0.03125 MiB, 32768 MiB was requested" in done.err
    assert left(tmp_path) == set()


# ------------------------------------------------------------------------------------------------ options of versions


@pytest.mark.slow
def test_what_a_version_does_not_have_is_said_and_never_passed(tool: Tool, build: Verb, own_store: Path) -> None:
    tool(V10, lacks=["maxTactics"])
    done = build("--json", "-O", "build_route=-knob=1", "-O", "max_tactics=5", "-O", "max_threads=2")
    assert done.code == 0, done.err
    for text in ("has no `--setBuildRoute`", "has no `--maxTactics`", "no option for `max_threads`"):
        assert text in done.err
        assert any(text in warning for warning in json.loads(done.out)["warnings"])
    assert "uildRoute" not in commands(own_store)[0] and "maxTactics" not in commands(own_store)[0]
    tool(V11)
    assert build("-O", "build_route=-knob=1").code == 0
    assert any("--setBuildRoute=-knob=1" in line for line in commands(own_store))


def test_what_would_make_another_plan_is_refused_where_the_version_lacks_it(tool: Tool, build: Verb) -> None:
    tool(V10, lacks=["versionCompatible"])
    for option, text in (
        ("version_compatible=on", "has no `--versionCompatible`"),
        ("refit=identical", "cannot make a plan with `refit=identical`"),
        ("python_plugins=a.py", "plugins written in Python"),
    ):
        done = build("-O", option)
        assert done.code == 2 and text in done.err and "hint: " in done.err


def test_settings_arrive_as_trtexecs_options(tool: Tool, build: Verb, own_store: Path) -> None:
    tool(V10)
    given = {
        "optimization_level=4": "--builderOptimizationLevel=4", "max_aux_streams=0": "--maxAuxStreams=0",
        "avg_timing_iterations=2": "--avgTiming=2", "tiling_optimization=full": "--tilingOptimizationLevel=3",
        "tactic_sources=-jit_convolutions": "--tacticSources=-JIT_CONVOLUTIONS", "sparsity=on": "--sparsity=enable",
        "hardware_compatibility=ampere_plus": "--hardwareCompatibilityLevel=ampere+", "refit=all": "--refit",
        "preview_features=+aliased_plugin_io_10_03": "--preview=+aliasedPluginIO1003",
        "tactic_shared_memory=48KiB": "tacticSharedMem:0.046875",
    }  # fmt: skip
    done = build(*[word for option in given for word in ("-O", option)])
    assert done.code == 0, done.err
    for option in given.values():
        assert option in commands(own_store)[0].replace("'", "").split() or option in commands(own_store)[0]


# ------------------------------------------------------------------------------------------------ the ladder


def test_no_ladder_stops_at_the_first_failure(tool: Tool, build: Verb, own_store: Path, tmp_path: Path) -> None:
    tool(V10, needs_workspace_mib=40000)
    done = build("--no-retry", "--workspace", "8GiB")
    assert done.code == 5 and "insufficient_workspace" in done.err and "--no-retry" in done.err
    assert len(commands(own_store)) == 1
    assert left(tmp_path) == set()


@pytest.mark.slow
@ONE
def test_a_foreign_node_climbs_to_fixed_shapes_and_level_two(
    version: Any, tool: Tool, build: Verb, tmp_path: Path, own_store: Path
) -> None:
    tool(version, fail="foreign_node", works_at_level=2)
    done = build()
    assert done.code == 0, done.err
    levels = [re.findall(r"builderOptimizationLevel=(\d)", line) for line in commands(own_store)]
    assert levels == [[], [], ["2"]]
    assert "Shapes" not in commands(own_store)[1]  # the graph with its sizes written in
    passport = Engine.open(tmp_path / "net.engine").passport
    assert any("trt-engine convert" in step for step in passport.build.retries)
    assert passport.build.notes["retry"].startswith("optimisation level 2")
    assert logs(own_store)[0].count("&&&& RUNNING") >= 3


# ------------------------------------------------------------------------------------------------ failures


@ONE
@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ({"fail": "out_of_memory"}, 11, "OutOfMemory (Requested size was 68719476736 bytes.)"),
        ({"fail": "killed"}, 5, "trtexec was killed (SIGKILL)"),
        ({"fail": "empty_engine"}, 5, "Could not find any implementation for node conv"),
        ({"fail": "passed_without_engine"}, 5, "it wrote no engine"),
        ({"fail": "cuda_error"}, 3, "an illegal memory access was encountered"),
        ({"no_gpu": True}, 3, "no CUDA-capable device is detected"),
    ],
    ids=lambda value: next(iter(map(str, value.values()))) if isinstance(value, dict) else "",
)
def test_a_failure_says_why_and_leaves_its_log_alone(
    version: Any, behaviour: dict[str, Any], code: int, text: str,
    tool: Tool, build: Verb, tmp_path: Path, own_store: Path,
) -> None:  # fmt: skip
    tool(version, **behaviour)
    done = build()
    assert (done.code, text in done.err) == (code, True), done.err
    assert ("every retry failed" in done.err) is (behaviour.get("fail") == "empty_engine")
    assert "hint: " in done.err and str(own_store / "logs") in done.err
    assert logs(own_store)[0].startswith("# ")
    assert left(tmp_path) == set()
    assert not list((own_store / "engines").iterdir())


def test_a_model_with_an_operator_nobody_has_is_a_models_error(tool: Tool, verb: Verb, tmp_path: Path) -> None:
    tool(V10)
    row = (models.FLOAT, ["batch", 4])
    path = models.save(
        tmp_path / "own.onnx", [models.node("Mine", "x", "y", domain="my.ops")], {"x": row}, {"y": row},
        domains={"my.ops": 1},
    )  # fmt: skip
    done = verb("build", path, "--backend", "trtexec", "-o", "own.engine")
    assert done.code == 4
    assert "plugin" in done.err and "`-O plugins=libcustom.so`" in done.err


def test_where_no_trtexec_is_it_is_said_how_to_get_one(
    build: Verb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRT_ENGINE_TRTEXEC", str(tmp_path / "absent"))
    done = build()
    assert done.code == 3 and "TRT_ENGINE_TRTEXEC" in done.err and "libnvinfer-bin" in done.err


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("$0: error while loading shared libraries: libnvinfer.so.10: cannot open shared object file: No such file or "
         "directory", ("libnvinfer.so.10", "LD_LIBRARY_PATH")),
        ("$0: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by $0)",
         ("GLIBC_2.38", "package for this distribution")),
        ("Cuda failure: CUDA driver version is insufficient for CUDA runtime version", ("CUDA driver", "nvidia-smi")),
        ("what is this", ("what is this", "libnvinfer-bin")),
    ],
)  # fmt: skip
def test_a_trtexec_that_does_not_start_says_why(
    told: str, shown: tuple[str, ...], build: Verb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "trtexec"
    text = told.replace("`", "\\`")
    broken.write_text(f'#!/bin/sh\necho "{text}" >&2\nexit 127\n')
    broken.chmod(0o755)
    monkeypatch.setenv("TRT_ENGINE_TRTEXEC", str(broken))
    done = build()
    assert done.code == 3 and all(part in done.err for part in shown), done.err


# ------------------------------------------------------------------------------------------------ silence and Ctrl-C


def test_who_waits_is_told_the_last_words(tool: Tool, net: Path, tmp_path: Path) -> None:
    tool(V10)
    told: list[str] = []
    model, config = open_model(net), BuildConfig(backend="trtexec", device="cuda:0", batch=(1, 2, 4))
    config = BuildConfig(backend="trtexec", device="cuda:0", profiles=config.resolve(model.signature))
    TrtexecBuilder().build(model, config, BuildPaths(tmp_path / "m.engine", tmp_path / "m.log", on_status=told.append))
    assert any(text.startswith("trtexec's last output: Start parsing network model.") for text in told)
    with pytest.raises(BuildError, match="killed"):
        tool(V10, fail="killed")
        TrtexecBuilder().build(model, config, BuildPaths(tmp_path / "n.engine", tmp_path / "m.log"))
    assert (tmp_path / "m.log").read_text().count("&&&& RUNNING") == 2
    assert not (tmp_path / "n.engine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_build_ends_the_tool_and_its_children(
    number: signal.Signals, tool: Tool, net: Path, tmp_path: Path, own_store: Path
) -> None:
    pids = tmp_path / "pids"
    tool(V11, child_file=str(pids))
    process = subprocess.Popen(
        [sys.executable, "-m", "trt_engine", "build", str(net), "--backend", "trtexec", "-o", "net.engine"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(
            lambda: len(text_of(pids).split()) == 2 or process.poll() is not None,
            "the tool is at work",
        )
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        _, said = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in said.lower()
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: not runs(pid), f"process {pid} lives on")
    pids.unlink()
    assert left(tmp_path) == set()
    assert not list((own_store / "engines").iterdir())
    assert "&&&& RUNNING" in logs(own_store)[0]


def test_a_disk_too_full_for_the_log_costs_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("there is no /dev/full here to write to")
    with caplog.at_level(logging.WARNING), Path("/dev/full").open("wb", buffering=0) as sink:
        reader = program._OutputReader(None, sink, quiet=True)
        for text in (b"one\n", b"two\n"):
            reader.feed(text)
    assert reader.lines == ["one", "two"]
    assert [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()] == [
        "the rest of the raw log `/dev/full` is lost: No space left on device"
    ]

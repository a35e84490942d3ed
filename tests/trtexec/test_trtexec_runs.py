"""Engines at work through trtexec: `bench`, `infer`, `size` and `bundle`, and what each says when the tool misbehaves."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import onnx_models as models
from trt_engine.benchmark.trtexec_style_log import read_log
from trtexec.conftest import Done, Tool, Verb
from trtexec.stand_in import V10, V11

pytestmark = pytest.mark.usefixtures("kept_engines")

BOTH = pytest.mark.parametrize("version", [V10, V11], ids=["10.16", "11.1"])
SHORT = ("--duration", "50ms", "--warmup", "10ms")


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.conv_net(tmp_path / "net.onnx")


@pytest.fixture
def built(verb: Verb, tool: Tool, net: Path) -> Any:
    """`built(V10)`: `net.engine`, for batch 1 to 4, by that version."""

    def call(version: Any) -> None:
        tool(version)
        done = verb(
            "build", net, "--backend", "trtexec", "--batch", "1:2:4", "-o", "net.engine", "--no-parity", "--overwrite"
        )
        assert done.code == 0, done.err

    return call


def bench(verb: Verb, *args: object) -> Done:
    return verb("bench", "net.engine", *SHORT, "--json", *args)


def command(doc: dict[str, Any]) -> list[str]:
    words: list[str] = doc["runtime_info"]["command"].split()
    return [word for word in words if word.startswith("--")]


# ------------------------------------------------------------------------------------------------ bench


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("protocol", ["trt-engine", "trtexec10", "trtexec11"])
def test_a_protocol_is_the_same_measurement_with_both_versions(
    version: Any, protocol: str, built: Any, verb: Verb
) -> None:
    built(version)
    done = bench(verb, "--protocol", protocol, "--batch", "3")
    assert done.code == 0, done.err
    doc = json.loads(done.out)
    rules, said = doc["protocol"], command(doc)
    graph, spin, transfers = rules["graph"], rules["spin"], rules["transfers"]
    if version is V11:
        switches = {"--noCudaGraph": not graph, "--noSpinWait": not spin, "--includeDataTransfers": transfers}
    else:
        switches = {"--useCudaGraph": graph, "--useSpinWait": spin, "--noDataTransfers": not transfers}
    assert {name for name, wanted in switches.items() if wanted} == {
        word for word in said if re.match("--(no|use|include)[CSD]", word)
    }
    assert rules["clock"] == "device events"
    assert "--shapes=images:3x3x8x8" in said and "--duration=0.05" in said and "--warmUp=10" in said
    assert doc["batch"] == 3 and doc["environment"]["gpu"] == "NVIDIA H200"
    assert doc["runtime_info"]["measured_by"] == f"trtexec {'.'.join(map(str, version))}"


def test_every_sample_is_kept_and_the_log_is_read_back(built: Any, verb: Verb, tmp_path: Path) -> None:
    built(V10)
    done = bench(verb, "-o", "out", "--protocol", "trtexec10", "--percentile", "50,99")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "out" / "records.jsonl").read_text())
    assert len(record["compute_ms"]) == record["queries"] == len(record["h2d_ms"]) >= 10
    assert record["latency_ms"][0] == pytest.approx(record["compute_ms"][0] + 0.1, rel=1e-4)
    log = read_log(tmp_path / "out" / "bench.log")
    assert log.status == "passed" and log.gpu_compute_ms is not None and log.h2d_ms is not None
    assert log.gpu_compute_ms.mean == pytest.approx(json.loads(done.out)["compute_ms"]["mean"], rel=1e-4)


def test_flags_that_do_not_help_are_said_and_not_passed(built: Any, verb: Verb) -> None:
    built(V11)
    done = bench(verb, "--best", "--exposeDMA", "--fp16", "--infStreams=2")
    assert done.code == 0, done.err
    for text in ("`--best`: changes nothing", "45 % less throughput", "`--precision fp16`", "seldom helps"):
        assert text in done.err
    said = command(json.loads(done.out))
    assert not {"--best", "--exposeDMA", "--fp16"} & set(said) and "--infStreams=2" in said


def test_a_switch_read_in_another_way_makes_the_figures_worthless(built: Any, verb: Verb, tool: Tool) -> None:
    built(V11)
    tool(V11, wrong_switch=True)
    done = bench(verb)
    assert done.code == 3 and "did not measure as requested: CUDA graph off, requested on" in done.err


@pytest.mark.slow
@BOTH
def test_a_graph_that_was_not_captured_is_no_graph(version: Any, built: Any, verb: Verb, tool: Tool) -> None:
    built(version)
    tool(version, graph_refused=True)
    done = bench(verb)
    assert done.code == 0, done.err
    doc = json.loads(done.out)
    assert doc["protocol"]["graph"] is False and "graph" in doc["protocol"]["not_applicable"]
    assert any("could not be captured" in text for text in doc["warnings"])


@pytest.mark.slow
@BOTH
def test_passed_without_a_throughput_is_no_measurement(version: Any, built: Any, verb: Verb, tool: Tool) -> None:
    built(version)
    tool(version, no_throughput=True)
    done = bench(verb)
    assert done.code == 5 and "throughput" in done.err


def test_an_engine_of_another_version_is_refused_before_it_is_tried(built: Any, verb: Verb, tool: Tool) -> None:
    built(V10)
    tool(V11)
    done = bench(verb)
    assert done.code == 10
    assert "it is a plan of TensorRT 10.16.1.11, and 11.1.0.106 is installed here" in done.err and "hint: " in done.err


# ------------------------------------------------------------------------------------------------ infer


@BOTH
def test_outputs_are_those_of_the_model_bit_for_bit(
    version: Any, built: Any, verb: Verb, net: Path, tmp_path: Path
) -> None:
    built(version)
    given = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", images=given)
    done = verb("infer", "net.engine", "--input", "x.npz", "-o", "y.npz")
    assert done.code == 0, done.err
    assert "every inference starts trtexec" in done.err
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # as the stand-in
    session = onnxruntime.InferenceSession(net, options, providers=["CPUExecutionProvider"])
    assert np.array_equal(np.load(tmp_path / "y.npz")["scores"], session.run(None, {"images": given})[0])


# ------------------------------------------------------------------------------------------------ size


@pytest.mark.slow
@BOTH
def test_size_builds_measures_and_doubles(version: Any, tool: Tool, verb: Verb, net: Path, tmp_path: Path) -> None:
    tool(version)
    done = verb(
        "size", net, "--backend", "trtexec", "--precision", "fp32", "--start-batch", "2", "--max-batch", "4", *SHORT,
        "-o", "sized", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    doc = json.loads(done.out)
    assert [item["batch"] for item in doc["batches"]] == [1, 4]
    assert (doc["engines_built"], doc["measurements"]) == (2, 3)
    assert (tmp_path / "sized" / "engines" / "net_dynamic_b4.engine").read_bytes()[:4] == b"ftrt"
    assert (tmp_path / "sized" / "engines" / "timing.cache").stat().st_size
    (log,) = (tmp_path / "sized" / "engines").glob("net_dynamic_build_b4_*.log")
    found = read_log(log)
    assert (found.producer, found.status, found.workspace_mib) == ("trtexec", "passed", 32768.0)
    assert found.engine_built_s == 0.5 and found.trt_build == version[3]
    assert "GPU Compute Time: min" in (tmp_path / "sized" / "b1" / "trtexec_b1.log").read_text()


# ------------------------------------------------------------------------------------------------ bundle


# ------------------------------------------------------------------------------------------------ anyone's log


@BOTH
def test_the_log_of_a_person_who_ran_trtexec_is_read(
    version: Any, tool: Tool, verb: Verb, net: Path, tmp_path: Path
) -> None:
    path = tool(version)
    words = [f"--onnx={net}", f"--saveEngine={tmp_path / 'x.engine'}", "--duration=0", "--warmUp=0", "--dumpProfile"]
    with (tmp_path / "x.log").open("wb") as out:
        subprocess.run([path, *words, "--minShapes=images:1x3x8x8"], stdout=out, stderr=out, check=True)
    done = verb("bench", "--parse-log", "x.log", "--json")
    assert done.code == 0
    doc = json.loads(done.out)
    assert (doc["status"], doc["end_marker"], doc["error_class"]) == ("passed", "PASSED", None)
    assert (doc["throughput_qps"] is None) is (version is V10)  # 10 profiles its only run and reports no summary
    assert doc["layer_profile"]["layers"] == 6 and doc["cuda_graph"] is (version is V11)
    assert doc["command"].startswith("trtexec --onnx=") and doc["invocation"].startswith("trt-engine ")
    with (tmp_path / "y.log").open("wb") as out:
        subprocess.run(
            [path, *words, "--no-such", "--fp16" if version is V11 else "--noCudaGraph"], stdout=out, stderr=out
        )
    doc = json.loads(verb("bench", "--parse-log", "y.log", "--json").out)
    assert (doc["status"], doc["error_class"], len(doc["unknown_options"])) == ("failed", "unknown_option", 2)
    assert doc["end_marker"] == (None if version is V11 else "FAILED")
    assert "cause:     unknown_option: Unknown option: --no-such" in verb("bench", "--parse-log", "y.log").out

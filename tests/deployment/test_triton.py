"""`deploy triton`: the configuration by Triton's own schema, its values as measured, and the repository as served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from deployment.conftest import as_plan, size_run
from onnx_models import BF16, node, save
from trt_engine.cli.main import run
from trt_engine.errors import UsageError

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serving.conftest import start
from serving.triton import Client


def parsed(folder: Path, name: str) -> Any:
    """The `config.pbtxt` by the message that tritonclient was generated with: an unknown key does not parse."""
    found = model_config_pb2.ModelConfig()
    text_format.Parse((folder / name / "config.pbtxt").read_text(), found)
    return found


def settings_of(report: te.DeployReport) -> dict[str, tuple[str, str]]:
    (model,) = report.models
    return {item.name: (item.value, item.reason) for item in model.settings}


def test_two_engines_are_served_by_serve_and_answered_as_they_answer_alone(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "models"
    te.deploy("triton", [engines["images"], f"odd.name-1={engines['tokens']}", engines["fixed"]], out, max_wait_ms=1.5)
    x = np.random.default_rng(0).random((3, 3, 16, 16), np.float32)
    ids = np.arange(6).reshape(2, 3)
    with te.load(engines["images"]) as images, te.load(engines["tokens"]) as tokens:
        want = images.infer({"images": x})["scores"], tokens.infer({"ids": ids})["rows"]
    with start(model_repository=out) as server:
        for protocol in ("http", "grpc"):
            client = Client(protocol, server)
            assert client.raw.is_server_ready()
            np.testing.assert_array_equal(client.infer("images", {"images": x}).as_numpy("scores"), want[0])
            answer = client.infer("odd.name-1", {"ids": ids}, "INT64").as_numpy("rows")
            np.testing.assert_array_equal(answer, want[1])
            fours = np.ones((4, 3), np.float32)
            np.testing.assert_array_equal(client.infer("fixed", {"x": fours}).as_numpy("y"), 2 * fours)
            client.raw.close()


def test_the_configuration_is_triton_s_and_warms_up_the_profile_s_shapes(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    te.deploy("triton", engines["tokens"], tmp_path / "models")
    found = parsed(tmp_path / "models", "tokens")
    assert (found.name, found.backend, found.max_batch_size) == ("tokens", "onnxruntime", 8)
    assert [(item.name, item.data_type, [*item.dims]) for item in found.input] == [
        ("ids", model_config_pb2.TYPE_INT64, [-1])
    ]
    assert [*found.output[0].dims] == [-1, 2]
    warmups = [(item.name, item.batch_size, [*item.inputs["ids"].dims]) for item in found.model_warmup]
    assert warmups == [("smallest", 1, [1]), ("usual", 2, [4]), ("largest", 8, [16])]
    assert all(item.inputs["ids"].zero_data for item in found.model_warmup)  # a random id is no row of the table
    assert not parsed_without_warmup(engines, tmp_path).model_warmup


def parsed_without_warmup(engines: dict[str, Path], folder: Path) -> Any:
    te.deploy("triton", engines["tokens"], folder / "cold", warmup=False)
    return parsed(folder / "cold", "tokens")


def test_a_plan_is_a_plan_on_every_gpu_and_an_engine_of_rtx_is_refused(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    plan = as_plan(engines["images"], tmp_path / "detector.engine")
    report = te.deploy("triton", plan, tmp_path / "models", instances=2)
    found = parsed(tmp_path / "models", "detector")
    assert found.backend == "tensorrt" and (tmp_path / "models/detector/1/model.plan").is_file()
    group = model_config_pb2.ModelInstanceGroup
    assert [(item.count, item.kind) for item in found.instance_group] == [(2, group.KIND_GPU)]
    assert found.model_warmup[0].inputs["images"].random_data
    assert "TensorRT 10.16.1.11" in report.models[0].notes[-1]
    rtx = as_plan(engines["images"], tmp_path / "rtx.engine", "tensorrt-rtx")
    with pytest.raises(UsageError, match="no backend for `rtx`"):
        te.deploy("triton", rtx, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    te.deploy("triton", rtx, tmp_path / "other", backend="python")
    assert parsed(tmp_path / "other", "rtx").backend == "python" and (tmp_path / "other/rtx/1/rtx.engine").is_file()


def test_a_repository_for_the_python_backend_is_served_by_serve_as_well(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    te.deploy("triton", engines["fixed"], tmp_path / "models", backend="python")
    assert "import TritonPythonModel" in (tmp_path / "models/fixed/1/model.py").read_text()
    with start(model_repository=tmp_path / "models") as server:
        client = Client("http", server)
        fours = np.ones((4, 3), np.float32)
        np.testing.assert_array_equal(client.infer("fixed", {"x": fours}).as_numpy("y"), 2 * fours)
        client.raw.close()
    half = save(tmp_path / "half.onnx", [node("Identity", "x", "y")], {"x": (BF16, [4])}, {"y": (BF16, [4])})
    engine = te.build(half, out=tmp_path / "half.engine.onnx", parity=False).path
    with pytest.raises(UsageError, match="`x` of `half` is bfloat16"):
        te.deploy("triton", engine, tmp_path / "other", backend="python")


@pytest.mark.parametrize(
    ("name", "dims", "why"),
    [("fixed", [4, 3], "fixed"), ("flat", [-1], "no dimension besides the batch"), ("scalar", [1], "fixed, or is not")],
)
def test_an_engine_without_a_batch_axis_that_triton_can_split_is_not_batched(
    engines: dict[str, Path], tmp_path: Path, name: str, dims: list[int], why: str
) -> None:
    report = te.deploy("triton", engines[name], tmp_path / "models")
    found = parsed(tmp_path / "models", name)
    assert found.max_batch_size == 0 and not found.HasField("dynamic_batching") and [*found.input[0].dims] == dims
    assert why in settings_of(report)["max_batch_size"][1]
    assert (
        found.input[0].HasField("reshape") == (name == "scalar") == any("reshape" in n for n in report.models[0].notes)
    )


def test_batching_instances_and_wait_are_those_of_the_run_that_measured_the_engine(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    sized = size_run(tmp_path / "run", engines["images"])
    report = te.deploy("triton", [engines["fixed"], engines["images"]], tmp_path / "models", sized=[sized])
    found = parsed(tmp_path / "models", "images")
    batching = found.dynamic_batching
    assert ([*batching.preferred_batch_size], batching.max_queue_delay_microseconds) == ([4], 3500)
    assert found.instance_group[0].count == 2 and parsed(tmp_path / "models", "fixed").instance_group[0].count == 1
    reasons = {item.name: item.reason for item in report.models[1].settings}
    assert "50 streams within 40 ms" in reasons["instance_group.count"]
    told = te.deploy("triton", engines["images"], tmp_path / "told", sized=[sized], max_wait_ms=0.25, instances=7)
    assert settings_of(told)["dynamic_batching.max_queue_delay_microseconds"] == ("250", "as requested")
    assert settings_of(told)["instance_group.count"] == ("7", "as requested")


def test_without_a_deadline_the_best_batch_is_preferred_and_without_a_run_it_is_said(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    sized = size_run(tmp_path / "run", engines["images"], deadline=False)
    made = settings_of(te.deploy("triton", engines["images"], tmp_path / "models", sized=[sized]))
    assert made["dynamic_batching.preferred_batch_size"][0] == "4"
    assert "no deadline was sized" in made["dynamic_batching.max_queue_delay_microseconds"][1]
    made = settings_of(te.deploy("triton", engines["images"], tmp_path / "more"))
    assert made["instance_group.count"][0] == "1" and made["instance_group.count"][1].startswith("not measured")
    with pytest.raises(UsageError, match="did not measure `fixed"):
        te.deploy("triton", engines["fixed"], tmp_path / "none", sized=[sized])
    with pytest.raises(UsageError, match=r"is not a run folder|no result"):
        te.deploy("triton", engines["fixed"], tmp_path / "none", sized=[tmp_path / "more"])
    assert not (tmp_path / "none").exists()


def test_the_command_prints_the_decisions_and_a_dry_run_writes_nothing(
    engines: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models"
    assert run(["deploy", "triton", str(engines["images"]), "-o", str(out), "--dry-run"]) == 0
    assert "max_batch_size 8: the engine's largest batch" in capsys.readouterr().out and not out.exists()
    assert run(["deploy", "triton", str(engines["images"])]) == 2
    assert "no output folder" in capsys.readouterr().err

"""`trt-engine size --deadline-ms`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper, save

from trt_engine.cli.main import run

QUICK = ["--duration", "100ms", "--warmup", "0", "--max-batch", "4", "--contexts", "1", "--late", "5%"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["images"], ["maps"])],
        "net",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("maps", TensorProto.FLOAT, ["batch", 3, 8, 8])],
    )
    path = tmp_path / "net.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.slow
def test_the_answer_is_in_every_form_and_the_curve_is_kept_and_reused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ["size", str(model), *QUICK, "--deadline-ms", "300", "-o", str(out)]
    assert run([*asked, "--sources", "40@20,20@10", "--spare-gpus", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    found = made["capacity"]
    assert found["low"] <= found["streams"] <= found["high"]
    assert found["gpus"]["total"] == found["gpus"]["needed"] + 1
    assert [(point["batch"], point["frames"]) for point in found["curve"]] == [(1, "host"), (2, "host"), (4, "host")]
    kept = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert [sum(map(len, point["turns_ms"])) for point in kept] == [point["samples"] for point in found["curve"]]
    assert all(len(point["turns_ms"]) == 4 for point in kept)
    assert made == json.loads((out / "size.json").read_text())
    page = (out / "report.html").read_text()
    assert 'id="late-share-title"' in page
    assert found["batching"] in page

    assert run([*asked, "--fps", "20", "--policy", "4,1ms", "--verify", "300ms", "--min-streams", "1000000"]) == 12
    told = capsys.readouterr()
    assert "within 300 ms, 1000000 required" in told.err
    assert "the latency curve of frames on the host is from an earlier run" in told.err
    assert "measure curve" not in told.err
    assert "batch 4, wait 1 ms" in told.out
    assert "Verified: " in told.out
    assert told.out.rstrip().splitlines()[-1].startswith("PEAK_GPU_STREAMS: ")
    assert len((out / "curve.jsonl").read_text().splitlines()) == 3

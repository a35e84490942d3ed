"""ONNX Runtime's own times by node: what its trace says, whole or cut, and which of the model's nodes were behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_models as models
import trt_engine as te
from trt_engine.backend import get_backend
from trt_engine.backends.onnxruntime import profile as profiling
from trt_engine.backends.onnxruntime.node_mapping import base_name, map_nodes
from trt_engine.backends.onnxruntime.profile import TraceEvent, read_trace, split_runs
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError
from trt_engine.records.profile import LayerProfile, LayerRow

ROOT = Path(__file__).resolve().parents[3]
RESNET = ROOT / "examples" / "classifiers" / "resnet.onnx"


def save(
    path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], initializers: tuple[Any, ...] = ()
) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def looping(path: Path, trips: int) -> Path:
    """x goes through `Add` in a Loop, `trips` times."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["goes"]),
            helper.make_node("Add", ["was", "was"], ["is"], name="inner"),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("was", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("is", TensorProto.FLOAT, [64, 64]),
        ],
    )
    return save(
        path,
        [helper.make_node("Loop", ["trips", "", "x"], ["y"], name="outer", body=body)],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 64])],
        (helper.make_tensor("trips", TensorProto.INT64, [], [trips]),),
    )


def profiled(
    engine: Engine, feeds: dict[str, Any], keep: Path | None = None, inferences: int = 4, warmup: int = 2
) -> LayerProfile:
    call = get_backend("onnxruntime").load_function("profile")
    found: LayerProfile = call(engine, feeds, RuntimeConfig(), inferences=inferences, warmup=warmup, keep=keep)
    return found


def named(found: LayerProfile, name: str) -> LayerRow:
    return next(row for row in found.rows if row.name == name)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("resnet")
    return te.build(RESNET, batch=(1, 4, 8), out=folder / "resnet.engine.onnx", store=te.Store(folder / "store"))


IMAGES = {"images": np.zeros((4, 1, 32, 32), np.float32)}


# ------------------------------------------------------------------------------------------------ real runs


def test_every_node_that_ran_has_a_row_with_its_place_shape_and_type(resnet: Engine, tmp_path: Path) -> None:
    found = profiled(resnet, IMAGES, tmp_path)
    built = onnx.load(resnet.path)
    assert {row.name for row in found.rows} == {node.name for node in built.graph.node}
    assert found.inferences == 4 and found.clock == "host" and (found.wall_ms or 0) > 0
    assert found.instrument.startswith("onnxruntime profiler ")
    gemm = named(found, "Gemm_0")
    assert (gemm.kind, gemm.provider, gemm.device, gemm.calls) == ("Gemm", "cpu", "cpu", 1.0)
    assert (gemm.shapes, gemm.dtypes, gemm.precision) == (((4, 10),), ("float32",), "fp32")
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)


def test_the_trace_is_kept_where_it_was_asked_for_and_nowhere_else(resnet: Engine, tmp_path: Path) -> None:
    found = profiled(resnet, IMAGES, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["onnxruntime.json"]
    assert found.raw == str(tmp_path / "kept" / "onnxruntime.json")
    assert len(split_runs(read_trace(Path(found.raw)))) == 6, "the warm-up's runs are in the file"
    assert profiled(resnet, IMAGES).raw is None


def test_fused_nodes_are_told_as_the_models_nodes_they_were_made_of(resnet: Engine) -> None:
    found = profiled(resnet, IMAGES)
    made = {row.onnx_nodes for row in found.rows if row.onnx_nodes}
    model = {node.name for node in onnx.load(RESNET).graph.node}
    told = [name for nodes in made for name in nodes]
    assert sorted(told) == sorted(model), "every node of the model is behind exactly one row"


def test_nodes_without_names_are_found_by_the_tensors_between_them(tmp_path: Path) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    engine = te.build(net, batch=(1, 4, 8), out=tmp_path / "net.engine.onnx", parity=False)
    found = profiled(engine, {"images": np.zeros((4, 3, 8, 8), np.float32)})
    told = [name for row in found.rows for name in row.onnx_nodes]
    assert sorted(told) == ["c0", "c1", "g", "r0", "r1", "scores"]


def test_a_loops_time_is_without_its_body_and_its_nodes_say_how_often_they_ran(tmp_path: Path) -> None:
    engine = te.build(looping(tmp_path / "m.onnx", 7), out=tmp_path / "m.engine.onnx", parity=False)
    found = profiled(engine, {"x": np.ones((64, 64), np.float32)}, tmp_path)
    inner, outer = named(found, "inner"), named(found, "outer")
    assert (inner.calls, outer.calls) == (7.0, 1.0)
    assert inner.flops == 7 * 64 * 64
    events = [event for event in read_trace(Path(found.raw or "")) if event.name == "outer"]
    whole_ms = sum(event.us for event in events[-found.inferences :]) / 1e3 / found.inferences
    assert sum(row.mean_ms for row in found.rows) == pytest.approx(whole_ms, rel=1e-6), "the body's time is the body's"


def test_a_trace_that_would_be_too_long_is_made_shorter_and_that_is_said(
    resnet: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_MOST_EVENTS", 60)  # three runs of this graph
    found = profiled(resnet, IMAGES, inferences=50, warmup=10)
    assert found.inferences < 5
    assert any("of 50 inferences were profiled" in note for note in found.notes)


def test_an_engine_whose_model_is_gone_is_told_by_the_names_in_its_own_graph(tmp_path: Path) -> None:
    model = tmp_path / "gone.onnx"
    model.write_bytes(RESNET.read_bytes())
    engine = te.build(model, batch=(1, 4, 8), out=tmp_path / "gone.engine.onnx", parity=False)
    model.unlink()
    found = profiled(engine, IMAGES)
    assert named(found, "Gemm_0").onnx_nodes == ("Gemm_0",)
    blocked = [row for row in found.rows if row.name.endswith("_nchwc")]
    assert all(row.onnx_nodes == (row.name.removesuffix("_nchwc"),) for row in blocked)


# ------------------------------------------------------------------------------------------------ traces


def line(name: str, ts: int, dur: int, tid: int = 1, cat: str = "Node", **args: Any) -> dict[str, Any]:
    return {"cat": cat, "pid": 1, "tid": tid, "dur": dur, "ts": ts, "ph": "X", "name": name, "args": args}


def node(name: str, ts: int, dur: int, op: str = "Relu", tid: int = 1) -> dict[str, Any]:
    return line(f"{name}_kernel_time", ts, dur, tid, op_name=op, provider="CPUExecutionProvider")


def test_what_lies_inside_another_node_is_taken_out_of_it_once() -> None:
    events = [
        TraceEvent("model_run", 0, 100),
        TraceEvent("outer", 1, 90, op="Loop"),
        TraceEvent("middle", 2, 40, op="If"),
        TraceEvent("inner", 3, 10, op="Add"),
        TraceEvent("inner", 50, 20, op="Add"),
        TraceEvent("beside", 5, 80, thread=2, op="Add"),
    ]
    ((*found,),) = split_runs(sorted(events, key=lambda event: (event.start_us, -event.us)))
    times = [(event.name, us) for event, us in found]
    assert times == [("outer", 30.0), ("middle", 30.0), ("inner", 10.0), ("beside", 80.0), ("inner", 20.0)]


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '[{"cat": "Node"}]', "[1, null]"])
def test_a_file_that_is_no_trace_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(EngineError, match="is not a trace of ONNX Runtime"):
        read_trace(path)
    with pytest.raises(EngineError, match="no such file"):
        read_trace(tmp_path / "missing.json")


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("fused", "node_name"),
    [
        ("Conv_0_nchwc", "Conv_0"), ("Mul_0/QuickGeluFusion/", "Mul_0"), ("MatMul_1/MatMulScaleFusion/", "MatMul_1"),
        ("/model/attn/MatMul_1", "/model/attn/MatMul_1"), ("fused Conv_3", "Conv_3"), ("plain", "plain"),
    ],
)  # fmt: skip
def test_names_made_from_a_nodes_name_lead_back_to_it(fused: str, node_name: str) -> None:
    assert base_name(fused) == node_name


def test_a_fusion_that_kept_the_last_tensor_is_told_whole_without_any_name(tmp_path: Path) -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    model = onnx.load(save(tmp_path / "m.onnx", [
        helper.make_node("Sigmoid", ["x"], ["s"], name="sig"), helper.make_node("Mul", ["x", "s"], ["m"], name="mul"),
        helper.make_node("Relu", ["m"], ["y"], name="relu"),
    ], value[:1], value[1:]))  # fmt: skip
    built = onnx.load(save(tmp_path / "b.onnx", [
        helper.make_node("QuickGelu", ["x"], ["m"], domain="com.microsoft"),
        helper.make_node("Relu", ["m"], ["y"], name="relu"),
    ], value[:1], value[1:]))  # fmt: skip
    assert map_nodes(built, model) == {"m": ("sig", "mul"), "y": ("relu",)}


def test_a_blocked_convolution_named_after_its_result_is_found_beside_another_that_reads_the_same() -> None:
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Relu", ["x"], ["relu_4"], name="node_relu_4"),
                helper.make_node("Conv", ["relu_4", "w"], ["getitem_15"], name="node_Conv_157"),
                helper.make_node("Relu", ["getitem_15"], ["relu_5"], name="node_relu_5"),
                helper.make_node("Conv", ["relu_4", "v"], ["getitem_21"], name="node_Conv_161"),
            ],
            "g",
            [],
            [],
        )
    )
    built = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Conv", ["relu_4", "wb"], ["reorder_1"], name="relu_5_nchwc"),
                helper.make_node("Conv", ["relu_4", "vb"], ["reorder_2"], name="getitem_21_nchwc"),
            ],
            "g",
            [],
            [],
        )
    )
    assert map_nodes(built, model) == {"reorder_1": ("node_Conv_157", "node_relu_5"), "reorder_2": ("node_Conv_161",)}


# ------------------------------------------------------------------------------------------------ for who watches kernels


def test_the_nodes_are_written_down_while_somebody_else_watches(resnet: Engine, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    with get_backend("onnxruntime").load_function("trace_nodes")(resnet, IMAGES, RuntimeConfig(), trace=path) as infer:
        infer()
        infer()
        assert not path.exists()
    assert len(split_runs(read_trace(path))) == 2
    assert [item.name for item in tmp_path.iterdir()] == ["nodes.json"]

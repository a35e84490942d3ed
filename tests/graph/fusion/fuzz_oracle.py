"""The verdict on a fused random graph: plain ONNX Runtime without optimisation computes what is right."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from trt_engine.graph.fusion import fuse_model

from .random_graphs import Drawn, Feeds, draw_feeds, draw_graph

RIGHT, NOT_FUSED, WRONG, CRASH, FAILS, NOT_JUDGED, NOT_FINITE = (
    "right", "not fused", "wrong", "crash", "fails at run", "not judged", "not finite differs",
)  # fmt: skip
FAULTS = (WRONG, CRASH, FAILS)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a graph in one mode, and what it rests on."""

    verdict: str
    text: str = ""
    counts: dict[str, int] = field(default_factory=dict)


def judge(family: str, seed: int, *, on_gpu: bool) -> Verdict:
    """The verdict on the graph of a seed: fused, and run beside the unfused one on each kind of input."""
    drawn = draw_graph(family, seed)
    if drawn is None:
        return Verdict(NOT_JUDGED, "shapes contradict each other")
    try:
        source = _session(drawn.model)
    except Exception as error:
        return Verdict(NOT_JUDGED, f"the source does not load: {error}"[:200])
    try:
        fused = fuse_model(drawn.model, Path(), on_gpu=on_gpu)
    except Exception as error:
        return Verdict(CRASH, f"{type(error).__name__}: {error}")
    if warnings := getattr(fused, "warnings", ()):
        return Verdict(CRASH, "; ".join(warnings))
    counts = dict(fused.counts)
    if not counts:
        return Verdict(NOT_FUSED)
    try:
        changed = _session(fused.proto)
    except Exception as error:
        missing = "NOT_IMPLEMENTED" in str(error) or "NotImplemented" in type(error).__name__
        return Verdict(NOT_JUDGED if missing else FAILS, f"load: {error}"[:400], counts)
    verdict, judged = Verdict(RIGHT, counts=counts), 0
    for kind, feeds in draw_feeds(drawn):
        try:
            expected = source.run(None, feeds)
        except Exception:
            continue  # sizes that do not fit each other
        judged += 1
        if drawn.half and on_gpu and kind in ("row masked", "all masked", "ones"):
            continue  # no number of FP16 takes a score in, so these rows have other weights; CUDA rounds them anyway
        try:
            found = changed.run(None, feeds)
        except Exception as error:
            return Verdict(FAILS, f"{kind}: {error}"[:400], counts)
        if text := _difference(drawn, feeds, expected, found):
            if kind != "not finite":
                return Verdict(WRONG, f"{kind}: {text}", counts)
            verdict = Verdict(NOT_FINITE, f"{kind}: {text}", counts)
    return verdict if judged else Verdict(NOT_JUDGED, "the source runs on no input", counts)


def _session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _difference(drawn: Drawn, feeds: Feeds, expected: list[np.ndarray], found: list[np.ndarray]) -> str:
    """Where the outputs differ by more than rounding does; empty where they do not."""
    moved: list[float] = []
    for at, (one, two) in enumerate(zip(expected, found, strict=True)):
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"output {at} is {two.dtype} {two.shape}, expected {one.dtype} {one.shape}"
        off, limit = _off(one, two, drawn.half)
        if off > limit:
            moved = moved or _moved(drawn, feeds, expected)
            if off > limit + 8 * moved[at]:
                return f"output {at} differs by {off:.3g}, {limit:.3g} allowed, the source moves by {moved[at]:.3g}"
    return ""


def _off(one: np.ndarray, two: np.ndarray, half: bool) -> tuple[float, float]:
    """The largest difference, infinite where one alone is not a number, and what is allowed."""
    a, b = one.astype(np.float64), two.astype(np.float64)
    if a.size == 0:
        return 0.0, 0.0
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0, np.abs(a - b))
    finite = a[np.isfinite(a)]
    scale = float(np.abs(finite).max()) if finite.size else 0.0
    return float(np.nan_to_num(apart, nan=np.inf).max()), (2e-2 if half else 1e-4) * scale + (1e-3 if half else 1e-30)


def _moved(drawn: Drawn, feeds: Feeds, expected: list[np.ndarray]) -> list[float]:
    """How far the source's own rounding moves each output: from itself in double precision; with inputs, some of them the
    next number, where that does not run and in FP16, whose sums ONNX Runtime keeps in FP32 between some operators."""
    made = []
    with contextlib.suppress(Exception):
        exact = _session(_in_double(drawn.model))
        made.append(exact.run(None, {name: _double(value) for name, value in feeds.items()}))
    if not made or drawn.half:
        source, random = _session(drawn.model), np.random.default_rng(0)
        for _ in range(3):
            moved = {
                name: np.where(random.random(value.shape) < 0.5, np.nextafter(value, value.dtype.type(0)), value)
                if value.dtype.kind == "f"
                else value
                for name, value in feeds.items()
            }
            made.append(source.run(None, moved))
    return [max(_off(one, other[at], drawn.half)[0] for other in made) for at, one in enumerate(expected)]


def _double(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64) if value.dtype.kind == "f" else value


def _in_double(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that computes in FP64."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    kinds, graph = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16), made.graph
    for item in graph.initializer:
        if item.data_type in kinds:
            item.CopyFrom(onnx.numpy_helper.from_array(_double(onnx.numpy_helper.to_array(item)), item.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in kinds:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    del graph.value_info[:]
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i in kinds:
                attribute.i = onnx.TensorProto.DOUBLE
    nodes = []
    for at, node in enumerate(graph.node):
        if node.op_type not in ("Erf", "Gelu"):  # ONNX Runtime has kernels of FP32 alone
            nodes.append(node)
            continue
        ends = [node.input[0], *(f"single_{at}_{end}" for end in range(2)), node.output[0]]
        nodes.append(onnx.helper.make_node("Cast", ends[:1], ends[1:2], to=onnx.TensorProto.FLOAT))
        node.input[0], node.output[0] = ends[1:3]
        nodes += [node, onnx.helper.make_node("Cast", ends[2:3], ends[3:], to=onnx.TensorProto.DOUBLE)]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return made

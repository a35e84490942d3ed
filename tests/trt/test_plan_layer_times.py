"""Times by name and layers by name become rows: repeated names stay apart, unknown ones keep their time."""

from __future__ import annotations

import pytest

from trt_engine.trt.layer_timing import layer_rows, merge_runs
from trt_engine.trt.layers import LayerInfo, LayerTensor, compute_dtypes

HALF = LayerTensor("x", "float16", (2, 8), None)
GEMM = LayerInfo("gemm", "gemm", (HALF,), (LayerTensor("y", "float16", (2, 4)),), weights="float16", weight_count=32,
                 onnx_nodes=("/fc/MatMul",))  # fmt: skip
COPY = LayerInfo("copy", "Reformat", (HALF,), (HALF,), reformat=True)


def test_layers_that_share_a_name_stay_apart_by_their_order() -> None:
    times = merge_runs([[("copy", 1.0), ("gemm", 4.0), ("copy", 3.0)], [("copy", 2.0), ("gemm", 4.0), ("copy", 3.0)]])
    assert [(time.name, time.average_ms) for time in times] == [("copy", 1.5), ("gemm", 4.0), ("copy", 3.0)]
    assert [time.share_pct for time in times] == pytest.approx([100 * part / 17 for part in (3, 8, 6)])


def test_a_row_has_the_inspectors_facts_and_the_profilers_time() -> None:
    copy, gemm = layer_rows(
        merge_runs([[("copy", 1.0), ("gemm", 3.0)]]), (COPY, GEMM), device="cuda:0", same_shapes=True
    )
    assert (gemm.median_ms, gemm.share, gemm.category, gemm.precision) == (3.0, 0.75, "matrix", "fp16")
    assert gemm.nbytes == 2 * (16 + 8 + 32) and gemm.shapes == ((2, 4),) and gemm.onnx_nodes == ("/fc/MatMul",)
    assert (copy.category, copy.precision) == ("reformat", "")


def test_other_shapes_than_the_inspectors_tell_no_sizes() -> None:
    (row,) = layer_rows(merge_runs([[("gemm", 3.0)]]), (GEMM,), device="cuda:0", same_shapes=False)
    assert row.nbytes is None and row.shapes == () and row.precision == "fp16"


def test_a_layer_the_inspector_does_not_know_keeps_its_time_and_the_nodes_in_its_name() -> None:
    (row,) = layer_rows(merge_runs([[("[ONNX Layer: /a/Conv]", 3.0)]]), (GEMM,), device="cuda:0", same_shapes=True)
    assert (row.median_ms, row.kind, row.onnx_nodes, row.nbytes) == (3.0, "", ("/a/Conv",), None)


def test_what_a_layer_computes_in_is_told_by_its_place_and_moves_are_left_out() -> None:
    assert compute_dtypes((COPY, GEMM)) == {1: "fp16"}

"""A graph whose engine computes in another type: measured, and named; an engine that is another than asked for fails."""

from __future__ import annotations

import pytest

from trt_engine.records.sweep import CellSpec
from trt_engine.verbs.run.cell_runner import _accepts_other_precision


@pytest.mark.parametrize(("precision", "backend", "device", "providers", "measured"), [
    ("int8", "onnxruntime", "cpu", (), True),
    ("fp16", "onnxruntime", "cpu", (), True),
    ("int8", "onnxruntime", "cuda:0", ("cuda",), True),
    ("fp8", "onnxruntime", "cuda:0", (), True),
    ("fp16", "onnxruntime", "cuda:0", ("cuda",), False),
    ("fp32", "onnxruntime", "cpu", (), False),
    ("int8", "onnxruntime", "cuda:0", ("tensorrt", "cuda"), False),
    ("int8", "onnxruntime", "cuda:0", ("NvTensorRTRTXExecutionProvider", "cuda"), False),
    ("int8", "tensorrt", "cuda:0", (), False),
])  # fmt: skip
def test_an_engine_that_computes_in_another_type_is_measured_where_that_is_expected(
    precision: str, backend: str, device: str, providers: tuple[str, ...], measured: bool
) -> None:
    spec = CellSpec("label", "model", "model.onnx", precision, backend, 8, device, ("build",), providers=providers)
    assert _accepts_other_precision(spec) is measured

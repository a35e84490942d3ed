"""A quantised graph where nothing has kernels for it: measured, and said; an engine that is another than asked for fails."""

from __future__ import annotations

import pytest

from trt_engine.cells import CellSpec
from trt_engine.matrix.work import _without_kernels


@pytest.mark.parametrize(("precision", "backend", "device", "providers", "told"), [
    ("int8", "onnxruntime", "cpu", (), "this processor"),
    ("fp16", "onnxruntime", "cpu", (), "this processor"),
    ("int8", "onnxruntime", "cuda:0", ("cuda",), "ONNX Runtime's CUDA provider"),
    ("fp8", "onnxruntime", "cuda:0", (), "ONNX Runtime's CUDA provider"),
    ("fp16", "onnxruntime", "cuda:0", ("cuda",), None),
    ("fp32", "onnxruntime", "cpu", (), None),
    ("int8", "onnxruntime", "cuda:0", ("tensorrt", "cuda"), None),
    ("int8", "tensorrt", "cuda:0", (), None),
])  # fmt: skip
def test_who_has_no_kernels_for_a_precision_is_named(
    precision: str, backend: str, device: str, providers: tuple[str, ...], told: str | None
) -> None:
    spec = CellSpec("label", "model", "model.onnx", precision, backend, 8, device, ("build",), providers=providers)
    assert _without_kernels(spec) == told

"""The real TensorRT-RTX asked about plans, on a machine that need not have a driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorrt_machines import plan_bytes, rtx_plan_bytes
from trt_engine.device import info
from trt_engine.plan_header import plan_header
from trt_engine.records.inspect import EngineReport
from trt_engine.verbs.inspect.run import inspect

trt = pytest.importorskip("tensorrt_rtx")


def build(*gpus: str) -> tuple[bytes, list[str]]:
    """A plan of one multiplication by stored weights, and what was logged while it was built."""

    class Messages(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.texts: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            self.texts.append(text)

    messages = Messages()
    builder = trt.Builder(messages)
    network, config = builder.create_network(0), builder.create_builder_config()
    config.num_compute_capabilities = len(gpus)
    for index, name in enumerate(gpus):
        assert config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    given = network.add_input("x", trt.float32, (1, 3, 8, 8))
    weights = trt.Weights(trt.float32, 0, 0)
    import numpy as np

    kernel = np.ones((4, 3, 3, 3), np.float32)
    layer = network.add_convolution_nd(given, 4, (3, 3), trt.Weights(kernel), weights)
    network.mark_output(layer.get_output(0))
    plan = builder.build_serialized_network(network, config)
    assert plan is not None, messages.texts
    return bytes(plan), messages.texts


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real plan for 8.9 and 12.0."""
    path: Path = tmp_path_factory.mktemp("plans") / "net.engine"
    raw, _ = build("SM89", "SM120")
    path.write_bytes(raw)
    return path


def test_the_header_of_a_real_plan_is_read(plan: Path, tmp_path: Path) -> None:
    raw, texts = build("SM80", "SM86", "SM121")
    path = tmp_path / "net.bin"
    path.write_bytes(raw)
    for at, names in ((plan, ("8.9", "12.0")), (path, ("8.0", "8.6", "12.1"))):
        header = plan_header(at)
        assert header is not None and header.product == "TensorRT-RTX" and header.version == trt.__version__
        assert (header.compute_capabilities, header.has_ptx) == (names, False)
        assert header.find_damage(at.stat().st_size) is None
    header = plan_header(path)
    assert header is not None and f"Total Weights Memory: {header.weight_nbytes} bytes" in "\n".join(texts)


def test_what_is_no_plan_is_malformed_and_a_missing_driver_is_no_answer(plan: Path, tmp_path: Path) -> None:
    from trt_engine.backends.tensorrt_rtx.compatibility import query_validity

    path = tmp_path / "other"
    for content in (plan_bytes(), b"x" * 100, b"", plan.read_bytes()[:63]):
        path.write_bytes(content)
        report = query_validity(path)
        assert (report.validity, report.diagnostics) == ("INVALID", 32) and report.messages
    if not info.gpus():
        path.write_bytes(rtx_plan_bytes())
        for whole in (plan, path):
            report = query_validity(whole)
            assert (report.validity, report.diagnostics) == ("INVALID", 0)
            assert "cudaError 35" in report.messages[-1]


@pytest.mark.parametrize("name", ["net.engine", "net.plan", "net.trt", "net.bin", "net"])
def test_inspect_answers_for_a_real_plan_whatever_it_is_called(plan: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(plan.read_bytes())
    report = inspect(path)
    assert isinstance(report, EngineReport) and report.plan is not None
    assert (report.plan.product, report.plan.version) == ("TensorRT-RTX", trt.__version__)
    assert report.plan.compute_capabilities == ("8.9", "12.0") and report.tensorrt_version is None
    if not info.gpus():
        assert (
            report.compatibility.status == "refuse"
            and f"plan of TensorRT-RTX {trt.__version__}" in report.compatibility.reason
        )

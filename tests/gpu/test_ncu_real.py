"""What only a GPU shows of `ncu`: the real tool takes our words, prints what we read, spells kernels as we look for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_engine.backend import list_backends
from trt_engine.config.bench import BenchConfig
from trt_engine.engine import Engine, payload_files
from trt_engine.environment import Environment
from trt_engine.profiling.instruments import ncu, nsight_tools
from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.records.passport import BuildInfo, Passport, Precision, Requirements, Source
from trt_engine.tensors import Signature, TensorSpec

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 512, 2048

# a backend of another package, as docs/extending.md has it: the watched process finds it too
BACKEND = f"""
import numpy as np
from trt_engine.backend import BackendSpec
from trt_engine.device import open_device
from trt_engine.protocols import Session

spec = BackendSpec(
    name="torch-for-a-test", summary="a matrix product and what follows it", payload_suffix=".test", modules=("torch",),
    install="pip install torch", builder=None, runtime="torch_for_a_test:Runtime", devices=("cuda",), hidden=True,
)


class Runtime:
    def load(self, engine, config):
        return TorchSession(engine.signature)


class TorchSession(Session):
    runs_host_arrays = True
    binds_resident = True

    def __init__(self, signature):
        import torch

        self.torch, self.signature, self.device = torch, signature, open_device("cpu")
        self.weights = torch.ones(({COLUMNS}, {COLUMNS}), device="cuda") / {COLUMNS}

    def work(self, x):
        return self.torch.softmax(self.torch.relu(x @ self.weights) + 1.5, dim=-1)

    def run(self, feeds):
        y = self.work(self.torch.from_numpy(np.asarray(feeds["x"])).cuda())
        return {{"y": y.cpu().numpy()}}

    def bind_resident(self, feeds, *, graph=False):
        torch = self.torch
        x = torch.from_numpy(np.asarray(feeds["x"])).cuda()
        self.work(x)
        torch.cuda.synchronize()
        if not graph:

            def plain():
                self.work(x)
                torch.cuda.synchronize()

            return plain
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            self.out = self.work(x)

        def replay():
            captured.replay()
            torch.cuda.synchronize()

        return replay

    def runtime_info(self):
        return {{"device": "cuda:0", "torch": self.torch.__version__}}

    def close(self):
        self.weights = None
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An engine of a backend that another package brings, for this process and for its children."""
    pytest.importorskip("torch")
    site = tmp_path / "site"
    about = site / "torch_for_a_test-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "torch_for_a_test.py").write_text(BACKEND)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-for-a-test\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[trt_engine.backends]\ntorch-for-a-test = torch_for_a_test:spec\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    list_backends.cache_clear()
    path = tmp_path / "net.test"
    path.write_bytes(b"nothing: the backend knows the network")
    shape = (ROWS, COLUMNS)
    passport = Passport(
        schema="trt-engine/passport", schema_version=1, backend="torch-for-a-test", payload=payload_files(path),
        model=Source("net", "sha256:0", None, "net.onnx"),
        signature=Signature((TensorSpec("x", "float32", shape),), (TensorSpec("y", "float32", shape),)),
        profiles=(), precision=Precision(None), device="cuda:0", build=BuildInfo("none", {}, 0.0, "test"),
        environment=Environment.detect(), requirements=Requirements("torch", "2"),
    )  # fmt: skip
    yield Engine.seal(path, passport).path
    list_backends.cache_clear()


def kernel_names() -> list[str]:
    """What runs in one inference, as CUPTI spells it: by PyTorch's profiler, in this process."""
    import torch

    x = torch.from_numpy(np.ones((ROWS, COLUMNS), np.float32)).cuda()
    weights = torch.ones((COLUMNS, COLUMNS), device="cuda")
    torch.softmax(torch.relu(x @ weights) + 1.5, dim=-1)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        torch.softmax(torch.relu(x @ weights) + 1.5, dim=-1)
        torch.cuda.synchronize()
    found: list[Any] = [item for item in seen.events() if item.device_type.name == "CUDA"]
    names = dict.fromkeys(item.name for item in sorted(found, key=lambda item: item.time_range.start))
    return [name for name in names if not name.startswith(("Mem", "Activity", "ProfilerStep"))]


@pytest.fixture
def tool() -> nsight_tools.Tool:
    if shutil.which("ncu") is None:
        pytest.skip("ncu is not installed here")
    if nsight_tools.read_permission().is_refused:
        pytest.skip("the driver lets administrators alone read the counters")
    return nsight_tools.find_tool("ncu")


def test_kernels_of_a_capture_are_found_by_name_and_their_counters_are_within_what_is_possible(
    engine: Path, tmp_path: Path, tool: nsight_tools.Tool
) -> None:
    names = kernel_names()
    assert len(names) >= 3, names
    found = ncu.collect_counters(
        engine, tmp_path / "out", kernels=names, config=BenchConfig(graph=False), rules=True, timeout_s=120
    )
    assert [item.kernel for item in found] == names
    for item in found:
        assert item.duration_us is not None and 0.5 < item.duration_us < 1e5
        for share in (item.compute_pct, item.memory_pct, item.dram_pct, item.occupancy_pct):
            assert share is not None and 0 <= share <= 100
        assert item.units["gpu__time_duration.sum"] == "ns" and item.units["dram__bytes_read.sum"] == "byte"
        assert set(ncu.METRICS) <= set(item.metrics)
        assert item.instrument.startswith(f"{tool.label}, clocks as they are")
    product = max(found, key=lambda item: item.compute_pct or 0.0)
    assert (product.compute_pct or 0) > 30
    x_bytes = 4 * ROWS * COLUMNS
    assert product.metrics["dram__bytes_read.sum"] == pytest.approx(x_bytes + 4 * COLUMNS**2, rel=0.5)
    assert any(item.advice for item in found)
    assert (tmp_path / "out" / ncu.REPORT).stat().st_size > 1000
    assert "--clock-control none" in (tmp_path / "out" / ncu.LOG).read_text()


def test_kernels_inside_a_replayed_graph_are_measured_too(
    engine: Path, tmp_path: Path, tool: nsight_tools.Tool
) -> None:
    found = ncu.collect_counters(engine, tmp_path / "out", kernels=(), config=BenchConfig(graph=True), timeout_s=120)
    assert {ncu.base_name(item.kernel) for item in found} >= {ncu.base_name(name) for name in kernel_names()}


def test_a_kernel_that_never_runs_is_told_with_those_that_do(
    engine: Path, tmp_path: Path, tool: nsight_tools.Tool
) -> None:
    with pytest.raises(ProfilerUnavailable, match="profiled no kernels"):
        ncu.collect_counters(engine, tmp_path / "out", kernels=["nothing_of_that_name"], timeout_s=120)

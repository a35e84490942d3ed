"""Records of `profile`: time breakdown, layers, kernels and device peaks.

Like `records`, these types import no instrument. Durations are named with their unit; a share is a fraction between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trt_engine.config.bench import ProfilerName
from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.format import node_label
from trt_engine.records.bench import Protocol
from trt_engine.records.percentiles import Summary

Category = Literal[
    "matrix", "attention", "normalisation", "element-wise", "reduction", "copy", "reformat", "control", "other"
]
"""Type of work of a kernel or layer. `matrix`: convolutions and matrix products, with whatever is fused into them;
`copy`: moves bytes as they are; `reformat`: changes layout or type; `control`: loops, conditions, shape arithmetic."""
CATEGORIES: tuple[Category, ...] = (
    "matrix", "attention", "normalisation", "element-wise", "reduction", "copy", "reformat", "control", "other",
)  # fmt: skip
NON_COMPUTE: tuple[Category, ...] = ("copy", "reformat", "control")
"""Categories that compute nothing."""
COPY_KINDS: dict[int, str] = {
    1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
    6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
}  # fmt: skip
"""Names of copy kinds, by CUPTI's numbers (also used by nsys exports)."""
COPY_KIND_BY_SHORT_NAME = {"to".join(side[0] for side in name.split("-to-")): name for name in COPY_KINDS.values()}
"""The same by the words that stand in names: `HtoD`."""
HOST_TO_DEVICE, DEVICE_TO_HOST = ("Host-to-Device", "Host-to-Array"), ("Device-to-Host", "Array-to-Host")
"""The copies between host and device; the others are the device's own work."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing a device did: a kernel, a copy, a memory fill. Times in ns of one clock, the capture's own."""

    kind: Literal["kernel", "copy", "memset"]
    name: str
    """The kernel's demangled name; of a copy one of `COPIES`."""
    start_ns: int
    end_ns: int
    device: int = 0
    stream: int = 0
    nbytes: int = 0
    """Size of a copy or fill."""
    correlation: int = 0
    """Correlation id of its launch in the same capture; 0 if unknown."""
    graph_node: int = 0
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    range: str | None = None
    """The innermost NVTX range, or the operator of the host, it was launched from."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer: a layer TensorRT fused, a node ONNX Runtime ran. Times are of one inference."""

    name: str
    kind: str
    """The operator, or TensorRT's word for the layer."""
    category: Category
    mean_ms: float
    median_ms: float
    share: float
    """Fraction of the sum over all layers, by medians, so that a delayed inference does not decide."""
    calls: float
    """In one inference: more than 1 inside a loop."""
    device: str = ""
    """Device that ran it: `cpu`, `cuda:0`; empty if unknown."""
    provider: str = ""
    """ONNX Runtime's execution provider; empty for other backends."""
    dtypes: tuple[str, ...] = ()
    """Element types of its outputs."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Output shapes, where known."""
    onnx_nodes: tuple[str, ...] = ()
    """The nodes of the ONNX model it was made of, by name."""
    flops: int | None = None
    """FLOPs per inference, a multiply-add counted as two; None if unknown."""
    nbytes: int | None = None
    """Read and written in one inference if nothing stays in a cache: inputs, weights, outputs."""
    precision: str = ""
    """Compute dtype: `fp16`; empty for data movement and if unknown."""
    module: str | None = None
    """The PyTorch module of its nodes, of those that multiply if any do: `layer2.0.conv1`; None where it is not known."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Layer times as measured by the backend."""

    rows: tuple[LayerRow, ...]
    """In execution order, where known."""
    inferences: int
    """Number of averaged inferences, without warm-up."""
    instrument: str
    """`onnxruntime profiler 1.31.1`, `tensorrt IProfiler 11.4.0`, `trtexec --dumpProfile`."""
    wall_ms: float | None = None
    """Time of one inference while it was profiled (the median), the instrument's cost included."""
    raw: str | None = None
    """The file it was read from, which is kept."""
    notes: tuple[str, ...] = ()
    clock: Literal["device", "host", "launch"] = "host"
    """Whose time it is: the device's own; the host's around work that is done when it returns; or the host's around a
    launch, not the device time."""

    def layer_label(self, name: str) -> str:
        """The layer's name, its PyTorch module first."""
        return node_label(name, next((row.module for row in self.rows if row.name == name), None))


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All launches of one kernel, in device time; `per_inference` counts launches per inference."""

    name: str
    """Full demangled name."""
    short_name: str
    """Without namespaces, template and call arguments."""
    category: Category
    calls: int
    """Number of launches in the capture."""
    per_inference: float
    """Launches in one inference."""
    total_ms: float
    """Sum of all launches in the capture."""
    mean_us: float
    """Mean of one launch, as `median_us`, `min_us` and `max_us`."""
    median_us: float
    min_us: float
    max_us: float
    share: float
    """Fraction of the sum over all kernels."""
    layers: tuple[str, ...] = ()
    """The layers that launched it, those with most of its time first."""
    grid: tuple[int, int, int] | None = None
    """Blocks in x, y and z; None where launches differ or it is unknown, as the three fields below."""
    block: tuple[int, int, int] | None = None
    """Threads of a block in x, y and z."""
    registers: int | None = None
    """Per thread."""
    shared_bytes: int | None = None
    """Shared memory of a block."""

    @property
    def ms_per_inference(self) -> float:
        """Time per inference, over all its launches."""
        return self.total_ms * self.per_inference / self.calls if self.calls else 0.0


@dataclass(frozen=True, slots=True)
class CategoryShare:
    category: Category
    ms: float
    """In one inference."""
    share: float
    """Fraction of the sum over all kernels, or layers."""
    count: int
    """Kernels, or layers, of one inference; 1 at least, for what is left out of some."""


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Time breakdown of one inference, in ms; None where this profiler does not measure it."""

    wall_ms: float
    """Time per inference, profiler off: the median by the host's clock. On a device with events the mean from one end to the
    next, with an inference enqueued ahead: the host's work is in it only where it takes longer than the device's."""
    h2d_ms: float | None = None
    compute_ms: float | None = None
    """On the device: events, or the union of kernel intervals; on a CPU the time of the call."""
    d2h_ms: float | None = None
    busy_ms: float | None = None
    """Union of all kernel and copy intervals of one inference."""
    idle_ms: float | None = None
    """Between the first and the last activity of an inference, and between inferences, with nothing on the device."""
    launch_ms: float | None = None
    """The host's time inside launch calls."""
    kernels: float | None = None
    """Launched in one inference."""
    overlap_ms: float | None = None
    """Sum of intervals minus their union: concurrent work."""
    gpu_ms: float | None = None
    """Device time of one inference without a profiler, by events: the reference for `busy_ms`."""
    working_ms: float | None = None
    """Union of all intervals but copies from and to the host: kernels side by side count once."""


Bound = Literal["launch", "copy", "bandwidth", "compute", "host", "unknown"]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bottleneck in one sentence, with its evidence."""

    bound: Bound
    """`host`: the device waits for the host, other than for launches; `unknown`: at no known limit, or not measured."""
    summary: str
    evidence: tuple[tuple[str, str], ...]
    """Names and figures with units, in the order of the argument."""
    next_step: str
    """The next experiment worth running, in words."""
    command: str | None = None
    """Command for it."""
    confidence: Literal["measured", "estimated", "none"] = "measured"
    """`estimated` where a peak comes from a datasheet, or the work from the graph."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Nsight Compute counters of one kernel. Durations differ from the application's: other clocks and caches."""

    kernel: str
    duration_us: float | None
    """Time of one launch."""
    compute_pct: float | None
    """sm__throughput, % of peak."""
    memory_pct: float | None
    """gpu__compute_memory_throughput, % of peak."""
    dram_pct: float | None
    """DRAM throughput, % of peak."""
    occupancy_pct: float | None
    """Active warps, % of the most that an SM holds."""
    metrics: dict[str, float] = field(default_factory=dict)
    """By the tool's own names, in base units."""
    units: dict[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    """The tool's rules, where requested."""
    launches: int = 1
    """Measured; where there are several the durations are means, and the shares means weighted by duration."""
    instrument: str = ""
    """`ncu 2025.3.1, clocks as they are, caches flushed`."""


@dataclass(frozen=True, slots=True)
class InstrumentStatus:
    """One profiler: used or not, and why."""

    name: ProfilerName | Literal["ncu"]
    """`layers`: the backend's layer times; `host`: the host's clock around whole inferences."""
    used: bool
    reason: str
    """Result, or why it was skipped: `nsys is not installed`."""
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class ProfileReport(RichDisplay):
    """Report of `profile`."""

    engine: str
    model: str
    backend: str
    device: str
    batch: int
    shapes: dict[str, tuple[int, ...]]
    precision: str
    environment: Environment
    protocol: Protocol
    compute_ms: Summary | None
    """Protocol of the reference measurement without a profiler."""
    time_breakdown: TimeBreakdown
    instruments: tuple[InstrumentStatus, ...]
    """In order of preference; the first used one made `kernels`."""
    layers: LayerProfile | None
    """None where the backend reports no layer times."""
    kernels: tuple[KernelRow, ...]
    """By total time, longest first."""
    categories: tuple[CategoryShare, ...]
    """Categories of kernels where there are any, else of layers."""
    bottleneck: Bottleneck
    counters: tuple[Counters, ...] = ()
    """Counters of the kernels with most time; with `--ncu`."""
    peaks: DevicePeaks | None = None
    """Peaks of the device, measured or from its datasheet; None where neither is known."""
    inferences: int = 0
    """Captured with the profiler on."""
    files: dict[str, str] = field(default_factory=dict)
    """Kept raw files and the timeline by what they are: `timeline`, `nsys`, `ncu`, `onnxruntime`."""
    open_commands: dict[str, str] = field(default_factory=dict)
    """The command that opens each of them."""
    warnings: tuple[str, ...] = ()
    runtime_info: dict[str, str] = field(default_factory=dict)
    started: str = ""
    complete: bool = True
    precisions: dict[str, float] = field(default_factory=dict)
    """The share of the layers' time by the type they compute in, largest first; `moves` for what computes nothing. The
    census counts layers and multiply-adds, this is the same in time."""
    wall_s: float | None = None
    """Length of the measurement without a profiler, warm-up not counted: shorter than its rule where it was interrupted."""

    @property
    def exceeds_total(self) -> bool:
        """Whether the compute time by events, one query at a time, exceeds the host's wall time."""
        return (
            self.time_breakdown.gpu_ms is not None and self.time_breakdown.gpu_ms > 1.01 * self.time_breakdown.wall_ms
        )

    @property
    def evidence(self) -> str:
        """Evidence of an `estimated` bottleneck, without times."""
        promised = self.peaks is not None and any(item.source == "datasheet" for item in self.peaks.peaks)
        counts = "operations and bytes counted from the graph"
        return f"{counts}, and on rates of its maker's data sheet" if promised else counts


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """One peak rate of a device, measured here or from the datasheet."""

    name: str
    """`fp16_matrix`, `fp32_matrix`, `int8_matrix`, `memory_read`, `memory_copy`, `h2d_pinned`, `launch` (docs/doctor.md)."""
    value: float
    """A rate; in `us` the time of one launch, call or node."""
    unit: Literal["TFLOP/s", "TOP/s", "GB/s", "us"]
    source: Literal["measured", "datasheet"]
    method: str
    """Method: `torch.matmul 8192x8192x8192 fp16, best of 20`."""


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """Peak rates of a device, measured once and cached by device name, driver and library."""

    device: str
    """`NVIDIA H200`, or the CPU's model name and its cores."""
    key: str
    """Cache key."""
    peaks: tuple[DevicePeak, ...]
    measured_at: str
    """UTC, ISO 8601."""
    environment: Environment
    skipped: tuple[str, ...] = ()
    """Peaks that could not be measured here, with the reason."""
    notes: tuple[str, ...] = ()
    """Doubts about the figures: busy machine, throttled clocks."""

    def get(self, name: str) -> DevicePeak | None:
        """The peak of that name, or None."""
        return next((item for item in self.peaks if item.name == name), None)

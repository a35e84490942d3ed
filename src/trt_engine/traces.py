"""Where the time of an engine goes: what `profile` finds, and the ceilings of a device, as facts a report can read.

Like `records`, these types import no instrument. All durations say their unit; a share is a fraction between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trt_engine.environment import Environment
from trt_engine.figures import with_module
from trt_engine.records import Ceiling, Ceilings, Protocol, Summary

__all__ = [
    "CATEGORIES",
    "COPIES",
    "COPY_WORDS",
    "FROM_DEVICE",
    "MOVES",
    "TO_DEVICE",
    "Activity",
    "Bound",
    "Category",
    "CategoryShare",
    "Ceiling",
    "Ceilings",
    "Counters",
    "KernelRow",
    "LayerProfile",
    "LayerRow",
    "ProfilePlan",
    "ProfileReport",
    "Rung",
    "RungName",
    "TimeSplit",
    "TimeVerdict",
]

Category = Literal[
    "matrix", "attention", "normalisation", "element-wise", "reduction", "copy", "reformat", "control", "other"
]
"""What a kernel or layer does. `matrix`: convolutions and matrix products, with whatever is fused into them;
`copy`: moves bytes as they are; `reformat`: changes layout or type; `control`: loops, conditions, shape arithmetic."""

CATEGORIES: tuple[Category, ...] = (
    "matrix", "attention", "normalisation", "element-wise", "reduction", "copy", "reformat", "control", "other",
)  # fmt: skip

MOVES: tuple[Category, ...] = ("copy", "reformat", "control")
"""Categories that compute nothing."""

COPIES: dict[int, str] = {
    1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
    6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
}  # fmt: skip
"""What a copy is called here, by the numbers of CUPTI, which are those of an export of nsys."""
COPY_WORDS = {"to".join(side[0] for side in name.split("-to-")): name for name in COPIES.values()}
"""The same by the words that stand in names: `HtoD`."""
TO_DEVICE, FROM_DEVICE = ("Host-to-Device", "Host-to-Array"), ("Device-to-Host", "Array-to-Host")
"""The copies between host and device; the others are the device's own work."""

RungName = Literal["nsys", "cupti", "torch", "layers", "host"]
"""The ladder of profiling: Nsight Systems, CUPTI in this process, PyTorch's profiler, the backend's own layer times,
the host's clock alone."""


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
    """Of a copy or fill."""
    correlation: int = 0
    """The number its launch has in the same capture; 0 where it is not told."""
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
    """Of the sum over all layers, each by its median: one inference that was held up must not decide."""
    calls: float
    """In one inference: more than 1 inside a loop."""
    device: str = ""
    """Where it ran: `cpu`, `cuda:0`; empty where it is not told."""
    provider: str = ""
    dtypes: tuple[str, ...] = ()
    """Element types of its outputs."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its outputs, where they are told."""
    onnx_nodes: tuple[str, ...] = ()
    """The nodes of the ONNX model it was made of, by name."""
    flops: int | None = None
    """Of one inference, multiply and add counted as two; None where nothing tells."""
    nbytes: int | None = None
    """Read and written in one inference if nothing stays in a cache: inputs, weights, outputs."""
    precision: str = ""
    """What it computes in, as the census counts: `fp16`; empty for what moves data, and where nothing tells."""
    module: str | None = None
    """The PyTorch module of its nodes, of those that multiply if any do: `layer2.0.conv1`; None where it is not known."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What a backend's card answers to `profile`: its own layer times."""

    rows: tuple[LayerRow, ...]
    """In the order of execution, where that is told."""
    inferences: int
    """How many were averaged, the warm-up left out."""
    instrument: str
    """`onnxruntime profiler 1.31.1`, `tensorrt IProfiler 11.4.0`, `trtexec --dumpProfile`."""
    wall_ms: float | None = None
    """Time of one inference while it was profiled (the median), the instrument's cost included."""
    raw: str | None = None
    """The file it was read from, which is kept."""
    notes: tuple[str, ...] = ()
    clock: Literal["device", "host", "launch"] = "host"
    """Whose time it is: the device's own; the host's around work that is done when it returns; or the host's around a
    launch, which says nothing of how long the device takes."""

    def label(self, name: str) -> str:
        """The layer's name, its PyTorch module first."""
        return with_module(name, next((row.module for row in self.rows if row.name == name), None))


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All launches of one kernel. Times are the device's own; `per_inference` says how often it runs in one."""

    name: str
    """Demangled and whole."""
    short: str
    """Without namespaces, template and call arguments."""
    category: Category
    calls: int
    """In the whole capture."""
    per_inference: float
    total_ms: float
    mean_us: float
    median_us: float
    min_us: float
    max_us: float
    share: float
    """Of the sum over all kernels."""
    layers: tuple[str, ...] = ()
    """The layers that launched it, those with most of its time first."""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_bytes: int | None = None

    @property
    def ms(self) -> float:
        """Of one inference, all its launches together."""
        return self.total_ms * self.per_inference / self.calls if self.calls else 0.0


@dataclass(frozen=True, slots=True)
class CategoryShare:
    category: Category
    ms: float
    """In one inference."""
    share: float
    count: int
    """Kernels, or layers, of one inference; 1 at least, for what is left out of some."""


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """One inference by where its time goes, in ms. None: not measured by this rung; nothing is put together by guessing."""

    wall_ms: float
    """Of one inference, profiler off: the median by the host's clock. On a device with events the mean from one end to the
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
    """How much the sum of intervals exceeds their union: work side by side."""
    gpu_ms: float | None = None
    """The device's time of one inference without a profiler, by events: what `busy_ms` is held against."""
    working_ms: float | None = None
    """Union of all intervals but copies from and to the host: kernels side by side count once."""


Bound = Literal["launch", "copy", "bandwidth", "compute", "host", "unknown"]


@dataclass(frozen=True, slots=True)
class TimeVerdict:
    """What holds the engine back, in one sentence, with the figures it was drawn from."""

    bound: Bound
    sentence: str
    evidence: tuple[tuple[str, str], ...]
    """Names and figures with units, in the order of the argument."""
    next: str
    """The next experiment worth running, in words."""
    command: str | None = None
    """What to type for it."""
    confidence: Literal["measured", "estimated", "none"] = "measured"
    """`estimated` where a ceiling or the work done comes from a datasheet or a count of the graph."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What Nsight Compute measured of one kernel. Its durations are not the application's: clocks and caches differ."""

    kernel: str
    duration_us: float | None
    compute_pct: float | None
    """sm__throughput, % of peak."""
    memory_pct: float | None
    """gpu__compute_memory_throughput, % of peak."""
    dram_pct: float | None
    occupancy_pct: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """By the tool's own names, in base units."""
    units: dict[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    """The tool's rules, where they were asked for."""
    launches: int = 1
    """Measured; where there are several the durations are means, and the shares means weighted by duration."""
    instrument: str = ""
    """`ncu 2025.3.1, clocks as they are, caches flushed`."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: tried or not, and why not."""

    name: RungName | Literal["ncu"]
    used: bool
    reason: str
    """What it gave, or why it was passed over: `nsys is not installed`."""
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What `profile` says of an engine."""

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
    """Of the measurement without a profiler that everything is held against."""
    split: TimeSplit
    rungs: tuple[Rung, ...]
    """In the order of the ladder; the first used one made `kernels`."""
    layers: LayerProfile | None
    kernels: tuple[KernelRow, ...]
    """By total time, longest first."""
    categories: tuple[CategoryShare, ...]
    """Of kernels where there are any, else of layers."""
    verdict: TimeVerdict
    counters: tuple[Counters, ...] = ()
    ceilings: Ceilings | None = None
    inferences: int = 0
    """Captured with the profiler on."""
    files: dict[str, str] = field(default_factory=dict)
    """Kept raw files and the timeline by what they are: `timeline`, `nsys`, `ncu`, `onnxruntime`."""
    opens: dict[str, str] = field(default_factory=dict)
    """The command that opens each of them."""
    warnings: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    started: str = ""
    complete: bool = True
    precisions: dict[str, float] = field(default_factory=dict)
    """The share of the layers' time by the type they compute in, largest first; `moves` for what computes nothing. The
    census counts layers and multiply-adds, this is the same in time."""
    wall_s: float | None = None
    """Length of the measurement without a profiler, warm-up not counted: shorter than its rule where it was interrupted."""

    @property
    def outlasts_the_whole(self) -> bool:
        """Whether the computation by events, one query at a time, takes longer than the whole by the host's clock."""
        return self.split.gpu_ms is not None and self.split.gpu_ms > 1.01 * self.split.wall_ms

    @property
    def rests_on(self) -> str:
        """What an `estimated` verdict rests on, times apart."""
        promised = self.ceilings is not None and any(item.source == "datasheet" for item in self.ceilings.items)
        counts = "operations and bytes counted from the graph"
        return f"{counts}, and on rates of its maker's data sheet" if promised else counts


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What `profile --dry-run` says: what would be profiled, built and written."""

    engine: str
    builds: bool
    """A model's engine comes from the store, or is built into it."""
    device: str
    shapes: dict[str, tuple[int, ...]]
    """Of a model those that were asked for."""
    rung: RungName | None
    """None for the best there is."""
    writes: tuple[str, ...]
    dry_run: bool = True

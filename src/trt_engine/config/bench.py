"""Settings of `bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from trt_engine.config.parse import parse_bytes, parse_percentiles, parse_shapes
from trt_engine.config.settings import Config, inputs_option, opt
from trt_engine.tensors import Shape
from trt_engine.units import parse_duration

PROTOCOLS = ("trt-engine", "trtexec10", "trtexec11")

ProfilerName = Literal["nsys", "cupti", "torch", "layers", "host"]
"""Profilers by preference: Nsight Systems, CUPTI in this process, PyTorch's profiler, the backend's layer times,
the host's clock alone."""
PROFILERS: tuple[ProfilerName, ...] = get_args(ProfilerName)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(Config):
    """Benchmark settings; None takes the protocol's value."""

    GROUP: ClassVar[str] = "Measure"

    protocol: str = opt("trt-engine", "the named set of measuring rules", choices=PROTOCOLS)
    batch: int | None = opt(None, "rows in one query [default: the profile's optimum]", ge=1, group="Input")
    shapes: dict[str, Shape] = opt(
        {}, "shapes to measure at, as images:8x3x640x640", parse=parse_shapes, metavar="SPEC", group="Input"
    )
    duration_s: float | None = opt(
        None, "measure at least this long (200ms, 10s)", parse=parse_duration, metavar="TIME", ge=0
    )
    warmup_s: float | None = opt(
        None, "run this long before measuring", flags="--warmup", parse=parse_duration, metavar="TIME", ge=0
    )
    iterations: int | None = opt(None, "measure at least this many queries", ge=1)
    warmup_iterations: int = opt(0, "leave at least this many queries out as warm-up", ge=0)
    idle_s: float = opt(0.0, "pause after each query", parse=parse_duration, metavar="TIME", ge=0)
    percentiles: tuple[float, ...] = opt(
        (90.0, 95.0, 99.0), "percentiles to print", flags="--percentile", parse=parse_percentiles, metavar="P,P"
    )
    inputs: Path | None = inputs_option()
    seed: int = opt(0, "seed of the random inputs", ge=0, group="Input")
    transfers: bool | None = opt(
        None, "copy inputs and outputs inside the measured part", flags="--transfers/--no-transfers"
    )
    graph: bool | None = opt(None, "replay a CUDA graph where the device has them", flags="--graph/--no-graph")
    spin: bool | None = opt(None, "wait for the device by spinning", flags="--spin/--no-spin")
    streams: int = opt(1, "concurrent queries, each on a separate stream", flags="--streams", ge=1)
    strict: bool = opt(False, "end with exit code 9 when the measurement is not stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRunConfig(Config):
    """Where `bench` measures, and where the record goes."""

    isolate: bool = opt(False, "measure in a child process: a crash there is an error here")
    memory_limit: int | None = opt(
        None, "with `--isolate`: memory limit, as 4GiB [default: free memory]", parse=parse_bytes, metavar="SIZE", ge=1
    )
    log: Path | None = opt(None, "file of the text log", flags="", parse=Path)
    out: Path | None = opt(
        None, "folder for records.jsonl (appended) and bench.log", flags="-o --out", parse=Path, group="Output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig(Config):
    """Settings of a profile: which profiler, how many inferences, what to write."""

    profiler: ProfilerName | None = opt(
        None, "use this profiler; exit 3 where it is unavailable [default: the best available]",
        choices=PROFILERS,
    )  # fmt: skip
    inferences: int = opt(50, "profile N inferences", ge=1)
    warmup: int = opt(10, "Warm-up inferences before", ge=0)
    ncu: int = opt(0, "Nsight Compute counters of the top N kernels", ge=0)
    peaks: bool = opt(False, "measure the device peaks unless cached")
    out: Path | None = opt(
        None, "folder for the report, the timeline and the raw files [default: runs/TIME_NAME_profile]",
        flags="-o --out", parse=Path, group="Output",
    )  # fmt: skip
    overwrite: bool = opt(False, "overwrite existing files", group="Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig(Config):
    """Settings of a comparison: gates, baseline files, how often engines are loaded, what to write."""

    fail_if: Any = opt(
        (), "slower:3%, p99-slower:5%, maybe-slower:3% (exit code 8) or error:1e-3 (exit code 7)", multiple=True,
        metavar="RULE", accepts="Sequence[str]",
    )  # fmt: skip
    baseline: Path | None = opt(None, "compare with a file of `--save-baseline`", parse=Path, metavar="FILE")
    save_baseline: Path | None = opt(None, "save the first engine's times for CI", parse=Path, metavar="FILE")
    restarts: int = opt(12, "reload all engines N times")
    out: Path | None = opt(
        None, "folder for the report (report.html, report.md) and compare.json", flags="-o --out", parse=Path,
        group="Output",
    )  # fmt: skip
    overwrite: bool = opt(False, "overwrite existing files", group="Output")

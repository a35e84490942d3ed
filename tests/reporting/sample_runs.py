"""Run folders made from the record types, with seeded samples: what `size` and `bench` would have written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import encode_json
from trt_engine.device.info import Clocks
from trt_engine.environment import Environment
from trt_engine.records.base import Finding, StepTime, append_record, verb_document
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.percentiles import summarize
from trt_engine.records.size import BatchResult, CliffPoint, PreflightCheck, SizeReport

CPU = Environment(
    tool="0.1.0",
    python="3.12.4",
    platform="Linux x86_64",
    cpu="Example Processor 9000 @ 2.10GHz",
    cpu_cores=4,
    cpu_features=("avx2", "avx512f", "fma"),
    memory_mib=15990,
    libraries={"onnxruntime": "1.30.0", "numpy": "2.3.1"},
)
GPU = replace(
    CPU, gpu="NVIDIA H200", compute_capability="9.0", gpu_memory_mib=143771, driver="580.65.06", container="docker"
)
RULES = Protocol(
    name="trt-engine",
    loop="closed",
    clock="host",
    transfers=False,
    graph=False,
    spin=False,
    streams=1,
    warmup_s=1.0,
    duration_s=10.0,
    min_iterations=10,
    idle_s=0.0,
    percentile_rule="trtexec",
    not_applicable=("transfers", "graph", "spin"),
)
GPU_RULES = replace(RULES, clock="device events", graph=True, not_applicable=("spin",))


def samples(mean_ms: float, many: int, seed: int = 0, spread: float = 0.02, tail: float = 0.01) -> tuple[float, ...]:
    """Times as a quiet machine gives them: a narrow bell and a few late ones."""
    draw = random.Random(seed)
    return tuple(
        round(mean_ms * (1 + abs(draw.gauss(0, spread)) + (draw.random() < tail) * draw.expovariate(1 / 0.4)), 6)
        for _ in range(many)
    )


def record(batch: int, mean_ms: float, many: int = 400, *, seed: int | None = None, **changes: Any) -> BenchRecord:
    times = samples(mean_ms, many, batch if seed is None else seed, **changes.pop("shape", {}))
    made = BenchRecord(
        engine=f"engines/digits_dynamic_b{max(batch, 64)}.onnx",
        backend="onnxruntime",
        device="cpu",
        batch=batch,
        shapes={"images": (batch, 3, 128, 128)},
        protocol=RULES,
        environment=CPU,
        compute_ms=times,
        wall_s=sum(times) / 1000 * 1.001,
        started="2026-03-04T05:06:07+00:00",
        queries=many,
        warmup_queries=50,
        clocks=(Clocks(cpu_mhz=2893.2, load_average=0.31), Clocks(cpu_mhz=2871.9, load_average=0.94)),
        runtime_info={"providers": "CPUExecutionProvider", "threads": "4"},
    )
    return replace(made, **changes)


def result(measured: BenchRecord) -> BatchResult:
    summary = summarize(measured.compute_ms)
    assert summary is not None
    return BatchResult(
        batch=measured.batch,
        qps=measured.qps,
        images_per_s=measured.images_per_s,
        per_image_ms=summary.mean / measured.batch,
        compute_ms=summary,
        engine=measured.engine,
        stable=measured.stable,
        instability=measured.instability,
    )


def size_report(records: Sequence[BenchRecord], **changes: Any) -> SizeReport:
    """What `size` says after these measurements: batch 1 first, N last."""
    results = [result(measured) for measured in records]
    final = results[-1] if results else None
    device = records[0].device if records else "cpu"
    made = SizeReport(
        model="models/digits/model/digits.onnx",
        engine=str(Path("models/digits/benchmarks", final.engine)) if final else None,
        device=device,
        backend="onnxruntime",
        precision="fp32",
        peak_streams=int(final.images_per_s // 30) if final else None,
        images_per_s=final.images_per_s if final else None,
        fps=30.0,
        batches=(results[0], results[-1]) if len(results) > 1 else tuple(results),
        stop_reason="peak_within_batch",
        engines_built=max(1, len(results) - 1),
        measurements=len(results),
        steps=(
            StepTime("pre-flight", 0.21),
            StepTime("inspect", 0.48),
            StepTime("build b64", 3.92),
            StepTime("measure b1", 11.2),
            StepTime("measure b64", 11.6),
            StepTime("report", 0.3),
        ),
        protocol=records[0].protocol if records else None,
        environment=records[0].environment if records else CPU,
        artifacts={
            "folder": "models/digits/benchmarks",
            "records": "models/digits/benchmarks/records.jsonl",
            "engines": "models/digits/benchmarks/engines",
            "log": "models/digits/benchmarks/b1/trtexec_b1.log",
        },
        all_batches=tuple(results),
        model_name="digits",
    )
    return replace(made, **changes)


def write(
    folder: Path,
    report: SizeReport | None,
    records: Sequence[BenchRecord],
    command: str = "trt-engine size models/digits/model/digits.onnx --scan",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if report is not None:
        (folder / "size.json").write_bytes(encode_json(verb_document("size", report, command=command)))
        for name in ("engines", "b1"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "b1" / "trtexec_b1.log").write_text("log\n")
    for measured in records:
        append_record(folder / "records.jsonl", measured)
    return folder


def cliff_scan(low: int, high: int, bad: Sequence[int], rate: float) -> tuple[CliffPoint, ...]:
    draw = random.Random(7)
    points = []
    for batch in range(low, high + 1):
        usual = rate * (0.93 + 0.004 * (batch - low)) * (1 + draw.gauss(0, 0.004))
        got = usual * 0.61 if batch in bad else usual
        points.append(
            CliffPoint(batch, got, usual * (1 + draw.gauss(0, 0.006)), batch in bad, measured=2 if batch in bad else 1)
        )
    return tuple(points)


# ---------------------------------------------------------------------------------------------- whole runs


def cpu_run(folder: Path) -> Path:
    """The usual run on a laptop: two measurements, one engine."""
    records = [record(1, 1.93, 1200), record(64, 71.4, 140)]
    notes = ("fp32: the usual precision on a CPU",)
    checks = (
        PreflightCheck("model", "ok", "digits.onnx, 3.1 MiB, opset 17"),
        PreflightCheck("disk", "warn", "4.1 GiB free", "keep 10 GiB free for larger batches"),
    )
    keys = {"gpu-id": "0", "onnx-file": "../model/digits.onnx", "batch-size": "64", "network-mode": "2"}
    return write(folder, size_report(records, notes=notes, preflight=checks, nvinfer=keys), records)


def gpu_run(folder: Path) -> Path:
    """A GPU run that doubled to 512, with a cliff scan, one unstable measurement and held-down clocks."""
    base = {"device": "cuda:0", "environment": GPU, "protocol": GPU_RULES, "backend": "tensorrt"}
    clocks = (Clocks(sm_mhz=1980, sm_max_mhz=1980, memory_mhz=3201, temperature_c=41, power_w=212.4),)
    held = (replace(clocks[0], sm_mhz=1410, temperature_c=67, power_w=688.1, throttled=("sw_power_cap",)),)
    records = [
        record(1, 0.612, 8000, clocks=clocks * 2, **base),
        record(64, 7.9, 1200, clocks=clocks * 2, **base),
        record(128, 14.6, 700, clocks=clocks * 2, **base),
        record(
            256,
            28.1,
            360,
            shape={"spread": 0.2, "tail": 0.2},
            stable=False,
            instability=("spread 24.1 % of the mean, at most 5 % expected",),
            clocks=clocks * 2,
            **base,
        ),
        record(512, 54.4, 190, clocks=clocks + held, **base),
    ]
    report = size_report(
        records,
        backend="tensorrt",
        precision="fp16",
        engines_built=21,
        measurements=22,
        scan_engines=17,
        scan_measurements=17,
        cliffs=cliff_scan(504, 520, (513, 514, 515), 9400),
        slow_batches=(513, 514, 515),
        findings=(
            Finding("detr-mask-path", "warning", "the mask subgraph often fails to build", "/decoder", "re-export it"),
        ),
        steps=tuple(StepTime(f"{what} b{n}", 40 + n / 3) for n in (64, 128, 256, 512) for what in ("build", "measure")),
    )
    return write(folder, report, records)


def out_of_memory_run(folder: Path) -> Path:
    """The last good answer stands."""
    records = [record(1, 1.9, 300), record(64, 71.0, 60), record(128, 150.0, 40)]
    report = size_report(records, stop_reason="out_of_memory", out_of_memory=(256,))
    return write(folder, report, records)


def partial_run(folder: Path) -> Path:
    """Ctrl-C during the measurement of batch 64."""
    records = [record(1, 1.9, 300), record(64, 71.0, 12, complete=False)]
    report = size_report(
        records[:1],
        stop_reason="interrupted",
        complete=False,
        error="interrupted",
        peak_streams=None,
        images_per_s=None,
        engine=None,
        batches=(),
    )
    return write(folder, report, records)


def failed_run(folder: Path) -> Path:
    """Nothing was measured at all."""
    report = size_report([], stop_reason="failed", complete=False, error="cannot build `x`", steps=())
    return write(folder, report, [])


def bench_run(folder: Path) -> Path:
    """What `bench -o` leaves: records alone, here of three batch sizes."""
    records = [record(1, 1.9, 300), record(8, 9.6, 200), record(32, 36.0, 90, warnings=("load average 3.1",))]
    return write(folder, None, records)


def hostile_run(folder: Path) -> Path:
    """Names that try to become markup, and one that is far too long."""
    evil = '<script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&|*_`[x](javascript:alert(1))'
    records = [
        record(1, 1.9, 300, engine=f"engines/{evil}.onnx", runtime_info={evil: evil}, warnings=(evil,)),
        record(
            64,
            71.0,
            60,
            engine="engines/" + "long_name_" * 30 + ".onnx",
            runtime_info={"имя": "模型 \u202etxt.exe \x1b[31m"},
        ),
    ]
    report = size_report(
        records,
        model=f"models/{evil}.onnx",
        model_name=evil + "模型" + "x" * 300,
        steps=(StepTime(evil, 3.0), StepTime("y" * 200, 2.0)),
        artifacts={evil: "javascript:alert(1)", "home": "/" + "deep/" * 9 + "file.txt"},
        notes=(evil,),
    )
    return write(folder, report, records, command=f"trt-engine size '{evil}'")


RUNS = {
    "cpu": cpu_run,
    "gpu": gpu_run,
    "out_of_memory": out_of_memory_run,
    "partial": partial_run,
    "failed": failed_run,
    "bench": bench_run,
    "hostile": hostile_run,
}

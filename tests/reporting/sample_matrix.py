"""Run folders as `run`, `profile` and `compare` would have written them, made from the record types."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sample_runs import CPU, GPU, GPU_RULES, RULES, record, samples

from trt_engine.atomic_io import encode_json
from trt_engine.records.base import verb_document
from trt_engine.records.compare import (
    CompareReport,
    CompareSide,
    Comparison,
    EngineDiff,
    GateResult,
    Interval,
    LayerChange,
    MetricDifference,
    StructureCount,
)
from trt_engine.records.evaluate import EvaluateReport
from trt_engine.records.parity import OutputError, Parity
from trt_engine.records.passport import Precision
from trt_engine.records.percentiles import summarize
from trt_engine.records.profile import (
    Bottleneck,
    CategoryShare,
    Counters,
    DevicePeak,
    DevicePeaks,
    InstrumentStatus,
    KernelRow,
    LayerProfile,
    LayerRow,
    ProfileReport,
    TimeBreakdown,
)
from trt_engine.records.sweep import CellResult, CellSpec, RunManifest

IMAGES = "sha256:" + "5b" * 32


def spec(model: str, precision: str, backend: str, batch: int, device: str = "cpu", **changes: Any) -> CellSpec:
    made = CellSpec(
        label=f"{model}-{precision}-{backend}-b{batch}",
        model=model,
        source=f"models/{model}/model/{model}.onnx",
        precision=precision,
        backend=backend,
        batch=batch,
        device=device,
        modes=("build", "bench", "evaluate", "profile"),
        digest=f"sha256:{random.Random(model + precision + backend + str(batch)).randrange(16**64):064x}",
    )
    return replace(made, **changes)


def evaluated(engine: str, metrics: dict[str, float], device: str = "cpu", task: Any = "detect") -> EvaluateReport:
    times = samples(12.0, 40, 3)
    return EvaluateReport(
        engine=engine,
        backend="onnxruntime",
        device=device,
        task=task,
        metrics=metrics,
        images=200,
        skipped=0,
        skipped_images=(),
        latency_ms=summarize(times),
        per_image_ms=1.5,
        samples_ms=times,
        batch=8,
        dataset="examples/digits/coco",
        dataset_kind="coco",
        dataset_digest=IMAGES,
        max_samples=None,
        seed=None,
        vision={},
        precision=Precision("int8"),
        predictions=1211,
        not_finite=0,
        runtime_info={},
        environment=CPU,
        wall_s=3.0,
        started="2026-03-04T05:06:07+00:00",
        artifacts={},
    )


KERNELS = (
    ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
     "sm90_xmma_gemm", "matrix", 48, 41.0),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<(anonymous namespace)::Traits>>>",
     "flash_attn_fwd", "attention", 12, 27.5),
    ("void cuApplyLayerNorm<float, __half>(int, float, const float*)", "cuApplyLayerNorm", "normalisation", 25, 9.1),
    ("void onnxruntime::cuda::_UnaryElementWise<__half, __half, OP_Gelu>", "_UnaryElementWise", "element-wise", 12, 14.2),
    ("void onnxruntime::cuda::_BinaryElementWiseSimple<__half>", "_BinaryElementWiseSimple", "element-wise", 60, 7.7),
    ("transposeNCHWToNHWCKernel", "transposeNCHWToNHWC", "reformat", 26, 5.3),
    ("Memcpy DtoD", "Memcpy DtoD", "copy", 4, 2.4),
)  # fmt: skip


def kernel_rows(scale: float, many: float = 1.0) -> tuple[KernelRow, ...]:
    rows = []
    total = sum(calls * us for _, _, _, calls, us in KERNELS)
    for name, short, category, calls, us in KERNELS:
        calls = max(1, round(calls * many))
        mean = us * scale
        rows.append(
            KernelRow(name, short, category, calls * 20, calls, calls * 20 * mean / 1000, mean, mean * 0.99, mean * 0.9,
                      mean * 1.4, calls * us / total, (f"/blocks.0/{short}", f"/blocks.1/{short}"), (132, 1, 1),
                      (256, 1, 1), 168, 49152)
        )  # fmt: skip
    return tuple(rows)


def profile(
    label: str,
    *,
    batch: int = 64,
    device: str = "cuda:0",
    backend: str = "onnxruntime",
    scale: float = 1.0,
    many: float = 1.0,
    **changes: Any,
) -> ProfileReport:
    rows = kernel_rows(scale, many)
    by: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in rows:
        by[row.category] = by.get(row.category, 0) + row.per_inference * row.mean_us / 1000
        counts[row.category] = counts.get(row.category, 0) + round(row.per_inference)
    total = sum(by.values())
    layers = LayerProfile(
        tuple(
            LayerRow(f"/blocks.{index}/{kind}", kind, category, ms * scale, ms * scale * 0.99, ms / 13.2, 1.0, device,
                     "CUDAExecutionProvider", ("float16",), ((batch, 197, 768),), (f"/blocks.{index}/{kind}",))
            for index in range(12) for kind, category, ms in
            (("MatMul", "matrix", 0.7), ("Softmax", "attention", 0.2), ("LayerNormalization", "normalisation", 0.1),
             ("Gelu", "element-wise", 0.1))
        ),
        20, "onnxruntime profiler 1.31.1", 14.8 * scale, "profile/onnxruntime_profile.json",
    )  # fmt: skip
    made = ProfileReport(
        engine=f"engines/{label}.engine",
        model="vit_b16",
        backend=backend,
        device=device,
        batch=batch,
        shapes={"pixels": (batch, 3, 224, 224)},
        precision="fp16",
        environment=GPU if device.startswith("cuda") else CPU,
        protocol=GPU_RULES if device.startswith("cuda") else RULES,
        compute_ms=summarize(samples(total * 1.06, 200)),
        time_breakdown=TimeBreakdown(
            wall_ms=total * 1.12,
            h2d_ms=0.61,
            compute_ms=total * 1.04,
            d2h_ms=0.02,
            busy_ms=total * 1.01,
            idle_ms=total * 0.08,
            launch_ms=0.9 * many,
            kernels=sum(row.per_inference for row in rows),
            overlap_ms=0.0,
            gpu_ms=total * 1.05,
        ),
        instruments=(
            InstrumentStatus("nsys", False, "nsys is not installed", "install Nsight Systems 2024.6 or newer"),
            InstrumentStatus("cupti", True, f"{len(rows)} kernels of 20 inferences"),
            InstrumentStatus(
                "ncu",
                False,
                "not permitted here (ERR_NVGPUCTRPERM)",
                "run as root, or load the module with NVreg_...=0",
            ),
        ),
        layers=layers,
        kernels=rows,
        categories=tuple(CategoryShare(name, ms, ms / total, counts[name]) for name, ms in by.items()),  # type: ignore[arg-type]
        bottleneck=Bottleneck(
            "compute",
            f"`{label}` is compute-bound: matrix kernels take 61 % of the time at 71 % of the device's fp16 ceiling",
            (("matrix kernels", "61 % of 3.63 ms"), ("reached", "512 TFLOP/s"), ("ceiling", "721 TFLOP/s, measured")),
            "try INT8, which halves the work of the matrix kernels",
            "trt-engine quantize models/vit_b16.onnx --precision int8",
        ),
        counters=(
            Counters(
                "sm90_xmma_gemm", 43.1, 78.2, 41.0, 22.8, 12.4, advice=("the grid is too small to fill the device",)
            ),
        ),
        peaks=DevicePeaks(
            "NVIDIA H200",
            "h200-580.65",
            (
                DevicePeak("fp16_matrix", 721.4, "TFLOP/s", "measured", "torch.matmul 8192x8192x8192 fp16, best of 20"),
                DevicePeak("memory_read", 4012.0, "GB/s", "measured", "sum over 4 GiB, best of 20"),
                DevicePeak("launch", 2.1, "us", "measured", "empty kernel, 10,000 times"),
            ),
            "2026-03-04T05:00:00+00:00",
            GPU,
            ("fp8_matrix: torch has no product of that type here",),
        ),
        inferences=20,
        files={"timeline": "profile/timeline.json", "onnxruntime": "profile/onnxruntime_profile.json"},
        open_commands={"timeline": "open profile/timeline.json at ui.perfetto.dev"},
        runtime_info={"providers": "CUDAExecutionProvider"},
        started="2026-03-04T05:06:07+00:00",
    )
    return replace(made, **changes)


def done(cell: CellSpec, mean_ms: float, *, ap: float | None = None, profiled: ProfileReport | None = None,
         many: int = 300, **changes: Any) -> CellResult:  # fmt: skip
    gpu = cell.device.startswith("cuda")
    base = {"device": cell.device, "backend": cell.backend, "protocol": GPU_RULES if gpu else RULES,
            "environment": GPU if gpu else CPU}  # fmt: skip
    bench = record(cell.batch, mean_ms, many, engine=f"engines/{cell.label}.engine.onnx",
                   shape={"spread": 0.03, "tail": 0.01}, **(base | changes.pop("bench_changes", {})))  # fmt: skip
    made = CellResult(
        spec=cell,
        state="done",
        engine=f"engines/{cell.label}.engine.onnx",
        engine_bytes=12_700_000 if cell.precision == "fp32" else 6_500_000 if cell.precision == "fp16" else 3_300_000,
        build_seconds=1.2,
        dtype_shares={"float32": 1.0} if cell.precision == "fp32" else {"int8": 0.92, "float32": 0.08},
        parity=Parity("onnxruntime", "seeded random", 0.05, True, {"y": OutputError(0.01, 0.001, 0.004, 0.99999)}),
        bench=bench,
        evaluation=evaluated(cell.label, {"AP": ap, "AP50": ap + 0.1}, cell.device) if ap is not None else None,
        profile=profiled,
        images_digest=IMAGES if ap is not None else None,
        files={"log": f"logs/{cell.label}.log", "record": f"benchmark/{cell.label}.json"},
        started="2026-03-04T05:06:07+00:00",
        seconds=14.0,
    )
    return replace(made, **changes)


def write(
    folder: Path,
    results: Sequence[CellResult] = (),
    *,
    waiting: Sequence[CellSpec] = (),
    compare: CompareReport | None = None,
    profiled: ProfileReport | None = None,
    environment: Any = CPU,
    command: str = "trt-engine run examples/digits/plan.yaml -o runs/demo",
    **changes: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if results or waiting:
        specs = (*(result.spec for result in results), *waiting)
        manifest = RunManifest(
            name="digits", plan="plan.yaml", plan_digest="sha256:" + "ab" * 32, cells=specs,
            modes=("build", "bench", "evaluate"), environment=environment, started="2026-03-04T05:06:00+00:00",
            command=command, title="Digits in three precisions",
        )  # fmt: skip
        manifest = replace(manifest, **changes)
        (folder / "run.json").write_bytes(encode_json(verb_document("run", manifest, command=command)))
        (folder / "plan.yaml").write_text("models: {}\n")
        (folder / "cells").mkdir(exist_ok=True)
        for result in results:
            made = verb_document("cell", result, command=command)
            (folder / "cells" / f"{result.spec.label}.json").write_bytes(encode_json(made))
            for kind in ("logs", "engines", "benchmark"):
                (folder / kind).mkdir(exist_ok=True)
            (folder / "logs" / f"{result.spec.label}.log").write_text(f"built {result.spec.label}\n")
            (folder / "benchmark" / f"{result.spec.label}.json").write_text("{}\n")
            if result.engine:
                (folder / result.engine).write_bytes(b"\x08\x07engine" + result.spec.label.encode())
    if profiled is not None:
        (folder / "profile.json").write_bytes(
            encode_json(verb_document("profile", profiled, command="trt-engine profile x"))
        )
        (folder / "profile").mkdir(exist_ok=True)
        for name in ("timeline.json", "onnxruntime_profile.json"):
            (folder / "profile" / name).write_text("[]\n")
    if compare is not None:
        (folder / "compare.json").write_bytes(
            encode_json(verb_document("compare", compare, command="trt-engine compare a b"))
        )
    return folder


def matrix(folder: Path) -> Path:
    """Three precisions of a detector on the CPU at two batches, one cell that failed and one skipped."""
    cells = [
        done(spec("digits", "fp32", "onnxruntime", 1), 1.93, ap=0.912),
        done(spec("digits", "fp32", "onnxruntime", 8), 11.8, ap=0.912),
        done(spec("digits", "fp16", "onnxruntime", 1), 2.9, ap=0.911),
        done(spec("digits", "fp16", "onnxruntime", 8), 18.4, ap=0.9115),
        done(spec("digits", "int8", "onnxruntime", 1), 1.02, ap=0.897),
        done(
            spec("digits", "int8", "onnxruntime", 8), 5.7, ap=0.8965,
            bench_changes={"stable": False, "instability": ("spread 7.1 % of the mean, at most 5 % expected",)},
        ),
        CellResult(
            spec("missing", "fp32", "onnxruntime", 1), "failed", exit_code=4,
            reason="there is no file `models/missing/model/missing.onnx`\nhint: check the path in the plan, line 12",
        ),
        CellResult(
            spec("digits", "mxfp8", "tensorrt", 8, "cuda:0"), "skipped",
            reason="needs an NVIDIA GPU with MXFP8, found none hint: run it on a machine with compute capability 10.0",
        ),
    ]  # fmt: skip
    return write(folder, cells)


def gpu_matrix(folder: Path) -> Path:
    """A baseline in ONNX Runtime against TensorRT in two precisions on a GPU, with profiles (D5)."""
    base = {"ap": 0.531}
    made = []
    for batch in (1, 8, 64):
        where = {"device": "cuda:0"}
        ort = spec("vit_b16", "fp32", "onnxruntime", batch, providers=("CUDAExecutionProvider",), **where)
        trt = spec("vit_b16", "fp32", "tensorrt", batch, **where)
        half = spec("vit_b16", "fp16", "tensorrt", batch, **where)
        eight = spec("vit_b16", "int8", "tensorrt", batch, **where)
        whole = batch == 64
        made += [
            done(ort, 0.9 + 0.31 * batch, **base,
                 profiled=profile(ort.label, batch=batch, scale=3.1) if whole else None),
            done(trt, 0.7 + 0.22 * batch, **base,
                 profiled=profile(trt.label, batch=batch, scale=2.9, many=0.6, backend="tensorrt") if whole else None),
            done(half, 0.4 + 0.07 * batch, ap=0.5305,
                 profiled=profile(half.label, batch=batch, scale=0.9, many=0.6, backend="tensorrt") if whole else None),
            done(eight, 0.4 + 0.05 * batch, ap=0.522),
        ]  # fmt: skip
    return write(folder, made, environment=GPU, title="ViT-B/16 on an H200", profiled=profile("vit_b16-fp16"))


def compare_report(**changes: Any) -> CompareReport:
    def side(label: str, mean_ms: float, seed: int) -> CompareSide:
        measured = record(8, mean_ms, 400, seed=seed, engine=f"engines/{label}.engine.onnx")
        return CompareSide(label, measured.engine, "onnxruntime", "cpu", label.partition("_")[2], 12_700_000, 11_900_000,
                           201_000_000, {}, measured, (measured.compute_ms[:200], measured.compute_ms[200:]))  # fmt: skip

    def metric(name: Any, base: float, pct: tuple[float, float, float]) -> MetricDifference:
        interval = Interval(*pct)
        verdict = "slower" if interval.low > 0 else "faster" if interval.high < 0 else "no difference found"
        other = base * (1 + interval.value / 100)
        return MetricDifference(name, base, other, "ms", interval, verdict, 0.9)  # type: ignore[arg-type]

    diff = EngineDiff(
        "digits_fp32", "digits_int8", ("onnxruntime graph", "onnxruntime graph"),
        (StructureCount("layers", 61, 48), StructureCount("reformats", 0, 6)),
        (LayerChange("type", ("/conv1/Conv",), ("/conv1/Conv_quant",), "float32 -> int8", 0.31, 0.12),
         LayerChange("fused", ("/conv2/Conv", "/relu2/Relu"), ("/conv2/Conv",), "Conv + Relu", 0.2, 0.1)),
        30,
    )  # fmt: skip
    made = CompareReport(
        sides=(side("digits_fp32", 11.8, 1), side("digits_int8", 5.7, 2), side("digits_again", 11.85, 3)),
        comparisons=(
            Comparison("digits_int8", (metric("median", 11.8, (-52.9, -51.7, -50.4)), metric("p99", 13.0, (-55, -50, -41))),
                     (OutputError(0.7, 0.02, 0.031, 0.9991),), "", diff, 0.26, ("scores",), False, {"scores": 0.984}),
            Comparison("digits_again", (metric("median", 11.8, (-0.4, 0.3, 1.0)), metric("p99", 13.0, (1.4, 4.2, 7.7))),
                     (OutputError(0.0, 0.0, 0.0, 1.0),), "", None, 1.0, ("scores",)),
        ),
        protocol=RULES,
        environment=CPU,
        blocks=40,
        order="random in pairs, seed 0",
        method="interval by a bootstrap over blocks of the paired differences, 10,000 times, seed 0",
        gates=(
            GateResult("p99-slower:3%", True, "p99 of digits_again is 4.2 % slower (1.4 to 7.7 %), 3 % allowed", "p99", 3.0),
        ),
        batch=8,
        started="2026-03-04T05:06:07+00:00",
    )  # fmt: skip
    return replace(made, **changes)


def compared(folder: Path) -> Path:
    """Three engines against each other, one gate failed."""
    return write(folder, compare=compare_report())


def profiled(folder: Path) -> Path:
    """One profile alone."""
    return write(folder, profiled=profile("vit_b16-fp16"))


def everything(folder: Path) -> Path:
    """All kinds of records in one folder, and a plan whose last cell was never reached."""
    import sample_runs

    sample_runs.cpu_run(folder)
    cells = [done(spec("digits", "fp32", "onnxruntime", 8), 11.8), done(spec("digits", "int8", "onnxruntime", 8), 5.7)]
    return write(folder, cells, waiting=[spec("digits", "int8", "onnxruntime", 64)], compare=compare_report(),
                 profiled=profile("digits", device="cpu"))  # fmt: skip


def hostile(folder: Path) -> Path:
    """Labels that try to become markup, to turn the page, to break a table."""
    evil = "</script><script>document.title='owned'</script>|`*_[x](javascript:alert(1))"
    turned = "\u202egnp.\u2066\u200bملف طويل 🦆🚀模型"
    cells = [
        done(spec(evil, "fp32", "onnxruntime", 1), 1.9, ap=0.9),
        done(replace(spec(evil, "int8", "onnxruntime", 1), label="y" * 400 + turned), 1.0, ap=0.8, engine=None),
        CellResult(replace(spec(evil, evil, evil, 2), label=evil), "failed", reason=f"{evil}\nhint: {evil}"),
    ]
    said = Bottleneck("unknown", evil, ((evil, evil),), evil, evil)
    named = replace(cells[0], spec=replace(cells[0].spec, label="a" + turned), engine=None, files={evil: evil},
                    profile=profile("x", device="cpu", engine=evil, bottleneck=said))  # fmt: skip
    sides = compare_report().sides
    report = compare_report(sides=(replace(sides[0], label=evil), *sides[1:]), method=evil, baseline=evil)
    folder.mkdir(parents=True, exist_ok=True)
    safe = [replace(item, spec=replace(item.spec, label=f"c{index}")) for index, item in enumerate((named, *cells[1:]))]
    write(folder, safe, compare=report, title=evil, name=evil)
    for item, file in zip((named, *cells[1:]), sorted((folder / "cells").iterdir()), strict=True):
        file.write_bytes(encode_json(verb_document("cell", item, command=evil)))
    manifest = RunManifest(evil, "plan.yaml", "x", tuple(i.spec for i in (named, *cells[1:])), (), CPU, "x", evil, evil)
    (folder / "run.json").write_bytes(encode_json(verb_document("run", manifest, command=evil)))
    return folder


def many(folder: Path, count: int = 300, samples_each: int = 2000) -> Path:
    """Hundreds of cells with thousands of samples each."""
    precisions = ("fp32", "fp16", "int8", "fp8", "int4")
    cells = [
        done(spec(f"model{index // 50}", precisions[index % 5], "onnxruntime", 2 ** (index // 5 % 10)),
             (1 + index % 7) * 2 ** (index // 5 % 10), ap=0.9 - index % 5 / 100, many=samples_each)
        for index in range(count)
    ]  # fmt: skip
    return write(folder, cells)


MATRICES = {
    "matrix": matrix,
    "gpu_matrix": gpu_matrix,
    "compared": compared,
    "profiled": profiled,
    "everything": everything,
    "hostile_matrix": hostile,
}

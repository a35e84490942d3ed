"""The tables of docs/gpu-suite.md, which the site renders from the records of `suite.py`, and its chart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "gpu-suite-h200.jsonl"
CHART = ROOT / "docs" / "assets" / "gpu-suite.svg"
TITLES = {"vit": "ViT-B/16", "resnet50": "ResNet-50", "yolo": "YOLOv10m", "bert": "BERT-base"}
PEERS = ("torch eager", "torch compiled", "torch compiled autotuned", "onnxruntime plain", "onnxruntime own fusion")
STEPS = {
    "cpu fp16": ("ONNX Runtime, CPU provider, FP16 graph, NumPy in and out", "start"),
    "cpu fp32": ("the same, FP32 graph", "FP16 without FP16 kernels"),
    "cuda fp32 numpy": ("CUDA provider, FP32 graph, NumPy in and out", "processor to GPU"),
    "resident": ("inputs and outputs stay on the GPU", "copies"),
    "graph": ("ONNX Runtime's CUDA graph", "graph"),
    "fp16": ("FP16 graph", "precision"),
    "fused": ("`te.build`, fused, default settings", "fusion"),
    "tuned": ("`te.build`, settings or backend by measurement", "kernels"),
}
"""Of each step: what is measured, and what its factor is due to."""
GRID = (
    *((model, batch, "fp16", False) for model in TITLES for batch in (1, 64)),
    *((model, batch, "fp16", False) for model in ("vit", "resnet50") for batch in (8, 256)),
    *(
        (model, batch, kind, False)
        for kind in ("bf16", "fp8", "int8")
        for model in ("vit", "resnet50")
        for batch in (1, 64)
    ),
    *((model, batch, "fp16", True) for model in ("vit", "resnet50") for batch in (1, 64)),
)
"""The whole suite: model, batch, precision, and whether kernels are chosen by longer measurement (`--autotune-s`)."""


def latest(records: Sequence[dict[str, Any]], schema: str) -> list[dict[str, Any]]:
    """The last record of each cell; a cell that was measured once stays so."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        if record["schema"] != f"trt-engine/gpu-{schema}":
            continue
        key = (record["model"], record["batch"], record["precision"], record["autotune_s"])
        if key not in found or record["state"] == "measured" or found[key]["state"] != "measured":
            found[key] = record
    order = [*TITLES]
    return sorted(
        found.values(),
        key=lambda item: (item["precision"] != "fp16", item["precision"], order.index(item["model"]), item["batch"]),
    )  # fmt: skip


def best_of_ours(record: dict[str, Any]) -> str | None:
    """The fastest of our ways."""
    return min(record["ratio_to_best_peer"], key=lambda way: record["p50_us"][way], default=None)


def floor_ms(record: dict[str, Any]) -> float | None:
    """Time of the arithmetic alone at the rate of a large matrix product in this precision."""
    rate, work = record["ceilings"].get(record["precision"]), record.get("flops")
    return None if rate is None or work is None else work / rate / 1e9


def ms(value_us: float | None) -> str:
    return "" if value_us is None else f"{value_us / 1e3:.3g}"


def title(record: dict[str, Any]) -> str:
    tuned = f", kernels by measurement ({record['autotune_s']} s)" if record["autotune_s"] else ""
    return f"{TITLES[record['model']]} b{record['batch']} {record['precision']}{tuned}"


def cells(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    ours = ("onnxruntime", "inductor", "inductor unfused", "inductor autotuned", "auto")
    measured = [record for record in records if record["state"] == "measured"]
    ways = [way for way in (*ours, *PEERS) if any(way in record["p50_us"] for record in measured)]
    yield f"| ms | {' | '.join(ways)} | best engine / best peer | floor | error |"
    yield f"| --- |{' ---: |' * (len(ways) + 3)}"
    for record in records:
        if record["state"] != "measured":
            yield f"| {title(record)} | {record['state']}: {record['reason']} |{' |' * (len(ways) + 2)}"
            continue
        times = []
        for way in ways:
            both = [ms(record["p50_us"].get(name)) for name in (way, f"{way} bind")]
            failed = "failed" if way in record["failed"] else ""
            times.append(" / ".join(filter(None, both)) or failed)
        way, floor = best_of_ours(record), floor_ms(record)
        share = ""
        if way is not None:
            middle, low, high = record["ratio_to_best_peer"][way]
            share = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        error = record["errors"].get(way.removesuffix(" bind")) if way is not None else None
        least = "" if floor is None else f"{floor:.3g}"
        shown = "" if error is None else f"{error:.1e}"
        yield f"| {title(record)} | {' | '.join(times)} | {share} | {least} | {shown} |"


def builds(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| engine | first build | search | again | CUDA graph | what the build chose |"
    yield "| --- | ---: | ---: | ---: | --- | --- |"
    for record in records:
        for way, made in record.get("builds", {}).items() if record["state"] == "measured" else ():
            first, searched = (f"{made[name]:.0f} s" if name in made else "" for name in ("first_s", "search_s"))
            graph = "yes" if made["captured"] else f"no: {made['refused'] or 'not captured'}"
            yield (
                f"| {title(record)} {way} | {first} | {searched} | {made['again_s']:.2f} s | {graph} | {choice(made)} |"
            )
        for way, made in record.get("compile", {}).items() if record["state"] == "measured" else ():
            first = f"{made['first_s']:.0f} s" if "first_s" in made else "failed"
            yield f"| {title(record)} {way} | {first} | | | | |"


def choice(made: dict[str, Any]) -> str:
    settings = " ".join(f"{name}={value}" for name, value in (made["options"] or {}).items())
    fused = (made["notes"] or {}).get("fusions")
    kernels = (made["notes"] or {}).get("kernels")
    parts = [made["backend"], settings, f"fused: {fused}" if fused else "", f"kernels: {kernels}" if kernels else ""]
    tuning = made.get("tuning")
    if tuning and (margin := tuning.get("margin_pct")) is not None:
        span = tuning["margin_interval_pct"]
        parts.append(f"next {margin:+.1f} %" + ("" if span is None else f" ({span[0]:+.1f} to {span[1]:+.1f})"))
    left_out = [item for item in (tuning or {}).get("candidates", ()) if "not measured" in (item["note"] or "")]
    if left_out:
        many = "1 candidate" if len(left_out) == 1 else f"{len(left_out)} candidates"
        parts.append(f"{many} not measured within {tuning['budget_s']:g} s")
    return "; ".join(filter(None, parts))


def steps(record: dict[str, Any]) -> Iterator[str]:
    """The split of the whole factor; it multiplies up to the last column."""
    found = {name: record["p50_us"][name] for name in STEPS if name in record["p50_us"]}
    yield f"## From the CPU provider to the engine: {title(record)}"
    yield ""
    first, last = next(iter(found.values())), [*found.values()][-1]
    yield f"The whole way is **{first / last:.0f}x**."
    yield ""
    yield "| step | ms | faster than the row before | than the first | due to |"
    yield "| --- | ---: | ---: | ---: | --- |"
    before = first
    for name, value in found.items():
        what, cause = STEPS[name]
        yield f"| {what} | {value / 1e3:.3g} | {before / value:.2f}x | {first / value:.1f}x | {cause} |"
        before = value
    gpu = found.get("cuda fp32 numpy")
    if gpu is not None:
        yield ""
        yield f"From the CUDA provider in FP32 with NumPy to the engine it is {gpu / last:.1f}x."
    for name, reason in record["failed"].items():
        yield f"\n{name}: not measured ({reason})"


def tables(path: Path = RECORDS) -> str:
    """All tables in Markdown, from the file of records."""
    return "\n".join(_tables([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]))


def _tables(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    suite, split = latest(records, "suite"), latest(records, "steps")
    machine = (suite or split)[-1]["environment"]
    yield f"Machine: {machine['gpu'] or machine['cpu']}, driver {machine['driver']}, {libraries(machine)}."
    ceilings = next((record["ceilings"] for record in reversed(suite) if record["ceilings"]), {})
    if ceilings:
        rates = ", ".join(f"{name} {value:g}" for name, value in ceilings.items() if name != "copy_tb_s")
        yield f"Ceilings beside the last cell, TFLOP/s of a large product: {rates}; copy {ceilings['copy_tb_s']:g} TB/s."
    yield ""
    yield from cells(suite)
    yield ""
    for record in suite:
        for way, reason in record["failed"].items() if record["state"] == "measured" else ():
            yield f"- {title(record)}, {way}: {' '.join(reason.split())}"
    known = {(item["model"], item["batch"], item["precision"], item["autotune_s"] > 0) for item in suite}
    missing = [cell for cell in GRID if cell not in known]
    if missing:
        names = "; ".join(
            f"{TITLES[model]} b{batch} {kind}{', kernels by longer measurement' if tuned else ''}"
            for model, batch, kind, tuned in missing
        )
        yield f"- Not reached, without a record: {names}"
    if not split:
        yield "- Not reached, without a record: the steps from the CPU provider to the engine (`--steps vit`)"
    if any(record["state"] == "measured" for record in suite):
        yield ""
        yield "## Builds"
        yield ""
        yield from builds(suite)
    for record in split:
        if record["state"] == "measured":
            yield ""
            yield from steps(record)


def libraries(machine: dict[str, Any]) -> str:
    names = ("torch", "onnxruntime-gpu", "onnxruntime")
    found = [f"{name} {machine['libraries'][name]}" for name in names if name in machine["libraries"]]
    return ", ".join(found)


def chart(records: Sequence[dict[str, Any]]) -> str:
    """Bars of every cell: time relative to the best peer, ours first."""
    rows: list[tuple[str, list[tuple[str, float, str]]]] = []
    for record in records:
        if record["state"] != "measured" or not record["best_peer"]:
            continue
        best, way = record["p50_us"][record["best_peer"]], best_of_ours(record)
        bars = [(f"ours: {way}", record["p50_us"][way] / best, "#0a7d5a")] if way else []
        bars += [(peer, record["p50_us"][peer] / best, "#9aa5b1") for peer in PEERS if peer in record["p50_us"]]
        rows.append((title(record), bars))
    left, scale, height, cut, y = 190, 220, 14, 3.0, 34
    parts = []
    for name, bars in rows:
        parts.append(f'<text x="8" y="{y + 11}" font-weight="bold">{name}</text>')
        for label, value, colour in bars:
            width = min(value, cut) * scale
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{height - 3}" fill="{colour}"/>')
            parts.append(f'<text x="{left + width + 6:.1f}" y="{y + 10}">{value:.2f} {label}</text>')
            y += height
        y += 10
    line = left + scale
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 {y + 8}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([
        head, f'<rect width="1040" height="{y + 8}" fill="#ffffff"/>',
        f'<text x="8" y="18">Time of one batch, best peer = 1 (shorter is faster, bars end at {cut:g})</text>', *parts,
        f'<line x1="{line}" y1="26" x2="{line}" y2="{y}" stroke="#333333" stroke-dasharray="3 3"/>', "</svg>", "",
    ])  # fmt: skip


def write(path: Path = RECORDS, chart_path: Path = CHART) -> int:
    """Print the tables and write the chart; 5 where there is no record."""
    if not path.exists() or not path.stat().st_size:
        print("no records")
        return 5
    print(tables(path))
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chart_path.write_text(chart(latest(records, "suite")), encoding="utf-8")
    return 0

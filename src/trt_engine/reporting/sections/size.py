"""What `size` found: the stream count, the batches it tried, cliffs, steps, checks and what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trt_engine.records import BatchResult, SizeReport
from trt_engine.reporting.charts import Bars, Line, LineChart, Point
from trt_engine.reporting.contents import Block, Commands, Figure, Notice, Paragraph, Section, clean
from trt_engine.reporting.figures import column, count, number
from trt_engine.reporting.sections.parts import (
    hinted,
    plural,
    point,
    sentence,
    summary_columns,
    table,
    told,
    words,
)
from trt_engine.reporting.sections.scene import Scene

__all__ = ["claim", "cliffs", "figures", "findings", "following", "measurements", "merged", "notices", "steps"]

_STEPS = 16  # bars in one chart


def figures(scene: Scene, size: SizeReport) -> Iterator[Figure]:
    where = "" if scene.on_gpu else f", on {'the CPU' if scene.device == 'cpu' else scene.device}"
    bound = "GPU-only upper bound" if scene.on_gpu else "upper bound from compute alone"
    peak = "–" if size.peak_streams is None else count(size.peak_streams)
    yield Figure("PEAK_GPU_STREAMS", peak, clean(f"{bound} at {size.fps:g} fps{where}"))
    last = size.batches[-1] if size.batches else None
    yield Figure("images/s", number(size.images_per_s), f"at batch {last.batch}" if last else "nothing measured")
    if size.batches:
        one = size.batches[0]
        yield Figure(
            f"ms at batch {one.batch}", number(one.compute_ms.mean), f"mean; p99 {number(one.compute_ms.p99)} ms"
        )
    if last is not None and last.batch != size.batches[0].batch:
        yield Figure("ms per image", number(last.per_image_ms), f"at batch {last.batch}")


def claim(scene: Scene) -> str:
    size = scene.size
    if size is None or size.peak_streams is None:
        return ""
    formula = f"images/s = queries/s x batch; streams = floor(images/s / {size.fps:g})."
    fewer = "DeepStream typically reaches 10-40 % fewer (NVDEC, mux, GStreamer)"
    if scene.on_gpu:
        return (
            f"The count is the GPU-only upper bound at {size.fps:g} fps: {fewer} and starts its first run from this "
            f"count. {formula}"
        )
    return (
        f"The count is an upper bound at {size.fps:g} fps from compute alone on this device, and no GPU figure. "
        f"The same bound measured on a GPU is where DeepStream starts its first run; {fewer}. {formula}"
    )


def notices(size: SizeReport) -> Iterator[Notice]:
    if size.complete or size.batches:
        yield Notice(_why_stopped(size), "info" if size.stopped_because == "peak_within_batch" else "warning")
    yield from (Notice(clean(sentence(note)), "info") for note in size.notes)


def measurements(scene: Scene, size: SizeReport) -> Section | None:
    results = merged(size)
    if not results:
        return None
    final = size.batches[-1].batch if size.batches else None
    blocks: list[Block] = []
    if len(results) > 1:
        marks = [(result, "" if result.stable else "unstable") for result in results]
        blocks.append(
            (
                LineChart(
                    "throughput",
                    "Throughput by batch size",
                    told(f"batch {r.batch}: {number(r.images_per_s)} images/s" for r in results),
                    "batch size (log scale)",
                    "images/s",
                    (Line("measured", tuple(point(r.batch, r.images_per_s, m) for r, m in marks)),),
                    log_x=True,
                ),
                LineChart(
                    "per-image",
                    "Time per image by batch size",
                    told(f"batch {r.batch}: {number(r.per_image_ms)} ms per image" for r in results),
                    "batch size (log scale)",
                    "ms per image",
                    (Line("measured", tuple(point(r.batch, r.per_image_ms, m) for r, m in marks)),),
                    log_x=True,
                ),
            )
        )
    blocks.append(
        table(
            f"One row for each engine and batch size; times in ms per query, {scene.scope()}",
            [
                ("batch", [str(r.batch) for r in results]),
                ("queries/s", column([r.qps for r in results])),
                ("images/s", column([r.images_per_s for r in results])),
                ("ms per image", column([r.per_image_ms for r in results])),
                *summary_columns([r.compute_ms for r in results]),
                *([("", ["" if r.stable else "not stable" for r in results])] if _any_unstable(results) else []),
            ],
            marked=[index for index, r in enumerate(results) if r.batch == final],
        )
    )
    blocks.append(
        Paragraph(
            f"{plural(size.engines_built, 'engine')} built, {plural(size.measurements, 'measurement')} taken"
            + (
                f" ({size.scan_engines} and {size.scan_measurements} of them for the scan). "
                if size.scan_measurements
                else ". "
            )
            + (f"The stream count follows from the marked row, batch {final}." if final is not None else "")
        )
    )
    return Section("measurements", "Measurements", tuple(blocks))


def cliffs(size: SizeReport) -> Section | None:
    if not size.cliffs:
        return None
    points = sorted(size.cliffs, key=lambda found: found.batch)
    bad = [str(batch) for batch in sorted({*size.avoid, *(p.batch for p in points if p.cliff)})]
    powers = [str(p.batch) for p in points if not p.cliff and p.batch & (p.batch - 1) == 0]
    said = (
        f"Avoid batch {'size' if len(bad) == 1 else 'sizes'} {', '.join(bad)}: much slower than the neighbours."
        if bad
        else f"No cliff between batch {points[0].batch} and {points[-1].batch}."
    )
    if powers:
        said += f" Prefer powers of two: {', '.join(powers)}."
    labels = _spans([p.batch for p in points if p.cliff])
    chart = LineChart(
        "cliffs",
        "Throughput around the chosen batch size",
        said + " " + told(f"batch {p.batch}: {number(p.images_per_s)} images/s" for p in points),
        "batch size",
        "images/s",
        (
            Line(
                "measured",
                tuple(
                    Point(p.batch, p.images_per_s, labels.get(p.batch, ""), "cliff" if p.cliff else "") for p in points
                ),
            ),
            Line(
                "what the neighbours suggest",
                tuple(Point(p.batch, p.expected_images_per_s) for p in points if p.expected_images_per_s is not None),
                "dashed",
            ),
        ),
    )
    lost = [100 * (p.images_per_s / p.expected_images_per_s - 1) if p.expected_images_per_s else None for p in points]
    rows = table(
        "Images per second by batch size",
        [
            ("batch", [str(p.batch) for p in points]),
            ("measured", column([p.images_per_s for p in points])),
            ("suggested", column([p.expected_images_per_s for p in points])),
            ("difference %", ["–" if value is None else f"{value:+.1f}".replace("-", "−") for value in lost]),
            ("", ["cliff" if p.cliff else "" for p in points]),
        ],
        marked=[index for index, p in enumerate(points) if p.cliff],
    )
    return Section("cliffs", "Batch cliffs", (Paragraph(said), (chart,), rows))


def findings(size: SizeReport) -> Section | None:
    """The pre-flight, and what the model's graph gave to say."""
    if not (size.preflight or size.findings):
        return None
    blocks: list[Block] = []
    if size.preflight:
        checks: list[tuple[str, ...]] = [(c.name, c.status, hinted(c.text, c.hint)) for c in size.preflight]
        marked = [index for index, check in enumerate(size.preflight) if check.status != "ok"]
        blocks.append(words("Pre-flight", ("checked", "", "found"), checks, marked))
    if size.findings:
        found = [
            (f.code, f.severity, hinted(f"{f.message} ({f.where})" if f.where else f.message, f.hint))
            for f in size.findings
        ]
        marked = [index for index, finding in enumerate(size.findings) if finding.severity != "info"]
        blocks.append(words("Findings about the model", ("finding", "", "what it means"), found, marked))
    return Section("findings", "Checks", tuple(blocks))


def following(scene: Scene, size: SizeReport) -> Section | None:
    """The nvinfer keys that follow."""
    if not size.nvinfer:
        return None
    lines = ["[property]", *(clean(f"{name}={value}") for name, value in size.nvinfer.items())]
    lines += [clean(f"# {note}") for note in size.nvinfer_notes]
    said = "Keys of DeepStream's nvinfer for this model" + ("." if scene.on_gpu else ", once built with TensorRT.")
    return Section("next", "Next", (Paragraph(said), Commands(tuple(lines))))


def steps(size: SizeReport) -> Section | None:
    if not size.steps:
        return None
    total = sum(step.seconds for step in size.steps)
    kept = sorted(range(len(size.steps)), key=lambda index: -size.steps[index].seconds)[:_STEPS]
    drawn = [size.steps[index] for index in sorted(kept)]
    longest = max(size.steps, key=lambda step: step.seconds)
    chart = Bars(
        "steps",
        "Time per step" + (f", the {_STEPS} longest" if len(size.steps) > _STEPS else ""),
        clean(
            f"{len(size.steps)} steps, {number(total)} s in all; the longest is {longest.name}, "
            f"{number(longest.seconds)} s."
        ),
        "s",
        tuple((clean(step.name), step.seconds) for step in drawn),
    )
    seconds = [f"{value:,.{1 if total >= 100 else 2}f}" for value in (*(step.seconds for step in size.steps), total)]
    rows = table(
        "Seconds by step",
        [("step", [*(clean(step.name) for step in size.steps), "in all"]), ("s", seconds)],
        words=1,
        marked=[len(size.steps)],
    )
    return Section("steps", "Time per step", ((chart,), rows))


def merged(size: SizeReport) -> list[BatchResult]:
    """What was tried and what stands, each once, by batch size."""
    found = {(result.batch, result.engine): result for result in (*size.tried, *size.batches)}
    return sorted(found.values(), key=lambda result: result.batch)


def _spans(numbers: Sequence[int]) -> dict[int, str]:
    """Neighbouring numbers as one span, by the number in its middle: `{18: "17–19", 23: "23"}`."""
    spans: list[list[int]] = []
    for value in numbers:
        if spans and value == spans[-1][-1] + 1:
            spans[-1].append(value)
        else:
            spans.append([value])
    return {span[len(span) // 2]: f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans}


def _any_unstable(results: Iterable[BatchResult]) -> bool:
    return any(not result.stable for result in results)


def _why_stopped(size: SizeReport) -> str:
    last = f"batch {size.batches[-1].batch}" if size.batches else None
    beyond = f" at batch {', '.join(map(str, size.out_of_memory))}" if size.out_of_memory else ""
    stands = f"; the last good answer, {last}, stands." if last else "."
    streams = f"{size.peak_streams} streams"
    return {
        "peak_within_batch": f"The doubling ended because {streams} fit within the engine's {last}.",
        "max_batch": f"The doubling ended at the largest batch allowed ({last}) with {streams}: "
        "a larger --max-batch may sustain more.",
        "out_of_memory": f"The doubling ended out of memory{beyond}{stands}",
        "static_batch": f"The model's batch is fixed ({last}): export it with a dynamic batch to try a larger one.",
        "interrupted": f"The doubling was interrupted{stands}",
        "failed": f"The doubling failed{stands}",
    }[size.stopped_because]

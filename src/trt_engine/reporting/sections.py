"""A run turned into the contents of its report: what is said, in which order, with which numbers.

Text from records is cleaned here (`clean`); each form escapes it in its own way.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from trt_engine.records import BatchResult, BenchRecord, Protocol, SizeReport, Summary, percentile
from trt_engine.reporting.charts import Bars, Chart, Histogram, Line, LineChart, Point
from trt_engine.reporting.contents import (
    Block,
    Commands,
    Contents,
    Facts,
    Figure,
    Links,
    Notice,
    Paragraph,
    Section,
    Table,
    clean,
)
from trt_engine.reporting.figures import column, count, number, si_bytes
from trt_engine.reporting.run import RECORDS, SIZE, Run
from trt_engine.tensors import format_shape

__all__ = ["contents_of"]

_PANELS = 6  # histograms on one page; the table beside them has every measurement
_STEPS = 16  # bars in one chart


def contents_of(run: Run, base: Path | None = None) -> Contents:
    """The report of a run; links and paths lead from `base` (the run's folder, unless the report goes elsewhere)."""
    return _Writer(run, run.folder if base is None else base).contents()


class _Writer:
    """Writes the contents of one run."""

    def __init__(self, run: Run, base: Path) -> None:
        self.run = run
        self.base = base
        self.size = run.size
        self.records = run.measurements
        self.summaries = {id(record): record.compute() for record in run.measurements}
        first = run.size or run.measurements[0]
        self.device = first.device
        self.backend = first.backend
        self.environment = first.environment

    def contents(self) -> Contents:
        made = [
            self._measurements(),
            self._distribution(),
            self._cliffs(),
            self._next(),
            self._steps(),
            self._findings(),
            self._protocol(),
            self._environment(),
            self._what_ran(),
            self._repeat(),
            self._artifacts(),
        ]
        sources = " and ".join(
            name for name, there in ((SIZE, self.size is not None), (RECORDS, bool(self.records))) if there
        )
        return Contents(
            title=self._title(),
            subtitle=self._subtitle(),
            device=self._device(),
            figures=tuple(self._figures()),
            claim=self._claim(),
            notices=tuple(self._notices()),
            sections=tuple(section for section in made if section is not None),
            footer=f"Written by trt-engine {clean(self.environment.tool)} from {sources}. "
            f"Every number follows from the samples and settings recorded there.",
        )

    # ------------------------------------------------------------------------------------------ the first screen

    def _title(self) -> str:
        if self.size is not None:
            return clean(self.size.model_name or Path(self.size.model).name or self.size.model)
        names = list(dict.fromkeys(Path(record.engine).name or record.engine for record in self.records))
        return clean(names[0]) if len(names) == 1 else f"{len(names)} engines"

    def _subtitle(self) -> str:
        parts = ["stream count" if self.size else "measurements", f"backend {self.backend}"]
        if self.size is not None:
            parts.append(self.size.precision.upper())
        if self.records:
            parts.append(_moment(min(record.started for record in self.records)))
        return clean(" · ".join(parts))

    def _device(self) -> str:
        here = self.environment
        devices = list(dict.fromkeys(record.device for record in self.records)) or [self.device]
        if len(devices) > 1:
            return clean(f"Devices: {', '.join(devices)}")
        if self.device.startswith("cuda"):
            parts = [f"GPU: {here.gpu or 'name not recorded'} ({self.device})"]
            if here.gpu_memory_mib:
                parts.append(si_bytes(here.gpu_memory_mib))
            if here.compute_capability:
                parts.append(f"compute capability {here.compute_capability}")
            return clean(", ".join(parts))
        if self.device == "cpu":
            return clean(f"CPU: {here.cpu}, {here.cpu_cores} {'core' if here.cpu_cores == 1 else 'cores'}")
        return clean(f"Device: {self.device}")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def _figures(self) -> Iterator[Figure]:
        size = self.size
        if size is None:
            best = max(self.records, key=lambda record: record.images_per_s)
            yield Figure("images/s", number(best.images_per_s), f"highest, at batch {best.batch}")
            low = min(self.records, key=lambda record: record.batch)
            if (summary := self.summaries[id(low)]) is not None:
                yield Figure(f"ms at batch {low.batch}", number(summary.mean), f"mean; p99 {number(summary.p99)} ms")
            yield Figure(
                "measurements", count(len(self.records)), f"{count(sum(r.queries for r in self.records))} queries"
            )
            return
        where = "" if self.on_gpu else f", on {'the CPU' if self.device == 'cpu' else self.device}"
        bound = "GPU-only upper bound" if self.on_gpu else "upper bound from compute alone"
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

    def _claim(self) -> str:
        size = self.size
        if size is None or size.peak_streams is None:
            return ""
        formula = f"images/s = queries/s x batch; streams = floor(images/s / {size.fps:g})."
        fewer = "DeepStream typically reaches 10-40 % fewer (NVDEC, mux, GStreamer)"
        if self.on_gpu:
            return (
                f"The count is the GPU-only upper bound at {size.fps:g} fps: {fewer} and starts its first run from this "
                f"count. {formula}"
            )
        return (
            f"The count is an upper bound at {size.fps:g} fps from compute alone on this device, and no GPU figure. "
            f"The same bound measured on a GPU is where DeepStream starts its first run; {fewer}. {formula}"
        )

    def _notices(self) -> Iterator[Notice]:
        told = list(self._said())
        for index, notice in enumerate(told):
            if not any(notice.text == other.text for other in told[:index]):
                yield notice

    def _said(self) -> Iterator[Notice]:
        size = self.size
        if self.device == "cpu":
            yield Notice("Measured on a CPU. Nothing in this report is a GPU figure.", "info")
        elif not self.on_gpu:
            yield Notice(
                clean(f"Measured on {self.device}, which is no GPU. Nothing in this report is a GPU figure."), "info"
            )
        if not self.run.complete:
            ended = size.error if size is not None and size.error else "the run was interrupted"
            yield Notice(clean(f"Incomplete: {ended}. What had been measured until then stands below."))
        for reason in self.run.skipped:
            yield Notice(clean(_sentence(reason)))
        if size is not None:
            if size.complete or size.batches:
                yield Notice(_why_stopped(size), "info" if size.stopped_because == "peak_within_batch" else "warning")
            yield from (Notice(clean(_sentence(note)), "info") for note in size.notes)
        for measured in (*(_merged(size) if size else ()), *self.records):
            if not measured.stable or measured.instability:
                reasons = "; ".join(measured.instability) or "the samples moved too much to be trusted"
                yield Notice(clean(f"Not stable, batch {measured.batch}: {reasons}"))
        batches: dict[str, list[str]] = {}
        for record in self.records:
            held = sorted({reason for state in record.clocks for reason in state.throttled})
            clocks = [f"the GPU's clocks were held down ({', '.join(held)})"] if held else []
            for warning in (*record.warnings, *clocks):
                batches.setdefault(warning, []).append(str(record.batch))
        yield from (
            Notice(clean(f"Batch {', '.join(dict.fromkeys(where))}: {warning}")) for warning, where in batches.items()
        )
        yield from (Notice(clean(_sentence(warning))) for warning in self.run.warnings if warning not in batches)
        if len({(record.protocol.name, record.device) for record in self.records}) > 1:
            yield Notice("Measured under several protocols or devices: only rows that agree in both compare.")

    # ------------------------------------------------------------------------------------------ what was measured

    def _measurements(self) -> Section | None:
        return self._sized(self.size) if self.size is not None else self._benched()

    def _scope(self) -> str:
        """What lies inside the times."""
        protocols = [record.protocol for record in self.records]
        if self.size is not None and self.size.protocol is not None:
            protocols.append(self.size.protocol)
        if not any(protocol.transfers for protocol in protocols):
            return "compute alone"
        # a device that cannot be timed by its own events: what the host sees is all there is
        return (
            "from the host's clock around the call"
            if all(p.clock == "host" for p in protocols)
            else "of the compute part"
        )

    def _sized(self, size: SizeReport) -> Section | None:
        results = _merged(size)
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
                        _told(f"batch {r.batch}: {number(r.images_per_s)} images/s" for r in results),
                        "batch size (log scale)",
                        "images/s",
                        (Line("measured", tuple(_point(r.batch, r.images_per_s, m) for r, m in marks)),),
                        log_x=True,
                    ),
                    LineChart(
                        "per-image",
                        "Time per image by batch size",
                        _told(f"batch {r.batch}: {number(r.per_image_ms)} ms per image" for r in results),
                        "batch size (log scale)",
                        "ms per image",
                        (Line("measured", tuple(_point(r.batch, r.per_image_ms, m) for r, m in marks)),),
                        log_x=True,
                    ),
                )
            )
        blocks.append(
            _table(
                f"One row for each engine and batch size; times in ms per query, {self._scope()}",
                [
                    ("batch", [str(r.batch) for r in results]),
                    ("queries/s", column([r.qps for r in results])),
                    ("images/s", column([r.images_per_s for r in results])),
                    ("ms per image", column([r.per_image_ms for r in results])),
                    *_summary_columns([r.compute_ms for r in results]),
                    *([("", ["" if r.stable else "not stable" for r in results])] if _any_unstable(results) else []),
                ],
                marked=[index for index, r in enumerate(results) if r.batch == final],
            )
        )
        blocks.append(
            Paragraph(
                f"{_plural(size.engines_built, 'engine')} built, {_plural(size.measurements, 'measurement')} taken"
                + (
                    f" ({size.scan_engines} and {size.scan_measurements} of them for the scan). "
                    if size.scan_measurements
                    else ". "
                )
                + (f"The stream count follows from the marked row, batch {final}." if final is not None else "")
            )
        )
        return Section("measurements", "Measurements", tuple(blocks))

    def _benched(self) -> Section:
        records = self.records
        summaries = [self.summaries[id(record)] for record in records]
        blocks: list[Block] = []
        if len({record.batch for record in records}) > 1:
            blocks.append(self._bench_charts())
        engines = [self._path(record.engine)[0] for record in records]
        varying: list[tuple[str, Sequence[str]]] = [
            (name, values)
            for name, values in (
                ("engine", engines),
                ("backend", [clean(record.backend) for record in records]),
                ("device", [clean(record.device) for record in records]),
                ("protocol", [clean(record.protocol.name) for record in records]),
            )
            if len(set(values)) > 1
        ]
        state = [_state(record) for record in records]
        columns: list[tuple[str, Sequence[str]]] = [
            *varying,
            ("batch", [str(record.batch) for record in records]),
            ("queries/s", column([record.qps for record in records])),
            ("images/s", column([record.images_per_s for record in records])),
            (
                "ms per image",
                column([s.mean / r.batch if s else None for r, s in zip(records, summaries, strict=True)]),
            ),
            *_summary_columns(summaries),
            *([("", state)] if any(state) else []),
        ]
        blocks.append(
            _table(f"One row for each measurement; times in ms per query, {self._scope()}", columns, words=len(varying))
        )
        return Section("measurements", "Measurements", tuple(blocks))

    def _bench_charts(self) -> tuple[Chart, ...]:
        groups: dict[str, list[BenchRecord]] = {}
        for record in self.records:
            groups.setdefault(f"{record.backend}, {record.device}, {record.protocol.name}", []).append(record)
        made: list[Chart] = []
        for key, title, unit in (
            ("throughput", "Throughput by batch size", "images/s"),
            ("per-image", "Time per image by batch size", "ms per image"),
        ):
            lines = []
            for name, records in groups.items():
                points = []
                for record in records:
                    summary = self.summaries[id(record)]
                    value = (
                        record.images_per_s if key == "throughput" else summary.mean / record.batch if summary else None
                    )
                    if value is not None:
                        points.append(_point(record.batch, value, "" if record.stable else "unstable"))
                if points:
                    once = len({point.x for point in points}) == len(points)
                    lines.append(Line(clean(name), tuple(points), "solid" if once else "points"))
            if lines:
                told = _told(f"batch {p.x:g}: {number(p.y)} {unit}" for line in lines for p in line.points)
                made.append(LineChart(key, title, told, "batch size (log scale)", unit, tuple(lines), log_x=True))
        return tuple(made)

    def _distribution(self) -> Section | None:
        records = [record for record in self.records if record.compute_ms]
        if not records:
            return None
        wanted = [result.batch for result in self.size.batches] if self.size else []
        first = [record for record in records if record.batch in wanted]
        panels = (first + [record for record in records if record not in first])[:_PANELS]
        panels.sort(key=lambda record: record.batch)
        names = _names(records)
        charts: list[Chart] = []
        for record in panels:
            summary = self.summaries[id(record)]
            assert summary is not None  # it has samples
            name = names[id(record)]
            charts.append(
                Histogram(
                    f"distribution-{records.index(record)}",
                    f"Compute time, {name}",
                    f"{count(len(record.compute_ms))} queries between {number(summary.min)} and {number(summary.max)} ms; "
                    f"median {number(summary.median)} ms, p99 {number(summary.p99)} ms.",
                    "ms per query",
                    record.compute_ms,
                    (("median", summary.median), ("p99", summary.p99)),
                )
            )
        summaries = [self.summaries[id(record)] for record in records]
        rules = {record.protocol.percentile_rule for record in records}
        asked = sorted({percent for record in records for percent in record.percentiles} - {90.0, 95.0, 99.0})
        told = {
            "trtexec": "Percentiles are trtexec's: a value that was measured, no interpolation.",
            "linear": "Percentiles interpolate between the two nearest values.",
        }
        blocks: list[Block] = [
            tuple(charts),
            _table(
                "Compute time per query from the raw samples, in ms",
                [
                    ("measurement", [names[id(record)] for record in records]),
                    ("queries", [count(len(record.compute_ms)) for record in records]),
                    ("min", column([s.min if s else None for s in summaries])),
                    *_summary_columns(summaries),
                    *(
                        (f"p{percent:g}", column([_percentile(record, percent) for record in records]))
                        for percent in asked
                    ),
                    ("max", column([s.max if s else None for s in summaries])),
                    ("spread %", column([s.cv_pct if s else None for s in summaries], 2)),
                ],
                words=1,
            ),
            Paragraph(
                " ".join(told[rule] for rule in sorted(rules))
                + " The spread is the standard deviation over the mean."
                + (f" Drawn: {_PANELS} of {len(records)} measurements." if len(records) > _PANELS else "")
            ),
        ]
        return Section("distribution", "Distribution of times", tuple(blocks))

    def _cliffs(self) -> Section | None:
        if self.size is None or not self.size.cliffs:
            return None
        points = sorted(self.size.cliffs, key=lambda point: point.batch)
        bad = [str(batch) for batch in sorted({*self.size.avoid, *(point.batch for point in points if point.cliff)})]
        powers = [str(p.batch) for p in points if not p.cliff and p.batch & (p.batch - 1) == 0]
        said = (
            f"Avoid batch {'size' if len(bad) == 1 else 'sizes'} {', '.join(bad)}: much slower than the neighbours."
            if bad
            else f"No cliff between batch {points[0].batch} and {points[-1].batch}."
        )
        if powers:
            said += f" Prefer powers of two: {', '.join(powers)}."
        labels = _spans([point.batch for point in points if point.cliff])
        chart = LineChart(
            "cliffs",
            "Throughput around the chosen batch size",
            said + " " + _told(f"batch {p.batch}: {number(p.images_per_s)} images/s" for p in points),
            "batch size",
            "images/s",
            (
                Line(
                    "measured",
                    tuple(
                        Point(p.batch, p.images_per_s, labels.get(p.batch, ""), "cliff" if p.cliff else "")
                        for p in points
                    ),
                ),
                Line(
                    "what the neighbours suggest",
                    tuple(
                        Point(p.batch, p.expected_images_per_s) for p in points if p.expected_images_per_s is not None
                    ),
                    "dashed",
                ),
            ),
        )
        lost = [
            100 * (p.images_per_s / p.expected_images_per_s - 1) if p.expected_images_per_s else None for p in points
        ]
        table = _table(
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
        return Section("cliffs", "Batch cliffs", (Paragraph(said), (chart,), table))

    def _findings(self) -> Section | None:
        """The pre-flight, and what the model's graph gave to say."""
        size = self.size
        if size is None or not (size.preflight or size.findings):
            return None
        blocks: list[Block] = []
        if size.preflight:
            checks: list[tuple[str, ...]] = [(c.name, c.status, _hinted(c.text, c.hint)) for c in size.preflight]
            marked = [index for index, check in enumerate(size.preflight) if check.status != "ok"]
            blocks.append(_words("Pre-flight", ("checked", "", "found"), checks, marked))
        if size.findings:
            findings = [
                (f.code, f.severity, _hinted(f"{f.message} ({f.where})" if f.where else f.message, f.hint))
                for f in size.findings
            ]
            marked = [index for index, finding in enumerate(size.findings) if finding.severity != "info"]
            blocks.append(_words("Findings about the model", ("finding", "", "what it means"), findings, marked))
        return Section("findings", "Checks", tuple(blocks))

    def _next(self) -> Section | None:
        """The nvinfer keys that follow."""
        if self.size is None or not self.size.nvinfer:
            return None
        lines = ["[property]", *(clean(f"{name}={value}") for name, value in self.size.nvinfer.items())]
        said = "Keys of DeepStream's nvinfer for this model" + ("." if self.on_gpu else ", once built with TensorRT.")
        return Section("next", "Next", (Paragraph(said), Commands(tuple(lines))))

    def _steps(self) -> Section | None:
        if self.size is None or not self.size.steps:
            return None
        steps = self.size.steps
        total = sum(step.seconds for step in steps)
        kept = sorted(range(len(steps)), key=lambda index: -steps[index].seconds)[:_STEPS]
        drawn = [steps[index] for index in sorted(kept)]
        longest = max(steps, key=lambda step: step.seconds)
        chart = Bars(
            "steps",
            "Time per step" + (f", the {_STEPS} longest" if len(steps) > _STEPS else ""),
            clean(
                f"{len(steps)} steps, {number(total)} s in all; the longest is {longest.name}, {number(longest.seconds)} s."
            ),
            "s",
            tuple((clean(step.name), step.seconds) for step in drawn),
        )
        seconds = [f"{value:,.{1 if total >= 100 else 2}f}" for value in (*(step.seconds for step in steps), total)]
        table = _table(
            "Seconds by step",
            [("step", [*(clean(step.name) for step in steps), "in all"]), ("s", seconds)],
            words=1,
            marked=[len(steps)],
        )
        return Section("steps", "Time per step", ((chart,), table))

    # ------------------------------------------------------------------------------------------ how it was measured

    def _protocol(self) -> Section | None:
        protocols = list(dict.fromkeys(record.protocol for record in self.records))
        if self.size is not None and self.size.protocol is not None and self.size.protocol not in protocols:
            protocols.insert(0, self.size.protocol)
        if not protocols:
            return None
        blocks: list[Block] = [Facts(_protocol_rows(protocol)) for protocol in protocols]
        return Section("protocol", "Protocol" if len(protocols) == 1 else "Protocols", tuple(blocks))

    def _environment(self) -> Section:
        here = self.environment
        rows = [("processor", f"{here.cpu}, {here.cpu_cores} cores in use"), ("memory", si_bytes(here.memory_mib))]
        if here.cpu_features:
            rows.append(("instruction sets", ", ".join(here.cpu_features)))
        if here.gpu:
            rows.append(("GPU", here.gpu))
        for name, value in (
            ("GPU memory", si_bytes(here.gpu_memory_mib) if here.gpu_memory_mib else None),
            ("compute capability", here.compute_capability),
            ("driver", here.driver),
            ("CUDA", here.cuda),
            ("container", here.container),
        ):
            if value:
                rows.append((name, value))
        rows += [("system", here.platform), ("Python", here.python), ("trt-engine", here.tool)]
        rows += sorted(here.libraries.items())
        blocks: list[Block] = [Facts(_cleaned(rows))]
        if any(record.environment != here for record in self.records):
            blocks.append(Notice("Some measurements were taken in another environment; records.jsonl has each."))
        return Section("environment", "Environment", tuple(blocks))

    def _what_ran(self) -> Section | None:
        """What the backend says it used, and the clocks before and after."""
        names = _names(self.records)
        facts: dict[str, dict[str, list[str]]] = {}
        for record in self.records:
            inputs = {"inputs": record.inputs} if record.inputs else {}
            for key, value in (record.facts | inputs).items():
                facts.setdefault(key, {}).setdefault(value, []).append(names[id(record)])
        rows = []
        for key, values in facts.items():
            for value, where in values.items():
                rows.append((key, value if len(values) == 1 else f"{value} ({', '.join(where)})"))
        blocks: list[Block] = [Facts(_cleaned(rows))] if rows else []
        clocks = [(record, state) for record in self.records for state in record.clocks]
        columns: list[tuple[str, Sequence[str]]] = []
        readings: tuple[tuple[str, Sequence[float | None]], ...] = (
            ("CPU MHz", [state.cpu_mhz for _, state in clocks]),
            ("load", [state.load_average for _, state in clocks]),
            ("SM MHz", [state.sm_mhz for _, state in clocks]),
            ("SM max MHz", [state.sm_max_mhz for _, state in clocks]),
            ("memory MHz", [state.memory_mhz for _, state in clocks]),
            ("°C", [state.temperature_c for _, state in clocks]),
            ("W", [state.power_w for _, state in clocks]),
        )
        for title, readout in readings:
            if any(value is not None for value in readout):
                columns.append((title, [_clock(value) for value in readout]))
        if columns:
            moments = [
                f"{names[id(record)]}, {'before' if index == 0 else 'after'}"
                for record in self.records
                for index, _ in enumerate(record.clocks)
            ]
            blocks.append(
                _table("Clocks and load around each measurement", [("measurement", moments), *columns], words=1)
            )
        return Section("ran", "What ran", tuple(blocks)) if blocks else None

    def _repeat(self) -> Section | None:
        lines = [clean(self.run.command)] if self.run.command else []
        if self.size is None or not lines:
            lines += list(dict.fromkeys(clean(_bench_command(record)) for record in self.records))
        return Section("repeat", "Repeat it", (Commands(tuple(lines)),)) if lines else None

    def _artifacts(self) -> Section | None:
        if self.size is None:
            return None
        named = {"model": self.size.model} | ({"engine": self.size.engine} if self.size.engine else {})
        named |= {name.replace("_", " "): path for name, path in self.size.artifacts.items() if name not in named}
        rows = [(clean(name), *self._path(path)) for name, path in named.items()]
        first: dict[str, tuple[str, str, str | None]] = {}
        for row in rows:
            first.setdefault(row[1], row)  # each place once, by its first name
        rows = [
            row for row in first.values() if row[1] not in (".", "report.md", "report.html")
        ]  # here, and this very report
        known = {shown for _, shown, _ in rows}
        rows += [
            (what, *self._path(str(self.run.folder / name)))
            for what, name in (("size document", SIZE), ("samples", RECORDS))
            if (self.run.folder / name).exists() and self._path(str(self.run.folder / name))[0] not in known
        ]
        return Section("artifacts", "Files", (Links(tuple(rows)),)) if rows else None

    def _path(self, text: str) -> tuple[str, str | None]:
        """A recorded path as seen from the report, and its link where something is there."""
        place, sure = self._place(text)
        if not sure:
            return clean(text), None
        way = os.path.relpath(place, self.base.absolute()).replace(os.sep, "/")
        if way.count("../") > 2:  # a path through somebody's machine tells the reader nothing
            return clean(Path(text).name), None
        return clean(way), quote(way, safe="/.-_~") if _there(place) else None

    def _place(self, text: str) -> tuple[Path, bool]:
        """Where a recorded path leads now, and whether that is known.

        Paths were recorded as seen from where the command ran. That place is not recorded, but the run's folder as seen
        from it is, and the way from the one to the other still holds when the folder has moved.
        """
        path, then = Path(text), self.size.artifacts.get("folder") if self.size is not None else None
        if then is not None and path.is_absolute() == Path(then).is_absolute():
            here = self.run.folder.absolute() / os.path.relpath(path, then)
            if not path.is_absolute() or _there(here):
                return here, True
        if path.is_absolute():
            return path, True
        found = next((place for place in (self.run.folder / path, path) if _there(place)), None)
        return (found or path).absolute(), found is not None


# ---------------------------------------------------------------------------------------------- small parts


def _merged(size: SizeReport) -> list[BatchResult]:
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


def _point(x: float, y: float, mark: str) -> Point:
    return Point(x, y, number(y), "unstable" if mark else "")


def _any_unstable(results: Iterable[BatchResult]) -> bool:
    return any(not result.stable for result in results)


def _told(parts: Iterable[str]) -> str:
    return "; ".join(parts) + "."


def _plural(many: int, what: str) -> str:
    return f"{many} {what}{'' if many == 1 else 's'}"


def _state(record: BenchRecord) -> str:
    return ", ".join(
        word for word, so in (("not stable", not record.stable), ("incomplete", not record.complete)) if so
    )


def _moment(started: str) -> str:
    """`2026-11-20T17:48:51+00:00` as `2026-11-20 17:48 UTC`."""
    day, t, clock = started.partition("T")
    return f"{day} {clock[:5]} UTC" if t and len(clock) >= 5 else started


def _summary_columns(summaries: Sequence[Summary | None]) -> list[tuple[str, Sequence[str]]]:
    return [
        (name, column([getattr(summary, name) if summary else None for summary in summaries]))
        for name in ("mean", "median", "p90", "p95", "p99")
    ]


def _table(
    caption: str, columns: Sequence[tuple[str, Sequence[str]]], *, words: int = 0, marked: Iterable[int] = ()
) -> Table:
    """A table of columns; the first `words` and the one without a heading hold words."""
    left = frozenset([*range(words), *(index for index, (title, _) in enumerate(columns) if not title)])
    rows = tuple(zip(*(values for _, values in columns), strict=True))
    return Table(caption, tuple(title for title, _ in columns), rows, left, frozenset(marked))


def _percentile(record: BenchRecord, percent: float) -> float:
    return percentile(sorted(record.compute_ms), percent, record.protocol.percentile_rule)


def _words(
    caption: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], marked: Iterable[int] = ()
) -> Table:
    """A table of words alone."""
    cells = tuple(tuple(clean(cell) for cell in row) for row in rows)
    return Table(caption, columns, cells, frozenset(range(len(columns))), frozenset(marked))


def _hinted(text: str, hint: str | None) -> str:
    return f"{text}; {hint}" if hint else text


def _sentence(text: str) -> str:
    """The text with a full stop, and a capital where it begins with a plain word."""
    first = text.split(maxsplit=1)[0] if text.split() else ""
    plain = first.isalpha() and first.islower()
    return f"{text[:1].upper() if plain else text[:1]}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the file system, or with a null byte
        return False


def _cleaned(rows: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((clean(name), clean(value)) for name, value in rows)


def _names(records: Sequence[BenchRecord]) -> dict[int, str]:
    """What to call each measurement: its batch, and what else tells it from the others."""
    names: dict[int, str] = {}
    for index, record in enumerate(records):
        twins = [other for other in records if other.batch == record.batch]
        name = f"batch {record.batch}"
        for part in ("protocol", "device", "backend", "engine"):
            value = record.protocol.name if part == "protocol" else getattr(record, part)
            if any((other.protocol.name if part == "protocol" else getattr(other, part)) != value for other in twins):
                name += f", {Path(value).name if part == 'engine' else value}"
        if name in names.values():
            name += f" ({index + 1})"
        names[id(record)] = clean(name if record.complete else f"{name}, incomplete")
    return names


def _clock(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def _protocol_rows(protocol: Protocol) -> tuple[tuple[str, str], ...]:
    rows = [
        ("name", protocol.name),
        ("loop", f"{protocol.loop}: the next query starts when the last has ended"),
        ("clock", protocol.clock),
        ("warm-up", f"{protocol.warmup_s:g} s"),
        ("measured", f"at least {protocol.duration_s:g} s and {protocol.min_iterations:,} queries"),
        ("pause between queries", f"{protocol.idle_s:g} s"),
        ("streams", str(protocol.streams)),
        ("transfers", "inside the measured part" if protocol.transfers else "left out"),
        ("graph replay", "yes" if protocol.graph else "no"),
        ("spin wait", "yes" if protocol.spin else "no"),
        ("percentiles", protocol.percentile_rule),
    ]
    if protocol.not_applicable:
        rows.append(("asked, not on this device", ", ".join(protocol.not_applicable)))
    return _cleaned(rows)


def _bench_command(record: BenchRecord) -> str:
    rules = record.protocol
    parts = ["trt-engine", "bench", record.engine, "--protocol", rules.name]
    parts += ["--shapes", ",".join(f"{name}:{format_shape(shape)}" for name, shape in record.shapes.items())]
    parts += ["--warmup", f"{rules.warmup_s:g}", "--duration", f"{rules.duration_s:g}"]
    return shlex.join(parts if record.device == "cpu" else [*parts, "--device", record.device])


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

"""Results of the verbs that write models: `convert`, `cast`, `quantize`, and of `ranges` and `search`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trt_engine.format import MIB, format_bytes, format_number, format_percent, join_names, node_label
from trt_engine.records import precision
from trt_engine.records.convert import ConvertReport, DynamicAxis
from trt_engine.records.search import SearchGroup, SearchReport
from trt_engine.reporting.document import Block, Fact, Paragraph, Table, make_facts
from trt_engine.reporting.tables import batch_option, finding_lines, first_lines, group_by, make_table, name_groups
from trt_engine.tensors import TensorSpec

if TYPE_CHECKING:
    from trt_engine.precision.calibration import CalibrationResult

_MAX_ROWS = 12
_USUAL_BATCH, _LARGEST_BATCH = 8, 64


def convert_report(report: ConvertReport) -> Iterator[Block]:
    code = "; ".join(report.embedded_code[:_MAX_ROWS]) or "nothing in it was found to be code before it was opened"
    yield make_facts(
        ("source", f"{report.source}, {report.kind}: {report.detected_by}"),
        ("trusted", f"its code may run with your rights: {code}" if report.trust_source else None),
    )
    if report.out is None:  # a dry run
        yield make_facts(("would", report.notes), ("opset", str(report.opset)))
        return
    removed = ", ".join(f"{count} {name}" for name, count in list(report.operators_removed.items())[:4])
    serious = [f"{item.code}: {item.message}" for item in report.findings if item.severity != "info"]
    file = shlex.quote(report.out)
    signature = report.signature
    yield make_facts(
        ("written", report.out),
        ("exporter", f"{report.exporter}, {report.export_s or 0.0:.1f} s"),
        ("opset", f"{report.opset}, IR {report.ir_version}"),
        ("inputs", map(str, signature.inputs) if signature is not None else None),
        ("outputs", map(str, signature.outputs) if signature is not None else None),
        ("dynamic", (f"{axis.symbol}: {_axis_text(axis)}" for axis in report.dynamic)),
        ("nodes", f"{report.nodes_before} as exported, {report.nodes} written{f' ({removed} gone)' * bool(removed)}"),
        ("size", format_bytes(report.nbytes or 0)),
        ("agrees", _agreement(report)),
        ("note", report.notes),
        ("warning", report.warnings),
        ("lint", first_lines(serious, _MAX_ROWS, f" (`trt-engine lint {file}`)")),
        ("next", f"trt-engine build {file}{_profile_option(report) or batch_option(report.out)}"),
    )


def _agreement(report: ConvertReport) -> Iterator[str]:
    if report.max_rel is None:
        return
    yield f"within {report.max_rel:.2g} of a channel's largest value at {len(report.verification)} sets of shapes"
    for item in report.verification:
        sizes = ", ".join(f"{name} {steps}" for name, steps in item.sizes.items()) or "as given"
        yield f"{sizes}: {max((error.max_rel for error in item.outputs.values()), default=0.0):.2g}"


def _profile_option(report: ConvertReport) -> str:
    """The profile option for the next command; without it, engines take only batch 1."""
    batch = next((axis for axis in report.dynamic if all(places == (0,) for places in axis.inputs.values())), None)
    if not report.dynamic or report.signature is None or not all(axis.tested_sizes for axis in report.dynamic):
        return ""
    ends = {}
    for axis in report.dynamic:
        low, most = min(axis.tested_sizes), max(axis.tested_sizes)
        high = axis.high or most
        if axis is batch:
            low, most, high = axis.low, _USUAL_BATCH, axis.high or _LARGEST_BATCH
        ends[axis.symbol] = (low, min(max(low, most), high), high)
    if batch is not None and len(ends) == 1:
        return f" --batch {':'.join(map(str, ends[batch.symbol]))}"

    def shape(spec: TensorSpec, at: int) -> str:
        named = zip(spec.shape, spec.symbols, strict=True)
        return "x".join(str(ends[name][at] if name in ends else size) for size, name in named)

    inputs = [
        f"{spec.name}:{','.join(shape(spec, at) for at in range(3))}"
        for spec in report.signature.inputs
        if spec.dynamic
    ]
    return f" --profile {shlex.quote(' '.join(inputs))}"


def _axis_text(axis: DynamicAxis) -> str:
    """`tried 1, 2, 4; dynamic`, or with its range: `1 to 64; tried 1, 2, 4`."""
    tried = f"tried {', '.join(map(str, axis.tested_sizes))}" if axis.tested_sizes else ""
    step = f", step {axis.step}" if axis.step > 1 else ""
    if axis.high is not None:
        return "; ".join(filter(None, (f"{axis.low} to {axis.high}{step}", tried)))
    least = f" from {axis.low}, which the exported program states" if axis.low > 1 else ""
    return "; ".join(filter(None, (tried, f"dynamic{least}{step}")))


# ------------------------------------------------------------------------------------------------ cast, quantize


def cast_report(report: precision.CastReport) -> Iterator[Block]:
    kept = [f"{node_label(item.node, item.module)} ({item.op}): {item.reason}" for item in report.fp32_nodes]
    size = format_bytes(report.nbytes_before)
    if report.nbytes_after is not None:
        size += f" before, {format_bytes(report.nbytes_after)} after"
    following = None
    if report.out is not None and not report.dry_run:
        following = report.next_command or f"trt-engine build {shlex.quote(report.out)}{batch_option(report.out)}"
    refused = [finding.full_message for finding in report.findings]
    yield make_facts(
        ("model" if report.out is None else "written", report.out or report.model),
        ("size", size),
        ("cast", f"{report.nodes_cast} of {report.nodes} nodes to {report.to}, {report.casts_added} Casts added"),
        ("precision", report.precision.shares_text if report.precision is not None else None),
        ("kept", first_lines(kept, _MAX_ROWS, " (`--json` lists them)")),
        ("clamped", ", ".join(report.constants_clamped) or None),
        ("note", report.notes),
        ("rules", refused or "nothing a strongly typed TensorRT build would refuse"),
        *(_cast_parity(report.parity) if report.parity is not None else ()),
        ("would", "write the model; nothing was written" if report.dry_run else None),
        ("next", following),
    )


def _cast_parity(found: precision.CastParity) -> Iterator[Fact]:
    ran = ", ".join(f"{name} {count}" for name, count in found.kernels.items())
    errors = [f"{name}: {error.summary}, cosine {error.cosine:.6f}" for name, error in found.outputs.items()]
    yield "parity", [*errors, *([found.note] if found.note else [])]
    yield "kernels", f"{ran} layers{' (emulated)' if found.emulated else ''}" if ran else None


_TENSORRT_ONLY = ("nvfp4", "mxfp8")
"""Formats without ONNX Runtime kernels; only their emulation runs."""


def quantize_report(report: precision.QuantizeReport) -> Iterator[Block]:
    before, now = report.nbytes_before, report.nbytes
    left = group_by(report.unquantized if report.integer_kernels is None else (), lambda item: item.reason)
    shares = report.precision.compute_shares.items()
    errors = [f"{name}: {e.summary}, {e.rms_text}, cosine {e.cosine:.6f}" for name, e in (report.parity or {}).items()]
    if errors:
        how = "ONNX Runtime from the file itself" if report.measured_on == "kernels" else "the emulation in FP32"
        errors = [*errors[:_MAX_ROWS], f"on {report.parity_inputs}, by {how}"]
    yield make_facts(
        ("model", report.out or ("(nothing is written)" if report.dry_run else "(the emulation alone)")),
        ("emulation", report.artifacts.get("emulation")),
        ("target", _target(report)),
        ("format", _format(report)),
        ("quantised", f"{len(report.quantized)} layers"),
        ("left", (f"{len(found)}: {reason} ({_node_names(found)})" for reason, found in left.items())),
        ("size", f"{format_bytes(before)} before, {format_bytes(now)} now ({format_percent(now / before)})"
         if now is not None else None),
        ("written in", ", ".join(f"{name} {format_percent(share.main)}" for name, share in shares) or None),
        ("calibrated", _calibration(report.calibration) if report.calibration else None),
        ("compared", errors),
        *(_kernels(report.integer_kernels) if report.integer_kernels is not None else ()),
        ("took", f"{report.seconds:.1f} s"),
        ("speed", report.speed.summary if report.speed is not None else None),
        ("next", report.next_command or (_next_step(report, report.out) if report.out else None)),
    )  # fmt: skip


def _node_names(nodes: Sequence[precision.UnquantizedNode]) -> str:
    return join_names([node_label(item.node, item.module) for item in nodes], 3)


def _next_step(report: precision.QuantizeReport, written: str) -> list[str]:
    """The next command: the graph, its emulation, or the missing emulation of a block format."""
    emulation = report.artifacts.get("emulation")
    if report.to in _TENSORRT_ONLY and emulation is None:
        return [
            f"trt-engine build {shlex.quote(written)} --backend tensorrt{batch_option(written)}",
            f"(only TensorRT runs {report.to}; `--emulate FILE` adds a graph that `evaluate` takes anywhere)",
        ]
    return [f"trt-engine evaluate {shlex.quote(emulation or written)} --dataset DATASET"]


def _target(report: precision.QuantizeReport) -> str:
    from trt_engine.graph.quant_target import quant_target

    title = quant_target(report.target).title
    if report.to != "int8":
        return f"{report.target} ({title})"
    other = "" if report.target == "onnxruntime-cpu" else "; `--target onnxruntime-cpu` for a CPU"
    return f"{report.target} (Q/DQ placed for {title}{other})"


def _kernels(found: precision.IntegerKernels) -> Iterator[Fact]:
    """Number of layers in integer kernels, and why others are not."""
    counts = ", ".join(f"{done} of {count} {op}" for op, (done, count) in found.layers.items())
    yield "integer kernels", counts or "none: no layer has weights"
    reasons = name_groups(((item.reason, item.node) for item in found.not_fused), 1)
    yield "not fused", (f"{names}: {reason}" for reason, names in reasons.items())


def _format(report: precision.QuantizeReport) -> str:
    parts = (
        report.to,
        {"awq": "AWQ", "dynamic": "activations while running"}.get(report.method),
        "weights alone" if report.weights_only else None,
        f"the rest in {report.high_precision}" if report.high_precision != "fp32" else None,
    )
    raised = f" (was {report.opset_before})" if report.opset != report.opset_before else ""
    return f"{', '.join(filter(None, parts))}; opset {report.opset}{raised}"


def _calibration(made: Mapping[str, Any]) -> str:
    parts = (
        str(made["calibrator"]) if "calibrator" in made else None,
        f"{made.get('samples')} samples of {made['data']}" if made.get("data") else None,
        f"pre-processing {made['preprocess']['source']}" if made.get("preprocess") else None,
        "RANDOM: real ranges may differ widely" if made.get("random") else None,
        "from the cache" if made.get("cached") else None,
    )
    return ", ".join(filter(None, parts))


# ------------------------------------------------------------------------------------------------ ranges, search


def ranges_report(report: precision.RangesReport) -> Iterator[Block]:
    """Findings, nodes to exclude, largest tensors."""
    stated = [item for item in report.findings if item.severity != "info"]
    quiet = len(report.findings) - len(stated)
    notes = f", and {quiet} notes (`--json` has them)" if quiet else ""
    excluded = [
        f"{node_label(item.node, item.module)} ({item.operator}): {item.code} of `{item.tensor}`"
        for item in report.exclude
    ]
    guess = " (RANDOM: real ranges may differ widely)" if report.random else ""
    counted = f"{len(report.tensors)} tensors, {len(report.constants)} constants, {report.wall_s:.1f} s"
    many = f"{len(excluded)} nodes, when the rest goes to FP16"
    none = "nothing: FP16 holds every tensor that was seen"
    if any("not checked" in warning for warning in report.warnings):
        none = "not known: FP16 holds the tensors that were seen, and others were not"
    yield make_facts(
        ("model", report.model),
        ("data", f"{report.calib_data}: {report.rows} rows in {report.batches} batches{guess}"),
        ("looked at", counted),
        ("findings", [f"{len(stated)}{notes}", *finding_lines(stated)]),
        ("keep FP32", [many, *excluded] if excluded else none),
    )
    largest = sorted(report.tensors, key=lambda item: -item.absmax)[:_MAX_ROWS]
    rows = tuple(
        (node_label(item.name, item.module), f"{item.absmax:.4g}", _share_of_fp16(item.absmax),
         f"{item.fp16_underflow:.2%}", f"{item.fp8_underflow:.2%}")
        for item in largest
    )  # fmt: skip
    columns = ("largest tensors", "largest", "of FP16", "FP16 zero", "FP8 zero")
    yield from [Table("", columns, rows, frozenset((0,)))] if rows else []


def _share_of_fp16(absmax: float) -> str:
    share = absmax / 65504
    return f"{share:.2%}" if share < 10 else f"{share:.2g} x"


def calibration_result(result: CalibrationResult) -> Iterator[Block]:
    """The settings and data, and the widest ranges."""
    yield make_facts(
        ("calibrator", " ".join([result.calibrator, *(f"{name}={value}" for name, value in result.settings.items())])),
        ("data", f"{result.data_source}: {result.rows} rows in {result.batches} batches"),
        ("from cache", "yes" if result.from_cache else None),
        ("skipped", f"{len(result.skipped)} files" if result.skipped else None),
        ("warning", result.warnings),
    )
    widest = sorted(result.amax.items(), key=lambda item: -item[1])[:_MAX_ROWS]
    columns = [("tensor", [name for name, _ in widest]), ("amax", [f"{amax:.4g}" for _, amax in widest])]
    yield make_table(f"{len(result.amax)} tensors, the widest ranges", columns, words=1)


def search_report(report: SearchReport) -> Iterator[Block]:
    """The result, the costliest layers, the table, and the next command."""
    total = len(report.quantized) + len(report.excluded)
    values = f"{report.baseline:.4f} before, {report.metric_value:.4f} with {report.to}"
    found = f"{report.trials - report.new_trials} of them found in the log"
    yield make_facts(
        ("model", report.model),
        (
            report.metric,
            f"{values}: a drop of {report.drop:.4f}, the budget is {report.budget:g} ({report.images} images)",
        ),
        (report.to, f"{len(report.quantized)} of {total} layers, {report.macs:.1%} of the multiply-adds"),
        ("size", f"{format_bytes(report.nbytes_before)} before, {format_bytes(report.nbytes)} now"),
        ("measured", f"{report.trials} mixtures, {found}; {report.seconds:.0f} s"),
    )
    costs = [group for group in report.groups if group.drop is not None]
    rows = tuple(
        (f"{group.drop:+.4f}", f"{group.macs:.1%}", report.to if group.quantized else "float", _layers_text(group))
        for group in costs[:_MAX_ROWS]
    )
    if rows:
        caption = f"what a layer costs alone, on {report.subset} images"
        yield Table(caption, ("drop", "macs", "now", "layers"), rows, frozenset((2, 3)))
    if len(costs) > _MAX_ROWS:
        yield Paragraph(f"  and {len(costs) - _MAX_ROWS} that cost no more than {costs[_MAX_ROWS].drop:+.4f}")
    yield _search_table(report)
    yield make_facts(
        ("warning", report.warnings), ("written", report.artifacts.values()), ("next", report.next_command)
    )


def _layers_text(group: SearchGroup) -> str:
    """The first layer, and how many more."""
    first = node_label(group.nodes[0], group.modules[0] if group.modules else None)
    return f"{first} and {len(group.nodes) - 1} more" if len(group.nodes) > 1 else first


def _search_table(report: SearchReport) -> Table:
    """The Pareto-optimal mixtures, the original model, everything quantised, and the result."""
    slower = [how for how in ("slower", "no faster") if any(f"{how} than the orig" in text for text in report.warnings)]
    best = f"<- most layers, but {slower[0]} here" if slower else "<- the answer"
    found = (report.images, len(report.quantized), report.macs)
    marks = {
        id(point): best if (point.images, point.layers, point.macs) == found else "" if point.pareto else "beaten"
        for point in report.points
    }
    rows = tuple(
        (str(p.images), str(p.layers), f"{p.macs:.1%}", f"{p.metric:.4f}", f"{p.drop:+.4f}",
         format_number(p.nbytes / MIB),
         f"{format_number(p.latency_ms.median)} for {p.batch}" if p.latency_ms is not None else "-", marks[id(p)])
        for p in report.points
        if marks[id(p)] != "beaten" or p.stage in ("baseline", "all")
    )  # fmt: skip
    columns = ("images", "layers", "macs", report.metric, "drop", "MiB", "ms", "")
    return Table("accuracy, size and speed", columns, rows, frozenset((6, 7)))

"""Results of `inspect`, `lint` and `doctor`, and what Python users hold between two verbs: engines on disk, loaded engines,
bound calls, outputs, statistics."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trt_engine.engine import Engine
from trt_engine.format import format_bytes, format_count, format_ms, format_number, format_percent, join_names
from trt_engine.records.diagnosis import BackendState, DoctorReport
from trt_engine.records.inspect import EngineReport, ModelReport, PlanInfo, QuantPlacement, RunReport, Unfused
from trt_engine.records.lint import LintReport
from trt_engine.records.migrate import MigrateReport
from trt_engine.records.passport import Passport
from trt_engine.reporting.document import Block, Commands, Fact, Facts, Paragraph, Table, make_facts
from trt_engine.reporting.profile import peaks_table
from trt_engine.reporting.tables import (
    finding_lines,
    first_lines,
    layer_shares,
    plural,
    requested_text,
    shapes_text,
    shorten_label,
    signature_facts,
    sized,
    smoke_time,
)
from trt_engine.runtime.bound_call import BoundCall
from trt_engine.runtime.inference_engine import InferenceEngine, InferenceResult, Stats
from trt_engine.runtime.stats import LatencySummary
from trt_engine.tensors import Signature, dtype_name, format_shape


def engine(engine: Engine) -> Iterator[Block]:
    nbytes = sum(item.nbytes for item in engine.passport.payload)
    yield make_facts(("engine", sized(engine.path, nbytes)), *passport_facts(engine.passport))


def passport(passport: Passport) -> Iterator[Block]:
    yield make_facts(*passport_facts(passport))


def signature(signature: Signature) -> Iterator[Block]:
    yield make_facts(*signature_facts(signature))


def inference_engine(runner: InferenceEngine) -> Iterator[Block]:
    shares = runner.engine.passport.precision.shares_text
    info = runner.runtime_info | {"engine": str(runner.engine.path)} | ({"precision": shares} if shares else {})
    counts = runner.stats()
    yield make_facts(
        *info.items(),
        *signature_facts(runner.signature, runner.profiles),
        ("requests", _counts(counts)),
        ("state", "closed" if runner.closed else "loaded"),
    )


def bound_call(call: BoundCall) -> Iterator[Block]:
    owner = call.engine
    yield make_facts(
        ("engine", str(owner.path) if owner is not None else None),
        ("device", call.device),
        ("precision", (owner.passport.precision.shares_text or None) if owner is not None else None),
        ("CUDA graph", "replayed" if call.is_captured else "none"),
        ("state", "closed" if call.closed else "bound"),
    )
    rows = tuple(
        (name, "input" if name in call.inputs else "output", *_array_cells(array), call.placement(name))
        for name, array in (call.inputs | call.outputs).items()
    )
    if rows:
        yield Table("", ("tensor", "kind", "dtype", "shape", "memory"), rows, frozenset((0, 1, 2, 3, 4)))


def inference_result(result: InferenceResult) -> Iterator[Block]:
    state = "success" if result.success else "failed"
    yield make_facts(("result", state), ("latency", format_ms(result.latency_ms)), ("message", result.message or None))
    rows = tuple((name, *_array_cells(array)) for name, array in result.outputs.items())
    if rows:
        yield Table("", ("output", "dtype", "shape"), rows, frozenset((0, 1, 2)))


def stats(stats: Stats) -> Iterator[Block]:
    pool, batching = stats.pool, stats.batching
    mean = f"mean {format_ms(stats.seconds / stats.requests * 1e3)}" if stats.requests else None
    rows: list[Fact] = [("requests", _counts(stats)), ("latency", mean)]
    if pool is not None:
        rows += [
            ("contexts", f"{pool.contexts}, {pool.busy} busy"),
            ("wait", f"{pool.waiting} waiting, {pool.rejected} rejected, {pool.timeouts} timeouts"),
            ("wait time", _latency(pool.wait)),
            ("graphs", f"{pool.graphs.captured} captured, {pool.graphs.replayed} replayed"),
        ]
    if batching is not None:
        rows += [
            ("batches", f"{batching.batches} of {batching.mean_batch:.1f} rows on average, {batching.rows} rows"),
            ("queue", f"{batching.waiting} waiting, {batching.expired} expired, {batching.rejected} rejected"),
            ("queue time", _latency(batching.queue)),
            ("batch time", _latency(batching.run)),
        ]
    yield make_facts(*rows)
    if stats.replicas:
        columns = ("device", "requests", "failed", "in flight", "utilization", "state")
        replicas = (
            (
                one.device, str(one.requests), str(one.failures), str(one.in_flight),
                "" if one.utilization is None else format_percent(one.utilization),
                "serving" if one.serving else one.message or "suspended",
            )
            for one in stats.replicas
        )  # fmt: skip
        yield Table("", columns, tuple(replicas), frozenset((0, 5)))


def _counts(stats: Stats) -> str:
    return f"{stats.requests} finished, {stats.failures} failed, {stats.in_flight} in flight"


def _latency(summary: LatencySummary) -> str | None:
    if not summary.count:
        return None
    parts: Mapping[str, float] = {
        "mean": summary.mean_ms, "p50": summary.p50_ms, "p99": summary.p99_ms, "max": summary.max_ms,
    }  # fmt: skip
    return ", ".join(f"{name} {format_ms(value)}" for name, value in parts.items())


def _array_cells(array: Any) -> tuple[str, str]:
    """Dtype and shape of an array of any library."""
    return dtype_name(array), format_shape(tuple(array.shape))


_OPERATORS = 12
_TOP = 20
_SHOWN_CLASSES = 10


def model_report(report: ModelReport) -> Iterator[Block]:
    """What is in a model; scripts read its first lines (`input_name:`, `height:`, `width:`)."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in report.opsets.items())
    quantized = f"yes ({report.q_nodes} quantize, {report.dq_nodes} dequantize nodes)" if report.quantized else "no"
    yield _plain(
        ("model", report.path),
        *_image_facts(report),
        *(("input", str(spec)) for spec in report.signature.inputs),
        *(("output", str(spec)) for spec in report.signature.outputs),
        ("opset", opsets),
        ("ir_version", str(report.ir_version)),
        ("producer", report.producer or "not stated"),
        ("size", format_bytes(report.nbytes)),
        ("digest", report.digest),
        ("parameters", sized(f"{report.parameters:,}", report.parameter_bytes)),
        *_cost_facts(report),
        ("precision", report.precision.main_dtype or "no arithmetic"),
    )
    shares = report.precision.shares.items()
    if len(shares) > 1:
        yield _table(
            ("type", "layers", "parameters", "macs"),
            (
                (name, f"{one.layers:.1%}", f"{one.parameters:.1%}", "" if one.macs is None else f"{one.macs:.1%}")
                for name, one in shares
            ),
        )
    yield _plain(
        ("quantized", quantized),
        *_placement_facts(report.placement),
        ("external_data", ", ".join(report.external) or "none"),
        ("nodes", str(report.nodes)),
    )
    operators = [(name, str(count)) for name, count in report.operators.items()]
    if operators:
        yield _table(("operator", "nodes"), operators[:_OPERATORS])
    if len(operators) > _OPERATORS:
        yield Paragraph(f"  and {len(operators) - _OPERATORS} more: `operators` has all")
    fused = ", ".join(f"{name} {count}" for name, count in sorted(report.fusions.items()))
    if fused or report.unfused:
        yield _plain(("fusions", fused or "none"))
    yield from _unfused_table(report.unfused)
    domains = ", ".join(f"{domain} ({count})" for domain, count in report.domains.items())
    findings = list(finding_lines(report.findings))
    yield _plain(
        ("domains", domains if set(report.domains) - {"ai.onnx"} else None),
        *(("metadata", f"{name} = {shorten_label(value, 80)}") for name, value in list(report.metadata.items())[:_TOP]),
        ("findings", [plural(len(report.findings), "finding"), *findings] if findings else "none"),
    )


def _unfused_table(unfused: Iterable[Unfused]) -> Iterator[Table]:
    """Near misses: the first node of each kind and reason, and how many others have it."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for item in unfused:
        nodes.setdefault((item.fusion, item.reason), []).append(item.node)
    rows = [
        (fusion, names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", reason)
        for (fusion, reason), names in nodes.items()
    ]
    if rows:
        yield Table("", ("not_fused", "node", "reason"), tuple(rows[:_TOP]), frozenset((0, 1, 2)))


def _plain(*facts: Fact) -> Facts:
    return make_facts(*facts, aligned=False)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    """Text left, numbers right."""
    return Table("", columns, tuple(rows), frozenset((0,)))


def _image_facts(report: ModelReport) -> Iterator[Fact]:
    from trt_engine.graph.lint_rules.model_view import image_input

    inputs = report.signature.inputs
    image = image_input(inputs)
    if image is not None:
        sides = (str(side) if side >= 0 else "dynamic" for side in image.image_size)
        yield from zip(("input_name", "height", "width"), (image.name, *sides), strict=True)
    elif inputs:
        yield "input_name", inputs[0].name


def _cost_facts(report: ModelReport) -> Iterator[Fact]:
    if report.macs is None or report.flops is None:
        names = ", ".join(f"{name}:SHAPE" for name in report.dynamic)
        yield "macs", f"not counted, sizes are open (`--shapes {names}` gives them)"
        return
    at_least = "" if report.flops_exact else "at least "
    yield "macs", f"{at_least}{format_count(report.macs)} (at {shapes_text(report.flops_shapes)})"
    yield "flops", f"{at_least}{format_count(report.flops)} (2 x macs, and what is computed by element)"
    names = ", ".join(f"{op} ({count})" for op, count in list(report.uncounted.items())[:_OPERATORS])
    yield "not_counted", names or None


def _placement_facts(placement: QuantPlacement | None) -> Iterator[Fact]:
    """The targets that run the quantised layers, and why other usual targets do not."""
    if placement is None:
        return
    names = ", ".join(placement.targets) or "no target as a whole"
    stated = f"; the file states {placement.declared_target}" if placement.declared_target is not None else ""
    lines = [f"{names} ({placement.style}{stated})"]
    for fit in placement.support:
        if fit.target in ("tensorrt", "onnxruntime-cpu") and fit.target not in placement.targets:
            reasons = ", ".join(f"{reason} ({number})" for reason, number in fit.reasons.items())
            lines.append(f"{fit.target} takes {fit.supported_layers} of {fit.layers} {fit.layer_kind}: {reasons}")
    yield "Q/DQ placed for", lines


# ------------------------------------------------------------------------------------------------ engines, runs


def engine_report(report: EngineReport) -> Iterator[Block]:
    found, product = report.compatibility, report.plan.product if report.plan is not None else "TensorRT"
    yield _plain(
        ("engine", report.path),
        ("kind", f"{product} plan without a passport" if report.kind == "plan" else "engine with a passport"),
        ("verdict", found.status),
        ("reason", found.reason),
        ("command", found.command or None),
        *(_plan_facts(report.plan) if report.plan is not None else ()),
        ("size", format_bytes(report.nbytes)),
        *(passport_facts(report.passport) if report.passport is not None else ()),
        *(_smoke_facts(report.smoke_run) if report.smoke_run is not None else ()),
    )


def _plan_facts(plan: PlanInfo) -> Iterator[Fact]:
    """Fields of the plan header."""
    yield plan.product.lower().replace("-", "_"), plan.version
    yield "gpus", ", ".join([*plan.compute_capabilities, *(["later ones"] * plan.has_ptx)]) or None
    yield "weights", format_bytes(plan.weight_nbytes) if plan.weight_nbytes is not None else None
    if plan.container is not None:
        yield "container", f"{plan.container}: {plan.offset} bytes of metadata, then the plan"
        yield from _metadata_facts(plan.metadata)
        yield "strip", plan.strip_command


def _metadata_facts(metadata: Mapping[str, Any]) -> Iterator[Fact]:
    """What Ultralytics states about a network, of its own types alone: the file may come from anywhere."""
    for key, fact in (("task", "task"), ("version", "ultralytics")):
        yield fact, metadata[key] if isinstance(metadata.get(key), str) else None
    size = metadata.get("imgsz")
    sizes = size if isinstance(size, list) else [size, size]
    yield "image_size", "x".join(map(str, sizes)) if all(type(item) is int for item in sizes) else None
    yield "batch", str(metadata["batch"]) if type(metadata.get("batch")) is int else None
    names = metadata.get("names")
    listed = [*map(str, names.values() if isinstance(names, dict) else names if isinstance(names, list) else ())]
    more = f" and {len(listed) - _SHOWN_CLASSES} more" if len(listed) > _SHOWN_CLASSES else ""
    yield "classes", f"{len(listed)}: {', '.join(listed[:_SHOWN_CLASSES])}{more}" if listed else None


def passport_facts(passport: Passport) -> list[Fact]:
    """What an engine is, how it was built and checked, and what it needs."""
    build, needs, parity, validation = passport.build, passport.requirements, passport.parity, passport.validation
    graph = f" (the graph is {build.graph_dtype})" if build.graph_dtype else ""
    parts = {
        "providers": ", ".join(needs.providers),
        "CPU features": " ".join(needs.cpu_features),
        "compute capability": needs.compute_capability,
        "a GPU of": ", ".join(needs.compute_capabilities),
        "plugins": ", ".join(needs.plugins),
    }
    required = "".join(f", {name} {value}" for name, value in parts.items() if value)
    shares = layer_shares(passport.precision, " of layers") or "not known"
    rows: list[Fact] = [
        ("backend", passport.backend),
        ("device", passport.device),
        *signature_facts(passport.signature, passport.profiles),
        ("precision", f"{shares}{requested_text(passport.precision)}{graph}"),
        ("quantised_for", build.quant_target or None),
        ("fusions", build.fusions),
        ("not_fused", build.not_fused or None),
        ("speed", passport.speed.summary if passport.speed is not None else None),
        ("tuning", build.tuning.summary if build.tuning is not None else None),
        ("model", f"{passport.model.name} ({passport.model.digest})"),
        ("built_by", f"{build.identity} in {build.seconds:.1f} s"),
        ("build_command", build.command),
        ("needs", f"{needs.library} {needs.version}{required}"),
    ]
    if parity is not None:
        worst = max((error.max_rel for error in parity.outputs.values()), default=0.0)
        state = f"{'passed' if parity.passed else 'failed'} against {parity.reference}"
        rows.append(("parity", f"{state} (largest difference {worst:.2g} of a channel's scale)"))
        if parity.source_errors:
            worst = max(error.max_rel for error in parity.source_errors.values())
            rows.append(("parity_source", f"largest difference {worst:.2g} from the source model, not judged"))
    if validation is not None:
        rows.append(("validation", validation.summary))
        accuracy = validation.accuracy_command
        rows.append(("accuracy", None if accuracy is None else f"not measured: {accuracy}"))
    return [*rows, *(("warning", text) for text in build.warnings)]


def _smoke_facts(smoke: Mapping[str, Any]) -> Iterator[Fact]:
    lines = [smoke_time(smoke)]
    for side in ("inputs", "outputs"):
        for name, value in smoke[side].items():
            text = f"{side[:-1]} {name}: {value['dtype']} {shapes_text({'': value['shape']}, '')}"
            if "min" in value:
                text += f", {value['min']:.4g} to {value['max']:.4g}, mean {value['mean']:.4g}"
            if value.get("not_finite"):
                text += f", {value['not_finite']} values are not finite"
            lines.append(text)
    yield "run", [*lines, *(f"{name}: {value}" for name, value in smoke["facts"].items())]


def run_report(report: RunReport) -> Iterator[Block]:
    damaged = f" and {report.damaged} damaged" if report.damaged else ""
    yield _plain(
        ("run", report.path),
        ("verb", report.verb or "not stated"),
        ("complete", "yes" if report.complete else "no"),
        *((name, str(value)) for name, value in report.summary.items()),
        ("records", f"{len(report.measurements)}{damaged}"),
    )
    if report.measurements:
        columns = ("batch", "device", "qps", "images/s", "mean ms", "samples", "stable")
        yield _table(columns, (tuple(map(_cell, _measured(item))) for item in report.measurements))
    shown = sorted(report.files.items(), key=lambda item: -item[1])[:_TOP]
    files = [sized(len(report.files), report.nbytes), *(sized(name, nbytes) for name, nbytes in shown)]
    yield _plain(("files", files), ("hint", f"`trt-engine report {shlex.quote(report.path)}` writes it out"))


def _measured(item: Mapping[str, Any]) -> Iterator[Any]:
    yield from (item[name] for name in ("batch", "device", "qps", "images_per_s", "mean_ms", "samples"))
    yield "yes" if item["stable"] else "no"


def _cell(value: Any) -> str:
    return "" if value is None else format_number(value) if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------ lint


def lint_report(report: LintReport) -> Iterator[Block]:
    opset = f"opset {report.opset}" if report.opset is not None else "no standard opset"
    ours = " (open sizes are ours; `--shapes` gives yours)" if report.shapes_assumed else ""
    counts = (f"{n} {what if n == 1 or what == 'info' else f'{what}s'}" for what, n in report.counts.items() if n)
    reduced = report.reduced
    yield _plain(
        ("model", f"{report.path} ({report.nodes} nodes, {opset}, IR {report.ir_version})"),
        ("looked at", f"{shapes_text(report.shapes)}{ours}" if report.shapes else None),
        *_support_facts(report),
        ("support from", None if report.target.startswith("onnxruntime") else report.checked_by),
        (f"supported subgraphs, of {report.nodes} nodes", _subgraphs(report)),
        ("findings", [", ".join(counts) or "none", *finding_lines(report.findings)]),
    )
    if reduced is not None:
        operators = ", ".join(reduced.operators[:6]) + (" and more" if len(reduced.operators) > 6 else "")
        rest = "" if reduced.complete else ": the search ended there, a smaller part may exist"
        part = f"{reduced.path}, {reduced.nodes} of {reduced.original_nodes} nodes ({operators})"
        refused = f"refused by {reduced.rejected_by}: {reduced.reason}"
        yield _plain(("reduced", [f"{part}, {plural(reduced.candidates, 'candidate')}{rest}", refused]))


def _subgraphs(report: LintReport) -> str | None:
    """The longest supported subgraphs, where the parser does not support all nodes."""
    if not any(item.severity == "error" for item in report.findings) or not report.subgraphs:
        return None
    shown = [f"{s.nodes} (`{s.first}`{f' to `{s.last}`' if s.nodes > 1 else ''})" for s in report.subgraphs]
    return join_names(shown, 3)


def _support_facts(report: LintReport) -> Iterator[Fact]:
    """One row per runtime: all operators supported, or which are not."""
    runners = []
    if not report.target.startswith("onnxruntime"):
        name = "TensorRT-RTX" if report.target == "tensorrt-rtx" else f"TensorRT {report.tensorrt}"
        runners.append((name, "tensorrt"))
    if not report.target.startswith("tensorrt"):
        release = f" {report.onnxruntime}" if report.onnxruntime else ""
        runners += [(f"ONNX Runtime{release} CPU", "cpu"), ("ONNX Runtime CUDA", "cuda")]
    words = {"no": "not", "limited": "not every node of", "plugin": "with a plugin library", "unknown": "not known"}
    for name, runner in runners:
        parts = []
        for state, word in words.items():
            ops = [f"{row.op} ({row.nodes})" for row in report.operators if getattr(row, runner) == state]
            parts += [f"{word}: {join_names(ops, 8)}"] if ops else []
        yield name, "; ".join(parts) or f"every operator ({plural(len(report.operators), 'kind')})"


# ------------------------------------------------------------------------------------------------ migrate


_KINDS = {"removed": "removed in", "renamed": "renamed in", "meaning": "another meaning since"}


def migrate_report(report: MigrateReport) -> Iterator[Block]:
    """The diff, where one was requested; findings by file, the reason and replacement of a rule once a file; counts."""
    if report.diff:
        yield from map(Paragraph, report.diff.splitlines())
        yield Paragraph("")
    for file, found in itertools.groupby(report.findings, key=lambda item: item.file):
        explained: set[tuple[str, str]] = set()
        lines = []
        for item in found:
            lines.append(f"  {item.line}: {item.severity}: {item.rule}: `{item.text}`")
            if (item.why, item.replacement) not in explained:
                explained.add((item.why, item.replacement))
                lines += [f"    {_KINDS[item.kind]} {item.since}: {item.why}", f"    instead: {item.replacement}"]
        yield Commands((file, *lines))
    counts = [plural(report.counts[name], name) for name in ("error", "warning") if report.counts[name]]
    fixable = sum(item.fixable for item in report.findings)
    skipped = [f"{item.file}: {item.reason}" for item in report.files_skipped]
    yield _plain(
        ("from", f"TensorRT {report.from_release} to {report.to_release}"),
        (
            "findings",
            (", ".join(counts) or "none")
            + (f", {report.counts['ignored']} ignored" if report.counts["ignored"] else ""),
        ),
        ("fixable", f"{fixable} of them with `--fix`" if fixable else None),
        ("fixed", [plural(len(report.files_fixed), "file"), *report.files_fixed] if report.files_fixed else None),
        ("checked", plural(report.files_checked, "file")),
        ("not checked", [plural(len(skipped), "file"), *first_lines(skipped, _TOP)] if skipped else None),
    )


# ------------------------------------------------------------------------------------------------ doctor

_MARKS = {"ok": "ok", "note": "note", "absent": "note", "warning": "WARNING", "problem": "PROBLEM"}


def doctor_report(report: DoctorReport) -> Iterator[Block]:
    """One row per check, followed by its fix; the backends; the device peaks, with missing or doubtful ones.

    On a machine without a GPU the components for one that are absent are one row.
    """
    no_gpu = any(item.name == "gpu" and item.status == "note" for item in report.diagnoses)
    absent = [item.name for item in report.diagnoses if item.status == "absent" and no_gpu]
    shown = [item for item in report.diagnoses if item.name not in absent]
    checks = [((_MARKS[item.status], item.name, item.message), item.fix) for item in shown]
    if absent:
        checks.append((("note", "for a GPU", f"absent: {', '.join(absent)} (`--json`: their fixes)"), None))
    yield _rows("checks", checks)
    above = {item.name for item in report.diagnoses if item.fix}
    backends = [one for one in report.backends if one.runs or one.builds or one.name not in absent]
    states = [((one.name, _backend_state(one)), None if one.name in above else one.fix) for one in backends]
    yield from (Paragraph(""), _rows("backends here", states))
    for one in report.peaks:
        yield from (Paragraph(""), peaks_table(one))
        yield Commands((*(f"skipped: {text}" for text in one.skipped), *(f"note: {text}" for text in one.notes)))
    counts = [(report.problems, "problem"), (report.warnings_found, "warning")]
    found = ", ".join(plural(count, word) for count, word in counts if count)
    yield from (Paragraph(""), Paragraph(found or "no problems found"))


def _rows(caption: str, rows: Iterable[tuple[tuple[str, ...], str | None]]) -> Table:
    """A table without headings; the fix of a row stands below it."""
    lines: list[tuple[str, ...]] = []
    for row, fix in rows:
        lines += [row, *([(*("" for _ in row[1:]), f"fix: {fix}")] if fix else [])]
    blank = tuple("" for _ in lines[0]) if lines else ()
    return Table(caption, blank, tuple(lines), frozenset(range(len(blank))))


def _backend_state(state: BackendState) -> str:
    if state.runs:
        return f"runs on {', '.join(state.devices)}"
    return f"{'builds engines, cannot run them' if state.builds else 'cannot run'}: {state.reason}"

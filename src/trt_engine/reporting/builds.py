"""Results of `build`, `validate`, `bundle` and `cache`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from trt_engine.format import format_bytes, format_ms, quoted
from trt_engine.records.build import (
    BuildEachReport,
    BuildReport,
    CachedEngine,
    CacheReport,
    TargetBuild,
    ValidateReport,
)
from trt_engine.records.bundle import BundleComponent, BundleConnection, BundleReport, BundleState, BundleStep
from trt_engine.records.passport import GRAPH_DTYPE, Tuning
from trt_engine.reporting import tables
from trt_engine.reporting.document import Block, Fact, Paragraph, Table, make_facts


def build_report(report: BuildReport) -> Iterator[Block]:
    from trt_engine.graph.quant_target import quant_target

    written = report.notes.get(GRAPH_DTYPE)
    shares, requested = report.precision.shares_text, report.precision.requested
    remarks = [f"requested: {requested}"] if requested else []
    remarks += [f"the graph is {written}, {report.device} runs it in {report.precision.main_dtype}"] if written else []
    aside = f" ({'; '.join(remarks)})" if remarks else ""
    target, checked, stored = report.quant_target, report.validation, ", from the store" if report.cached else ""
    yield make_facts(
        ("engine", tables.sized(report.engine, report.payload_bytes) if report.engine else None),
        ("backend", f"{report.backend} on {report.device}"),
        ("key", report.key),
        ("profile", map(str, report.profiles)),
        ("precision", f"{shares}{aside}" if report.precision.shares else None),
        tables.parity_fact(report.parity),
        ("checked", f"{checked.summary}: {checked.deferred_reason}" if checked is not None else None),
        ("target", f"{quant_target(target).title} ({target})" if target is not None else None),
        ("speed", report.speed.summary if report.speed is not None else None),
        ("tuning", report.tuning.summary if report.tuning is not None else None),
    )
    yield from [_candidate_table(report.tuning)] if report.tuning is not None else []
    if report.dry_run:
        would = "take it from the store" if report.cached else "build it"
        yield make_facts(("would", would), ("and write", report.artifacts.get("engine")))
    else:
        following = report.notes.get("original") or _next_command(report)
        yield make_facts(("took", f"{report.seconds:.1f} s{stored}"), ("next", following))


def _candidate_table(tuning: Tuning) -> Table:
    """One row per candidate of a search, the chosen one marked."""
    found = tuning.candidates
    columns = [
        ("candidate", [one.label for one in found]),
        ("built", ["" if one.build_s is None else f"{one.build_s:.1f} s" for one in found]),
        ("accuracy", ["" if one.metric is None else f"{one.metric:.4f}" for one in found]),
        ("median", ["" if one.median_ms is None else format_ms(one.median_ms) for one in found]),
        ("p99", ["" if one.p99_ms is None else format_ms(one.p99_ms) for one in found]),
        ("slower", ["" if one.slower_pct is None else f"{one.slower_pct:+.1f} %" for one in found]),
        ("95 %", ["{:+.1f} to {:+.1f} %".format(*one.interval_pct) if one.interval_pct else "" for one in found]),
        ("left out because", [one.note or "" for one in found]),
    ]
    used = [column for column in columns if any(column[1])]
    caption = f"Candidates, by {tuning.optimize_for}"
    return tables.make_table(caption, used, words=1, also=("left out because",), marked=[tuning.chosen])


def build_each_report(report: BuildEachReport) -> Iterator[Block]:
    """One row per GPU, the counts, and the next command."""
    from trt_engine.trt.gpu_targets import sm_label

    made = [item.report for item in report.targets if item.report is not None]
    rows: list[Fact] = [("would", f"make {len(report.targets) - report.failed} engines")]
    if not report.dry_run:
        failed = f", {report.failed} failed" if report.failed else ""
        rows = [("built", f"{report.built} of {len(report.targets)}{failed}, in {report.seconds:.1f} s")]
    if made and not report.dry_run:
        first = next(filter(_can_be_validated, made), made[0])
        rows.append(("next", f"on {'each' if len(made) > 1 else 'its'} GPU: {_next_command(first)}"))
    targets = ((sm_label(item.gpu), _target_text(item)) for item in report.targets)
    yield make_facts(("model", f"{report.model} ({report.backend})"), *targets, *rows)


def _next_command(report: BuildReport) -> str:
    return f"trt-engine {'validate' if _can_be_validated(report) else 'bench'} {quoted(report.engine)}"


def _can_be_validated(report: BuildReport) -> bool:
    validation = report.validation
    return validation is not None and validation.state == "deferred" and validation.reference is not None


def _target_text(item: TargetBuild) -> str:
    report = item.report
    if item.error is not None:
        hint = f" ({item.error.hint})" if item.error.hint else ""
        return f"FAILED ({item.error.exit_code}): {item.error.message}{hint}"
    assert report is not None
    if report.dry_run:
        return f"{report.artifacts.get('engine', 'the store')}{', from the store' * report.cached}"
    took = "from the store" if report.cached else f"{report.seconds:.1f} s"
    checked = f", {report.validation.summary}" if report.validation is not None else ""
    return f"{tables.sized(report.engine, report.payload_bytes)}, {took}{checked}"


def validate_report(report: ValidateReport) -> Iterator[Block]:
    yield make_facts(("engine", f"{report.engine} ({report.backend})"), ("inputs", report.inputs))
    if report.dry_run:
        compared = f"compare it with {report.reference} ({', '.join(report.checks)})"
        yield make_facts(("would", compared), ("and write", report.artifacts["passport"]))
        return
    shares, accuracy = tables.layer_shares(report.precision), report.accuracy_command
    yield make_facts(
        ("result", filter(None, (f"{report.state} on {report.gpu or report.device}", report.failure))),
        ("precision", shares + tables.requested_text(report.precision) if shares else None),
        tables.parity_fact(report.parity),
        ("accuracy", f"not measured: {accuracy}" if accuracy is not None else None),
        ("took", f"{report.seconds:.1f} s"),
        ("passport", report.artifacts["passport"]),
        ("next", f"trt-engine bench {shlex.quote(report.engine)}" if report.state == "passed" else None),
    )


# ------------------------------------------------------------------------------------------------ bundles


_LINK_TEXT = {True: "holds", False: "DOES NOT HOLD", None: "agrees"}


def bundle_report(report: BundleReport) -> Iterator[Block]:
    """Components, connections, next command."""
    model_version = f" ({report.model_version})" if report.model_version else ""
    following = f"trt-engine inspect {shlex.quote(report.folder)} --run"
    yield make_facts(
        ("bundle", f"{report.name}{model_version}, version {report.version}"),
        ("folder", report.folder),
        ("backend", f"{report.backend} on {report.device}"),
        *((item.name, _component_lines(item, report.folder)) for item in report.components),
        *(
            ("feeds", f"{link}: {link.tensor}{_axes_text(link)}, {_LINK_TEXT[link.matches]}")
            for link in report.connections
        ),
        *_chain_facts(report.chain),
        ("error", report.error.message if report.error is not None else None),
        ("would", f"write them into {report.folder}" if report.dry_run else None),
        ("took", None if report.dry_run else f"{report.seconds:.1f} s{'' if report.complete else ', NOT COMPLETE'}"),
        ("report", None if report.dry_run else report.artifacts["report"]),
        ("next", following if report.complete and not report.dry_run else None),
    )


def _axes_text(link: BundleConnection) -> str:
    return f", axes {list(link.transpose)}" if link.transpose else ""


_STATUS_TEXT = {
    "planned": "would be built",
    "pending": "not started",
    "building": "not finished",
    "built": "built",
    "stored": "from the store",
    "kept": "there already",
    "failed": "FAILED",
    "interrupted": "interrupted",
}


def _component_lines(item: BundleComponent, folder: str) -> Iterator[str]:
    state = _STATUS_TEXT[item.status]
    if item.status == "planned" and item.digest is not None:
        state = "there already" if item.engine else "would be taken from the store"
    large = f", {format_bytes(item.payload_bytes)}" if item.payload_bytes is not None else ""
    took = f" in {item.build_seconds:.1f} s" if item.status == "built" and item.build_seconds is not None else ""
    yield f"{state}{took}{large}{f', {folder}/{item.engine}' if item.engine else ''}"
    yield from map(str, item.profiles)
    if item.error is not None:
        yield item.error.message
        yield from [f"log: {folder}/{item.log}"] if item.log else []


def _chain_facts(chain: Iterable[BundleStep]) -> Iterator[Fact]:
    for step in chain:
        outputs = tables.shapes_text({name: value["shape"] for name, value in step.outputs.items()}, " ")
        fed = f" (fed by {', '.join(step.sources.values())})" if step.sources else ""
        broken = sum(int(value.get("not_finite", 0)) for value in step.outputs.values())
        bad = f", {broken} not finite" if broken else ""
        yield "run", f"{step.component}{fed}: {outputs}, {format_ms(step.wall_ms)}{bad}"


def bundle_state(state: BundleState) -> Iterator[Block]:
    """The text of `inspect` for a bundle folder."""
    held = {True: "holds", False: "does not hold", None: "not checked"}
    rows: list[Fact] = [
        ("bundle", state.path), ("name", state.name), ("version", state.version),
        ("complete", "yes" if state.complete else "no"),
    ]  # fmt: skip
    for name, engine in state.engines.items():
        found, passport = engine.compatibility, engine.passport
        lines = [f"{engine.path} ({format_bytes(engine.nbytes)})", f"verdict: {found.status}, {found.reason}"]
        lines += [f"command: {found.command}"] if found.command else []
        if passport is not None:
            lines += [f"{what}: {text}" for what, text in tables.signature_facts(passport.signature, passport.profiles)]
        lines += [f"run: {tables.smoke_time(engine.smoke_run)}"] if engine.smoke_run is not None else []
        rows.append((name, lines))
    for link in state.connections:
        rows.append(("feeds", f"{link} ({held[link.matches]})"))
    rows += _chain_facts(state.chain)
    rows += [("problem", text) for text in state.problems]
    yield make_facts(*rows, ("files", tables.sized(len(state.files), state.nbytes)), aligned=False)


# ------------------------------------------------------------------------------------------------ the store


def cache_report(report: CacheReport) -> Iterator[Block]:
    left = _total_text(len(report.engines), report.nbytes)
    if report.action == "list":
        yield Paragraph(f"store: {report.folder} (`TRT_ENGINE_STORE` names another)")
        yield from _engines_table(report.engines)
        yield Paragraph(left if report.engines else "no engines")
        return
    yield Paragraph(f"store: {report.folder}")
    yield from _engines_table(report.removed)
    gone = _total_text(len(report.removed), report.removed_bytes)
    verbs = ("would remove", "would be") if report.dry_run else ("removed", "are")
    yield Paragraph(
        f"{verbs[0]} {gone}; {left} {verbs[1]} left" if report.removed else f"nothing to remove; {left} in the store"
    )


def _total_text(count: int, nbytes: int) -> str:
    return f"{tables.plural(count, 'engine')}, {format_bytes(nbytes)}"


def _engines_table(engines: Sequence[CachedEngine]) -> Iterator[Block]:
    rows = tuple(
        (e.key[:12], e.model, e.backend, format_bytes(e.nbytes), e.last_used, e.path.rpartition("/")[2])
        for e in engines
    )
    columns = ("key", "model", "backend", "size", "last used", "file")
    yield from [Table("", columns, rows, frozenset((0, 1, 2, 4, 5)))] if rows else []

"""`trt-engine compare A B ...`: how much slower, with an interval; how far the outputs lie apart; gates with exit codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, output
from trt_engine.config import BenchConfig
from trt_engine.errors import Interrupted
from trt_engine.figures import figure, percent, size

if TYPE_CHECKING:
    from trt_engine.comparisons import Compared, ComparePlan, CompareReport, CompareSide, Gate, MetricDifference

__all__ = ["command"]


@click.command("compare", short_help="How much slower, with an interval, and how far apart.")
@click.argument("engines", metavar="ENGINE|MODEL|RECORDS...", nargs=-1, required=True, type=options.FILE)
@click.option(
    "--fail-if", multiple=True, metavar="RULE",
    help="slower:3%, p99-slower:5%, maybe-slower:3% (exit code 8) or error:1e-3 (exit code 7).",
)  # fmt: skip
@click.option("--baseline", type=options.FILE, metavar="FILE", help="Compare with what --save-baseline wrote.")
@click.option("--save-baseline", type=options.FILE, metavar="FILE", help="Keep the first engine's times for CI.")
@click.option("--loads", type=click.IntRange(min=6), metavar="N", help="Load everything anew so often [12].")
@options.measuring(
    leave_out=("warmup_s", "warmup_iterations", "percentiles", "streams"),
    helps={
        "duration_s": "time for everything together (default: 20s)",
        "iterations": "queries of one turn, at least (default: 2)",
        "seed": "seed of the random inputs and of the order of turns",
    },
)
@options.out_option("Folder for compare.json.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: output.Talk,
    engines: tuple[Path, ...],
    fail_if: tuple[str, ...],
    baseline: Path | None,
    save_baseline: Path | None,
    loads: int | None,
    out: Path | None,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """Measure engines in turns and compare them with the first one.

    MODELs are built into the store first. Two records.jsonl of `bench` compare what was measured before.

    \b
      trt-engine compare fp32.engine.onnx int8.engine.onnx
      trt-engine compare old.engine new.engine --fail-if slower:3% --fail-if error:1e-3
      trt-engine compare new.engine --baseline main.baseline.json --fail-if slower:5%
    """
    config: BenchConfig = options.config_from(BenchConfig, values)
    runtime, build, named = options.engine_configs(values)

    from trt_engine.api import comparing
    from trt_engine.api.comparing.asked import LOADS
    from trt_engine.cli.bench import said_now_and_then

    typed = options.spelled_command()
    many = LOADS if loads is None else loads
    if dry_run:
        plan = comparing.outlook(
            *engines, fail_if=fail_if, baseline=baseline, save_baseline=save_baseline, loads=many, out=out, yes=yes,
            config=config,
        )  # fmt: skip
        output.emit(talk, output.document("compare", plan, command=typed), _planned(plan))
        return
    try:
        report = comparing.run(
            *engines, fail_if=fail_if, baseline=baseline, save_baseline=save_baseline, loads=many, out=out, yes=yes,
            command=typed, config=config, runtime=runtime, build=build, on_progress=said_now_and_then("comparing"),
            **named,
        )  # fmt: skip
    except Interrupted as stop:
        if stop.partial is not None:
            _tell(talk, stop.partial, typed)  # type: ignore[arg-type]
        raise
    _tell(talk, report, typed)
    comparing.gate(report, strict=config.strict)


def _tell(talk: output.Talk, report: CompareReport, typed: str) -> None:
    output.emit(talk, output.document("compare", report, command=typed, warnings=report.warnings), _text(report))


# ------------------------------------------------------------------------------------------------ what is said


def _text(report: CompareReport) -> str:
    lines = [f"{'base' if not index else '':<12}{_who(side)}" for index, side in enumerate(report.sides)]
    for side in report.against:
        lines += [
            "",
            f"{side.label} against {report.sides[0].label}",
            *([f"  slower      {side.quantised_slower}"] if side.quantised_slower else []),
            *_table(side),
            *_outputs(side),
            *_structure(side),
        ]
    lines += [
        "",
        f"turns       {report.blocks} of each, {report.order}",
        f"interval    95 %: {report.method}",
    ]
    lines += [f"gate        {item.rule}: {_judged(item)}: {item.text}" for item in report.gates]
    lines.append("stable      " + ("yes" if report.stable else "no: " + "; ".join(report.instability)))
    if not report.complete:
        lines.append("incomplete  interrupted")
    return "\n".join(lines)


def _judged(gate: Gate) -> str:
    return "FAILED" if gate.failed else "passed" if gate.judged else "not judged"


def _who(side: CompareSide) -> str:
    facts = [f"{side.backend} on {side.device}", side.precision]
    facts += [f"its graph is {side.written}"] if side.written else []
    sizes = (("engine", side.engine_bytes), ("weights", side.weights_bytes), ("memory", side.memory_bytes))
    facts += [f"{name} {size(nbytes)}" for name, nbytes in sizes if nbytes]
    return f"{side.label} ({', '.join(facts)})"


def _table(side: Compared) -> Iterator[str]:
    if not side.speed:
        yield "  speed     no interval"
        return
    yield f"  {'':<12}{'base':>16}{'this':>16}{'slower by':>12}   {'95 % interval':<21}{'would find':>11}"
    for item in side.speed:
        yield _row(item)


def _row(item: MetricDifference) -> str:
    span = item.slower_pct
    base, other = (f"{figure(value, 4)} {item.unit}" for value in (item.base, item.other))
    least = "" if item.detectable_pct is None else f"{item.detectable_pct:.1f} %"
    interval = f"{span.low:+.1f} to {span.high:+.1f} %"
    figures = f"{base:>16}{other:>16}{span.value:>+10.1f} %   {interval:<21}{least:>11}"
    return f"  {item.metric:<12}{figures}   {item.verdict}"


def _outputs(side: Compared) -> Iterator[str]:
    for name, error in zip(side.output_names, side.outputs, strict=True):
        top = f", best class the same in {percent(side.top1_same[name])} of rows" if name in side.top1_same else ""
        yield (f"  outputs   {name}: {error.summary}, mean {error.mean_abs:.3g}, cosine {error.cosine:.6f}{top}")
    if side.outputs_note:
        yield f"  outputs   {side.outputs_note}"


def _structure(side: Compared) -> Iterator[str]:
    if side.structure is None:
        return
    changes = side.structure.changes
    kinds = Counter(change.change for change in changes)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no change"
    more = " (`trt-engine diff` has them all)" if changes else ""
    yield f"  structure {side.structure.same} layers are the same; {told}{more}"


def _planned(plan: ComparePlan) -> str:
    named = [*([plan.baseline] if plan.baseline else []), *plan.engines]
    return "\n".join(
        [
            f"would compare {', '.join(named)}: {plan.duration_s:g} s in all, loaded anew {plan.loads} times",
            *(f"would build the engine of {path} into the store first" for path in plan.builds),
            *(f"would write {place}" for place in plan.writes),
        ]
    )

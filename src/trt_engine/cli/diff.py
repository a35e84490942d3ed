"""`trt-engine diff BEFORE AFTER`: how two engines differ in structure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit, spelled_out
from trt_engine.figures import in_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trt_engine.comparisons import EngineDiff, LayerChange

__all__ = ["command"]


@click.command("diff", short_help="How two engines differ: fusions, kernels, types, reformats, time per layer.")
@click.argument("before", metavar="BEFORE", type=options.FILE)
@click.argument("after", metavar="AFTER", type=options.FILE)
@click.option(
    "--times",
    nargs=2,
    type=options.FILE,
    metavar="BEFORE AFTER",
    help="Their layers' times: two `profile.json`, or what trtexec's --exportProfile wrote.",
)
@click.option(
    "--model",
    type=options.FILE,
    metavar="MODEL",
    help="The ONNX model both were made of, to trace ONNX Runtime's nodes.",
)
@click.option(
    "--top", type=click.IntRange(min=1), default=20, metavar="N", help="N changes are printed; --json has all [20]."
)
@options.common
def command(
    talk: Talk, before: Path, after: Path, times: tuple[Path, Path] | None, model: Path | None, top: int
) -> int:
    """How AFTER differs from BEFORE in structure: what was fused or split, what changed type, kernel, shape or time.

    Each is an engine of TensorRT or ONNX Runtime, an ONNX model, an inspector's JSON (trtexec --exportLayerInfo), or a
    profile.json. Layers are matched by the ONNX nodes they were made of, else by name. Ends with 0 whatever it finds.

    \b
      trt-engine diff model.onnx model.engine.onnx
      trt-engine diff fp32.engine fp16.engine --times fp32/profile.json fp16/profile.json
    """
    from trt_engine.profiling.diff import diff

    report = diff(before, after, times=times or (None, None), model=model)
    emit(
        talk, document("diff", report, command=options.spelled_command(), warnings=report.warnings), _text(report, top)
    )
    return 0


# ------------------------------------------------------------------------------------------------ words


def _text(report: EngineDiff, top: int) -> str:
    lines = [f"before: {report.before} ({report.read_as[0]})", f"after:  {report.after} ({report.read_as[1]})"]
    lines += [f"warning: {text}" for text in report.warnings]
    for name, (one, other) in report.build.items():
        lines.append(f"  {name}: {one} -> {other}")
    width = max(len(row.name) for row in report.counts) if report.counts else 0
    lines.append("")
    for row in report.counts:
        gap = row.after - row.before
        lines.append(f"{row.name:<{width}}  {row.before:>6} -> {row.after:>6}" + (f"  {gap:+}" if gap else ""))
    lines += ["", f"{len(report.changes)} changed, {report.same} the same"]
    alike: dict[tuple[str, str], list[LayerChange]] = {}
    for change in report.changes:
        alike.setdefault((change.change, change.text), []).append(change)
    for (kind, text), changes in list(alike.items())[:top]:
        many = f"{len(changes)} x " if len(changes) > 1 else ""
        lines.append(f"  {many}{kind}: {text}: {_who(changes[0], many=bool(many))}{_time(changes)}")
    if len(alike) > top:
        lines.append(f"  and {len(alike) - top} other changes (`--top {len(alike)}`, `--json`)")
    if report.unknown_kinds:
        lines.append(f"layer types not known here, matched by name: {', '.join(report.unknown_kinds)}")
    return "\n".join(map(spelled_out, lines))


def _who(change: LayerChange, *, many: bool) -> str:
    """The layers' names; of many changes alike those of the first."""
    module = f"{change.module}: " if change.module else ""
    one, other = (", ".join(f"`{name}`" for name in names[:4]) for names in (change.before, change.after))
    told = one or other if one == other or not one or not other else f"{one} -> {other}"
    return f"{module}{told}, ..." if many else f"{module}{told}"


def _time(changes: Sequence[LayerChange]) -> str:
    """The milliseconds of all of them together, where they are known and the text does not tell them."""
    sides = [
        [ms for ms in times if ms is not None]
        for times in ([change.before_ms for change in changes], [change.after_ms for change in changes])
    ]
    if changes[0].change == "time" or not any(sides):
        return ""
    told = [in_ms(sum(side)) if side else "-" for side in sides]
    return f" ({told[0]} -> {told[1]})"

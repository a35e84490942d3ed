"""`trt-engine ranges MODEL --data DATA`: which tensors leave the range of FP16, BF16 and FP8, before anyone builds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit
from trt_engine.config import parse_shapes, parse_size
from trt_engine.errors import UsageError
from trt_engine.figures import with_module

if TYPE_CHECKING:
    from trt_engine.records import RangesReport, TensorRange

__all__ = ["command"]

_SHOWN = 12


@click.command("ranges", short_help="Which tensors leave the range of FP16, BF16 and FP8.")
@click.argument("model", type=options.FILE)
@click.option(
    "--data", type=options.FILE, metavar="PATH",
    help="Images, a labelled dataset, .npy, .npz, .bin, .raw [random inputs, which say little].",
)  # fmt: skip
@options.preprocess_option()
@click.option("--batch", type=click.IntRange(min=1), default=1, metavar="N", help="Rows in one run [1].")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Rows to look at [all].")
@click.option("--shapes", metavar="SPEC", help="Shapes of random inputs, as images:1x3x640x640.")
@click.option("--margin", type=float, default=2.0, metavar="X", help="Values may become this many times larger [2].")
@click.option("--memory", metavar="SIZE", default="512MiB", help="Memory for tensors held at once [512MiB].")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of random inputs [0].")
@options.out_option("Write the JSON document to this file as well.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: Talk,
    model: Path,
    data: Path | None,
    preprocess: str | None,
    batch: int,
    limit: int | None,
    shapes: str | None,
    margin: float,
    memory: str,
    seed: int,
    out: Path | None,
    yes: bool,
    dry_run: bool,
) -> int:
    """Which tensors of MODEL leave the range of FP16, BF16 and FP8, and which nodes to leave in FP32.

    One FP32 pass over the data, in bounded memory: activations, constants such as -1e9, sums of squares. Ends with 0
    whenever there is an answer, whatever it is.
    """
    if out is not None and out.exists() and not yes:
        raise UsageError(f"`{out}` is there already", hint="another name with `-o`, or `--yes` to overwrite it")
    if preprocess is not None and data is None:
        raise UsageError("`--preprocess` makes inputs of pictures, and there are none", hint="`--data PICTURES`")
    if shapes is not None and data is not None:
        raise UsageError("`--shapes` is for random inputs, and `--data` has its own shapes", hint="leave one out")

    from trt_engine.api.calibrating import ranges
    from trt_engine.api.pictures import inputs_of
    from trt_engine.graph.load import open_model
    from trt_engine.precision.samples import open_samples
    from trt_engine.records import RangesPlan

    typed, given, opened = options.spelled_command(), parse_shapes(shapes), open_model(model)
    if dry_run:
        if data is not None:
            open_samples(inputs_of(opened, data, preprocess).data, opened.signature, batch=batch, limit=limit)
        body = RangesPlan(str(model), str(data) if data else None, (str(out),) if out else ())
        told = f"would run {model} over {data or 'random inputs'}" + (f" and write {out}" if out else "")
        emit(talk, document("ranges", body, command=typed), told)
        return 0
    report = ranges(
        opened,
        data,
        preprocess=preprocess,
        batch=batch,
        limit=limit,
        shapes=given,
        margin=margin,
        memory_mib=max(1, parse_size(memory) >> 20),
        seed=seed,
    )
    doc = document("ranges", report, command=typed)
    if out is not None:
        import msgspec

        from trt_engine.files import write_whole

        write_whole(out, msgspec.json.format(msgspec.json.encode(doc), indent=2) + b"\n")
    emit(talk, doc, text(report))
    return 0


def text(report: RangesReport) -> str:
    """The report for a person: findings first, then what to exclude, then the largest tensors."""
    lines = [
        f"model       {report.model}",
        f"data        {report.data}: {report.rows} rows in {report.batches} batches"
        + (" (RANDOM: real values may lie far from these)" if report.random else ""),
        f"looked at   {len(report.tensors)} tensors, {len(report.constants)} constants, {report.wall_s:.1f} s",
    ]
    told = [item for item in report.findings if item.severity != "info"]
    quiet = len(report.findings) - len(told)
    lines.append(f"findings    {len(told)}" + (f", and {quiet} notes (`--json` has them)" if quiet else ""))
    for item in told:
        lines.append(f"  {item.severity:<8} {item.code}: {item.text}")
        if item.hint:
            lines.append(f"  {'':<8} {item.hint}")
    if report.exclude:
        lines.append(f"keep FP32   {len(report.exclude)} nodes, when the rest goes to FP16")
        lines += [
            f"  {with_module(item.node, item.module)} ({item.operator}): {item.code} of `{item.tensor}`"
            for item in report.exclude
        ]
    else:
        lines.append("keep FP32   nothing: FP16 holds every tensor that was seen")
    largest = sorted(report.tensors, key=lambda item: -item.absmax)[:_SHOWN]
    if largest:
        width = max(len(with_module(item.name, item.module)) for item in largest)
        head = f"{'largest tensors':<{width}}  {'largest':>10}  of FP16  {'FP16 zero':>9}  {'FP8 zero':>8}"
        lines += [head, *(_row(item, width) for item in largest)]
    return "\n".join(lines)


def _row(item: TensorRange, width: int) -> str:
    return (
        f"{with_module(item.name, item.module):<{width}}  {item.absmax:>10.4g}  {item.absmax / 65504:>7.2%}  "
        f"{item.fp16_vanishing:>9.2%}  {item.fp8_vanishing:>8.2%}"
    )

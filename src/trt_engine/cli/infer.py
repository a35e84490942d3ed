"""`trt-engine infer`: one inference from files, from a picture, or from seeded random inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, output
from trt_engine.config import BuildConfig, RuntimeConfig, parse_shapes
from trt_engine.errors import UsageError
from trt_engine.figures import in_ms
from trt_engine.tensors import Shape, Signature, closest, format_shape

if TYPE_CHECKING:
    from trt_engine.engine import Engine
    from trt_engine.records import Detected, InferReport, OutputFacts
    from trt_engine.runtime.instance import InferenceEngine
    from trt_engine.vision.picture import Picture

__all__ = ["command"]

log = logging.getLogger("trt_engine.cli.infer")


@click.command()
@click.argument("path", metavar="ENGINE|MODEL", type=options.FILE)
@click.option("--input", "source", type=options.FILE, metavar="FILE", help=".npy (one input) or .npz.")
@click.option("--image", "image", type=options.FILE, metavar="FILE", help="A picture, as declared.")
@click.option("--random", "random", is_flag=True, help="Seeded random inputs instead of a file.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="With --random: rows [the profile's optimum].")
@click.option("--shapes", metavar="SPEC", help="With --random: shapes, as images:8x3x640x640.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", default=0, help="With --random: the seed [0].")
@click.option("--output", "names", metavar="NAME", multiple=True, help="Only this output (repeatable) [all].")
@click.option("--repeat", type=click.IntRange(min=1), metavar="N", default=1, help="Run it N times in all [1].")
@click.option("--draw", type=options.FILE, metavar="FILE", help="With --image: boxes drawn on it.")
@click.option("--min-score", type=click.FloatRange(0, 1), metavar="X", help="With --image: detections from X [0.25].")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="With --image: the N best classes [5].")
@options.preprocess_option("With --image: instead of what is declared.")
@options.of(RuntimeConfig, leave_out=("contexts", "streams"))
@options.of(
    BuildConfig,
    leave_out=(
        "device", "batch", "shapes", "workspace_mib", "providers", "allow_fallback", "parity", "parity_rtol", "options",
        "preprocess",
    ),
)  # fmt: skip
@options.out_option(".npz (outputs by name) or .npy (one output) to write; with --image .json as well.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: output.Talk,
    path: Path,
    source: Path | None,
    image: Path | None,
    random: bool,
    batch: int | None,
    shapes: str | None,
    seed: int,
    names: Sequence[str],
    repeat: int,
    draw: Path | None,
    min_score: float | None,
    top: int | None,
    preprocess: str | None,
    out: Path | None,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """Run an ENGINE once (or a MODEL, built into the store first).

    \b
      trt-engine infer model.engine.onnx --input images.npy -o boxes.npz
      trt-engine infer model.engine.onnx --image photo.jpg -o out.json --draw out.png
      trt-engine infer model.onnx --random --batch 4 --repeat 20 --json
    """
    _check_source(source, image, random, batch, shapes, seed)
    _check_image_options(image, draw=draw, min_score=min_score, top=top, preprocess=preprocess)
    given = parse_shapes(shapes)
    _check_out(out, yes, (".npy", ".npz") if image is None else (".npy", ".npz", ".json"))
    _check_out(draw, yes, _DRAWINGS)
    runtime, build, _ = options.engine_configs(values)
    asked = {name: value for name, value in values.items() if value not in (None, ())}

    import dataclasses

    import msgspec

    from trt_engine.api.loading import load
    from trt_engine.engine import Engine, is_bare_model
    from trt_engine.files import write_whole
    from trt_engine.graph.load import open_model
    from trt_engine.runtime.feeds import random_feeds, read_feeds, shapes_of, write_outputs

    bare = is_bare_model(path)
    if not bare and asked:
        raise UsageError(
            f"`{path}` is built already: `--{next(iter(asked)).removesuffix('s')}` cannot change it",
            hint="give the model to build it again",
        )
    signature = open_model(path).signature if bare else Engine.open(path).signature
    chosen = _chosen(signature, names, out)
    feeds = read_feeds(source, signature) if source is not None else None
    picture = None
    if image is not None:
        picture = _read_picture(image, path, signature, preprocess)
        feeds = picture.feeds
    if dry_run:
        output.emit(talk, *_plan(path, bare, source or image, chosen, [item for item in (out, draw) if item]))
        return
    engine = _built(path, build, feeds, given, batch) if bare else Engine.open(path)
    with load(engine, config=runtime) as runner:
        if feeds is None:
            profile = runner.profiles[0] if runner.profiles else None
            feeds = random_feeds(
                runner.signature, shapes_of(runner.signature, profile, batch=batch, overrides=given), seed
            )
        outputs, samples_ms = _timed(runner, feeds, repeat)
        facts = runner.facts
    seen = None if picture is None else picture.look(outputs, 0.25 if min_score is None else min_score, top or 5)
    outputs = {name: outputs[name] for name in chosen}
    artifacts = {} if out is None else {"outputs": str(out)}
    if draw is not None:
        artifacts["drawing"] = str(draw)
    given_by = source or image
    inputs = given_by.name if given_by is not None else f"seeded random, seed {seed}"
    report = _report(engine, inputs, feeds, outputs, samples_ms, facts, artifacts)
    if seen is not None:
        report = dataclasses.replace(report, **seen.fields)
    told = output.document("infer", report, command=options.spelled_command())
    if out is not None and out.suffix == ".json":
        write_whole(out, msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    elif out is not None:
        write_outputs(out, outputs)
    if draw is not None and picture is not None and seen is not None:
        picture.draw(seen, draw)
    output.emit(talk, told, _text(report))


def _check_source(
    source: Path | None, image: Path | None, random: bool, batch: int | None, shapes: str | None, seed: int
) -> None:
    given = [flag for flag, is_given in (("--input", source), ("--image", image), ("--random", random)) if is_given]
    if len(given) != 1:
        found = " and ".join(f"`{flag}`" for flag in given)
        found = f"{'both ' if len(given) == 2 else ''}{found} are" if given else "no inputs are"
        raise UsageError(
            f"{found} given", hint="`--input X.npz`, `--image X.jpg`, or `--random` for seeded random inputs"
        )
    if not random:
        for name, value in (("batch", batch), ("shapes", shapes), ("seed", seed or None)):
            if value is not None:
                raise UsageError(f"`--{name}` is for `--random`: the file says its own", hint=f"leave `--{name}` out")


def _check_image_options(image: Path | None, **given: object) -> None:
    for name, value in given.items():
        if image is None and value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"`{flag}` is for `--image`", hint=f"leave `{flag}` out, or give a picture")


_DRAWINGS = (".png", ".jpg", ".jpeg", ".webp")


def _check_out(out: Path | None, yes: bool, suffixes: Sequence[str]) -> None:
    if out is None:
        return
    if out.suffix not in suffixes:
        kind = "a drawing" if suffixes == _DRAWINGS else "outputs"
        ends = " or ".join([", ".join(reversed(suffixes[1:])), suffixes[0]])
        raise UsageError(f"{kind} cannot be written to `{out}`", hint=f"give a name that ends in {ends}")
    from trt_engine.files import end_of_links

    end_of_links(out)  # a device or a pipe is refused before anything runs
    if out.exists() and not yes:
        raise UsageError(f"`{out}` exists", hint="`--yes` overwrites it, or name another one")


def _read_picture(image: Path, path: Path, signature: Signature, preprocess: str | None) -> Picture:
    """The picture as the engine takes it, by the declaration given or the engine's own."""
    from trt_engine.api.evaluating import declared_for
    from trt_engine.vision.picture import Picture

    return Picture.read(image, declared_for(path, preprocess), signature)


def _chosen(signature: Signature, names: Sequence[str], out: Path | None) -> list[str]:
    """The outputs asked for, in the engine's order; known to fit the file before anything runs."""
    known = [spec.name for spec in signature.outputs]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no output `{name}`", hint=closest(name, known))
    chosen = [name for name in known if not names or name in names]
    if out is not None and out.suffix == ".npy" and len(chosen) != 1:
        listed = ", ".join(f"`{name}`" for name in chosen)
        raise UsageError(
            f"`{out}` can hold one array, there are {len(chosen)}: {listed}",
            hint=f"`-o {out.with_suffix('.npz')}`, or choose one with `--output NAME`",
        )
    return chosen


def _built(
    path: Path, config: BuildConfig, feeds: Mapping[str, Any] | None, shapes: Mapping[str, Shape], batch: int | None
) -> Engine:
    """The engine of a bare model, from the store or built into it, for the shapes that will be fed."""
    import dataclasses

    from trt_engine.api.building import build

    if not config.profiles:
        if feeds is not None:
            shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
        span = None if batch is None else (1, batch, batch)
        config = dataclasses.replace(config, shapes=dict(shapes), batch=span)
    log.info("`%s` is a model: its engine is built into the store first, or taken from there", path)
    return build(path, config=config)


def _timed(runner: InferenceEngine, feeds: Any, repeat: int) -> tuple[dict[str, Any], list[float]]:
    """The outputs of the first inference, and the milliseconds of each."""
    import time

    samples_ms, outputs = [], {}
    for number in range(repeat):
        started = time.perf_counter()
        found = runner.infer(feeds)
        samples_ms.append((time.perf_counter() - started) * 1e3)
        if number == 0:
            outputs = found
    return outputs, samples_ms


def _report(
    engine: Engine,
    inputs: str,
    feeds: Mapping[str, Any],
    outputs: Mapping[str, Any],
    samples_ms: Sequence[float],
    facts: dict[str, str],
    artifacts: dict[str, str],
) -> InferReport:
    from statistics import median

    from trt_engine.records import InferReport

    return InferReport(
        engine=str(engine.path),
        backend=engine.passport.backend,
        device=facts["device"],
        inputs=inputs,
        shapes={name: tuple(int(size) for size in value.shape) for name, value in feeds.items()},
        first_ms=samples_ms[0],
        median_ms=median(samples_ms[1:]) if len(samples_ms) > 1 else None,
        samples_ms=tuple(samples_ms),
        outputs=tuple(_facts_of(name, value) for name, value in outputs.items()),
        facts=facts,
        artifacts=artifacts,
    )


def _facts_of(name: str, value: Any) -> OutputFacts:
    import numpy as np

    from trt_engine.records import OutputFacts

    array = np.asarray(value)
    kind = "string" if array.dtype.kind in "OUS" else array.dtype.name
    if kind == "string" or not array.size or array.dtype.kind == "c":
        return OutputFacts(name, kind, array.shape, None, None, None, 0)
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return OutputFacts(name, kind, array.shape, None, None, None, numbers.size)
    low, high, mean = (float(of(finite)) + 0.0 for of in (np.min, np.max, np.mean))  # + 0.0: a zero without a sign
    return OutputFacts(name, kind, array.shape, low, high, mean, numbers.size - finite.size)


def _text(report: InferReport) -> str:
    fed = ", ".join(f"{name} {format_shape(shape)}" for name, shape in report.shapes.items())
    more = ""
    if report.median_ms is not None:
        more = f", then {in_ms(report.median_ms)} (median of {len(report.samples_ms) - 1})"
    lines = [
        f"engine      {report.engine} ({report.backend} on {report.device})",
        f"input       {fed} ({report.inputs})",
        f"latency     {in_ms(report.first_ms)} the first time{more}",
    ]
    for item in report.outputs:
        text = f"output      {item.name} {format_shape(item.shape)} {item.dtype}"
        if item.mean is not None:
            text += f", min {item.min:.6g}, max {item.max:.6g}, mean {item.mean:.6g}"
        if item.not_finite:
            text += f", {item.not_finite} values are NaN or infinite"
        lines.append(text)
    lines += [f"found       {_seen(item)}" for item in report.detections or ()]
    lines += [f"class       {_seen(item)}" for item in report.classes or ()]
    if report.detections == ():
        lines.append("found       nothing (`--min-score` lets more through)")
    lines += [f"written     {place}" for place in report.artifacts.values()]
    return "\n".join(lines)


def _seen(item: Detected) -> str:
    where = "" if not item.box else " at " + ", ".join(f"{value:.1f}" for value in item.box)
    return f"{item.name} {item.score:.4f}{where}"


def _plan(
    path: Path, bare: bool, source: Path | None, chosen: Sequence[str], writes: Sequence[Path]
) -> tuple[dict[str, Any], str]:
    """`--dry-run`: what would be built, run and written."""
    from trt_engine.records import InferPlan

    body = InferPlan(
        engine=str(path),
        builds=bare,
        inputs=str(source) if source is not None else "seeded random",
        outputs=tuple(chosen),
        writes=tuple(str(item) for item in writes),
    )
    lines = [
        f"would run {path} once on {body.inputs}",
        *(["would build its engine into the store first"] if bare else []),
        *([f"would write {', '.join(chosen)} to {' and '.join(map(str, writes))}"] if writes else []),
    ]
    return output.document("infer", body, command=options.spelled_command()), "\n".join(lines)

"""`infer`: one inference from arrays, a file, an image, or seeded random inputs; `video` has that of every frame of a clip.

`plan` validates and reads the inputs; `run` builds a model's engine, runs it, and writes outputs and drawing.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from trt_engine.atomic_io import all_or_nothing, resolve_link
from trt_engine.config.build import BuildConfig
from trt_engine.config.evaluate import InferConfig
from trt_engine.config.profiles import profile_at, select_profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import settings
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.errors import UsageError
from trt_engine.graph.load import open_model
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.dry_run import DryRun
from trt_engine.records.infer import InferReport, OutputSummary
from trt_engine.runtime.feeds import random_feeds, read_feeds, shapes_of, write_outputs
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Shape, Signature, Tensors, suggest
from trt_engine.verbs.build.run import build_for_inputs
from trt_engine.verbs.evaluate.run import resolve_spec
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.load import load, merge_run_settings
from trt_engine.vision.image_inference import ImageRunner
from trt_engine.vision.spec import declared_shapes

if TYPE_CHECKING:
    from trt_engine.verbs.infer.video import VideoJob
    from trt_engine.verbs.settings_types import InferSettings

log = logging.getLogger(__name__)

_DRAWINGS = (".png", ".jpg", ".jpeg", ".webp")
_CLIPS, _LINES = (".mp4", ".mkv", ".mov"), ".jsonl"


@dataclass(frozen=True, slots=True)
class InferJob:
    """A validated request. Nothing is built or written yet."""

    path: Path
    engine: Engine | None
    """None for a model, whose engine is to be built."""
    config: InferConfig
    runtime: RuntimeConfig
    build: BuildConfig
    inputs: Path | None
    """The file of the inputs or of the image."""
    feeds: Tensors | None
    """None for random inputs: their shapes come from the engine's profile."""
    image: ImageRunner | None
    video: VideoJob | None
    outputs: tuple[str, ...]
    """The requested outputs, in the engine's order."""

    @property
    def artifacts(self) -> dict[str, str]:
        """The files to write."""
        if self.video is not None:
            return self.video.artifacts
        files = {"outputs": self.config.out, "drawing": self.config.draw}
        return {name: str(path) for name, path in files.items() if path is not None}

    @property
    def plan(self) -> DryRun:
        inputs = "seeded random inputs" if self.feeds is None else str(self.inputs or "arrays")
        what = f"once on {inputs}" if self.video is None else f"on every frame of {self.video.info.path}"
        return DryRun(
            does=f"run {self.path} {what} for {', '.join(self.outputs)}",
            builds=(str(self.path),) if self.engine is None else (),
            writes=tuple(self.artifacts.values()),
        )


@public_function
@takes_model("engine")
def infer(
    engine: Engine | AnyModel,
    inputs: Any = None,
    *,
    config: InferConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    progress: ProgressOption = False,
    **values: Unpack[InferSettings],
) -> InferReport:
    """One inference with its latency and a summary of its outputs; the arrays themselves go to `out`.

    `inputs` are what `te.load(engine).infer` takes: arrays by name, in the dtypes and shapes of the signature, or one array;
    or an `.npy` or `.npz` file, or None for `image=`, `video=` (every frame of a clip or an RTSP address) or seeded random
    inputs. A model is built into the store first.
    `values` are settings of `InferConfig`, `RuntimeConfig` and (for a model) `BuildConfig`. For arrays as the result use
    `te.load(engine).infer(feeds)`. Raises `UsageError` for a file that exists (`overwrite` replaces it), an unknown output
    or a video that cannot be read, `FeedError` and `ShapeError` for inputs that do not fit.
    """
    return run(plan(on_disk(engine), inputs, *merge_run_settings(values, runtime, build, config or InferConfig())))


def plan(
    engine: Engine | Path | str,
    inputs: Any,
    config: InferConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
) -> InferJob:
    """Validate the request and read its inputs; writes nothing."""
    _check_request(config, inputs)
    path = engine.path if isinstance(engine, Engine) else Path(engine)
    bare = not isinstance(engine, Engine) and is_onnx_model(path)
    if not bare and (flag := _build_flag(build)):
        raise UsageError(f"`{path}` is already built: `{flag}` cannot change it", hint="pass the model to rebuild")
    opened = None if bare else engine if isinstance(engine, Engine) else Engine.open(path)
    signature = open_model(path).signature if opened is None else opened.signature
    outputs = _select_outputs(signature, config)
    feeds: Tensors | None = None
    image = video = None
    source = Path(inputs) if isinstance(inputs, Path | str) else None
    if source is not None:
        feeds = read_feeds(source, signature)
    elif inputs is not None:
        feeds = signature.by_name(inputs)
        signature.check(feeds)
    elif config.image is not None:
        source = config.image
        image = ImageRunner.read(source, resolve_spec(path, config.preprocess), signature)
        feeds = image.feeds
    elif config.video is not None:
        from trt_engine.verbs.infer.video import VideoJob, check_source  # with PyAV, which takes a moment

        address = str(config.video)
        vision = resolve_spec(path, config.preprocess)
        vision.input_spec(signature), vision.output_spec(signature)
        video = VideoJob(address, check_source(address, config.max_frames), vision, config)
        if video.sheet is not None:
            _check_out(video.sheet, config.overwrite, (video.sheet.suffix,))
    if opened is not None and video is None:
        profiles = opened.passport.profiles
        if feeds is not None:
            select_profile(profiles, lambda profile, number: profile.check(feeds, number))
        else:
            shapes_of(signature, profile_at(profiles, 0), batch=config.batch, overrides=config.shapes)
    return InferJob(path, opened, config, runtime, build, source, feeds, image, video, outputs)


@all_or_nothing()
def run(job: InferJob, *, command: str = "") -> InferReport:
    """Run a planned inference."""
    request, source, feeds = job.config, job.inputs, job.feeds
    engine = job.engine or _build_engine(job)
    if job.video is not None:
        return _run_video(job, job.video, engine)
    with load(engine, config=job.runtime) as runner:
        if feeds is None:
            shapes = shapes_of(
                runner.signature, profile_at(runner.profiles, 0), batch=request.batch, overrides=request.shapes
            )
            feeds = random_feeds(runner.signature, shapes, request.seed)
        outputs, samples_ms = _run_timed(runner, feeds, request.repeat)
        runtime_info = runner.runtime_info
    result = None
    if job.image is not None:
        score = 0.25 if request.min_score is None else request.min_score
        result = job.image.decode(outputs, score, request.top or 5)
    outputs = {name: outputs[name] for name in job.outputs}
    random = f"seeded random, seed {request.seed}"
    report = _make_report(
        job, engine, runtime_info, samples_ms, {name: tuple(map(int, value.shape)) for name, value in feeds.items()},
        inputs=source.name if source is not None else "arrays" if job.feeds is not None else random,
        outputs=tuple(_output_stats(name, value) for name, value in outputs.items()),
        **(result.fields if result is not None else {}),
    )  # fmt: skip
    if request.out is not None and request.out.suffix == ".json":
        write_document(request.out, "infer", report, command=command)
    elif request.out is not None:
        write_outputs(request.out, outputs)
    if request.draw is not None and job.image is not None and result is not None:
        job.image.draw(result, request.draw)
    return report


def _run_video(job: InferJob, video: VideoJob, engine: Engine) -> InferReport:
    from trt_engine.verbs.infer.video import run_video

    with load(engine, config=job.runtime) as runner:
        summary, batches_ms = run_video(video, runner)
        spec = video.vision.input_spec(runner.signature)
        shapes, source = {spec.name: (1, *spec.shape[1:])}, summary.source.path
        return _make_report(
            job, engine, runner.runtime_info, batches_ms, shapes, inputs=source, outputs=(), video=summary
        )


def _make_report(
    job: InferJob, engine: Engine, runtime_info: dict[str, str], times_ms: Sequence[float], shapes: dict[str, Shape],
    **more: Any,
) -> InferReport:  # fmt: skip
    return InferReport(
        engine=str(engine.path),
        backend=engine.passport.backend,
        device=runtime_info["device"],
        shapes=shapes,
        first_ms=times_ms[0],
        median_ms=median(times_ms[1:]) if len(times_ms) > 1 else None,
        samples_ms=tuple(times_ms),
        runtime_info=runtime_info,
        artifacts=job.artifacts,
        **more,
    )


def _check_request(request: InferConfig, inputs: object) -> None:
    """`UsageError` for arguments that contradict each other, and for files that cannot be written."""
    pictured, filmed = request.image is not None, request.video is not None
    sources = {"inputs": inputs is not None, "image": pictured, "video": filmed}
    if len(given := [name for name, is_given in sources.items() if is_given]) > 1:
        raise UsageError(f"both `{given[0]}` and `{given[1]}` are given", hint="leave one of them out")
    for names, needs, allowed in (
        (("batch", "shapes", "seed"), "--random", not given),
        (("draw", "min_score", "top", "preprocess"), "--image", pictured or filmed),
        (("max_frames",), "--video", filmed),
        (("outputs",), "--image", not filmed),
    ):
        for name in names:
            if not allowed and getattr(request, name) not in (None, 0, {}, ()):
                flag = f"--{name.replace('_', '-')}" if name != "outputs" else "--output"
                more = {"--image": ", or give an image", "--video": ", or give a video"}.get(needs, "")
                raise UsageError(f"`{flag}` needs `{needs}`", hint=f"leave out `{flag}`{more}")
    if not filmed:
        _check_out(request.out, request.overwrite, (".npy", ".npz", *((".json",) if pictured else ())))
        _check_out(request.draw, request.overwrite, _DRAWINGS)
        return
    if request.repeat > 1:
        raise UsageError("`--repeat` runs one inference again", hint="leave it out with a video")
    _check_out(request.out, request.overwrite, (_LINES, *_CLIPS))
    _check_out(request.draw, request.overwrite, _CLIPS)
    if request.draw is not None and request.out is not None and request.out.suffix != _LINES:
        raise UsageError(
            "two clips would be drawn", hint=f"`-o` with a name that ends in {_LINES}, or leave `--draw` out"
        )


def _build_flag(config: BuildConfig) -> str | None:
    """The flag of the first setting that only a build uses."""
    shared = {item.name for item in settings(RuntimeConfig)}
    changed = (item for item in settings(config) if getattr(config, item.name) != item.default)
    return next((item.flags[0] for item in changed if item.name not in shared and item.flags), None)


def _check_out(out: Path | None, overwrite: bool, suffixes: Sequence[str]) -> None:
    if out is None:
        return
    if out.suffix not in suffixes:
        kind = "a drawing" if suffixes == _DRAWINGS else "outputs"
        ends = " or ".join([", ".join(reversed(suffixes[1:])), suffixes[0]])
        raise UsageError(f"{kind} cannot be written to `{out}`", hint=f"give a name that ends in {ends}")
    resolve_link(out)  # refuse a device or a pipe before running
    if out.exists() and not overwrite:
        raise UsageError(f"`{out}` exists", hint="`--overwrite` overwrites it, or name another one")


def _select_outputs(signature: Signature, request: InferConfig) -> tuple[str, ...]:
    """The requested outputs in engine order. Raises `UsageError` when they do not fit the file."""
    known = [spec.name for spec in signature.outputs]
    for name in request.outputs:
        if name not in known:
            raise UsageError(f"unknown output `{name}`", hint=suggest(name, known))
    chosen = tuple(name for name in known if not request.outputs or name in request.outputs)
    out = request.out
    if out is not None and out.suffix == ".npy" and len(chosen) != 1:
        listed = ", ".join(f"`{name}`" for name in chosen)
        raise UsageError(
            f"`{out}` can hold one array, there are {len(chosen)}: {listed}",
            hint=f"`-o {out.with_suffix('.npz')}`, or choose one with `--output NAME`",
        )
    return chosen


def _build_engine(job: InferJob) -> Engine:
    """Build a model for the shapes of the feeds, or take the engine from the store."""
    config = job.build
    if not config.profiles:
        shapes = job.config.shapes
        if job.feeds is not None:
            shapes = {name: tuple(int(size) for size in value.shape) for name, value in job.feeds.items()}
        rows = job.config.batch
        if job.video is not None:
            model = open_model(job.path)
            shapes = declared_shapes(model, {})
            if model.signature.row_dependence is None and any(map(model.signature.batch_axes, model.signature.inputs)):
                return build_for_inputs(job.path, dataclasses.replace(config, shapes=shapes, batch=(1, 8, 8)), None)
        config = dataclasses.replace(config, shapes=shapes, batch=None if rows is None else (1, rows, rows))
    log.info("`%s` is a model: building its engine, or taking it from the store", job.path)
    given = job.inputs if job.config.image is None else None
    return build_for_inputs(job.path, config, given)


def _run_timed(runner: InferenceEngine, feeds: Tensors, repeat: int) -> tuple[dict[str, Any], list[float]]:
    """The outputs of the first inference, and the time of each in ms."""
    outputs: dict[str, Any] = {}
    samples_ms = []
    for _ in range(repeat):
        started = time.perf_counter()
        found = runner.infer(feeds)
        samples_ms.append((time.perf_counter() - started) * 1e3)
        outputs = outputs or found
    return outputs, samples_ms


def _output_stats(name: str, value: Any) -> OutputSummary:
    array = np.asarray(value)
    kind = "string" if array.dtype.kind in "OUS" else array.dtype.name
    if kind == "string" or not array.size or array.dtype.kind == "c":
        return OutputSummary(name, kind, array.shape, None, None, None, 0)
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return OutputSummary(name, kind, array.shape, None, None, None, numbers.size)
    low, high, mean = (float(of(finite)) + 0.0 for of in (np.min, np.max, np.mean))  # + 0.0: no negative zero
    return OutputSummary(name, kind, array.shape, low, high, mean, numbers.size - finite.size)

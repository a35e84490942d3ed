"""Plans a sizing run: settings, layout and the builds it needs, before anything is spent."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trt_engine.atomic_io import os_errors
from trt_engine.backend import BackendSpec, get_backend, with_default_device
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import to_argv
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import ModelError, UsageError
from trt_engine.format import quoted
from trt_engine.graph.dtype_breakdown import main_precision
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.records.infer import VideoSource
from trt_engine.verbs.build import request as build_request
from trt_engine.verbs.build import run as build_module
from trt_engine.verbs.evaluate.run import resolve_spec
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.curve import read_curve
from trt_engine.verbs.size.output_layout import OutputLayout, output_layout
from trt_engine.verbs.size.preflight import check_model_path, doubling_batches
from trt_engine.verbs.size.stream_capacity import check_settings
from trt_engine.vision.spec import Vision, declared_shapes


@dataclass(frozen=True, slots=True)
class SizeJob:
    """The validated inputs of a run."""

    model: Model
    layout: OutputLayout
    config: SizeConfig
    build: BuildConfig
    runtime: RuntimeConfig
    backend_spec: BackendSpec
    batches: tuple[int, ...]
    """Candidate values of N; the one batch of a static model."""
    dynamic: bool
    command: str
    """Command line that repeats the run."""
    file_stats: tuple[tuple[int, int, int], ...] = ()
    """Inode, size and mtime of the model's files when digested."""
    precision_defaulted: bool = False
    """The precision is the default for GPUs, not set by the user."""
    second: SizeJob | None = None
    """The run of the model of `then`, which comes first; None without one, or with the folder of its run."""
    clips: tuple[VideoSource, ...] = ()
    """The clips of `--video`."""

    def build_config(self, batch: int, largest: int | None = None) -> BuildConfig:
        """Config of a dynamic engine: min 1, opt = max = N; `largest` is the maximum of the scan's engine."""
        build = self.build
        if self.backend_spec.writes_log and build.timing_cache is None:
            build = replace(build, timing_cache=self.layout.timing_cache)
        return replace(build, batch=(1, batch, largest or batch)) if self.dynamic else build

    def plan_build(
        self, batch: int, largest: int | None = None, log_file: Path | None = None
    ) -> build_module.BuildPlan:
        """Build plan of an engine; raises for wrong settings, missing shapes, an existing file."""
        return self._plan_engine(
            self.build_config(batch, largest), self.layout.engine(largest or batch, dynamic=self.dynamic), log_file
        )

    def plan_single_batch_build(self, batch: int, log_file: Path | None = None) -> build_module.BuildPlan:
        """Build plan of an engine for one batch, for a graph whose shapes a build retry made static."""
        config = replace(self.build_config(batch), batch=(batch,) * 3)
        return self._plan_engine(config, self.layout.engine(batch, dynamic=False), log_file)

    def _plan_engine(self, config: BuildConfig, out: Path, log_file: Path | None) -> build_module.BuildPlan:
        if _file_stats(self.model) != self.file_stats:
            raise ModelError(
                f"`{self.model.path}` changed during the run",
                hint="run again when the model no longer changes",
            )
        return build_module.plan(self.model, out=out, config=config, overwrite=self.config.overwrite, log_file=log_file)

    def bench_config(self, batch: int, *, short: bool = False) -> BenchConfig:
        """Benchmark config without transfers; `short` for the scan."""
        duration_s, warmup_s = self.config.duration_s, self.config.warmup_s
        if short:
            duration_s, warmup_s = min(duration_s, max(0.2, duration_s / 10)), min(warmup_s, 0.2)
        return BenchConfig(
            protocol=self.config.protocol,
            batch=batch if self.dynamic else None,
            inputs=self.build.inputs,
            duration_s=duration_s,
            warmup_s=warmup_s,
            transfers=False,
        )


def plan(
    model: Path | str,
    config: SizeConfig,
    build: BuildConfig,
    runtime: RuntimeConfig | None = None,
    *,
    command: str | None = None,
) -> SizeJob:
    """Validate the arguments of a run; raises for wrong settings, an invalid model and missing shapes."""
    build = with_default_device(build)
    check_settings(config)
    clips = open_clips(config.video) if config.video else ()
    if clips:
        config = as_cameras(config, clips)
    if build.batch or build.profiles:
        raise UsageError(
            "`size` sets the batch of its engines: min 1, opt = max = N",
            hint="`--start-batch` and `--max-batch` limit N, `--shapes` sets other dynamic dimensions",
        )
    path = Path(model)
    backend_spec = get_backend(build.backend)
    check_model_path(path)
    given, stamps = build, _file_stats(opened := open_model(path))
    if not opened.signature.inputs:
        raise UsageError(f"`{path}` has no inputs, so no batch to size", hint=f"`trt-engine inspect {quoted(path)}`")
    dynamic = any(opened.signature.batch_axes(spec) for spec in opened.signature.inputs)
    fixed = next((spec.shape[0] for spec in opened.signature.inputs if spec.shape), 1)
    batches = doubling_batches(config) if dynamic else (fixed,)
    layout = output_layout(path, config.out, backend_spec.payload_suffix)
    shapes = build.shapes | build_request.read_given(build.inputs, opened.signature).shapes(build)
    build = replace(build, shapes=shapes | declared_shapes(opened, shapes))
    build, chosen = _default_precision(opened, build)
    words = to_argv(replace(build, max_p99_ms=None))
    if build.optimize_for == "deadline":
        build = replace(build, max_p99_ms=config.deadline_ms)
    if clips:
        found = resolve_spec(path)  # what frames become and outputs mean: refused before anything is built
        if config.then is not None:
            _check_crops(config, config.then, found, build.device)
    made = SizeJob(
        model=opened,
        layout=layout,
        config=config,
        build=build,
        runtime=runtime or RuntimeConfig(allow_fallback=build.allow_fallback),  # the passport has the rest
        backend_spec=backend_spec,
        batches=batches,
        dynamic=dynamic,
        command=command
        or shlex.join(["trt-engine", "size", str(path), *to_argv(replace(config, overwrite=False)), *words]),
        file_stats=stamps,
        precision_defaulted=chosen,
        clips=clips,
    )
    layout.check(overwrite=config.overwrite)
    made.plan_build(batches[0])
    if config.then is None or config.then.is_dir():
        return made
    return replace(made, second=_plan_second(made, config.then, given, runtime))


def _check_crops(config: SizeConfig, then: Path, first: Vision, device: str) -> None:
    """Raises `UsageError` where no crops of clips can be cut, or the second model does not take those of a frame at once."""
    if parse_device(device)[0] != "cpu":
        raise UsageError(f"crops of clips are cut on the CPU, not on `{device}`", hint="leave `--video` out")
    if first.postprocess.task != "detect":
        raise UsageError("the first model finds no boxes to cut crops at", hint="leave `--then` and `--crops` out")
    if then.is_dir():
        largest = max((point.batch for point in read_curve(then / "curve.jsonl")), default=0)
    else:
        resolve_spec(then)
        signature = open_model(then).signature
        largest = config.max_batch if any(signature.batch_axes(spec) for spec in signature.inputs) else 1
    if config.crops > largest:
        hint = f"`--max-batch {config.crops}` where it is sized, and a model with an open batch"
        raise UsageError(f"`{then}` takes {largest} crops at once, `--crops` is {config.crops}", hint=hint)


def _plan_second(first: SizeJob, model: Path, build: BuildConfig, runtime: RuntimeConfig | None) -> SizeJob:
    """The run of the second model: measured as the first one, into the folder `then` of its run."""
    config = first.config
    own = SizeConfig(
        deadline_ms=config.deadline_ms, contexts=config.contexts, max_batch=config.max_batch, start_batch=config.start_batch,
        duration_s=config.duration_s, warmup_s=config.warmup_s, memory_limit=config.memory_limit, protocol=config.protocol,
        overwrite=config.overwrite, out=first.layout.folder / "then",
    )  # fmt: skip
    return replace(plan(model, own, replace(build, shapes={}, inputs=None), runtime), command=first.command)


def open_clips(given: Sequence[Path | str] | Path | str) -> tuple[VideoSource, ...]:
    """What the clips state. Raises `UsageError` for a source that is not a clip, `SetupError` without PyAV."""
    from trt_engine.video.decoder import describe_clip, find_clips, is_live, shown_address

    found: list[VideoSource] = []
    for source in [given] if isinstance(given, Path | str) else given:
        if is_live(str(source)):
            raise UsageError(
                f"`{shown_address(str(source))}` is one camera, and many are to be tried",
                hint="record a clip of it: `ffmpeg -rtsp_transport tcp -i URL -t 20 -c copy clip.mp4`",
            )
        found += [describe_clip(clip, first_frame=True) for clip in find_clips(str(source))]
    return tuple(found)


def as_cameras(config: SizeConfig, clips: Sequence[VideoSource]) -> SizeConfig:
    """The settings for cameras like these clips: their mean rate, and one frame interval where no deadline is given."""
    fastest = max(clip.fps for clip in clips)
    fps = sum(clip.fps for clip in clips) / len(clips)
    return replace(config, fps=fps, deadline_ms=config.deadline_ms or 1e3 / fastest)


def accepts_batch(engine: Engine, batch: int) -> bool:
    """Whether a profile of the engine includes the batch: a build retry may have made its shapes static."""
    return not engine.passport.profiles or any(
        all(
            span.min[axis] <= batch <= span.max[axis]
            for spec in engine.signature.inputs
            if (span := profile.ranges.get(spec.name)) is not None
            for axis in engine.signature.batch_axes(spec) or range(len(span.min))[:1]
        )
        for profile in engine.passport.profiles
    )


def _default_precision(model: Model, build: BuildConfig) -> tuple[BuildConfig, bool]:
    """Default to FP16 for an FP32 graph on a GPU; the config, and whether the default was applied."""
    if build.precision is not None or parse_device(build.device)[0] != "cuda":
        return build, False
    if main_precision(model.graph) != "fp32":
        return build, False
    return replace(build, precision="fp16"), True


def _file_stats(model: Model) -> tuple[tuple[int, int, int], ...]:
    """Inode, size and mtime of the model's files: unchanged means the same digest."""
    with os_errors(model.path, "read"):
        found = [path.stat() for path in (model.path, *(item.path for item in model.external))]
    return tuple((item.st_ino, item.st_size, item.st_mtime_ns) for item in found)

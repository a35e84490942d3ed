"""`profile`: where the time of an engine goes, by the best available profiler, and what to try next.

A plain measurement without a profiler comes first: its figures are the reference for everything else. Then the
profilers in order: Nsight Systems, CUPTI, PyTorch's profiler, the backend's layer times, the host's clock. One passed
over has its reason in the report. What was measured under a profiler is never mixed into the benchmark's figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.atomic_io import as_path
from trt_engine.backend import list_backends, runtime_backend
from trt_engine.backend import with_default_device as on_device
from trt_engine.benchmark.bench_inputs import batch_of
from trt_engine.config.bench import BenchConfig, ProfileConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.errors import MemoryExhausted, ProfileError, SetupError, ShapeError, UsageError
from trt_engine.profiling.instruments import nsight_tools
from trt_engine.profiling.instruments.capture import subscribe_nvtx
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.profile import ProfileReport
from trt_engine.reporting.report import REPORT_FILES, check_overwrite
from trt_engine.run_folder import PROFILE, RECORDS
from trt_engine.runtime.feeds import shapes_of
from trt_engine.tensors import Shape
from trt_engine.verbs.bench.run import LOG, open_or_build, output_folder
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.load import build_for_runtime, merge_run_settings
from trt_engine.verbs.profile.profile_run import TIMELINE, ProfileRun

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import ProfileSettings

log = logging.getLogger(__name__)

_DURATION_S, _WARMUP_S = 2.0, 0.5
"""Defaults of the measurement without a profiler."""


@public_function
@takes_model("engine")
def profile(
    engine: Engine | AnyModel,
    *,
    config: BenchConfig | None = None,
    profile: ProfileConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    command: str = "",
    progress: ProgressOption = False,
    **values: Unpack[ProfileSettings],
) -> ProfileReport:
    """Profile an engine (or an `.onnx` model, built into the store first): time breakdown, layers, kernels, bottleneck.

    `values` are settings of `ProfileConfig`, `BenchConfig` (`batch=`, `shapes=`, `inputs=`), `RuntimeConfig`
    (`device=`) and, for a model, `BuildConfig`. `inferences` are profiled after `warmup`; `profiler` selects one
    profiler; `ncu` measures the counters of that many kernels; `peaks` measures the device's peaks if not cached.
    Everything goes to the folder `out`, by default a new one under `runs/`. Out of memory halves the batch, with a
    warning.

    Raises `UsageError` where the folder holds a profile (`overwrite` replaces it), `SetupError` if the profiler is not
    available, `MemoryExhausted` where the batch cannot be halved, `Interrupted` after Ctrl-C: its `partial` is the
    report of the results so far, which is written too.
    """
    profile, config, runtime, build = merge_run_settings(
        values, runtime, build, profile or ProfileConfig(), config or BenchConfig()
    )
    defaults = {"duration_s": _DURATION_S, "warmup_s": _WARMUP_S}
    config = dataclasses.replace(
        config, **{name: value for name, value in defaults.items() if getattr(config, name) is None}
    )
    source = engine.path if isinstance(engine, Engine) else as_path(engine, "`engine`")
    folder = profile.out or default_run_folder(source)
    output_files(folder, overwrite=profile.overwrite)
    if profile.profiler in (None, "cupti") and _runs_in_process(on_disk(engine), runtime, build, profile.profiler):
        subscribe_nvtx()  # before a library looks for who listens: it looks once
    said: list[str] = []
    with output_folder(folder):
        while True:
            opened: Engine | None = None
            work: ProfileRun | None = None
            try:
                opened = open_or_build(on_disk(engine), config, runtime, build, values)
                opened.verify()
                work = ProfileRun(opened, config, profile, runtime, folder, said)
                if is_onnx_model(on_disk(engine)):
                    work.typed = work.model = str(source)
                work.settings = {**build.options, **runtime.options}
                return work.run(command)
            except (MemoryExhausted, MemoryError) as error:
                reason = error.message if isinstance(error, MemoryExhausted) else "this machine has no more"
                smaller = _halve_batch(opened, config)
                if smaller is None:
                    if isinstance(error, MemoryExhausted):
                        raise
                    raise MemoryExhausted(f"out of memory: {reason}", hint="a smaller `--batch`") from error
                config, batch, half = smaller
                said.append(f"out of memory at batch {batch} ({reason}): profiled at {half}")
                log.warning("%s", said[-1])
                work = None  # its feeds go before others are made


def _runs_in_process(
    engine: Engine | Path | str, runtime: RuntimeConfig, build: BuildConfig, profiler: str | None
) -> bool:
    """Whether this process is what a profiler will watch: not for engines on the CPU or in a separate process."""
    if is_onnx_model(engine):
        name, device = build.backend, default_device(runtime, build)
    else:
        passport = (engine if isinstance(engine, Engine) else Engine.open(engine)).passport
        name, device = passport.backend, runtime.device or passport.device
    backend_spec = list_backends().get(name)
    if backend_spec is None or parse_device(device)[0] == "cpu":
        return False
    if (runner := runtime_backend(backend_spec)) is backend_spec and runner.provides("measure"):
        return False
    if profiler is None:
        with contextlib.suppress(SetupError):
            return not nsight_tools.find_tool("nsys")
    return True


def default_device(runtime: RuntimeConfig, build: BuildConfig) -> str:
    """The device a model is built for, and profiled on: the one named, else the first of the backend's."""
    return on_device(build_for_runtime(build, runtime)).device


def output_files(folder: Path, *, overwrite: bool) -> tuple[Path, ...]:
    """The files a profile writes into that folder; `UsageError` where a profile is in it and may not be overwritten."""
    for name in (PROFILE, TIMELINE):
        if (folder / name).exists() and not overwrite:
            raise UsageError(
                f"`{folder / name}` exists", hint="`--overwrite` overwrites it, or name another folder with `-o`"
            )
    check_overwrite(folder, overwrite=overwrite)
    return tuple(folder / name for name in (PROFILE, TIMELINE, RECORDS, LOG, *REPORT_FILES))


def default_run_folder(source: Path) -> Path:
    """Default folder of a profile: `runs/YYYYMMDD_HHMMSS_NAME_profile`."""
    name = re.sub(r"[^\w.-]", "_", source.name.partition(".")[0])[:100] or "engine"
    stamp = time.strftime("%Y%m%d_%H%M%S")
    found, number = Path("runs") / f"{stamp}_{name}_profile", 1
    while found.exists():
        number += 1
        found = Path("runs") / f"{stamp}_{name}_profile_{number}"
    return found


def _halve_batch(engine: Engine | None, config: BenchConfig) -> tuple[BenchConfig, int, int] | None:
    """The settings with half the batch, and both; None where the batch cannot be made smaller."""
    if engine is None:  # a model that could not be built
        if config.batch is None or config.batch < 2:
            return None
        half = config.batch // 2
        shapes = {
            name: (half, *shape[1:]) if shape and shape[0] == config.batch else shape
            for name, shape in config.shapes.items()
        }
        return dataclasses.replace(config, batch=half, shapes=shapes), config.batch, half
    if config.inputs is not None or not engine.signature.batch_axis:
        return None
    given = _requested_shapes(engine, config)
    if given is None:
        return None
    batch = batch_of(engine.signature, given)
    half = batch // 2
    if half < 1:
        return None
    smaller = {name: (half, *shape[1:]) if shape and shape[0] == batch else shape for name, shape in given.items()}
    changed = dataclasses.replace(config, batch=half, shapes=smaller)
    return None if _requested_shapes(engine, changed) is None else (changed, batch, half)


def _requested_shapes(engine: Engine, config: BenchConfig) -> dict[str, Shape] | None:
    """The requested shapes, without making the inputs, which may not fit; None for none."""
    for ranges in engine.passport.profiles or (None,):
        with contextlib.suppress(ProfileError, ShapeError):
            return shapes_of(engine.signature, ranges, batch=config.batch, overrides=config.shapes)
    return None

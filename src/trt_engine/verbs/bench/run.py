"""`bench`: measure an engine (or a model, built first) under a named protocol and write the record."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.atomic_io import ensure_folder, write_atomic
from trt_engine.backend import BackendSpec, get_backend
from trt_engine.benchmark.bench_inputs import feeds_for
from trt_engine.benchmark.closed_loop import measure
from trt_engine.benchmark.isolated import measure_isolated
from trt_engine.benchmark.stability import advice
from trt_engine.benchmark.trtexec_style_log import render_log
from trt_engine.config.bench import BenchConfig, BenchRunConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.errors import Interrupted, PrecisionError, UnstableError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.logs import running_command
from trt_engine.precision.precision_check import check_passport
from trt_engine.progress import ProgressOption, progress_counter
from trt_engine.public_function import public_function
from trt_engine.records.base import append_record
from trt_engine.records.bench import BenchRecord
from trt_engine.run_folder import RECORDS
from trt_engine.runtime.feeds import read_feeds
from trt_engine.tensors import Shape
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.load import build_for_runtime, check_loadable, merge_run_settings
from trt_engine.vision.spec import check_data_exists

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import BenchRunSettings

LOG = "bench.log"
"""What `out` holds: every measurement, one a line, and the text log of the last one."""

logger = logging.getLogger(__name__)


@public_function
@takes_model("engine")
def bench(
    engine: Engine | AnyModel,
    *,
    config: BenchConfig | None = None,
    run: BenchRunConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    progress: ProgressOption = False,
    **values: Unpack[BenchRunSettings],
) -> BenchRecord:
    """Measure an engine, or the path of one, or of an `.onnx` model, which is built into the store first.

    `values` are settings of `BenchConfig`, `BenchRunConfig`, `RuntimeConfig` and (for a model) `BuildConfig`. `isolate`
    measures in a separate process, with at most `memory_limit` bytes. The record goes to `out/records.jsonl` and its text to
    `out/bench.log`, or to the file `log`, before anything is raised: `UnstableError` for an unstable measurement with
    `strict=True`, `Interrupted` (its `partial` is the incomplete record) after Ctrl-C. With `progress=True` what is done
    goes to stderr, or to a function that takes a `te.Progress`. `UsageError` for an unknown setting, or an engine of another
    backend than `backend`.
    """
    config, run, runtime, build = merge_run_settings(
        values, runtime, build, config or BenchConfig(), run or BenchRunConfig()
    )
    with output_folder(run.out):
        opened = open_or_build(on_disk(engine), config, runtime, build, values)
        opened.verify()
        backend_spec = check_loadable(opened, runtime)
        try:
            record = _measure_engine(backend_spec, opened, config, runtime, run)
        except Interrupted as stop:
            if isinstance(stop.partial, BenchRecord):
                write_record(_with_logged(stop.partial, run), run.out, run.log)
            raise
        record = _with_logged(record, run)
        write_record(record, run.out, run.log)
    for text in record.warnings:
        logger.warning("%s", text)
    for reason in record.instability:
        logger.warning("the measurement is not stable: %s", reason)
    if record.instability:
        logger.warning("for a stable measurement: %s", advice(record))
    if config.strict and not record.stable:
        raise UnstableError(f"the measurement is not stable: {'; '.join(record.instability)}", hint=advice(record))
    return record


def _with_logged(record: BenchRecord, run: BenchRunConfig) -> BenchRecord:
    """The record that is written, with all warnings of the command."""
    running = running_command()
    if running is None or run.out is None:
        return record
    return dataclasses.replace(record, warnings=running.with_logged(record.warnings))


@contextlib.contextmanager
def output_folder(folder: Path | None) -> Iterator[None]:
    """Create and check the folder before minutes are spent; remove what was created and stays empty."""
    made = [] if folder is None else [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        if folder is not None:
            ensure_folder(folder)
        yield
    finally:
        for place in made:
            with contextlib.suppress(OSError):  # not empty
                place.rmdir()


def open_or_build(
    engine: Engine | Path | str, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig, named: Container[str]
) -> Engine:
    """The engine that is meant: itself, the one at that path, or a bare model's, from the store or built into it.

    `named` are the explicit settings: build settings that cannot apply to a built engine are refused or warned of.
    """
    if is_onnx_model(engine):
        return _build_engine(Path(engine), config, runtime, build)
    opened = engine if isinstance(engine, Engine) else Engine.open(engine)
    if "backend" in named and build.backend != opened.passport.backend and not get_backend(build.backend).selects:
        raise UsageError(
            f"`{opened.path}` was built by the backend `{opened.passport.backend}`, not `{build.backend}`",
            hint="leave `--backend` out, or give the model to build it again",
        )
    check_data_exists(build)
    if build.calib_data is not None:
        logger.warning("an engine is built already: `--calib-data %s` is not used", build.calib_data)
    if build.precision is not None:
        _require_precision(opened, build.precision, strict="precision" in named)
    return opened


def planned_inputs(
    engine: Engine | Path | str, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig, named: Container[str]
) -> tuple[str, dict[str, Shape]]:
    """The device that an engine would be measured on and the shapes it would be fed, with all checks before measuring."""
    opened = open_or_build(engine, config, runtime, build, named)
    check_loadable(opened, runtime)
    feeds, _ = feeds_for(opened, config)
    return runtime.device or opened.passport.device, {name: tuple(value.shape) for name, value in feeds.items()}


def _require_precision(engine: Engine, requested: str, *, strict: bool) -> None:
    """`PrecisionError` for an engine that is not in the requested precision; a warning where it is not strict."""
    if not strict:
        logger.warning("an engine keeps the precision it was built with: `%s` changes nothing", requested)
        return
    proof = check_passport(requested, engine.passport)
    if not proof.conclusive:
        logger.warning("the precision contract could not be proved: %s", proof.remark)
    if not proof.satisfied:
        model = shlex.quote(engine.passport.model.file)
        raise PrecisionError(
            f"`{engine.path}`: {proof.describe()}; an engine keeps the precision it was built with",
            hint=f"leave `--precision` out, or build another: `trt-engine build {model} --precision {requested}`",
        )


def _build_engine(path: Path, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig) -> Engine:
    """The engine of a bare model, from the store or built into it; its profile reaches as far as the measurement."""
    from trt_engine.verbs.build.request import find_open_batch
    from trt_engine.verbs.build.run import build_for_inputs

    logger.info("`%s` is a model: its engine is built into the store first, or taken from there", path)
    built_so = bench_build_config(path, config, runtime, build)
    if (name := find_open_batch(open_model(path).signature, built_so)) is not None:
        logger.warning("the batch of `%s` is open and none was given: it is 1; `--batch 8` measures another", name)
    return build_for_inputs(path, built_so, config.inputs)


def bench_build_config(path: Path, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig) -> BuildConfig:
    """Build settings of a bare model's engine for this measurement."""
    if not build.profiles and build.batch is None and not build.shapes:
        shapes = dict(config.shapes)
        if config.inputs is not None:
            given = read_feeds(config.inputs, open_model(path).signature, partial=True)
            shapes |= {name: tuple(int(size) for size in value.shape) for name, value in given.items()}
        batch = None if config.batch is None else (1, config.batch, config.batch)
        build = dataclasses.replace(build, shapes=shapes, batch=batch)
    return build_for_runtime(build, runtime)


def _measure_engine(
    spec: BackendSpec, engine: Engine, config: BenchConfig, runtime: RuntimeConfig, run: BenchRunConfig
) -> BenchRecord:
    if spec.provides("measure"):  # it is measured in a separate process
        record: BenchRecord = spec.load_function("measure")(engine, config, runtime)
        return record
    on_progress = progress_counter("measuring", "s")
    if run.isolate:
        return measure_isolated(engine, config, runtime, memory_limit=run.memory_limit, on_progress=on_progress)
    session = spec.load_component("runtime")().load(engine, runtime)
    try:
        return measure(session, engine, config, on_progress=on_progress)
    finally:
        session.close()


def write_record(record: BenchRecord, out: Path | None, log: Path | None = None) -> None:
    """The record first, then the text made from it."""
    if out is not None:
        append_record(out / RECORDS, record)
        write_atomic(out / LOG, render_log(record))
    if log is not None:
        write_atomic(log, render_log(record))

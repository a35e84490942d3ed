"""`bench`: an engine (or a model, built first) measured under a named protocol, and the record kept."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.api.loading import admit, runtime_config
from trt_engine.api.preparing import check_data
from trt_engine.backend import Backend
from trt_engine.benchmark.child import measure_in_child
from trt_engine.benchmark.log import render
from trt_engine.benchmark.loop import Progress, measure
from trt_engine.config import BenchConfig, BuildConfig, RuntimeConfig, from_values, settings
from trt_engine.engine import Engine, is_bare_model
from trt_engine.errors import Interrupted, PrecisionError, UnstableError, UsageError
from trt_engine.files import ensure_folder, write_whole
from trt_engine.graph.load import open_model
from trt_engine.precision.contract import prove_passport
from trt_engine.records import BenchRecord, append
from trt_engine.runfiles import RECORDS
from trt_engine.runtime.feeds import read_feeds
from trt_engine.tensors import closest

__all__ = ["LOG", "RECORDS", "bench", "build_config", "keep", "kept_if_used", "sealed", "settled"]

LOG = "bench.log"
"""What `out` holds: every measurement, one a line, and the text log of the last one."""

logger = logging.getLogger(__name__)


def bench(
    engine: Engine | Path | str,
    *,
    config: BenchConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    isolate: bool = False,
    memory_limit: int | None = None,
    log: Path | str | None = None,
    out: Path | str | None = None,
    on_progress: Progress | None = None,
    **values: Any,
) -> BenchRecord:
    """Measure an engine, or the path of one, or of an `.onnx` model, which is built into the store first.

    `values` are settings of `BenchConfig`, `RuntimeConfig` and (for a model) `BuildConfig` by name. `isolate` measures in a
    process of its own, with at most `memory_limit` bytes. The record goes to `out/records.jsonl` and its text to
    `out/bench.log`, or to the file `log`, before anything is raised: `UnstableError` for an unstable measurement with
    `strict=True`, `Interrupted` (its `partial` is the incomplete record) after Ctrl-C.
    """
    config, runtime, build, named = settled(config, runtime, build, values)
    with kept_if_used(None if out is None else Path(out)):
        return _bench(engine, config, runtime, build, named, isolate, memory_limit, log, out, on_progress)


@contextlib.contextmanager
def kept_if_used(folder: Path | None) -> Iterator[None]:
    """The folder, tried before minutes are spent; what of it was made and stays empty is taken away again."""
    made = [] if folder is None else [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        if folder is not None:
            ensure_folder(folder)
        yield
    finally:
        for place in made:
            with contextlib.suppress(OSError):  # something lies in it
                place.rmdir()


def _bench(
    engine: Engine | Path | str,
    config: BenchConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    named: set[str],
    isolate: bool,
    memory_limit: int | None,
    log: Path | str | None,
    out: Path | str | None,
    on_progress: Progress | None,
) -> BenchRecord:
    opened = sealed(engine, config, runtime, build, named)
    opened.verify()
    card = admit(opened, runtime)
    try:
        record = _measured(card, opened, config, runtime, isolate, memory_limit, on_progress)
    except Interrupted as stop:
        if isinstance(stop.partial, BenchRecord):
            keep(stop.partial, log, out)
        raise
    keep(record, log, out)
    for text in record.warnings:
        logger.warning("%s", text)
    for reason in record.instability:
        logger.warning("the measurement is not stable: %s", reason)
    if config.strict and not record.stable:
        raise UnstableError(
            f"the measurement is not stable: {'; '.join(record.instability)}",
            hint="measure longer (`--duration 30s`) on a quiet machine",
        )
    return record


def sealed(
    engine: Engine | Path | str, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig, named: set[str]
) -> Engine:
    """The engine that is meant: itself, the one at that path, or a bare model's, from the store or built into it.

    `named` are the settings somebody gave: those that can change no engine that is built are refused, or said.
    """
    if is_bare_model(engine):
        return _built(Path(engine), config, runtime, build)  # type: ignore[arg-type]
    opened = engine if isinstance(engine, Engine) else Engine.open(engine)
    if "backend" in named and build.backend != opened.passport.backend:
        raise UsageError(
            f"`{opened.path}` was built by the backend `{opened.passport.backend}`, not `{build.backend}`",
            hint="leave `--backend` out, or give the model to build it again",
        )
    check_data(build.calibrate, build.preprocess)
    if build.calibrate is not None:
        logger.warning("an engine is built already: `--calibrate %s` is not used", build.calibrate)
    if build.precision is not None:
        _keep_precision(opened, build.precision, is_contract="precision" in named)
    return opened


def _keep_precision(engine: Engine, asked: str, *, is_contract: bool) -> None:
    """`PrecisionError` for an engine that is not what somebody asked for; a word, where it was not meant as a contract."""
    if not is_contract:
        logger.warning("an engine keeps the precision it was built with: `%s` changes nothing", asked)
        return
    proof = prove_passport(asked, engine.passport)
    if not proof.judged:
        logger.warning("the precision contract could not be proved: %s", proof.remark)
    if not proof.kept:
        model = shlex.quote(engine.passport.model.file)
        raise PrecisionError(
            f"`{engine.path}`: {proof.describe()}; an engine keeps the precision it was built with",
            hint=f"leave `--precision` out, or build another: `trt-engine build {model} --precision {asked}`",
        )


def settled(
    config: BenchConfig | None, runtime: RuntimeConfig | None, build: BuildConfig | None, values: dict[str, Any]
) -> tuple[BenchConfig, RuntimeConfig, BuildConfig, set[str]]:
    """The three configs with the named settings in place; what is common to running and building goes to both."""
    of_bench, of_runtime, of_build = ({item.name for item in settings(kind)} for kind in _KINDS)
    for name in values:
        if name not in of_bench | of_runtime | of_build:
            raise UsageError(
                f"there is no setting `{name}`", hint=closest(name, sorted(of_bench | of_runtime | of_build))
            )
    for_bench = {name: value for name, value in values.items() if name in of_bench}
    for_runtime = {name: value for name, value in values.items() if name in of_runtime - of_bench}
    for_build = {name: value for name, value in values.items() if name in of_build - of_bench}
    return (
        _changed(config or BenchConfig(), for_bench),
        runtime_config(runtime, for_runtime),
        _changed(build or BuildConfig(), for_build),
        set(values),
    )


_KINDS: tuple[type, type, type] = (BenchConfig, RuntimeConfig, BuildConfig)


def _changed(config: Any, values: dict[str, Any]) -> Any:
    made = from_values(type(config), values)
    return dataclasses.replace(config, **{name: getattr(made, name) for name in values})


def _built(path: Path, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig) -> Engine:
    """The engine of a bare model, from the store or built into it; its profile reaches as far as the measurement."""
    from trt_engine.api.building import build as build_engine

    logger.info("`%s` is a model: its engine is built into the store first, or taken from there", path)
    return build_engine(path, config=build_config(path, config, runtime, build))


def build_config(path: Path, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig) -> BuildConfig:
    """How the engine of a bare model is built to be measured so."""
    if not build.profiles and build.batch is None and not build.shapes:
        shapes = dict(config.shapes)
        if config.inputs is not None:
            feeds = read_feeds(config.inputs, open_model(path).signature)
            shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
        batch = None if config.batch is None else (1, config.batch, config.batch)
        build = dataclasses.replace(build, shapes=shapes, batch=batch)
    if runtime.device is not None:
        build = dataclasses.replace(build, device=runtime.device)
    if runtime.providers:
        build = dataclasses.replace(build, providers=runtime.providers)
    return build


def _measured(
    card: Backend,
    engine: Engine,
    config: BenchConfig,
    runtime: RuntimeConfig,
    isolate: bool,
    memory_limit: int | None,
    on_progress: Progress | None,
) -> BenchRecord:
    if card.has("measure"):  # it measures in a process of its own
        record: BenchRecord = card.call("measure")(engine, config, runtime)
        return record
    if isolate:
        return measure_in_child(engine, config, runtime, memory_limit=memory_limit, on_progress=on_progress)
    session = card.half("runtime")().load(engine, runtime)
    try:
        return measure(session, engine, config, on_progress=on_progress)
    finally:
        session.close()


def keep(record: BenchRecord, log: Path | str | None, out: Path | str | None) -> None:
    """The record first, then the text made from it."""
    if out is not None:
        append(Path(out) / RECORDS, record)
        write_whole(Path(out) / LOG, render(record))
    if log is not None:
        write_whole(Path(log), render(record))

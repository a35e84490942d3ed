"""An engine that was built, against the model it was built of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trt_engine.api.loading import load
from trt_engine.api.pictures import inputs_of
from trt_engine.api.preparing import Prepared
from trt_engine.backend import Backend, backend
from trt_engine.config import BuildConfig, Profile, from_values
from trt_engine.engine import Engine, OutputError, Parity
from trt_engine.equivalence.parity import measure_parity, parity_feeds
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.errors import AccuracyError, BuildError, MemoryExhausted, TrtEngineError
from trt_engine.model import Model
from trt_engine.precision.samples import open_samples
from trt_engine.tensors import Tensors

__all__ = ["computes_in_tf32", "own_settings", "prove"]

log = logging.getLogger(__package__)

_ROWS = 8
"""Of calibration data: as many as a profile takes up to this."""


def prove(
    engine: Engine, given: Model, config: BuildConfig, tolerance: Tolerance, prepared: Prepared, built: Model
) -> tuple[Parity | None, str | None]:
    """Parity with the model, or why it could not be judged; `AccuracyError` when the engine is wrong.

    It is judged against the graph that was built: a cast or quantised copy, where the model was not what was asked for. How
    far it lies from the model itself (`given`) is measured too. `built` is what the builder was given in the end, where the
    ladder changed the graph.
    """
    model, card = prepared.model, backend(config.backend)
    options: dict[str, str] | str = card.call("proving")(built.path, config) if card.has("proving") else {}
    if isinstance(options, str):
        return _not_judged(options)
    with load(engine, verify=False, allow_fallback=config.allow_fallback, options=options) as runner:

        def run(feeds: Tensors) -> Mapping[str, Any]:
            try:
                return runner.infer(feeds)
            except MemoryExhausted:
                raise
            except TrtEngineError as error:
                raise _EngineFailed(error) from error

        try:
            feeds, described = _feeds(given, model, engine, config, prepared)
            found = measure_parity(model.path, model.signature, run, feeds, described, tolerance)
            if prepared.steps:
                found = replace(
                    found,
                    reference=f"{found.reference}, of the model {prepared.steps[0].partition(':')[0]}",
                    given=_from_given(given, model, feeds, described, tolerance, run),
                )
        except MemoryExhausted:
            raise
        except _EngineFailed as failed:
            raise BuildError(
                f"the engine was built and does not run: {failed.error.message}",
                hint=failed.error.hint or "`--no-parity` builds without trying it",
            ) from failed.error
        except TrtEngineError as error:  # the reference cannot run it: nothing to compare with
            return _not_judged(f"plain ONNX Runtime does not run this model here ({error.message})")
    for name, apart in found.outputs.items():
        if (objection := tolerance.objection(apart, found.sensitivity.get(name))) is not None:
            milder = _milder(card, engine)
            raise AccuracyError(
                f"output `{name}` of the engine differs from plain ONNX Runtime: {objection} (largest difference "
                f"{apart.max_abs:.3g}, cosine {apart.cosine:.4f})",
                hint="`--parity-rtol` allows more" + (f", `-O {milder}` rewrites less" if milder else ""),
            )
    largest = max((item.max_rel for item in found.outputs.values()), default=0.0)
    log.info("parity with plain ONNX Runtime: largest difference %.2g of the channel's scale", largest)
    return found, None


def _not_judged(why: str) -> tuple[None, str]:
    note = f"parity was not judged: {why}"
    log.warning("%s", note)
    return None, note


def _feeds(given: Model, model: Model, engine: Engine, config: BuildConfig, prepared: Prepared) -> tuple[Tensors, str]:
    """Rows of the data that the model was calibrated with, where there are some that the profile takes; else random ones."""
    card, profile = backend(config.backend), engine.passport.profiles[0]
    values = _sizes(card, config)
    if prepared.steps and config.calibrate not in (None, "random") and not values:
        rows = min([_ROWS, *(span.max[0] for span in profile.ranges.values() if span.max)])
        try:
            data = inputs_of(given, config.calibrate, config.preprocess).data
            batch = next(iter(open_samples(data, model.signature, batch=rows, limit=rows)), None)
            if batch is not None:
                profile.check(batch.feeds)
                return batch.feeds, f"{batch.rows} rows of {config.calibrate}"
        except TrtEngineError as error:
            log.info("parity is measured on random inputs, not on the calibration data: %s", error.message)
    graph = engine.path if card.payload_suffix == ".onnx" else None
    return parity_feeds(model.path, model.signature, profile, values, engine=graph)


def _from_given(
    given: Model, model: Model, feeds: Tensors, described: str, tolerance: Tolerance, run: Callable[[Tensors], Any]
) -> dict[str, OutputError]:
    """How far the engine of a cast or quantised `model` lies from the one that was given, on the same input; nothing where
    plain ONNX Runtime does not run that, or where it takes other inputs."""
    if [(spec.name, spec.dtype) for spec in given.signature] != [(spec.name, spec.dtype) for spec in model.signature]:
        return {}
    try:
        return measure_parity(given.path, given.signature, run, feeds, described, tolerance).outputs
    except MemoryExhausted:
        raise
    except TrtEngineError as error:
        log.debug("the engine was not compared with the model as it was given: %s", error.message)
        return {}


def computes_in_tf32(engine: Engine) -> bool:
    return "tf32" in engine.passport.precision.found or engine.passport.build.notes.get("tf32") == "on"


def _sizes(card: Backend, config: BuildConfig) -> dict[str, tuple[int, ...]]:
    """The usual values of inputs that hold sizes, by a backend's setting of that name: drawn numbers are no sizes."""
    if not card.has("options"):
        return {}
    given: Profile | None = getattr(from_values(card.half("options"), own_settings(card, config)), "shape_values", None)
    return {name: span.opt for name, span in given.ranges.items()} if given is not None else {}


def own_settings(card: Backend, config: BuildConfig) -> dict[str, str]:
    """The `-O` of the backend itself, without those of the providers under it."""
    return {name: value for name, value in config.options.items() if not (card.providers and "." in name)}


def _milder(card: Backend, engine: Engine) -> str | None:
    """The `-O` of a build that rewrites less than this engine's did; None when there is none."""
    notes = engine.passport.build.notes
    had = [
        at
        for at, setting in enumerate(card.milder)
        if notes.get(setting.partition("=")[0]) == setting.partition("=")[2]
    ]
    return next(iter(card.milder[had[0] + 1 if had else 0 :]), None)


class _EngineFailed(Exception):
    """The engine, not the reference, raised."""

    def __init__(self, error: TrtEngineError) -> None:
        super().__init__(error.message)
        self.error = error

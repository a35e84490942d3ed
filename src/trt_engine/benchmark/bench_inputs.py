"""The arrays that a measurement feeds: random, from files, resident on the device."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from trt_engine.config.bench import BenchConfig
from trt_engine.config.profiles import select_profile
from trt_engine.engine import Engine
from trt_engine.errors import ProfileError, UsageError
from trt_engine.runtime.feeds import (
    at_shapes,
    complete_shapes,
    describe_inputs,
    random_feeds,
    read_feeds,
    set_values,
    shapes_of,
)
from trt_engine.tensors import Shape, Signature, Tensors, format_shape


def feeds_for(engine: Engine, config: BenchConfig) -> tuple[dict[str, Any], str]:
    """The inputs to measure with, and their origin: those of the file, its rows repeated for a larger batch, and random ones
    for the rest. Raises `ProfileError` when no profile contains them."""
    signature = engine.signature
    given: dict[str, Any] = {} if config.inputs is None else read_feeds(config.inputs, signature, partial=True)
    for name, shape in config.shapes.items():
        signature.input(name)
        if name in given and given[name].shape != shape:
            found = format_shape(given[name].shape)
            raise UsageError(
                f"`--shapes` sets `{name}` to {format_shape(shape)}, `{config.inputs}` has {found}",
                hint="leave out `--shapes`: the file has the shapes",
            )
    shapes = _resolve_shapes(engine, config, given)
    values = at_shapes(signature, given, shapes)
    feeds = random_feeds(set_values(signature, given), shapes, config.seed, values)
    return feeds, describe_inputs(signature, config.inputs, values, f"seeded random, seed {config.seed}")


def _resolve_shapes(engine: Engine, config: BenchConfig, given: Tensors) -> dict[str, Shape]:
    """The requested shapes, completed by the first profile that contains them."""
    refused: ProfileError | None = None
    for index, profile in enumerate(engine.passport.profiles or (None,)):
        try:
            if not given:
                return shapes_of(engine.signature, profile, batch=config.batch, overrides=config.shapes)
            usual = shapes_of(engine.signature, profile, overrides=config.shapes)
            shapes = complete_shapes(engine.signature, usual, given, config.batch)
            if profile is not None:
                profile.check({name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}, index)
            return shapes
        except ProfileError as error:
            refused = refused or error
    raise refused or UsageError("the engine has no inputs to shape", hint="`trt-engine inspect`")


def profile_index(profiles: tuple[Any, ...], feeds: Tensors) -> int:
    """Index of the first profile that contains the feeds. Raises `ProfileError`."""
    return select_profile(profiles, lambda profile, index: profile.check(feeds, index))


def batch_of(signature: Signature, shapes: Mapping[str, Shape]) -> int:
    """Rows per query: the dynamic first dimension, or the one all inputs share, else 1."""
    if signature.batch_axis:
        return shapes[signature.inputs[0].name][0]
    moving = {shapes[spec.name][axis] for spec in signature.inputs for axis in signature.batch_axes(spec)}
    if len(moving) == 1:
        return moving.pop()
    first = {shapes[spec.name][0] if len(spec.shape) > 1 else 1 for spec in signature.inputs}
    return first.pop() if len(first) == 1 else 1

"""The arrays that a measurement feeds: random, from files, resident on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_engine.config.bench import BenchConfig
from trt_engine.config.profiles import select_profile
from trt_engine.engine import Engine
from trt_engine.errors import ProfileError, UsageError
from trt_engine.runtime.feeds import random_feeds, read_feeds, shapes_of
from trt_engine.tensors import Shape, Signature, Tensors, format_shape


def feeds_for(engine: Engine, config: BenchConfig) -> tuple[dict[str, Any], str]:
    """The inputs to measure with, and their origin. Raises `ProfileError` when no profile contains them."""
    signature, profiles = engine.signature, engine.passport.profiles
    if config.inputs is not None:
        feeds = read_feeds(config.inputs, signature)
        shapes = {name: tuple(value.shape) for name, value in feeds.items()}
        for name, shape in config.shapes.items():
            signature.input(name)
            if shapes[name] != shape:
                raise UsageError(
                    f"`--shapes` sets `{name}` to {format_shape(shape)}, `{config.inputs}` has {format_shape(shapes[name])}",
                    hint="leave out `--shapes`: the file has the shapes",
                )
        if config.batch is not None and config.batch != (found := batch_of(signature, shapes)):
            raise UsageError(
                f"`--batch` is {config.batch}, `{config.inputs}` has {found} rows", hint="leave out `--batch`"
            )
        profile_index(profiles, feeds)
        return feeds, config.inputs.name
    shapes = _resolve_shapes(engine, config)
    return random_feeds(signature, shapes, config.seed), f"seeded random, seed {config.seed}"


def _resolve_shapes(engine: Engine, config: BenchConfig) -> dict[str, Shape]:
    """The requested shapes, completed by the first profile that contains them."""
    refused: ProfileError | None = None
    for profile in engine.passport.profiles or (None,):
        try:
            return shapes_of(engine.signature, profile, batch=config.batch, overrides=config.shapes)
        except ProfileError as error:
            refused = refused or error
    raise refused or UsageError("the engine has no inputs to shape", hint="trt-engine inspect")


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

"""Checks before a build, and its target path, key and command line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trt_engine.arrayfiles import Array
from trt_engine.atomic_io import as_path, file_digest, os_errors, replace_surrogates, resolve_link
from trt_engine.backend import BackendSpec
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile, select_profile
from trt_engine.config.settings import from_values, to_argv
from trt_engine.config.settings import settings as settings_of
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine, engine_path, passport_path, reference_path
from trt_engine.equivalence.parity import given_shapes
from trt_engine.errors import EngineError, ModelError, UsageError
from trt_engine.format import quoted
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.runtime.feeds import read_feeds
from trt_engine.tensors import Shape, Signature
from trt_engine.verbs.build.candidates import PlannedCandidate
from trt_engine.verbs.build.parity import backend_options
from trt_engine.verbs.build.precision import data_digest, preprocess_digest
from trt_engine.verbs.given_model import without_folder

_WIDE_RATIO = 256
"""A profile whose largest shape has this many times the elements of its smallest is wide."""
_OFF_OPTIMUM_RATIO = 8
"""An optimum with this many times fewer elements than the largest shape is away from it."""


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """The values of `--inputs`."""

    values: dict[str, Array] = field(default_factory=dict, compare=False, repr=False)
    named: str = ""
    """The file's name and the digest of the file."""

    def shapes(self, config: BuildConfig) -> dict[str, Shape]:
        """The shapes to build for, where the settings give none."""
        if config.profiles:
            return {}
        return {name: tuple(array.shape) for name, array in self.values.items() if name not in config.shapes}

    def check(self, signature: Signature, profiles: Sequence[Profile]) -> None:
        """`ProfileError` for values whose shapes are in none of the profiles."""
        self.profile(signature, profiles)

    def profile(self, signature: Signature, profiles: Sequence[Profile]) -> Profile:
        """The first of the profiles that takes the values."""
        if not self.values:
            return profiles[0]
        return profiles[select_profile(profiles, lambda one, index: given_shapes(signature, one, self.values, index))]


def read_given(path: Path | None, signature: Signature) -> GivenInputs:
    """The values of a file for some inputs or all; `FeedError` where they do not fit."""
    if path is None:
        return GivenInputs()
    values = read_feeds(path, signature, partial=True)
    return GivenInputs(values, f"{path.name} ({file_digest(path)[:19]})")


def find_open_batch(signature: Signature, config: BuildConfig) -> str | None:
    """The input whose batch is open while the settings give none: its engine takes batch 1 alone."""
    if config.batch is not None or config.profiles:
        return None
    return next((spec.name for spec in signature.inputs if 0 in spec.dynamic and spec.name not in config.shapes), None)


def key_config(spec: BackendSpec, config: BuildConfig) -> BuildConfig:
    """The settings an engine's key is made of: those of the run alone, and those the backend ignores, make no other one.

    Data counts by its content: the same path may hold other samples tomorrow.
    """
    config = replace(
        config, **{item.name: item.default for item in settings_of(config) if item.name in spec.ignored_settings}
    )
    if (
        config.calib_data is not None
    ):  # what it holds, wherever it is, how it becomes inputs, how ranges are read from it
        made_of = [data_digest(config.calib_data), preprocess_digest(config.preprocess)]
        made_of += [] if config.inputs is None else [file_digest(config.inputs)]
        config = replace(config, calib_data=json.dumps(made_of))
    config = replace(config, preprocess=None)
    if not spec.provides("options"):
        return config
    of_the_run = {item.name for item in settings_of(spec.load_component("options")) if not item.in_key}
    return replace(config, options={name: value for name, value in config.options.items() if name not in of_the_run})


def search_identity(candidates: Sequence[PlannedCandidate], config: BuildConfig) -> str:
    """Who chooses, exactly: the candidates and why others are left out, the machine, the dataset of the accuracy gate."""
    found = [item.plan.key if item.plan is not None else item.reason for item in candidates]
    data = None if config.accuracy_data is None else data_digest(config.accuracy_data)
    cpu = info.cpu()
    made_of = json.dumps([found, data, cpu.name, cpu.cores])
    return f"search {hashlib.sha256(made_of.encode()).hexdigest()[:16]}"


def check_device(spec: BackendSpec, config: BuildConfig) -> None:
    if parse_device(config.device)[0] not in spec.devices:
        raise UsageError(
            f"the backend `{spec.name}` cannot build for `{config.device}`",
            hint="expected " + " or ".join(f"`--device {device}`" for device in spec.devices),
        )


def check_options(spec: BackendSpec, config: BuildConfig) -> None:
    """`UsageError` for a `-O` the backend does not have."""
    own = backend_options(spec, config)
    if spec.provides("options"):
        from_values(spec.load_component("options"), own)
    elif own:
        raise UsageError(f"the backend `{spec.name}` has no settings", hint="leave `-O` out")


def open_source(model: Model | Path | str) -> Model:
    """The model to build, opened unless it is; `UsageError` for an engine, `EngineError` for one that lost its passport (an
    engine of it would be proved against itself)."""
    path = model.path if isinstance(model, Model) else as_path(model, "`model`")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        name = replace_surrogates(str(path))
        raise ModelError(
            f"the name `{name}` is not UTF-8, which builders do not accept", hint="rename the file"
        ) from error
    if engine_path(path) is not None:
        with contextlib.suppress(EngineError, ModelError):
            Engine.open(path)
            raise UsageError(
                f"`{path}` is an engine already, expected a model", hint=f"`trt-engine bench {quoted(path)}`"
            )
    opened = model if isinstance(model, Model) else open_model(path)
    if opened.optimised is None:
        return opened
    beside = passport_path(path)
    state = "is damaged" if engine_path(path) is not None else "is not there"
    raise EngineError(
        f"`{path}` is a graph ONNX Runtime has optimised ({opened.optimised}), and its passport `{beside.name}` {state}",
        hint=f"copy `{beside.name}` along with the engine, or give the model the engine was built from",
    )


def plan_target(out: Path | str | None, model: Model, spec: BackendSpec, *, overwrite: bool) -> Path | None:
    """The payload's path where `out` is given; `UsageError` where an engine cannot be written there."""
    if out is None:
        return None
    with os_errors(Path(out)):  # a name too long, a loop of links
        target = resolve_target(out, model, spec)
        resolve_link(target)
        _check_writable(target, model, overwrite=overwrite, has_reference=spec.provides("parity_options"))
    return target


def resolve_target(out: Path | str, model: Model, spec: BackendSpec) -> Path:
    """The payload's path; a folder (there, or named with a slash at its end) gets a file named after the model."""
    path = as_path(out, "`out`")
    folder = path.is_dir() or (isinstance(out, str) and out.endswith("/"))
    return path / payload_name(model.name, spec) if folder else path


def payload_name(model_name: str, spec: BackendSpec) -> str:
    """`X.engine.onnx`, `X.engine`: never the name of a model."""
    suffix = spec.payload_suffix
    return model_name + (suffix if suffix == ".engine" else f".engine{suffix}")


def _check_writable(target: Path, model: Model, *, overwrite: bool, has_reference: bool = False) -> None:
    """`UsageError` for files that an engine at `target` would overwrite: the model's own always, others without `overwrite`.

    `has_reference` is for a backend whose engines may get a file of reference outputs beside them.
    """
    reference = reference_path(target)
    taken = {model.path.resolve(), *(item.path.resolve() for item in model.external)}
    if any(path.resolve() in taken for path in (target, passport_path(target), reference)):
        raise UsageError(f"`{target}` is the model itself, an engine cannot take its place", hint="name another `-o`")
    kept = has_reference and reference.exists()
    if overwrite or not (target.exists() or passport_path(target).exists() or kept):
        return
    try:
        there = Engine.open(target) if target.exists() or passport_path(target).exists() else None
    except (EngineError, ModelError) as error:
        found = target if target.exists() else passport_path(target)
        raise _not_an_engine_error(found) from error
    if kept and (there is None or there.reference != reference):
        raise _not_an_engine_error(reference)


def _not_an_engine_error(path: Path) -> UsageError:
    return UsageError(
        f"`{path}` exists and is not a trt-engine engine", hint="`--overwrite` overwrites it, or name another `-o`"
    )


def build_command(path: Path, config: BuildConfig, out: Path | None) -> str:
    """The command line that repeats a build, made from its settings."""
    words = ["trt-engine", "build", str(path), *to_argv(config), *(["-o", str(out)] if out is not None else [])]
    return shlex.join(map(without_folder, words))


def profile_warnings(profiles: tuple[Profile, ...]) -> Iterator[str]:
    for index, profile in enumerate(profiles):
        low, best, high = (
            sum(math.prod(getattr(span, which)) for span in profile.ranges.values()) for which in ("min", "opt", "max")
        )
        if high >= _WIDE_RATIO * max(low, 1):
            yield (
                f"profile {index} is wide: its largest shapes have {high // max(low, 1)} times the elements of its "
                "smallest; several narrow profiles are faster"
            )
        if high >= _OFF_OPTIMUM_RATIO * max(best, 1):
            yield (
                f"profile {index} is tuned for its optimum, which has {high // max(best, 1)} times fewer elements than "
                "its largest shapes; expect less there"
            )

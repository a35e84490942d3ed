"""Plans a bundle: opens the models, resolves their profiles and checks the connections between components,
declared or inferred. Writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trt_engine.atomic_io import as_path, os_errors
from trt_engine.backend import BackendSpec, get_backend, with_default_device
from trt_engine.config.build import BuildConfig, BundleConfig
from trt_engine.config.settings import to_argv
from trt_engine.engine import passport_path
from trt_engine.errors import BuildError, ModelError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.store import Store
from trt_engine.tensors import Signature, TensorSpec, suggest
from trt_engine.verbs.build import run as build_module
from trt_engine.verbs.build.run import BuildPlan
from trt_engine.verbs.bundle.model_meta import Link, ModelMeta, read_meta
from trt_engine.verbs.bundle.named_dims import Overrides, ResolvedDims, resolve
from trt_engine.verbs.bundle_chain import mismatch, prefix_errors
from trt_engine.verbs.bundle_folder import is_bundle

REPORT, LOGS, TIMING_CACHE = "build_report.json", "build_logs", "timing.cache"


@dataclass(frozen=True, slots=True)
class PlannedComponent:
    """One component: its model, profile and build plan."""

    name: str
    model: Model
    resolved: ResolvedDims
    build: BuildPlan

    @property
    def target(self) -> Path:
        assert self.build.out is not None
        return self.build.out

    @property
    def log(self) -> Path:
        assert self.build.log is not None
        return self.build.log


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """The validated inputs of a bundle."""

    meta: ModelMeta
    folder: Path
    options: BundleConfig
    config: BuildConfig
    components: tuple[PlannedComponent, ...]
    links: tuple[Link, ...]
    store: Store
    command: str
    warnings: tuple[str, ...] = ()

    @property
    def backend_spec(self) -> BackendSpec:
        return get_backend(self.config.backend)

    @property
    def version(self) -> str:
        """Version of the bundle: 12 hex digits over names, models, keys and connections."""
        facts = [[item.name, item.model.digest, item.build.key] for item in self.components]
        facts += [[str(link), *map(str, link.transpose)] for link in self.links]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def plan(
    meta: Path | str,
    out: Path | str,
    options: BundleConfig,
    config: BuildConfig,
    *,
    store: Store | None = None,
    command: str | None = None,
) -> BundlePlan:
    """Plan of `bundle`. Writes nothing."""
    asked = _check_config(config)
    backend_spec, store = get_backend(asked.backend), store or Store()
    overrides = Overrides.parse(options.dims, options.profiles)
    folder = _check_folder(out, overwrite=options.overwrite)
    source = as_path(meta, "`meta`")
    found = read_meta(source, onnx_dir=options.onnx_dir)
    models = {item.name: open_model(found.folder / item.file) for item in found.components}
    for name, model in models.items():
        if backend_spec.provides("check_model"):
            with prefix_errors(name):
                backend_spec.load_function("check_model")(model)
    signatures = {name: model.signature for name, model in models.items()}
    resolved = resolve(found, models, overrides)
    links = resolve_connections(found, signatures)
    check_connections(found, links, signatures, resolved)
    typed = asked
    asked = replace(asked, timing_cache=asked.timing_cache or folder / TIMING_CACHE)
    components = []
    for item in found.components:
        suffix = backend_spec.payload_suffix  # `encoder.engine`, `encoder.engine.onnx`
        model = models[item.name]
        target = folder / f"{item.name}{suffix if suffix == '.engine' else f'.engine{suffix}'}"
        own = item.build | ({"options": asked.options | item.build["options"]} if "options" in item.build else {})
        mine = replace(asked, profiles=(resolved[item.name].profile,), **own)
        with prefix_errors(item.name):
            built = build_module.plan(
                model, out=target, config=mine, store=store, overwrite=options.overwrite,
                command=_build_command(model.path, mine, target, backend_spec), log_file=folder / LOGS / f"{item.name}.log",
            )  # fmt: skip
        components.append(PlannedComponent(item.name, model, resolved[item.name], built))
    _refuse_overwriting_sources(folder, source, components)
    again = [
        *to_argv(typed),
        *overrides.to_argv(),
        *(["--onnx-dir", str(options.onnx_dir)] if options.onnx_dir else []),
    ]
    return BundlePlan(
        meta=found,
        folder=folder,
        options=options,
        config=asked,
        components=tuple(components),
        links=links,
        store=store,
        command=command or shlex.join(["trt-engine", "bundle", str(source), *again, "-o", str(folder)]),
        warnings=tuple(text for item in components for text in item.resolved.warnings),
    )


def _check_config(config: BuildConfig) -> BuildConfig:
    asked = with_default_device(config)
    if asked.profiles or asked.batch or asked.shapes:
        raise UsageError(
            "a bundle takes named dimensions, not one profile for all components",
            hint="`--dim T=16:64:256`, or `--profile COMPONENT:INPUT:MIN,OPT,MAX`",
        )
    return asked


def _check_folder(out: Path | str, *, overwrite: bool) -> Path:
    folder = as_path(out, "`out`")
    with os_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"`{folder}` is a file, expected a folder for the bundle", hint="name another `-o`")
        report = folder / REPORT
        if report.exists() and not overwrite and not is_bundle(folder):
            raise UsageError(
                f"`{report}` exists and is not a report of `bundle`",
                hint="`--overwrite` overwrites it, or name another `-o`",
            )
    return folder


def _build_command(model: Path, config: BuildConfig, target: Path, spec: BackendSpec) -> str:
    """Command line that builds this engine alone."""
    used = config if spec.writes_log else replace(config, timing_cache=None)
    return shlex.join(["trt-engine", "build", str(model), *to_argv(used), "-o", str(target)])


def _refuse_overwriting_sources(folder: Path, source: Path, components: Iterable[PlannedComponent]) -> None:
    """`UsageError` if the bundle would overwrite the meta file or a model, even with `--overwrite`."""
    components = list(components)
    written = {(folder / name).resolve() for name in (REPORT, TIMING_CACHE)}
    for item in components:
        written |= {path.resolve() for path in (item.target, passport_path(item.target), item.log)}
    models = [item.model for item in components]
    read = [source, *(path for model in models for path in (model.path, *(file.path for file in model.external)))]
    for path in read:
        if path.resolve() in written:
            raise UsageError(f"the bundle would overwrite its input `{path}`", hint="name another folder with `-o`")


def resolve_connections(meta: ModelMeta, signatures: Mapping[str, Signature]) -> tuple[Link, ...]:
    """The declared connections, or the inferred ones of an RNNT-TDT without any.

    `ModelError` for an unknown output or input, or an input with two producers.
    """
    links = meta.links or (tuple(_infer_connections(signatures)) if meta.is_rnnt else ())
    fed: dict[tuple[str, str], Link] = {}
    for link in links:
        for component, tensor, side, specs in (
            (link.producer, link.output, "output", signatures[link.producer].outputs),
            (link.consumer, link.input, "input", signatures[link.consumer].inputs),
        ):
            known = [spec.name for spec in specs]
            if tensor not in known:
                raise meta.error(link.json_path, f"no {side} `{component}.{tensor}`", suggest(tensor, known))
        if (before := fed.get((link.consumer, link.input))) is not None:
            raise meta.error(
                link.json_path, f"`{link.consumer}.{link.input}` is already connected by `{before}`", "leave one out"
            )
        fed[link.consumer, link.input] = link
    return links


def check_connections(
    meta: ModelMeta,
    links: Iterable[Link],
    signatures: Mapping[str, Signature],
    resolved: Mapping[str, ResolvedDims],
    *,
    what: str = "models",
) -> None:
    """`ModelError` for the first connection whose ends differ in dtype, rank or fixed dimensions, or whose fixed dimensions
    are outside the input's profile; `BuildError` for an engine without one of the ends."""
    for link in links:
        output = _find_spec(signatures[link.producer].outputs, link.output)
        taken = _find_spec(signatures[link.consumer].inputs, link.input)
        if output is None or taken is None:
            raise BuildError(f"`{link}`: the {what} lack one of the ends", hint="`--rebuild` rebuilds them")
        why = mismatch(output, taken, link.transpose)
        if why is None and not link.transpose and _transpose_axes(output, taken):
            why = "its axes are transposed"
        if why is not None:
            raise _mismatch_error(meta, link, output, taken, why, what)
        span = resolved[link.consumer].profile.ranges[link.input]
        turned = [output.shape[axis] for axis in link.transpose or range(len(output.shape))]
        for position, size in enumerate(turned):
            if size >= 0 and not span.min[position] <= size <= span.max[position]:
                raise ModelError(
                    f"`{link}`: the output is {output.format_symbolic()}, and the profile of the input spans "
                    f"{span.min[position]} to {span.max[position]} in dimension {position}",
                    hint=f"`--profile {link.consumer}:{link.input}:MIN,OPT,MAX` with {size} in dimension {position}",
                )


def _mismatch_error(
    meta: ModelMeta, link: Link, output: TensorSpec, input_spec: TensorSpec, reason: str, what: str
) -> ModelError:
    ends = " and ".join(f"{spec.format_symbolic()} {spec.dtype}" for spec in (output, input_spec))
    text = f"`{link}` does not match: {reason} (the {what} have {ends})"
    turned = _transpose_axes(output, input_spec) if not link.transpose else None
    if link.declared:
        hint = "export both components again together, or correct `connections`"
        if turned:
            hint = f'it matches with `"transpose": {list(turned)}`, if the application transposes; `[0, 1, 2]` if not'
        return meta.error(link.json_path, text, hint)
    return ModelError(
        text, hint=f"export both again from one checkpoint, or write `connections` into `{meta.path.name}`"
    )


def _transpose_axes(output: TensorSpec, input_spec: TensorSpec) -> tuple[int, ...] | None:
    """Axes that swap the last two, if the fixed and dynamic dimensions match only then."""
    if len(output.shape) != 3 or len(input_spec.shape) != 3:
        return None
    features = [max(size, -1) for size in output.shape[1:]]
    wanted = [max(size, -1) for size in input_spec.shape[1:]]
    return (0, 2, 1) if features != wanted and features[::-1] == wanted else None


# ------------------------------------------------------------------------------------------------ RNNT-TDT


def _infer_connections(signatures: Mapping[str, Signature]) -> Iterator[Link]:
    """Connections of an RNNT-TDT: encoder and predictor to joint, predictor states to predictor."""
    encoder, predictor, joint = (signatures[name] for name in ("encoder", "predictor", "joint"))
    sides = [spec for spec in joint.inputs if "float" in spec.dtype and len(spec.shape) > 1]
    heard = next((spec for spec in sides if "enc" in spec.name.lower()), sides[0] if sides else None)
    stated = next((spec for spec in sides if spec is not heard and re.search("pred|dec", spec.name.lower())), None)
    stated = stated or next((spec for spec in sides if spec is not heard), None)
    states = list(_state_pairs(predictor))
    for producer, outputs, taken in (
        ("encoder", encoder.outputs, heard),
        ("predictor", [spec for spec in predictor.outputs if spec.name not in {pair[0] for pair in states}], stated),
    ):
        main = next((spec for spec in outputs if "float" in spec.dtype), None)
        if main is not None and taken is not None:
            yield Link(producer, main.name, "joint", taken.name, _transpose_axes(main, taken) or (), declared=False)
    for output, taken_ in states:
        yield Link("predictor", output, "predictor", taken_, declared=False)


def _state_pairs(predictor: Signature) -> Iterator[tuple[str, str]]:
    """Pairs of output and input of the predictor's states: float inputs of `[L, B, H]`, matched by name (`h` and `h_out`),
    else in the order of the outputs after the first."""
    inputs = [spec.name for spec in predictor.inputs if "float" in spec.dtype and len(spec.shape) == 3]
    rest = [spec.name for spec in predictor.outputs if "float" in spec.dtype and len(spec.shape) == 3][1:]
    for index, name in enumerate(inputs):
        by_name = [
            item for item in rest if name in re.split(r"[_.\-/]", item.rstrip("0123456789")) or item == name + "n"
        ]
        if by_name:
            yield by_name[0], name
        elif index < len(rest) and len(rest) == len(inputs):
            yield rest[index], name


def _find_spec(specs: Iterable[TensorSpec], name: str) -> TensorSpec | None:
    return next((spec for spec in specs if spec.name == name), None)

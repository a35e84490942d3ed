"""Plans a bundle: opens the models, resolves their profiles and checks the connections. Writes nothing."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from trt_engine.atomic_io import as_path, os_errors
from trt_engine.backend import BackendSpec, get_backend, with_default_device
from trt_engine.config.build import BuildConfig, BundleConfig
from trt_engine.config.settings import to_argv
from trt_engine.engine import passport_path
from trt_engine.errors import UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.store import Store
from trt_engine.verbs.build import run as build_module
from trt_engine.verbs.build.run import BuildPlan
from trt_engine.verbs.bundle import connections
from trt_engine.verbs.bundle.model_meta import Link, ModelMeta, read_meta
from trt_engine.verbs.bundle.named_dims import Overrides, ResolvedDims, resolve
from trt_engine.verbs.bundle_chain import prefix_errors
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
    links = connections.resolve_connections(found, signatures)
    connections.check_connections(found, links, signatures, resolved)
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
            raise UsageError(
                f"the bundle would overwrite its input `{path}`",
                hint="name another folder with `-o`",
            )

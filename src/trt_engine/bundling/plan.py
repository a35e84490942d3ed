"""What a bundle would do: every component opened, sized and held against the others, before anything is written."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.api import building
from trt_engine.api.building import BuildPlan
from trt_engine.api.chaining import naming
from trt_engine.backend import Backend, backend, settled
from trt_engine.bundling import contracts
from trt_engine.bundling.meta import Link, Meta, read_meta
from trt_engine.bundling.profiles import Overrides, Resolved, resolve
from trt_engine.config import BuildConfig, from_values, words
from trt_engine.engine import passport_path
from trt_engine.errors import UsageError
from trt_engine.files import explain, path_of
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.store import Store

__all__ = ["LOGS", "REPORT", "TIMING_CACHE", "BundlePlan", "Planned", "plan"]

REPORT, LOGS, TIMING_CACHE = "build_report.json", "build_logs", "timing.cache"


@dataclass(frozen=True, slots=True)
class Planned:
    """One component: its model, its sizes, its build."""

    name: str
    model: Model
    resolved: Resolved
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
    """What a bundle would do."""

    meta: Meta
    folder: Path
    config: BuildConfig
    components: tuple[Planned, ...]
    links: tuple[Link, ...]
    store: Store
    command: str
    warnings: tuple[str, ...] = ()

    @property
    def card(self) -> Backend:
        return backend(self.config.backend)

    @property
    def version(self) -> str:
        """Of the whole: twelve hex digits over names, models, keys and connections."""
        facts = [[item.name, item.model.digest, item.build.key] for item in self.components]
        facts += [[str(link), *map(str, link.transpose)] for link in self.links]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def plan(
    meta: Path | str,
    out: Path | str,
    *,
    config: BuildConfig | None = None,
    dims: Mapping[str, object] | Iterable[str] = (),
    profiles: Iterable[str] = (),
    onnx_dir: Path | str | None = None,
    store: Store | None = None,
    yes: bool = False,
    command: str | None = None,
    **settings: Any,
) -> BundlePlan:
    """What `bundle` would do with the same arguments. Reads, checks, writes nothing."""
    asked = _config(config or BuildConfig(), settings)
    card, store = backend(asked.backend), store or Store()
    overrides = Overrides.parse(dims, profiles)
    folder = _folder(out, yes=yes)
    source = path_of(meta, "`meta`")
    elsewhere = None if onnx_dir is None else path_of(onnx_dir, "`onnx_dir`")
    found = read_meta(source, onnx_dir=elsewhere)
    models = {item.name: open_model(found.folder / item.file) for item in found.components}
    for name, model in models.items():
        if card.has("accepts"):
            with naming(name):
                card.call("accepts")(model)
    signatures = {name: model.signature for name, model in models.items()}
    resolved = resolve(found, models, overrides)
    links = contracts.connections(found, signatures)
    contracts.check(found, links, signatures, resolved)
    typed = asked
    asked = replace(asked, timing_cache=asked.timing_cache or folder / TIMING_CACHE)
    components = []
    for item in found.components:
        model, target = models[item.name], folder / _payload_name(item.name, card)
        own = item.build | ({"options": asked.options | item.build["options"]} if "options" in item.build else {})
        mine = replace(asked, profiles=(resolved[item.name].profile,), **own)
        with naming(item.name):
            built = building.plan(
                model, out=target, config=mine, store=store, yes=yes, command=_command(model.path, mine, target, card),
                log_file=folder / LOGS / f"{item.name}.log",
            )  # fmt: skip
        components.append(Planned(item.name, model, resolved[item.name], built))
    _spare_the_sources(folder, source, components)
    again = [*words(typed), *overrides.words(), *(["--onnx-dir", str(elsewhere)] if elsewhere else [])]
    return BundlePlan(
        meta=found,
        folder=folder,
        config=asked,
        components=tuple(components),
        links=links,
        store=store,
        command=command or shlex.join(["trt-engine", "bundle", str(source), *again, "-o", str(folder)]),
        warnings=tuple(text for item in components for text in item.resolved.warnings),
    )


def _config(config: BuildConfig, values: dict[str, Any]) -> BuildConfig:
    given = from_values(BuildConfig, values)
    asked = settled(replace(config, **{name: getattr(given, name) for name in values}))
    if asked.profiles or asked.batch or asked.shapes:
        raise UsageError(
            "a bundle's sizes are those of named dimensions, not one profile for all",
            hint="`--dim T=16:64:256`, or `--profile COMPONENT:INPUT:MIN,OPT,MAX`",
        )
    return asked


def _folder(out: Path | str, *, yes: bool) -> Path:
    folder = path_of(out, "`out`")
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"`{folder}` is a file, expected a folder for the bundle", hint="name another `-o`")
        report = folder / REPORT
        if report.exists() and not yes and not _is_ours(report):
            raise UsageError(
                f"`{report}` exists and is no report of ours", hint="`--yes` overwrites it, or name another `-o`"
            )
    except OSError as error:
        raise explain(error, folder) from error
    return folder


def _is_ours(path: Path) -> bool:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(found, dict) and found.get("schema") == "trt-engine/bundle"


def _payload_name(component: str, card: Backend) -> str:
    """`encoder.engine`, `encoder.engine.onnx`: named after the component, whatever its model's file is called."""
    return component + (card.payload_suffix if card.payload_suffix == ".engine" else f".engine{card.payload_suffix}")


def _command(model: Path, own: BuildConfig, target: Path, card: Backend) -> str:
    """What builds this engine without the bundle."""
    used = own if card.builds_log else replace(own, timing_cache=None)
    return shlex.join(["trt-engine", "build", str(model), *words(used), "-o", str(target)])


def _spare_the_sources(folder: Path, source: Path, components: Iterable[Planned]) -> None:
    """`UsageError` where a file of the bundle would take the place of the meta file or of a model, even with `--yes`."""
    components = list(components)
    written = {(folder / name).resolve() for name in (REPORT, TIMING_CACHE)}
    for item in components:
        written |= {path.resolve() for path in (item.target, passport_path(item.target), item.log)}
    models = [item.model for item in components]
    read = [source, *(path for model in models for path in (model.path, *(file.path for file in model.external)))]
    for path in read:
        if path.resolve() in written:
            raise UsageError(
                f"`{path}` is read for this bundle, and a file of its folder has that name",
                hint="name another folder with `-o`",
            )

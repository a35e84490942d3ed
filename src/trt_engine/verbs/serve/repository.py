"""Models of a server: a folder in Triton's layout, or engines by path; loaded, replaced and unloaded while serving.

`NAME/VERSION/model.onnx|model.plan` with its passport beside it, or a bundle's files in `NAME/VERSION`, and an optional
`NAME/config.pbtxt`. Everything is resolved inside the folder: a link that leads outside is refused. No code is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from trt_engine.atomic_io import os_error, read_bounded
from trt_engine.engine import Engine, engine_path, is_onnx_model, passport_path
from trt_engine.errors import EngineError, ModelError, SetupError, TrtEngineError, UnknownModel, UsageError
from trt_engine.tensors import suggest
from trt_engine.verbs.bundle_folder import is_bundle
from trt_engine.verbs.load import build_command
from trt_engine.verbs.serve.model_config import CONFIG_FILE, ModelSettings, data_files, read_config
from trt_engine.verbs.serve.served_model import ServedVersion, load_version
from trt_engine.verbs.serve.statistics import VersionStatistics

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DEFAULT_FILES = ("model.plan", "model.onnx")
Build = Callable[[Path, ModelSettings], Engine]
"""Builds the engine of a model that is not one."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a version is loaded from, and a mark that changes when its files do."""

    path: Path
    mark: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A model as it is on disk now."""

    settings: ModelSettings
    sources: dict[str, Source]
    """By version."""
    config: bytes = b""


@dataclass(slots=True)
class VersionState:
    """State of one version, as the repository index has it."""

    state: str
    """`READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`."""
    reason: str = ""


@dataclass(slots=True)
class Model:
    """A model by name: its loaded versions, and the state of each that was ever wanted."""

    name: str
    versions: dict[str, ServedVersion] = field(default_factory=dict)
    states: dict[str, VersionState] = field(default_factory=dict)
    wanted: bool = True
    """Whether it was requested, at the start or by a client: readiness depends on it."""
    tried: Found | None = None
    """What was on disk when it was loaded last, successfully or not."""
    loaded_from: dict[str, tuple[Source, bytes]] = field(default_factory=dict)
    """Source and configuration of each loaded version."""
    statistics: dict[str, VersionStatistics] = field(default_factory=dict)
    """By version, also of one that was unloaded: a version that is loaded again goes on counting."""
    failure: str = ""
    """Why the model as a whole could not be loaded."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def newest(self) -> ServedVersion | None:
        return self.versions[max(self.versions, key=int)] if self.versions else None

    def reasons(self) -> Iterator[str]:
        """Why the model is not ready; nothing where it is: a version answers, and its device works."""
        newest = self.newest
        if newest is not None:
            if reason := newest.not_ready_reason():
                yield f"version {newest.version}: {reason}"
            return
        if self.failure:
            yield self.failure
        for version, state in self.states.items():
            yield f"version {version}: {state.reason or state.state.lower()}"
        if not self.failure and not self.states:
            yield "not loaded"


def unknown_model(name: str, known: Iterable[str]) -> UnknownModel:
    """In the words of Triton, which its clients look for."""
    return UnknownModel(f"Request for unknown model: `{name[:80]}` is not found", hint=suggest(name[:80], [*known]))


def unknown_version(model: Model, version: str) -> UnknownModel:
    return UnknownModel(
        f"model `{model.name}` has no version `{version[:20]}`", hint=suggest(version[:20], [*model.versions])
    )


class Repository:
    """The models of a server. Its methods belong to the event loop; files and engines are opened in other threads."""

    def __init__(
        self, root: Path | None, engines: dict[str, Path], base: ModelSettings, *, verify: bool = True,
        build: Build | None = None,
    ) -> None:  # fmt: skip
        self.root = Path(os.path.realpath(root)) if root is not None else None
        self.engines = engines
        """Paths of engines that are models of one version, by name."""
        self._base = base
        self._verify = verify
        self._build = build
        self.models: dict[str, Model] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    # -------------------------------------------------------------------------------------------- requests

    def find(self, name: str, version: str) -> ServedVersion | None:
        """The version that would answer a request; None where none would."""
        model = self.models.get(name)
        if model is None:
            return None
        return model.versions.get(version) if version else model.newest

    def acquire(self, name: str, version: str) -> ServedVersion:
        """`require`, counted in until `leave`."""
        served = self.require(name, version)
        served.enter()
        return served

    def require(self, name: str, version: str) -> ServedVersion:
        """The version to answer a request. Raises `UnknownModel`, or `SetupError` not ready."""
        model = self.models.get(name)
        if model is None:
            raise unknown_model(name, self.models)
        served = self.find(name, version)
        if served is None:
            if version and version not in model.states:
                raise unknown_version(model, version)
            raise SetupError(
                f"model `{name}` is not ready: {'; '.join(model.reasons()) or 'no version is loaded'}",
                hint="`/v2/repository/index` has the reasons",
            )
        return served

    def not_ready(self, name: str, version: str = "") -> str | None:
        """Why the model or the version is not ready; None where it is. Raises `UnknownModel`."""
        model = self.models.get(name)
        if model is None:
            raise unknown_model(name, self.models)
        if not version:
            return "; ".join(model.reasons()) or None
        served = model.versions.get(version)
        if served is None:
            if version not in model.states:
                raise unknown_version(model, version)
            state = model.states[version]
            return state.reason or state.state.lower()
        return served.not_ready_reason()

    def all_not_ready(self) -> dict[str, str]:
        """Why models that were requested are not ready, by name."""
        found = {model.name: "; ".join(model.reasons()) for model in self.models.values() if model.wanted}
        return {name: reasons for name, reasons in found.items() if reasons}

    async def index(self) -> list[dict[str, str]]:
        """Every model and version with its state and the reason; those on disk that are not loaded too."""
        rows = []
        for name in sorted({*self.models, *await asyncio.to_thread(self._names)}):
            model = self.models.get(name)
            if model is None or not model.states:
                rows.append({"name": name} | ({"state": "UNAVAILABLE", "reason": model.failure} if model else {}))
                continue
            for version, state in sorted(model.states.items(), key=lambda item: int(item[0])):
                reason = state.reason or model.failure
                rows.append({"name": name, "version": version, "state": state.state, "reason": reason})
        return rows

    # -------------------------------------------------------------------------------------------- loading

    async def load_all(self) -> None:
        """Load everything that is there; what cannot be loaded is not ready, with the reason."""
        for name in await asyncio.to_thread(self._names):
            await self.load_quietly(name)

    async def load_quietly(self, name: str) -> None:
        """`load`, whose error is in the model's state and in the log; `UnknownModel` for a name that is not there."""
        try:
            await self.load(name)
        except UnknownModel:
            raise
        except TrtEngineError as error:
            if self.models[name].failure:  # else it is that of a version, which is in the log
                log.warning("`%s` is not ready: %s", name, error.one_line)

    async def load(self, name: str, config: str = "") -> None:
        """Load or renew a model: new and changed versions first, then they replace the old ones.

        `config` is a configuration as JSON, which stands in for `config.pbtxt` until the model is loaded again without one.
        Raises the first error. Versions that answered before keep answering where their successors cannot be loaded.
        """
        known = name in self.models
        if not known and name not in await asyncio.to_thread(self._names):
            raise unknown_model(name, await asyncio.to_thread(self._names))
        model = self.models.setdefault(name, Model(name))
        async with model.lock:
            model.wanted = True
            try:
                found = await asyncio.to_thread(self._find, name, config)
            except TrtEngineError as error:
                model.failure = error.one_line
                raise
            model.failure = ""
            await self._load_versions(model, found)

    async def _load_versions(self, model: Model, found: Found) -> None:
        model.tried, failed = found, None
        loaded: dict[str, ServedVersion] = {}
        for version, source in found.sources.items():
            current = model.versions.get(version)
            if current is not None and model.loaded_from[version] == (source, found.config):
                loaded[version] = current
                model.states[version] = VersionState("READY")
                continue
            if current is None:
                model.states[version] = VersionState("LOADING")
            try:
                loaded[version] = await asyncio.to_thread(self._load_version, model, version, source, found.settings)
            except Exception as error:
                failed = failed or error
                text = error.one_line if isinstance(error, TrtEngineError) else repr(error)
                model.states[version] = VersionState("UNAVAILABLE", text)
                log.warning("`%s` version %s is not ready: %s", model.name, version, text)
            else:
                model.states[version] = VersionState("READY")
                model.loaded_from[version] = (source, found.config)
                log.info("`%s` version %s is ready: %s", model.name, version, loaded[version].truth.header())
        old = model.versions
        model.versions = loaded if failed is None else old | loaded  # what answered keeps answering
        for served in old.values():
            if served is not model.versions.get(served.version):
                self._retire(served)
        for version in model.states.keys() - found.sources.keys() - model.versions.keys():  # gone from the disk
            del model.states[version]
            model.loaded_from.pop(version, None)
            model.statistics.pop(version, None)
        if isinstance(failed, TrtEngineError):
            raise failed
        if failed is not None:
            raise EngineError(f"`{model.name}` cannot be loaded: {failed!r}") from failed

    def _retire(self, served: ServedVersion) -> None:
        task = asyncio.get_running_loop().create_task(served.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def unload(self, name: str) -> None:
        """Stop serving a model; requests that hold it are answered first. Raises `UnknownModel`."""
        model = self.models.get(name)
        if model is None:
            raise unknown_model(name, self.models)
        async with model.lock:
            versions, model.versions, model.wanted, model.tried = [*model.versions.values()], {}, False, None
            model.failure, model.loaded_from = "", {}
            model.states = {version: VersionState("UNAVAILABLE", "unloaded") for version in model.states}
            for served in versions:
                self._retire(served)

    async def poll(self) -> None:
        """Load what is new or changed in the folder, unload what is gone."""
        names = await asyncio.to_thread(self._names)
        for name in [name for name in self.models if name not in names]:
            await self.unload(name)
            del self.models[name]
        for name in names:
            model = self.models.get(name)
            try:
                found = await asyncio.to_thread(self._find, name)
            except TrtEngineError as error:
                if model is None or model.failure != error.one_line:
                    await self.load_quietly(name)
                continue
            if model is None or model.failure or model.tried is None or (model.tried.sources, model.tried.config) != (
                found.sources, found.config,
            ):  # fmt: skip
                await self.load_quietly(name)

    async def close(self) -> None:
        """Answer what holds a version, then close all."""
        for model in self.models.values():
            for served in model.versions.values():
                self._retire(served)
            model.versions = {}
        while self._retiring:
            await asyncio.gather(*self._retiring, return_exceptions=True)

    # -------------------------------------------------------------------------------------------- files

    def _names(self) -> list[str]:
        """Models that are there, by name; those whose name cannot be used too."""
        found = [*self.engines]
        if self.root is not None:
            try:
                found += [
                    os.fsencode(entry.name).decode("utf-8", "backslashreplace")
                    for entry in os.scandir(self.root)
                    if not entry.name.startswith(".") and entry.name != "lost+found" and entry.is_dir()
                ]
            except OSError as error:
                raise os_error(error, self.root, "read", by="--model-repository") from error
        return sorted(found)

    def _find(self, name: str, config: str = "") -> Found:
        """The model as it is on disk now; raises where its folder or its configuration is wrong, or has gone."""
        try:
            return self._read_sources(name, config)
        except OSError as error:
            raise os_error(error, Path(error.filename or name), "read") from error

    def _read_sources(self, name: str, given: str) -> Found:
        if name in self.engines:
            path = self.engines[name]
            files = [*path.iterdir()] if path.is_dir() else [path, passport_path(path)]
            return Found(self._base, {"1": Source(path, _mark(files))})
        assert self.root is not None
        if not _NAME.fullmatch(name):
            raise UsageError(
                "a model cannot have this name",
                hint="at most 128 of A-Z, a-z, 0-9, `_`, `.` and `-`; the first is a letter, a digit or `_`",
            )
        folder = self._inside(self.root / name)
        config = folder / CONFIG_FILE
        raw = read_bounded(self._inside(config)) if os.path.lexists(config) and not given else given.encode()
        settings = read_config(raw, name, self._base, is_json=bool(given)) if raw else self._base
        for item in settings.config.output if settings.config is not None else ():
            if item.label_filename:
                text = read_bounded(self._inside(folder / item.label_filename)).decode("utf-8", "replace")
                settings = replace(settings, labels={**settings.labels, item.name: text.splitlines()})
        read = {file: read_bounded(self._inside(folder / "warmup" / file)) for file in data_files(settings)}
        settings = replace(settings, files=read)
        there = [
            int(entry.name)
            for entry in os.scandir(folder)
            if re.fullmatch(r"[1-9][0-9]{0,17}", entry.name) and entry.is_dir()
        ]
        chosen = settings.policy.select(there)
        if not chosen:
            raise ModelError(f"`{name}` has no version", hint=f"`{name}/1/model.onnx`")
        sources = {str(number): self._source(folder / str(number), settings) for number in chosen}
        return Found(settings, sources, raw)

    def _source(self, folder: Path, settings: ModelSettings) -> Source:
        names = (settings.filename,) if settings.filename else _DEFAULT_FILES
        path = next((folder / name for name in names if (folder / name).exists()), folder / names[-1])
        if not path.exists() and is_bundle(folder):
            path = folder
        files = [path, passport_path(path), *(folder.iterdir() if folder.is_dir() else ())]
        return Source(path, _mark(files))

    def _inside(self, path: Path) -> Path:
        """The path without links; `UsageError` where it is not inside the repository."""
        real = Path(os.path.realpath(path))
        assert self.root is not None
        if not real.is_relative_to(self.root):
            raise UsageError(f"`{path.name}` leads outside the repository", hint="copy it into the repository")
        return real

    def _load_version(self, model: Model, version: str, source: Source, settings: ModelSettings) -> ServedVersion:
        path, name = source.path, model.name
        counts = model.statistics.setdefault(version, VersionStatistics())
        if name not in self.engines:
            path = self._inside(path)
            passport = passport_path(path)
            if os.path.lexists(passport):
                self._inside(passport)
        if is_bundle(path):
            for file in path.iterdir() if name not in self.engines else ():
                self._inside(file)
            return load_version(name, version, path, settings, counts, verify=self._verify)
        engine = self._engine(path, settings)
        if name not in self.engines and engine_path(path) is not None:
            for file in engine.files:
                self._inside(file)
        return load_version(name, version, engine, settings, counts, verify=self._verify)

    def _engine(self, path: Path, settings: ModelSettings) -> Engine:
        if not path.exists():
            raise ModelError(
                f"no such file `{path.name}` in version {path.parent.name}", hint="`model.onnx` or `model.plan`"
            )
        if engine_path(path) is None and is_onnx_model(path):
            if self._build is None:
                found = f"`{path.name}` is a model, expected an engine"
                raise EngineError(found, hint=f"{build_command(path)} makes one, or `--build-models` here")
            return self._build(path, settings)
        return Engine.open(path)


def _mark(files: list[Path]) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file that is there."""
    marks = set()
    for path in files:
        try:
            state = path.stat()
        except OSError:
            continue
        marks.add((path.name, state.st_size, state.st_mtime_ns))
    return tuple(sorted(marks))

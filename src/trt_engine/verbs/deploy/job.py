"""One deployment in the making: its sources, and the files that a target's writer stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import copy_atomic, file_digest, write_atomic
from trt_engine.engine import Engine
from trt_engine.records.deploy import DeployedModel, PreprocessDifference


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer made, besides the files."""

    models: tuple[DeployedModel, ...]
    next_command: str
    """Command that runs the result."""
    notes: tuple[str, ...] = ()
    preprocessing: tuple[PreprocessDifference, ...] = ()


@dataclass(slots=True)
class DeployJob:
    """What a target's writer gets. It writes through `write` and `copy_engine` alone, with names relative to the folder."""

    sources: dict[str, Path]
    """Engines, and models for a target that takes them, by model name."""
    engines: dict[str, Engine]
    """Those of the sources that are engines, by model name."""
    config: Any
    """Settings, of the target's class."""
    out: Path
    """The folder as it was given, for texts and commands."""
    staging: Path | None
    """Where files are staged; None in a dry run."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes by path in the folder."""

    def write(self, name: str, data: str | bytes) -> None:
        """Stage a file."""
        raw = data.encode() if isinstance(data, str) else data
        self.files[name] = len(raw)
        if self.staging is not None:
            path = self.staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, raw)

    def copy_engine(self, engine: Engine, name: str) -> None:
        """Stage a copy of the engine: its payload as `name`, side files and passport beside it."""
        folder = Path(name).parent
        if self.staging is None:
            self.files[name] = engine.path.stat().st_size
            self.files |= {(folder / file.name).as_posix(): file.stat().st_size for file in engine.files[1:]}
            return
        target = self.staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        before = {*target.parent.iterdir()}
        engine.copy_to(target)
        for path in {*target.parent.iterdir()} - before:
            self.files[(folder / path.name).as_posix()] = path.stat().st_size

    def copy_file(self, path: Path, name: str) -> None:
        """Stage a copy of a file."""
        self.files[name] = path.stat().st_size
        if self.staging is not None:
            target = self.staging / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_atomic(path, target)

    def digest(self, name: str) -> str | None:
        """Digest of the engine of that model, as sealed; of a model, of its file."""
        engine = self.engines.get(name)
        return engine.passport.payload[0].digest if engine is not None else file_digest(self.sources[name])

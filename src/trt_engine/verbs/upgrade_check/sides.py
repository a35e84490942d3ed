"""The engines of one version: cells of a run, measurements of `bench`, or an engine file, each with its records."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trt_engine.engine import Engine, engine_path, is_onnx_model
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, ModelError, UsageError
from trt_engine.records.bench import BenchRecord
from trt_engine.records.compare import CompareSide
from trt_engine.records.evaluate import EvaluateReport
from trt_engine.records.passport import Passport
from trt_engine.records.profile import LayerProfile
from trt_engine.records.sweep import CellResult
from trt_engine.records.upgrade import UpgradeEngine
from trt_engine.reporting.run_records import RunRecords

_LIBRARY = {"trtexec": "tensorrt", "inductor": "torch"}
"""The library of a backend without a passport, where the names differ."""


@dataclass(frozen=True, slots=True)
class VersionItem:
    """One engine of one version, with what is known of it."""

    label: str
    key: tuple[object, ...]
    """Model, precision, batch and device: what two plans with other labels share."""
    engine: UpgradeEngine
    environment: Environment
    passport: Passport | None = None
    path: Path | None = None
    """The engine file, where it is there."""
    records: tuple[BenchRecord, ...] = ()
    evaluation: EvaluateReport | None = None
    layers: LayerProfile | None = None

    @property
    def library_version(self) -> str | None:
        return self.engine.library.partition(" ")[2] or None

    def compare_side(self) -> CompareSide:
        """Its measurements, each a block of its own where there are several."""
        several = len(self.records) > 1
        return CompareSide(
            label=self.label,
            engine=self.engine.engine or self.label,
            backend=self.engine.backend,
            device=self.engine.device,
            precision=self.engine.main_dtype or "unknown",
            engine_bytes=self.engine.engine_bytes or 0,
            record=replace(self.records[0], stable=all(record.stable for record in self.records)),
            blocks_ms=tuple(record.compute_ms for record in self.records) if several else (),
            restart_blocks=(1,) * len(self.records) if several else (),
        )


def read_version(path: Path) -> dict[str, VersionItem]:
    """The engines of one version by label.

    Raises `UsageError` for a path that is neither an engine, a run folder nor an archive of one, `EngineError` for an engine
    without a readable passport.
    """
    if path.is_file() and is_onnx_model(path):
        raise UsageError(
            f"`{path}` is a model, expected an engine or a run folder",
            hint="build it with each version: `trt-engine build`, or `trt-engine run PLAN.yaml -o DIR`",
        )
    if path.is_file() and engine_path(path) is not None:
        items = [_engine_item(Engine.open(path))]
    else:
        run = RunRecords.open(path)
        items = list(_cell_items(run) if run.cells else _bench_items(run))
    if not items:
        raise UsageError(
            f"`{path}` holds no cell and no measurement",
            hint="`trt-engine run PLAN.yaml -o DIR` or `trt-engine bench ENGINE -o DIR`",
        )
    return {item.label: item for item in items}


def _engine_item(engine: Engine) -> VersionItem:
    passport = engine.passport
    return VersionItem(
        label=engine.path.name,
        key=(passport.model.digest,),
        engine=_describe(passport, passport.environment, engine=str(engine.path)),
        environment=passport.environment,
        passport=passport,
        path=engine.path,
    )


def _cell_items(run: RunRecords) -> Iterator[VersionItem]:
    """Each cell; its engine's passport where the folder has it (archives hold records alone)."""
    for cell in run.cells:
        spec, engine = cell.spec, _find_engine(run, cell.engine)
        passport = engine.passport if engine is not None else None
        records = (cell.bench,) if cell.bench is not None and cell.bench.compute_ms else ()
        known = [record.environment for record in records] + [
            passport.environment for passport in [passport] if passport
        ]
        environment = known[0] if known else run.environment
        described = _describe(passport, environment, cell=cell, engine=cell.engine, records=records)
        yield VersionItem(
            label=spec.label,
            key=(spec.model, spec.precision, spec.batch, spec.device),
            engine=described,
            environment=environment,
            passport=passport,
            path=engine.path if engine is not None else None,
            records=records,
            evaluation=cell.evaluation,
            layers=cell.profile.layers if cell.profile is not None else None,
        )


def _bench_items(run: RunRecords) -> Iterator[VersionItem]:
    """Measurements by engine, batch and device: several of one engine are its restarts."""
    groups: dict[tuple[str, int, str], list[BenchRecord]] = {}
    for record in run.measurements:
        if record.complete and record.compute_ms:
            groups.setdefault((record.engine, record.batch, record.device), []).append(record)
    for (name, batch, device), records in groups.items():
        engine = _find_engine(run, name)
        passport = engine.passport if engine is not None else None
        yield VersionItem(
            label=f"{Path(name).name}, batch {batch}",
            key=(batch, device),
            engine=_describe(passport, records[0].environment, engine=name, records=tuple(records)),
            environment=records[0].environment,
            passport=passport,
            path=engine.path if engine is not None else None,
            records=tuple(records),
            layers=run.profile.layers if run.profile is not None and len(groups) == 1 else None,
        )


def _find_engine(run: RunRecords, name: str | None) -> Engine | None:
    """The engine in the run folder, else at its recorded path; None where it is not there."""
    for path in (run.folder / name, Path(name)) if name else ():
        with contextlib.suppress(EngineError, ModelError, OSError):
            if path.is_file():
                return Engine.open(path)
    return None


def _describe(
    passport: Passport | None,
    environment: Environment,
    *,
    engine: str | None,
    cell: CellResult | None = None,
    records: tuple[BenchRecord, ...] = (),
) -> UpgradeEngine:
    """What the records and the passport show of an engine."""
    first = records[0] if records else None
    backend = passport.backend if passport else cell.spec.backend if cell else first.backend if first else "unknown"
    device = first.device if first else cell.spec.device if cell else passport.device if passport else "unknown"
    shares = {name: share.main for name, share in passport.precision.compute_shares.items()} if passport else {}
    shares = shares or (dict(cell.dtype_shares) if cell is not None else {})
    pooled = [value for record in records for value in record.compute_ms]
    nbytes = sum(item.nbytes for item in passport.payload) if passport else cell.engine_bytes if cell else None
    return UpgradeEngine(
        state=cell.state if cell is not None else "done",
        backend=backend,
        device=device,
        library=_library(passport, backend, environment),
        reason=cell.reason if cell is not None else None,
        exit_code=cell.exit_code if cell is not None else 0,
        engine=engine,
        engine_bytes=nbytes,
        main_dtype=max(shares, key=lambda name: shares[name]) if shares else None,
        dtype_shares=shares,
        fusions=passport.build.fusions if passport is not None else None,
        not_fused=passport.build.not_fused if passport is not None else cell.not_fused if cell is not None else None,
        parity=passport.parity if passport is not None else cell.parity if cell is not None else None,
        metrics=dict(cell.evaluation.metrics) if cell is not None and cell.evaluation is not None else {},
        median_ms=statistics.median(pooled) if pooled else None,
        queries=len(pooled),
        restarts=len(records),
    )


def _library(passport: Passport | None, backend: str, environment: Environment) -> str:
    """`onnxruntime 1.31.1`: what built the engine."""
    if passport is not None:
        return f"{passport.requirements.library} {passport.requirements.version}"
    name = _LIBRARY.get(backend, backend)
    version = environment.libraries.get(name) or environment.libraries.get(f"{name}-gpu")
    return f"{name} {version}" if version else name

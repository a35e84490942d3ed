"""`inspect`: what is in a model, an engine, a TensorRT plan, a run folder or its archive, without running it
unless asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from onnx import ModelProto, TensorProto

from trt_engine.api.bundles import inspect_bundle, is_bundle
from trt_engine.api.chaining import described
from trt_engine.backend import backends
from trt_engine.config import RuntimeConfig, parse_shapes
from trt_engine.device import parse_device
from trt_engine.engine import (
    Build,
    Engine,
    Needs,
    Passport,
    Payload,
    PlanHeader,
    Precision,
    Source,
    Verdict,
    engine_path,
    plan_header,
)
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.files import explain, path_of
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.graph.findings import few, ordered
from trt_engine.graph.inspect import inspect_model
from trt_engine.graph.load import legible, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, with_modules
from trt_engine.plans.verdict import plan_verdict
from trt_engine.plans.verdict import verdict as engine_verdict
from trt_engine.records import BundleState, EngineReport, Finding, ModelReport, QuantPlacement, RunReport
from trt_engine.runfiles import COMPARE, PROFILE, RECORDS, RUN, SIZE, RunFiles, is_archive, no_run
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.tensors import Shape, Signature

__all__ = ["inspect", "placed_elsewhere", "typing_findings"]

log = logging.getLogger(__name__)

_ENGINE_SUFFIXES = (".engine", ".plan", ".trt")
_PLANS = "tensorrt"  # the backend whose runtime runs a plan that does not say who built it


def inspect(
    path: Path | str,
    *,
    shapes: Mapping[str, Shape] | str | None = None,
    run: bool = False,
    device: str | None = None,
    seed: int = 0,
) -> ModelReport | EngineReport | RunReport | BundleState:
    """What is at `path`: an ONNX model, an engine, a bare TensorRT plan, a bundle's folder, a run folder or its archive.

    `shapes` are where a model is counted and an engine is run; `run` loads the engine or the plan and runs it once on
    seeded inputs, a bundle's all together. Raises `ModelError` for a file that is no whole model, `EngineError` for an
    `.engine` that is no plan, `UsageError` for `run` on what cannot run, `SetupError` where nothing here could run it.
    """
    path = path_of(path, "`path`")
    sizes = parse_shapes(shapes)
    if path.is_dir() and is_bundle(path):
        if sizes:
            raise UsageError(
                f"`--shapes` is for a model or one engine, and `{path}` is a bundle", hint="name one of its engines"
            )
        return inspect_bundle(path, lambda engine: _engine(Engine.open(engine), {}, False, device, seed), run=run,
                              device=device, seed=seed)  # fmt: skip
    if path.is_dir() or (is_archive(path) and path.is_file()):
        _refuse_run(run, path, "a folder" if path.is_dir() else "an archive")
        return _run_folder(path)
    if _is_engine(path):
        return _engine(Engine.open(path), sizes, run, device, seed)
    if path.is_file() and path.suffix.lower() != ".onnx" and (header := _header(path)) is not None:
        return _plan(path, header, sizes, run, device, seed)
    if path.suffix.lower() in _ENGINE_SUFFIXES and path.is_file():
        raise _no_plan(path)
    _refuse_run(run and path.is_file(), path, "a model")
    return _model(path, sizes)


def _model(path: Path, sizes: dict[str, Shape]) -> ModelReport:
    """The model's report; with what strong typing holds against it where its types are somebody's choice."""
    model = open_model(path)
    proto = read_proto(path)
    report = inspect_model(model, sizes, proto=proto)
    known = {item.code for item in report.findings}
    typed = [] if placed_elsewhere(report.placement) else typing_findings(proto, path, known)
    return replace(report, findings=ordered([*report.findings, *typed])) if typed else report


def typing_findings(proto: ModelProto, path: Path, known: Collection[str]) -> list[Finding]:
    """What strong typing holds against a model whose types are somebody's choice, beyond the codes already found."""
    nodes = [place.node for place in walk.nodes(proto)]
    if not any(is_quantize(node) or is_dequantize(node) for node in nodes) and len(_float_types(proto)) < 2:
        return []
    from trt_engine.precision.rules import check_strong_typing  # plain models do without it

    with legible(path):
        found = few(item for item in check_strong_typing(proto) if item.code not in known)
        return list(with_modules(found, ModulePaths(proto), "where"))


def placed_elsewhere(placement: QuantPlacement | None) -> bool:
    """Whether a graph is quantised for a library that is not TensorRT: its typing rules say nothing of it then."""
    targets = placement.targets if placement is not None else ()
    return bool(targets) and not any("tensorrt" in name for name in targets)


def _float_types(proto: ModelProto) -> set[int]:
    """The types of floating-point inputs and constants, and of what Casts make."""
    types = {tensor.data_type for tensor in walk.tensors(proto)}
    types |= {value.type.tensor_type.elem_type for value in proto.graph.input}
    types |= {item.i for place in walk.nodes(proto) for item in place.node.attribute if item.name == "to"}
    return types & {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}


def _refuse_run(run: bool, path: Path, what: str) -> None:
    if run:
        raise UsageError(
            f"`--run` needs an engine or a plan, and `{path}` is {what}",
            hint=f"build one first: `trt-engine build {path} -o {path.with_suffix('').name}.engine.onnx`"
            if what == "a model"
            else "give the path of an engine that `trt-engine build` made",
        )


# ------------------------------------------------------------------------------------------------ engines


def _is_engine(path: Path) -> bool:
    """True for a payload with a passport beside it, whole or damaged, and for the passport itself."""
    return engine_path(path) is not None or (path.suffix == ".json" and _is_passport(path))


def _is_passport(path: Path) -> bool:
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(document, dict) and document.get("schema") == "trt-engine/passport"


def _engine(engine: Engine, sizes: dict[str, Shape], run: bool, device: str | None, seed: int) -> EngineReport:
    for name in sizes:
        engine.signature.input(name)
    header = None
    with suppress(OSError):
        header = plan_header(engine.path)
    verdict = _verdict(engine, header, device)
    smoke = None
    if run:
        _runnable(engine.passport.backend)
    if run and verdict.verdict in ("rebuild", "refuse"):
        raise EngineError(
            f"`{engine.path}` cannot be run here: {verdict.reason}", hint=verdict.command or "trt-engine doctor"
        )
    if run:
        smoke = _smoke(engine, sizes, device, seed)
    return EngineReport(
        path=str(engine.path),
        kind="engine",
        verdict=verdict,
        tensorrt_version=header.version if header is not None else None,
        nbytes=sum(item.nbytes for item in engine.passport.payload),
        passport=engine.passport,
        smoke=smoke,
    )


def _verdict(engine: Engine, header: PlanHeader | None, device: str | None) -> Verdict:
    """Whether the engine is whole and its backend takes it here, without loading it."""
    try:
        engine.verify()
    except EngineError as error:
        return Verdict("refuse", error.message, _command(error.hint) or engine.passport.build.command)
    card = backends().get(engine.passport.backend)
    if card is None:
        return Verdict(
            "refuse", f"it was built by the backend `{engine.passport.backend}`, which is not here", "trt-engine doctor"
        )
    if header is not None and (card.missing() or not card.has("verdict")):  # a plan is judged without its backend too
        return engine_verdict(engine, RuntimeConfig(device=device))
    if not card.has("verdict"):
        missing = card.missing()
        if missing:
            return Verdict("refuse", f"the backend `{card.name}` needs {', '.join(missing)}", card.install)
        return Verdict("loads", f"the backend `{card.name}` is installed")
    try:
        found: Verdict = card.call("verdict")(engine, RuntimeConfig(device=device))
    except (SetupError, EngineError) as error:
        return Verdict("refuse", error.message, _command(error.hint))
    return found


def _command(hint: str | None) -> str | None:
    """The part of a hint that can be typed."""
    if hint is None:
        return None
    before, quote, rest = hint.partition("`")
    return rest.partition("`")[0] if quote else before


def _smoke(engine: Engine, sizes: dict[str, Shape], device: str | None, seed: int) -> dict[str, Any]:
    """One run on seeded inputs: what went in, what came out, how long it took."""
    from trt_engine.api.loading import load  # the runtime is loaded for `run` alone

    profiles = engine.passport.profiles
    shapes = shapes_of(engine.signature, profiles[0] if profiles else None, overrides=sizes)
    feeds = random_feeds(engine.signature, shapes, seed)
    log.info("running %s once on seeded inputs", engine.path.name)
    started = time.perf_counter()
    with load(engine, config=RuntimeConfig(device=device), verify=False) as runner:
        loaded = time.perf_counter()
        outputs = runner.infer(feeds)
        first = time.perf_counter()
        runner.infer(feeds)
        second = time.perf_counter()
        facts = runner.facts
    return {
        "seed": seed,
        "inputs": {name: described(np.asarray(value)) for name, value in feeds.items()},
        "outputs": {name: described(np.asarray(value)) for name, value in outputs.items()},
        "load_ms": (loaded - started) * 1e3,
        "first_ms": (first - loaded) * 1e3,
        "second_ms": (second - first) * 1e3,
        "facts": dict(facts),
    }


# ------------------------------------------------------------------------------------------------ bare plans


def _header(path: Path) -> PlanHeader | None:
    try:
        return plan_header(path)
    except OSError as error:
        raise explain(error, path, "read") from error


def _plan(
    path: Path, header: PlanHeader, sizes: dict[str, Shape], run: bool, device: str | None, seed: int
) -> EngineReport:
    kind, number = parse_device("cuda:0" if device is None else device)
    smoke = None
    if run:
        _runnable(_PLANS)
    verdict = plan_verdict(header, None, path=path, device=number if kind == "cuda" else None)
    if run:
        if verdict.verdict in ("rebuild", "refuse"):
            raise EngineError(f"`{path}` cannot be run here: {verdict.reason}", hint=verdict.command)
        smoke = _smoke_plan(path, header, sizes, f"{kind}:{number}", seed)
    return EngineReport(
        path=str(path),
        kind="plan",
        verdict=verdict,
        tensorrt_version=header.version,
        nbytes=path.stat().st_size,
        smoke=smoke,
    )


def _runnable(name: str) -> None:
    """`SetupError` with the install line unless something here runs that backend's engines."""
    known = backends()
    if name not in known:
        return
    card = known[name]
    others = (known[other] for other in card.run_by if other in known)
    next((other for other in others if not other.missing("runtime")), card).half("runtime")


def _smoke_plan(path: Path, header: PlanHeader, sizes: dict[str, Shape], device: str, seed: int) -> dict[str, Any]:
    """One run of a plan nobody wrote a passport for: what it takes is asked of the plan itself, once it is loaded."""
    stated = Passport(
        schema="trt-engine/passport",
        schema_version=1,
        backend=_PLANS,
        payload=(Payload(path.name, path.stat().st_size, ""),),
        model=Source(path.stem, "", None, path.name),
        signature=Signature((), ()),
        profiles=(),
        precision=Precision(None),
        device=device,
        build=Build("", {}, 0.0, f"tensorrt {header.version}"),
        environment=Environment.here(),
        needs=Needs("tensorrt", header.version),
    )
    config = RuntimeConfig(device=device)
    session = backends()[_PLANS].half("runtime")().load(Engine(path, stated), config)
    signature = session.signature
    session.close()
    for name in sizes:
        signature.input(name)
    return _smoke(Engine(path, replace(stated, signature=signature)), sizes, device, seed)


def _no_plan(path: Path) -> EngineError:
    """The error for an engine by name that is none by content."""
    with path.open("rb") as file:
        head = file.read(64)
    nbytes = path.stat().st_size
    again = "build it again, and look for `Engine generation completed` in the log"
    if not nbytes:
        return EngineError(f"`{path}` is empty: the build that was to write it did not end", hint=again)
    if head[:4] == b"ftrt":
        return EngineError(f"`{path}` begins as a TensorRT plan and ends after {nbytes} bytes", hint=again)
    if head[:1] == b"\x08" and _is_model(path):
        return EngineError(
            f"`{path}` is an ONNX model, expected a TensorRT plan",
            hint=f"rename it to `{path.with_suffix('.onnx').name}`, or build an engine from it",
        )
    return EngineError(
        f"`{path}` is no TensorRT plan: it begins with `{head[:4].hex(' ')}`, a plan with `66 74 72 74` (ftrt)",
        hint="a plan from TensorRT 8.5 or older, or another tool's file, has to be built again here",
    )


def _is_model(path: Path) -> bool:
    try:
        inspect_model(path)
    except TrtEngineError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ run folders

_MAIN = (
    "name title model model_name engine device backend precision peak_streams images_per_s fps stopped_because "
    "engines_built measurements error started"
).split()


def _run_folder(path: Path) -> RunReport:
    """The summary of a run: its document's main figures, one line for each measurement, what lies in it."""
    files = RunFiles.open(path)
    present = [name for name in (SIZE, RUN, PROFILE, COMPARE) if files.has(name)]
    cells = files.cells()
    if not present and not cells and not files.has(RECORDS):
        models = sorted(item.name for item in path.glob("*.onnx")) if path.is_dir() else []
        raise ModelError(
            no_run(path),
            hint=f"`trt-engine inspect {path / models[0]}`" if models else "name a model, an engine or a run folder",
        )
    try:
        documents = [_document(files.read(name)) for name in present]
        measured, damaged = _records(files.read(RECORDS)) if files.has(RECORDS) else ([], 0)
        results = [_document(files.read(name)) for name in cells]
        listed = files.listed()
    except OSError as error:
        raise SetupError(f"cannot read `{path}`: {error.strerror or error}", hint="check its permissions") from error
    of_cells, damaged_cells = _cells(results)
    measured += of_cells
    document = documents[0] if documents else {}
    broken = sum(1 for found in documents if found.get("damaged")) + damaged_cells
    whole = all(bool(found.get("complete", True)) for found in documents)
    whole = whole and all(result.get("state", "done") not in ("interrupted", "waiting") for result in results)
    schema = str(document.get("schema") or "")
    return RunReport(
        path=str(path),
        kind="run",
        verb=schema.rpartition("/")[2].removesuffix("-manifest")
        or (present[0].removesuffix(".json") if document else None),
        complete=whole and not damaged and not broken and all(item["complete"] for item in measured),
        summary={name: document[name] for name in _MAIN if name in document}
        | ({"cells": len(results)} if results else {}),
        measurements=tuple(measured),
        damaged=damaged + broken,
        files=listed,
        nbytes=sum(listed.values()),
    )


def _cells(results: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """One entry for each cell that was measured, and the number of damaged ones."""
    measured, damaged = [], 0
    for result in results:
        try:
            if isinstance(result.get("bench"), dict):
                measured.append(_measurement(result["bench"]))
            elif result.get("damaged"):
                damaged += 1
        except (TypeError, ValueError):
            damaged += 1
    return measured, damaged


def _document(raw: bytes) -> dict[str, Any]:
    """A document of the run; `{"damaged": True}` for one that cannot be read."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"damaged": True}
    return found if isinstance(found, dict) else {"damaged": True}


def _records(raw: bytes) -> tuple[list[dict[str, Any]], int]:
    """One entry for each whole record, and the number of damaged lines."""
    measured, damaged = [], 0
    for line in filter(None, raw.splitlines()):
        try:
            measured.append(_measurement(msgspec.json.decode(line, type=dict[str, Any])))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError):
            damaged += 1
    return measured, damaged


def _measurement(record: dict[str, Any]) -> dict[str, Any]:
    samples = [float(value) for value in record.get("compute_ms") or ()]
    wall_s, queries = float(record.get("wall_s") or 0), int(record.get("queries") or 0)
    qps = queries / wall_s if wall_s > 0 else None
    batch = record.get("batch")
    return {
        "engine": record.get("engine"),
        "backend": record.get("backend"),
        "device": record.get("device"),
        "batch": batch,
        "qps": qps,
        "images_per_s": qps * batch if qps is not None and isinstance(batch, int) else None,
        "mean_ms": sum(samples) / len(samples) if samples else None,
        "samples": len(samples),
        "stable": bool(record.get("stable", True)),
        "complete": bool(record.get("complete", True)),
    }

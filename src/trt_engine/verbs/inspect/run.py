"""`inspect`: what is in a model, an engine, a plan, a run folder or its archive, without running it
unless requested."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from onnx import ModelProto, TensorProto

from trt_engine import run_folder
from trt_engine.atomic_io import as_path, decode_json, open_regular, os_errors, read_bounded
from trt_engine.backend import list_backends
from trt_engine.config.parse import device_name, parse_shapes
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine, engine_path
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.format import quoted
from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.inspect import inspect_model
from trt_engine.graph.lint_rules.model_view import sort_findings, truncate
from trt_engine.graph.load import foreign_format, open_graph, parse_errors
from trt_engine.graph.module_paths import ModulePaths, add_modules
from trt_engine.plan_header import (
    PLAN_BACKENDS,
    PlanHeader,
    cut_container,
    detect_plan,
    find_plan_inside,
    plan_header,
)
from trt_engine.public_function import public_function
from trt_engine.records.base import Finding
from trt_engine.records.bundle import BundleState
from trt_engine.records.inspect import EngineReport, ModelReport, PlanInfo, QuantPlacement, RunReport
from trt_engine.records.passport import BuildInfo, Compatibility, Passport, Payload, Precision, Requirements, Source
from trt_engine.reporting.tables import batch_option
from trt_engine.tensors import Shape, Signature
from trt_engine.trt.compatibility import check_compatibility as engine_verdict
from trt_engine.trt.compatibility import check_plan
from trt_engine.trt.rtx_compatibility import ValidityReport
from trt_engine.verbs.bundle_chain import run_alone
from trt_engine.verbs.bundle_folder import inspect_bundle, is_bundle
from trt_engine.verbs.given_model import AnyModel, takes_model
from trt_engine.verbs.load import load
from trt_engine.vision.spec import declared_shapes

log = logging.getLogger(__name__)

_ENGINE_SUFFIXES = (".engine", ".plan", ".trt")


@public_function
@takes_model("path")
def inspect(
    path: AnyModel,
    *,
    shapes: Mapping[str, Shape] | str | None = None,
    run: bool = False,
    device: str | int | None = None,
    seed: int = 0,
) -> ModelReport | EngineReport | RunReport | BundleState:
    """What is at `path`: an ONNX model, an engine, a bare plan of TensorRT or TensorRT-RTX, a bundle's folder, a run
    folder or its archive.

    `shapes` are where a model is counted and an engine is run; `run` loads the engine or the plan and runs it once on
    seeded inputs, a bundle's all together. Raises `ModelError` for a damaged model, `EngineError` for an
    `.engine` that is not a plan, `UsageError` for `run` on what cannot run, `SetupError` where nothing here could run it.
    """
    path = as_path(path, "`path`")
    sizes, device = parse_shapes(shapes), None if device is None else device_name(device)
    if path.is_dir() and is_bundle(path):
        if sizes:
            raise UsageError(
                f"`--shapes` is for a model or one engine, and `{path}` is a bundle", hint="name one of its engines"
            )
        return inspect_bundle(path, lambda engine: _inspect_engine(Engine.open(engine), {}, False, device, seed), run=run,
                              device=device, seed=seed)  # fmt: skip
    if path.is_dir() or (run_folder.is_archive(path) and path.is_file()):
        _require_no_run(run, path, "a folder" if path.is_dir() else "an archive")
        return _inspect_run_folder(path)
    if engine_path(path) is not None or (path.suffix == ".json" and _is_passport(path)):  # also a damaged one
        return _inspect_engine(Engine.open(path), sizes, run, device, seed)
    if path.is_file() and path.suffix.lower() != ".onnx":
        with os_errors(path, "read"):
            header = plan_header(path)
        if header is not None:
            return _inspect_plan(path, header, sizes, run, device, seed)
        if path.suffix.lower() in _ENGINE_SUFFIXES or detect_plan(path):
            raise _not_a_plan_error(path)
    _require_no_run(run and path.is_file(), path, "a model")
    return _inspect_model(path, sizes)


def _inspect_model(path: Path, sizes: dict[str, Shape]) -> ModelReport:
    """The model's report, with strong-typing findings where its types were chosen on purpose."""
    opened = open_graph(path)
    model, proto = opened.model, opened.model.proto
    report = inspect_model(opened, sizes | declared_shapes(model, sizes))
    known = {item.code for item in report.findings}
    typed = [] if targets_other_library(report.placement) else typing_findings(proto, path, known)
    return replace(report, findings=sort_findings([*report.findings, *typed])) if typed else report


def typing_findings(proto: ModelProto, path: Path, known: Collection[str]) -> list[Finding]:
    """Strong-typing findings of a model whose types were chosen on purpose, beyond the `known` codes."""
    nodes = walk.all_nodes(proto)
    if not any(is_quantize(node) or is_dequantize(node) for node in nodes) and len(_float_types(proto)) < 2:
        return []
    from trt_engine.graph.typing_rules import check_strong_typing  # plain models do without it

    with parse_errors(path):
        found = truncate(item for item in check_strong_typing(proto) if item.code not in known)
        return list(add_modules(found, ModulePaths(proto), "location"))


def targets_other_library(placement: QuantPlacement | None) -> bool:
    """Whether a graph is quantised for a library that is not TensorRT: its typing rules do not apply then."""
    targets = placement.targets if placement is not None else ()
    return bool(targets) and not any("tensorrt" in name for name in targets)


def _float_types(proto: ModelProto) -> set[int]:
    """The types of floating-point inputs and constants, and of what Casts make."""
    types = {tensor.data_type for tensor in walk.tensors(proto)}
    types |= {value.type.tensor_type.elem_type for value in proto.graph.input}
    types |= {item.i for node in walk.all_nodes(proto) for item in node.attribute if item.name == "to"}
    return types & {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}


def _require_no_run(run: bool, path: Path, what: str) -> None:
    if run:
        raise UsageError(
            f"`--run` needs an engine or a plan, and `{path}` is {what}",
            hint=f"build one first: `trt-engine build {quoted(path)} -o {quoted(path.with_suffix('.engine.onnx').name)}"
            f"{batch_option(str(path), batch=False)}`"
            if what == "a model"
            else "give the path of an engine that `trt-engine build` made",
        )


# ------------------------------------------------------------------------------------------------ engines


def _is_passport(path: Path) -> bool:
    try:
        document = decode_json(read_bounded(path, error=EngineError))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(document, dict) and document.get("schema") == "trt-engine/passport"


def _inspect_engine(engine: Engine, sizes: dict[str, Shape], run: bool, device: str | None, seed: int) -> EngineReport:
    for name in sizes:
        engine.signature.input(name)
    header = None
    with suppress(OSError):
        header = plan_header(engine.path)
    compatibility = _check_compatibility(engine, header, device)
    smoke = None
    if run:
        _require_runtime(engine.passport.backend)
    if run and compatibility.status in ("rebuild", "refuse"):
        raise EngineError(
            f"`{engine.path}` cannot be run here: {compatibility.reason}",
            hint=compatibility.command or "trt-engine doctor",
        )
    if run:
        smoke = _smoke_run(engine, sizes, device, seed)
    return EngineReport(
        path=str(engine.path),
        kind="engine",
        compatibility=compatibility,
        tensorrt_version=_tensorrt_version(header),
        plan=_plan_info(engine.path, header),
        nbytes=sum(item.nbytes for item in engine.passport.payload),
        passport=engine.passport,
        smoke_run=smoke,
    )


def _check_compatibility(engine: Engine, header: PlanHeader | None, device: str | None) -> Compatibility:
    """Whether the engine is intact and its backend can load it here, without loading it."""
    try:
        engine.verify()
    except EngineError as error:
        return Compatibility("refuse", error.message, _command_in_hint(error.hint) or engine.passport.build.command)
    backend_spec = list_backends().get(engine.passport.backend)
    if backend_spec is None:
        return Compatibility(
            "refuse", f"it was built by the backend `{engine.passport.backend}`, which is not here", "trt-engine doctor"
        )
    if header is not None and (
        backend_spec.missing_modules() or not backend_spec.provides("compatibility")
    ):  # a plan is judged without its backend too
        return engine_verdict(engine, RuntimeConfig(device=device))
    if not backend_spec.provides("compatibility"):
        missing = backend_spec.missing_modules()
        if missing:
            return Compatibility(
                "refuse", f"the backend `{backend_spec.name}` needs {', '.join(missing)}", backend_spec.install
            )
        return Compatibility("loads", f"the backend `{backend_spec.name}` is installed")
    try:
        found: Compatibility = backend_spec.load_function("compatibility")(engine, RuntimeConfig(device=device))
    except (SetupError, EngineError) as error:
        return Compatibility("refuse", error.message, _command_in_hint(error.hint))
    return found


def _command_in_hint(hint: str | None) -> str | None:
    """The part of a hint that can be typed."""
    if hint is None:
        return None
    before, quote, rest = hint.partition("`")
    return rest.partition("`")[0] if quote else before


def _smoke_run(engine: Engine, sizes: dict[str, Shape], device: str | None, seed: int) -> dict[str, Any]:
    """The engine loaded and run on seeded inputs."""
    log.info("running %s once on seeded inputs", engine.path.name)
    started = time.perf_counter()
    with load(engine, config=RuntimeConfig(device=device), verify=False) as runner:
        load_ms = (time.perf_counter() - started) * 1e3
        return {"load_ms": load_ms} | run_alone(runner, seed, sizes=sizes)


# ------------------------------------------------------------------------------------------------ bare plans


def _inspect_plan(
    path: Path, header: PlanHeader, sizes: dict[str, Shape], run: bool, device: str | None, seed: int
) -> EngineReport:
    kind, number = parse_device("cuda:0" if device is None else device)
    smoke, backend = None, PLAN_BACKENDS[header.product]
    if run:
        _require_runtime(backend)
    compatibility = _check_plan_compatibility(path, header, number if kind == "cuda" else None)
    if run:
        if compatibility.status in ("rebuild", "refuse"):
            raise EngineError(f"`{path}` cannot be run here: {compatibility.reason}", hint=compatibility.command)
        smoke = _smoke_run_plan(path, header, sizes, f"{kind}:{number}", seed)
    return EngineReport(
        path=str(path),
        kind="plan",
        compatibility=compatibility,
        tensorrt_version=_tensorrt_version(header),
        plan=_plan_info(path, header),
        nbytes=path.stat().st_size,
        smoke_run=smoke,
    )


def _check_plan_compatibility(path: Path, header: PlanHeader, device: int | None) -> Compatibility:
    """Whether a plan without a passport can be loaded here; by the library itself where it is installed."""
    backend_spec = list_backends()[PLAN_BACKENDS[header.product]]

    def ask(plan: Path) -> ValidityReport:
        found: ValidityReport = backend_spec.load_function("plan_validity")(
            plan
        )  # the library is loaded where it has something to look at
        return found

    try:
        return check_plan(
            header,
            None,
            path=path,
            device=device,
            query_validity=ask if backend_spec.provides("plan_validity") else None,
        )
    except SetupError as error:
        return Compatibility("refuse", error.message, _command_in_hint(error.hint))


def _tensorrt_version(header: PlanHeader | None) -> str | None:
    return header.version if header is not None and header.product == "TensorRT" else None


def _plan_info(path: Path, header: PlanHeader | None) -> PlanInfo | None:
    if header is None:
        return None
    container = header.container
    return PlanInfo(
        product=header.product,
        version=header.version,
        compute_capabilities=header.compute_capabilities,
        has_ptx=header.has_ptx,
        weight_nbytes=header.weight_nbytes,
        container=container.tool if container is not None else None,
        offset=header.offset,
        metadata=container.metadata if container is not None else {},
        strip_command=header.strip_command(path),
    )


def _require_runtime(name: str) -> None:
    """`SetupError` with the install line unless something here runs that backend's engines."""
    known = list_backends()
    if name not in known:
        return
    backend_spec = known[name]
    others = (known[other] for other in backend_spec.runtimes if other in known)
    next((other for other in others if not other.missing_modules("runtime")), backend_spec).load_component("runtime")


def _smoke_run_plan(path: Path, header: PlanHeader, sizes: dict[str, Shape], device: str, seed: int) -> dict[str, Any]:
    """One run of a plan without a passport: the signature is read from the loaded plan."""
    backend = PLAN_BACKENDS[header.product]
    stated = Passport(
        schema="trt-engine/passport",
        schema_version=1,
        backend=backend,
        payload=(Payload(path.name, path.stat().st_size, ""),),
        model=Source(path.stem, "", None, path.name),
        signature=Signature((), ()),
        profiles=(),
        precision=Precision(None),
        device=device,
        build=BuildInfo("", {}, 0.0, f"{backend} {header.version}"),
        environment=Environment.detect(),
        requirements=Requirements(backend, header.version),
    )
    config = RuntimeConfig(device=device)
    session = list_backends()[backend].load_component("runtime")().load(Engine(path, stated), config)
    signature = session.signature
    session.close()
    for name in sizes:
        signature.input(name)
    return _smoke_run(Engine(path, replace(stated, signature=signature)), sizes, device, seed)


def _not_a_plan_error(path: Path) -> EngineError:
    """Error for a file with an engine's name but other content."""
    with open_regular(path, error=EngineError) as file:
        head = file.read(128)
    nbytes = path.stat().st_size
    again = "build it again, and look for `Engine generation completed` in the log"
    if not nbytes:
        return EngineError(f"`{path}` is empty: the build that was to write it did not end", hint=again)
    if product := detect_plan(path):
        return EngineError(f"`{path}` begins as a plan of {product} and ends after {nbytes} bytes", hint=again)
    if head[:1] == b"\x08" and _is_model(path):
        return EngineError(
            f"`{path}` is an ONNX model, expected a plan",
            hint=f"rename it to `{path.with_suffix('.onnx').name}`, or build an engine from it",
        )
    if (tool := cut_container(path)) is not None:
        return EngineError(
            f"`{path}` is an engine of {tool} that was cut: it ends after {nbytes} bytes, before its plan",
            hint="copy it again, and compare its size; or export it again",
        )
    if (inside := find_plan_inside(path)) is not None:
        at, product = inside
        strip = f"tail -c +{at + 1} {shlex.quote(str(path))} > {shlex.quote(path.stem)}.plan"
        return EngineError(
            f"`{path}` is the file of another tool with a plan of {product} inside, from byte {at}",
            hint=f"if nothing follows the plan, `{strip}` writes it alone; "
            "else load the file with the tool that wrote it",
        )
    if (other := foreign_format(head)) is not None:
        return EngineError(f"`{path}` is {other[0]}, expected a plan", hint=other[1])
    return EngineError(
        f"`{path}` is not a plan: it begins with `{head[:4].hex(' ')}`, one of TensorRT with `66 74 72 74` (ftrt), one of "
        "TensorRT-RTX with `76 74 72 74` (vtrt)",
        hint="load it with the tool that wrote it, or build an engine from its `.onnx` model",
    )


def _is_model(path: Path) -> bool:
    try:
        inspect_model(path)
    except TrtEngineError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ run folders

_SUMMARY_KEYS = (
    "name title model model_name engine device backend precision peak_streams images_per_s fps stop_reason "
    "engines_built measurements error started"
).split()


def _inspect_run_folder(path: Path) -> RunReport:
    """The summary of a run: its document's main figures, one line for each measurement, its files."""
    files = run_folder.RunFiles.open(path)
    present = [
        name
        for name in (run_folder.SIZE, run_folder.RUN, run_folder.PROFILE, run_folder.COMPARE)
        if files.contains(name)
    ]
    cells = files.cell_names()
    recorded = [name for name in (run_folder.RECORDS, run_folder.LOADTEST) if files.contains(name)]
    if not present and not cells and not recorded:
        models = sorted(item.name for item in path.glob("*.onnx")) if path.is_dir() else []
        raise ModelError(
            run_folder.not_a_run_folder(path),
            hint=f"`trt-engine inspect {path / models[0]}`" if models else "name a model, an engine or a run folder",
        )
    try:
        documents = [_read_document(files.read(name)) for name in present]
        measured, damaged = _summarize_records(b"\n".join(files.read(name) for name in recorded))
        results = [_read_document(files.read(name)) for name in cells]
        listed = files.file_sizes()
    except OSError as error:
        raise SetupError(f"cannot read `{path}`: {error.strerror or error}", hint="check its permissions") from error
    of_cells, damaged_cells = _summarize_cells(results)
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
        summary={name: document[name] for name in _SUMMARY_KEYS if name in document}
        | ({"cells": len(results)} if results else {}),
        measurements=tuple(measured),
        damaged=damaged + broken,
        files=listed,
        nbytes=sum(listed.values()),
    )


def _summarize_cells(results: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """One entry for each cell that was measured, and the number of damaged ones."""
    measured, damaged = [], 0
    for result in results:
        try:
            if isinstance(result.get("bench"), dict):
                measured.append(_summarize_measurement(result["bench"]))
            elif result.get("damaged"):
                damaged += 1
        except (TypeError, ValueError):
            damaged += 1
    return measured, damaged


def _read_document(raw: bytes) -> dict[str, Any]:
    """A document of the run; `{"damaged": True}` for one that cannot be read."""
    try:
        found = decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"damaged": True}
    return found if isinstance(found, dict) else {"damaged": True}


def _summarize_records(raw: bytes) -> tuple[list[dict[str, Any]], int]:
    """One entry per intact record, and the number of damaged lines."""
    measured, damaged = [], 0
    for line in filter(None, raw.splitlines()):
        try:
            measured.append(_summarize_measurement(decode_json(line, dict[str, Any])))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError):
            damaged += 1
    return measured, damaged


def _summarize_measurement(record: dict[str, Any]) -> dict[str, Any]:
    loaded = "latency_ms" in record and "interface" in record  # of `loadtest`
    samples = [float(value) for value in record.get("latency_ms" if loaded else "compute_ms") or ()]
    queries = len(samples) if loaded else int(record.get("queries") or 0)
    wall_s = float(record.get("wall_s") or 0)
    qps = queries / wall_s if wall_s > 0 else None
    batch = record.get("batch")
    return {
        "engine": record.get("model" if loaded else "engine"),
        "backend": record.get("server" if loaded else "backend"),
        "device": record.get("interface" if loaded else "device"),
        "batch": batch,
        "qps": qps,
        "images_per_s": qps * batch if qps is not None and isinstance(batch, int) else None,
        "mean_ms": sum(samples) / len(samples) if samples else None,
        "samples": len(samples),
        "stable": bool(record.get("stable", True)),
        "complete": bool(record.get("complete", True)),
    }

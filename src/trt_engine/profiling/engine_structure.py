"""The structure of an engine in a common form: TensorRT's layers from either inspector, the nodes of ONNX Runtime's
optimized graph or of a model, and the timed layers of a profile.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.atomic_io import decode_json, open_regular, read_bounded
from trt_engine.backend import get_backend
from trt_engine.backends.onnxruntime.node_mapping import map_nodes
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine, engine_path, is_onnx_model
from trt_engine.errors import EngineError, ModelError, SetupError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.cost import model_cost
from trt_engine.graph.dtype_breakdown import compute_layers
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import ModulePaths
from trt_engine.graph.shape_inference import flatten
from trt_engine.profiling.kernel_categories import operator_category
from trt_engine.records.profile import Category, LayerProfile
from trt_engine.run_folder import PROFILE
from trt_engine.tensors import DTYPES, Shape
from trt_engine.trt.layers import LayerInfo, compute_dtypes, read_layers
from trt_engine.trt.trtexec_exports import read_profile

_SCHEMA, _VERSION = "trt-engine/profile", 1
_EXPECTED = "expected an engine, an ONNX model, an inspector's JSON (`trtexec --exportLayerInfo`) or a `profile.json`"


@dataclass(frozen=True, slots=True)
class StructureLayer:
    """One layer, or node."""

    name: str
    kind: str
    """TensorRT's layer type, or the operator; empty if only the name is known."""
    category: Category
    precision: str | None = None
    """Compute dtype: `fp16`; None if it moves data, or is unknown."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of its outputs."""
    shapes: tuple[Shape, ...] = ()
    """Shapes of its outputs; -1 is unknown."""
    tactic: str | None = None
    onnx_nodes: tuple[str, ...] = ()
    ms: float | None = None
    module: str | None = None
    """The PyTorch module of its nodes, or None."""

    @property
    def is_data_movement(self) -> bool:
        """True for a layer that only moves, converts or copies data."""
        return self.category in ("reformat", "copy")


@dataclass(frozen=True, slots=True)
class Structure:
    """One side of a comparison."""

    label: str
    schema: str
    """The format it was read from."""
    layers: tuple[StructureLayer, ...]
    """In the order they run."""
    build: dict[str, Any] = field(default_factory=dict)
    """Versions, settings and precision of its passport, by name."""
    warnings: tuple[str, ...] = ()

    @property
    def is_timed(self) -> bool:
        return any(part.ms is not None for part in self.layers)


def read_structure(path: Path | str, times: Path | str | None = None, *, model: Path | str | None = None) -> Structure:
    """The layers of the file at `path`, with times by name from `times` if given (a `profile.json`, or trtexec's
    `--exportProfile`). ONNX Runtime's nodes are traced back to those of `model`, else of the model the engine was built
    from, else by their names.

    Raises `UsageError` for a file without layers, `EngineError` and `ModelError` for a damaged or missing file,
    `SetupError` if an engine's library is not installed.
    """
    found = _read_file(Path(path), None if model is None else Path(model))
    return found if times is None else _add_times(found, Path(times))


def _read_file(path: Path, model: Path | None) -> Structure:
    if path.is_dir() and (path / PROFILE).is_file():
        return _read_file(path / PROFILE, model)
    if not path.exists():
        raise ModelError(f"no such file `{path}`", hint=_EXPECTED)
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder without a `{PROFILE}`", hint=_EXPECTED)
    if engine_path(path) is not None:
        engine = Engine.open(path)
        model = model or engine.model_path
        return _add_modules(_engine_structure(engine, model), model)
    if is_onnx_model(path):
        return _add_modules(_graph_structure(path, str(path), "onnx model"), path)
    if path.suffix.lower() == ".json":
        return _add_modules(_json_structure(path), model)
    open_regular(path).close()
    raise UsageError(f"`{path}` is not a file whose layers could be read", hint=_EXPECTED)


def _add_modules(found: Structure, model: Path | None) -> Structure:
    """The structure with the PyTorch modules of the model; a profile includes them."""
    paths = ModulePaths(None if model is None else read_proto(model))
    parts = (dataclasses.replace(part, module=part.module or paths.path_of(*part.onnx_nodes)) for part in found.layers)
    return dataclasses.replace(found, layers=tuple(parts))


# ------------------------------------------------------------------------------------------------ engines


def _export_hint(engine: Path) -> str:
    loaded = shlex.quote(str(engine))
    return f"export it where TensorRT is: `trtexec --loadEngine={loaded} --exportLayerInfo=layers.json`, then diff that file"


def _engine_structure(engine: Engine, model: Path | None) -> Structure:
    passport = engine.passport
    label, backend_spec = str(engine.path), get_backend(passport.backend)
    build: dict[str, Any] = {"backend": passport.backend, "built by": passport.build.identity}
    build |= {"precision": passport.precision.main_dtype, "device": passport.device, "model": passport.model.digest}
    build |= {name: value for name, value in passport.build.config.items() if value not in (None, (), {}, [])}
    build |= {f"note {name}": value for name, value in passport.build.notes.items()}
    if backend_spec.payload_suffix == ".onnx":
        found = _graph_structure(
            engine.path,
            label,
            "onnxruntime graph",
            build=True,
            quantized=passport.build.notes.get("load_optimization", "none") == "none",
            model=model,
        )
        return dataclasses.replace(found, build=build)
    runners = [name for name in (passport.backend, *backend_spec.runtimes) if get_backend(name).provides("layers")]
    if not runners:
        raise UsageError(
            f"the backend `{passport.backend}` of `{engine.path}` has no layer information",
            hint=_export_hint(engine.path),
        )
    try:
        layers = get_backend(runners[0]).load_function("layers")(engine, RuntimeConfig())
    except SetupError as error:
        raise SetupError(
            f"the layers of `{engine.path}` cannot be read here: {error.message}",
            hint=_export_hint(engine.path)
            if backend_spec.resolve_gpus is None
            else "run it on a machine with a GPU that the engine is for",
        ) from error
    found = _layers_structure(tuple(layers), label, f"tensorrt {_major_version(passport.build.identity)}inspector")
    return dataclasses.replace(found, build=build)


def _major_version(identity: str) -> str:
    words = identity.split()
    number = words[1].partition(".")[0] if len(words) > 1 else ""
    return f"{number} " if number.isdigit() else ""


# ------------------------------------------------------------------------------------------------ files of JSON


def _json_structure(path: Path) -> Structure:
    try:
        document = decode_json(read_bounded(path, error=EngineError))
    except OSError as error:
        raise SetupError(
            f"cannot read `{path}`: {error.strerror}", hint="check the file and its permissions"
        ) from error
    except msgspec.DecodeError as error:
        raise EngineError(f"`{path}` is not JSON: {error}", hint="write it again: it may be truncated") from error
    if isinstance(document, Mapping) and "layers" in document and "instruments" in document:
        return _profile_structure(document, path)
    if isinstance(document, list) and any(isinstance(item, Mapping) and "averageMs" in item for item in document):
        raise UsageError(
            f"`{path}` has times of layers and no structure",
            hint="give it with `--layer-times`, beside what `trtexec --exportLayerInfo` wrote",
        )
    if isinstance(document, list) or (isinstance(document, Mapping) and "Layers" in document):
        given = document if isinstance(document, Mapping) else {"Layers": document}
        layers = read_layers(given)
        if not layers:
            raise EngineError(f"`{path}` contains no layer", hint=_EXPECTED)
        return _layers_structure(layers, str(path), f"tensorrt {_layer_schema(given)}inspector")
    raise UsageError(f"`{path}` has no layers in it", hint=_EXPECTED)


def _layer_schema(document: Mapping[str, Any]) -> str:
    """`10 ` or `11 `, by how the inspector writes types; empty if no layer is complete."""
    text = repr(document.get("Layers"))
    return "10 " if "'Format/Datatype'" in text else "11 " if "'DataType'" in text or "'Datatype'" in text else ""


def _profile_structure(document: Mapping[str, Any], path: Path) -> Structure:
    if document.get("schema") != _SCHEMA:
        raise UsageError(f"`{path}` is not a `{_SCHEMA}` document", hint=_EXPECTED)
    if document.get("schema_version") != _VERSION:
        raise UsageError(
            f"`{path}` has schema version {document.get('schema_version')}, this tool reads {_VERSION}",
            hint="profile again, or read it with the version of the tool that wrote it",
        )
    try:
        layers = msgspec.convert(document["layers"], LayerProfile | None)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"`{path}` is not what `profile` writes: {error}", hint="run `trt-engine profile` again"
        ) from error
    if layers is None:
        raise UsageError(
            f"the profile `{path}` has no layers: this profiler does not report them",
            hint="`trt-engine profile ENGINE --profiler layers`",
        )
    build = {name: document.get(name) for name in ("backend", "precision", "device")}
    return profile_structure(layers, str(document.get("engine") or path), build)


def profile_structure(layers: LayerProfile, label: str, build: dict[str, Any] | None = None) -> Structure:
    """The layers of a profile, with their times."""
    parts = [
        StructureLayer(
            row.name,
            row.kind,
            row.category,
            row.precision or None,
            row.dtypes,
            row.shapes,
            None,
            row.onnx_nodes,
            row.median_ms,
            row.module,
        )
        for row in layers.rows
    ]
    return Structure(label, f"profile by {layers.instrument}", tuple(parts), build or {})


def _add_times(found: Structure, path: Path) -> Structure:
    """The structure with the times of that file, joined by name and, for repeated names, by order."""
    waiting: dict[str, list[float]] = defaultdict(list)
    for name, taken in _read_times(path):
        waiting[name].append(taken)
    parts, missed = [], 0
    for part in found.layers:
        ms = waiting[part.name].pop(0) if waiting.get(part.name) else None
        missed += ms is None
        parts.append(dataclasses.replace(part, ms=ms))
    if missed == len(parts):
        raise UsageError(
            f"no layer of `{found.label}` is in the times of `{path}`",
            hint="profile that very engine, then give its file",
        )
    stated = (f"`{path}` has no time for {missed} of {len(parts)} layers",) if missed else ()
    return dataclasses.replace(found, layers=tuple(parts), warnings=(*found.warnings, *stated))


def _read_times(path: Path) -> list[tuple[str, float]]:
    if path.is_dir():
        path = path / PROFILE
    if not path.is_file():
        raise ModelError(f"no such file of times `{path}`", hint="a `profile.json`, or trtexec's `--exportProfile`")
    try:
        return [(row.name, row.median_ms) for row in read_profile(path)[1]]  # trtexec's
    except EngineError:
        profiled = _json_structure(path)
    if not profiled.is_timed:
        raise UsageError(f"`{path}` has no times", hint="a `profile.json`, or trtexec's `--exportProfile`")
    return [(part.name, part.ms or 0.0) for part in profiled.layers]


# ------------------------------------------------------------------------------------------------ layers and nodes


def _layers_structure(layers: Sequence[LayerInfo], label: str, schema: str) -> Structure:
    kinds = compute_dtypes(layers)
    parts = [
        StructureLayer(
            layer.name,
            layer.kind,
            "reformat"
            if layer.reformat
            else operator_category(layer.kind, name=layer.name, is_data_movement=layer.is_data_movement),
            kinds.get(place),
            tuple(tensor.dtype or "" for tensor in layer.outputs),
            tuple(tensor.dims or () for tensor in layer.outputs),
            layer.tactic,
            layer.onnx_nodes,
        )
        for place, layer in enumerate(layers)
    ]
    named = sum(not layer.is_detailed for layer in layers)
    stated = (
        (
            f"`{label}` has only the names of {named} of its {len(layers)} layers: types and tactics need an engine "
            "built with `-O profiling_verbosity=detailed`",
        )
        if named
        else ()
    )
    return Structure(label, schema if named < len(layers) else f"{schema}, names alone", tuple(parts), warnings=stated)


def _graph_structure(
    path: Path, label: str, schema: str, *, build: bool = False, quantized: bool = False, model: Path | None = None
) -> Structure:
    """The nodes of a graph; with `literal` its Q/DQ pairs are fused already (`census.layers_of`)."""
    proto = read_proto(path)
    cost = model_cost(proto, {})
    kinds = {layer.step.key: layer.dtype for layer in compute_layers(proto, cost, literal=quantized)}
    made_of = map_nodes(proto, None if model is None else read_proto(model)) if build else {}
    parts = []
    for step in flatten(cost.trace.nodes) if cost.trace is not None else []:
        node = step.node
        if node.op_type == "Constant":
            continue
        key = next((name for name in node.output if name), node.name)
        parts.append(
            StructureLayer(
                walk.label(node),
                node.op_type,
                operator_category(node.op_type, name=node.name),
                kinds.get(step.key),
                tuple(_DTYPE_NAMES.get(fact.elem, "") for fact in step.outputs),
                tuple(fact.shape or () for fact in step.outputs),
                None,
                made_of.get(key, ()) if build else (walk.label(node),),
            )
        )
    return Structure(label, schema, tuple(parts))


_DTYPE_NAMES = {kind.onnx: name for name, kind in reversed(DTYPES.items())}

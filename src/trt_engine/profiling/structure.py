"""What an engine consists of, in one form for all: TensorRT's layers of either inspector, the nodes of ONNX Runtime's
optimised graph, those of a model, and the layers of a profile, which have times.
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

from trt_engine.backend import backend
from trt_engine.backends.onnxruntime.origins import origins
from trt_engine.config import RuntimeConfig
from trt_engine.engine import Engine, engine_path, is_bare_model
from trt_engine.errors import EngineError, ModelError, SetupError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.census import layers_of
from trt_engine.graph.flops import count
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import ModulePaths
from trt_engine.graph.trace import flatten
from trt_engine.plans.exports import read_profile
from trt_engine.plans.layers import LayerInfo, kinds_of, read_layers
from trt_engine.profiling.categories import of_operator
from trt_engine.runfiles import PROFILE
from trt_engine.tensors import DTYPES, Shape
from trt_engine.traces import Category, LayerProfile

__all__ = ["Part", "Structure", "read_structure"]

_SCHEMA, _VERSION = "trt-engine/profile", 1
_EXPECTED = "expected an engine, an ONNX model, an inspector's JSON (`trtexec --exportLayerInfo`) or a `profile.json`"


@dataclass(frozen=True, slots=True)
class Part:
    """One layer, or node."""

    name: str
    kind: str
    """TensorRT's word, or the operator; empty where the name alone is told."""
    category: Category
    precision: str | None = None
    """What it computes in: `fp16`; None where it moves data, or nothing tells."""
    dtypes: tuple[str, ...] = ()
    """Element types of its outputs."""
    shapes: tuple[Shape, ...] = ()
    """Of its outputs; -1 is not known."""
    tactic: str | None = None
    onnx_nodes: tuple[str, ...] = ()
    ms: float | None = None
    module: str | None = None
    """The PyTorch module of its nodes; None where it is not known."""

    @property
    def moves(self) -> bool:
        """True for what lays out, converts or copies and computes nothing."""
        return self.category in ("reformat", "copy")


@dataclass(frozen=True, slots=True)
class Structure:
    """One side of a comparison."""

    label: str
    schema: str
    """How it was read."""
    parts: tuple[Part, ...]
    """In the order they run."""
    build: dict[str, Any] = field(default_factory=dict)
    """Versions, settings and precision of its passport, by name."""
    warnings: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        return any(part.ms is not None for part in self.parts)


def read_structure(path: Path | str, times: Path | str | None = None, *, model: Path | str | None = None) -> Structure:
    """The parts of what lies at `path`, with times by name from `times` where they are given (a `profile.json`, or what
    trtexec's `--exportProfile` wrote). ONNX Runtime's nodes are traced back to those of `model`, else of the
    model the engine was built from, else by their names.

    Raises `UsageError` for what has no layers to tell of, `EngineError` and `ModelError` for a damaged or missing file,
    `SetupError` where an engine's library is not here to tell.
    """
    found = _read(Path(path), None if model is None else Path(model))
    return found if times is None else _timed(found, Path(times))


def _read(path: Path, model: Path | None) -> Structure:
    if path.is_dir() and (path / PROFILE).is_file():
        return _read(path / PROFILE, model)
    if not path.exists():
        raise ModelError(f"no such file `{path}`", hint=_EXPECTED)
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder without a `{PROFILE}`", hint=_EXPECTED)
    if engine_path(path) is not None:
        engine = Engine.open(path)
        model = model or _if_there(Path(engine.passport.model.file))
        return _with_modules(_of_engine(engine, model), model)
    if is_bare_model(path):
        return _with_modules(_of_graph(path, str(path), "onnx model"), path)
    if path.suffix.lower() == ".json":
        return _with_modules(_of_json(path), model)
    raise UsageError(f"`{path}` is not a file whose layers could be read", hint=_EXPECTED)


def _if_there(path: Path) -> Path | None:
    return path if path.is_file() else None


def _with_modules(found: Structure, model: Path | None) -> Structure:
    """The structure with the PyTorch modules that the model names; those of a profile stand in it."""
    paths = ModulePaths(None if model is None else read_proto(model))
    parts = (dataclasses.replace(part, module=part.module or paths.of(*part.onnx_nodes)) for part in found.parts)
    return dataclasses.replace(found, parts=tuple(parts))


# ------------------------------------------------------------------------------------------------ engines


def _export_it(engine: Path) -> str:
    loaded = shlex.quote(str(engine))
    return f"export it where TensorRT is: `trtexec --loadEngine={loaded} --exportLayerInfo=layers.json`, then diff that file"


def _of_engine(engine: Engine, model: Path | None) -> Structure:
    passport = engine.passport
    label, card = str(engine.path), backend(passport.backend)
    build: dict[str, Any] = {"backend": passport.backend, "built by": passport.build.identity}
    build |= {"precision": passport.precision.main, "device": passport.device, "model": passport.model.digest}
    build |= {name: value for name, value in passport.build.config.items() if value not in (None, (), {}, [])}
    build |= {f"note {name}": value for name, value in passport.build.notes.items()}
    if card.payload_suffix == ".onnx":
        found = _of_graph(
            engine.path,
            label,
            "onnxruntime graph",
            built=True,
            literal=passport.build.notes.get("load_optimization", "none") == "none",
            model=model,
        )
        return dataclasses.replace(found, build=build)
    runners = [name for name in (passport.backend, *card.run_by) if backend(name).has("layers")]
    if not runners:
        raise UsageError(
            f"the backend `{passport.backend}` of `{engine.path}` tells nothing of its layers",
            hint=_export_it(engine.path),
        )
    try:
        layers = backend(runners[0]).call("layers")(engine, RuntimeConfig())
    except SetupError as error:
        raise SetupError(
            f"the layers of `{engine.path}` cannot be read here: {error.message}", hint=_export_it(engine.path)
        ) from error
    found = _of_layers(tuple(layers), label, f"tensorrt {_major(passport.build.identity)}inspector")
    return dataclasses.replace(found, build=build)


def _major(identity: str) -> str:
    words = identity.split()
    number = words[1].partition(".")[0] if len(words) > 1 else ""
    return f"{number} " if number.isdigit() else ""


# ------------------------------------------------------------------------------------------------ files of JSON


def _of_json(path: Path) -> Structure:
    try:
        document = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise SetupError(
            f"cannot read `{path}`: {error.strerror}", hint="check the file and its permissions"
        ) from error
    except msgspec.DecodeError as error:
        raise EngineError(f"`{path}` is no JSON: {error}", hint="write it again: it may have been cut") from error
    except RecursionError as error:
        raise EngineError(f"`{path}` is nested too deeply to be read", hint=_EXPECTED) from error
    if isinstance(document, Mapping) and "layers" in document and "rungs" in document:
        return _of_profile(document, path)
    if isinstance(document, list) and any(isinstance(item, Mapping) and "averageMs" in item for item in document):
        raise UsageError(
            f"`{path}` has times of layers and no structure",
            hint="give it with `--times`, beside what `trtexec --exportLayerInfo` wrote",
        )
    if isinstance(document, list) or (isinstance(document, Mapping) and "Layers" in document):
        given = document if isinstance(document, Mapping) else {"Layers": document}
        layers = read_layers(given)
        if not layers:
            raise EngineError(f"`{path}` tells of no layer", hint=_EXPECTED)
        return _of_layers(layers, str(path), f"tensorrt {_schema(given)}inspector")
    raise UsageError(f"`{path}` has no layers in it", hint=_EXPECTED)


def _schema(document: Mapping[str, Any]) -> str:
    """`10 ` or `11 `, by how the inspector writes types; nothing where no layer is told in full."""
    text = repr(document.get("Layers"))
    return "10 " if "'Format/Datatype'" in text else "11 " if "'DataType'" in text or "'Datatype'" in text else ""


def _of_profile(document: Mapping[str, Any], path: Path) -> Structure:
    if document.get("schema") != _SCHEMA:
        raise UsageError(f"`{path}` is no `{_SCHEMA}` document", hint=_EXPECTED)
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
            f"the profile `{path}` has no layers: this rung does not tell them",
            hint="`trt-engine profile ENGINE --rung layers`",
        )
    parts = [
        Part(
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
    label = str(document.get("engine") or path)
    build = {
        "backend": document.get("backend"),
        "precision": document.get("precision"),
        "device": document.get("device"),
    }
    return Structure(label, f"profile by {layers.instrument}", tuple(parts), build)


def _timed(found: Structure, path: Path) -> Structure:
    """The structure with the times of that file, joined by name and, where names repeat, by order."""
    waiting: dict[str, list[float]] = defaultdict(list)
    for name, taken in _times(path):
        waiting[name].append(taken)
    parts, missed = [], 0
    for part in found.parts:
        ms = waiting[part.name].pop(0) if waiting.get(part.name) else None
        missed += ms is None
        parts.append(dataclasses.replace(part, ms=ms))
    if missed == len(parts):
        raise UsageError(
            f"no layer of `{found.label}` is in the times of `{path}`",
            hint="profile that very engine, then give its file",
        )
    told = (f"`{path}` has no time for {missed} of {len(parts)} layers",) if missed else ()
    return dataclasses.replace(found, parts=tuple(parts), warnings=(*found.warnings, *told))


def _times(path: Path) -> list[tuple[str, float]]:
    if path.is_dir():
        path = path / PROFILE
    if not path.is_file():
        raise ModelError(f"no such file of times `{path}`", hint="a `profile.json`, or trtexec's `--exportProfile`")
    try:
        return [(row.name, row.median_ms) for row in read_profile(path)[1]]  # trtexec's
    except EngineError:
        profiled = _of_json(path)
    if not profiled.timed:
        raise UsageError(f"`{path}` has no times", hint="a `profile.json`, or trtexec's `--exportProfile`")
    return [(part.name, part.ms or 0.0) for part in profiled.parts]


# ------------------------------------------------------------------------------------------------ layers and nodes


def _of_layers(layers: Sequence[LayerInfo], label: str, schema: str) -> Structure:
    kinds = kinds_of(layers)
    parts = [
        Part(
            layer.name,
            layer.kind,
            "reformat" if layer.reformat else of_operator(layer.kind, name=layer.name, moves=layer.moves),
            kinds.get(place),
            tuple(tensor.dtype or "" for tensor in layer.outputs),
            tuple(tensor.dims or () for tensor in layer.outputs),
            layer.tactic,
            layer.onnx_nodes,
        )
        for place, layer in enumerate(layers)
    ]
    named = sum(not layer.detailed for layer in layers)
    told = (
        (
            f"`{label}` tells only the names of {named} of its {len(layers)} layers: types and tactics need an engine "
            "built with `-O profiling_verbosity=detailed`",
        )
        if named
        else ()
    )
    return Structure(label, schema if named < len(layers) else f"{schema}, names alone", tuple(parts), warnings=told)


def _of_graph(
    path: Path, label: str, schema: str, *, built: bool = False, literal: bool = False, model: Path | None = None
) -> Structure:
    """The nodes of a graph; `literal` says that its Q/DQ pairs are fused already (`census.layers_of`)."""
    proto = read_proto(path)
    cost = count(proto, {})
    kinds = {layer.step.key: layer.kind for layer in layers_of(proto, cost, literal=literal)}
    made_of = origins(proto, None if model is None else read_proto(model)) if built else {}
    parts = []
    for step in flatten(cost.trace.steps) if cost.trace is not None else []:
        node = step.node
        if node.op_type == "Constant":
            continue
        key = next((name for name in node.output if name), node.name)
        parts.append(
            Part(
                walk.label(node),
                node.op_type,
                of_operator(node.op_type, name=node.name),
                kinds.get(step.key),
                tuple(_dtype(fact.elem) for fact in step.outputs),
                tuple(fact.shape or () for fact in step.outputs),
                None,
                made_of.get(key, ()) if built else (walk.label(node),),
            )
        )
    return Structure(label, schema, tuple(parts))


def _dtype(elem: int) -> str:
    return next((name for name, kind in DTYPES.items() if kind.onnx == elem), "")

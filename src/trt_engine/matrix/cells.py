"""From a plan to its cells: models x precisions x backends x batches, each with a label, a digest and its settings."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trt_engine import files
from trt_engine.api.preparing import placement_target
from trt_engine.backend import backend
from trt_engine.cells import CellSpec
from trt_engine.config import PRECISIONS, BuildConfig, is_preset
from trt_engine.device import parse_device
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.matrix.parts import OWN_SETTINGS
from trt_engine.matrix.plan import AS_IS, MODES, PROFILED, ModelEntry, OwnFile, Plan, Route, shapes_of
from trt_engine.model import Model
from trt_engine.tensors import closest

__all__ = ["cells_of", "chosen", "modes_of", "safe_label"]

_ON_GPU = ("cuda", "tensorrt")
_QUANTISED = ("int8", "fp8", "int4", "nvfp4", "mxfp8")
_MOST_CELLS = 5000
_MOST_FILES = 200_000
_LONGEST = 120


def modes_of(asked: Sequence[str]) -> tuple[str, ...]:
    """The modes behind the words of a plan or a command line; every engine is built."""
    words = ["bench" if word == "benchmark" else word for word in asked]
    for word in words:
        if word not in (*MODES, "all"):
            raise UsageError(f"there is no mode `{word}`", hint=closest(word, [*MODES, "all"]))
    return MODES if "all" in words else tuple(mode for mode in MODES if mode == "build" or mode in words)


def safe_label(text: str) -> str:
    """The text as a part of a file's name: letters, digits, `.`, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-") or "model"


@dataclass(frozen=True, slots=True)
class _Variant:
    """A model in one precision, or a file that is in it already."""

    label: str
    precision: str
    source: str
    own: bool = False
    batches: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Files:
    """Models opened and files digested once, however many cells have them."""

    folder: Path
    models: dict[str, Model | None] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def model(self, path: str) -> Model | None:
        """The model; None where it cannot be opened, which its cells will say."""
        if path not in self.models:
            try:
                self.models[path] = open_model(self.folder / path)
            except (TrtEngineError, OSError, ValueError):
                self.models[path] = None
        return self.models[path]

    def digest(self, path: str | None) -> str:
        """Of a file, or of every file in a folder, by name and content; of a model, its weights beside it too."""
        if path is None or not is_place(path):
            return path or ""
        if path not in self.digests:
            place = self.folder / path
            try:
                model = self.model(path) if place.suffix.lower() == ".onnx" else None
                self.digests[path] = model.digest if model is not None else _content(place)
            except OSError:
                self.digests[path] = "missing"
        return self.digests[path]


def _content(place: Path) -> str:
    if place.is_file():
        beside = place.parent / "images"  # COCO's annotations name pictures next to them
        return files.digest(place) + (_content(beside) if place.suffix == ".json" and beside.is_dir() else "")
    if not place.is_dir():
        raise FileNotFoundError(place)
    found: list[Path] = []
    for folder, _, names in os.walk(place):
        found += [Path(folder) / name for name in names]
        if len(found) > _MOST_FILES:
            raise UsageError(f"`{place}` holds more than {_MOST_FILES} files", hint="name the folder of the data alone")
    total = hashlib.sha256()
    for path in sorted(found):
        about = path.stat()
        if stat.S_ISREG(about.st_mode):  # a pipe would never end
            inside = files.digest(path) if about.st_size else "empty"  # what the kernel shows as files has no size
            total.update(os.fsencode(path.relative_to(place)) + b"\0" + inside.encode())
    return f"sha256:{total.hexdigest()}"


def cells_of(plan: Plan, modes: Sequence[str] = ()) -> tuple[CellSpec, ...]:
    """Every cell of the plan in its order, model by model; `modes` are those of a command line, in place of the plan's."""
    words = modes or plan.file.modes
    asked = modes_of(words)
    named = frozenset("bench" if word == "benchmark" else word for word in words)
    known, seen, cells = _Files(plan.folder), {}, []
    names: dict[str, str] = {}
    for index, entry in enumerate(plan.file.models):
        where = f"models[{index}]" if f"models[{index}]" in plan.read.places else "models"
        model = _entry(entry)
        name = safe_label(model.name or Path(model.path).stem)
        if name.lower() in names:
            raise plan.error(where, f"has the name `{name}`, which `{names[name.lower()]}` has too", "give it a `name`")
        names[name.lower()] = where
        for spec in _cells_of(plan, model, name, where, asked, named, known):
            if spec.label.lower() in seen:
                raise plan.error(
                    where, f"has two cells called `{spec.label}`", "give files and backends a `label` of their own"
                )
            if len(spec.label) > _LONGEST:
                raise plan.error(
                    where, f"has a cell with a label of {len(spec.label)} letters", "shorter `name` or `label`"
                )
            seen[spec.label.lower()] = spec
            cells.append(spec)
            if len(cells) > _MOST_CELLS:
                raise plan.error(where, f"brings the plan over {_MOST_CELLS} cells", "several plans")
    if not cells:
        raise plan.error("models", "gives no cell at all", "a backend's `precisions` leave none of the models'")
    if plan.file.baseline is not None and not fnmatch.filter([spec.label for spec in cells], plan.file.baseline):
        raise plan.error(
            "baseline", f"is `{plan.file.baseline}`, and no cell is called so",
            closest(plan.file.baseline, [spec.label for spec in cells]),
        )  # fmt: skip
    return tuple(cells)


def chosen(cells: Sequence[CellSpec], globs: Sequence[str]) -> tuple[CellSpec, ...]:
    """The cells whose labels fit one of the globs (`digits-*-b8`); `UsageError` for one that fits none."""
    if not globs:
        return tuple(cells)
    labels = [spec.label for spec in cells]
    for glob in globs:
        if not any(fnmatch.fnmatchcase(label, glob) for label in labels):
            raise UsageError(f"`--only {glob}` fits no cell", hint=closest(glob, labels))
    return tuple(spec for spec in cells if any(fnmatch.fnmatchcase(spec.label, glob) for glob in globs))


# ------------------------------------------------------------------------------------------------ one model


def _entry(entry: str | ModelEntry) -> ModelEntry:
    """A model as its mapping: `vit_fp16.onnx:fp16` is a file that is in fp16 already."""
    if isinstance(entry, ModelEntry):
        return entry
    path, colon, label = entry.rpartition(":")
    if colon and path and (label in PRECISIONS or path.lower().endswith(".onnx")):
        own = OwnFile(path=path, label=label)
        return ModelEntry(path=path, files=(own,), precisions=None)
    return ModelEntry(path=entry)


def _variants(plan: Plan, entry: ModelEntry, where: str) -> Iterator[_Variant]:
    asked = entry.precisions
    if asked is None and not entry.files:
        asked = plan.file.precisions
    for made in dict.fromkeys(asked or ()):
        yield _Variant(made, made, entry.path)
    for item in entry.files:
        own = OwnFile(path=item) if isinstance(item, str) else item
        label = own.label or Path(own.path).stem
        precision: str = own.precision or (label if label in PRECISIONS else AS_IS)
        yield _Variant(safe_label(label), precision, own.path, own=True, batches=own.batches)


def _cells_of(
    plan: Plan,
    entry: ModelEntry,
    name: str,
    where: str,
    modes: tuple[str, ...],
    named: frozenset[str],
    known: _Files,
) -> Iterator[CellSpec]:
    routes = [_route(item) for item in (entry.backends or plan.file.backends)]
    for variant in _variants(plan, entry, where):
        for route in routes:
            if route.precisions is not None and variant.precision not in route.precisions:
                continue
            batches = variant.batches or entry.batches or plan.file.batches
            fixed = _fixed_batch(known.model(variant.source))
            for batch in dict.fromkeys((fixed,) if fixed is not None else batches):
                yield _cell(plan, entry, name, variant, route, batch, modes, named, known, fixed=fixed is not None)


def _route(item: str | Route) -> Route:
    return Route(backend=item) if isinstance(item, str) else item


def _fixed_batch(model: Model | None) -> int | None:
    """The batch of a model that takes one only; None for one whose batch moves, and for one nobody can open."""
    if model is None or any(spec.shape and spec.shape[0] < 0 for spec in model.signature.inputs):
        return None
    sizes = {spec.shape[0] for spec in model.signature.inputs if len(spec.shape) > 1}
    return max(sizes.pop(), 1) if len(sizes) == 1 else 1


def _device(plan: Plan, route: Route) -> str:
    card = backend(route.backend)
    asked = route.device or plan.file.device
    if asked is not None:
        kind, number = parse_device(asked)
        if kind in card.devices or route.device is not None:
            return "cpu" if kind == "cpu" else f"{kind}:{number}"
    if any(item.lower() in _ON_GPU for item in route.providers):
        return "cuda:0"
    first = card.devices[0]
    return first if first == "cpu" else f"{first}:0"


def _route_label(route: Route) -> str:
    if route.label:
        return safe_label(route.label)
    first = next(iter(route.providers), None)
    return safe_label(route.backend if first in (None, "cpu") else f"{route.backend}-{first}")


def _cell(
    plan: Plan,
    entry: ModelEntry,
    name: str,
    variant: _Variant,
    route: Route,
    batch: int,
    modes: tuple[str, ...],
    named: frozenset[str],
    known: _Files,
    *,
    fixed: bool,
) -> CellSpec:
    file, device = plan.file, _device(plan, route)
    dataset = None if entry.dataset == "none" else entry.dataset or plan.dataset
    idle = _idle(device, dataset)
    kept = [mode for mode in modes if mode not in idle]
    left_out = {
        mode: why for mode, why in idle.items() if mode in named and (mode, entry.dataset) != ("evaluate", "none")
    }
    if left_out and kept == ["build"] and not named & {"build", "all"}:
        kept = []  # nothing but what cannot be done was asked for
    calibrated = variant.precision in _QUANTISED and not variant.own
    accuracy, preprocess = file.accuracy, entry.preprocess or file.preprocess
    settings: dict[str, Any] = {"bench": {**file.bench, **plan.warmup(), "iterations": file.iterations}}
    settings["bench"].setdefault("duration_s", 0.0)
    if built := {**file.build, **entry.build}:
        settings["build"] = built
    if route.options:
        settings["options"] = dict(route.options)
    if route.allow_fallback:
        settings["allow_fallback"] = True
    if entry.shapes is not None:
        settings["shapes"] = {one: list(shape) for one, shape in shapes_of(entry).items()}
    if fixed:
        settings["fixed_batch"] = True
    if calibrated:
        config = BuildConfig(backend=route.backend, device=device, providers=tuple(route.providers))
        target = placement_target(config, variant.precision)
        settings["quantize"] = ({} if target is None else {"target": target}) | file.quantize
        settings["calibrate"] = entry.calibrate or file.calibrate
        if preprocess is not None:
            settings["calibrate_preprocess"] = preprocess
    if "evaluate" in kept:
        settings["dataset"] = dataset
        for one in ("limit", "seed", "max_drop"):
            if (value := getattr(accuracy, one)) is not None:
                settings[one] = value
        if (value := accuracy.preprocess or preprocess) is not None:
            settings["preprocess"] = value
    if PROFILED & set(kept):
        settings["inferences"] = file.profile.inferences
    spec = CellSpec(
        label=f"{name}-{variant.label}-{_route_label(route)}-b{batch}",
        model=name,
        source=variant.source,
        precision=variant.precision,
        backend=route.backend,
        batch=batch,
        device=device,
        modes=tuple(kept),
        own_file=variant.own,
        providers=tuple(route.providers),
        settings=settings,
        left_out=left_out,
    )
    return replace(spec, digest=_digest(spec, known), parts=_parts(spec, known))


def _idle(device: str, dataset: str | None) -> dict[str, str]:
    """The modes that have nothing to do on that device with that data, and why."""
    found = {} if dataset is not None else {"evaluate": "the plan names no `dataset`"}
    if not device.startswith("cuda"):
        found |= dict.fromkeys(("nsys", "ncu"), f"Nsight looks at GPUs, and the device is `{device}`")
    return found


PLACES = ("calibrate", "calibrate_preprocess", "dataset", "preprocess")
"""Settings that name files: what is in them counts, and not where they are."""


def is_place(value: str | None) -> bool:
    """Whether one of these settings names a file, and not a preset or random data."""
    return value is not None and value != "random" and not is_preset(value)


def _digest(spec: CellSpec, known: _Files) -> str:
    """Of the engine: of what it is made of, and how."""
    facts = msgspec.to_builtins(replace(spec, source="", modes=(), left_out={}))
    for one in (*PLACES, *(name for names in OWN_SETTINGS.values() for name in names)):
        facts["settings"].pop(one, None)
    made_of = [facts, known.digest(spec.source), known.digest(spec.settings.get("calibrate"))]
    if (preprocess := spec.settings.get("calibrate_preprocess")) is not None:
        made_of.append(known.digest(preprocess))
    return _sha256(made_of)


def _parts(spec: CellSpec, known: _Files) -> dict[str, str]:
    """By mode, of what is done with the engine."""
    found = {}
    for mode in (mode for mode in spec.modes if mode != "build"):
        own = {name: spec.settings.get(name) for name in OWN_SETTINGS[mode]}
        found[mode] = _sha256({name: known.digest(own[name]) if name in PLACES else own[name] for name in own})
    return found


def _sha256(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

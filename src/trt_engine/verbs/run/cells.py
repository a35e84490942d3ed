"""Expands a plan to cells: models x precisions x backends x batches, each with a label, digests and settings."""

from __future__ import annotations

import contextlib
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

from trt_engine import atomic_io
from trt_engine.backend import BackendSpec, get_backend, resolve_gpu_targets
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import PRECISIONS, QUANTIZED_PRECISIONS, is_preset
from trt_engine.device import info, parse_device
from trt_engine.device.info import Gpu
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.records.sweep import CellSpec
from trt_engine.tensors import Signature, suggest
from trt_engine.trt.gpu_targets import sm_label
from trt_engine.verbs.build.precision import placement_target
from trt_engine.verbs.run.plan_file import (
    AS_IS,
    MODES,
    PROFILE_MODES,
    BackendEntry,
    ModelEntry,
    ParsedPlan,
    PrequantizedModel,
    input_shapes,
)
from trt_engine.verbs.run.sweep_folder import MODE_SETTINGS

_GPU_PROVIDERS = ("cuda", "tensorrt", "tensorrt-rtx")
_MAX_CELLS = 5000
_MAX_FILES = 200_000
_MAX_LABEL = 120


def parse_modes(names: Sequence[str]) -> tuple[str, ...]:
    """Modes by the names in a plan or on the command line; always with `build`."""
    words = ["bench" if word == "benchmark" else word for word in names]
    for word in words:
        if word not in (*MODES, "all"):
            raise UsageError(f"unknown mode `{word}`", hint=suggest(word, [*MODES, "all"]))
    return MODES if "all" in words else tuple(mode for mode in MODES if mode == "build" or mode in words)


def safe_label(text: str) -> str:
    """The text as part of a file name: letters, digits, `.`, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-") or "model"


@dataclass(frozen=True, slots=True)
class _Variant:
    """A model in one precision, converted or already in it."""

    label: str
    precision: str
    source: str
    prequantized: bool = False
    batches: tuple[int, ...] | None = None


@dataclass(slots=True)
class _FileCache:
    """Opens each model and digests each file once for all cells."""

    folder: Path
    gpus: tuple[Gpu, ...] = field(default_factory=lambda: info.gpus())
    signatures: dict[str, Signature | None] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def signature(self, path: str) -> Signature | None:
        """The model's signature; None if it cannot be opened, which its cells report. Models themselves are not kept."""
        if path not in self.signatures:
            self.signatures[path] = None
            with contextlib.suppress(TrtEngineError, OSError, ValueError):
                model = open_model(self.folder / path)
                self.signatures[path] = model.signature
                if model.path.suffix.lower() == ".onnx":
                    self.digests[path] = model.digest
        return self.signatures[path]

    def digest(self, path: str | None) -> str:
        """Digest of a file, of all files of a folder by name and content, or of a model with its external weights."""
        if path is None or not is_path(path):
            return path or ""
        place = self.folder / path
        if place.suffix.lower() == ".onnx":
            self.signature(path)
        if path not in self.digests:
            try:
                self.digests[path] = _content_digest(place)
            except OSError:
                self.digests[path] = "missing"
        return self.digests[path]


def _content_digest(target: Path) -> str:
    if target.is_file():
        beside = target.parent / "images"  # COCO annotations refer to images next to them
        return atomic_io.file_digest(target) + (
            _content_digest(beside) if target.suffix == ".json" and beside.is_dir() else ""
        )
    if not target.is_dir():
        raise FileNotFoundError(target)
    found: list[Path] = []
    for folder, _, names in os.walk(target):
        found += [Path(folder) / name for name in names]
        if len(found) > _MAX_FILES:
            raise UsageError(
                f"`{target}` contains more than {_MAX_FILES} files", hint="name a folder with only the data"
            )
    total = hashlib.sha256()
    for path in sorted(found):
        about = path.stat()
        if stat.S_ISREG(about.st_mode):  # reading a pipe would block
            inside = atomic_io.file_digest(path) if about.st_size else "empty"  # files of the kernel have size 0
            total.update(os.fsencode(path.relative_to(target)) + b"\0" + inside.encode())
    return f"sha256:{total.hexdigest()}"


def expand(plan: ParsedPlan, modes: Sequence[str] = ()) -> tuple[CellSpec, ...]:
    """All cells of the plan in order, model by model; `modes` override the plan's."""
    words = modes or plan.file.modes
    requested = parse_modes(words)
    named = frozenset("bench" if word == "benchmark" else word for word in words)
    cache, labels, cells = _FileCache(plan.folder), set(), []
    names: dict[str, str] = {}
    for index, entry in enumerate(plan.file.models):
        where = f"models[{index}]" if f"models[{index}]" in plan.yaml.locations else "models"
        model = _as_model_entry(entry)
        name = safe_label(model.name or Path(model.path).stem)
        if name.lower() in names:
            raise plan.error(where, f"has the name `{name}`, as `{names[name.lower()]}` does", "give it a `name`")
        names[name.lower()] = where
        for spec in _ModelExpansion(plan, model, name, requested, named, cache).cells():
            if spec.label.lower() in labels:
                raise plan.error(
                    where, f"has two cells called `{spec.label}`", "give files and backends a unique `label`"
                )
            if len(spec.label) > _MAX_LABEL:
                raise plan.error(
                    where, f"has a cell with a label of {len(spec.label)} characters", "use a shorter `name` or `label`"
                )
            labels.add(spec.label.lower())
            cells.append(spec)
            if len(cells) > _MAX_CELLS:
                raise plan.error(where, f"makes more than {_MAX_CELLS} cells", "split the plan")
    if not cells:
        raise plan.error("models", "yields no cells", "the `precisions` of the backends exclude all of the models'")
    if plan.file.baseline is not None and not fnmatch.filter([spec.label for spec in cells], plan.file.baseline):
        raise plan.error(
            "baseline", f"is `{plan.file.baseline}`, which matches no cell",
            suggest(plan.file.baseline, [spec.label for spec in cells]),
        )  # fmt: skip
    return tuple(cells)


def select(cells: Sequence[CellSpec], globs: Sequence[str]) -> tuple[CellSpec, ...]:
    """Cells whose labels match one of the globs (`digits-*-b8`); `UsageError` for a glob without matches."""
    if not globs:
        return tuple(cells)
    labels = [spec.label for spec in cells]
    for glob in globs:
        if not any(fnmatch.fnmatchcase(label, glob) for label in labels):
            raise UsageError(f"`--cells {glob}` matches no cell", hint=suggest(glob, labels))
    return tuple(spec for spec in cells if any(fnmatch.fnmatchcase(spec.label, glob) for glob in globs))


# ------------------------------------------------------------------------------------------------ one model


def _as_model_entry(entry: str | ModelEntry) -> ModelEntry:
    """The entry as a mapping: `vit_fp16.onnx:fp16` is a file already in FP16."""
    if isinstance(entry, ModelEntry):
        return entry
    path, colon, label = entry.rpartition(":")
    if colon and path and (label in PRECISIONS or path.lower().endswith(".onnx")):
        own = PrequantizedModel(path=path, label=label)
        return ModelEntry(path=path, files=(own,), precisions=None)
    return ModelEntry(path=entry)


@dataclass(frozen=True, slots=True)
class _ModelExpansion:
    """Expands one model entry to its cells."""

    plan: ParsedPlan
    entry: ModelEntry
    name: str
    modes: tuple[str, ...]
    named_modes: frozenset[str]
    """Modes requested by name, not by `all`."""
    cache: _FileCache

    def cells(self) -> Iterator[CellSpec]:
        for variant in self._variants():
            for item in self.entry.backends or self.plan.file.backends:
                backend = BackendEntry(backend=item) if isinstance(item, str) else item
                if backend.precisions is not None and variant.precision not in backend.precisions:
                    continue
                batches = variant.batches or self.entry.batches or self.plan.file.batches
                fixed = _fixed_batch(self.cache.signature(variant.source))
                for gpus in _gpu_targets(self.plan, backend):
                    for batch in dict.fromkeys((fixed,) if fixed is not None else batches):
                        yield self._cell(variant, backend, gpus, batch, fixed=fixed is not None)

    def _variants(self) -> Iterator[_Variant]:
        entry = self.entry
        precisions = self.plan.file.precisions if entry.precisions is None and not entry.files else entry.precisions
        for made in dict.fromkeys(precisions or ()):
            yield _Variant(made, made, entry.path)
        for item in entry.files:
            own = PrequantizedModel(path=item) if isinstance(item, str) else item
            label = own.label or Path(own.path).stem
            precision: str = own.precision or (label if label in PRECISIONS else AS_IS)
            yield _Variant(safe_label(label), precision, own.path, prequantized=True, batches=own.batches)

    def _cell(
        self, variant: _Variant, backend: BackendEntry, gpus: tuple[str, ...], batch: int, *, fixed: bool
    ) -> CellSpec:
        plan, entry, device = self.plan, self.entry, _resolve_device(self.plan, backend)
        dataset = None if entry.dataset == "none" else entry.dataset or plan.dataset
        unavailable = _unavailable_reason(get_backend(backend.backend), device, gpus, self.cache.gpus)
        inapplicable = _inapplicable_modes(device, dataset, unavailable)
        modes, skipped = self._split_modes(inapplicable, unavailable)
        settings = self._build_settings(backend, gpus, fixed=fixed)
        if variant.precision in QUANTIZED_PRECISIONS and not variant.prequantized:
            settings |= self._calibration_settings(variant, backend, device, settings.get("shapes"))
        if "evaluate" in modes or (dataset is not None and "evaluate" in skipped):
            accuracy = plan.file.accuracy
            found = {name: getattr(accuracy, name) for name in ("max_samples", "seed", "max_drop", "preprocess")}
            found["preprocess"] = found["preprocess"] or entry.preprocess or plan.file.preprocess
            settings |= {"dataset": dataset} | {name: value for name, value in found.items() if value is not None}
        if PROFILE_MODES & set(modes):
            settings["inferences"] = plan.file.profile.inferences
        target = ("_".join(map(sm_label, gpus)),) if gpus else ()  # `sm89`, `sm89_sm120`
        spec = CellSpec(
            label="-".join((self.name, variant.label, _backend_label(backend), *target, f"b{batch}")),
            model=self.name,
            source=variant.source,
            precision=variant.precision,
            backend=backend.backend,
            batch=batch,
            device=device,
            modes=modes,
            prequantized=variant.prequantized,
            providers=tuple(backend.providers),
            settings=settings,
            skipped_modes=skipped,
        )
        return replace(spec, digest=_engine_digest(spec, self.cache), mode_digests=_mode_digests(spec, self.cache))

    def _split_modes(
        self, inapplicable: dict[str, str], unavailable: str | None
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """The modes that apply, and the requested ones that do not with their reasons."""
        kept = tuple(mode for mode in self.modes if mode not in inapplicable)
        skipped = {}
        for mode in self.modes:
            by_machine = mode in ("bench", "evaluate") and inapplicable.get(mode) == unavailable
            if mode not in inapplicable or (mode, self.entry.dataset) == ("evaluate", "none"):
                continue
            if mode in self.named_modes or by_machine:
                skipped[mode] = inapplicable[mode]
        only_build = skipped and kept == ("build",) and not self.named_modes & {"build", "all"}
        return () if only_build else kept, skipped

    def _build_settings(self, backend: BackendEntry, gpus: tuple[str, ...], *, fixed: bool) -> dict[str, Any]:
        file, entry = self.plan.file, self.entry
        found: dict[str, Any] = {
            "bench": {"duration_s": 0.0, **file.bench, **self.plan.warmup(), "iterations": file.iterations},
            "build": {**file.build, **entry.build},
            "inputs": entry.inputs,
            "gpus": list(gpus),
            "options": dict(backend.options or {}),
            "allow_fallback": backend.allow_fallback,
            "shapes": {name: list(shape) for name, shape in input_shapes(entry).items()} if entry.shapes else None,
            "fixed_batch": fixed,
        }
        return {name: value for name, value in found.items() if value}

    def _calibration_settings(
        self, variant: _Variant, backend: BackendEntry, device: str, shapes: dict[str, list[int]] | None
    ) -> dict[str, Any]:
        file, entry = self.plan.file, self.entry
        config = BuildConfig(backend=backend.backend, device=device, providers=tuple(backend.providers))
        target = placement_target(config, variant.precision)
        quantize = ({} if target is None else {"target": target}) | file.quantize
        data, preprocess = entry.calib_data or file.calib_data, entry.preprocess or file.preprocess
        if data in (None, "random") and shapes is not None:
            quantize.setdefault("shapes", shapes)
        found: dict[str, Any] = {"quantize": quantize, "calib_data": data}
        return found | ({} if preprocess is None else {"calib_preprocess": preprocess})


def _gpu_targets(plan: ParsedPlan, entry: BackendEntry) -> tuple[tuple[str, ...], ...]:
    """Target GPUs of each engine of the backend entry; empty if its backend decides."""
    backend_spec = get_backend(entry.backend)
    named = entry.gpus or (plan.file.gpus if backend_spec.provides("resolve_gpus") else None)
    return (
        tuple(dict.fromkeys(resolve_gpu_targets(backend_spec, text.split(",")) for text in named)) if named else ((),)
    )


def _unavailable_reason(spec: BackendSpec, device: str, gpus: tuple[str, ...], available: Sequence[Gpu]) -> str | None:
    """Why an engine for these GPUs cannot run on this machine; None if it can."""
    kind, number = parse_device(device)
    if not spec.provides("resolve_gpus") or not (gpus or kind == "cuda"):
        return None
    board = next((item for item in available if item.index == number), None)
    if board is not None and (not gpus or board.compute_capability in gpus):
        return None
    return f"this machine has no GPU of compute capability {' or '.join(gpus)}" if gpus else "this machine has no GPU"


def _fixed_batch(signature: Signature | None) -> int | None:
    """The static batch of a model; None for a dynamic batch or an unreadable model."""
    if signature is None or any(spec.shape and spec.shape[0] < 0 for spec in signature.inputs):
        return None
    sizes = {spec.shape[0] for spec in signature.inputs if len(spec.shape) > 1}
    return max(sizes.pop(), 1) if len(sizes) == 1 else 1


def _resolve_device(plan: ParsedPlan, entry: BackendEntry) -> str:
    backend_spec = get_backend(entry.backend)
    asked = entry.device or plan.file.device
    if asked is not None:
        kind, number = parse_device(asked)
        if kind in backend_spec.devices or entry.device is not None:
            return "cpu" if kind == "cpu" else f"{kind}:{number}"
    if any(item.lower() in _GPU_PROVIDERS for item in entry.providers):
        return "cuda:0"
    first = backend_spec.devices[0]
    return first if first == "cpu" else f"{first}:0"


def _backend_label(entry: BackendEntry) -> str:
    if entry.label:
        return safe_label(entry.label)
    first = next(iter(entry.providers), None)
    return safe_label(entry.backend if first in (None, "cpu") else f"{entry.backend}-{first}")


def _inapplicable_modes(device: str, dataset: str | None, unavailable: str | None) -> dict[str, str]:
    """Reason by inapplicable mode; `unavailable` is why the engine cannot run here."""
    found = {} if unavailable is None else dict.fromkeys((mode for mode in MODES if mode != "build"), unavailable)
    if dataset is None:
        found["evaluate"] = "the plan names no `dataset`"
    if unavailable is None and not device.startswith("cuda"):
        found |= dict.fromkeys(("nsys", "ncu"), f"Nsight profiles GPUs, but the device is `{device}`")
    return found


PATH_SETTINGS = ("calib_data", "calib_preprocess", "dataset", "inputs", "preprocess")
"""Settings that name files: digested by content, not by path."""


def is_path(value: str | None) -> bool:
    """Whether the setting names a file, not a preset or random data."""
    return value is not None and value != "random" and not is_preset(value)


def _engine_digest(spec: CellSpec, cache: _FileCache) -> str:
    """Digest of the engine: its inputs and build settings."""
    facts = msgspec.to_builtins(replace(spec, source="", modes=(), skipped_modes={}))
    for one in (*PATH_SETTINGS, *(name for names in MODE_SETTINGS.values() for name in names)):
        facts["settings"].pop(one, None)
    made_of = [facts, cache.digest(spec.source), cache.digest(spec.settings.get("calib_data"))]
    for name in ("calib_preprocess", "inputs"):
        if (named := spec.settings.get(name)) is not None:
            made_of.append(cache.digest(named))
    return _sha256(made_of)


def _mode_digests(spec: CellSpec, cache: _FileCache) -> dict[str, str]:
    """Digest of settings and data by mode."""
    found = {}
    for mode in (mode for mode in spec.modes if mode != "build"):
        own = {name: spec.settings.get(name) for name in MODE_SETTINGS[mode]}
        found[mode] = _sha256({name: cache.digest(own[name]) if name in PATH_SETTINGS else own[name] for name in own})
    return found


def _sha256(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

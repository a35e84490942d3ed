"""The plan file of `run`: models, precisions, backends, batch sizes and modes.

`docs/run.md` documents every key; `docs/run.schema.json` is generated from these types. Also accepted are the forms used by
earlier shell scripts: `vit_fp16_bs_064.onnx:fp16` as a model, `benchmark` as a mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trt_engine.atomic_io import as_path, replace_surrogates
from trt_engine.backend import BackendSpec, code_options, get_backend, resolve_gpu_targets
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.caller_language import in_plan
from trt_engine.config.parse import parse_shapes
from trt_engine.config.precision import QUANTIZE_DATA, QuantizeConfig
from trt_engine.config.settings import from_values
from trt_engine.errors import SetupError, UsageError
from trt_engine.units import parse_duration
from trt_engine.verbs.run.yaml_schema import ParsedYaml, key, read_yaml

AS_IS = "as-is"
"""Precision of a model built without conversion."""

Precision = Literal["as-is", "fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "nvfp4", "mxfp8"]
Mode = Literal["build", "bench", "benchmark", "evaluate", "profile", "nsys", "ncu", "all"]
MODES: tuple[str, ...] = tuple(mode for mode in get_args(Mode) if mode not in ("benchmark", "all"))
"""In execution order; `benchmark` is an alias of `bench`."""
PROFILE_MODES = frozenset({"profile", "nsys", "ncu"})
"""Modes that profile the engine."""
_CELL_SETTINGS = tuple(
    "backend device precision calib_data preprocess inputs batch shapes providers options gpus".split()
)
"""Build settings that other keys of a plan define."""
_WRITTEN_FILE_SETTINGS = ("timing_cache",)
"""Build settings that name a file to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrequantizedModel:
    """A model file that is already in its precision: it is not cast or quantized."""

    path: str = key("the ONNX file, relative to the plan", aliases=("file", "onnx"))
    label: str | None = key("name in cell labels (default: the file's name)", None)
    precision: Precision | None = key("precision it computes in (default: the label, if that is a precision)", None)
    batches: tuple[int, ...] | None = key("batch sizes of this file", None, aliases=("batch",), least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry:
    """A backend with its device and providers."""

    backend: str = key("`onnxruntime`, `tensorrt`, `trtexec`, or one from another package", aliases=("name",))
    label: str | None = key("name in cell labels (default: the backend and its first provider)", None)
    device: str | None = key("`cpu`, `cuda:0` (default: the backend's, a GPU if a provider needs one)", None)
    providers: tuple[str, ...] = key("ONNX Runtime's providers in order: `cuda`, `tensorrt`, `cpu`", ())
    allow_fallback: bool = key("replace a provider that cannot run by the next one; recorded", False)
    options: dict[str, str] | None = key("settings of the backend, as with `-O`", None)
    precisions: tuple[Precision, ...] | None = key("only these of the models' precisions", None)
    gpus: tuple[str, ...] | None = key(
        "one cell and engine per entry, as sm89 or RTX 4090; `sm89,sm120` in one entry is one engine for both", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyGate:
    """Evaluation dataset and the permitted accuracy drop."""

    dataset: str | None = key("COCO annotations or their folder, one folder per class, or an .npz", None)
    max_samples: int | None = key("maximum number of images", None, least=1)
    seed: int | None = key("random seed to choose `max_samples` images (default: the first ones)", None, least=0)
    max_drop: float | None = key(
        "a cell fails if AP or top-1 is lower than the baseline's by more than this", None, least=0, most=1
    )
    preprocess: str | None = key("pre- and post-processing for evaluation only: a JSON file, imagenet, yolo", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Settings of the modes profile, nsys and ncu."""

    inferences: int = key("inferences captured", 20, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEntry:
    """Container image to run in (`--container`)."""

    image: str = key("the image, with its tag or digest")
    engine: Literal["docker", "podman"] | None = key("container program (default: the first one found)", None)
    gpus: str | None = key("value of `--gpus`; `none` for no GPU (default: all, if a cell needs one)", None)
    network: str = key("network of the container", "none")
    arguments: tuple[str, ...] = key("additional arguments of `docker run`", (), aliases=("args",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model and its settings."""

    path: str = key("the ONNX file, relative to the plan", aliases=("onnx", "file"))
    name: str | None = key("name in cell labels (default: the file's name)", None)
    precisions: tuple[Precision, ...] | None = key(
        "precisions to cast or quantize this file to", None, aliases=("precision",)
    )
    files: tuple[str | PrequantizedModel, ...] = key(
        "files that are already converted", (), aliases=("quantized", "quantised")
    )
    batches: tuple[int, ...] | None = key(
        "batch sizes; ignored for a model with a fixed batch", None, aliases=("batch",), least=1
    )
    shapes: str | dict[str, str] | None = key("shapes for dynamic dimensions, as images:1x3x640x640", None)
    inputs: str | None = key(
        "values of inputs for parity, calibration and measuring: a .npz by name or a .npy of one", None
    )
    backends: tuple[str | BackendEntry, ...] | None = key("overrides the plan's", None, aliases=("backend",))
    dataset: str | None = key("overrides the plan's; `none` for no evaluation", None)
    calib_data: str | None = key("overrides the plan's", None, aliases=("calibration",))
    preprocess: str | None = key("overrides the plan's", None)
    build: dict[str, Any] = key("build settings, added to the plan's", config=BuildConfig, exclude=_CELL_SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan of `trt-engine run`."""

    models: tuple[str | ModelEntry, ...] = key(
        "the models; a string is a path, or `PATH:LABEL` for a file in that precision"
    )
    name: str | None = key("the run's name (default: the plan's file name)", None)
    title: str = key("the report's title", "")
    precisions: tuple[Precision, ...] = key("precisions of models without their own", (AS_IS,), aliases=("precision",))
    backends: tuple[str | BackendEntry, ...] = key(
        "backends that build and run", ("onnxruntime",), aliases=("backend",)
    )
    device: str | None = key("device of backends without their own", None)
    gpus: tuple[str, ...] | None = key("target GPUs of backends that support them and set none", None)
    batches: tuple[int, ...] = key(
        "batch sizes of models without their own", (1,), aliases=("batch", "batch_sizes"), least=1
    )
    modes: tuple[Mode, ...] = key("modes to run for each cell", ("all",), aliases=("mode",))
    warmup: int | str = key("warm-up queries, or a duration: 50, 1s", 50, aliases=("warmup_iterations",), least=0)
    iterations: int = key("minimum number of measured queries", 100, least=1)
    bench: dict[str, Any] = key(
        "other benchmark settings", aliases=("benchmark",), config=BenchConfig,
        exclude=("batch", "shapes", "iterations", "warmup_s", "warmup_iterations", "inputs", "strict"),
    )  # fmt: skip
    build: dict[str, Any] = key("build settings of all cells", config=BuildConfig, exclude=_CELL_SETTINGS)
    quantize: dict[str, Any] = key(
        "quantization settings", aliases=("quantise",), config=QuantizeConfig, exclude=(*QUANTIZE_DATA, "inputs")
    )
    calib_data: str | None = key(
        "calibration data: images, a dataset, .npz; `random` for a trial", None, aliases=("calibration",)
    )
    preprocess: str | None = key(
        "image preprocessing for calibration and evaluation, overrides the declared one: a JSON file, imagenet, yolo",
        None,
    )
    dataset: str | None = key("evaluation dataset", None)
    accuracy: AccuracyGate = key("evaluation dataset with further settings", AccuracyGate(), aliases=("evaluate",))
    profile: ProfileSettings = key("profiling settings", ProfileSettings())
    timeout: str | None = key("time limit of a cell, which then fails: 2h", None)
    baseline: str | None = key("label of the cell others are compared with (default: the first of each model)", None)
    container: str | ContainerEntry | None = key("container image to run in", None, aliases=("container_image",))


@dataclass(frozen=True, slots=True)
class ParsedPlan:
    """A validated plan."""

    path: Path
    file: PlanFile
    yaml: ParsedYaml

    @property
    def name(self) -> str:
        return self.file.name or self.path.stem

    @property
    def folder(self) -> Path:
        """Folder that relative paths in the plan refer to."""
        return self.path.parent

    @property
    def container(self) -> ContainerEntry | None:
        entry = self.file.container
        return ContainerEntry(image=entry) if isinstance(entry, str) else entry

    @property
    def dataset(self) -> str | None:
        """Dataset of models without their own."""
        return self.file.dataset or self.file.accuracy.dataset

    def error(self, path: str, message: str, hint: str | None = None) -> UsageError:
        """`UsageError` that names the location of a key path."""
        return self.yaml.location(path).error(message, hint)

    def warmup(self) -> dict[str, Any]:
        """The warm-up as benchmark settings: an integer counts queries, a string is a duration."""
        asked = self.file.warmup
        if isinstance(asked, int):
            return {"warmup_iterations": asked, "warmup_s": 0.0}
        return {"warmup_s": parse_duration(asked)}


def input_shapes(entry: ModelEntry) -> dict[str, tuple[int, ...]]:
    """Shapes of a model entry, by input name."""
    given: Any = entry.shapes
    return parse_shapes(given)


def read_plan(path: Path | str) -> ParsedPlan:
    """Read and validate the plan at `path`; `UsageError` names file, line, column and key."""
    path = as_path(path, "`plan`")
    read = read_yaml(path, PlanFile)
    plan = ParsedPlan(path, read.value, read)
    file = plan.file
    _check_value(plan, "warmup", lambda: plan.warmup())
    _check_value(plan, "timeout", lambda: file.timeout and parse_duration(file.timeout))
    if file.timeout and not parse_duration(file.timeout):
        raise plan.error("timeout", f"is `{file.timeout}`, expected more than 0", "leave it out for no limit")
    if file.dataset is not None and file.accuracy.dataset is not None:
        raise plan.error("dataset", "duplicates `accuracy.dataset`", "leave one of them out")
    if file.device is not None:
        _check_device(plan, "device", file.device)
    _check_backends(plan, "backends", file.backends)
    for index, entry in enumerate(file.models):
        where = f"models[{index}]"
        if isinstance(entry, str):
            continue
        _check_value(plan, f"{where}.shapes", functools.partial(input_shapes, entry))
        if entry.backends is not None:
            _check_backends(plan, f"{where}.backends", entry.backends)
    if file.gpus is not None:
        entries = [*file.backends]
        entries += [one for model in file.models if isinstance(model, ModelEntry) for one in model.backends or ()]
        specs = [one for one in map(_backend_spec, entries) if one.provides("resolve_gpus")]
        _check_gpus(plan, "gpus", file.gpus, specs)
    return plan


def check_trust(plan: ParsedPlan, *, trust_plan: bool) -> tuple[str, ...]:
    """Keys of the plan that run code or access paths outside its folders, as `container.arguments (line 3)`.

    `UsageError` for a plan with such keys unless `trust_plan`. Trust is an argument only: no file or environment variable
    grants it.
    """
    found = tuple(f"`{key}` (line {plan.yaml.location(key).line})" for key in _untrusted_keys(plan))
    if found and not trust_plan:
        raise UsageError(
            f"`{replace_surrogates(plan.path.name)}` runs code or reaches outside its folders: {', '.join(found)}",
            hint="read these lines; if you trust the file, add `--trust-plan` (in Python `trust_plan=True`)",
        )
    return found


def _untrusted_keys(plan: ParsedPlan) -> Iterator[str]:
    file, entry = plan.file, plan.container
    if entry is not None and entry.arguments:
        yield "container.arguments"
    if entry is not None and entry.network != "none":
        yield "container.network"
    owners: list[tuple[str, PlanFile | ModelEntry]] = [("", file)]
    owners += [(f"models[{index}].", one) for index, one in enumerate(file.models) if isinstance(one, ModelEntry)]
    for prefix, owner in owners:
        yield from (f"{prefix}build.{name}" for name in owner.build if name in _WRITTEN_FILE_SETTINGS)
        for index, route in enumerate(owner.backends or ()):
            if isinstance(route, BackendEntry):
                options = f"{prefix}backends[{index}].options"
                yield from (f"{options}.{name}" for name in code_options(route.options or {}))


def _check_value(plan: ParsedPlan, path: str, parse: Callable[[], Any]) -> None:
    """Parse the value; add its location to a parse error."""
    try:
        parse()
    except UsageError as error:
        said, hint = error.translated(in_plan)
        raise plan.error(path, f"cannot be read: {said}", hint) from error


def _check_device(plan: ParsedPlan, path: str, device: str) -> None:
    _check_value(plan, path, lambda: from_values(BuildConfig, {"device": device}))


def _backend_spec(entry: str | BackendEntry) -> BackendSpec:
    return get_backend(entry if isinstance(entry, str) else entry.backend)


def _check_gpus(plan: ParsedPlan, path: str, gpus: tuple[str, ...], specs: Sequence[BackendSpec]) -> None:
    if not specs:
        raise plan.error(path, "is set, but no backend of this plan builds for other GPUs", "leave it out")
    for index, text in enumerate(gpus):
        where = f"{path}[{index}]" if f"{path}[{index}]" in plan.yaml.locations else path
        for backend_spec in specs:
            _check_value(plan, where, functools.partial(resolve_gpu_targets, backend_spec, text.split(",")))


def _check_backends(plan: ParsedPlan, path: str, entries: tuple[str | BackendEntry, ...]) -> None:
    for index, entry in enumerate(entries):
        where = f"{path}[{index}]" if f"{path}[{index}]" in plan.yaml.locations else path
        name = entry if isinstance(entry, str) else entry.backend
        at = where if isinstance(entry, str) else f"{where}.backend"
        try:
            backend_spec = get_backend(name)
        except UsageError as error:
            raise plan.error(at, f"is `{name}`, which is not a backend", error.hint) from error
        if isinstance(entry, BackendEntry):
            _check_backend(plan, where, entry, backend_spec)


def _check_backend(plan: ParsedPlan, where: str, entry: BackendEntry, spec: BackendSpec) -> None:
    if entry.device is not None:
        _check_device(plan, f"{where}.device", entry.device)
        kind = entry.device.partition(":")[0]
        if kind.isalpha() and kind not in spec.devices:
            raise plan.error(f"{where}.device", f"is `{entry.device}`, but `{spec.name}` has {', '.join(spec.devices)}")
    if entry.gpus is not None:
        _check_gpus(plan, f"{where}.gpus", entry.gpus, [spec] if spec.provides("resolve_gpus") else [])
    if entry.providers and not spec.providers:
        raise plan.error(
            f"{where}.providers", f"is for ONNX Runtime, but `{spec.name}` has no providers", "leave it out"
        )
    own = {name: text for name, text in (entry.options or {}).items() if not (spec.providers and "." in name)}
    if own and not spec.provides("options"):
        raise plan.error(f"{where}.options", f"is set, but `{spec.name}` has no settings", "leave it out")
    if not own:
        return
    try:
        options = spec.load_component("options")
    except SetupError:  # its library is not installed; its cells are skipped with that reason
        return
    for name, text in own.items():
        value = {name.replace("-", "_"): text}
        _check_value(plan, f"{where}.options.{name}", functools.partial(from_values, options, value))

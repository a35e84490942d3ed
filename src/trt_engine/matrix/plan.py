"""A plan: which models are built, measured and evaluated, in which precisions, by which backends, at which batches.

`docs/run.md` has every key with an example; `docs/run.schema.json` is made from these types. Also read are the spellings of
shell scripts that plans take the place of: `vit_fp16_bs_064.onnx:fp16` as a model, `benchmark` as a mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trt_engine.backend import Backend, backend
from trt_engine.config import (
    BenchConfig,
    BuildConfig,
    QuantizeConfig,
    from_values,
    parse_duration,
    parse_shapes,
)
from trt_engine.errors import SetupError, UsageError
from trt_engine.files import path_of
from trt_engine.matrix.form import Read, json_schema, key, read_form

__all__ = [
    "AS_IS",
    "MODES",
    "PROFILED",
    "Accuracy",
    "ContainerEntry",
    "ModelEntry",
    "OwnFile",
    "Plan",
    "PlanFile",
    "Profiling",
    "Route",
    "plan_schema",
    "read_plan",
    "shapes_of",
]

AS_IS = "as-is"
"""The precision of a model that is built as its graph is."""

Precision = Literal["as-is", "fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "nvfp4", "mxfp8"]
Mode = Literal["build", "bench", "benchmark", "evaluate", "profile", "nsys", "ncu", "all"]
MODES: tuple[str, ...] = tuple(mode for mode in get_args(Mode) if mode not in ("benchmark", "all"))
"""In the order they are carried out; `benchmark` is another word for `bench`."""
PROFILED = frozenset({"profile", "nsys", "ncu"})
"""Modes that look inside."""

_OF_THE_CELL = ("backend", "device", "precision", "calibrate", "preprocess", "batch", "shapes", "providers", "options")
"""Settings of a build that a plan says elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A file in another precision that is there already: nothing is quantised for it."""

    path: str = key("the ONNX file, relative to the plan", also=("file", "onnx"))
    label: str | None = key("what its cells are called by (default: the file's name)", None)
    precision: Precision | None = key("what it is to compute in (default: the label, where it is a precision)", None)
    batches: tuple[int, ...] | None = key("batch sizes of this file alone", None, also=("batch",), least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A backend with its device and providers."""

    backend: str = key("`onnxruntime`, `tensorrt`, `trtexec`, or one another package brings", also=("name",))
    label: str | None = key("what its cells are called by (default: the backend and its first provider)", None)
    device: str | None = key("`cpu`, `cuda:0` (default: the backend's own, a GPU where a provider needs one)", None)
    providers: tuple[str, ...] = key("ONNX Runtime's providers in order: `cuda`, `tensorrt`, `cpu`", ())
    allow_fallback: bool = key("let a provider that cannot run be replaced by the next; it is recorded", False)
    options: dict[str, str] | None = key("the backend's own settings, as `-O` takes them", None)
    precisions: tuple[Precision, ...] | None = key("only these, of those the models have", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What every engine is evaluated on, and what it may lose."""

    dataset: str | None = key("COCO annotations or their folder, a folder for each class, an .npz", None)
    limit: int | None = key("at most this many pictures", None, least=1)
    seed: int | None = key("with `limit`: chosen at random (default: the first ones)", None, least=0)
    max_drop: float | None = key(
        "a cell fails when AP or top-1 lies further under the baseline's", None, least=0, most=1
    )
    preprocess: str | None = key("pre- and post-processing of the evaluation alone: a JSON file, imagenet, yolo", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """How the modes profile, nsys and ncu look at an engine."""

    inferences: int = key("inferences captured", 20, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEntry:
    """The container image the run is carried out in (`--container`)."""

    image: str = key("the image, with its tag or digest")
    engine: Literal["docker", "podman"] | None = key("the program (default: the first one that is there)", None)
    gpus: str | None = key("what `--gpus` is given; `none` for no GPU (default: all, where a cell needs one)", None)
    network: str = key("the network inside", "none")
    arguments: tuple[str, ...] = key("more arguments of `docker run`", (), also=("args",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model, and what differs for it."""

    path: str = key("the ONNX file, relative to the plan", also=("onnx", "file"))
    name: str | None = key("what its cells are called by (default: the file's name)", None)
    precisions: tuple[Precision, ...] | None = key(
        "made from this file: cast or quantised once each", None, also=("precision",)
    )
    files: tuple[str | OwnFile, ...] = key("files that are quantised already", (), also=("quantized", "quantised"))
    batches: tuple[int, ...] | None = key(
        "batch sizes; a model with a fixed batch has its own", None, also=("batch",), least=1
    )
    shapes: str | dict[str, str] | None = key("sizes of dynamic dimensions, as images:1x3x640x640", None)
    backends: tuple[str | Route, ...] | None = key("instead of the plan's", None, also=("backend",))
    dataset: str | None = key("instead of the plan's; `none` for no evaluation", None)
    calibrate: str | None = key("instead of the plan's", None, also=("calibration",))
    preprocess: str | None = key("instead of the plan's", None)
    build: dict[str, Any] = key("settings of the build, over the plan's", config=BuildConfig, leave_out=_OF_THE_CELL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan of `trt-engine run`."""

    models: tuple[str | ModelEntry, ...] = key(
        "the models; a text is a path, or `PATH:LABEL` of a file in that precision"
    )
    name: str | None = key("the run's name (default: the plan's file name)", None)
    title: str = key("the report's title", "")
    precisions: tuple[Precision, ...] = key("for models that name none", (AS_IS,), also=("precision",))
    backends: tuple[str | Route, ...] = key("who builds and runs", ("onnxruntime",), also=("backend",))
    device: str | None = key("for backends that name none", None)
    batches: tuple[int, ...] = key(
        "batch sizes, for models that name none", (1,), also=("batch", "batch_sizes"), least=1
    )
    modes: tuple[Mode, ...] = key("what is done with each cell", ("all",), also=("mode",))
    warmup: int | str = key("queries left out at first, or a time: 50, 1s", 50, also=("warmup_iterations",), least=0)
    iterations: int = key("queries measured, at least", 100, least=1)
    bench: dict[str, Any] = key(
        "other settings of the measurement", also=("benchmark",), config=BenchConfig,
        leave_out=("batch", "shapes", "iterations", "warmup_s", "warmup_iterations", "inputs", "strict"),
    )  # fmt: skip
    build: dict[str, Any] = key("settings of every build", config=BuildConfig, leave_out=_OF_THE_CELL)
    quantize: dict[str, Any] = key("how models are quantised", also=("quantise",), config=QuantizeConfig)
    calibrate: str | None = key(
        "what calibration sees: pictures, a dataset, .npz; `random` for a trial", None, also=("calibration",)
    )
    preprocess: str | None = key(
        "how pictures become inputs (to calibrate, to evaluate), instead of what is declared: a JSON file, imagenet, yolo",
        None,
    )
    dataset: str | None = key("what every engine is evaluated on", None)
    accuracy: Accuracy = key("the same with its details", Accuracy(), also=("evaluate",))
    profile: Profiling = key("how it is profiled", Profiling())
    timeout: str | None = key("a cell that takes longer is stopped and has failed: 2h", None)
    baseline: str | None = key("label of the cell others are held against (default: the first of each model)", None)
    container: str | ContainerEntry | None = key("the image to run in", None, also=("container_image",))


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that was read and makes sense: every name in it is known, every setting within its limits."""

    path: Path
    file: PlanFile
    read: Read

    @property
    def name(self) -> str:
        return self.file.name or self.path.stem

    @property
    def folder(self) -> Path:
        """What relative paths in the plan begin at."""
        return self.path.parent

    @property
    def container(self) -> ContainerEntry | None:
        entry = self.file.container
        return ContainerEntry(image=entry) if isinstance(entry, str) else entry

    @property
    def dataset(self) -> str | None:
        """What models are evaluated on that name nothing of their own."""
        return self.file.dataset or self.file.accuracy.dataset

    def error(self, path: str, said: str, hint: str | None = None) -> UsageError:
        """The error of what the plan says at that key path."""
        return self.read.place(path).error(said, hint)

    def warmup(self) -> dict[str, Any]:
        """The warm-up as settings of the measurement: a bare number counts queries, a text is a time."""
        asked = self.file.warmup
        if isinstance(asked, int):
            return {"warmup_iterations": asked, "warmup_s": 0.0}
        return {"warmup_s": parse_duration(asked)}


def shapes_of(entry: ModelEntry) -> dict[str, tuple[int, ...]]:
    """The sizes a model's entry names, by input."""
    given: Any = entry.shapes
    return parse_shapes(given)


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of a plan."""
    return json_schema(PlanFile, title="trt-engine run plan")


def read_plan(path: Path | str) -> Plan:
    """The plan at `path`; `UsageError` naming file, line, column and key for anything in it that cannot be meant."""
    path = path_of(path, "`plan`")
    read = read_form(path, PlanFile)
    plan = Plan(path, read.value, read)
    file = plan.file
    _check_text(plan, "warmup", lambda: plan.warmup())
    _check_text(plan, "timeout", lambda: file.timeout and parse_duration(file.timeout))
    if file.timeout and not parse_duration(file.timeout):
        raise plan.error("timeout", f"is `{file.timeout}`, and no cell ends in no time", "leave it out for no limit")
    if file.dataset is not None and file.accuracy.dataset is not None:
        raise plan.error("dataset", "says the same as `accuracy.dataset`", "leave one of them out")
    if file.device is not None:
        _check_device(plan, "device", file.device)
    _check_routes(plan, "backends", file.backends)
    for index, entry in enumerate(file.models):
        where = f"models[{index}]"
        if isinstance(entry, str):
            continue
        _check_text(plan, f"{where}.shapes", functools.partial(shapes_of, entry))
        if entry.backends is not None:
            _check_routes(plan, f"{where}.backends", entry.backends)
    return plan


def _check_text(plan: Plan, path: str, parse: Callable[[], Any]) -> None:
    """The value goes through its parser, whose error gets the place."""
    try:
        parse()
    except UsageError as error:
        raise plan.error(path, f"cannot be read: {error.message}", error.hint) from error


def _check_device(plan: Plan, path: str, device: str) -> None:
    _check_text(plan, path, lambda: from_values(BuildConfig, {"device": device}))


def _check_routes(plan: Plan, path: str, routes: tuple[str | Route, ...]) -> None:
    for index, entry in enumerate(routes):
        where = f"{path}[{index}]" if f"{path}[{index}]" in plan.read.places else path
        name = entry if isinstance(entry, str) else entry.backend
        at = where if isinstance(entry, str) else f"{where}.backend"
        try:
            card = backend(name)
        except UsageError as error:
            raise plan.error(at, f"is `{name}`, which is no backend here", error.hint) from error
        if isinstance(entry, Route):
            _check_route(plan, where, entry, card)


def _check_route(plan: Plan, where: str, route: Route, card: Backend) -> None:
    if route.device is not None:
        _check_device(plan, f"{where}.device", route.device)
        kind = route.device.partition(":")[0]
        if kind.isalpha() and kind not in card.devices:
            raise plan.error(f"{where}.device", f"is `{route.device}`, and `{card.name}` has {', '.join(card.devices)}")
    if route.providers and not card.providers:
        raise plan.error(f"{where}.providers", f"is for ONNX Runtime, and `{card.name}` has none", "leave it out")
    own = {name: text for name, text in (route.options or {}).items() if not (card.providers and "." in name)}
    if own and not card.has("options"):
        raise plan.error(f"{where}.options", f"is given, and `{card.name}` has no settings of its own", "leave it out")
    if not own:
        return
    try:
        options = card.half("options")
    except SetupError:  # its library is not here; its cells are skipped with that reason
        return
    for name, text in own.items():
        value = {name.replace("-", "_"): text}
        _check_text(plan, f"{where}.options.{name}", functools.partial(from_values, options, value))

"""An engine on disk: the runtime's own file (the payload) and, beside it, a JSON that says how it was made and what it
needs (the passport). Payload first, passport last, each by rename: a passport never stands beside a half payload.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_engine.config import Profile
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, ModelError, UsageError
from trt_engine.files import digest, end_of_links, json_bytes, staged_copy, write_whole
from trt_engine.tensors import Signature

__all__ = [
    "NOT_FUSED",
    "PASSPORT_SCHEMA",
    "QUANT_TARGET",
    "WRITTEN",
    "Build",
    "Channel",
    "Engine",
    "Needs",
    "OutputError",
    "Parity",
    "Passport",
    "Payload",
    "PlanHeader",
    "Precision",
    "Share",
    "Source",
    "SpeedCheck",
    "Verdict",
    "engine_path",
    "is_bare_model",
    "passport_path",
    "payload_of",
    "plan_header",
    "read_passport",
]

PASSPORT_SCHEMA = "trt-engine/passport"
PASSPORT_VERSION = 1
WRITTEN = "written"
"""The note of a build that says what its graph is written in, where the engine computes in another type."""
QUANT_TARGET = "quant_target"
"""The note of a build that names the quantisation target its graph was quantised for by the build."""
NOT_FUSED = "not_fused"
"""The note of a build that says which quantised layers the kernels do not take, and why."""


@dataclass(frozen=True, slots=True)
class Payload:
    """One file of the engine: name beside the passport, bytes, SHA-256."""

    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Source:
    """The model an engine was built from."""

    name: str
    digest: str
    opset: int | None
    file: str


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a network one data type holds, each between 0 and 1."""

    layers: float
    parameters: float
    macs: float | None = None


@dataclass(frozen=True, slots=True)
class Precision:
    """What was asked for, and the census: what the engine was found to compute in, by data type."""

    asked: str | None
    found: dict[str, Share] = field(default_factory=dict)

    @property
    def main(self) -> str | None:
        """The type most multiply-adds (or, unknown, most layers) run in."""
        if not self.found:
            return None
        return max(self.found, key=lambda name: (self.found[name].macs or 0.0, self.found[name].layers))

    @property
    def running(self) -> dict[str, Share]:
        """What of `found` layers compute in: a type that weights are only stored in is left out."""
        return {name: share for name, share in self.found.items() if share.layers or share.macs}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loader must have."""

    library: str
    """`onnxruntime`, `tensorrt`."""
    version: str
    cpu_features: tuple[str, ...] = ()
    """Instruction sets the payload's layouts and kernels were chosen for."""
    providers: tuple[str, ...] = ()
    compute_capability: str | None = None
    gpu: str | None = None
    plugins: tuple[str, ...] = ()
    """Plugin libraries that must be loaded first, by file name."""
    hardware_compatibility: str = "none"
    """Of a TensorRT plan: `none`, `ampere_plus`, `same_compute_capability`."""
    version_compatible: bool = False
    """Later TensorRT versions run it; it holds code for the host unless `lean_runtime` is needed."""
    lean_runtime: bool = False
    """The loader must bring the lean runtime library of the version that built it."""
    stripped: bool = False
    """Its weights must be put back before it runs."""


@dataclass(frozen=True, slots=True)
class Build:
    """How the engine was made; `command` makes it again."""

    command: str
    config: dict[str, Any]
    seconds: float
    identity: str
    warnings: tuple[str, ...] = ()
    ladder: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def written(self) -> str | None:
        """What the graph is written in, where the engine computes in another type: `int8` of one that runs in fp32."""
        return self.notes.get(WRITTEN)

    @property
    def quant_target(self) -> str | None:
        """The target its model was quantised for by the build itself."""
        return self.notes.get(QUANT_TARGET)

    @property
    def not_fused(self) -> str | None:
        """Which quantised layers run in floating point, and why."""
        return self.notes.get(NOT_FUSED)


@dataclass(frozen=True, slots=True)
class Channel:
    """An index of one axis of an output."""

    axis: int
    index: int
    size: int
    """The number of channels of the axis."""
    max_abs: float
    """The largest difference in it."""

    def __str__(self) -> str:
        return f"channel {self.index} of {self.size} (axis {self.axis})"


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far one output of the engine lies from the reference."""

    max_abs: float
    mean_abs: float
    max_rel: float
    """Of the worst channel: the largest difference over the channel's scale, its largest absolute value in the reference."""
    cosine: float
    rms_rel: float | None = None
    """Of the worst channel: the RMS difference over the channel's scale. None in records of before there were channels."""
    noise: float | None = None
    """Of the worst channel: the RMS difference over the standard deviation of the reference."""
    variation: float = 1.0
    """Of the worst channel: its standard deviation over that of the reference; 0 where it became a constant."""
    channel: Channel | None = None
    """Where `max_rel` is; None where the whole output has one scale."""
    noise_channel: Channel | None = None
    dead_channel: Channel | None = None
    """Where `variation` is."""
    rows_moved: int = 0
    """Rows of a model that sorts that were compared at another place."""
    rows_left_out: int = 0
    """Rows of a model that sorts that were not compared: those at the cut."""

    @property
    def spread(self) -> str:
        """The figures over all of the worst channel, in words."""
        noise = "" if self.noise is None else f", noise {self.noise:.2g} of the signal"
        return "" if self.rms_rel is None else f"RMS {self.rms_rel:.2g}{noise}"

    @property
    def summary(self) -> str:
        """In words, for a line of text."""
        at = f"{self.channel}: " if self.channel is not None else ""
        apart = self.channel.max_abs if self.channel is not None else self.max_abs
        rows = f", {self.rows_moved} rows matched by value" if self.rows_moved else ""
        rows += f", {self.rows_left_out} rows left out" if self.rows_left_out else ""
        return f"{at}difference {apart:.3g} ({self.max_rel:.2g} of the {'channel' if at else 'output'}'s scale){rows}"


@dataclass(frozen=True, slots=True)
class Parity:
    """The engine against plain ONNX Runtime on the same input."""

    reference: str
    inputs: str
    """How the input was made: `seeded random, seed 0, images:2x3x160x160`."""
    tolerance: float
    passed: bool
    outputs: dict[str, OutputError] = field(default_factory=dict)
    judged: Literal["max_rel", "rms_rel"] = "max_rel"
    """The figure that `tolerance` is for: in quantised models one step decides the largest difference."""
    given: dict[str, OutputError] = field(default_factory=dict)
    """The engine against the model that was given, where a cast or quantised copy of it was built: measured, not judged."""
    sensitivity: dict[str, OutputError] = field(default_factory=dict)
    """How far the reference moves from itself when its input is changed by the format's roundoff; measured where the engine
    was beyond the tolerance, which is then raised to a few times this."""


@dataclass(frozen=True, slots=True)
class SpeedCheck:
    """A quantised engine beside an FP32 engine of the same model, run alternately for about a second: an indication, no
    benchmark."""

    against: str
    """What it was measured against."""
    protocol: str
    shapes: dict[str, tuple[int, ...]]
    pairs: int
    """How often each engine ran."""
    quantised_ms: float
    float_ms: float
    """Medians."""
    ratio: float
    """Median of time quantised / time in FP32, pair by pair; above 1 the quantised engine is slower."""
    low: float
    high: float
    """95 % interval of that median, by order statistics."""

    @property
    def slower(self) -> bool:
        """By more than two loads of one engine may differ."""
        return self.low > 1.05


@dataclass(frozen=True, slots=True)
class Passport:
    """Everything `inspect ENGINE` can say without loading it."""

    schema: Literal["trt-engine/passport"]
    schema_version: int
    backend: str
    payload: tuple[Payload, ...]
    """The main file first, then its side files."""
    model: Source
    signature: Signature
    profiles: tuple[Profile, ...]
    precision: Precision
    device: str
    build: Build
    environment: Environment
    needs: Needs
    parity: Parity | None = None
    key: str | None = None
    """The engine's key in the store."""
    speed: SpeedCheck | None = None
    """Of an engine whose model the build quantised itself, where an FP32 engine is quickly built."""
    vision: dict[str, Any] | None = None
    """Pre- and post-processing the model declares, in plain values; `trt_engine.vision.declaration` reads them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an engine can be used here, with one reason and one command."""

    verdict: Literal["loads", "penalty", "rebuild", "refuse"]
    reason: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What the first bytes of a TensorRT plan say.

    Bytes 0-3 are `ftrt`, 4-7 the serialization version, 24-27 TensorRT's major, minor, patch and build (8.6 and later).
    Source: the reader behind trtexec's `--getPlanVersionOnly` in the public TensorRT repository; no public format promise.
    """

    serialization: int
    tensorrt: tuple[int, int, int, int]

    @property
    def version(self) -> str:
        return ".".join(map(str, self.tensorrt))


def plan_header(path: Path) -> PlanHeader | None:
    """The header of a TensorRT plan, or None for a file that does not begin as one."""
    with path.open("rb") as file:
        head = file.read(32)
    if len(head) < 28 or head[:4] != b"ftrt":
        return None
    return PlanHeader(int.from_bytes(head[4:8], "little"), (head[24], head[25], head[26], head[27]))


def passport_path(payload: Path) -> Path:
    """Where the passport of a payload lies: `model.engine` -> `model.engine.json`."""
    return payload.with_name(payload.name + ".json")


def engine_path(path: Path) -> Path | None:
    """The payload at `path`, or where its link leads; None where no passport of ours lies beside it, whole or damaged."""
    for place in (path, Path(os.path.realpath(path))):
        if _is_ours(passport_path(place)):
            return place
    return None


def _is_ours(beside: Path) -> bool:
    """True for a passport and for what is no JSON at all, a passport that was cut; others' `X.onnx.json` are theirs."""
    try:
        document = msgspec.json.decode(beside.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, PermissionError):
        return True
    except OSError:
        return False
    return isinstance(document, dict) and document.get("schema") == "trt-engine/passport"


@dataclass(frozen=True, slots=True)
class Engine:
    """A sealed engine: the payload's path and its passport. A value; `te.load` makes it run."""

    path: Path
    passport: Passport

    @property
    def signature(self) -> Signature:
        return self.passport.signature

    @property
    def files(self) -> tuple[Path, ...]:
        """The payload and its side files."""
        return tuple(
            self.path.with_name(item.file) if index else self.path for index, item in enumerate(self.passport.payload)
        )

    @classmethod
    def seal(cls, payload: Path, passport: Passport) -> Engine:
        """The engine of a payload that is complete; writes the passport beside it, whole."""
        raw = msgspec.json.format(json_bytes(passport), indent=2)
        write_whole(passport_path(payload), raw + b"\n")
        return cls(payload, passport)

    @classmethod
    def open(cls, path: Path | str) -> Engine:
        """The engine at `path` (payload or passport); `EngineError` when it has no readable passport."""
        path = Path(path)
        if path.name.endswith(".json") and (_looks_like_passport(path) or path.with_suffix("").is_file()):
            path = path.with_suffix("")
            if not path.exists():
                raise EngineError(f"`{path}` is missing, only its passport is there", hint="build the engine again")
        if not path.exists():
            raise ModelError(f"no such file `{path}`", hint="give the path of an engine or of an `.onnx` model")
        if path.is_dir():
            raise ModelError(f"`{path}` is a folder, expected an engine file", hint=f"trt-engine inspect {path}")
        path = engine_path(path) or path
        beside = passport_path(path)
        try:
            raw = beside.read_bytes()
        except OSError as error:
            raise EngineError(
                f"`{path}` has no passport (`{beside.name}` beside it)", hint=_without_passport(path)
            ) from error
        return cls(path, read_passport(raw, beside))

    def verify(self) -> None:
        """`EngineError` unless every file is there with the size and digest it was sealed with."""
        again = f"build it again: `{self.passport.build.command}`"
        for path, sealed in zip(self.files, self.passport.payload, strict=True):
            if not path.exists():
                raise EngineError(f"`{path}` is missing, the engine is not whole", hint=again)
            if path.stat().st_size != sealed.nbytes or digest(path) != sealed.digest:
                raise EngineError(f"`{path}` was changed after it was sealed (digest differs)", hint=again)

    def copy_to(self, target: Path, *, command: str | None = None) -> Engine:
        """The same engine at `target`, or where its link leads: payload first, side files, passport last.

        Side files keep their names, because the payload names them.
        """
        passport = self.passport
        for path in self.files:
            if not path.is_file():  # before the target loses its own passport
                raise EngineError(f"`{path}` is missing, the engine is not whole", hint="build the engine again")
        if target.exists() and target.samefile(self.path):
            return self
        named, target = target, end_of_links(target)
        files = [target, *(target.with_name(item.file) for item in passport.payload[1:])]
        with contextlib.ExitStack() as stack:
            # all copies first: what is at the target stays until there is room for them
            copies = [stack.enter_context(staged_copy(*pair)) for pair in zip(self.files, files, strict=True)]
            for old in {passport_path(named), passport_path(target)}:
                end_of_links(old).unlink(missing_ok=True)  # never an old passport beside a new payload
            for copy, goal in zip(copies, files, strict=True):
                copy.replace(goal)
        first = Payload(target.name, passport.payload[0].nbytes, passport.payload[0].digest)
        build = replace(passport.build, command=command) if command else passport.build
        return Engine.seal(target, replace(passport, payload=(first, *passport.payload[1:]), build=build))


@dataclass(frozen=True, slots=True)
class _Head:
    """What every passport says, of any version."""

    schema: Literal["trt-engine/passport"]
    schema_version: int


def _looks_like_passport(path: Path) -> bool:
    try:
        msgspec.json.decode(path.read_bytes(), type=_Head)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def read_passport(raw: bytes, path: Path | str) -> Passport:
    """The passport, its version looked at first: a newer one may have any shape."""
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.schema_version > PASSPORT_VERSION:
            raise EngineError(
                f"`{path}` has passport version {head.schema_version}, this tool reads up to {PASSPORT_VERSION}",
                hint="install a newer trt-engine, or build the engine again",
            )
        passport = msgspec.json.decode(raw, type=Passport)
    except (msgspec.MsgspecError, UnicodeDecodeError, UsageError) as error:  # UsageError: a profile with min > max
        what = error.message if isinstance(error, UsageError) else str(error)
        raise EngineError(f"`{path}` is not a passport: {what}", hint="build the engine again") from error
    if not passport.payload or any(
        item.file in ("", "..") or Path(item.file).name != item.file for item in passport.payload
    ):
        raise EngineError(
            f"`{path}` is not a passport: its payload is not a list of files beside it", hint="build the engine again"
        )
    return passport


def _without_passport(path: Path) -> str:
    header = plan_header(path) if path.is_file() else None
    if header is not None:
        return f"it is a TensorRT {header.version} plan: `trt-engine inspect {path}` says what it needs"
    return (
        f"an ONNX model is built first: `trt-engine build {path}`"
        if path.suffix.lower() == ".onnx"
        else "build the engine again"
    )


def payload_of(path: Path, side_files: Sequence[Path] = ()) -> tuple[Payload, ...]:
    """The payload entries of files just written."""
    return tuple(Payload(file.name, file.stat().st_size, digest(file)) for file in (path, *side_files))


def is_bare_model(path: Engine | Path | str) -> bool:
    """True for an `.onnx` file without a passport of ours beside it, links followed."""
    if isinstance(path, Engine):
        return False
    path = Path(path)
    return path.suffix.lower() == ".onnx" and path.is_file() and engine_path(path) is None

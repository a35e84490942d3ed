"""An engine on disk: the runtime's file (the payload) and a JSON beside it with how it was made and what it
needs (the passport). Payload first, passport last, each by rename: a passport never stands beside a half payload.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_engine import atomic_io
from trt_engine.config.profiles import Profile
from trt_engine.display import RichDisplay
from trt_engine.errors import EngineError, ModelError, TrtEngineError, UsageError
from trt_engine.escapes import escape_control
from trt_engine.format import quoted
from trt_engine.plan_header import PLAN_BACKENDS, plan_header
from trt_engine.public_function import public_method
from trt_engine.records.passport import PASSPORT_VERSION, Passport, Payload
from trt_engine.tensors import DTYPES, Signature, format_shape


def passport_path(payload: Path) -> Path:
    """Passport path of a payload: `model.engine` -> `model.engine.json`."""
    return payload.parent / f"{payload.name}.json"  # `.` and `/` have no name


def reference_path(payload: Path) -> Path:
    """Path of a payload's reference inputs and outputs: `model.engine` -> `model.engine.reference.npz`."""
    return payload.parent / f"{payload.name}.reference.npz"


def engine_path(path: Path) -> Path | None:
    """The payload at `path`, links followed; None where it has no passport, intact or damaged."""
    for place in (path, Path(os.path.realpath(path))):
        if _has_passport(passport_path(place)):
            return place
    return None


def _has_passport(beside: Path) -> bool:
    """True for a passport and for invalid JSON (a truncated passport); False for other tools' `X.onnx.json`."""
    try:
        document = atomic_io.decode_json(atomic_io.read_bounded(beside, error=EngineError))
    except (msgspec.DecodeError, PermissionError):
        return True
    except EngineError:  # neither read nor taken for another tool's: `Engine.open` reports it
        return not beside.is_dir()
    except OSError:
        return False
    return isinstance(document, dict) and document.get("schema") == "trt-engine/passport"


@dataclass(frozen=True, slots=True, repr=False)
class Engine(RichDisplay):
    """A sealed engine: the payload's path and its passport. A value; `te.load` makes it run."""

    path: Path
    passport: Passport

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        made = self.passport
        return f"<Engine {self.path} of {made.backend}: {describe_io(made.signature, made.profiles)}>"

    @property
    def signature(self) -> Signature:
        return self.passport.signature

    @property
    def validation(self) -> str | None:
        """The state of a check that its build could not make, in words; None where the build made it."""
        return self.passport.validation.summary if self.passport.validation is not None else None

    @property
    def files(self) -> tuple[Path, ...]:
        """The payload and its side files."""
        return tuple(
            self.path.with_name(item.file) if index else self.path for index, item in enumerate(self.passport.payload)
        )

    @property
    def reference(self) -> Path | None:
        """The file of reference inputs and outputs, of an engine that has one: named after the payload, also where both were
        renamed, else as the passport names it."""
        validation = self.passport.validation
        sealed = validation.reference if validation is not None else None
        if sealed is None:
            return None
        own = reference_path(self.path)
        return own if own.is_file() else self.path.with_name(sealed.file)

    @property
    def model_path(self) -> Path | None:
        """The model that it was built from, where that file still is."""
        path = Path(self.passport.model.file)
        try:
            return path if path.is_file() else None
        except OSError:  # a passport is any text
            return None

    @classmethod
    def seal(cls, payload: Path, passport: Passport) -> Engine:
        """The engine of a complete payload; writes the passport beside it atomically."""
        if passport.parity is not None:
            passport = replace(passport, parity=passport.parity.clipped())
        raw = msgspec.json.format(atomic_io.encode_json(passport), indent=2)
        atomic_io.write_atomic(passport_path(payload), raw + b"\n")
        return cls(payload, passport)

    @classmethod
    @public_method
    def open(cls, path: Path | str) -> Engine:
        """The engine at `path` (payload or passport); `EngineError` when it has no readable passport.

        `ModelError` for a path that does not exist or is a folder.
        """
        path = Path(path)
        try:
            path.stat()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # which `exists` raises as it is
                raise atomic_io.os_error(error, path) from error
        if path.name.endswith(".json") and (_names_passport(path) or path.with_suffix("").is_file()):
            path = path.with_suffix("")
            if not path.exists():
                raise EngineError(f"`{path}` is missing, only its passport is there", hint="build the engine again")
        if not path.exists():
            raise ModelError(
                f"no such file `{path}`", hint="`trt-engine build MODEL -o FILE` makes an engine of an `.onnx` model"
            )
        if path.is_dir():
            engines = [
                quoted(beside.with_suffix("")) for beside in sorted(path.glob("*.json")) if _names_passport(beside)
            ]
            hint = f"one of its engines: `{_first(engines, '`, `')}`" if engines else "name the file, with its folder"
            raise ModelError(f"`{path}` is a folder, expected an engine file", hint=hint)
        path = engine_path(path) or path
        beside = passport_path(path)
        try:
            raw = atomic_io.read_bounded(beside, error=EngineError)
        except OSError as error:
            raise EngineError(
                f"`{path}` has no passport (`{beside.name}` beside it)", hint=_no_passport_error(path)
            ) from error
        return cls(path, read_passport(raw, beside))

    def verify(self) -> None:
        """`EngineError` unless every file is there with the size and digest it was sealed with."""
        again = f"build it again: `{self.passport.build.command}`"
        for path, sealed in zip(self.files, self.passport.payload, strict=True):
            if not path.exists():
                raise EngineError(f"`{path}` is missing, the engine is not whole", hint=again)
            if path.stat().st_size != sealed.nbytes or atomic_io.file_digest(path) != sealed.digest:
                if self._is_replaced():
                    raise EngineError(
                        f"`{self.path}` is another engine now, built after this one was opened",
                        hint="give its path again",
                    )
                raise EngineError(f"`{path}` was changed after it was sealed (digest differs)", hint=again)

    def _is_replaced(self) -> bool:
        """Whether another build has put its file and passport in place of these."""
        with contextlib.suppress(TrtEngineError):
            now = Engine.open(self.path).passport.payload
            return now != self.passport.payload and now[0].digest == atomic_io.file_digest(self.path)
        return False

    def verify_reference(self) -> Path:
        """The file of reference inputs and outputs; `EngineError` unless it is there as it was sealed."""
        validation, path = self.passport.validation, self.reference
        again = f"copy it from where the engine was built, or build it again: `{self.passport.build.command}`"
        if validation is None or validation.reference is None or path is None:
            raise EngineError(f"`{self.path}` has no reference inputs and outputs", hint=again)
        if not path.is_file():
            raise EngineError(
                f"`{path}` is missing: the reference inputs and outputs of `{self.path.name}`", hint=again
            )
        sealed = validation.reference
        if path.stat().st_size != sealed.nbytes or atomic_io.file_digest(path) != sealed.digest:
            raise EngineError(f"`{path}` was changed after it was written (digest differs)", hint=again)
        return path

    @atomic_io.all_or_nothing()
    @public_method
    def copy_to(self, target: Path, *, command: str | None = None) -> Engine:
        """The same engine at `target`, or where its link leads: payload first, side files, passport last.

        Side files keep their names, because the payload names them; the reference file is named after the payload. Raises
        `EngineError` for a file that is missing or was changed, `UsageError` for a `target` that is not a file.
        """
        passport, sources = self.passport, list(self.files)
        for path in sources:
            if not path.is_file():  # before the target loses its own passport
                raise EngineError(f"`{path}` is missing, the engine is not whole", hint="build the engine again")
        if target.exists() and target.samefile(self.path):
            return self
        named, target = target, atomic_io.resolve_link(target)
        files = [target, *(target.with_name(item.file) for item in passport.payload[1:])]
        validation = passport.validation
        sealed = validation.reference if validation is not None else None
        if validation is not None and sealed is not None:
            carried = validation.state == "deferred" or (self.reference or self.path).is_file()
            if carried:
                sources.append(self.verify_reference())
                files.append(reference_path(target))
                sealed = replace(sealed, file=files[-1].name)
            validation = replace(validation, reference=sealed if carried else None)
        before = _existing_reference(target)
        with contextlib.ExitStack() as stack:
            # all copies first: what is at the target stays until there is room for them
            copies = [stack.enter_context(atomic_io.staged_copy(*pair)) for pair in zip(sources, files, strict=True)]
            for old in {passport_path(named), passport_path(target)}:
                atomic_io.remove_replaced(atomic_io.resolve_link(old))  # never an old passport beside a new payload
            if before is not None and before not in files:
                atomic_io.remove_replaced(before)
            for copy, goal in zip(copies, files, strict=True):
                atomic_io.move_into_place(copy, goal)
        first = replace(passport.payload[0], file=target.name)
        build = replace(passport.build, command=command) if command else passport.build
        made = replace(passport, payload=(first, *passport.payload[1:]), build=build, validation=validation)
        return Engine.seal(target, made)


def _existing_reference(target: Path) -> Path | None:
    """The reference file of the engine that is at `target` now, by its own name; None without one."""
    try:
        engine = Engine.open(target)
    except (EngineError, ModelError):
        return None
    return None if engine.reference is None else reference_path(engine.path)


@dataclass(frozen=True, slots=True)
class _PassportHeader:
    """Fields that passports of every version have."""

    schema: Literal["trt-engine/passport"]
    schema_version: int


def _names_passport(path: Path) -> bool:
    try:
        atomic_io.decode_json(atomic_io.read_bounded(path, error=EngineError), _PassportHeader)
    except (OSError, msgspec.MsgspecError, EngineError):
        return False
    return True


def read_passport(raw: bytes, path: Path | str) -> Passport:
    """The passport, its version looked at first: a newer one may have any shape."""
    try:
        head = atomic_io.decode_json(raw, _PassportHeader)
        if head.schema_version > PASSPORT_VERSION:
            raise EngineError(
                f"`{path}` has passport version {head.schema_version}, this tool reads up to {PASSPORT_VERSION}",
                hint="install a newer trt-engine, or build the engine again",
            )
        passport = atomic_io.decode_json(raw, Passport)
    except (msgspec.MsgspecError, UsageError) as error:  # UsageError: a profile with min > max
        what = error.message if isinstance(error, UsageError) else str(error)
        raise EngineError(f"`{path}` is not a passport: {what}", hint="build the engine again") from error
    files = list(passport.payload)
    if passport.validation is not None and passport.validation.reference is not None:
        files.append(passport.validation.reference)
    if not passport.payload or any(item.file in ("", "..") or Path(item.file).name != item.file for item in files):
        raise EngineError(
            f"`{path}` is not a passport: its payload is not a list of files beside it", hint="build the engine again"
        )
    if wrong := _find_contradiction(passport):
        raise EngineError(f"`{path}` is not a passport: {wrong}", hint="build the engine again")
    return replace(passport, build=replace(passport.build, command=_safe_command(passport)))


_LONGEST_COMMAND = 1 << 16


def _safe_command(passport: Passport) -> str:
    """The passport's command that repeats the build, as verbs show it to be typed.

    It is a `trt-engine` command whose words a shell takes as they stand, and which trusts nothing; for any other text in its
    place, which may come from anywhere, the shortest command that builds the model.
    """
    text = passport.build.command
    try:
        words = shlex.split(text) if len(text) <= _LONGEST_COMMAND and escape_control(text) == text else []
    except ValueError:
        words = []
    if words[:1] == ["trt-engine"] and not any(word.startswith("--trust") for word in words):
        return shlex.join(words)
    model = passport.model.file if escape_control(passport.model.file) == passport.model.file else "MODEL.onnx"
    return shlex.join(["trt-engine", "build", model if not model.startswith("-") else f"./{model}"])


def _find_contradiction(passport: Passport) -> str | None:
    """Why parts of the passport contradict each other; None where they do not."""
    for spec in passport.signature:
        if spec.dtype not in DTYPES:
            return f"`{spec.name}` has the unknown element type `{spec.dtype}`"
        if spec.symbols and len(spec.symbols) != len(spec.shape):
            return f"`{spec.name}` has {len(spec.symbols)} symbols for {len(spec.shape)} dimensions"
        if any(not -1 <= size < 1 << 62 for size in spec.shape):
            return f"`{spec.name}` has the shape {format_shape(spec.shape)}"
        if any(value is not None and DTYPES[spec.dtype].to_scalar(value) != value for value in spec.choices):
            return f"`{spec.name}` has choices that are no {spec.dtype}"
    ranks = {spec.name: len(spec.shape) for spec in passport.signature.inputs}
    for number, profile in enumerate(passport.profiles):
        for name, span in profile.ranges.items():
            if len(span.min) != ranks.get(name):
                return f"profile {number} has a range for `{name}` that fits no input"
    options = passport.build.config.get("options") or {}
    if not isinstance(options, dict) or not all(isinstance(value, str) for value in options.values()):
        return "the options of its build are not names with texts"
    return None


def _no_passport_error(path: Path) -> str:
    header = plan_header(path) if path.is_file() else None
    if header is not None:
        return (
            f"it is a {header.title}: `trt-engine inspect {quoted(path)}` shows what it needs; `trt-engine build MODEL.onnx "
            f"--backend {PLAN_BACKENDS[header.product]}` makes one with its passport"
        )
    return (
        f"an ONNX model is built first: `trt-engine build {quoted(path)}`"
        if path.suffix.lower() == ".onnx"
        else "build the engine again"
    )


def payload_files(path: Path, side_files: Sequence[Path] = ()) -> tuple[Payload, ...]:
    """The payload entries of files just written."""
    return tuple(Payload(file.name, file.stat().st_size, atomic_io.file_digest(file)) for file in (path, *side_files))


def describe_io(signature: Signature, profiles: Sequence[Profile]) -> str:
    """Names, shapes and dtypes of inputs and outputs, and the shapes of each profile: for a `repr`."""
    sides = (_first(map(str, side), ", ") for side in (signature.inputs, signature.outputs))
    texts = [f"profile {number} {_first(str(item).split(), ' ')}" for number, item in enumerate(profiles)]
    return "; ".join([" -> ".join(sides), *texts])


def _first(texts: Iterable[str], separator: str, most: int = 8) -> str:
    found = list(texts)
    rest = [f"and {len(found) - most} more"] if len(found) > most else []
    return separator.join([*found[:most], *rest])


def engine_argument(value: Any, name: str) -> Engine | Path | str:
    """A caller's engine, or its path; `UsageError` for anything else, a model in memory included."""
    if isinstance(value, Engine | Path | str):
        return value
    if isinstance(value, os.PathLike):
        return atomic_io.as_path(value, f"`{name}`")
    raise UsageError(
        f"`{name}` is {atomic_io.found_instead(value)}, expected an engine",
        hint="`te.build(model)` makes one of a model; give that, or its path",
    )


def is_onnx_model(path: Engine | Path | str) -> bool:
    """True for an `.onnx` file without a passport beside it, links followed."""
    if isinstance(path, Engine):
        return False
    path = Path(path)
    return path.suffix.lower() == ".onnx" and path.is_file() and engine_path(path) is None

"""Models that a Python caller holds in memory, as the files that the package works on."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias, TypeVar

from trt_engine.atomic_io import as_path, found_instead
from trt_engine.conversion.sources import IN_TORCH, model_kind
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.graph.external_data import MAX_INLINE_NBYTES, total_nbytes, write_draft
from trt_engine.model import Model
from trt_engine.plan_header import detect_plan

if TYPE_CHECKING:
    import onnx

F = TypeVar("F", bound=Callable[..., Any])
AnyModel: TypeAlias = "os.PathLike[str] | str | bytes | BinaryIO | onnx.ModelProto | TorchModel"
"""What a verb takes for a model: its file, the report of the verb that wrote it, or the model in memory."""

_TAKE_ARRAYS = {"inputs": ("convert", "infer"), "calib_data": ("calibrate", "cast", "quantize", "ranges")}
_PREFIX = "trt-engine-call-"
_FILE_OPTIONS = re.compile(rf" --(inputs|calib-data) ('[^']*|\S*){_PREFIX}\S+")


def takes_model(*names: str) -> Callable[[F], F]:
    """Decorator of a public function that needs its model only while it runs.

    The arguments of these names may be in memory: `onnx.ModelProto`, the file's bytes, a file that is open in binary mode,
    a module or exported program of PyTorch with its examples (`inputs=`, or `shapes=`). They are written to a temporary
    folder for the call, and so are arrays given as the settings `inputs` and `calib_data`. `UsageError` for what is not a
    model, `FeedError` for inputs that are not arrays.
    """

    def decorate(function: F) -> F:
        positional = [
            (item.name, item.kind is item.VAR_POSITIONAL) for item in inspect.signature(function).parameters.values()
        ]

        @functools.wraps(function)
        def call(*args: Any, **settings: Any) -> Any:
            with contextlib.ExitStack() as stack:
                files = _Files(function.__name__, settings, stack)
                given = list(args)
                for at, value in enumerate(args):
                    name, _ = positional[at] if at < len(positional) and not positional[0][1] else positional[0]
                    if name in names:
                        given[at] = files.path_of(value, name)
                for name in settings.keys() & set(names):
                    settings[name] = files.path_of(settings[name], name)
                for name, takers in _TAKE_ARRAYS.items():
                    if function.__name__ not in takers:  # the others get their file
                        files.save_arrays(name)
                return files.forget(function(*given, **settings))

        return call  # type: ignore[return-value]

    return decorate


class TorchModel(Protocol):
    """A module or an exported program of PyTorch, which need not be installed."""

    @property
    def state_dict(self) -> Any: ...


def on_disk(model: Any) -> Any:
    """The argument of a function that `takes_model`, as it gets it: a path, or an `Engine` where it takes one."""
    return model


def without_folder(text: str) -> str:
    """The text with the names of a call's temporary files alone: their folder ends with the call."""
    return re.sub(rf"{re.escape(str(Path(tempfile.gettempdir(), _PREFIX)))}[^/\\]*[/\\]", "", text)


class _Files:
    """The files of one call."""

    def __init__(self, function: str, settings: dict[str, Any], stack: contextlib.ExitStack) -> None:
        self._function, self._settings, self._stack = function, settings, stack
        self._examples: Any = None

    def path_of(self, value: Any, name: str) -> Any:
        """The model as a path, an `Engine` or a `Model`; written now where it is in memory."""
        if isinstance(value, Engine | Model | Path):
            return value
        if isinstance(value, str | os.PathLike):
            return as_path(value, f"`{name}`") if not isinstance(value, str) else value
        raw = _read(value)
        if isinstance(raw, Path):
            return raw
        kind = model_kind(value)
        if kind in IN_TORCH:
            return value if self._function == "convert" else self._converted(value)
        if raw is None and kind is None:
            raise UsageError(
                f"`{name}` is {found_instead(value)}, expected a model",
                hint="its path, its bytes, an `onnx.ModelProto`, or a PyTorch module with examples",
            )
        if kind == "keras" and self._function != "convert":
            raise _convert_first(self._function, value)
        path = self._folder() / f"{_stem(value)}{'.keras' if kind == 'keras' else '.onnx'}"
        if raw is not None:
            path.write_bytes(raw)
            return path.rename(path.with_suffix(".engine")) if detect_plan(path) else path
        if kind == "keras":
            value.save(path)
        else:
            large = total_nbytes(value) > MAX_INLINE_NBYTES  # its weights go to a file, and it is changed
            write_draft(
                copy.deepcopy(value) if large else value, path, path.parent, f"{path.name}.data", external=False
            )
        return path

    def save_arrays(self, setting: str) -> None:
        """Replace arrays by name, or one array, as this setting by their file."""
        given = self._settings.get(setting)
        if given is None or isinstance(given, str | os.PathLike):
            return
        from trt_engine.runtime.feeds import as_feed, write_outputs

        by_name = given if isinstance(given, Mapping) else {setting: given}
        arrays = {str(name): as_feed(str(name), value, None) for name, value in by_name.items()}
        file = f"{setting}{'.npz' if by_name is given else '.npy'}"
        self._settings[setting] = write_outputs(self._folder() / file, arrays)

    def forget(self, report: Any) -> Any:
        """The report without the arrays' files in its next command: they end with the call."""
        command = getattr(report, "next_command", None) or ""
        return replace(report, next_command=_FILE_OPTIONS.sub("", command)) if _PREFIX in command else report

    def _folder(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))

    def _converted(self, module: Any) -> Path:
        """The module as ONNX, converted with the examples that the call has."""
        given = self._settings.get("inputs")
        if given is not None and not isinstance(given, str | os.PathLike):
            self._examples = self._settings.pop("inputs")  # for the call's other modules, too
        examples = self._settings.get("shapes") if self._examples is None else self._examples
        if examples is None and model_kind(module) != "exported-program":
            raise _convert_first(self._function, module)
        from trt_engine.config.convert import ConvertConfig
        from trt_engine.conversion.convert import convert

        path = self._folder() / f"{_stem(module)}.onnx"
        convert(module, ConvertConfig(out=path, inputs=examples))
        return path


def _read(value: Any) -> bytes | Path | None:
    """The bytes of a model that is given as those or as an open file; the path of an open file on disk; None for others."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not callable(getattr(value, "read", None)):
        return None
    name = getattr(value, "name", None)
    if isinstance(name, str) and Path(name).is_file():
        return Path(name)
    raw = value.read()
    if not isinstance(raw, bytes):
        raise UsageError(f"{found_instead(value)} gives text, expected a model's bytes", hint='open it with `"rb"`')
    return raw


def _stem(value: Any) -> str:
    """A file name for the model: its graph's name, or that of its class."""
    kind = model_kind(value)
    name = "model" if kind is None else value.graph.name if kind == "onnx" else type(value).__name__
    return re.sub(r"\W+", "_", name)[:60].strip("_") or "model"


def _convert_first(function: str, module: Any) -> UsageError:
    return UsageError(
        f"{found_instead(module)} has no ONNX graph yet, and `te.{function}` no example inputs to make one",
        hint='`te.convert(module, inputs={"x": (1, 3, 224, 224)}, out="model.onnx")`, then give that file',
    )

"""SavedModels, frozen graphs, Keras and TFLite files to ONNX, by tf2onnx in a process of its own.

TensorFlow takes seconds to import and half a gigabyte, logs to stderr, and parses what is untrusted: all of it stays in the
child (`tensorflow_child.py`), which may be another interpreter (`TRT_ENGINE_TF_PYTHON`). The child lives as long as the
source is wanted as reference.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import ml_dtypes  # noqa: F401  NumPy learns `bfloat16` from it
import numpy as np
import onnx

from trt_engine import errors
from trt_engine.conversion.axes import EVERY, Axes, Axis, axes_for, sizes_of, symbols_of
from trt_engine.conversion.examples import Example, array_of, raised
from trt_engine.conversion.exporting import Array, Exported
from trt_engine.conversion.sources import Source
from trt_engine.errors import FeedError, MemoryExhausted, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.graph import walk
from trt_engine.processes import Ended, reap
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import Shape, closest

__all__ = ["NEWEST_OPSET", "PYTHON", "Call", "TensorFlowOptions", "export", "opened", "written"]

log = logging.getLogger(__name__)

NEWEST_OPSET = 18
"""The newest opset tf2onnx 1.17 writes."""
PYTHON = "TRT_ENGINE_TF_PYTHON"
"""The environment variable that names an interpreter with TensorFlow and tf2onnx in it."""
_INSTALL = f"`pip install 'trt-engine[tf]'`, or name an interpreter that has both with `{PYTHON}`"
_START_S = 300.0
_GRACE_S = 30.0
_MEMORY_WORDS = ("bad_alloc", "out of memory", "cannot allocate memory")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)


@dataclass(frozen=True)
class TensorFlowOptions:
    """What a TensorFlow source may be told: which part of it, its layout, and who reads it."""

    signature: str | None = None
    """Of a SavedModel or a TFLite file; None: `serving_default`, or the only one."""
    tags: tuple[str, ...] = ()
    """Of the SavedModel's graph; none: `serve`."""
    inputs: tuple[str, ...] = ()
    """Of a frozen graph, `node:0`; none: its Placeholders."""
    outputs: tuple[str, ...] = ()
    """Of a frozen graph, `node:0`; none: what nothing else takes."""
    inputs_as_nchw: tuple[str, ...] = ()
    """Inputs, by their ONNX names, that are NHWC in the source and NCHW in the ONNX file."""
    python: str | None = None
    """The interpreter; None: `TRT_ENGINE_TF_PYTHON`, or the one that runs."""
    timeout_s: float = 1800.0
    """For each of reading, converting and running the source."""

    @staticmethod
    def parse(given: Mapping[str, Any]) -> TensorFlowOptions:
        """The options as they are typed: `{"signature": "predict", "outputs": "a:0,b:0"}`."""
        known = {item.name: item for item in fields(TensorFlowOptions)}
        made: dict[str, Any] = {}
        for name, value in given.items():
            key = name.replace("-", "_")
            if key not in known:
                raise UsageError(f"TensorFlow sources have no option `{name}`", hint=closest(key, list(known)))
            if key == "timeout_s":
                try:
                    made[key] = float(value)
                except (TypeError, ValueError):
                    raise UsageError(f"`timeout_s` is `{value}`, expected seconds", hint="`-O timeout_s=600`") from None
                if not made[key] > 0:
                    raise UsageError(f"`timeout_s` is {value}, expected more than 0", hint="`-O timeout_s=600`")
            elif key in ("signature", "python"):
                made[key] = None if value is None else str(value)
            else:
                items = value if isinstance(value, list | tuple) else str(value).split(",")
                made[key] = tuple(str(item).strip() for item in items if str(item).strip())
        return TensorFlowOptions(**made)


@dataclass(frozen=True)
class _Port:
    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    """In ONNX's layout; None inside where open, None as a whole where even the rank is."""


@dataclass
class Call:
    """The source, read in the child and bound to named inputs. `close` ends the child."""

    inputs: tuple[_Port, ...]
    outputs: tuple[str, ...]
    examples: dict[str, Example]
    axes: Axes
    notes: tuple[str, ...]
    versions: dict[str, str]
    _child: _Child
    _nchw: tuple[str, ...]

    def example(self) -> dict[str, Array]:
        """The inputs it is converted and first compared with."""
        return {name: array_of(name, item, item.shape) for name, item in self.examples.items()}

    def convert(self, path: Path, opset: int, shapes: Mapping[str, Any], large_nbytes: int) -> dict[str, Any]:
        """Have the child write ONNX at `path`; its opset, and the inputs that nothing reads."""
        request = {"do": "convert", "out": str(path.absolute()), "opset": opset, "shapes": shapes, "nchw": self._nchw}
        return self._child.ask({**request, "large": large_nbytes})

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The source's own outputs; an input that ONNX dropped because nothing reads it need not be fed."""
        arrays = []
        for port in self.inputs:
            item = self.examples[port.name]
            array = feeds[port.name] if port.name in feeds else array_of(port.name, item, item.shape)
            if array.dtype != numpy_dtype(port.dtype):
                raise FeedError(
                    f"`{port.name}` is {array.dtype}, and the source takes {port.dtype}",
                    hint=f"`.astype(numpy.{port.dtype})`",
                )
            arrays.append(np.asarray(array, order="C"))  # `ascontiguousarray` would make a scalar a vector
        with tempfile.TemporaryDirectory(prefix="trt-engine-tf-") as folder:
            took, gave = Path(folder) / "feeds.npz", Path(folder) / "outputs.npz"
            np.savez(took, **_numbered(arrays))
            told = self._child.ask({"do": "run", "feeds": str(took), "out": str(gave), "nchw": self._nchw})
            with np.load(gave, allow_pickle=False) as found:
                answers = [found[f"a{at}"] for at in range(len(self.outputs))]
        return {
            name: array.view(numpy_dtype(dtype)) if array.dtype.kind == "V" else array  # NumPy files know no bfloat16
            for name, array, dtype in zip(self.outputs, answers, told["dtypes"], strict=True)
        }

    def close(self) -> None:
        """End the child; a second time does nothing."""
        self._child.close()

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _numbered(arrays: Sequence[Array]) -> dict[str, Any]:
    """By number: an input may be called what no archive member may be."""
    return {f"a{at}": array for at, array in enumerate(arrays)}


# ------------------------------------------------------------------------------------------------ opening


def opened(
    path: Path, kind: str, given: Sequence[Example], dynamic: Axes | None, options: TensorFlowOptions | None = None
) -> Call:
    """The source with its inputs: shapes and types are its own, sizes it leaves open come from `given`.

    Without `dynamic` every open axis stays open, the first as `batch`; with it, those it names. `SetupError` without
    TensorFlow or tf2onnx, `ModelError` for what cannot be read, `UsageError` for what it has not.
    """
    wanted = options or TensorFlowOptions()
    child = _Child(_interpreter(wanted.python), path, wanted.timeout_s)
    try:
        request = {"do": "open", "kind": kind, "path": str(path.absolute()), "nchw": wanted.inputs_as_nchw}
        told = child.ask(
            request
            | {
                "signature": wanted.signature,
                "tags": wanted.tags,
                "inputs": wanted.inputs,
                "outputs": wanted.outputs,
            }
        )
        ports = tuple(
            _Port(item["name"], item["dtype"], None if item["shape"] is None else tuple(item["shape"]))
            for item in told["inputs"]
        )
        examples = _examples(ports, given, dynamic)
        axes = _axes(ports, examples, dynamic)
        examples, said = raised(examples, axes)
        sizes_of(axes, {name: item.shape for name, item in examples.items()})
        said += _fixed(ports, examples, axes)
        return Call(
            ports, tuple(item["name"] for item in told["outputs"]), examples, axes, (*told["notes"], *said),
            child.versions, child, wanted.inputs_as_nchw,
        )  # fmt: skip
    except BaseException:
        child.close()
        raise


def _interpreter(named: str | None) -> str:
    """The interpreter the child runs under: an option, the variable, or this one."""
    text = named or os.environ.get(PYTHON) or sys.executable
    found = shutil.which(Path(text).expanduser())
    if found is None:
        where = "`python`" if named else f"`{PYTHON}`"
        raise SetupError(f"{where} names `{text}`, which is no program", hint="name a Python interpreter's file")
    return found


def _examples(ports: Sequence[_Port], given: Sequence[Example], dynamic: Axes | None) -> dict[str, Example]:
    """One example for every input, in the source's order."""
    names = [port.name for port in ports]
    if len(given) > len(ports):
        raise UsageError(
            f"{len(given)} inputs are given, and the source has {len(ports)}: {', '.join(names)}", hint="one for each"
        )
    by_name: dict[str, Example] = {}
    for at, item in enumerate(given):
        name = names[at] if item.name is None else item.name
        if name not in names:
            raise UsageError(f"the source has no input `{name}`", hint=closest(name, names))
        by_name[name] = item
    return {port.name: _example(port, by_name.get(port.name), dynamic) for port in ports}


def _example(port: _Port, given: Example | None, dynamic: Axes | None) -> Example:
    if given is None:
        return Example(port.name, _sizes(port, dynamic), port.dtype)
    if port.shape is not None:
        if len(given.shape) != len(port.shape):
            raise UsageError(
                f"the example of `{port.name}` has {len(given.shape)} dimensions, and the source takes {_shown(port)}",
                hint=f"`--input {port.name}:{_typed(port)}`",
            )
        for at, size in enumerate(port.shape):
            if size is not None and given.shape[at] != size:
                raise UsageError(
                    f"axis {at} of the example of `{port.name}` is {given.shape[at]}, and the source takes {_shown(port)}",
                    hint=f"`--input {port.name}:{_typed(port)}`",
                )
    if given.dtype != port.dtype and (given.array is not None or given.dtype != "float32"):
        raise FeedError(
            f"the example of `{port.name}` is {given.dtype}, and the source takes {port.dtype}",
            hint=f"`--input {port.name}:{_typed(port)}` leaves the type to the source",
        )
    return replace(given, name=port.name, dtype=port.dtype)  # given by shape alone, the source's type holds


def _sizes(port: _Port, dynamic: Axes | None) -> Shape:
    """Sizes for an input nobody gave: 2 for an open first axis, a range's own size for a named one."""
    if port.shape is None:
        raise UsageError(
            f"the source does not say how many dimensions `{port.name}` has", hint=f"`--input {port.name}:2x224x224x3`"
        )
    asked = {**(dynamic or {}).get(EVERY, {}), **(dynamic or {}).get(port.name, {})}
    made = []
    for at, size in enumerate(port.shape):
        axis = asked.get(at)
        if size is not None:
            made.append(size)
        elif at == 0 and (axis is None or axis.holds(2)):
            made.append(2)
        elif axis is not None and axis.high is not None:
            made.append(axis.low if axis.low > 1 else min(axis.high, max(2, axis.step)))
        else:
            raise UsageError(
                f"the source leaves axis {at} of `{port.name}` open ({_shown(port)}): nothing says how large it is",
                hint=f"`--input {port.name}:{_typed(port)}`",
            )
    return tuple(made)


def _shown(port: _Port) -> str:
    return "x".join("?" if size is None else str(size) for size in port.shape or ())


def _typed(port: _Port) -> str:
    """A shape one could give: 2 for the first open axis, 64 for the others."""
    return "x".join(str(size if size is not None else 64 if at else 2) for at, size in enumerate(port.shape or ()))


def _axes(ports: Sequence[_Port], examples: Mapping[str, Example], dynamic: Axes | None) -> Axes:
    """What stays dynamic; `ModelError` for an axis that is asked for and that the source itself has fixed."""
    shapes = {name: item.shape for name, item in examples.items()}
    if dynamic is None:
        return {name: axes for name, axes in ((port.name, _open(port, shapes[port.name])) for port in ports) if axes}
    asked = axes_for(dynamic, shapes)
    found: Axes = {}
    lost: dict[str, str] = {}
    for port in ports:
        for at, axis in asked.get(port.name, {}).items():
            if port.shape is None or port.shape[at] is None:
                found.setdefault(port.name, {})[at] = axis
            else:
                lost.setdefault(axis.symbol, f"axis {at} of `{port.name}` is {port.shape[at]}")
                if at in dynamic.get(port.name, {}):
                    raise _frozen(axis.symbol, lost[axis.symbol])
    for symbol, where in lost.items():
        if symbol not in symbols_of(found):
            raise _frozen(symbol, where)
    return found


def _frozen(symbol: str, where: str) -> ModelError:
    return ModelError(
        f"`{symbol}` was to be dynamic, and in the source itself {where}",
        hint="save it again with `None` in that place of its signature or input layer",
    )


def _open(port: _Port, example: Shape) -> dict[int, Axis]:
    shape: tuple[int | None, ...] = (None, *example[1:]) if port.shape is None and example else port.shape or ()
    plain = re.sub(r"\W", "_", port.name)
    plain = plain if plain[:1].isalpha() or plain[:1] == "_" else f"_{plain}"
    return {at: Axis("batch" if at == 0 else f"{plain}_{at}") for at, size in enumerate(shape) if size is None}


def _fixed(ports: Sequence[_Port], examples: Mapping[str, Example], axes: Axes) -> list[str]:
    """Open axes that nobody named: they have the example's size from now on."""
    return [
        f"axis {at} of `{port.name}`, open in the source, is fixed at {examples[port.name].shape[at]}: nothing names it"
        for port in ports
        for at, size in enumerate(port.shape or ())
        if size is None and at not in axes.get(port.name, {})
    ]


# ------------------------------------------------------------------------------------------------ exporting


def export(
    source: Source,
    given: Sequence[Example],
    dynamic: Axes | None,
    opset: int,
    folder: Path,
    *,
    options: Mapping[str, Any] | None = None,
    python: str | None = None,
) -> Exported:
    """The source as a raw ONNX file in `folder`, at most at `NEWEST_OPSET`, and itself in the child, until `close`.

    The `options` are those of `TensorFlowOptions`.
    """
    assert source.path is not None
    wanted = TensorFlowOptions.parse(options or {})
    call = opened(source.path, source.kind, given, dynamic, replace(wanted, python=python or wanted.python))
    try:
        return written(call, opset, folder)
    except BaseException:
        call.close()
        raise


def written(call: Call, opset: int, folder: Path, *, large_nbytes: int = 1 << 30) -> Exported:
    """An opened source as `export` gives it; above `large_nbytes` its weights lie beside the file.

    `ModelError` names the operators tf2onnx has no ONNX for.
    """
    path = folder / "tf2onnx.onnx"
    shapes = {
        name: [None if at in call.axes.get(name, {}) else size for at, size in enumerate(item.shape)]
        for name, item in call.examples.items()
    }
    told = call.convert(path, opset, shapes, large_nbytes)
    unused = [f"nothing reads the input `{name}`: the ONNX file does not have it" for name in told["unused"]]
    symbols = {name: {at: axis.symbol for at, axis in axes.items()} for name, axes in call.axes.items()}
    proto = onnx.load(path, load_external_data=False)
    _tidy(proto, call, symbols)
    path.write_bytes(proto.SerializeToString())
    names = [item.name for item in proto.graph.input]
    example = call.example()

    def feeds(there: Mapping[str, Shape], seed: int) -> dict[str, Array]:
        return {name: array_of(name, call.examples[name], tuple(there[name]), seed) for name in names}

    return Exported(
        path,
        call.run,
        "tf2onnx",
        {name: example[name] for name in names},
        {name: symbols[name] for name in names if name in symbols},
        (*call.notes, *unused),
        call.versions,
        call.close,
        limits=symbols_of(call.axes),
        feeds=feeds,
    )


def _tidy(proto: onnx.ModelProto, call: Call, symbols: Mapping[str, Mapping[int, str]]) -> None:
    """Inputs in the source's order with the sizes and symbols asked for; outputs without tf2onnx's symbols, in place.

    tf2onnx calls every open size by a name of its own (`unk__7`): which input an output follows, its numbers do not say.
    """
    for inner in walk.graphs(proto):
        del inner.value_info[:]
        for item in (*inner.input, *inner.output):
            for dim in item.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.Clear()
    graph = proto.graph
    for values, order in ((graph.input, [port.name for port in call.inputs]), (graph.output, list(call.outputs))):
        found = sorted(values, key=lambda item: order.index(item.name))
        del values[:]
        values.extend(found)
    for item in graph.input:
        names = symbols.get(item.name, {})
        _write_shape(item, [names.get(at, size) for at, size in enumerate(call.examples[item.name].shape)])
    for item in graph.output:
        for at, dim in enumerate(item.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dim.dim_param = f"{item.name}_{at}"


def _write_shape(item: onnx.ValueInfoProto, shape: Sequence[int | str]) -> None:
    kind = item.type.tensor_type
    kind.ClearField("shape")
    kind.shape.SetInParent()  # a scalar has a shape without dimensions
    for size in shape:
        dim = kind.shape.dim.add()
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size


# ------------------------------------------------------------------------------------------------ the child


class _Child:
    """The process that has TensorFlow: one JSON line to it, one back. Ended and reaped by `close`, whatever happened."""

    def __init__(self, python: str, source: Path, timeout_s: float) -> None:
        self._source, self._python, self._timeout_s = source, python, timeout_s
        self._noise: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._shown = 0
        self._parts = b""
        self._ended: Ended | None = None
        self._closed = False
        self._pipe, theirs = os.pipe()
        try:
            # a session of its own: Ctrl-C in a terminal comes to us, and we end it
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("tensorflow_child.py")), str(theirs)],
                stdin=subprocess.PIPE, stdout=self._noise, stderr=self._noise, pass_fds=(theirs,), start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            os.close(self._pipe)
            self._noise.close()
            if isinstance(error, OSError):
                raise SetupError(f"`{python}` does not start: {error.strerror}", hint=_INSTALL) from error
            raise
        finally:
            os.close(theirs)
        try:
            hello = self._answer(_START_S, "starting TensorFlow")
            if "missing" in hello:
                absent = hello["missing"] in ("numpy", "onnx", "tensorflow", "tf2onnx")
                what = f"has no `{hello['missing']}`" if absent else f"cannot import TensorFlow: {hello['text']}"
                raise SetupError(f"`{python}` (Python {hello['python']}) {what}", hint=_INSTALL)
            self.versions: dict[str, str] = hello["versions"]
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; what the child refuses, its end, and its silence are our errors."""
        if self._closed:
            raise ModelError(f"the source `{self._source}` was closed", hint="convert it again")
        doing = {"open": "reading", "convert": "converting", "run": "running"}[request["do"]]
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it is gone; the pipe's end says so
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            told = self._answer(self._timeout_s, f"{doing} `{self._source}`")
        except BaseException:  # Ctrl-C too: nobody listens to it any more
            self.close()
            raise
        if "error" in told:
            kind, message, hint = told["error"]
            found: Callable[..., TrtEngineError] = getattr(errors, kind)
            raise found(message, hint=hint)
        answer: dict[str, Any] = told["answer"]
        return answer

    def _answer(self, patience_s: float, doing: str) -> dict[str, Any]:
        deadline = time.monotonic() + patience_s
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._parts:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                lines = self._last_lines()
                self.close()
                raise ModelError(
                    f"{doing} did not end within {patience_s:g} s and was stopped{lines}",
                    hint="a longer time: `-O timeout_s=7200`",
                )
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                raise self._crash(doing)
            self._parts += chunk
        line, _, self._parts = self._parts.partition(b"\n")
        self._print()
        told: dict[str, Any] = json.loads(line)
        return told

    def _print(self) -> str:
        """What TensorFlow printed since the last time, to the debug log; all of it."""
        text = os.pread(self._noise.fileno(), 1 << 26, 0).decode(errors="replace")
        for line in text[self._shown :].splitlines():
            log.debug("tensorflow: %s", line)
        self._shown = len(text)
        return text

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self._print().splitlines() if line.strip()]
        return f"; its last lines: {' / '.join(line[:200] for line in lines[-3:])}" if lines else ""

    def _crash(self, doing: str) -> TrtEngineError:
        """The error behind a child that ended without an answer."""
        ended = self._end(_GRACE_S)
        lines, code = self._last_lines(), ended.code
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        text = f"the TensorFlow process ended by {name} while {doing}{lines}"
        if any(word in lines.lower() for word in _MEMORY_WORDS):
            return MemoryExhausted(text, hint="a smaller example `--input`, or a machine with more memory")
        if code == -signal.SIGKILL:
            text += f" (it had {ended.peak_bytes >> 20} MiB)"
            return SetupError(text, hint="the kernel kills what the memory is not enough for: `dmesg` says so")
        if -code in _CRASHES:
            return ModelError(text, hint="the source may be damaged; `-v` shows all that was printed")
        return SetupError(text, hint=f"`-v` shows all it printed; {_INSTALL}")

    def close(self) -> None:
        """End the process by its number and reap it."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()  # it ends when this does
        try:
            self._end(0.0)
        finally:
            os.close(self._pipe)
            self._noise.close()

    def _end(self, grace_s: float) -> Ended:
        if self._ended is None:
            self._ended = reap(self._process, grace_s)
        return self._ended

"""SavedModels, frozen graphs, Keras and TFLite files to ONNX, with tf2onnx in a worker process.

TensorFlow takes seconds to import and half a gigabyte, logs to stderr, and parses untrusted files: all of it stays in
the worker (`tensorflow_worker.py`), which may use another interpreter (`TRT_ENGINE_TF_PYTHON`). The worker lives while
the source is needed as reference.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx

from trt_engine.arrayfiles import Array
from trt_engine.closing import Closing
from trt_engine.conversion.axes import EVERY, Axes, Axis, axes_for, sizes_of, symbols_of
from trt_engine.conversion.examples import Example, array_of, fit_example, match_examples, with_batch_2
from trt_engine.conversion.exported import Exported
from trt_engine.conversion.sources import Source
from trt_engine.errors import FeedError, MemoryExhausted, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.format import shorten_middle
from trt_engine.graph import walk
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import Shape, suggest
from trt_engine.workers.crash import exit_name, mentions_out_of_memory, restore_error
from trt_engine.workers.process import ChildProcess

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorFlowOptions:
    """Options of a TensorFlow source: part to convert, layout, interpreter."""

    signature: str | None = None
    """Signature of a SavedModel or TFLite file; None: `serving_default`, or the only one."""
    tags: tuple[str, ...] = ()
    """Tags of the SavedModel's graph; default `serve`."""
    inputs: tuple[str, ...] = ()
    """Inputs of a frozen graph, `node:0`; default: its Placeholders."""
    outputs: tuple[str, ...] = ()
    """Outputs of a frozen graph, `node:0`; default: tensors without a reader."""
    inputs_as_nchw: tuple[str, ...] = ()
    """Inputs, by ONNX name, that are NHWC in the source and NCHW in the ONNX file."""
    python: str | None = None
    """Worker interpreter; None: `TRT_ENGINE_TF_PYTHON`, or the current one."""
    timeout_s: float = 1800.0
    """Seconds each for reading, converting and running the source."""

    @staticmethod
    def parse(given: Mapping[str, Any]) -> TensorFlowOptions:
        """Parse options: `{"signature": "predict", "outputs": "a:0,b:0"}`."""
        known = {item.name: item for item in fields(TensorFlowOptions)}
        made: dict[str, Any] = {}
        for name, value in given.items():
            key = name.replace("-", "_")
            if key not in known:
                raise UsageError(f"TensorFlow sources have no option `{name}`", hint=suggest(key, list(known)))
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
    """Shape in ONNX layout: None for a dynamic size, None as a whole for an unknown rank."""


@dataclass
class BoundSource(Closing):
    """The source opened in a worker, with named inputs. `close` ends the worker."""

    inputs: tuple[_Port, ...]
    outputs: tuple[str, ...]
    examples: dict[str, Example]
    axes: Axes
    notes: tuple[str, ...]
    versions: dict[str, str]
    _child: WorkerProcess
    _nchw: tuple[str, ...]

    def example(self) -> dict[str, Array]:
        """Example inputs of the conversion."""
        return {name: array_of(name, item, item.shape) for name, item in self.examples.items()}

    def convert(self, path: Path, opset: int, shapes: Mapping[str, Any], large_nbytes: int) -> dict[str, Any]:
        """Write ONNX to `path` in the worker; returns its opset and unused inputs."""
        request = {"do": "convert", "out": str(path.absolute()), "opset": opset, "shapes": shapes, "nchw": self._nchw}
        return self._child.request({**request, "large": large_nbytes})

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs of the source; an unused input that ONNX dropped may be missing."""
        arrays: dict[str, Any] = {}  # by number: names may be invalid as members of an archive
        for at, port in enumerate(self.inputs):
            item = self.examples[port.name]
            array = feeds[port.name] if port.name in feeds else array_of(port.name, item, item.shape)
            if array.dtype != numpy_dtype(port.dtype):
                raise FeedError(
                    f"`{port.name}` is {array.dtype}, and the source takes {port.dtype}",
                    hint=f"`.astype(numpy.{port.dtype})`",
                )
            arrays[f"a{at}"] = np.asarray(array, order="C")  # `ascontiguousarray` would make a scalar a vector
        with tempfile.TemporaryDirectory(prefix="trt-engine-tf-") as folder:
            took, gave = Path(folder) / "feeds.npz", Path(folder) / "outputs.npz"
            np.savez(took, **arrays)
            stated = self._child.request({"do": "run", "feeds": str(took), "out": str(gave), "nchw": self._nchw})
            with np.load(gave, allow_pickle=False) as found:
                answers = [found[f"a{at}"] for at in range(len(self.outputs))]
        return {
            name: array.view(numpy_dtype(dtype)) if array.dtype.kind == "V" else array  # NumPy files know no bfloat16
            for name, array, dtype in zip(self.outputs, answers, stated["dtypes"], strict=True)
        }

    def close(self) -> None:
        """End the worker; idempotent."""
        self._child.close()


def open_source(
    path: Path,
    kind: str,
    given: Sequence[Example],
    dynamic: Axes | None,
    options: TensorFlowOptions | None = None,
    *,
    trust_source: bool = False,
) -> BoundSource:
    """Open the source and bind its inputs: shapes and types are its own, dynamic sizes come from `given`.

    Without `dynamic` every open axis stays dynamic, the first as `batch`; with it, only those named. `SetupError`
    without TensorFlow or tf2onnx, `ModelError` for an unreadable source, `UsageError` for unknown names.
    """
    wanted = options or TensorFlowOptions()
    child = WorkerProcess(_worker_python(wanted.python), path, wanted.timeout_s)
    try:
        part = {name: getattr(wanted, name) for name in ("signature", "tags", "inputs", "outputs")}
        request = {"do": "open", "kind": kind, "path": str(path.absolute()), "nchw": wanted.inputs_as_nchw}
        stated = child.request({**request, **part, "trust_source": trust_source})
        ports = tuple(
            _Port(item["name"], item["dtype"], None if item["shape"] is None else tuple(item["shape"]))
            for item in stated["inputs"]
        )
        examples = _examples(ports, given, dynamic)
        axes = _axes(ports, examples, dynamic)
        examples, said = with_batch_2(examples, axes)
        sizes_of(axes, {name: item.shape for name, item in examples.items()})
        said += _fixed_axis_notes(ports, examples, axes)
        return BoundSource(
            ports, tuple(item["name"] for item in stated["outputs"]), examples, axes, (*stated["notes"], *said),
            child.versions, child, wanted.inputs_as_nchw,
        )  # fmt: skip
    except BaseException:
        child.close()
        raise


def _worker_python(named: str | None) -> str:
    """Interpreter of the worker: option, environment variable, or the current one."""
    text = named or os.environ.get(PYTHON) or sys.executable
    found = shutil.which(Path(text).expanduser())
    if found is None:
        where = "`python`" if named else f"`{PYTHON}`"
        raise SetupError(f"{where} names `{text}`, which is not a program", hint="name a Python interpreter's file")
    return found


def _examples(ports: Sequence[_Port], given: Sequence[Example], dynamic: Axes | None) -> dict[str, Example]:
    """An example for every input, in the source's order."""
    by_name = match_examples([port.name for port in ports], given, "the source")
    found = {}
    for port in ports:
        if port.name in by_name:
            shape = None if port.shape is None else tuple(-1 if size is None else size for size in port.shape)
            found[port.name] = fit_example(
                by_name[port.name], port.name, port.dtype, shape, _format_port(port), "the source"
            )
        else:
            found[port.name] = Example(port.name, _default_shape(port, dynamic), port.dtype)
    return found


def _default_shape(port: _Port, dynamic: Axes | None) -> Shape:
    """Default sizes of an input: 2 for an open first axis, a range's own size for a named one."""
    if port.shape is None:
        raise UsageError(
            f"the source does not declare the rank of `{port.name}`", hint=f"`--input {port.name}:2x224x224x3`"
        )
    asked = {**(dynamic or {}).get(EVERY, {}), **(dynamic or {}).get(port.name, {})}
    made = []
    for at, size in enumerate(port.shape):
        axis = asked.get(at)
        if size is not None:
            made.append(size)
        elif at == 0 and (axis is None or axis.contains(2)):
            made.append(2)
        elif axis is not None and axis.high is not None:
            made.append(axis.low if axis.low > 1 else min(axis.high, max(2, axis.step)))
        else:
            raise UsageError(
                f"the source leaves axis {at} of `{port.name}` open ({_format_port(port)}): its size is unknown",
                hint=f"`--input {port.name}:{_example_shape(port)}`",
            )
    return tuple(made)


def _format_port(port: _Port) -> str:
    return "x".join("?" if size is None else str(size) for size in port.shape or ()) or "a scalar"


def _example_shape(port: _Port) -> str:
    """An example shape: 2 for the first open axis, 224 for the sides of an image; an unknown one is `SIZE`."""
    shape = port.shape or ()
    image = len(shape) == 4 and (shape[3] in (1, 3, 4) or shape[1] in (1, 3, 4))
    unknown = "224" if image else "SIZE"
    return "x".join(str(size) if size is not None else unknown if at else "2" for at, size in enumerate(shape)) or (
        f"scalar:{port.dtype}@1..1"
    )


def _axes(ports: Sequence[_Port], examples: Mapping[str, Example], dynamic: Axes | None) -> Axes:
    """Dynamic axes; `ModelError` for a requested axis that is static in the source."""
    shapes = {name: item.shape for name, item in examples.items()}
    if dynamic is None:
        return {
            name: axes for name, axes in ((port.name, _open_axes(port, shapes[port.name])) for port in ports) if axes
        }
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
                    raise _fixed_axis_error(axis.symbol, lost[axis.symbol])
    for symbol, where in lost.items():
        if symbol not in symbols_of(found):
            raise _fixed_axis_error(symbol, where)
    return found


def _fixed_axis_error(symbol: str, where: str) -> ModelError:
    return ModelError(
        f"`{symbol}` was to be dynamic, but in the source {where}",
        hint="save it again with `None` in that place of its signature or input layer",
    )


def _open_axes(port: _Port, example: Shape) -> dict[int, Axis]:
    shape: tuple[int | None, ...] = (None, *example[1:]) if port.shape is None and example else port.shape or ()
    plain = re.sub(r"\W", "_", port.name)
    plain = plain if plain[:1].isalpha() or plain[:1] == "_" else f"_{plain}"
    return {at: Axis("batch" if at == 0 else f"{plain}_{at}") for at, size in enumerate(shape) if size is None}


def _fixed_axis_notes(ports: Sequence[_Port], examples: Mapping[str, Example], axes: Axes) -> list[str]:
    """Notes on open axes that were not named: they become static at the example's size."""
    return [
        f"axis {at} of `{port.name}`, open in the source, is static at {examples[port.name].shape[at]}: nothing names it"
        for port in ports
        for at, size in enumerate(port.shape or ())
        if size is None and at not in axes.get(port.name, {})
    ]


NEWEST_OPSET = 18
"""Newest opset supported by tf2onnx 1.17."""


def export_tensorflow(
    source: Source,
    given: Sequence[Example],
    dynamic: Axes | None,
    opset: int,
    folder: Path,
    *,
    options: Mapping[str, Any] | None = None,
    python: str | None = None,
    trust_source: bool = False,
) -> Exported:
    """Write the source as a raw ONNX file in `folder`, with an opset of at most `NEWEST_OPSET`; the worker runs until
    `close`.

    `options` are those of `TensorFlowOptions`.
    """
    assert source.path is not None
    wanted = TensorFlowOptions.parse(options or {})
    wanted = replace(wanted, python=python or wanted.python)
    call = open_source(source.path, source.kind, given, dynamic, wanted, trust_source=trust_source)
    try:
        return export_opened(call, opset, folder)
    except BaseException:
        call.close()
        raise


def export_opened(call: BoundSource, opset: int, folder: Path, *, large_nbytes: int = 1 << 30) -> Exported:
    """Export an opened source; weights above `large_nbytes` go to a side file.

    `ModelError` names operators that tf2onnx cannot convert.
    """
    path = folder / "tf2onnx.onnx"
    shapes = {
        name: [None if at in call.axes.get(name, {}) else size for at, size in enumerate(item.shape)]
        for name, item in call.examples.items()
    }
    stated = call.convert(path, opset, shapes, large_nbytes)
    unused = [f"the input `{name}` is unused and missing in the ONNX file" for name in stated["unused"]]
    symbols = {name: {at: axis.symbol for at, axis in axes.items()} for name, axes in call.axes.items()}
    proto = onnx.load(path, load_external_data=False)
    _clean_graph(proto, call, symbols)
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


def _clean_graph(proto: onnx.ModelProto, call: BoundSource, symbols: Mapping[str, Mapping[int, str]]) -> None:
    """Restore input order, sizes and requested symbols, and remove tf2onnx's symbols from outputs, in place.

    tf2onnx names every open size (`unk__7`), without relating outputs to inputs.
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
        sizes = [names.get(at, size) for at, size in enumerate(call.examples[item.name].shape)]
        item.CopyFrom(onnx.helper.make_tensor_value_info(item.name, item.type.tensor_type.elem_type, sizes))
    for item in graph.output:
        for at, dim in enumerate(item.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dim.dim_param = f"{item.name}_{at}"


PYTHON = "TRT_ENGINE_TF_PYTHON"
"""Environment variable naming an interpreter with TensorFlow and tf2onnx."""
_INSTALL_HINT = f"`pip install 'trt-engine[tf]'`, or name an interpreter that has both with `{PYTHON}`"
_START_S = 300.0
_GRACE_S = 30.0
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)


class WorkerProcess:
    """The TensorFlow worker process: one JSON line per request and reply. `close` ends and reaps it."""

    def __init__(self, python: str, source: Path, timeout_s: float) -> None:
        self._source, self._timeout_s = source, timeout_s
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._shown = 0
        self._closed = False
        try:
            self._child = ChildProcess([python, str(Path(__file__).with_name("tensorflow_worker.py"))], self._output)
        except OSError as error:
            self._output.close()
            raise SetupError(f"`{python}` does not start: {error.strerror}", hint=_INSTALL_HINT) from error
        try:
            hello = self._read_reply(_START_S, "starting TensorFlow")
            if "missing" in hello:
                absent = hello["missing"] in ("numpy", "onnx", "tensorflow", "tf2onnx")
                what = f"has no `{hello['missing']}`" if absent else f"cannot import TensorFlow: {hello['text']}"
                raise SetupError(f"`{python}` (Python {hello['python']}) {what}", hint=_INSTALL_HINT)
            self.versions: dict[str, str] = hello["versions"]
        except BaseException:
            self.close()
            raise

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Reply to one request; rejections, crashes and timeouts raise our errors."""
        if self._closed:
            raise ModelError(f"the source `{self._source}` was closed", hint="convert it again")
        doing = {"open": "reading", "convert": "converting", "run": "running"}[request["do"]]
        try:
            self._child.send(json.dumps(request).encode())
            reply = self._read_reply(self._timeout_s, f"{doing} `{self._source}`")
        except BaseException:  # Ctrl-C too: its reply will not be read
            self.close()
            raise
        if "error" in reply:
            raise restore_error(*reply["error"])
        answer: dict[str, Any] = reply["answer"]
        return answer

    def _read_reply(self, timeout_s: float, doing: str) -> dict[str, Any]:
        try:
            line = self._child.read_line(timeout_s)
        except TimeoutError:
            raise ModelError(
                f"{doing} did not end within {timeout_s:g} s and was stopped{self._last_lines()}",
                hint="a longer time: `-O timeout_s=7200`",
            ) from None
        if line is None:
            raise self._crash_error(doing)
        self._log_output()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _log_output(self) -> str:
        """Log what TensorFlow printed since the last call at debug level."""
        text = os.pread(self._output.fileno(), 1 << 26, 0).decode(errors="replace")
        for line in text[self._shown :].splitlines():
            log.debug("tensorflow: %s", line)
        self._shown = len(text)
        return text

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self._log_output().splitlines() if line.strip()]
        return f"; last lines: {' / '.join(shorten_middle(line, 300) for line in lines[-3:])}" if lines else ""

    def _crash_error(self, doing: str) -> TrtEngineError:
        """Error for a worker that ended without a reply."""
        ended = self._child.wait(_GRACE_S)
        lines, code = self._last_lines(), ended.code
        text = f"the TensorFlow process ended by {exit_name(code)} while {doing}{lines}"
        if mentions_out_of_memory(lines):
            return MemoryExhausted(text, hint="a smaller example `--input`, or a machine with more memory")
        if code == -signal.SIGKILL:
            text += f" (it had {ended.peak_bytes >> 20} MiB)"
            return SetupError(text, hint="probably out of memory: see `dmesg`")
        if -code in _CRASHES:
            return ModelError(
                text,
                hint="it may not run at these sizes: `--input` gives others; else the source or TensorFlow is at "
                "fault (`-v` shows all output)",
            )
        return SetupError(text, hint=f"`-v` shows its output; {_INSTALL_HINT}")

    def close(self) -> None:
        """End the process and reap it."""
        self._closed = True
        try:
            self._child.close()
        finally:
            self._output.close()

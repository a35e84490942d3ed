"""Runs plans with trtexec when the bindings are missing: one process per inference."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.backends.trtexec.build import run_checked
from trt_engine.backends.trtexec.command_line import CommandLine, quote_name, run_command
from trt_engine.backends.trtexec.program import Program, find_program
from trt_engine.config.profiles import check_shapes, select_profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device.host import HostDevice, numpy_dtype
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, UsageError
from trt_engine.protocols import Context, Session
from trt_engine.tensors import Shape, Tensors, TensorSpec, dtype, format_shape
from trt_engine.trt.settings import parse

log = logging.getLogger(__name__)

_OUTPUT_LINE = re.compile(
    r"Writing file for output binding (?P<name>.*) \(with datatype \S+ and dimensions (?P<dims>[\d.]*)\) to (?P<file>\S+)"
)


class TrtexecRuntime:
    """Loads plans to run in one process per inference."""

    def load(self, engine: Engine, config: RuntimeConfig) -> TrtexecSession:
        """A session; starts nothing. The caller checks compatibility."""
        program = find_program()
        if not program.has("dumpRawBindingsToFile"):
            raise EngineError(
                f"trtexec {program.version_text} cannot write raw outputs (`--dumpRawBindingsToFile` came with 8.6)",
                hint="`trt-engine bench` measures with it; install the TensorRT bindings to run engines",
            )
        for spec in engine.signature:
            if spec.dtype == "string" or dtype(spec.dtype).bits < 8:
                raise UsageError(
                    f"`{spec.name}` is {spec.dtype}, which cannot be passed to trtexec in a file",
                    hint="install the TensorRT bindings to run this engine",
                )
        log.warning("the TensorRT bindings are not installed: every inference starts trtexec, which takes seconds")
        return TrtexecSession(program, engine, config)


class TrtexecSession(Session):
    """A host session: `run` maps host arrays to host arrays, bit for bit."""

    runs_host_arrays = True

    def __init__(self, program: Program, engine: Engine, config: RuntimeConfig) -> None:
        self.signature = engine.signature
        self.device = HostDevice()
        self._program = program
        self._engine = engine
        self._config = config
        self._closed = False
        self._process_lock = threading.Lock()  # concurrent processes would share GPU memory and time

    def create_context(self, profile: int = 0) -> Context:
        raise UsageError("trtexec has no contexts", hint="`session.run(feeds)`")

    def runtime_info(self) -> dict[str, str]:
        return {
            "device": self._config.device or self._engine.passport.device,
            "library": f"tensorrt {self._program.version_text}",
            "computes": "trtexec, one process per inference: latencies include process start and loading",
            "precision": self._engine.passport.precision.main_dtype or "unknown",
        }

    def close(self) -> None:
        self._closed = True

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """Run one inference; outputs are exact."""
        if self._closed:
            raise UsageError("the session is closed", hint="load the engine again")
        with tempfile.TemporaryDirectory(prefix="trt-engine-trtexec-") as place:
            folder = Path(place)
            made = engine_command(self._program, self._engine, self._config, feeds, folder)
            made.add_all(iterations=1, duration=0, warmUp=0)
            made.add("dumpRawBindingsToFile")
            if self._program.version >= (11, 0, 0):
                made.add("includeDataTransfers")  # without, outputs would stay on the device
                made.add("noCudaGraph")
            with self._process_lock:
                subject = f"the inference of `{self._engine.path.name}`"
                ran, _ = run_checked(made, folder, subject, measured=True, quiet=True)
            return {spec.name: _read_output(spec, ran.lines, folder) for spec in self.signature.outputs}


def engine_command(
    program: Program, engine: Engine, config: RuntimeConfig, feeds: Tensors, folder: Path
) -> CommandLine:
    """The command line of the engine on `feeds`, written as raw files into `folder`, trtexec's working directory.

    The settings are the build's, overridden by those of this load; the profile is the first that contains the shapes.
    """
    signature, profiles = engine.signature, engine.passport.profiles
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    if not profiles:
        check_shapes(signature, shapes)
    made = run_command(
        program, parse((engine.passport.build.config.get("options") or {}) | config.options), signature, shapes,
        engine=engine.path.absolute(), device=config.device or engine.passport.device,
        profile=select_profile(profiles, lambda profile, index: check_shapes(signature, shapes, profile, index)),
    )  # fmt: skip
    parts = []
    for index, spec in enumerate(signature.inputs):
        (folder / f"{index}.bin").write_bytes(np.ascontiguousarray(feeds[spec.name]).tobytes())
        parts.append(f"{quote_name(spec.name)}:{index}.bin")
    if parts:
        made.add("loadInputs", ",".join(parts))
    return made


def _read_output(spec: TensorSpec, lines: Sequence[str], folder: Path) -> Array:
    """Read one output from the file named in trtexec's log."""
    wrote = list(_output_files(lines))
    mine = [(dims, file) for name, dims, file in wrote if name == spec.name]
    if not mine:
        raise EngineError(
            f"trtexec wrote no output `{spec.name}`", hint="passport and plan belong to different engines"
        )
    dims, file = mine[-1]
    if sum(other == file for _, _, other in wrote) > len(mine):
        raise EngineError(
            f"trtexec wrote outputs including `{spec.name}` to one file: their names differ only in characters it replaces",
            hint="rename the outputs in the model, or install the TensorRT bindings",
        )
    raw = (folder / Path(file).name).read_bytes()
    kind = numpy_dtype(spec.dtype)
    if len(raw) < (wanted := int(np.prod(dims, dtype=np.int64)) * kind.itemsize):
        raise EngineError(
            f"output `{spec.name}` is {format_shape(dims) or 'a scalar'} in {len(raw)} bytes, expected {wanted} of "
            f"{spec.dtype}",
            hint="passport and plan belong to different engines: build it again",
        )
    return np.frombuffer(raw[:wanted], kind).reshape(dims).copy()


def _output_files(lines: Sequence[str]) -> Iterator[tuple[str, Shape, str]]:
    for line in lines:
        if match := _OUTPUT_LINE.search(line):
            yield match["name"], tuple(int(size) for size in match["dims"].split(".") if size), match["file"]

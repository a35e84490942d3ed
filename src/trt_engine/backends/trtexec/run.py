"""A plan at work through trtexec, where no bindings are: one process for each inference, bytes in and bytes out."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.backends.trtexec.arguments import Arguments, for_running, quoted
from trt_engine.backends.trtexec.build import failure
from trt_engine.backends.trtexec.program import Program, find
from trt_engine.config import RuntimeConfig, check_shapes, first_fitting
from trt_engine.device.host import HostDevice, numpy_dtype
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, UsageError
from trt_engine.plans.settings import PlanSettings, parse
from trt_engine.plans.trtexec_log import misses
from trt_engine.plans.trtexec_log import parse as parse_log
from trt_engine.protocols import Context
from trt_engine.tensors import Shape, Tensors, TensorSpec, dtype, format_shape

__all__ = ["TrtexecRuntime", "TrtexecSession", "input_words", "profile_of", "settings_of"]

Array = npt.NDArray[Any]
log = logging.getLogger(__name__)

_WROTE = re.compile(
    r"Writing file for output binding (?P<name>.*) \(with datatype \S+ and dimensions (?P<dims>[\d.]*)\) to (?P<file>\S+)"
)


class TrtexecRuntime:
    """Loads plans for one process per inference."""

    def load(self, engine: Engine, config: RuntimeConfig) -> TrtexecSession:
        """A session; nothing runs until something is fed. Whether the plan fits is the caller's question (`verdict`)."""
        program = find()
        if not program.has("dumpRawBindingsToFile"):
            raise EngineError(
                f"trtexec {program.text} cannot give outputs exactly (`--dumpRawBindingsToFile` came with 8.6)",
                hint="`trt-engine bench` measures with it; install the TensorRT bindings to run engines",
            )
        for spec in engine.signature:
            if spec.dtype == "string" or dtype(spec.dtype).bits < 8:
                raise UsageError(
                    f"`{spec.name}` is {spec.dtype}, which cannot be handed to trtexec in a file",
                    hint="install the TensorRT bindings to run this engine",
                )
        log.warning("there are no TensorRT bindings here: every inference starts trtexec anew, which takes seconds")
        return TrtexecSession(program, engine, config)


class TrtexecSession:
    """A direct session: `run` takes and gives host arrays, exactly as many bytes as the engine has."""

    def __init__(self, program: Program, engine: Engine, config: RuntimeConfig) -> None:
        self.signature = engine.signature
        self.device = HostDevice()
        self._program = program
        self._engine = engine
        self._on = config.device or engine.passport.device
        self._settings = settings_of(engine, config)
        self._closed = False
        self._one = threading.Lock()  # two processes would share the GPU's memory and each other's time

    def context(self, profile: int = 0) -> Context:
        raise UsageError("trtexec has no contexts to hand out", hint="`session.run(feeds)`")

    def facts(self) -> dict[str, str]:
        return {
            "device": self._on,
            "library": f"tensorrt {self._program.text}",
            "computes": "trtexec, one process per inference: latencies hold the start of a process and the loading",
            "precision": self._engine.passport.precision.main or "unknown",
        }

    def close(self) -> None:
        self._closed = True

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """One inference; the outputs bit for bit."""
        if self._closed:
            raise UsageError("the session is closed", hint="load the engine again")
        given = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
        profile = profile_of(self._engine, given)
        with tempfile.TemporaryDirectory(prefix="trt-engine-trtexec-") as place:
            folder = Path(place)
            made = for_running(
                self._program, self._settings, self.signature, given,
                engine=self._engine.path.absolute(), device=self._on, profile=profile,
            )  # fmt: skip
            input_words(made, self.signature.inputs, feeds, folder)
            for option, value in (("iterations", 1), ("duration", 0), ("warmUp", 0)):
                made.add(option, value)
            made.add("dumpRawBindingsToFile")
            if self._program.version >= (11, 0, 0):
                made.add("includeDataTransfers")  # without, outputs would stay on the device
                made.add("noCudaGraph")
            with self._one:
                ran = self._program.run(made.words, folder=folder, quiet=True)
            said = parse_log(ran.lines, "trtexec")
            if lacking := misses(said, exit_code=ran.exit_code, measured=True):
                raise failure(ran, said, lacking, f"the inference of `{self._engine.path.name}`")
            return {spec.name: _read(spec, ran.lines, folder) for spec in self.signature.outputs}


def settings_of(engine: Engine, config: RuntimeConfig) -> PlanSettings:
    """The settings of the build, and over them those of this load."""
    built = engine.passport.build.config.get("options") or {}
    return parse(built | config.options)


def input_words(made: Arguments, specs: Sequence[TensorSpec], feeds: Tensors, folder: Path) -> None:
    """Write the feeds as raw bytes into `folder`, where the program runs, and name them on its command line."""
    parts = []
    for index, spec in enumerate(specs):
        (folder / f"{index}.bin").write_bytes(np.ascontiguousarray(feeds[spec.name]).tobytes())
        parts.append(f"{quoted(spec.name)}:{index}.bin")
    if parts:
        made.add("loadInputs", ",".join(parts))


def profile_of(engine: Engine, given: dict[str, Shape]) -> int:
    """The first profile that holds the shapes; the first one's `ProfileError` where none does."""
    profiles = engine.passport.profiles
    if not profiles:
        check_shapes(engine.signature, given)
    return first_fitting(profiles, lambda profile, index: check_shapes(engine.signature, given, profile, index))


def _read(spec: TensorSpec, lines: Sequence[str], folder: Path) -> Array:
    """One output from the file trtexec says it wrote it to."""
    wrote = list(_written(lines))
    mine = [(dims, file) for name, dims, file in wrote if name == spec.name]
    if not mine:
        raise EngineError(
            f"trtexec wrote no output `{spec.name}`", hint="the passport and the plan are not of one engine"
        )
    dims, file = mine[-1]
    if sum(other == file for _, _, other in wrote) > len(mine):
        raise EngineError(
            f"trtexec wrote several outputs to one file, `{spec.name}` among them: their names differ in signs it replaces",
            hint="rename the outputs in the model, or install the TensorRT bindings",
        )
    raw = (folder / Path(file).name).read_bytes()
    kind = numpy_dtype(spec.dtype)
    if len(raw) < (wanted := int(np.prod(dims, dtype=np.int64)) * kind.itemsize):
        raise EngineError(
            f"output `{spec.name}` is {format_shape(dims) or 'a scalar'} in {len(raw)} bytes, expected {wanted} of "
            f"{spec.dtype}",
            hint="the passport and the plan are not of one engine: build it again",
        )
    return np.frombuffer(raw[:wanted], kind).reshape(dims).copy()


def _written(lines: Sequence[str]) -> Iterator[tuple[str, Shape, str]]:
    for line in lines:
        if match := _WROTE.search(line):
            yield match["name"], tuple(int(size) for size in match["dims"].split(".") if size), match["file"]

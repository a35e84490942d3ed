"""The seams: a `Builder` turns a model into an engine's payload, a `Runtime` an engine into a `Session`, and everything
else is written against `RunnerBase`. Sessions, contexts and runners inherit defaults and flags from their base class.

`prepare`, `bind` and `enqueue` are apart because only `enqueue` is hot and only `enqueue` may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile, check_shapes
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Buffer, Device, Stream
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.model import Model
from trt_engine.records.passport import Precision, Requirements
from trt_engine.tensors import Shape, Signature, Tensors, suggest


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """A backend's report on the payload it has written."""

    signature: Signature
    precision: Precision
    requirements: Requirements
    files: tuple[Path, ...] = ()
    """Side files of the payload (external weights), in the payload's folder."""
    warnings: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    """Facts of this backend worth keeping, by name: optimisation level, providers, node placement."""
    retries: tuple[str, ...] = ()
    """Steps tried after a known failure, in order."""
    compiled: bool = False
    """True when the payload is compiled further as it is loaded: its operators are not those that will run."""
    device: str | None = None
    """The device the payload runs on, where the backend's settings decide it; None for the requested one."""


@dataclass(frozen=True, slots=True)
class BuildPaths:
    """Output paths of a build."""

    payload: Path
    log: Path | None = None
    """File for the raw output of the library or tool, line by line; kept when the build fails. None: not written."""
    timing_cache: Path | None = None
    """The file tactics' timings are kept in between builds; shared with other processes. None: nothing is kept."""
    on_status: Callable[[str], None] = field(default=lambda text: None, compare=False)
    """Receives the builder's current step, from any thread; empty for none."""
    cache: Path | None = None
    """Folder of this builder for what its compiler keeps between builds. None: nothing is kept."""


class Builder(Protocol):
    """The build side of a backend."""

    def identity(self, config: BuildConfig) -> str:
        """Who builds, exactly: `onnxruntime 1.31.1 CPUExecutionProvider avx2,avx512f`. Part of the engine's key."""
        ...

    def build(self, model: Model, config: BuildConfig, paths: BuildPaths) -> BuildOutcome:
        """Write the payload of `model` to `paths.payload`; raise `ModelError`, `BuildError`, `SetupError` otherwise.

        A `BuildError` whose `cause` is a known one (`trt_engine.trt.failure_causes`) allows a retry.
        """
        ...


class Runtime(Protocol):
    """The run side of a backend (one backend may build and another run: trtexec builds, tensorrt runs)."""

    def load(self, engine: Engine, config: RuntimeConfig) -> Session: ...


class Session:
    """An engine on one device. Creates contexts; cannot be closed while one of them is open.

    The base class of all sessions: the flags say which of the optional methods a subclass has.
    """

    signature: Signature
    device: Device
    runs_host_arrays: bool = False
    """`run` exists: the library takes and gives host arrays itself and is safe from many threads. ONNX Runtime is one:
    going through `Context` would add copies and a lock that the library does not need."""
    runs_on_own_streams: bool = False
    """`run` exists, and contexts on the device's streams are faster: a pool uses these."""
    binds_resident: bool = False
    """`bind_resident` exists."""
    compiles_at_first_use: bool = False
    """Creating a context and the first inference at a shape compile: benchmarks exclude both."""

    def create_context(self, profile: int = 0) -> Context:
        raise NotImplementedError

    def stream(self) -> Stream:
        """A stream for contexts of this session; the caller closes it before the session."""
        return self.device.stream()

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs as host arrays."""
        raise NotImplementedError

    def bind_resident(self, feeds: Tensors, *, graph: bool = False) -> Callable[[], None]:
        """One inference for each call, on feeds copied to the device once, into outputs that stay there; it returns when
        the device is done. For one thread. With `graph` each call replays a graph captured now; raises where none can be.
        """
        raise NotImplementedError

    def runtime_info(self) -> dict[str, str]:
        """What actually runs: providers, precision, threads, by name."""
        return {}

    def close(self) -> None:
        raise NotImplementedError


class Context:
    """One inference in flight, one thread."""

    host_inputs: frozenset[str] = frozenset()
    """Inputs whose values decide shapes: set by `set_values`, not bound to buffers."""
    can_prebind: bool = False
    """`prebind` exists."""

    @property
    def no_graph(self) -> str | None:
        """Why an inference of this context cannot be captured in a graph; None where it can."""
        return None

    def set_values(self, name: str, value: Any) -> None:
        """Set the values of one of `host_inputs` for the next `prepare`."""
        raise NotImplementedError

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Set the input shapes; the output shapes, -1 where they depend on the data."""
        raise NotImplementedError

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        """Inputs and outputs to use from now on. Outputs with a data-dependent shape are left out."""
        raise NotImplementedError

    def enqueue(self, stream: Stream) -> None:
        """Put one inference on the stream and return before the device is done; the only hot call."""
        raise NotImplementedError

    def prebind(self, addresses: tuple[int, ...], stream: Stream, *, waits: bool = False) -> Callable[[], None]:
        """A function that enqueues one inference on memory at these addresses, in the signature's order, of the sizes
        that `prepare` returned; valid until the next `prepare`. With `waits` a call returns when the device is done: for an
        exclusive stream. It skips validation and binding, for repeated requests.

        What is bound stays bound, and is not used. The caller answers for the memory; no output's size depends on the data.
        A call raises the library's errors: `translate_error` translates them.
        """
        raise NotImplementedError

    def translate_error(self, error: BaseException) -> TrtEngineError | None:
        """The actionable error for a library error; None for one that is not the library's."""
        return None

    def outputs(self) -> dict[str, Any]:
        """Host arrays of the outputs `prepare` could not size; valid once the stream is done."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


_MadeContext = TypeVar("_MadeContext", bound="CheckedContext")


class CheckedSession(Session):
    """A session that knows its open contexts, and does not close under one."""

    def __init__(self) -> None:
        self._open: set[CheckedContext] = set()

    def _register(self, made: _MadeContext) -> _MadeContext:
        self._open.add(made)
        return made

    def _check_no_context(self) -> None:
        if self._open:
            raise UsageError(
                f"the session has {len(self._open)} open context(s) and cannot close", hint="close them first"
            )


class CheckedContext(Context):
    """A context that checks the order of its calls, for libraries that do not."""

    equal_symbols: bool = True
    """Whether dimensions of one name must have one size; ONNX Runtime does not require it."""

    def __init__(self, owner: CheckedSession, profile: Profile | None, index: int) -> None:
        self._owner = owner
        self._signature = owner.signature
        self._profile, self._index = profile, index
        self._bound: Any = None
        """What `bind` made of the buffers; None before."""
        self._inputs: dict[str, Shape] | None = None
        self._outputs: dict[str, Shape] = {}
        self._dynamic_outputs: dict[str, Any] | None = None
        """Outputs that `prepare` could not size, of the last inference."""
        self._generation = 0
        """Counts `prepare`, so that captured work can see that it is out of date."""
        self._closed = False

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        self._check_open()
        check_shapes(self._signature, inputs, self._profile, self._index)
        outputs = self._output_shapes(inputs)
        self._generation += 1
        self._inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self._outputs = outputs
        self._bound = self._dynamic_outputs = None
        return dict(outputs)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._bound = None
            self._owner._open.discard(self)

    def _output_shapes(self, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
        """The outputs' shapes with symbols resolved; -1 for dimensions that depend on the data."""
        sizes: dict[str | None, int] = {}
        for spec in self._signature.inputs:
            for symbol, size in zip(spec.symbols, inputs[spec.name], strict=False):
                if symbol and self.equal_symbols and sizes.get(symbol, size) != size:
                    raise UsageError(
                        f"`{symbol}` is {size} in `{spec.name}` and {sizes[symbol]} in another input",
                        hint="dimensions of one name have one size",
                    )
                sizes[symbol] = size
        return {
            spec.name: tuple(
                size if size >= 0 else (sizes.get(symbol, -1) if symbol else -1)
                for size, symbol in zip(spec.shape, spec.symbols or (None,) * len(spec.shape), strict=True)
            )
            for spec in self._signature.outputs
        }

    def _check_bound(self) -> None:
        self._check_open()
        if self._bound is None:
            raise UsageError("an inference was enqueued before `prepare` and `bind`", hint="call them first")

    def _deferred(self, held: Iterable[Any], compute: Callable[[], None]) -> Callable[[], None]:
        """`compute` for a stream of the host: refused once the context is prepared again or closed, or one of the buffers
        `held` is closed, whose addresses the library has."""
        epoch = self._generation

        def run() -> None:
            if self._closed or epoch != self._generation:
                raise UsageError(
                    "a graph is out of date: its context was prepared again or closed", hint="capture it again"
                )
            for buffer in held:
                buffer.memory()
            compute()

        return run

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the context is closed", hint="make another with `session.create_context()`")

    def _check_buffers(self, buffers: Mapping[str, Buffer]) -> dict[str, Shape]:
        """The shapes of the tensors to bind, each with a buffer."""
        self._check_open()
        if self._inputs is None:
            raise UsageError("buffers were bound before the shapes were prepared", hint="call `prepare` first")
        wanted = {name: shape for name, shape in self._inputs.items() if name not in self.host_inputs}
        wanted |= {name: shape for name, shape in self._outputs.items() if -1 not in shape}
        for name in buffers:
            if name not in wanted and name not in self.host_inputs:
                raise UsageError(f"there is no tensor `{name}` to bind", hint=suggest(name, list(wanted)))
        for name in wanted:
            if buffers.get(name) is None:
                raise UsageError(f"no buffer is bound to `{name}`", hint="bind every input and every sized output")
        return wanted

    def outputs(self) -> dict[str, Any]:
        self._check_open()
        if all(-1 not in shape for shape in self._outputs.values()):
            return {}
        if self._dynamic_outputs is None:
            raise UsageError("the outputs are not there yet", hint="synchronize the stream first")
        late, self._dynamic_outputs = self._dynamic_outputs, None
        return late


def check_buffer_size(name: str, buffer: Buffer, need: int) -> None:
    """`UsageError` for a buffer smaller than the `need` bytes of the tensor."""
    if need > buffer.nbytes:
        raise UsageError(f"`{name}` needs {need} bytes, its buffer has {buffer.nbytes}", hint="a larger buffer")


class RunnerBase:
    """Runs inference: feeds in, outputs out. Thread-safe; the caller owns the outputs.

    A runner has `signature`, `run` and `close`; the rest has defaults.
    """

    signature: Signature
    profiles: tuple[Profile, ...] = ()
    device: Device | None = None
    """The device whose arrays `run` takes; None: host arrays only."""
    width: int = 1
    """Concurrent inferences that are useful."""
    can_batch: bool = False
    """`run_batched` exists."""

    def run(self, feeds: Tensors) -> dict[str, Any]:
        raise NotImplementedError

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        """The outputs of several requests, concatenated along the batch; the batch is padded to `size` with the last row,
        and outputs exclude padding.
        """
        raise NotImplementedError

    def run_on_device(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs as device arrays with DLPack, owned by the caller."""
        raise UsageError(
            "device outputs need contexts on a single device and no batching", hint="leave `on_device` out"
        )

    def bind(self, inputs: Tensors, outputs: Tensors) -> Any:
        """A `BoundCall` on this memory; outputs that are left out are allocated. Arrays are validated."""
        raise UsageError(
            "memory can be bound on a single device and without batching",
            hint="`te.load(engine)` without these settings",
        )

    def run_timed(self, feeds: Tensors, *, on_device: bool = False) -> tuple[dict[str, Any], float]:
        """The outputs, and the host time of the call in ms."""
        run = self.run_on_device if on_device else self.run
        before = perf_counter()
        outputs = run(feeds)
        return outputs, (perf_counter() - before) * 1e3

    def warm_up(self, feeds: Tensors) -> None:
        """Run once on every device and in every context."""
        self.run(feeds)

    def runtime_info(self) -> dict[str, str]:
        """Device, providers, threads as actually in use, by name."""
        return {}

    def stats(self) -> Any:
        """Statistics of this kind of runner; None without any."""
        return None

    def close(self) -> None:
        raise NotImplementedError

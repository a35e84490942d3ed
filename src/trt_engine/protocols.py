"""The seams: a `Builder` turns a model into an engine's payload, a `Runtime` an engine into a `Session`, and everything
else is written against `Runner`.

`prepare`, `bind` and `enqueue` are apart because only `enqueue` is hot and only `enqueue` may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trt_engine.config import BuildConfig, RuntimeConfig
from trt_engine.device import Buffer, Device, Stream
from trt_engine.engine import Engine, Needs, Precision
from trt_engine.errors import TrtEngineError
from trt_engine.model import Model
from trt_engine.tensors import Shape, Signature, Tensors

__all__ = [
    "BuildOutcome",
    "BuildPlaces",
    "Builder",
    "Context",
    "DirectSession",
    "LaunchingContext",
    "ResidentSession",
    "Runner",
    "Runtime",
    "Session",
]


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """What a backend reports about the payload it has just written."""

    signature: Signature
    precision: Precision
    needs: Needs
    files: tuple[Path, ...] = ()
    """Side files of the payload (external weights), in the payload's folder."""
    warnings: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    """Facts of this backend worth keeping, by name: optimisation level, providers, node placement."""
    ladder: tuple[str, ...] = ()
    """Steps tried after a known failure, in order."""
    compiled: bool = False
    """True when the payload is compiled further as it is loaded: its operators are not those that will run."""
    device: str | None = None
    """The device the payload runs on, where the backend's settings decide it; None for the one asked for."""


@dataclass(frozen=True, slots=True)
class BuildPlaces:
    """Where a build puts what it makes."""

    payload: Path
    log: Path | None = None
    """For what the library or tool says, raw and line by line as it is said; kept when the build fails. None: nowhere."""
    timing_cache: Path | None = None
    """The file tactics' timings are kept in between builds; shared with other processes. None: nothing is kept."""
    doing: Callable[[str], None] = field(default=lambda text: None, compare=False)
    """Told what the builder is at, as often as it likes and from any thread; empty for nothing in particular."""


class Builder(Protocol):
    """A backend's first half."""

    def identity(self, config: BuildConfig) -> str:
        """Who builds, exactly: `onnxruntime 1.31.1 CPUExecutionProvider avx2,avx512f`. Part of the engine's key."""
        ...

    def build(self, model: Model, config: BuildConfig, places: BuildPlaces) -> BuildOutcome:
        """Write the payload of `model` to `places.payload`; raise `ModelError`, `BuildError`, `SetupError` otherwise.

        A `BuildError` whose `cause` is a known one (`trt_engine.plans.causes`) lets the ladder try again.
        """
        ...


class Runtime(Protocol):
    """A backend's second half (one backend may build and another run: trtexec builds, tensorrt runs)."""

    def load(self, engine: Engine, config: RuntimeConfig) -> Session: ...


class Session(Protocol):
    """An engine on one device. Makes contexts; refuses to close while one of them is open."""

    signature: Signature
    device: Device

    def context(self, profile: int = 0) -> Context: ...
    def facts(self) -> dict[str, str]:
        """The truth about what runs: providers, precision, threads, by name."""
        ...

    def close(self) -> None: ...


class DirectSession(Session, Protocol):
    """A session whose library takes and gives host arrays itself and is safe from many threads.

    ONNX Runtime is one: going through `Context` would add copies and a lock that the library does not need.
    """

    def run(self, feeds: Tensors) -> dict[str, Any]: ...


class ResidentSession(DirectSession, Protocol):
    """A direct session on a device with memory of its own, that can leave the copies out: so it is measured."""

    def resident(self, feeds: Tensors, *, graph: bool = False) -> Callable[[], None]:
        """One inference for each call, on feeds copied to the device once, into outputs that stay there; it returns when
        the device is done. For one thread. With `graph` each call replays a graph captured now; raises where none can be.
        """
        ...


class Context(Protocol):
    """One inference in flight, one thread."""

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Set the input shapes; the output shapes, -1 where they depend on the data."""
        ...

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        """Inputs and outputs to use from now on. Outputs with a data-dependent shape are left out."""
        ...

    def enqueue(self, stream: Stream) -> None:
        """Put one inference on the stream and return before the device is done; the only hot call."""
        ...

    def outputs(self) -> dict[str, Any]:
        """Host arrays of the outputs `prepare` could not size; valid once the stream is done."""
        ...

    def close(self) -> None: ...


class LaunchingContext(Context, Protocol):
    """A context with a shorter way for who asks for the same shapes again and again."""

    def launching(self, addresses: tuple[int, ...], stream: Stream, *, waits: bool = False) -> Callable[[], None]:
        """What enqueues one inference at each call on memory at these addresses, in the signature's order, of the sizes that
        `prepare` told; good until `prepare` is called again. With `waits` a call returns when the device is done: for who
        has the stream alone.

        What is bound stays bound, and is not used. The caller answers for the memory; no output's size depends on the data.
        What a call raises is the library's: `explained` makes an error of ours of it.
        """
        ...

    def explained(self, error: BaseException) -> TrtEngineError | None:
        """The error a person can act on behind the library's; None for one that is not the library's."""
        ...


class Runner(Protocol):
    """Anything that answers feeds with outputs: thread-safe; the outputs belong to the caller."""

    @property
    def signature(self) -> Signature: ...
    def run(self, feeds: Tensors) -> dict[str, Any]: ...
    def close(self) -> None: ...

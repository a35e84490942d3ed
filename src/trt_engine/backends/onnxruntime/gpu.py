"""An engine on a GPU as contexts: inferences in flight on streams of ours, over device memory of ours.

ONNX Runtime takes a stream when a session is made, and for good. So each stream has a session of its own, weights included,
and the contexts of one stream share it: what they launch follows each other there. Nothing waits for the GPU but whoever
synchronizes the stream.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.run import (
    OnnxRuntimeContext,
    OnnxRuntimeGpuSession,
    Resident,
    as_array,
    in_numpy,
    plain_run,
)
from trt_engine.config import Profile
from trt_engine.device import Buffer, Device, Stream
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.tensors import Shape, Signature, Tensors, closest, dtype

__all__ = ["OnnxRuntimeStreamContext", "OnnxRuntimeStreams", "StreamSession", "on_cpu"]

log = logging.getLogger(__name__)

_WHEN_DONE = "disable_synchronize_execution_providers"
_GRAPH_ID, _NO_GRAPH_OF_ITS_OWN = "gpu_graph_id", "-1"
_BINDINGS = 64
"""So many sets of addresses stay bound; then from the start again."""


class StreamSession:
    """ONNX Runtime's session on one stream: what it runs is launched there, and is not waited for."""

    def __init__(self, loaded: ort.InferenceSession, stream: Stream, *, refused: str | None = None) -> None:
        self.loaded = loaded
        self.stream = stream
        self.refused = refused
        """Why what it launches cannot be captured; None where it can."""
        self.lock = threading.Lock()
        self._options, self._waiting = ort.RunOptions(), ort.RunOptions()
        self._options.add_run_config_entry(_WHEN_DONE, "1")
        for options in (self._options, self._waiting):
            options.add_run_config_entry(_GRAPH_ID, _NO_GRAPH_OF_ITS_OWN)
        self._inner = getattr(getattr(loaded, "_sess", None), "run_with_iobinding", None)

    def launching(self, binding: Any, *, waits: bool = False) -> Callable[[], None]:
        """What runs one inference at each call and, with `waits`, waits for the device; ONNX Runtime's own exceptions pass.

        Beneath the Python method where that can be reached: options without a `gpu_graph_id` cost 55 of its 57 microseconds,
        the wrapper itself one (ONNX Runtime 1.31.1). Who waits has the stream alone, and needs no lock.
        """
        run, bound = self._inner, getattr(binding, "_iobinding", None)
        if run is None or bound is None:  # the attributes are not part of ONNX Runtime's public face
            run, bound = self.loaded.run_with_iobinding, binding
        if waits:
            return partial(run, bound, self._waiting)
        options, lock = self._options, self.lock

        def launch() -> None:
            with lock:
                run(bound, options)

        return launch


class OnnxRuntimeStreams(OnnxRuntimeGpuSession):
    """An engine on a GPU: contexts over device memory, and streams to run them on. `run` and `resident` are there too.

    A context runs on any stream of the device: on one from `stream()` directly, on another between two events.
    """

    def __init__(
        self,
        first: StreamSession,
        signature: Signature,
        profiles: tuple[Profile, ...],
        facts: dict[str, str],
        device: Device,
        opened: Callable[[Stream], StreamSession],
        direct: Callable[[], ort.InferenceSession],
        capturing: Callable[[], ort.InferenceSession],
        *,
        place: tuple[str, int],
    ) -> None:
        super().__init__(first.loaded, signature, profiles, facts, device.name, capturing)
        self.device.close()
        self.device = device
        self.place = place
        self._opened, self._make_direct = opened, direct
        self._streams: list[StreamSession] = [first]
        self._handed_out = False
        self._direct: ort.InferenceSession | None = None
        self._making = threading.Lock()
        self._first_stream: Stream | None = first.stream

    def stream(self) -> Stream:
        """A stream that contexts run on directly; the caller closes it, before the session."""
        with self._making:
            self._alive()
            if self._streams and not self._handed_out:
                self._handed_out = True
                self._first_stream = None  # the caller's to close
                return self._streams[0].stream
            stream = self.device.stream()
            try:
                self._streams.append(self._opened(stream))
            except BaseException:
                stream.close()
                raise
            self._handed_out = True
            return stream

    def home_of(self, stream: Stream) -> StreamSession:
        """The session on that stream; the first one for a stream from elsewhere."""
        with self._making:
            found = next((item for item in self._streams if item.stream is stream), None)
            if found is None:
                if not self._streams:  # `run` was first
                    self._first_stream = self.device.stream()
                    self._streams.append(self._opened(self._first_stream))
                found = self._streams[0]
            return found

    def context(self, profile: int = 0) -> OnnxRuntimeStreamContext:
        self._alive()
        if not 0 <= profile < max(len(self._profiles), 1):
            raise UsageError(
                f"there is no profile {profile}, the engine has {len(self._profiles)}", hint="profiles count from 0"
            )
        span = self._profiles[profile] if self._profiles else None
        made = OnnxRuntimeStreamContext(self, span, profile)
        self._open.add(made)
        return made

    def run(self, feeds: Tensors) -> dict[str, Any]:
        self._settle()
        return super().run(feeds)

    def resident(self, feeds: Tensors, *, graph: bool = False) -> Resident:
        self._settle()
        return super().resident(feeds, graph=graph)

    def close(self) -> None:
        if not self._open:
            self._forget_sessions()  # before the stream under them
            if self._first_stream is not None:
                self._first_stream.close()
                self._first_stream = None
        super().close()

    def _forget_sessions(self) -> None:
        self._streams, self._direct, self._loaded = [], None, None
        self._run = self._run_values  # `plain_run` holds ONNX Runtime's own session; this one says that there is none

    def _settle(self) -> None:
        """Make the session that `run` and `resident` use: on streams of ONNX Runtime's own, one for each that runs."""
        with self._making:
            if self._direct is not None or self._loaded is None:
                return
            if not self._handed_out and not self._open and self._first_stream is not None:
                self._forget_sessions()  # its weights go before the other's come
                self._first_stream.close()
                self._first_stream = None
            self._loaded = self._direct = self._make_direct()
            if all(in_numpy(spec.dtype) for spec in self.signature):
                self._run = plain_run(self._direct)
            else:
                self._run = self._run_values


class OnnxRuntimeStreamContext(OnnxRuntimeContext):
    """One inference in flight over buffers of the device."""

    _owner: OnnxRuntimeStreams

    def __init__(self, owner: OnnxRuntimeStreams, profile: Profile | None, index: int) -> None:
        super().__init__(owner, None, profile, index)
        self._home: StreamSession | None = None
        self._binding: Any = None
        self._start: Callable[[], None] = _not_moved
        self._held: list[Buffer] = []
        self._wanted: dict[str, Shape] = {}
        self._known: dict[str, tuple[int, Shape]] = {}
        self._pending: list[tuple[str, int, Shape]] = []
        self._late_names: list[str] = []
        self._order: list[str] = []
        self._ready = False
        self._ran = False
        self._bindings: dict[tuple[int, ...], Any] = {}
        self._bindings_of: StreamSession | None = None
        self._kinds = {
            spec.name: np.dtype(spec.dtype).type if in_numpy(spec.dtype) else dtype(spec.dtype).onnx
            for spec in self._signature
        }
        self._fed = frozenset(spec.name for spec in self._signature.inputs)
        self._place = ort.OrtDevice.make(*owner.place)._get_c_device()

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        self._ready = self._ran = False
        self._bindings = {}
        outputs = super().prepare(inputs)
        self._wanted = dict(self._inputs or {}) | {
            name: shape for name, shape in self._outputs.items() if -1 not in shape
        }
        self._held = []
        self._late_names = [name for name, shape in outputs.items() if -1 in shape]
        return outputs

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        self._check_open()
        if self._inputs is None:
            raise UsageError("buffers were bound before the shapes were prepared", hint="call `prepare` first")
        wanted = self._wanted
        for name in buffers:
            if name not in wanted:
                raise UsageError(f"there is no tensor `{name}` to bind", hint=closest(name, list(wanted)))
        self._ready = False
        pending = []
        for name, shape in wanted.items():
            buffer = buffers.get(name)
            if buffer is None:
                raise UsageError(f"no buffer is bound to `{name}`", hint="bind every input and every sized output")
            if getattr(buffer, "device", None) is not self._owner.device or getattr(buffer, "on_host", False):
                raise UsageError(
                    f"the buffer of `{name}` is not on `{self._owner.device.name}`", hint="`session.device.allocate`"
                )
            known = (buffer.pointer, shape)
            if self._known.get(name) != known:
                if (need := dtype(self._type(name)).nbytes(shape)) > buffer.nbytes:
                    raise UsageError(
                        f"`{name}` needs {need} bytes, its buffer has {buffer.nbytes}", hint="a larger buffer"
                    )
                pending.append((name, *known))
        self._pending = pending
        self._held = list(buffers.values())
        self._ready = True

    def enqueue(self, stream: Stream) -> None:
        if self._closed or not self._ready:
            self._check_open()
            raise UsageError("an inference was enqueued before `prepare` and `bind`", hint="call them first")
        for buffer in self._held:
            _ = buffer.pointer  # refuses a closed one: ONNX Runtime holds bare addresses
        home = self._home
        if home is None or (home.stream is not stream and self._owner.home_of(stream) is not home):
            home = self._move(stream)
        if getattr(stream, "capturing", False):
            if refused := self._refusal(home, stream):
                raise UsageError(refused, hint="leave `graphs` out: inference goes on without")
            if (touch := getattr(stream, "touch", None)) is not None:
                touch(*self._held)  # the graph refuses to be replayed without them
        if self._pending:
            self._rebind()
        for name in self._late_names:  # what the last inference made would be written into, whatever its size is now
            self._binding.bind_output(name, "cpu")
            self._remember(name)
        if home.stream is stream:
            self._launch(captured=getattr(stream, "capturing", False))
            return
        home.stream.wait(stream.record())
        self._launch()
        stream.wait(home.stream.record())

    def launching(self, addresses: tuple[int, ...], stream: Stream, *, waits: bool = False) -> Callable[[], None]:
        """What runs one inference at each call on memory at these addresses of the device, inputs before outputs, all of
        sizes `prepare` told.

        The short way for who asks again and again: nothing is checked, and what was bound once stays bound.
        """
        self._check_open()
        home = self._owner.home_of(stream)
        if self._inputs is None or self._late_names or home.stream is not stream:
            raise UsageError(
                "an inference was launched on bare addresses before its shapes were known, or on a stream from elsewhere",
                hint="`prepare`, then `bind` and `enqueue`",
            )
        if home is not self._bindings_of:
            self._bindings, self._bindings_of = {}, home
        binding = self._bindings.get(addresses)
        if binding is None:
            if len(self._bindings) >= _BINDINGS:
                self._bindings = {}
            binding = home.loaded.io_binding()
            for spec, address in zip(self._signature, addresses, strict=True):
                bind = binding.bind_input if spec.name in self._fed else binding.bind_output
                bind(spec.name, *self._owner.place, self._kinds[spec.name], list(self._wanted[spec.name]), address)
            self._bindings[addresses] = binding
        return home.launching(binding, waits=waits)

    def explained(self, error: BaseException) -> TrtEngineError | None:
        return session.on_run(error, self._owner.device.name) if isinstance(error, session.ERRORS) else None

    def outputs(self) -> dict[str, Any]:
        self._check_open()
        if not self._late_names:
            return {}
        if not self._ran:
            raise UsageError("the outputs are not there yet", hint="synchronize the stream first")
        self._ran = False
        values = dict(zip(self._order, self._binding.get_outputs(), strict=True))
        return {
            spec.name: as_array(spec, values[spec.name])
            for spec in self._signature.outputs
            if spec.name in self._late_names
        }

    def close(self) -> None:
        super().close()
        self._binding = self._home = self._bindings_of = None
        self._start = _not_moved
        self._bindings = {}
        self._held, self._known, self._ready = [], {}, False

    def _type(self, name: str) -> str:
        return next(spec.dtype for spec in self._signature if spec.name == name)

    def _launch(self, *, captured: bool = False) -> None:
        try:
            self._start()
        except session.ERRORS as error:
            raise session.on_run(error, self._owner.device.name, captured=captured) from error
        self._ran = True

    def _move(self, stream: Stream) -> StreamSession:
        """Bind to the session of another stream; what was bound is bound there again."""
        home = self._home = self._owner.home_of(stream)
        self._binding = home.loaded.io_binding()
        self._start = home.launching(self._binding)
        self._order = []
        known = self._known | {name: (pointer, shape) for name, pointer, shape in self._pending}
        self._pending = [(name, *known[name]) for name in self._wanted]
        return home

    def _rebind(self) -> None:
        """Tell ONNX Runtime of the addresses that changed."""
        binding = getattr(self._binding, "_iobinding", None)
        for name, pointer, shape in self._pending:
            fed, kind, size = name in self._fed, self._kinds[name], list(shape)
            if binding is not None:
                (binding.bind_input if fed else binding.bind_output)(name, self._place, kind, size, pointer)
            else:
                bind = self._binding.bind_input if fed else self._binding.bind_output
                bind(name, *self._owner.place, kind, size, pointer)
            self._known[name] = (pointer, shape)
            if not fed:
                self._remember(name)
        self._pending = []

    def _remember(self, name: str) -> None:
        """ONNX Runtime gives outputs in the order in which they were bound first."""
        if name not in self._order:
            self._order.append(name)

    def _refusal(self, home: StreamSession, stream: Stream) -> str | None:
        if home.stream is not stream:
            return "ONNX Runtime launches on the stream its session was made with, and that is not the one captured"
        return home.refused


def _not_moved() -> None:
    raise UsageError("an inference was launched before its context had a stream", hint="`enqueue` it there")


def on_cpu(loaded: ort.InferenceSession) -> list[str]:
    """The operators that run on the CPU, each once."""
    return sorted(
        {
            node.op_type
            for part in loaded.get_provider_graph_assignment_info()
            if part.ep_name == "CPUExecutionProvider"
            for node in part.get_nodes()
        }
    )

"""ONNX Runtime contexts on a GPU, over user streams and device memory.

ONNX Runtime fixes the stream when a session is created. So each stream has a separate session, weights included, shared by
the contexts on that stream. Launches are asynchronous.
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
from trt_engine.backends.onnxruntime.host_session import (
    OnnxRuntimeContext,
    OnnxRuntimeGpuSession,
    ResidentInference,
    bind_run,
)
from trt_engine.backends.onnxruntime.ort_values import is_numpy_dtype, to_numpy
from trt_engine.config.profiles import Profile, profile_at
from trt_engine.device import Buffer, Device, Stream
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.protocols import check_buffer_size
from trt_engine.tensors import Shape, Signature, Tensors, dtype

log = logging.getLogger(__name__)

_NO_SYNC_OPTION = "disable_synchronize_execution_providers"
_GRAPH_ID_OPTION, _NO_GRAPH = "gpu_graph_id", "-1"
_MAX_BINDINGS = 64
"""Maximum number of cached bindings."""
_CLEAN_UP_EVERY = 256
"""Number of launches after which one is synchronized, so that ONNX Runtime frees what the others have left."""


class StreamSession:
    """An ONNX Runtime session that launches asynchronously on one stream.

    Some operators (a Concat of many tensors) keep pinned memory until a synchronized inference or the end of the session
    frees it, by a callback on the stream. 1.31.1 on an H200, a YOLO: 4 KiB for each launch; a session that ended with such
    memory ended the process, at once if its stream was destroyed before, else where the callback came after the end. So
    some launches are synchronized, and the session ends after one. A graph reads the memory that its capture has kept: a
    session with graphs synchronizes no inference before its end.
    """

    def __init__(
        self,
        loaded: ort.InferenceSession,
        stream: Stream,
        *,
        no_graph_reason: str | None = None,
        captures: bool = False,
    ) -> None:
        self.loaded = loaded
        self.stream = stream
        self._captures, self._launches = captures, 0
        if (retain := getattr(stream, "retain", None)) is not None:
            retain()
        self.no_graph_reason = no_graph_reason
        """Why it cannot be captured; None if it can."""
        self.lock = threading.Lock()
        self._options, self._sync_options = ort.RunOptions(), ort.RunOptions()
        self._options.add_run_config_entry(_NO_SYNC_OPTION, "1")
        for options in (self._options, self._sync_options):
            options.add_run_config_entry(_GRAPH_ID_OPTION, _NO_GRAPH)
        self._inner = getattr(getattr(loaded, "_sess", None), "run_with_iobinding", None)

    def drop(self, feeds: Callable[[], Tensors]) -> None:
        """End the session after a synchronized inference of `feeds()`, then its use of the stream.

        Contexts, graphs and bindings are closed before. Never raises.
        """
        if self._launches:
            try:
                self.loaded.run(None, dict(feeds()), self._sync_options)
            except Exception as error:  # of a lost device, a full one, or feeds that the graph does not take
                log.debug("the last inference of a session failed: %s", session.error_summary(error))
        del self.loaded, self._inner
        if (release := getattr(self.stream, "release", None)) is not None:
            release()

    def prebind(self, binding: Any, *, waits: bool = False) -> Callable[[], None]:
        """A callable that runs one inference and, with `waits`, synchronizes; raises ONNX Runtime's exceptions.

        Calls beneath the Python method if possible: options without `gpu_graph_id` cost 55 of its 57 us, the wrapper 1 us
        (ONNX Runtime 1.31.1). `waits` implies an exclusive stream, so it takes no lock.
        """
        run, bound = self._inner, getattr(binding, "_iobinding", None)
        if run is None or bound is None:  # private attributes of ONNX Runtime
            run, bound = self.loaded.run_with_iobinding, binding
        if waits and not self._captures:
            return partial(run, bound, self._sync_options)
        options, clean, lock = self._options, self._options if self._captures else self._sync_options, self.lock

        def launch() -> None:
            with lock:
                self._launches += 1
                run(bound, options if self._launches % _CLEAN_UP_EVERY else clean)

        def launch_and_wait() -> None:
            launch()
            self.stream.synchronize()

        return launch_and_wait if waits else launch


class OnnxRuntimeMultiStreamSession(OnnxRuntimeGpuSession):
    """A GPU session with contexts over device memory and their streams, besides `run` and bound calls.

    A context runs on any stream of the device: directly on one from `stream()`, between two events on others.
    """

    runs_on_own_streams = True

    def __init__(
        self,
        first: StreamSession,
        signature: Signature,
        profiles: tuple[Profile, ...],
        runtime_info: dict[str, str],
        device: Device,
        open_session: Callable[[Stream], StreamSession],
        create_host_session: Callable[[], ort.InferenceSession],
        create_graph_session: Callable[[], ort.InferenceSession],
        *,
        device_spec: tuple[str, int],
    ) -> None:
        super().__init__(
            first.loaded, signature, profiles=profiles, runtime_info=runtime_info, device=device.name,
            create_graph_session=create_graph_session,
        )  # fmt: skip
        self.device.close()
        self.device = device
        self.device_spec = device_spec
        self._open_session, self._create_host_session = open_session, create_host_session
        self._stream_sessions: list[StreamSession] = [first]
        self._first_stream_taken = False
        self._host_session: ort.InferenceSession | None = None
        self._sessions_lock = threading.Lock()
        self._first_stream: Stream | None = first.stream

    def stream(self) -> Stream:
        """A stream on which contexts run directly; the caller closes it before the session."""
        with self._sessions_lock:
            self._require_open()
            if self._stream_sessions and not self._first_stream_taken:
                self._first_stream_taken = True
                self._first_stream = None  # the caller's to close
                return self._stream_sessions[0].stream
            stream = self.device.stream()
            try:
                self._stream_sessions.append(self._open_session(stream))
            except BaseException:
                stream.close()
                raise
            self._first_stream_taken = True
            return stream

    def session_for_stream(self, stream: Stream) -> StreamSession:
        """The session on that stream; the first session for other streams."""
        with self._sessions_lock:
            found = next((item for item in self._stream_sessions if item.stream is stream), None)
            if found is None:
                if not self._stream_sessions:  # `run` was called first
                    self._first_stream = self.device.stream()
                    self._stream_sessions.append(self._open_session(self._first_stream))
                found = self._stream_sessions[0]
            return found

    def create_context(self, profile: int = 0) -> OnnxRuntimeStreamContext:
        self._require_open()
        return self._register(OnnxRuntimeStreamContext(self, profile_at(self._profiles, profile), profile))

    def run(self, feeds: Tensors) -> dict[str, Any]:
        self._ensure_host_session()
        return super().run(feeds)

    def bind_resident(self, feeds: Tensors, *, graph: bool = False) -> ResidentInference:
        self._ensure_host_session()
        return super().bind_resident(feeds, graph=graph)

    def close(self) -> None:
        if not self._open:
            self._drop_sessions()  # before the stream under them
            if self._first_stream is not None:
                self._first_stream.close()
                self._first_stream = None
        super().close()

    def _drop_sessions(self) -> None:
        self._run = self._run_ort_values  # `plain_run` holds the session; this raises when closed
        self._host_session = self._loaded = None
        while self._stream_sessions:
            self._stream_sessions.pop().drop(self._smallest_feeds)

    def _smallest_feeds(self) -> dict[str, Any]:
        """Ones, in the smallest shapes of the first profile: divisors and indices that most graphs take."""
        ranges = self._profiles[0].ranges if self._profiles else {}
        return {
            spec.name: np.ones(
                ranges[spec.name].min if spec.name in ranges else [max(size, 1) for size in spec.shape],
                np.dtype(spec.dtype),
            )
            for spec in self.signature.inputs
        }

    def _ensure_host_session(self) -> None:
        """Create the session for `run` and bound calls, on ONNX Runtime's own streams."""
        with self._sessions_lock:
            if self._host_session is not None or self._loaded is None:
                return
            if not self._first_stream_taken and not self._open and self._first_stream is not None:
                self._drop_sessions()  # free its weights before loading the other's
                self._first_stream.close()
                self._first_stream = None
            self._loaded = self._host_session = self._create_host_session()
            if all(is_numpy_dtype(spec.dtype) for spec in self.signature):
                self._run = bind_run(self._host_session)
            else:
                self._run = self._run_ort_values


class OnnxRuntimeStreamContext(OnnxRuntimeContext):
    """One inference in flight over device buffers."""

    can_prebind = True
    _owner: OnnxRuntimeMultiStreamSession

    def __init__(self, owner: OnnxRuntimeMultiStreamSession, profile: Profile | None, index: int) -> None:
        super().__init__(owner, None, profile, index)
        self._stream_session: StreamSession | None = None
        self._binding: Any = None
        self._launch_call: Callable[[], None] = _raise_no_stream
        self._bound_buffers: list[Buffer] = []
        self._tensor_shapes: dict[str, Shape] = {}
        self._bound_tensors: dict[str, tuple[int, Shape]] = {}
        self._pending_binds: list[tuple[str, int, Shape]] = []
        self._dynamic_names: list[str] = []
        self._output_order: list[str] = []
        self._is_bound = False
        self._has_run = False
        self._bindings: dict[tuple[int, ...], Any] = {}
        self._bindings_session: StreamSession | None = None
        self._element_types = {
            spec.name: np.dtype(spec.dtype).type if is_numpy_dtype(spec.dtype) else dtype(spec.dtype).onnx
            for spec in self._signature
        }
        self._input_names = frozenset(spec.name for spec in self._signature.inputs)
        self._ort_device = ort.OrtDevice.make(*owner.device_spec)._get_c_device()

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        self._is_bound = self._has_run = False
        self._bindings = {}
        outputs = super().prepare(inputs)
        self._tensor_shapes = dict(self._inputs or {}) | {
            name: shape for name, shape in self._outputs.items() if -1 not in shape
        }
        self._bound_buffers = []
        self._dynamic_names = [name for name, shape in outputs.items() if -1 in shape]
        return outputs

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        wanted = self._check_buffers(buffers)
        self._is_bound = False
        pending = []
        for name, shape in wanted.items():
            buffer = buffers[name]
            if getattr(buffer, "device", None) is not self._owner.device or getattr(buffer, "on_host", False):
                raise UsageError(
                    f"the buffer of `{name}` is not on `{self._owner.device.name}`", hint="`session.device.allocate`"
                )
            known = (buffer.pointer, shape)
            if self._bound_tensors.get(name) != known:
                kind = next(spec.dtype for spec in self._signature if spec.name == name)
                check_buffer_size(name, buffer, dtype(kind).nbytes(shape))
                pending.append((name, *known))
        self._pending_binds = pending
        self._bound_buffers = list(buffers.values())
        self._is_bound = True

    def enqueue(self, stream: Stream) -> None:
        if self._closed or not self._is_bound:
            self._check_open()
            raise UsageError("an inference was enqueued before `prepare` and `bind`", hint="call them first")
        for buffer in self._bound_buffers:
            _ = buffer.pointer  # refuses a closed one: ONNX Runtime holds bare addresses
        home = self._stream_session
        if home is None or (home.stream is not stream and self._owner.session_for_stream(stream) is not home):
            home = self._switch_stream(stream)
        if getattr(stream, "capturing", False):
            if refused := self._capture_refusal(home, stream):
                raise UsageError(refused, hint="leave `graphs` out: inference goes on without")
            if (retain := getattr(stream, "retain_for_graph", None)) is not None:
                retain(*self._bound_buffers)  # the graph refuses to be replayed without them
        if self._pending_binds:
            self._rebind()
        for name in self._dynamic_names:  # else ONNX Runtime reuses the last output of another shape
            self._binding.bind_output(name, "cpu")
            self._record_output_order(name)
        if home.stream is stream:
            self._launch(captured=getattr(stream, "capturing", False))
            return
        home.stream.wait(stream.record())
        self._launch()
        stream.wait(home.stream.record())

    def prebind(self, addresses: tuple[int, ...], stream: Stream, *, waits: bool = False) -> Callable[[], None]:
        """A callable that runs one inference with these device addresses, inputs before outputs, of the prepared shapes.

        For repeated requests: validation is skipped and bindings are cached.
        """
        self._check_open()
        home = self._owner.session_for_stream(stream)
        if self._inputs is None or self._dynamic_names or home.stream is not stream:
            raise UsageError(
                "an inference was launched on bare addresses before its shapes were known, or on a stream from elsewhere",
                hint="`prepare`, then `bind` and `enqueue`",
            )
        if home is not self._bindings_session:
            self._bindings, self._bindings_session = {}, home
        binding = self._bindings.get(addresses)
        if binding is None:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings = {}
            binding = home.loaded.io_binding()
            for spec, address in zip(self._signature, addresses, strict=True):
                self._bind_tensor(binding, spec.name, address, self._tensor_shapes[spec.name])
            self._bindings[addresses] = binding
        return home.prebind(binding, waits=waits)

    def translate_error(self, error: BaseException) -> TrtEngineError | None:
        return (
            session.translate_run_error(error, self._owner.device.name) if isinstance(error, session.ERRORS) else None
        )

    def outputs(self) -> dict[str, Any]:
        self._check_open()
        if not self._dynamic_names:
            return {}
        if not self._has_run:
            raise UsageError("the outputs are not there yet", hint="synchronize the stream first")
        self._has_run = False
        values = dict(zip(self._output_order, self._binding.get_outputs(), strict=True))
        return {
            spec.name: to_numpy(spec, values[spec.name])
            for spec in self._signature.outputs
            if spec.name in self._dynamic_names
        }

    def close(self) -> None:
        super().close()
        self._binding = self._stream_session = self._bindings_session = None
        self._launch_call = _raise_no_stream
        self._bindings = {}
        self._bound_buffers, self._bound_tensors, self._is_bound = [], {}, False

    def _launch(self, *, captured: bool = False) -> None:
        try:
            self._launch_call()
        except session.ERRORS as error:
            raise session.translate_run_error(error, self._owner.device.name, captured=captured) from error
        self._has_run = True

    def _switch_stream(self, stream: Stream) -> StreamSession:
        """Switch to the session of another stream and rebind there."""
        home = self._stream_session = self._owner.session_for_stream(stream)
        self._binding = home.loaded.io_binding()
        self._launch_call = home.prebind(self._binding)
        self._output_order = []
        known = self._bound_tensors | {name: (pointer, shape) for name, pointer, shape in self._pending_binds}
        self._pending_binds = [(name, *known[name]) for name in self._tensor_shapes]
        return home

    def _rebind(self) -> None:
        """Bind addresses that changed."""
        for name, pointer, shape in self._pending_binds:
            self._bind_tensor(self._binding, name, pointer, shape)
            self._bound_tensors[name] = (pointer, shape)
            if name not in self._input_names:
                self._record_output_order(name)
        self._pending_binds = []

    def _bind_tensor(self, binding: Any, name: str, pointer: int, shape: Shape) -> None:
        fed, kind = name in self._input_names, self._element_types[name]
        inner = getattr(binding, "_iobinding", None)  # beneath the Python methods, which take some microseconds
        if inner is not None:
            (inner.bind_input if fed else inner.bind_output)(name, self._ort_device, kind, list(shape), pointer)
        else:
            bind = binding.bind_input if fed else binding.bind_output
            bind(name, *self._owner.device_spec, kind, list(shape), pointer)

    def _record_output_order(self, name: str) -> None:
        """ONNX Runtime returns outputs in the order of their first binding."""
        if name not in self._output_order:
            self._output_order.append(name)

    def _capture_refusal(self, home: StreamSession, stream: Stream) -> str | None:
        if home.stream is not stream:
            return "ONNX Runtime launches on the stream its session was made with, and that is not the one captured"
        return home.no_graph_reason


def _raise_no_stream() -> None:
    raise UsageError("an inference was launched before its context had a stream", hint="`enqueue` it there")


def cpu_operators(loaded: ort.InferenceSession) -> list[str]:
    """Operator types that run on the CPU, sorted."""
    return sorted(
        {
            node.op_type
            for part in loaded.get_provider_graph_assignment_info()
            if part.ep_name == "CPUExecutionProvider"
            for node in part.get_nodes()
        }
    )

"""An inference request as both protocols carry it, and the steps that they share: its admission, bodies that expand."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trt_engine.errors import FeedError, Overloaded, TrtEngineError, UnknownModel, UsageError
from trt_engine.open_inference.wire_tensors import check_nbytes, decode_tensor
from trt_engine.tensors import Shape, suggest
from trt_engine.verbs.serve.repository import Repository
from trt_engine.verbs.serve.served_model import Mailbox, ServedVersion
from trt_engine.verbs.serve.shared_memory import CudaMemory, SharedMemory
from trt_engine.verbs.serve.statistics import Timing

if TYPE_CHECKING:
    from trt_engine.verbs.serve.tracing import Tracing

Parameters = Mapping[str, Any]
RequestHeaders = Iterable[tuple[Any, Any]]
"""Names and values, as bytes (HTTP) or text (gRPC's metadata)."""
_NONE: dict[str, Any] = {}
_LARGE_REGIONS = 1 << 20
"""Inputs in shared memory of more bytes are read in another thread."""


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A part of a shared memory region that a tensor is in."""

    name: str
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class RegionInput:
    """An input in a region that is to be read."""

    name: str
    datatype: str
    dtype: str
    shape: Shape
    part: RegionPart


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output to return: in which form, or into which region."""

    name: str
    binary: bool = True
    region: RegionPart | None = None
    classes: int = 0
    """The largest values wanted, as text with their index and label; 0: the tensor."""


@dataclass(frozen=True, slots=True)
class BinaryHead:
    """The JSON of a request whose tensors all follow it, decoded and checked: another request may have the same bytes."""

    id: str
    priority: int
    timeout_us: int
    inputs: tuple[tuple[str, str, Shape, int], ...]
    """Name, datatype, the engine's shape and size in bytes, in the order of the tensors."""
    outputs: tuple[RequestedOutput, ...]
    documents: dict[tuple[Shape, ...], bytes] = field(default_factory=dict)
    """The JSON of the response by the outputs' shapes."""


@dataclass(slots=True)
class InferRequest:
    """A decoded request."""

    id: str = ""
    feeds: dict[str, Any] = field(default_factory=dict)
    """numpy arrays, or arrays on the engine's GPU."""
    outputs: tuple[RequestedOutput, ...] = ()
    priority: int = 0
    timeout_us: int = 0
    head: BinaryHead | None = None


@dataclass(slots=True)
class Service:
    """What the servers of both protocols share."""

    repository: Repository
    memory: SharedMemory
    cuda_memory: CudaMemory
    admission: Admission
    mailbox: Mailbox
    explicit: bool
    """Whether clients may load and unload models, where `open_control` is true too."""
    strict: bool
    """Whether every requested model must be ready for the server to be."""
    max_request: int = sys.maxsize
    """Bytes that the inputs of a request in shared memory may have."""
    open_control: bool = False
    """Whether the clients that may send requests may load and unload models as well."""
    tracing: Tracing | None = None
    """Where spans of requests go; None: nowhere."""

    def not_ready(self) -> dict[str, str]:
        """Why the server is not ready, by model; empty where it is."""
        if self.admission.draining:
            return {"server": "the server is shutting down"}
        if not self.admission.started:
            return {"server": "models are being loaded"}
        return self.repository.all_not_ready() if self.strict else {}

    def extensions(self) -> list[str]:
        """The protocol extensions that work here."""
        found = ["binary_tensor_data", "model_configuration", "model_repository", "schedule_policy", "statistics"]
        if self.explicit and self.open_control:
            found.append("model_repository(unload_dependents)")
        if self.memory.enabled:
            found.append("system_shared_memory")
        return sorted([*found, *(["cuda_shared_memory"] if self._has_gpu() else [])])

    def _has_gpu(self) -> bool:
        """Whether CUDA shared memory is enabled and a loaded engine runs on a GPU."""
        return self.cuda_memory.enabled and any(
            served.device is not None and not served.device.name.startswith("cpu")
            for model in self.repository.models.values()
            for served in model.versions.values()
        )

    def regions(self, kind: str) -> CudaMemory | SharedMemory:
        """The regions of `system` or `cuda` memory; without a GPU there are none of CUDA, as a server with one says too."""
        return self.memory if kind == "system" else self.cuda_memory

    def check_new_region(self, kind: str, name: str) -> None:
        """`UnknownModel` where there can be no such region, `UsageError` for a name that one of the other kind has."""
        if kind == "cuda" and not self._has_gpu():
            raise UnknownModel(
                "there is no CUDA shared memory here: no loaded model runs on a GPU, or it is not enabled",
                hint="`--device cuda:0`, and `--token-file FILE` or `--shared-memory-prefix /app_` of `trt-engine serve`",
            )
        if name in self.cuda_memory or name in self.memory:
            raise UsageError(f"the region `{name[:80]}` is registered already", hint="unregister it first")

    def check_region(
        self, served: ServedVersion, name: str, datatype: str, shape: Shape, part: RegionPart
    ) -> RegionInput:
        """The input `name` in a region, checked and not read yet; the shape is one that the engine takes."""
        if datatype != "BYTES":
            check_nbytes(name, datatype, shape, part.size)
        memory: CudaMemory | SharedMemory = self.cuda_memory if part.name in self.cuda_memory else self.memory
        memory.check(part.name, part.offset, part.size)
        return RegionInput(name, datatype, served.inputs[name][0].dtype, shape, part)

    async def read_regions(self, served: ServedVersion, request: InferRequest) -> int:
        """Put arrays in place of the inputs in regions: on the GPU where the engine can read them there, else copies.

        The bytes that are copied, which count until they are given back: `Overloaded` where it is full.
        """
        copied = []
        for item in [item for item in request.feeds.values() if isinstance(item, RegionInput)]:
            part = item.part
            if part.name in self.cuda_memory and item.datatype != "BYTES":
                array = self.cuda_memory.array(part.name, part.offset, part.size, item.dtype, item.shape, served.device)
                if array is not None:
                    request.feeds[item.name] = array
                    continue
            copied.append(item)
        nbytes = sum(item.part.size for item in copied)
        if nbytes > self.max_request:
            raise UsageError(
                f"the inputs in shared memory have {nbytes} bytes, {self.max_request} are allowed",
                hint="`--max-request`",
            )
        if not nbytes:
            return 0
        self.take(nbytes)
        try:
            if nbytes > _LARGE_REGIONS:
                request.feeds.update(await asyncio.to_thread(self._copy_regions, copied))
            else:
                request.feeds.update(self._copy_regions(copied))
        except BaseException:
            self.admission.forget(nbytes)
            raise
        return nbytes

    def take(self, nbytes: int) -> None:
        """Count bytes that a request takes beside its own; `Overloaded` where they do not fit, unless it is the only one."""
        if self.admission.requests <= 1:
            self.admission.hold(nbytes)
        elif not self.admission.receive(nbytes):
            raise Overloaded(
                "the server has no room for the request", hint="retry later; `--max-in-flight-size` sets the limit"
            )

    def _copy_regions(self, wanted: list[RegionInput]) -> dict[str, Any]:
        found = {}
        for item in wanted:
            memory: CudaMemory | SharedMemory = self.cuda_memory if item.part.name in self.cuda_memory else self.memory
            data = memory.read(item.part.name, item.part.offset, item.part.size)
            found[item.name] = decode_tensor(item.name, item.datatype, item.shape, data)
        return found

    def write_region(self, part: RegionPart, data: memoryview | bytes) -> None:
        """Write an output into its region."""
        memory = self.cuda_memory if part.name in self.cuda_memory else self.memory
        memory.write(part.name, part.offset, part.size, data)

    def check_control(self, parameters: Parameters, *, known: str = "unload_dependents") -> str:
        """The value of the parameter `known`; `UsageError` unless clients may load and unload, with these parameters."""
        if not self.explicit:
            raise UsageError(
                "clients may not load or unload models here", hint="start it with `--model-control-mode explicit`"
            )
        if not self.open_control:
            raise UsageError(
                "clients without a token may not load or unload models here",
                hint="start it with `--token-file FILE`, or `--control-without-token`",
            )
        if unknown := sorted({*parameters} - {known}):
            raise UsageError(f"the parameter `{unknown[0][:80]}` is not supported", hint="files on the server decide")
        value = parameters.get(known) or ""
        if known == "config" and not isinstance(value, str):
            raise UsageError("the parameter `config` is not text", hint="the configuration as JSON, in a string")
        return str(value)

    async def load(self, name: str, config: str) -> None:
        """Load or renew a model for a client; errors begin in the words of Triton."""
        try:
            await self.repository.load(name, config)
        except TrtEngineError as error:
            raise type(error)(f"failed to load `{name[:80]}`: {error.message}", hint=error.hint) from error

    @contextlib.contextmanager
    def inference(self, model: str, version: str, headers: RequestHeaders) -> Iterator[tuple[ServedVersion, Timing]]:
        """The version that answers a request, held until its end, which the statistics and a span have."""
        timing = Timing(time.perf_counter_ns())
        served = self.repository.acquire(model, version)
        error: BaseException | None = None
        try:
            yield served, timing
            served.statistics.count_success(timing)
        except BaseException as failure:
            error = failure
            served.statistics.count_failure(failure, timing.arrived_ns)
            raise
        finally:
            if self.tracing is not None:
                self.tracing.record(served, timing, headers, error)
            served.leave()

    async def run(
        self, served: ServedVersion, request: InferRequest, timing: Timing, copies: int = 1
    ) -> tuple[dict[str, Any], int]:
        """The outputs of a request, within its deadline, and the bytes that count for its answer: the caller forgets them.

        They count before they are there, `copies` times: the outputs, and other forms of them."""
        room = 0 if served.small_answers else copies * served.answer_nbytes(request.feeds)
        if room:
            self.take(room)
        held = 0
        try:
            held = await self.read_regions(served, request)
            outputs = await served.infer(
                request.feeds, self.mailbox, timing, level=request.priority, timeout_us=request.timeout_us
            )
        except BaseException:
            self.admission.forget(room)
            raise
        finally:
            self.admission.forget(held)
        if not served.small_answers:
            served.note_answer(request.feeds, outputs)
        request.feeds = {}  # not kept while the outputs are encoded
        return outputs, room

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Statistics of the versions that are loaded; `UnknownModel` for a name that is not there."""
        rows = []
        if name:
            self.repository.not_ready(name, version)  # it is known
        for model in self.repository.models.values():
            for number, served in sorted(model.versions.items(), key=lambda item: int(item[0])):
                if name in ("", model.name) and version in ("", number):
                    rows.append({"name": model.name, "version": number} | served.statistics.as_dict())
        return rows


def take_options(request: InferRequest, parameters: Parameters) -> None:
    """Read the request's own parameters: priority, timeout; a sequence is refused."""
    if not parameters:
        return
    request.priority = integer(parameters, "priority")
    request.timeout_us = integer(parameters, "timeout")
    if parameters.get("sequence_id") not in (None, 0, ""):
        raise UsageError("sequences of requests are not supported", hint="leave out `sequence_id`")


def integer(parameters: Parameters, name: str) -> int:
    """A parameter that is a whole number from 0 to 2^63 - 1; 0 where it is not given."""
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise UsageError(f"the parameter `{name}` is {value!r:.40}, expected a whole number of 0 or more, below 2^63")
    return value


def region_of(parameters: Parameters) -> RegionPart | None:
    """The shared memory that a tensor's parameters name."""
    name = parameters.get("shared_memory_region")
    if name is None:
        return None
    if not isinstance(name, str):
        raise UsageError(f"the parameter `shared_memory_region` is {name!r:.80}, expected a name")
    return RegionPart(name, integer(parameters, "shared_memory_byte_size"), integer(parameters, "shared_memory_offset"))


def check_input(served: ServedVersion, name: str, datatype: str, shape: Shape, known: Mapping[str, Any]) -> Shape:
    """The shape that the engine takes it in, where the configuration has a `reshape` another one than the client's.

    `FeedError` for an input that is not one, comes twice, or has another datatype or a shape that no profile takes.
    """
    expected = served.inputs.get(name)
    if expected is None:
        raise FeedError(f"unknown input `{name[:80]}`", hint=suggest(name[:80], [*served.inputs]))
    if name in known:
        raise FeedError(f"input `{name}` comes twice", hint="each input once")
    if datatype != expected[1]:
        raise FeedError(f"input `{name}` is {datatype[:20]}, expected {expected[1]}", hint=str(expected[0]))
    shape = served.settings.engine_shape(name, shape)
    served.check_shape(name, shape)
    return shape


def requested_output(served: ServedVersion, name: str, parameters: Parameters | None, binary: bool) -> RequestedOutput:
    """An output with its form; `UsageError` for one that is not there, or has no classes."""
    parameters = parameters or _NONE
    if name not in served.outputs:
        raise UsageError(f"unknown output `{name[:80]}`", hint=suggest(name[:80], [*served.outputs]))
    wanted = parameters.get("binary_data", binary)
    if not isinstance(wanted, bool):
        raise UsageError(f"the parameter `binary_data` is {wanted!r:.80}, expected true or false")
    made = RequestedOutput(name, wanted, region_of(parameters), integer(parameters, "classification"))
    if made.classes and (served.outputs[name] in ("BYTES", "BOOL", "FP16", "BF16") or made.region is not None):
        raise UsageError(
            f"`classification` of output `{name}`: {served.outputs[name]}{' in shared memory' if made.region else ''}",
            hint="an output of numbers up to 64 bits, not in shared memory; or leave out `classification`",
        )
    return made


def distinct(outputs: Iterable[RequestedOutput]) -> tuple[RequestedOutput, ...]:
    """The outputs, each once."""
    return tuple({output.name: output for output in outputs}.values())


def presented(served: ServedVersion, output: RequestedOutput, array: Any) -> tuple[Any, str]:
    """An output as it was requested, and its datatype: in the shape of the configuration, or its largest values as text."""
    if output.classes:
        return served.classify(output.name, array, output.classes), "BYTES"
    return served.client_array(output.name, array), served.outputs[output.name]


_QUIET_S, _MAX_QUIET_S = 0.1, 1.0
"""At the end: time without a new request after which the ports are closed, and the longest wait for it."""


class Admission:
    """Counts requests and their bytes. Belongs to the event loop."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests, self.max_bytes = max_requests, max_bytes
        self.requests = self.nbytes = self.refused = 0
        self.overdue = 0
        """Bytes of answers that clients of gRPC did not read in time, and that can not be dropped."""
        self._peak = 0
        self.started = False
        """Whether the models of the start are loaded."""
        self.draining = False
        """Whether the server is ending: not ready, connections are closed after their answer."""
        self.closed = False
        """Whether new requests are refused."""
        self.shut = asyncio.Event()
        """Set when the ports are closed: requests that come while the server ends are refused then (`wait_for_end`)."""
        self._holding, self._late_s = False, 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    def receive(self, nbytes: int, held: int = 0) -> bool:
        """Count bytes of a request that is coming in; False, and refused, where they do not fit.

        There is always room for a request whose `held` bytes are all that count.
        """
        if self.nbytes > held and self.nbytes + nbytes > self.max_bytes:
            self.refused += 1
            return False
        self.hold(nbytes)
        return True

    def hold(self, nbytes: int) -> None:
        """Count bytes whatever the limit is, as of an answer that its client has not read yet."""
        self.nbytes += nbytes
        if self.nbytes > self._peak:
            self._peak = self.nbytes

    def take_peak(self) -> int:
        """The most bytes at once since the last call."""
        found, self._peak = self._peak, self.nbytes
        return found

    def forget(self, nbytes: int) -> None:
        """Bytes that were counted and are not here any more."""
        self.nbytes -= nbytes

    def check_overdue(self) -> None:
        """`Overloaded` where answers that their clients do not read take `max_bytes`."""
        if self.overdue > self.max_bytes:
            self.refused += 1
            raise Overloaded(
                f"clients have not read {self.overdue} bytes of their answers",
                hint="read them or close the connection; `--max-in-flight-size` sets the limit",
            )

    def enter(self, nbytes: int = 0, *, begun: bool = False) -> None:
        """Count a whole request in; `Overloaded` where the server is full, or ending and the request had not `begun`."""
        ending = self.closed and not begun
        if ending or self.requests >= self._max_requests or (self.requests and self.nbytes + nbytes > self.max_bytes):
            self.refused += 1
            raise Overloaded(
                "the server is shutting down" if ending else f"the server has {self.requests} requests already",
                hint="retry later"
                if ending
                else "retry later; `--max-in-flight` and `--max-in-flight-size` set the limits",
            )
        self.requests += 1
        self.hold(nbytes)
        self._idle.clear()

    def leave(self, nbytes: int = 0) -> None:
        self.requests -= 1
        self.nbytes -= nbytes
        if not self.requests:
            self._idle.set()

    async def wait_for_end(self) -> None:
        """For a request that the ending server refuses: back at once, but from `quiet` on when the ports are closed.

        A client that is refused asks again at once, and a request that reaches a port as it is closed has no answer.
        """
        if self._holding:
            self._late_s = asyncio.get_running_loop().time()
            await self.shut.wait()

    async def quiet(self) -> None:
        """Back when no new request has come for a moment: all clients wait for an answer."""
        loop, self._holding = asyncio.get_running_loop(), True
        give_up_s = loop.time() + _MAX_QUIET_S
        self._late_s = max(self._late_s, loop.time() - _QUIET_S / 2)
        while (now_s := loop.time()) < min(self._late_s + _QUIET_S, give_up_s):
            await asyncio.sleep(min(self._late_s + _QUIET_S, give_up_s) - now_s)

    async def idle(self, timeout_s: float) -> bool:
        """Whether no request is left, after waiting for it that long."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


_STEP = 1 << 22
"""Bytes between two looks at the limits."""
_SMALL = 1 << 16
_GROWTH, _WEIGHT = 16, 8
_REFUSED = re.compile(rb"\s*q\s*=\s*0(\.0*)?\s*")
_LEVEL = 1
"""zlib's fastest: an answer waits for it."""
_FULL = "the server has no room for the request"


class RequestTooLarge(UsageError):
    """A request that is larger without its encoding than the server takes."""

    http_status = 413


def find_encoding(raw: bytes) -> bytes:
    """`gzip` or `deflate` of a gRPC message that is compressed, else nothing: no message of a protocol begins so."""
    if raw[:2] == b"\x1f\x8b":
        return b"gzip"
    return b"deflate" if raw[:1] == b"\x78" and int.from_bytes(raw[:2], "big") % 31 == 0 else b""


def accepted_encoding(value: bytes) -> bytes:
    """The first of `gzip` and `deflate` in an `Accept-Encoding`; nothing where it has neither."""
    for item in value.lower().split(b","):
        name, _, weight = item.partition(b";")
        if name.strip() in (b"gzip", b"deflate") and not _REFUSED.fullmatch(weight):
            return name.strip()
    return b""


def compress(encoding: bytes, parts: Iterable[Any]) -> bytes:
    """The parts of an answer as one `gzip` or `deflate` stream."""
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _window(encoding))
    return b"".join([*map(deflater.compress, parts), deflater.flush()])


def peek(encoding: bytes, body: bytes | memoryview, nbytes: int) -> bytes:
    """The first bytes of the body without its encoding; fewer, or none, of a damaged one."""
    try:
        return _inflater(encoding).decompress(body[:nbytes], nbytes)
    except zlib.error:
        return b""


def count_bytes(nbytes: int, sent: int) -> int:
    """What a body of `nbytes` counts that came as `sent`: one that grows as no data does pays for its answer as well.

    Bytes beyond 4 MiB and 16 times what was sent count eight times: a crowd of small requests, whose answers may be
    as large, stays well below `--max-in-flight-size`.
    """
    return nbytes + (_WEIGHT - 1) * max(0, nbytes - max(_GROWTH * sent, _STEP))


async def decompress(
    encoding: bytes, body: bytes | memoryview, most: int, admission: Admission, held: int = 0
) -> tuple[bytearray, int]:
    """The body without its encoding, and how many bytes count for it (`count_bytes`): the caller forgets them.

    `held` are the bytes of this request that count already. Raises an error, with nothing counted, for a body that is
    damaged, has more than `most` bytes, or more than the server has room for.
    """
    inflater, found, counted = _inflater(encoding), bytearray(), 0
    try:
        while not inflater.eof:
            step = min(_STEP if found else _SMALL, most + 1 - len(found))
            rest = inflater.unconsumed_tail if found else body
            if found:
                piece = await asyncio.to_thread(inflater.decompress, rest, step)
            else:
                piece = inflater.decompress(rest, step)
            if len(found) + len(piece) > most:
                raise RequestTooLarge(f"the request has more than {most} bytes without its encoding")
            if not piece and not inflater.eof:
                break
            more = count_bytes(len(found) + len(piece), len(body)) - counted
            if not admission.receive(more, held + counted):
                raise Overloaded(_FULL, hint="retry later; `--max-in-flight-size` sets the limit")
            counted += more
            found += piece
        if not inflater.eof or inflater.unused_data:
            raise UsageError(f"the body is not one whole {encoding.decode()} stream")
    except zlib.error as error:
        admission.forget(counted)
        raise UsageError(f"the body is not valid {encoding.decode()}: {error}") from None
    except BaseException:
        admission.forget(counted)
        raise
    return found, counted


def _inflater(encoding: bytes) -> zlib._Decompress:
    return zlib.decompressobj(_window(encoding))


def _window(encoding: bytes) -> int:
    return 31 if encoding == b"gzip" else 15

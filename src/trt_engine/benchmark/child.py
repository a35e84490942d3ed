"""A measurement in a process of its own: out of memory, a crash or a hang there is an error here.

The child gets one request on its stdin and answers on a pipe of its own, one JSON message a line. What libraries print goes
to a file that is shown with `-v` only. The child never outlives its parent: the kernel ends it with the parent's thread, and
its stdin, which ends with the parent, is watched as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from trt_engine import errors
from trt_engine.backend import backend
from trt_engine.benchmark.loop import Progress, measure
from trt_engine.benchmark.protocols import RULES
from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, Interrupted, MemoryExhausted, TrtEngineError
from trt_engine.processes import Mouth, Stop, die_with_parent, read_line, reap, spawned
from trt_engine.records import BenchRecord

__all__ = ["measure_in_child", "memory_available"]

log = logging.getLogger("trt_engine.benchmark.child")  # in the child this module is `__main__`

_ANSWER_S = 30.0
"""How long a child that was asked to stop may take to tell what it has: the query under way ends first."""
_GRACE_S = 15.0
"""How long one that has answered may take to end."""
_MARGIN = 256 << 20
"""Memory left to the rest of the machine when nobody named a limit."""
_MEMORY_WORDS = ("bad_alloc", "failed to allocate", "out of memory", "cannot allocate memory", "can't start new thread")


class Request(msgspec.Struct):
    """What the child is asked to do."""

    engine: str
    config: BenchConfig
    runtime: RuntimeConfig
    memory_limit: int | None
    log_level: int


class Said(msgspec.Struct, tag="log"):
    """A log line of the child."""

    name: str
    level: int
    text: str


class Going(msgspec.Struct, tag="progress"):
    """How far the measurement is."""

    done_s: float
    planned_s: float


class Done(msgspec.Struct, tag="record"):
    """The answer."""

    record: BenchRecord


class Failed(msgspec.Struct, tag="error"):
    """The error it ended in: a class of `errors`, its message and hint."""

    kind: str
    message: str
    hint: str | None


Message = Said | Going | Done | Failed


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _back(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else value


_answers = msgspec.json.Decoder(Message)
_requests = msgspec.json.Decoder(Request, dec_hook=_back)


# ------------------------------------------------------------------------------------------------ the parent's side


def measure_in_child(
    engine: Engine | Path,
    config: BenchConfig,
    runtime: RuntimeConfig,
    *,
    memory_limit: int | None = None,
    timeout_s: float | None = None,
    on_progress: Progress | None = None,
) -> BenchRecord:
    """Load and measure an engine in a child process with at most `memory_limit` bytes (default: what is free).

    Raises what the child raised; `MemoryExhausted` when it ran out of memory in whatever way; `EngineError` when it crashed
    (the signal is named), was silent for longer than any query takes, or did not end within `timeout_s`; `Interrupted`,
    whose `partial` is the record of what was measured until then, on Ctrl-C or when somebody stopped the child. The limit
    is not set for CUDA devices, whose drivers reserve addresses by the terabyte.
    """
    found = engine if isinstance(engine, Engine) else Engine.open(engine)
    room = memory_available()
    limit: int | None = None
    if parse_device(runtime.device or found.passport.device)[0] != "cuda":
        limit = room = room if memory_limit is None else memory_limit
    request = Request(
        engine=str(found.path),
        config=config,
        runtime=runtime,
        memory_limit=limit,
        log_level=log.getEffectiveLevel(),
    )
    patience_s = _patience_s(config) if timeout_s is None else timeout_s
    silence = timeout_s is None  # a child that still tells how far it is may take as long as it was asked to
    with tempfile.TemporaryFile() as noise:
        child = _Child(request, noise)
        try:
            answer = child.listen(patience_s, on_progress, silence=silence)
        except KeyboardInterrupt:
            child.ask_to_stop()
            with contextlib.suppress(KeyboardInterrupt, TimeoutError):  # a second Ctrl-C, or no answer: end it now
                last = child.listen(_ANSWER_S, None)
                if isinstance(last, Done) and last.record.queries:
                    raise Interrupted(
                        f"interrupted after {last.record.queries} queries",
                        hint="the same command measures again",
                        partial=last.record,
                    ) from None
            raise Interrupted(
                "interrupted before anything was measured", hint="the same command measures again"
            ) from None
        except TimeoutError:
            raise EngineError(
                f"the measurement of `{found.path}` "
                f"{'was silent for' if silence else 'did not end within'} {patience_s:g} s and was stopped",
                hint="a smaller batch, or a longer `timeout_s`",
            ) from None
        finally:
            child.close()
            printed = _printed(noise)
    match answer:
        case Done(record=record) if record.complete:
            return record
        case Done(record=record):  # somebody stopped the child, not us
            raise Interrupted(
                f"the measurement was stopped after {record.queries} queries",
                hint="the same command measures again",
                partial=record,
            )
        case Failed(kind=kind, message=message, hint=hint):
            raise _raised(kind, message, hint)
    raise _crash(child, found, room, printed)


def _patience_s(config: BenchConfig) -> float:
    """How long no measurement is silent: loading, ten times the planned length, and ten minutes."""
    rules = RULES.get(config.protocol, RULES["trt-engine"])
    warmup_s = rules.warmup_s if config.warmup_s is None else config.warmup_s
    duration_s = rules.duration_s if config.duration_s is None else config.duration_s
    return 600 + 10 * (warmup_s + duration_s) + 10 * config.idle_s


class _Child:
    """The process and the pipe it answers on; ended and reaped by `close`, whatever happened."""

    def __init__(self, request: Request, noise: IO[bytes]) -> None:
        self.code: int | None = None
        self.peak_bytes = 0
        said = msgspec.json.encode(request, enc_hook=_plain)
        self._process, self._pipe = spawned("trt_engine.benchmark.child", said, noise)
        self._whole: deque[bytes] = deque()
        self._parts: list[bytes] = []  # of the line that is not whole yet

    def listen(self, patience_s: float, on_progress: Progress | None, *, silence: bool = False) -> Done | Failed | None:
        """The child's answer, None when it ended without one; `TimeoutError` when neither comes.

        `patience_s` counts from now, with `silence` from the last thing the child said.
        """
        for line in self._lines(patience_s, silence):
            match message := _answers.decode(line):
                case Done() | Failed():
                    return message
                case Said(name=name, level=level, text=text):
                    logging.getLogger(name).log(level, "%s", text)
                case Going(done_s=done_s, planned_s=planned_s) if on_progress is not None:
                    on_progress(done_s, planned_s)
        return None

    def _lines(self, patience_s: float, silence: bool) -> Iterator[bytes]:
        deadline = time.monotonic() + patience_s
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN | select.POLLHUP)
        while True:
            while self._whole:
                yield self._whole.popleft()
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self._pipe, 1 << 20)
            if not chunk:
                return
            if silence:
                deadline = time.monotonic() + patience_s
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                self._whole.append(b"".join([*self._parts, end]))
                self._parts.clear()
            self._parts.append(rest)

    def ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        """Let it end by itself if it is about to, end it otherwise, and reap it."""
        if self.code is not None:
            return
        try:
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()  # the child ends when this does
            ended = reap(self._process, _GRACE_S)
            self.code, self.peak_bytes = ended.code, ended.peak_bytes
        finally:
            os.close(self._pipe)


def _printed(noise: IO[bytes]) -> str:
    """What the child's libraries printed; shown with `-v`."""
    noise.seek(0)
    text = noise.read().decode(errors="replace")
    for line in text.splitlines():
        log.debug("child: %s", line)
    return text


def _raised(kind: str, message: str, hint: str | None) -> TrtEngineError:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, TrtEngineError):
        return found(message, hint=hint)
    return TrtEngineError(f"{kind}: {message}", hint=hint)


def _crash(child: _Child, engine: Engine, room: int, printed: str) -> TrtEngineError:
    """The error behind a child that ended without an answer."""
    code = child.code or 0
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    near = child.peak_bytes > room // 2
    if any(word in printed.lower() for word in _MEMORY_WORDS) or (code == -signal.SIGKILL and near):
        return MemoryExhausted(
            f"the measurement of `{engine.path}` ran out of memory ({name}, {child.peak_bytes >> 20} MiB in use)",
            hint="a smaller batch, or a machine with more memory",
        )
    return EngineError(
        f"the process that measured `{engine.path}` ended by {name}",
        hint="`-v` shows what it printed; `trt-engine doctor` checks the installation",
    )


# ------------------------------------------------------------------------------------------------ memory


def memory_available() -> int:
    """Bytes a new process may take: what the machine, or a control group around us, has free, less a margin."""
    free: int = psutil.virtual_memory().available
    for limit, used in _group_limits():
        free = min(free, limit - used)
    return max(free - max(_MARGIN, free // 20), 0)


def _group_limits() -> Iterator[tuple[int, int]]:
    """Limit and use of this process's memory control groups, outermost last; cache that can be dropped is not use."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
                cache = ("inactive_file", "active_file")
            elif "memory" in kinds.split(","):
                root = Path("/sys/fs/cgroup/memory")
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                cache = ("total_inactive_file", "total_active_file")
            else:
                continue
            folder = root / path.lstrip("/")
            for place in (folder, *folder.parents):
                if not place.is_relative_to(root):
                    break
                with contextlib.suppress(OSError, ValueError):  # `max` is no number: there is no limit here
                    limit = int((place / names[0]).read_text())
                    used = int((place / names[1]).read_text())
                    for row in (place / "memory.stat").read_text().splitlines():
                        name, _, nbytes = row.partition(" ")
                        if name in cache:
                            used -= int(nbytes)
                    yield limit, used


# ------------------------------------------------------------------------------------------------ the child's side


def _limit_memory(nbytes: int) -> None:
    """Let this process take `nbytes` more than it has.

    RLIMIT_DATA counts writable private memory: what a network's tensors are. (RLIMIT_AS would count reserved addresses and
    mapped weights too.) The stacks of threads that are still to be started count before they are used, so they come on top.
    The soft limit only, so that an error can be told after it is lifted again.
    """
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    threads = 2 * len(os.sched_getaffinity(0))
    stacks = threads * (8 << 20 if stack == resource.RLIM_INFINITY else stack)
    taken = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            taken = int(line.split()[1]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = taken + stacks + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _lift_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _work(request: Request, mouth: Mouth, stop: Stop) -> BenchRecord:
    engine = Engine.open(Path(request.engine))
    runtime = backend(engine.passport.backend).half("runtime")()  # imports the library before the limit counts
    if request.memory_limit is not None:
        _limit_memory(request.memory_limit)
    session = runtime.load(engine, request.runtime)
    try:
        stop.measuring = True
        record = measure(
            session,
            engine,
            request.config,
            on_progress=lambda done_s, planned_s: mouth.say(Going(done_s, planned_s)),
            should_stop=lambda: stop.asked,
        )
    finally:  # `measuring` stays: a Ctrl-C from here on must not cost a record that is finished
        session.close()
    _lift_limit()
    return record


def _failure(error: BaseException, request: Request) -> Failed:
    """The message of an error; whatever a library says of memory is `MemoryExhausted`."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    short = any(
        isinstance(one, MemoryError | MemoryExhausted) or any(word in str(one).lower() for word in _MEMORY_WORDS)
        for one in chain
    )
    if short:
        limit = f" within {request.memory_limit >> 20} MiB" if request.memory_limit is not None else ""
        return Failed("MemoryExhausted", f"out of memory{limit} while measuring `{request.engine}`", "a smaller batch")
    if isinstance(error, TrtEngineError):
        return Failed(type(error).__name__, error.message, error.hint)
    if isinstance(error, KeyboardInterrupt):
        return Failed("Interrupted", "interrupted before anything was measured", "the same command measures again")
    return Failed("TrtEngineError", f"unexpected {type(error).__name__}: {error}", "`-v` shows what it printed")


def main() -> None:
    """The child: one request, one answer."""
    stop = Stop()
    mouth = Mouth(int(sys.argv[1]), lambda record: Said(record.name, record.levelno, record.getMessage()))
    request = _requests.decode(read_line())
    die_with_parent()
    package = logging.getLogger("trt_engine")
    package.addHandler(mouth)
    package.setLevel(request.log_level)
    answer: Message
    try:
        answer = Done(_work(request, mouth, stop))
    except BaseException as error:  # everything becomes the one answer
        _lift_limit()
        answer = _failure(error, request)
        if request.log_level <= logging.DEBUG:
            log.debug("in the child: %s", type(error).__name__, exc_info=error)
    mouth.say(answer)


if __name__ == "__main__":
    main()

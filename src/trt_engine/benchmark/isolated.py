"""Measure in a child process: out of memory, a crash or a hang there becomes an error here.

The child reads one request from stdin and writes JSON messages, one per line, to a separate pipe. Library output goes to a
file shown with `-v`. The child cannot outlive its parent: the kernel kills it with the parent's thread, and it watches stdin
for EOF.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import IO

import msgspec

from trt_engine.backend import get_backend
from trt_engine.benchmark.closed_loop import measure
from trt_engine.benchmark.measurement_protocols import PROTOCOL_RULES
from trt_engine.benchmark.query_trace import Progress
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.device.host import available_memory
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, Interrupted, MemoryExhausted, TrtEngineError
from trt_engine.records.bench import BenchRecord
from trt_engine.workers.crash import exit_name, ran_out_of_memory, restore_error
from trt_engine.workers.messages import ErrorMessage, LogMessage, MessagePipe, error_message, receive_request
from trt_engine.workers.process import ChildProcess, ExitStatus, StopSignal, spawn_worker

log = logging.getLogger("trt_engine.benchmark.isolated")  # this module is `__main__` in the child

_ANSWER_S = 2.0
"""Time for an interrupted child to report its partial record: the running query ends or is stopped first."""
_SHUTDOWN_S = 0.5
"""Time to exit after that: every command ends within 5 s of Ctrl-C."""
_GRACE_S = 15.0
"""Time to exit after the result."""
_NOTHING_MEASURED, _REPEAT_HINT = "interrupted before anything was measured", "the same command measures again"


class MeasureRequest(msgspec.Struct):
    """The request to the child."""

    engine: str
    config: BenchConfig
    runtime: RuntimeConfig
    memory_limit: int | None
    log_level: int


class ProgressMessage(msgspec.Struct, tag="progress"):
    """Progress of the measurement."""

    done_s: float
    planned_s: float


class ResultMessage(msgspec.Struct, tag="record"):
    """The result."""

    record: BenchRecord


Message = LogMessage | ProgressMessage | ResultMessage | ErrorMessage
_message_decoder = msgspec.json.Decoder(Message)
_request_decoder = msgspec.json.Decoder(MeasureRequest, dec_hook=lambda kind, value: kind(value))


def measure_isolated(
    engine: Engine | Path,
    config: BenchConfig,
    runtime: RuntimeConfig,
    *,
    memory_limit: int | None = None,
    timeout_s: float | None = None,
    on_progress: Progress | None = None,
) -> BenchRecord:
    """Load and measure an engine in a child process with at most `memory_limit` bytes (default: what is free).

    Raises the child's error; `MemoryExhausted` when it ran out of memory; `EngineError` when it crashed (with the signal),
    was silent for longer than any query takes, or exceeded `timeout_s`; `Interrupted` with the partial record on Ctrl-C or
    when the child was interrupted. CUDA devices have no limit: their drivers reserve terabytes of addresses.
    """
    found = engine if isinstance(engine, Engine) else Engine.open(engine)
    room = available_memory()
    limit: int | None = None
    if parse_device(runtime.device or found.passport.device)[0] != "cuda":
        limit = room = room if memory_limit is None else memory_limit
    request = MeasureRequest(
        engine=str(found.path), config=config, runtime=runtime, memory_limit=limit, log_level=log.getEffectiveLevel()
    )
    silence = timeout_s is None  # a child that reports progress may take as long as requested
    limit_s, grace_s = _silence_limit_s(config) if timeout_s is None else timeout_s, _GRACE_S
    with tempfile.TemporaryFile() as output:
        child = spawn_worker("trt_engine.benchmark.isolated", msgspec.json.encode(request, enc_hook=str), output)
        try:
            answer = _wait_for_result(child, limit_s, on_progress, silence=silence)
        except KeyboardInterrupt:
            grace_s = _SHUTDOWN_S
            child.interrupt()
            last = None
            with contextlib.suppress(KeyboardInterrupt, TimeoutError):  # a second Ctrl-C, or no result: end it now
                last = _wait_for_result(child, _ANSWER_S, None)
            if isinstance(last, ResultMessage) and last.record.queries:
                raise _interrupted(f"interrupted after {last.record.queries} queries", last.record) from None
            raise _interrupted(_NOTHING_MEASURED) from None
        except TimeoutError:
            raise EngineError(
                f"the measurement of `{found.path}` "
                f"{'was silent for' if silence else 'did not end within'} {limit_s:g} s and was stopped",
                hint="a smaller batch, or a longer `timeout_s`",
            ) from None
        finally:
            ended = child.close(grace_s)
            printed = _child_output(output)
    match answer:
        case ResultMessage(record=record) if record.complete:
            return record
        case ResultMessage(record=record):  # the child was interrupted from outside
            raise _interrupted(f"the measurement was stopped after {record.queries} queries", record)
        case ErrorMessage(kind=kind, message=message, hint=hint):
            raise restore_error(kind, message, hint)
    raise _crash_error(ended, found, room, printed)


def _silence_limit_s(config: BenchConfig) -> float:
    """Silence after which a child counts as hung: ten times the planned duration, and ten minutes."""
    rules = PROTOCOL_RULES.get(config.protocol, PROTOCOL_RULES["trt-engine"])
    warmup_s = rules.warmup_s if config.warmup_s is None else config.warmup_s
    duration_s = rules.duration_s if config.duration_s is None else config.duration_s
    return 600 + 10 * (warmup_s + duration_s) + 10 * config.idle_s


def _wait_for_result(
    child: ChildProcess, timeout_s: float, on_progress: Progress | None, *, silence: bool = False
) -> ResultMessage | ErrorMessage | None:
    """The child's result or error, None when it exits without one. Raises `TimeoutError`.

    `timeout_s` counts from now, with `silence` from the last message.
    """
    deadline = time.monotonic() + timeout_s
    while (line := child.read_line(timeout_s if silence else deadline - time.monotonic())) is not None:
        match message := _message_decoder.decode(line):
            case ResultMessage() | ErrorMessage():
                return message
            case LogMessage(name=name, level=level, text=text):
                logging.getLogger(name).log(level, "%s", text)
            case ProgressMessage(done_s=done_s, planned_s=planned_s) if on_progress is not None:
                on_progress(done_s, planned_s)
    return None


def _interrupted(message: str, partial: BenchRecord | None = None) -> Interrupted:
    return Interrupted(message, hint=_REPEAT_HINT, partial=partial)


def _child_output(output: IO[bytes]) -> str:
    """Output of the child's libraries, logged with `-v`."""
    output.seek(0)
    text = output.read().decode(errors="replace")
    for line in text.splitlines():
        log.debug("child: %s", line)
    return text


def _crash_error(ended: ExitStatus, engine: Engine, room: int, printed: str) -> TrtEngineError:
    """The error for a child that exited without a result."""
    name = exit_name(ended.code)
    if ran_out_of_memory(ended, printed, room // 2):
        return MemoryExhausted(
            f"the measurement of `{engine.path}` ran out of memory ({name}, {ended.peak_bytes >> 20} MiB in use)",
            hint="a smaller batch, or a machine with more memory",
        )
    return EngineError(
        f"the process that measured `{engine.path}` ended by {name}",
        hint="`-v` shows its output; `trt-engine doctor` checks the installation",
    )


def _limit_memory(nbytes: int) -> None:
    """Limit this process to `nbytes` more than it has.

    RLIMIT_DATA counts writable private memory, such as tensors; RLIMIT_AS would also count reserved addresses and mapped
    weights. Stacks of future threads are added, as they count before use. Only the soft limit is set, so that it can be
    lifted to report an error.
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


def _measure(request: MeasureRequest, pipe: MessagePipe, stop: StopSignal) -> BenchRecord:
    engine = Engine.open(Path(request.engine))
    runtime = get_backend(engine.passport.backend).load_component(
        "runtime"
    )()  # import the library before the limit applies
    if request.memory_limit is not None:
        _limit_memory(request.memory_limit)
    session = runtime.load(engine, request.runtime)
    try:
        stop.measuring = True
        record = measure(
            session,
            engine,
            request.config,
            on_progress=lambda done_s, planned_s: pipe.send(ProgressMessage(done_s, planned_s)),
            should_stop=lambda: stop.asked,
        )
    finally:  # `measuring` stays set: Ctrl-C must not lose a finished record
        session.close()
    _lift_limit()
    return record


def main() -> None:
    """Entry point of the child: one request, one result."""
    stop = StopSignal()
    pipe, raw = receive_request()
    request = _request_decoder.decode(raw)
    logging.getLogger("trt_engine").setLevel(request.log_level)
    answer: Message
    try:
        answer = ResultMessage(_measure(request, pipe, stop))
    except BaseException as error:  # every error is reported
        _lift_limit()
        limit = f"within {request.memory_limit >> 20} MiB " if request.memory_limit is not None else ""
        answer = error_message(
            error,
            f"{limit}while measuring `{request.engine}`",
            interrupted=(_NOTHING_MEASURED, _REPEAT_HINT),
            log_hint="`-v` shows its output",
        )
        if request.log_level <= logging.DEBUG:
            log.debug("in the child: %s", type(error).__name__, exc_info=error)
    pipe.send(answer)


if __name__ == "__main__":
    main()

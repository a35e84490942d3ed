"""Why a child process failed: out of memory in a library's words, the signal that ended it, and error messages restored."""

from __future__ import annotations

import contextlib
import signal

from trt_engine import errors
from trt_engine.errors import Explained, MemoryExhausted, TrtEngineError
from trt_engine.workers.process import ExitStatus

_OUT_OF_MEMORY_PHRASES = (
    "bad_alloc",
    "failed to allocate",
    "out of memory",
    "cannot allocate memory",
    "can't start new thread",
    "cudaerrormemoryallocation",
)


def mentions_out_of_memory(text: str) -> bool:
    """Whether the output of a library or process contains an out-of-memory message."""
    lower = text.lower()
    return any(phrase in lower for phrase in _OUT_OF_MEMORY_PHRASES)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it came from, is out of memory by its class or its text."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return any(isinstance(one, MemoryError | MemoryExhausted) or mentions_out_of_memory(str(one)) for one in chain)


def ran_out_of_memory(ended: ExitStatus, printed: str, least_bytes: int = 0) -> bool:
    """Whether a process ended for lack of memory: by what it printed, or killed with at least so much in use."""
    return mentions_out_of_memory(printed) or (ended.code == -signal.SIGKILL and ended.peak_bytes >= least_bytes)


def exit_name(code: int) -> str:
    """`SIGSEGV` for a negative exit code, else `exit code 3`."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"signal {-code}"


def restore_error(kind: str, message: str, hint: str | None) -> Explained:
    """The error of a child process from its class name in `errors`, message and hint."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, Explained):
        return found(message, hint=hint)
    return TrtEngineError(f"{kind}: {message}", hint=hint)

"""Builds one candidate in a child process, which ends when its time does; its engine is then in the store."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from trt_engine.config.build import BuildConfig
from trt_engine.engine import Engine
from trt_engine.errors import BuildError
from trt_engine.workers.crash import exit_name, ran_out_of_memory, restore_error
from trt_engine.workers.messages import ErrorMessage, LogMessage, error_message, receive_request
from trt_engine.workers.process import spawn_worker

if TYPE_CHECKING:
    from trt_engine.verbs.build.run import BuildPlan

log = logging.getLogger("trt_engine.verbs.build.worker")  # in the child this module is `__main__`


class BuildRequest(msgspec.Struct):
    """What to build, and the store it goes to."""

    model: str
    config: BuildConfig
    store: str
    key: str
    rebuild: bool
    log_level: int


class BuildDone(msgspec.Struct, tag="done"):
    """The engine is in the store."""


_message_decoder = msgspec.json.Decoder(BuildDone | ErrorMessage | LogMessage)
_request_decoder = msgspec.json.Decoder(BuildRequest, dec_hook=lambda kind, value: kind(value))


def build_in_process(plan: BuildPlan, limit_s: float, *, rebuild: bool = False) -> Engine:
    """The engine of the plan. Raises what its build raises, and `BuildError` when it takes longer than `limit_s` or
    the process crashes."""
    request = BuildRequest(
        model=str(plan.model.path),
        config=plan.config,
        store=str(plan.store.folder),
        key=plan.key,
        rebuild=rebuild,
        log_level=logging.getLogger("trt_engine").getEffectiveLevel(),
    )
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as output:
        child = spawn_worker("trt_engine.verbs.build.worker", msgspec.json.encode(request, enc_hook=str), output)
        answer: BuildDone | ErrorMessage | None = None
        try:
            while True:  # not `while condition`, whose jump back Python 3.13.0 leaves out of the `try`
                if answer is not None or (line := child.read_line(deadline - time.monotonic())) is None:
                    break
                message = _message_decoder.decode(line)
                if isinstance(message, LogMessage):
                    logging.getLogger(message.name).log(message.level, "%s", message.text)
                else:
                    answer = message
        except TimeoutError:
            raise BuildError(f"not built within the {limit_s:.0f} s that were left") from None
        finally:
            ended = child.close(5.0 if answer is not None else 0.0)
            output.seek(0)
            printed = output.read().decode(errors="replace")
    if isinstance(answer, ErrorMessage):
        raise restore_error(answer.kind, answer.message, answer.hint)
    if answer is None:
        if ran_out_of_memory(ended, printed, least_bytes=1 << 30):
            raise restore_error("MemoryExhausted", "out of memory while building", "a smaller profile")
        raise BuildError(f"its build ended with {exit_name(ended.code)}", hint="`-v` shows its log")
    engine = plan.find_in_store()
    if engine is None:
        raise BuildError("its engine is not in the store")
    return engine


def plan_request(request: BuildRequest) -> BuildPlan:
    """The plan of the one candidate, without a search of its own."""
    from trt_engine.store import Store
    from trt_engine.verbs.build.run import plan

    return plan(request.model, config=replace(request.config, time_budget_s=0), store=Store(request.store))


def main() -> None:
    pipe, raw = receive_request()
    request = _request_decoder.decode(raw)
    logging.getLogger("trt_engine").setLevel(request.log_level)
    try:
        from trt_engine.verbs.build.run import execute

        planned = plan_request(request)
        if planned.key != request.key:
            raise BuildError("the model or the machine changed during the build")
        execute(planned, rebuild=request.rebuild)
        pipe.send(BuildDone())
    except BaseException as error:
        pipe.send(
            error_message(error, "while building", interrupted=("interrupted", ""), log_hint="`-v` shows its log")
        )
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()

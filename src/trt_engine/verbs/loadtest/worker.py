"""The child of `run_processes`: one share of a load, started at the time the parent names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from trt_engine.verbs.loadtest.clients import open_loop
from trt_engine.verbs.loadtest.generator import (
    DoneMessage,
    LoadJob,
    LoadWindow,
    MomentMeter,
    ReadyMessage,
    absolute_times,
)
from trt_engine.workers.messages import MessagePipe, error_message
from trt_engine.workers.process import exit_with_parent, read_first_line


def run(job: LoadJob, pipe: MessagePipe, wait_for_window: Callable[[], LoadWindow]) -> None:
    """Run the share and write its samples, also after SIGINT."""
    arrivals_s = None if job.arrivals is None else np.frombuffer(Path(job.arrivals).read_bytes(), np.float64)
    ca_file = None if job.ca_file is None else Path(job.ca_file)
    with open_loop(
        job.target, Path(job.request).read_bytes(), concurrency=job.concurrency, timeout_s=job.timeout_s,
        token=job.token, ca_file=ca_file,
    ) as loop:  # fmt: skip
        pipe.send(ReadyMessage())
        window = wait_for_window()
        with suppress(KeyboardInterrupt):
            loop.run(window, absolute_times(arrivals_s, window), MomentMeter(pipe.send))
        Path(job.out).write_bytes(loop.collect().to_bytes())
    pipe.send(DoneMessage())


def _read_window() -> LoadWindow:
    window = msgspec.json.decode(read_first_line(), type=LoadWindow)
    exit_with_parent()
    return window


def main() -> None:
    pipe = MessagePipe(int(sys.argv[1]))
    try:
        exit_with_parent(reads_stdin=True)
        run(msgspec.json.decode(read_first_line(), type=LoadJob), pipe, _read_window)
    except BaseException as error:
        pipe.send(error_message(error, "sending requests", interrupted=("interrupted", ""), log_hint="`-v` for more"))


if __name__ == "__main__":
    main()

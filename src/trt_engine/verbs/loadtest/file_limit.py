"""The limit of open files, of which each connection is one."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import psutil

from trt_engine.errors import UsageError
from trt_engine.verbs.loadtest.config import LoadtestConfig

_OTHER_FILES = 64
"""Files that a process may open beside its connections and those that are open."""


@contextlib.contextmanager
def raise_file_limit(config: LoadtestConfig) -> Iterator[None]:
    """Raise the soft limit to the hard one while it is needed, for child processes too; `UsageError` beyond that one."""
    connections = -(-config.max_in_flight // config.processes)
    others = psutil.Process().num_fds() + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or connections + others <= soft:
        yield
        return
    if hard != resource.RLIM_INFINITY and connections + others > hard:
        flag = "--concurrency" if config.is_closed else "--connections"
        raise UsageError(
            f"{connections} connections of a process need {connections + others} open files, "
            f"the limit is {hard} (hard; soft: {soft})",
            hint=f"`{flag} {max(hard - others, 1) * config.processes}`, more `--processes`, "
            "or a higher hard limit of `RLIMIT_NOFILE` (`ulimit -n`)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

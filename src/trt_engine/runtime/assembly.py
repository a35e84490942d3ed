"""From sessions to one Runner: direct or a pool of contexts, replicas of it, and a batcher in front."""

from __future__ import annotations

from collections.abc import Sequence

from trt_engine.config import Profile, RuntimeConfig
from trt_engine.errors import UsageError
from trt_engine.protocols import Runner, Session
from trt_engine.runtime.balance import Strategy
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.direct import DirectRunner
from trt_engine.runtime.pool import ContextPool
from trt_engine.runtime.replicas import Replicas

__all__ = ["assemble", "over"]


def over(session: Session, profiles: Sequence[Profile], config: RuntimeConfig) -> DirectRunner | ContextPool:
    """The Runner over one session: its own `run` where it has one and no streams, else a pool of its contexts.

    Who limits how many may wait gets the pool: a library that takes all callers at once has no line of them.
    """
    if hasattr(session, "run") and not hasattr(session, "stream"):
        if config.max_waiting is None and config.wait_timeout_s is None:
            return DirectRunner(session, profiles, width=config.contexts, graphs=bool(config.graphs))
        if named := [f"`{spec.name}` is {spec.dtype}" for spec in session.signature if spec.dtype == "string"]:
            raise UsageError(
                f"`max_waiting` and `wait_timeout_s` are of contexts, and this engine has none: {', '.join(named)}",
                hint="leave them out, or count callers before they ask",
            )
    return ContextPool(session, profiles, config)


def assemble(
    sessions: Sequence[Session],
    profiles: Sequence[Profile],
    config: RuntimeConfig,
    *,
    devices: Sequence[str] | None = None,
    balance: str | Strategy = "least busy",
) -> Runner:
    """The Runner that answers for all of them; it owns the sessions. Where that fails, everything is closed again."""
    runners: list[Runner] = []
    try:
        runners += [over(session, profiles, config) for session in sessions]
        runner = runners[0] if len(runners) == 1 else Replicas(runners, devices=devices, balance=balance)
        if config.batching is None:
            return runner
        return Batcher(runner, config.batching, profiles=profiles)
    except BaseException:
        for made in runners:
            made.close()
        for session in sessions[len(runners) :]:
            session.close()
        raise

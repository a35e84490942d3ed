"""From sessions to one Runner: direct or a pool of contexts, replicas of it, and a batcher in front."""

from __future__ import annotations

from collections.abc import Sequence

from trt_engine.config import Profile, RuntimeConfig
from trt_engine.protocols import Runner, Session
from trt_engine.runtime.balance import Strategy
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.direct import DirectRunner
from trt_engine.runtime.pool import ContextPool
from trt_engine.runtime.replicas import Replicas

__all__ = ["assemble", "over"]


def over(session: Session, profiles: Sequence[Profile], config: RuntimeConfig) -> DirectRunner | ContextPool:
    """The Runner over one session: its own `run` where it has one and no streams, else a pool of its contexts."""
    if hasattr(session, "run") and not hasattr(session, "stream"):
        return DirectRunner(session, profiles, width=config.contexts)
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

"""Builds one Runner from sessions: host runner or context pool, replicas, batcher."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import UsageError
from trt_engine.protocols import RunnerBase, Session
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.bound_call import BoundCall, BoundCallHome
from trt_engine.runtime.context_pool import ContextPool
from trt_engine.runtime.prepared_context import select_profile
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.runtime.replicas import Replicas, Strategy
from trt_engine.tensors import Tensors

log = logging.getLogger(__name__)


class HostRunner(ProcessBound, RunnerBase):
    """A runner over a session with `run`, without copies or locks. `width` limits a batcher, not callers."""

    def __init__(
        self, session: Session, profiles: Sequence[Profile] = (), *, width: int = 1, graphs: bool = False
    ) -> None:
        self.signature = session.signature
        self.profiles = tuple(profiles)
        self.width = width
        self.session = session
        self._bound_calls: set[BoundCall] = set()
        self._graph_info = {"graphs": "none: this engine has no contexts"} if graphs else {}
        if graphs:
            log.warning("`graphs` does nothing here: on `%s` this backend captures none", session.device.name)
        self.run = session.run  # type: ignore[method-assign]  # one call less for each inference

    def runtime_info(self) -> dict[str, str]:
        return {"device": self.session.device.name} | self.session.runtime_info() | self._graph_info

    def bind(self, inputs: Tensors, outputs: Tensors) -> BoundCall:
        """A call on fixed memory; arrays by name, in the dtypes and shapes of the signature.

        Raises `UsageError` for outputs that do not fit.
        """
        shapes = {name: tuple(array.shape) for name, array in inputs.items()}
        home = BoundCallHome(self.session.stream(), self._bound_calls)
        return BoundCall(self.session, select_profile(self.profiles, shapes, ()), home, inputs, outputs)

    def close(self) -> None:
        """Close the session; no thread may be inside `run` or a bound call."""
        if self._forked:
            return
        for call in [*self._bound_calls]:
            call.close()
        self.session.close()


def runner_for_session(
    session: Session, profiles: Sequence[Profile], config: RuntimeConfig
) -> HostRunner | ContextPool:
    """A `HostRunner` if the session runs host arrays best, else a `ContextPool`; queue limits require the pool.

    Raises `UsageError` for queue limits on an engine with strings, which has no contexts.
    """
    if session.runs_host_arrays and not session.runs_on_own_streams:
        if config.max_waiting is None and config.wait_timeout_s is None:
            return HostRunner(session, profiles, width=config.contexts, graphs=bool(config.graphs))
        if named := [f"`{spec.name}` is {spec.dtype}" for spec in session.signature if spec.dtype == "string"]:
            raise UsageError(
                f"`max_waiting` and `wait_timeout_s` need contexts, and this engine has none: {', '.join(named)}",
                hint="leave them out, or limit concurrent requests yourself",
            )
    return ContextPool(session, profiles, config)


def assemble(
    sessions: Sequence[Session],
    profiles: Sequence[Profile],
    config: RuntimeConfig,
    *,
    devices: Sequence[str] | None = None,
    balance: str | Strategy = "least busy",
) -> RunnerBase:
    """A Runner over all sessions, which it owns. On failure everything is closed.

    Raises `UsageError` for settings that the sessions do not allow.
    """
    runners: list[RunnerBase] = []
    try:
        runners += [runner_for_session(session, profiles, config) for session in sessions]
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

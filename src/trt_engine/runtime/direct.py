"""`DirectRunner`: a session whose library takes host arrays itself and is safe from many threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from trt_engine.config import Profile
from trt_engine.errors import UsageError
from trt_engine.protocols import DirectSession, Session
from trt_engine.tensors import Signature, Tensors

__all__ = ["DirectRunner"]


class DirectRunner:
    """A Runner that is the session's own `run`: no copies and no lock of ours.

    A session with device memory of its own may offer `run_on_device(feeds)` and `lends_on`, the device its arrays are on;
    then feeds may lie there, and outputs stay there when asked for.
    """

    def __init__(
        self, session: Session, profiles: Sequence[Profile] = (), *, width: int = 1, graphs: bool = False
    ) -> None:
        self.signature: Signature = session.signature
        self.profiles = tuple(profiles)
        self._without = {"graphs": "none: this engine runs in calls of its library"} if graphs else {}
        self.width = width
        """Batches a batcher sends at once; callers may be as many as they like."""
        self.session = cast(DirectSession, session)
        self.device = getattr(session, "lends_on", None)
        self.run: Callable[[Tensors], dict[str, Any]] = self.session.run

    def run_on_device(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs as arrays on the device."""
        found = getattr(self.session, "run_on_device", None)
        if found is None:
            raise UsageError(
                f"`{self.session.device.name}` has no arrays of its own for this engine", hint="leave `on_device` out"
            )
        outputs: dict[str, Any] = found(feeds)
        return outputs

    def timed(self, feeds: Tensors, *, on_device: bool = False) -> tuple[dict[str, Any], float]:
        """The outputs, and the milliseconds of the call by the host's clock."""
        run = self.run_on_device if on_device else self.run
        before = time.perf_counter()
        outputs = run(feeds)
        return outputs, (time.perf_counter() - before) * 1e3

    def facts(self) -> dict[str, str]:
        return {"device": self.session.device.name} | self.session.facts() | self._without

    def stats(self) -> None:
        """The library keeps none."""

    def close(self) -> None:
        """Close the session; nobody may be inside `run`."""
        self.session.close()

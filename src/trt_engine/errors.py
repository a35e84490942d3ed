"""Every error of trt_engine, in one tree.

The type says who must act, the text what was found and what was expected, the hint what to type next::

    TrtEngineError                1   something unexpected happened inside
    ├── UsageError                2   the call was wrong: options, names
    │   ├── FeedError                 a feed does not fit the engine's signature or profile
    │   ├── ShapeError                a shape does not fit the model
    │   └── ProfileError              a profile contradicts itself or the model
    ├── SetupError                3   the machine lacks something: package, tool, space, permission
    │   └── DeviceLost                a device stopped answering, or an illegal access ended its context
    ├── ModelError                4   the model is missing, broken or not for this backend
    ├── BuildError                5   the backend could not build
    ├── PrecisionError            6   the engine does not compute in what was asked for
    ├── AccuracyError             7   outputs differ more than allowed
    ├── SpeedError                8   slower than allowed
    ├── UnstableError             9   the measurement cannot be trusted (`--strict`)
    ├── EngineError              10   the engine is foreign, changed, or not for this machine
    ├── MemoryExhausted          11   out of memory, on the host or on the device
    ├── CapacityError            12   fewer streams than asked for
    ├── Overloaded               13   too much is waiting already: the request was not taken
    ├── DeadlineExpired          14   the request's time was over before its turn came
    └── Interrupted             130   somebody pressed Ctrl-C
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccuracyError",
    "BuildError",
    "CapacityError",
    "DeadlineExpired",
    "DeviceLost",
    "EngineError",
    "FeedError",
    "Interrupted",
    "MemoryExhausted",
    "ModelError",
    "Overloaded",
    "PrecisionError",
    "ProfileError",
    "SetupError",
    "ShapeError",
    "SpeedError",
    "TrtEngineError",
    "UnstableError",
    "UsageError",
]


class TrtEngineError(Exception):
    """Base of every error raised on purpose: a message, a hint, an exit code and an HTTP status."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    not_here: bool = False
    """The machine or a library on it lacks something, and another one would do: a run skips such a cell."""

    def __init__(self, message: str, *, hint: str | None = None, not_here: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if not_here is not None:
            self.not_here = not_here

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint), self.__dict__)


def _rebuild(cls: type[TrtEngineError], message: str, hint: str | None) -> TrtEngineError:
    """Unpickle: keyword arguments do not survive `Exception`'s own way."""
    return cls(message, hint=hint)


class UsageError(TrtEngineError):
    """The call was wrong: an option, a name, a value."""

    exit_code = 2
    http_status = 400


class FeedError(UsageError):
    """A feed does not fit: a name, a dtype, a rank or a size the engine does not take."""


class ShapeError(UsageError):
    """A shape does not fit the model's signature."""


class ProfileError(UsageError):
    """A profile contradicts itself (min > max) or the model."""


class SetupError(TrtEngineError):
    """The machine lacks something: a package, a tool, a provider, space, permission."""

    exit_code = 3
    http_status = 503
    not_here = True


class DeviceLost(SetupError):
    """A device stopped answering, or an illegal access ended its context: nothing more runs on it in this process."""

    not_here = False


class ModelError(TrtEngineError):
    """The model is missing, broken, or not supported by the backend it was sent to."""

    exit_code = 4
    http_status = 422


class BuildError(TrtEngineError):
    """The backend could not turn this model into an engine."""

    exit_code = 5

    def __init__(
        self, message: str, *, hint: str | None = None, cause: str | None = None, node: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause
        """The class of the failure by the names of `trt_engine.plans.causes`: `no_implementation`; None for another."""
        self.node = node
        """The node of the graph it failed at, where the library names one."""


class PrecisionError(TrtEngineError):
    """The engine does not compute in the precision that was asked for."""

    exit_code = 6


class AccuracyError(TrtEngineError):
    """Outputs differ from the reference by more than the tolerance."""

    exit_code = 7


class SpeedError(TrtEngineError):
    """Slower than the gate allows."""

    exit_code = 8


class UnstableError(TrtEngineError):
    """The measurement moved too much to be trusted; raised with `--strict` only."""

    exit_code = 9


class EngineError(TrtEngineError):
    """The engine is foreign, damaged, or was made for another machine or version."""

    exit_code = 10
    http_status = 409


class MemoryExhausted(TrtEngineError):  # not `MemoryError`: that is the interpreter's own
    """Out of memory, on the host or on the device."""

    exit_code = 11
    http_status = 507


class CapacityError(TrtEngineError):
    """Fewer streams than were asked for."""

    exit_code = 12


class Overloaded(TrtEngineError):
    """Too much is waiting already; the request was not taken, and may be sent again later."""

    exit_code = 13
    http_status = 503


class DeadlineExpired(TrtEngineError):
    """The request's time was over before its turn came; it was not run."""

    exit_code = 14
    http_status = 504


class Interrupted(TrtEngineError):
    """Somebody pressed Ctrl-C; what was measured until then has been written."""

    exit_code = 130
    http_status = 499

    def __init__(self, message: str, *, hint: str | None = None, partial: object = None) -> None:
        super().__init__(message, hint=hint)
        self.partial = partial
        """What was finished until then: the incomplete record of a measurement."""

"""Every error of trt_engine, in one tree, and the end by Ctrl-C, which no `except Exception` catches.

The type shows who must act, the text what was found and expected, the hint what to type next::

    TrtEngineError                1   something unexpected happened inside
    ├── UsageError                2   the call was wrong: options, names
    │   ├── FeedError                 a feed does not fit the engine's signature or profile
    │   ├── ShapeError                a shape does not fit the model
    │   ├── UnknownModel              a server has no model or version of that name
    │   └── ProfileError              a profile contradicts itself or the model
    ├── SetupError                3   the machine lacks something: package, tool, space, permission
    │   └── DeviceLost                a device stopped answering, or an illegal access ended its context
    ├── ModelError                4   the model is missing, broken or not for this backend
    ├── BuildError                5   the backend could not build
    ├── PrecisionError            6   the engine does not compute in the requested precision
    ├── AccuracyError             7   outputs differ more than allowed
    ├── SpeedError                8   slower than allowed
    ├── UnstableError             9   the measurement cannot be trusted (`--strict`)
    ├── EngineError              10   the engine is foreign, changed, or not for this machine
    ├── MemoryExhausted          11   out of memory, on the host or on the device
    ├── CapacityError            12   fewer streams than required
    ├── Overloaded               13   too much is waiting already: the request was not taken
    └── DeadlineExpired          14   the request's time was over before its turn came
    KeyboardInterrupt
    └── Interrupted             130   interrupted with Ctrl-C
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from trt_engine.installed_from import installable

in_shell = False
"""Whether a command runs: messages and hints stay as they are written, with options of the command line."""
in_python: Callable[[str], str] | None = None
"""Puts them into Python: `trt_engine.config.caller_language`, which stands above this module. Set where the package resolves
its first name."""


def in_callers_language(text: str) -> str:
    """The text as written in a command, in Python with keyword arguments; pip installs from where this package came."""
    return installable(text if in_shell or in_python is None else in_python(text))


class Explained(BaseException):
    """What is raised on purpose: a message, a hint, an exit code and an HTTP status."""

    exit_code: ClassVar[int]
    http_status: ClassVar[int]
    machine_specific: bool = False
    """The machine or a library on it lacks something, and another one would do: a run skips such a cell."""

    def __init__(self, message: str, *, hint: str | None = None, machine_specific: bool | None = None) -> None:
        super().__init__(message)
        self._message = message
        self._hint = hint
        if machine_specific is not None:
            self.machine_specific = machine_specific

    @property
    def message(self) -> str:
        """What was found, and what was expected, in the language of the caller."""
        return in_callers_language(self._message)

    @message.setter
    def message(self, text: str) -> None:
        self._message = text

    @property
    def hint(self) -> str | None:
        """What to type next, in the language of the caller; None for nothing."""
        return None if self._hint is None else in_callers_language(self._hint)

    @hint.setter
    def hint(self, text: str | None) -> None:
        self._hint = text

    def translated(self, translate: Callable[[str], str]) -> tuple[str, str | None]:
        """Message and hint, from the options of the command line that they are written with into another language."""
        return translate(self._message), self._hint and translate(self._hint)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    @property
    def one_line(self) -> str:
        """Message and hint without a line break, for protocols."""
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self._message, self._hint), self.__dict__)


def _rebuild(cls: type[Explained], message: str, hint: str | None) -> Explained:
    """Unpickle: keyword arguments do not survive `Exception`'s own way."""
    return cls(message, hint=hint)


class TrtEngineError(Explained, Exception):
    """Base of every error raised on purpose."""

    exit_code = 1
    http_status = 500


class UsageError(TrtEngineError):
    """The call was wrong: an option, a name, a value."""

    exit_code = 2
    http_status = 400


class FeedError(UsageError):
    """A feed does not fit: a name, a dtype, a rank or a size the engine does not take."""


class ShapeError(UsageError):
    """A shape does not fit the model's signature."""


class UnknownModel(UsageError):
    """A server has no model or version of that name."""

    http_status = 404


class ProfileError(UsageError):
    """A profile contradicts itself (min > max) or the model."""


class SetupError(TrtEngineError):
    """The machine lacks something: a package, a tool, a provider, space, permission."""

    exit_code = 3
    http_status = 503
    machine_specific = True


class DeviceLost(SetupError):
    """A device stopped answering, or an illegal access ended its context: nothing more runs on it in this process."""

    machine_specific = False


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
        """The failure class, a name of `trt_engine.trt.failure_causes` (`no_implementation`); None for another."""
        self.node = node
        """The node of the graph it failed at, where the library names one."""


class PrecisionError(TrtEngineError):
    """The engine does not compute in the requested precision."""

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
    """Fewer streams than required."""

    exit_code = 12


class Overloaded(TrtEngineError):
    """The wait queue is full; the request was rejected and may be retried later."""

    exit_code = 13
    http_status = 503


class DeadlineExpired(TrtEngineError):
    """The request's time was over before its turn came; it was not run."""

    exit_code = 14
    http_status = 504


class Interrupted(Explained, KeyboardInterrupt):
    """Interrupted with Ctrl-C; completed measurements have been written.

    A `KeyboardInterrupt`: `except Exception` and `except TrtEngineError` in a loop over models let it pass.
    """

    exit_code = 130
    http_status = 499

    def __init__(self, message: str, *, hint: str | None = None, partial: object = None) -> None:
        super().__init__(message, hint=hint)
        self.partial = partial
        """What was finished until then: the incomplete record of a measurement."""

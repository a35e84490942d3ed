"""`ProcessBound`: objects that a child made with `fork` cannot use."""

from __future__ import annotations

import os
import weakref
from typing import Any, Self

from trt_engine.closing import Closing
from trt_engine.errors import UsageError


class ProcessBound(Closing):
    """Base of what owns threads, locks or memory of a device, and works in the process that made it alone.

    A child made with `fork` has the locks as they were at that moment, and none of the threads: there, whatever uses the
    object raises `UsageError` at once, and `close` does nothing. That costs the process that made it nothing: in the child
    the object's attributes cannot be read (`_after_fork`), so that no method gets as far as a lock. Pickling raises
    `UsageError`, unless the class knows how another process makes it again.
    """

    _forked = False
    """Whether this is a child's copy."""
    _process_id: int

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        made = super().__new__(cls)
        made._process_id = os.getpid()
        _made_here.add(made)
        return made

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError(
            f"a {type(self).__name__} belongs to the process that made it, and cannot be pickled",
            hint="pass the engine's path, and load it in the other process with `te.load(path)`",
        )


_made_here: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


def _forked_class(kind: type[ProcessBound]) -> type[ProcessBound]:
    """The class of a forked child's copy: reading an attribute of the object raises `UsageError`."""

    def read(self: ProcessBound, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        if name in attributes:
            raise UsageError(
                f"this {kind.__name__} was loaded in process {attributes['_process_id']}, used in {os.getpid()}: its "
                "threads and its device stayed there",
                hint="load it in the child, after the fork: `te.load(path)`; with `spawn` it may be an argument",
            )
        return object.__getattribute__(self, name)

    def text(self: ProcessBound) -> str:
        return f"<{kind.__name__} of process {vars(self)['_process_id']}>"

    made = {"_forked": True, "__getattribute__": read, "__repr__": text, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), made | {"__qualname__": kind.__qualname__})


def _after_fork() -> None:
    for item in list(_made_here):
        item.__class__ = _forked_class(type(item))
    _made_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

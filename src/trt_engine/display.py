"""How results and loaded engines print: the text of the command line, and tables in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _unset() -> Any:
    raise LookupError("`trt_engine` gives the module that makes the blocks")


results: Callable[[], Any] = _unset
"""Gives `trt_engine.reporting.results`, which stands above this module: set where the package resolves its first name."""


class RichDisplay:
    """Base class of what users hold in Python: `str()` is the text that the verb prints, a notebook shows it as tables.

    Both come from the blocks of `trt_engine.reporting.results`. None of the methods raises: what cannot be shown as a
    table is shown as text, and what cannot be shown as text by its `repr`.
    """

    __slots__ = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # IPython prefers the `__repr__` of a dataclass to a method that the class inherits
        cls._repr_pretty_ = RichDisplay._repr_pretty_  # type: ignore[method-assign]

    def __str__(self) -> str:
        """The whole result as the verb prints it, without the last line break."""
        try:
            text: str = results().result_text(self)
        except Exception:  # printing must not end a session: a closed engine, a record of another version
            return _plain(self)
        return text.rstrip("\n")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Text for IPython; long lists end with their count."""
        try:
            text: str = results().short_text(self)
        except Exception:  # as in `__str__`
            text = _plain(self)
        printer.text(text.rstrip("\n"))

    def _repr_html_(self) -> str:
        """Tables for a notebook cell: escaped, in the colours of the notebook; long lists end with their count."""
        try:
            page: str = results().result_html(self)
        except Exception:  # as in `__str__`
            import html  # not needed to import the package

            return f"<pre>{html.escape(_plain(self))}</pre>"
        return page


_LONGEST = 4000


def _plain(value: object) -> str:
    """The `repr` of a value, cut; the default one where its own fails."""
    try:
        text = repr(value)
    except Exception:  # as in `__str__`
        text = object.__repr__(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"

"""`Closing`: objects that a `with` statement closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class Closing:
    """Base of what has `close` and is closed at the end of a `with` block."""

    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

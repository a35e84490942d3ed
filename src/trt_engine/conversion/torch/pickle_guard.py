"""Restricts unpickling to tensors while a source is opened, whatever loader a library falls back to.

`torch.load` reads weights only, and a Python audit hook rejects imports by any other unpickler of this process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from trt_engine.conversion.torch.pickle_check import NUMPY_GLOBALS, TENSOR_GLOBALS
from trt_engine.conversion.torch.user_code import environment
from trt_engine.errors import ModelError

_FORCED = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}


class _Guard:
    """Process-wide switch: audit hooks cannot be removed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self.active = 0

    def enter(self) -> None:
        with self._lock:
            if not self._hooked:
                sys.addaudithook(self._on_event)
                self._hooked = True
            self.active += 1

    def leave(self) -> None:
        with self._lock:
            self.active -= 1

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "pickle.find_class" or not self.active:
            return
        name = (str(arguments[0]), str(arguments[1]))
        if name not in TENSOR_GLOBALS and name not in NUMPY_GLOBALS:
            raise ModelError(
                f"the source holds a pickle that imports `{'.'.join(name)}`, which was not opened",
                hint="if you trust it, `--trust-source`: its code then runs with your rights",
            )


_guard = _Guard()


@contextlib.contextmanager
def no_pickled_code(*, trust_source: bool = False) -> Iterator[None]:
    """Allow only weights inside the block; with `trust_source`, only silence torch's logging."""
    with _quiet_logging():
        if trust_source:
            yield
            return
        import torch

        load = torch.load

        @functools.wraps(load)
        def weights_only(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pickle_module", None)
            return load(*args, **{**kwargs, "weights_only": True})

        with environment(_FORCED), torch.serialization.safe_globals(_numpy_globals()):
            torch.load = weights_only
            _guard.enter()
            try:
                yield
            finally:
                _guard.leave()
                torch.load = load


def _numpy_globals() -> list[Any]:
    """`NUMPY_GLOBALS` under both names of their module: checkpoints contain NumPy scalars."""
    import numpy as np
    from numpy._core import multiarray

    types = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSUV"}
    found: list[Any] = [np.dtype, np.ndarray, *types]
    for name in ("_reconstruct", "scalar"):
        found += [(getattr(multiarray, name), f"numpy.{core}.multiarray.{name}") for core in ("_core", "core")]
    return found


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Disable the stack trace that a failing log call prints to stderr."""
    before = logging.raiseExceptions
    logging.raiseExceptions = False
    try:
        yield
    finally:
        logging.raiseExceptions = before

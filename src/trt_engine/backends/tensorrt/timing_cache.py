"""The timing cache: tactic timings shared between builds and processes.

TensorRT rejects the cache of another version or GPU, by returning None or in its log alone: the build then starts with an
empty one and a warning. A writer merges concurrent changes under a lock, then renames.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trt_engine.atomic_io import os_error, read_bounded, write_atomic
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.errors import TrtEngineError
from trt_engine.format import format_bytes
from trt_engine.trt.known_warnings import find_known_warning

log = logging.getLogger(__name__)

_LOCK_S = 60.0
"""Timeout for another writer, in s: timings are worth less than the engine."""


@dataclass
class TimingCache:
    """One build's view of the cache file at `path`."""

    path: Path
    logger: TensorRtLogger
    read_bytes: int = 0
    written_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    """Why the file was not used, or the new timings not saved."""
    _native: Any = None
    """The cache object, kept alive here: the builder's configuration does not."""

    def attach(self, config: Any) -> None:
        """Attach the file's cache to the builder, or an empty one if TensorRT rejects it."""
        before = self._read_file()
        self._native = self._create(config, before) if before else None
        if self._native is not None and config.set_timing_cache(self._native, False):
            self.read_bytes = len(before)
            return
        if before:
            self.warnings.append(
                f"the timing cache `{self.path}` is damaged, or of another TensorRT or GPU: starting with an empty one"
            )
        self._native = config.create_timing_cache(b"")
        if self._native is None or not config.set_timing_cache(self._native, False):
            self.warnings.append("TensorRT takes no timing cache: every tactic is timed again and nothing is saved")

    def save(self, config: Any) -> None:
        """Write the build's timings, merged with those of concurrent builds. A failure only warns."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            with FileLock(f"{self.path}.lock", timeout=_LOCK_S):
                now = self._read_file()
                others = self._create(config, now) if now else None
                if now and (others is None or not cache.combine(others, False)):
                    log.info("what the timing cache `%s` held is not of this TensorRT and GPU: replaced", self.path)
                made = cache.serialize()
                if made is None:
                    self.warnings.append("TensorRT returned no timing cache")
                    return
                raw = bytes(made)
                if raw and raw != now:
                    write_atomic(self.path, raw)
                self.written_bytes = len(raw)
        except Timeout:
            self.warnings.append(f"the timing cache was not saved: another process held its lock for {_LOCK_S:g} s")
        except OSError as error:
            self.warnings.append(f"the timing cache was not saved: {os_error(error, self.path).message}")
        except NotImplementedError as error:  # a file system without locks
            self.warnings.append(f"the timing cache was not saved: {error}")
        except TrtEngineError as error:  # a full disk: timings are worth less than the engine
            self.warnings.append(f"the timing cache was not saved: {error.message}")

    def summary(self) -> str:
        """`read 12 KiB, kept 14 KiB`."""
        if not self.read_bytes:
            return f"new, kept {format_bytes(self.written_bytes)}"
        same = " (nothing had to be timed)" if self.written_bytes == self.read_bytes else ""
        return f"read {format_bytes(self.read_bytes)}, kept {format_bytes(self.written_bytes)}{same}"

    def _create(self, config: Any, raw: bytes) -> Any:
        """The cache in those bytes; None if rejected, where some releases return an empty cache and a warning."""
        said = self.logger.problem_count
        made = config.create_timing_cache(raw)
        warned = {known.name for text in self.logger.problems(said) if (known := find_known_warning(text)) is not None}
        return None if "timing_cache_refused" in warned or self.logger.had_errors(said) else made

    def _read_file(self) -> bytes:
        try:
            return read_bounded(self.path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.warnings.append(f"the timing cache `{self.path}` cannot be read: {error.strerror}")
            return b""

"""The timing cache: what tactics took, kept between builds and shared between processes.

TensorRT refuses the cache of another version or GPU, and never for the wrong reason: a refusal is said and the build
starts with an empty one. Whoever writes merges what others wrote since, under a lock, and renames.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trt_engine.errors import TrtEngineError
from trt_engine.figures import size
from trt_engine.files import explain, write_whole

__all__ = ["TimingCache"]

log = logging.getLogger(__name__)
_LOCK_S = 60.0
"""How long another's writing is waited for: timings are worth less than the engine."""


@dataclass
class TimingCache:
    """One build's view of the cache file at `path`."""

    path: Path
    read_bytes: int = 0
    written_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    """Why what the file holds was not used, or what was learnt not kept."""
    _ours: Any = None
    """The cache object: the builder's configuration does not keep it alive."""

    def attach(self, config: Any) -> None:
        """Give the builder what the file holds, or an empty cache where TensorRT refuses it."""
        before = self._content()
        self._ours = config.create_timing_cache(before) if before else None
        if self._ours is not None and config.set_timing_cache(self._ours, False):
            self.read_bytes = len(before)
            return
        if before:
            self.warnings.append(
                f"the timing cache `{self.path}` is damaged, or of another TensorRT or GPU: starting with an empty one"
            )
        self._ours = config.create_timing_cache(b"")
        if self._ours is None or not config.set_timing_cache(self._ours, False):
            self.warnings.append("TensorRT takes no timing cache: every tactic is timed anew and nothing is kept")

    def keep(self, config: Any) -> None:
        """Write what the build has learnt, with what others wrote meanwhile. A failure is said and costs no engine."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            with FileLock(f"{self.path}.lock", timeout=_LOCK_S):
                now = self._content()
                others = config.create_timing_cache(now) if now else None
                if others is not None and not cache.combine(others, False):
                    log.info("what the timing cache `%s` held is not of this TensorRT and GPU: replaced", self.path)
                made = cache.serialize()
                if made is None:
                    self.warnings.append("TensorRT gave no timing cache to keep")
                    return
                raw = bytes(made)
                if raw and raw != now:
                    write_whole(self.path, raw)
                self.written_bytes = len(raw)
        except Timeout:
            self.warnings.append(f"the timing cache was not kept: another process has held its lock for {_LOCK_S:g} s")
        except OSError as error:
            self.warnings.append(f"the timing cache was not kept: {explain(error, self.path).message}")
        except NotImplementedError as error:  # a file system that knows no locks
            self.warnings.append(f"the timing cache was not kept: {error}")
        except TrtEngineError as error:  # a full disk: timings are worth less than the engine
            self.warnings.append(f"the timing cache was not kept: {error.message}")

    def note(self) -> str:
        """`read 12 KiB, kept 14 KiB`."""
        if not self.read_bytes:
            return f"new, kept {size(self.written_bytes)}"
        same = " (nothing had to be timed)" if self.written_bytes == self.read_bytes else ""
        return f"read {size(self.read_bytes)}, kept {size(self.written_bytes)}{same}"

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.warnings.append(f"the timing cache `{self.path}` cannot be read: {error.strerror}")
            return b""

"""Memory available to this process: the free memory of the machine or its cgroups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

_RESERVE_BYTES = 256 << 20
"""Bytes reserved for the rest of the machine where no limit is given."""


def available_memory() -> int:
    """Bytes a new process may allocate: free memory of the machine or its cgroups, less a reserve."""
    free: int = psutil.virtual_memory().available
    for limit, used in _cgroup_limits():
        free = min(free, limit - used)
    return max(free - max(_RESERVE_BYTES, free // 20), 0)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and usage in bytes of the memory cgroups of this process, outermost last, without droppable cache."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
                cache = ("inactive_file", "active_file")
            elif "memory" in kinds.split(","):
                root = Path("/sys/fs/cgroup/memory")
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                cache = ("total_inactive_file", "total_active_file")
            else:
                continue
            folder = root / path.lstrip("/")
            for place in (folder, *folder.parents):
                if not place.is_relative_to(root):
                    break
                with contextlib.suppress(OSError, ValueError):  # `max`: unlimited
                    limit = int((place / names[0]).read_text())
                    used = int((place / names[1]).read_text())
                    for row in (place / "memory.stat").read_text().splitlines():
                        name, _, nbytes = row.partition(" ")
                        if name in cache:
                            used -= int(nbytes)
                    yield limit, used

"""Build or measurement environment: tool, libraries, processor, GPU, container."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from trt_engine.device import info

_ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
"""They share a module."""
_LIBRARIES = (
    "numpy", "onnx", *_ONNXRUNTIME, "onnxruntime-ep-nv-tensorrt-rtx", "tensorrt", "tensorrt-rtx", "torch",
)  # fmt: skip
_FOR_CUDA = {
    "tensorrt-rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
    "onnxruntime-ep-nv-tensorrt-rtx": (
        "onnxruntime-ep-nv-tensorrt-rtx-cu13", "onnxruntime-ep-nv-tensorrt-rtx-cu12",
    ),
}  # fmt: skip
"""The distributions that bring a library under a name with its CUDA; a package of the plain name need not be there."""


def distribution_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None. Reads metadata; imports nothing."""
    for name in (distribution, *_FOR_CUDA.get(distribution, ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return _installed(name)
    return None


_installed = cache(metadata.version)  # a missing one is looked for again: it may be installed meanwhile


@cache
def source_digest(*parts: str) -> str:
    """12 hex digits over the sources of parts of this package (`graph`, `precision/calibrators.py`): what they write changes
    with them."""
    found, root = hashlib.sha256(), Path(__file__).parent
    for part in parts:
        place = root / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Environment:
    """The facts a record or a passport carries about its machine; nothing that names a person or a host."""

    tool: str
    """Version of trt-engine."""
    python: str
    platform: str
    """As `Linux x86_64`."""
    cpu: str
    cpu_cores: int
    """Cores that this process may use."""
    cpu_features: tuple[str, ...]
    """Instruction sets that matter to kernels: `avx2`, `avx512_vnni`."""
    memory_mib: int
    """Memory of the host."""
    libraries: dict[str, str] = field(default_factory=dict)
    gpu: str | None = None
    compute_capability: str | None = None
    gpu_memory_mib: int | None = None
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA the driver serves."""
    container: str | None = None
    """`docker`, `podman`, `kubernetes` or `container`; None outside one."""

    @classmethod
    def detect(cls, gpu: int | None = None) -> Environment:
        """This machine; with a number, that GPU's facts too."""
        return replace(_detect(gpu), libraries=library_versions())  # what is loaded may have changed since


def library_versions() -> dict[str, str]:
    """Versions by distribution. Where two distributions share a module (`onnxruntime`, `onnxruntime-gpu`) and it is
    loaded, only the one whose version the module reports is listed: the other's files were overwritten."""
    found = {name: version for name in _LIBRARIES if (version := distribution_version(name))}
    loaded = getattr(sys.modules.get("onnxruntime"), "__version__", None)
    family = [name for name in found if name in _ONNXRUNTIME]
    if loaded is not None and len(family) > 1:
        for name in family:
            if found[name] != loaded:
                del found[name]
    return found


@cache
def _detect(gpu: int | None) -> Environment:
    cpu = info.cpu()
    board = info.gpu(gpu) if gpu is not None else None
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Environment(
        tool=distribution_version("trt-engine") or "unknown",
        python=".".join(map(str, sys.version_info[:3])),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu.name,
        cpu_cores=cpu.cores,
        cpu_features=cpu.features,
        memory_mib=pages * size >> 20,
        gpu=board.name if board else None,
        compute_capability=board.compute_capability if board else None,
        gpu_memory_mib=board.memory_mib if board else None,
        driver=board.driver if board else None,
        cuda=info.cuda_version() if board else None,
        container=info.in_container(),
    )

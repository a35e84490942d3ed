"""Facts about each TensorRT, 8.6 to 11.4: its GPUs, its CUDA, and the compatibility of its plans.

Every fact names its source; without a source the answer is None, which means "unknown", never "yes".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Any


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """A TensorRT version of up to four parts: major, minor, patch, build. A missing part is not zero."""

    parts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """The version `text` begins with: `11.4.0.106`, `10.16.1`, `10.16.1.11-1+cuda13.0`; None for anything else."""
        found = re.match(r"\s*[vV]?(\d+(?:\.\d+){0,3})(?!\d)", text)
        return cls(tuple(int(part) for part in found[1].split("."))) if found else None

    @classmethod
    def from_number(cls, number: int, build: int | None = None) -> Version:
        """From the number TensorRT writes into banners and headers: 101601 is 10.16.1, and 8601 is 8.6.1."""
        if number >= 100_000:
            parts = (number // 10_000, number // 100 % 100, number % 100)
        else:
            parts = (number // 1000, number // 100 % 10, number % 100)
        return cls(parts if build is None else (*parts, build))

    @property
    def major(self) -> int:
        return self.parts[0]

    @property
    def release(self) -> Version:
        """Without the build number, which differs between distributions of one release."""
        return Version(self.parts[:3])

    def __str__(self) -> str:
        return ".".join(map(str, self.parts))

    def __lt__(self, other: Any) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return self._padded() < other._padded()

    def _padded(self) -> tuple[int, ...]:
        return self.parts + (0,) * (4 - len(self.parts))


def same_release(one: Version, other: Version) -> bool:
    """True if all parts present in both are equal; the build number counts if both have it."""
    shared = min(len(one.parts), len(other.parts))
    return one.parts[:shared] == other.parts[:shared]


def can_load_plan(loader: Version, built: Version, *, version_compatible: bool = False) -> bool:
    """Whether the TensorRT `here` loads a plan of `built`.

    All four parts must agree. A version-compatible plan runs on later versions too, across majors from 8 to 10 and from 10
    to 11 only; never on an earlier one, and not before 8.6. Sources: Engine Compatibility 11.1.0, Version
    Compatibility 10.16.1, Support Matrix 11.4.1.
    """
    if same_release(loader, built):
        return True
    if not version_compatible or loader < built or built < Version((8, 6)):
        return False
    return loader.major == built.major or (built.major, loader.major) in ((8, 10), (10, 11))


# ------------------------------------------------------------------------------------------------ GPUs


@dataclass(frozen=True, slots=True)
class Architecture:
    """Compute capabilities of one generation, and the TensorRT versions that run on it."""

    name: str
    capabilities: tuple[tuple[int, int], ...]
    first_version: Version | None
    """The first version that runs on it; None: versions before `seen` are unknown."""
    documented_since: Version
    """The version from which support is documented."""
    removed_in: Version | None
    """The first version that no longer runs on it."""
    source: str


_OLDEST = Version((8, 6))
_TURING_SOURCE = "Prerequisites 10.16.0 to 11.4.0 (Turing or later)"
ARCHITECTURES = (
    Architecture("Kepler", ((3, 0), (3, 5), (3, 7)), None, _OLDEST, _OLDEST, "Release Notes 8.5.2"),
    Architecture("Maxwell", ((5, 0), (5, 2), (5, 3)), None, _OLDEST, Version((9, 0)), "Release Notes 8.5.2"),
    Architecture(
        "Pascal",
        ((6, 0), (6, 1), (6, 2)),
        None,
        _OLDEST,
        Version((10, 0)),
        "Support Matrix 10.1.0; NVIDIA/TensorRT#3826",
    ),
    Architecture("Volta", ((7, 0),), None, _OLDEST, Version((10, 5)), "Release Notes 10.4.0 and 10.5.0"),
    Architecture("Turing", ((7, 5),), None, _OLDEST, None, _TURING_SOURCE),
    Architecture("Ampere", ((8, 0), (8, 6), (8, 7)), None, _OLDEST, None, _TURING_SOURCE),
    Architecture("Ada", ((8, 9),), None, Version((10, 0)), None, _TURING_SOURCE),
    Architecture("Hopper", ((9, 0),), None, Version((10, 0)), None, f"Support Matrix 10.1.0; {_TURING_SOURCE}"),
    # B200 (10.0) is called early access in 10.8
    Architecture("Blackwell", ((10, 0), (12, 0)), Version((10, 8)), Version((10, 8)), None, "Release Notes 10.8.0"),
    Architecture("Blackwell (Thor)", ((11, 0),), Version((10, 8)), Version((10, 13)), None, "NVIDIA/TensorRT#4590"),
    Architecture("Blackwell", ((10, 3), (12, 1)), Version((10, 8)), Version((10, 16)), None, _TURING_SOURCE),
)


def parse_capability(text: str) -> tuple[int, int] | None:
    """`9.0`, `sm_90` or `sm_90a` as (9, 0); None for anything else."""
    found = re.fullmatch(r"(\d+)\.(\d)|(?:sm_?)(\d+)(\d)[a-z]?", text.strip().lower())
    return (int(found[1] or found[3]), int(found[2] or found[4])) if found else None


def find_architecture(capability: tuple[int, int]) -> Architecture | None:
    """The generation with that compute capability; None for one not in the table."""
    return next((row for row in ARCHITECTURES if capability in row.capabilities), None)


def supports(version: Version, capability: tuple[int, int]) -> bool | None:
    """Whether that TensorRT runs on GPUs of that compute capability; None if undocumented."""
    row = find_architecture(capability)
    if row is None or version < _OLDEST:
        return None
    if row.removed_in is not None and version >= row.removed_in:
        return False
    if row.first_version is not None and version < row.first_version:
        return False
    return True if version >= row.documented_since else None


def supported_versions_text(capability: tuple[int, int]) -> str | None:
    """The TensorRT versions a GPU of that compute capability can have, as text: `before 10.5`, `10.8 or newer`."""
    row = find_architecture(capability)
    if row is None:
        return None
    return f"before {row.removed_in}" if row.removed_in is not None else f"{row.documented_since} or newer"


# ------------------------------------------------------------------------------------------------ precision

COMPUTE_CAPABILITY: dict[str, tuple[int, int]] = {
    "fp32": (0, 0),
    "tf32": (8, 0),
    "fp16": (5, 3),
    "bf16": (8, 0),
    "int8": (6, 1),
    "fp8": (8, 9),
    "int4": (7, 5),
    "nvfp4": (10, 0),
    "mxfp8": (10, 0),
}
"""The lowest compute capability with hardware for a precision.

Sources: Quantization (Torch-TensorRT), Transformer Engine's matrix of types, TensorRT-RTX quantized types; TensorRT's own
matrix is interactive and could not be read.
"""
RTX_COMPUTE_CAPABILITY: dict[str, tuple[int, int]] = {
    "fp32": (7, 5),
    "tf32": (8, 0),
    "fp16": (7, 5),
    "bf16": (8, 0),
    "int8": (7, 5),
    "fp8": (8, 9),
    "int4": (8, 0),
    "nvfp4": (12, 0),
    "mxfp8": (8, 9),
}
"""The lowest compute capability TensorRT-RTX builds a precision for. Source: graphs of each, built by 1.7.1 for every GPU it
knows. For 7.5 it multiplies no matrices in FP32. MXFP8 is kept as FP8 with scales, beside FP32 weights."""
_PRECISION_SINCE = {  # the bindings' DataType members, release by release, from 10.0.1 on
    "bf16": Version((10, 0)),
    "int4": Version((10, 0)),
    "fp8": Version((10, 0)),
    "nvfp4": Version((10, 8)),
    "mxfp8": Version((10, 12)),
}


def precision_since(precision: str) -> Version | None:
    """The first TensorRT known to have that data type; None for those every version has."""
    return _PRECISION_SINCE.get(precision)


# ------------------------------------------------------------------------------------------------ CUDA and the driver


def cuda_majors(version: Version) -> tuple[int, ...]:
    """The CUDA majors there are packages for. Sources: Support Matrix 8.6.1, release 10.13.2, Prerequisites 11.4.0."""
    if version < Version((8, 6)):
        return ()
    if version < Version((10, 13, 2)):
        return (11, 12)
    return (12, 13)


def min_driver_branch(version: Version | None, cuda: int) -> int | None:
    """The oldest Linux driver branch for that TensorRT built for that CUDA major; None if undocumented.

    Sources: Prerequisites 10.16.0 to 11.4.0 (535 and 580); CUDA Release Notes, minor version compatibility (450, 525, 580).
    """
    if cuda == 12 and version is not None and version >= Version((10, 16)):
        return 535
    return {11: 450, 12: 525, 13: 580}.get(cuda)


def driver_branch(driver: str | None) -> int | None:
    """580 of `580.159.03`; None if unknown."""
    first = (driver or "").split(".")[0]
    return int(first) if first.isdigit() else None


def lacking_driver_branch(driver: str | None, version: Version | None, cuda: int) -> int | None:
    """The driver branch that TensorRT for that CUDA needs, if the driver is older; None if it is not, or unknown."""
    branch, floor = driver_branch(driver), min_driver_branch(version, cuda)
    return floor if branch is not None and floor is not None and branch < floor else None


def wheel_for_gpu(capability: tuple[int, int], driver: str | None = None, cuda: int | None = None) -> str | None:
    """The quoted pip requirement of a TensorRT that runs on GPUs of that compute capability; None if unknown.

    For the CUDA of the installed wheels (`cuda`), else for 13; never for a CUDA the driver does not support.
    """
    row = find_architecture(capability)
    if row is None or (row.removed_in is not None and row.removed_in <= _OLDEST):
        return None
    if row.removed_in is not None:
        return (
            f'"tensorrt<{row.removed_in}"'
            if row.removed_in <= Version((10, 0))
            else f'"tensorrt-cu12<{row.removed_in}"'
        )
    cuda = 12 if cuda == 12 or lacking_driver_branch(driver, None, 13) else 13
    return f'"tensorrt-cu{cuda}>={max(row.documented_since, Version((10, 13, 2))) if cuda == 13 else row.documented_since}"'


def rtx_wheel_spec(version: Version, driver: str | None = None, cuda: int | None = None) -> str:
    """The quoted pip requirement of that release of TensorRT-RTX: for the CUDA of the installed wheels (`cuda`) if any, else
    for CUDA 13, else 12; never for one the driver does not support."""
    cuda = 12 if cuda == 12 or lacking_driver_branch(driver, version, 13) else 13
    return f'"tensorrt-rtx-cu{cuda}=={version.release}.*"'


def wheel_spec(version: Version, driver: str | None = None, cuda: int | None = None) -> str:
    """The quoted pip requirement of that release: for the CUDA of the installed wheels (`cuda`) if any, else for CUDA 13,
    else 12; never for one the driver does not support."""
    if version < Version((10,)):
        return f'"tensorrt=={version.release}"'
    majors = [major for major in cuda_majors(version) if major >= 12]
    cuda = cuda if cuda in majors else max(majors, default=12)
    if cuda == 13 and lacking_driver_branch(driver, version, 13):
        cuda = 12
    return f'"tensorrt-cu{cuda}=={version.release}.*"'

"""What a payload is by its content: a plan of TensorRT or TensorRT-RTX by its first bytes, a package of compiled code."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trt_engine.atomic_io import open_regular
from trt_engine.errors import EngineError

PlanProduct = Literal["TensorRT", "TensorRT-RTX"]
PLAN_BACKENDS: dict[PlanProduct, str] = {"TensorRT": "tensorrt", "TensorRT-RTX": "tensorrt-rtx"}
"""The backend that builds and runs the plans of a library; `Requirements.library` of their passports."""
_MAGIC: dict[bytes, PlanProduct] = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX"}
_HEADER_NBYTES: dict[PlanProduct, int] = {"TensorRT": 28, "TensorRT-RTX": 64}
PLAN_HEADER_NBYTES = max(_HEADER_NBYTES.values())
_GPU_BITS = {0x01: "7.5", 0x02: "8.0", 0x04: "8.6", 0x08: "8.9", 0x10: "12.0", 0x20: "12.1"}
_LATER_GPUS = 0x40
NATIVE_PACKAGE = "a package of compiled code, and has no passport beside it"
"""What messages call a `.pt2` package where a model is expected; the hint for it."""
NATIVE_PACKAGE_HINT = "copy its passport (`.pt2.json`) along with it, or build it again from the model"
_LARGEST_DIRECTORY = 4 << 20
"""Bytes of an archive's directory up to which it is read: a package has a member for each kernel."""


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What the first bytes of a plan state. No format is promised for either library.

    A plan of TensorRT begins with `ftrt`; bytes 4-7 are the serialization version, 24-27 major, minor, patch and build (8.6
    and later). Source: the reader behind trtexec's `--getPlanVersionOnly` in the public TensorRT repository.

    A plan of TensorRT-RTX begins with `vtrt` and has its version in the same four bytes; 8-15 are the serialization
    version, 16-23 the bytes of the whole file, 32-39 the GPUs, one bit each, 56-63 the bytes of weights. Source: plans of
    1.7.1 for each GPU; the weights equal the `Total Weights Memory` in its log.
    """

    serialization: int
    tensorrt: tuple[int, int, int, int]
    """The version of the library that wrote it."""
    product: PlanProduct = "TensorRT"
    file_nbytes: int | None = None
    """The bytes the whole file should have; None where the header does not state it."""
    gpu_bits: int = 0
    weight_nbytes: int | None = None

    @property
    def version(self) -> str:
        return ".".join(map(str, self.tensorrt))

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """The GPUs it was built for, ascending; empty where the header does not state them."""
        return tuple(name for bit, name in _GPU_BITS.items() if self.gpu_bits & bit)

    @property
    def has_ptx(self) -> bool:
        """True where it also has code that GPUs above 12.0 compile for themselves."""
        return bool(self.gpu_bits & _LATER_GPUS)

    @property
    def gpus(self) -> str:
        """The GPUs it was built for in words: `8.9 and 12.0`; empty where the header does not state them."""
        names = [*self.compute_capabilities, *(("later ones",) if self.has_ptx else ())]
        unknown = self.gpu_bits & ~(sum(_GPU_BITS) | _LATER_GPUS)
        names += [f"GPUs of the unknown bits {unknown:#x}"] if unknown else []
        return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)

    @property
    def title(self) -> str:
        """`plan of TensorRT-RTX 1.7.1.116 for 8.9 and 12.0`."""
        return f"plan of {self.product} {self.version}" + (f" for {self.gpus}" if self.gpus else "")

    def find_damage(self, nbytes: int) -> str | None:
        """Why a file of that many bytes is not the plan its header describes; None where nothing contradicts it."""
        if self.file_nbytes is None or self.file_nbytes == nbytes:
            return None
        how = "it was cut, or is still being written" if nbytes < self.file_nbytes else "something follows the plan"
        return f"its header states {self.file_nbytes} bytes and the file has {nbytes}: {how}"


def plan_product(head: bytes) -> PlanProduct | None:
    """The library whose plans begin with these four bytes."""
    return _MAGIC.get(head[:4])


def detect_plan(path: Path) -> PlanProduct | None:
    """The library whose plan the file begins as, also where it ends within the header."""
    with open_regular(path, error=EngineError) as file:
        return plan_product(file.read(4))


def plan_header(path: Path) -> PlanHeader | None:
    """The header of a plan of TensorRT or TensorRT-RTX; None for a file that does not begin as one or ends within it."""
    with open_regular(path, error=EngineError) as file:
        return parse_plan_header(file.read(PLAN_HEADER_NBYTES))


def parse_plan_header(head: bytes) -> PlanHeader | None:
    """`plan_header` of a file that begins with these bytes."""
    product = plan_product(head)
    if product is None or len(head) < _HEADER_NBYTES[product]:
        return None
    version = (head[24], head[25], head[26], head[27])
    if product == "TensorRT":
        return PlanHeader(_number(head[4:8]), version)
    return PlanHeader(
        _number(head[8:16]),
        version,
        product,
        file_nbytes=_number(head[16:24]),
        gpu_bits=_number(head[32:40]),
        weight_nbytes=_number(head[56:64]),
    )


def is_native_package(path: Path) -> bool:
    """True for a `.pt2` archive of compiled code (AOTInductor), which runs when it is loaded; False for a program of
    `torch.export`, an archive with the same suffix, and any other file."""
    with open_regular(path, error=EngineError) as file:
        file.seek(max(0, path.stat().st_size - (1 << 16) - 98))
        tail = file.read()
        end = tail.rfind(b"PK\x05\x06")  # 22 bytes and a comment; a ZIP64 record and its locator are 76 bytes before
        directory = _number(tail[end + 12 : end + 16])
        if end >= 76 and tail[end - 76 : end - 72] == b"PK\x06\x06":
            directory = _number(tail[end - 36 : end - 28])
        if end < 0 or directory > _LARGEST_DIRECTORY:
            return False
        try:
            with zipfile.ZipFile(file) as archive:
                return has_native_code(archive.namelist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return False


def has_native_code(names: Sequence[str]) -> bool:
    """Whether the members of a `.pt2` archive are those of a package of compiled code."""
    return any("/aotinductor/" in name and name.endswith(".so") for name in names)


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "little")

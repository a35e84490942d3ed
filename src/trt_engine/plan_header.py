"""What a payload is by its content: a plan of TensorRT or TensorRT-RTX by its first bytes, a package of compiled code."""

from __future__ import annotations

import re
import shlex
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from trt_engine.atomic_io import decode_json, open_regular
from trt_engine.errors import EngineError

PlanProduct = Literal["TensorRT", "TensorRT-RTX"]
PLAN_BACKENDS: dict[PlanProduct, str] = {"TensorRT": "tensorrt", "TensorRT-RTX": "tensorrt-rtx"}
"""The backend that builds and runs the plans of a library; `Requirements.library` of their passports."""
_MAGIC: dict[bytes, PlanProduct] = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX", b"ptrt": "TensorRT"}
_HEADER_NBYTES = {b"ftrt": 28, b"vtrt": 64, b"ptrt": 44}
_OLD_RECORD = b"\x02\x00\x01\x00"
"""Before each of the four numbers of the version in a plan that begins with `ptrt`."""
_SEARCHED_NBYTES = 4 << 20
_LARGEST_METADATA = 4 << 20
"""Bytes of an Ultralytics engine's JSON up to which it is read; the names of a thousand classes are 30 KB."""
_GPU_BITS = {0x01: "7.5", 0x02: "8.0", 0x04: "8.6", 0x08: "8.9", 0x10: "12.0", 0x20: "12.1"}
_LATER_GPUS = 0x40
NATIVE_PACKAGE = "a package of compiled code, and has no passport beside it"
"""What messages call a `.pt2` package where a model is expected; the hint for it."""
NATIVE_PACKAGE_HINT = "copy its passport (`.pt2.json`) along with it, or build it again from the model"
_LARGEST_DIRECTORY = 4 << 20
"""Bytes of an archive's directory up to which it is read: a package has a member for each kernel."""


@dataclass(frozen=True, slots=True)
class PlanContainer:
    """The metadata that another tool wrote before a plan, in one file.

    `yolo export format=engine` of Ultralytics writes the length of a JSON document (4 bytes, little-endian), the document
    and the plan. No library loads such a file until the first `offset` bytes are removed.
    """

    tool: str
    offset: int
    """Bytes before the plan."""
    metadata: dict[str, Any]
    """The JSON document as it is in the file: `task`, `names`, `imgsz`, `stride`, `batch` and others."""


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What the first bytes of a plan state. No format is promised for either library.

    A plan of TensorRT begins with `ftrt`; bytes 4-7 are the serialization version, 24-27 major, minor, patch and build (8.6
    and later). Source: the reader behind trtexec's `--getPlanVersionOnly` in the public TensorRT repository.

    A plan of TensorRT 8.0 or older begins with `ptrt`; the records `02 00 01 00 N` from byte 24 have its version since
    TensorRT 7. Source: public plans of 5 and 7.1.

    A plan of TensorRT-RTX begins with `vtrt` and has its version in the same four bytes; 8-15 are the serialization
    version, 16-23 the bytes of the whole file, 32-39 the GPUs, one bit each, 56-63 the bytes of weights. Source: plans of
    1.7.1 for each GPU; the weights equal the `Total Weights Memory` in its log.
    """

    serialization: int
    tensorrt: tuple[int, int, int, int]
    """The version of the library that wrote it; four zeros where the header does not state it."""
    product: PlanProduct = "TensorRT"
    file_nbytes: int | None = None
    """The bytes the whole file should have; None where the header does not state it."""
    gpu_bits: int = 0
    weight_nbytes: int | None = None
    is_old: bool = False
    """It begins with `ptrt`: no release from 8.2 on loads it."""
    container: PlanContainer | None = None
    """What stands before the plan in the file; None where the plan is the whole file."""

    @property
    def version(self) -> str:
        if any(self.tensorrt):
            return ".".join(map(str, self.tensorrt))
        return "6 or older" if self.is_old else "8.5 or older"

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
        inside = f" behind the metadata of {self.container.tool}" if self.container is not None else ""
        return f"plan of {self.product} {self.version}" + (f" for {self.gpus}" if self.gpus else "") + inside

    @property
    def offset(self) -> int:
        """Bytes of the file before the plan."""
        return self.container.offset if self.container is not None else 0

    def strip_command(self, path: Path) -> str | None:
        """The command that writes the plan alone beside the file; None where the plan is the whole file."""
        if self.container is None:
            return None
        target = path.with_name(f"{path.stem}.plan" if path.suffix != ".plan" else f"{path.stem}.stripped.plan")
        return f"tail -c +{self.offset + 1} {shlex.quote(str(path))} > {shlex.quote(str(target))}"

    def find_damage(self, nbytes: int) -> str | None:
        """Why a file of that many bytes is not the plan its header describes; None where nothing contradicts it."""
        nbytes -= self.offset
        if self.file_nbytes is None or self.file_nbytes == nbytes:
            return None
        how = "it was cut, or is still being written" if nbytes < self.file_nbytes else "something follows the plan"
        return f"its header states {self.file_nbytes} bytes and the file has {nbytes}: {how}"


def plan_product(head: bytes) -> PlanProduct | None:
    """The library whose plans begin with these four bytes."""
    return _MAGIC.get(head[:4])


def detect_plan(path: Path) -> PlanProduct | None:
    """The library whose plan the file begins as, behind a tool's metadata if any, also where it ends within the header."""
    with open_regular(path, error=EngineError) as file:
        container = _read_container(file)
        file.seek(container.offset if container is not None else 0)
        return plan_product(file.read(4))


def plan_header(path: Path) -> PlanHeader | None:
    """The header of a plan of TensorRT or TensorRT-RTX, also of one behind a tool's metadata; None for a file that has none
    or ends within it."""
    with open_regular(path, error=EngineError) as file:
        return read_plan_header(file)


def read_plan_header(file: BinaryIO) -> PlanHeader | None:
    """`plan_header` of an open file."""
    container = _read_container(file)
    file.seek(container.offset if container is not None else 0)
    head = file.read(max(_HEADER_NBYTES.values()))
    magic = head[:4]
    product = _MAGIC.get(magic)
    if product is None or len(head) < _HEADER_NBYTES[magic]:
        return None
    version = (head[24], head[25], head[26], head[27])
    if magic == b"ftrt":
        return PlanHeader(_number(head[4:8]), version, container=container)
    if magic == b"ptrt":
        records = [head[at : at + 5] for at in range(24, 44, 5)]
        known = all(record.startswith(_OLD_RECORD) for record in records)
        major, minor, patch, build = (record[4] if known else 0 for record in records)
        return PlanHeader(_number(head[4:8]), (major, minor, patch, build), is_old=True, container=container)
    return PlanHeader(
        _number(head[8:16]),
        version,
        product,
        file_nbytes=_number(head[16:24]),
        gpu_bits=_number(head[32:40]),
        weight_nbytes=_number(head[56:64]),
        container=container,
    )


def cut_container(path: Path) -> str | None:
    """The tool whose metadata the file begins with, where it ends before the plan behind it; None for any other file."""
    with open_regular(path, error=EngineError) as file:
        head = file.read(6)
        length, nbytes = _number(head[:4]), path.stat().st_size
        if head[4:] != b'{"' or not 2 <= length <= _LARGEST_METADATA or nbytes > 4 + length:
            return None
    return "Ultralytics"


def find_plan_inside(path: Path) -> tuple[int, PlanProduct] | None:
    """Where a plan begins within the first mebibytes of a file of an unknown format, and its library; None without one.

    The version behind the first bytes has to be one that the library has: four letters alone occur by chance.
    """
    with open_regular(path, error=EngineError) as file:
        raw = file.read(_SEARCHED_NBYTES)
    for found in re.finditer(rb"[fv]trt", raw):
        at, product = found.start(), _MAGIC[found.group()]
        major = raw[at + 24] if len(raw) > at + 28 else 0
        if (8 <= major <= 15 if product == "TensorRT" else 1 <= major <= 5) and raw[at + 6 : at + 8] == b"\0\0":
            return at, product
    return None


def _read_container(file: BinaryIO) -> PlanContainer | None:
    """The metadata of Ultralytics at the begin of the file."""
    file.seek(0)
    head = file.read(5)
    length = _number(head[:4])
    if head[4:] != b"{" or not 2 <= length <= _LARGEST_METADATA:
        return None
    file.seek(4)
    try:
        metadata = decode_json(file.read(length))
    except ValueError:  # msgspec's own error is one
        return None
    return PlanContainer("Ultralytics", 4 + length, metadata) if isinstance(metadata, dict) else None


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

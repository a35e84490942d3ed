"""Made-up machines: folders that look as TensorRT's packages leave them, GPUs that were never plugged in."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from trt_engine.config.profiles import parse_profile
from trt_engine.device.info import Gpu
from trt_engine.environment import Environment
from trt_engine.plan_header import PlanHeader
from trt_engine.records.diagnosis import Diagnosis
from trt_engine.records.passport import BuildInfo, DtypeShare, Passport, Payload, Precision, Requirements, Source
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.verbs.doctor.machine import Machine
from trt_engine.verbs.doctor.machine_checks import Check

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-1", 81559, "9.0", "580.159.03")
H200 = Gpu(0, "NVIDIA H200", "GPU-2", 143771, "9.0", "580.159.03")
L4 = Gpu(0, "NVIDIA L4", "GPU-3", 23034, "8.9", "580.159.03")
A10 = Gpu(0, "NVIDIA A10", "GPU-4", 23028, "8.6", "580.159.03")
V100 = Gpu(0, "Tesla V100-SXM2-16GB", "GPU-5", 16384, "7.0", "550.54.15")
RTX5090 = Gpu(0, "NVIDIA GeForce RTX 5090", "GPU-6", 32607, "12.0", "580.159.03")


def write(root: Path, path: str, content: str | bytes, mode: int = 0o644) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(mode)
    return file


def said(where: Machine, *looks: Check) -> dict[str, Diagnosis]:
    """What these checks find, by name; what does not work has a command for its fix."""
    every = [item for look in looks for item in look(where)]
    assert len({item.name for item in every}) == len(every)
    for item in every:
        is_typed = (item.fix or "").startswith(("pip ", "sudo ", "export ", "unset ", "docker ", "trt-engine "))
        assert item.status in ("ok", "note", "absent") or is_typed, item
    return {item.name: item for item in every}


def package(folder: Path, name: str, version: str) -> None:
    """What pip leaves behind of a distribution."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(folder, f"{name.replace('-', '_')}-{version}.dist-info/METADATA", text)


def library(root: Path, folder: str, version: str, name: str = "nvinfer") -> Path:
    """A library as Debian and tar files lay it: the file, and the link of its soname."""
    file = write(root, f"{folder}/lib{name}.so.{version}", "\x7fELF")
    link = file.with_name(f"lib{name}.so.{version.split('.')[0]}")
    link.symlink_to(file.name)
    return link


def wheels(folder: Path, version: str, cuda: int = 13) -> Path:
    """The bindings and libraries of pip: the libraries carry their soname alone."""
    for part in ("bindings", "libs"):
        package(folder, f"tensorrt-cu{cuda}-{part}", version)
    write(folder, f"tensorrt_libs/libnvinfer.so.{version.split('.')[0]}", "\x7fELF")
    write(folder, "tensorrt/__init__.py", f"__version__ = '{version}'\n")
    return folder


def debian(root: Path, version: str, *names: str) -> None:
    """Packages in dpkg's status file."""
    blocks = [f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n" for name in names]
    write(root, "var/lib/dpkg/status", "\n".join(blocks))


def trtexec(root: Path, number: str, build: int | None = None, folder: str = "usr/src/tensorrt/bin") -> Path:
    """A trtexec that prints its banner, or whatever else it is told to."""
    said = f"&&&& RUNNING TensorRT.trtexec [TensorRT v{number}]" if number.isdigit() else number
    said += f" [b{build}]" if build is not None else ""
    return write(root, f"{folder}/trtexec", f"#!/bin/sh\necho '{said} # trtexec --help'\n", 0o755)


def loader_cache(root: Path, *paths: str) -> None:
    """An `ld.so.cache` as ldconfig writes it."""
    strings, entries = b"", []
    start = 48 + 24 * len(paths)
    for path in paths:
        name = path.rpartition("/")[2].encode() + b"\0"
        entries.append((start + len(strings), start + len(strings) + len(name)))
        strings += name + path.encode() + b"\0"
    head = b"glibc-ld.so.cache1.1" + struct.pack("=II5I", len(paths), len(strings), 2, 0, 0, 0, 0)
    body = b"".join(struct.pack("=iIIIQ", 0x0303, key, value, 0, 0) for key, value in entries)
    write(root, "etc/ld.so.cache", head + body + strings)


def plan_bytes(version: tuple[int, int, int, int] = (10, 16, 1, 11), nbytes: int = 4096) -> bytes:
    return b"ftrt" + bytes(20) + bytes(version) + bytes(nbytes)


def ultralytics_bytes(plan: bytes, **metadata: Any) -> bytes:
    """The plan as `yolo export format=engine` writes it."""
    stated = {"task": "detect", "stride": 32, "batch": 1, "imgsz": [640, 480], "names": {"0": "person", "1": "bus"}}
    document = json.dumps(stated | metadata).encode()
    return struct.pack("<i", len(document)) + document + plan


def rtx_plan_bytes(
    version: tuple[int, int, int, int] = (1, 7, 1, 116), gpu_bits: int = 0x18, nbytes: int = 4096, weights: int = 1024
) -> bytes:
    """As TensorRT-RTX writes one, weights and code left blank; the default is for 8.9 and 12.0."""
    words = struct.pack("<4xQQ", 2, nbytes) + bytes(version) + b"vtrt" + struct.pack("<QQQQ", gpu_bits, 0, 0, weights)
    return b"vtrt" + words + bytes(nbytes - 64)


def rtx_header(version: tuple[int, int, int, int] = (1, 7, 1, 116), gpu_bits: int = 0x18) -> PlanHeader:
    return PlanHeader(2, version, "TensorRT-RTX", file_nbytes=4096, gpu_bits=gpu_bits, weight_nbytes=1024)


def rtx_wheels(folder: Path, version: str = "1.7.1.116", cuda: int = 13, libraries: str | None = None) -> Path:
    """The bindings and libraries of TensorRT-RTX as pip leaves them; `libraries` are those of another version."""
    for part, of in (("", version), ("-bindings", version), ("-libs", libraries or version)):
        package(folder, f"tensorrt-rtx-cu{cuda}{part}", of)
        info = f"tensorrt_rtx_cu{cuda}{part.replace('-', '_')}-{of}.dist-info"
        write(folder, f"{info}/licenses/LICENSE.txt", "a licence")
    for name in ("libtensorrt_rtx", "libtensorrt_onnxparser_rtx"):
        write(folder, f"tensorrt_rtx_libs/{name}.so.1", "\x7fELF")
    members = "__members__ = {'CURRENT': 1, 'SM89': 89, 'SM120': 120}"
    module = f"__version__ = '{version}'\nclass Builder: pass\nclass ComputeCapability:\n    {members}\n"
    write(folder, "tensorrt_rtx/__init__.py", module)
    return folder


def rtx_provider(folder: Path, libraries: str = "1.7.1", cuda: int = 13) -> Path:
    """ONNX Runtime's provider for TensorRT-RTX, with libraries of its own."""
    package(folder, f"onnxruntime-ep-nv-tensorrt-rtx-cu{cuda}", "0.5.0")
    library(folder, "onnxruntime_ep_nv_tensorrt_rtx", libraries, "tensorrt_rtx")
    return folder


def header(version: tuple[int, int, int, int] = (10, 16, 1, 11)) -> PlanHeader:
    return PlanHeader(0, version)


def environment(container: str | None = None) -> Environment:
    return Environment("0.1.0", "3.11.7", "Linux x86_64", "a processor", 2, (), 4096, container=container)


def passport(
    version: str = "10.16.1.11",
    board: Gpu | None = H100,
    *,
    backend: str = "tensorrt",
    container: str | None = None,
    found: tuple[str, ...] = ("fp16",),
    options: dict[str, str] | None = None,
    command: str = "trt-engine build model.onnx --backend tensorrt",
    payload: tuple[Payload, ...] = (Payload("model.engine", 1, "sha256:0"),),
    **needs: Any,
) -> Passport:
    """The passport of a plan, built on `board`."""
    here = Requirements(
        "tensorrt",
        version,
        compute_capability=board.compute_capability if board else None,
        gpu=board.name if board else None,
        **needs,
    )
    return Passport(
        schema="trt-engine/passport",
        schema_version=1,
        backend=backend,
        payload=payload,
        model=Source("model", "sha256:1", 17, "model.onnx"),
        signature=Signature((TensorSpec("x", "float32", (-1, 3)),), (TensorSpec("y", "float32", (-1, 2)),)),
        profiles=(parse_profile("x:1x3,2x3,4x3"),),
        precision=Precision("fp16", {name: DtypeShare(1.0, 1.0) for name in found}),
        device="cuda:0",
        build=BuildInfo(command, {"options": options or {}}, 1.0, f"tensorrt {version}"),
        environment=environment(container),
        requirements=here,
    )


def elf_bytes(*needed: str, order: str = "<") -> bytes:
    """A 64-bit ELF library that says which libraries it needs, and holds nothing else."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    offsets = [strings.index(b"\0" + name.encode() + b"\0") + 1 for name in needed]
    dynamic_at = 64 + 2 * 56
    entries = [
        *((1, at) for at in offsets),
        (5, 0x10000 + dynamic_at + 16 * (len(needed) + 3)),
        (10, len(strings)),
        (0, 0),
    ]
    dynamic = b"".join(struct.pack(f"{order}QQ", *entry) for entry in entries)
    nbytes = dynamic_at + len(dynamic) + len(strings)
    ident = b"\x7fELF\x02" + (b"\x01" if order == "<" else b"\x02") + b"\x01" + bytes(9)
    head = ident + struct.pack(f"{order}HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack(f"{order}IIQQQQQQ", 1, 5, 0, 0x10000, 0x10000, nbytes, nbytes, 4096)
    where = 0x10000 + dynamic_at
    second = struct.pack(f"{order}IIQQQQQQ", 2, 6, dynamic_at, where, where, len(dynamic), len(dynamic), 8)
    return head + load + second + dynamic + strings


def onnxruntime_gpu(folder: Path, tensorrt: int | None = 10, cuda: int = 12) -> Path:
    """The providers of `onnxruntime-gpu`, with what they link."""
    capi = "onnxruntime/capi/libonnxruntime_providers"
    if tensorrt is not None:
        links = (f"libnvinfer.so.{tensorrt}", f"libnvonnxparser.so.{tensorrt}", f"libcudart.so.{cuda}", "libc.so.6")
        write(folder, f"{capi}_tensorrt.so", elf_bytes(*links))
    write(folder, f"{capi}_cuda.so", elf_bytes(f"libcublasLt.so.{cuda}", f"libcudart.so.{cuda}", "libc.so.6"))
    return folder


def machine(root: Path, board: Gpu | None = H100, library_path: str = "", **variables: str) -> Machine:
    """The machine of the files under `root`."""
    return Machine(
        root=root,
        packages=(str(root / "site"),),
        path="",
        working_folder=root,
        store=root / "store",
        library_path=library_path,
        variables=variables,
        boards=(board,) if board else (),
    )

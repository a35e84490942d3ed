"""Run as a program: import one library and say, as one line of JSON, what it is and what it can do here.

A process of its own, because a broken library may end the process that imports it, and because nothing of
trt-engine is needed: `python -P probe.py onnxruntime`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

MARK = "probe: "
REMOTE = ("AzureExecutionProvider",)
"""Providers in every wheel that run nothing here."""


def field(number: int, value: int | bytes) -> bytes:
    """One protobuf field: a varint, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def identity(opset: int, ir_version: int) -> bytes:
    """An ONNX model of one `Identity`, written by hand so that `onnx` is not needed. Numbers: onnx.proto."""
    one = field(1, field(1, 1))  # TensorShapeProto.dim.dim_value = 1
    tensor = field(2, field(1, field(1, 1) + field(2, one)))  # TypeProto.tensor_type: float32, that shape
    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = (
        field(1, node) + field(2, b"probe") + field(11, field(1, b"x") + tensor) + field(12, field(1, b"y") + tensor)
    )
    return field(1, ir_version) + field(7, graph) + field(8, field(1, b"") + field(2, opset))


def limit(ort: Any, pattern: str, opset: int, ir_version: int) -> int | None:
    """The number in the library's own complaint about a model that is too new; None when it takes it."""
    try:
        ort.InferenceSession(identity(opset, ir_version), providers=["CPUExecutionProvider"])
    except Exception as error:
        found = re.search(pattern, str(error))
        return int(found[1]) if found else None
    return None


def provider(ort: Any, name: str, folder: Path) -> dict[str, Any]:
    """Whether a session really runs on that provider, and the loader's reason when it does not."""
    library = folder / "capi" / f"libonnxruntime_providers_{name.removesuffix('ExecutionProvider').lower()}.so"
    reason = None
    if library.exists():
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(folder / "capi" / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            reason = str(error).replace(f"{folder}/", "")
    try:
        session = ort.InferenceSession(identity(13, 7), providers=[name])
        used = session.get_providers()
    except Exception as error:
        return {"runs": False, "reason": reason or str(error).splitlines()[0]}
    runs = name in used
    return {"runs": runs, "reason": None if runs else reason or f"a session on it runs on {', '.join(used)}"}


def onnxruntime() -> dict[str, Any]:
    """What ONNX Runtime is, which of its providers run, and the newest model it reads."""
    ort = importlib.import_module("onnxruntime")
    file = getattr(ort, "__file__", None)
    told: dict[str, Any] = {
        "version": getattr(ort, "__version__", None),
        "hollow": not hasattr(ort, "InferenceSession"),
        "providers": {},
    }
    if told["hollow"] or file is None:
        return told | {"hollow": True}
    with contextlib.suppress(Exception):
        ort.set_default_logger_severity(4)
    if (Path(file).parent / "capi" / "libonnxruntime_providers_cuda.so").exists():
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()  # CUDA's libraries lie where pip put them, which is no place the loader looks at
    for name in ort.get_available_providers():
        if name not in REMOTE:
            told["providers"][name] = provider(ort, name, Path(file).parent)
    told["opset"] = limit(ort, r"till opset (\d+)", 99, 7)
    told["ir_version"] = limit(ort, r"max supported IR version: (\d+)", 13, 99)
    return told


def onnx() -> dict[str, Any]:
    """The newest operator set and file version onnx writes."""
    module = importlib.import_module("onnx")
    return {
        "version": module.__version__,
        "opset": importlib.import_module("onnx.defs").onnx_opset_version(),
        "ir_version": int(module.IR_VERSION),
    }


def other(name: str) -> dict[str, Any]:
    """Any other library: that it imports, and its version."""
    return {"version": getattr(importlib.import_module(name), "__version__", None)}


def main() -> None:
    name = sys.argv[1]
    try:
        told = {"onnxruntime": onnxruntime, "onnx": onnx}.get(name, lambda: other(name))()
    except BaseException as error:  # whatever a broken library raises is what we came to hear
        told = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{MARK}{json.dumps(told)}\n")


if __name__ == "__main__":
    main()

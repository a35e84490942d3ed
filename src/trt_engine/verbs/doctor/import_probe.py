"""Import one library and print its version and capabilities as one line of JSON.

Runs as a separate program without trt-engine, because importing a broken library may crash:
`python -P import_probe.py onnxruntime`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

RESULT_MARK = "probe: "
REMOTE = ("AzureExecutionProvider",)
"""Remote providers, in every wheel."""
PLUGINS = {"NvTensorRTRTXExecutionProvider": "onnxruntime_ep_nv_tensorrt_rtx"}
"""Providers in separate packages, with their module."""


def field(number: int, value: int | bytes) -> bytes:
    """Encode one protobuf field: a varint, or length-delimited bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def identity_model(opset: int, ir_version: int) -> bytes:
    """Encode an ONNX model with one `Identity`, without `onnx`. Field numbers: onnx.proto."""
    one = field(1, field(1, 1))  # TensorShapeProto.dim.dim_value = 1
    tensor = field(2, field(1, field(1, 1) + field(2, one)))  # TypeProto.tensor_type: float32, that shape
    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = (
        field(1, node) + field(2, b"probe") + field(11, field(1, b"x") + tensor) + field(12, field(1, b"y") + tensor)
    )
    return field(1, ir_version) + field(7, graph) + field(8, field(1, b"") + field(2, opset))


def version_limit(ort: Any, pattern: str, opset: int, ir_version: int) -> int | None:
    """The number in ONNX Runtime's error for a too new model; None when it loads."""
    try:
        ort.InferenceSession(identity_model(opset, ir_version), providers=["CPUExecutionProvider"])
    except Exception as error:
        found = re.search(pattern, str(error))
        return int(found[1]) if found else None
    return None


def provider_status(ort: Any, name: str, folder: Path) -> dict[str, Any]:
    """Whether a session runs on the provider, and the loader error when it does not."""
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
        session = ort.InferenceSession(identity_model(13, 7), providers=[name])
        used = session.get_providers()
    except Exception as error:
        return {"runs": False, "reason": reason or str(error).splitlines()[0]}
    runs = name in used
    return {"runs": runs, "reason": None if runs else reason or f"a session on it runs on {', '.join(used)}"}


def plugin_status(ort: Any, name: str, module: str) -> dict[str, Any]:
    """Whether a session runs on the provider of a plugin package, and the reason when it does not."""
    try:
        ort.register_execution_provider_library(name, importlib.import_module(module).get_library_path())
        devices = [item for item in ort.get_ep_devices() if item.ep_name == name]
        if not devices:
            return {"runs": False, "reason": "no device: it needs an RTX GPU and its driver"}
        options = ort.SessionOptions()
        options.add_provider_for_devices(devices[:1], {})
        used = ort.InferenceSession(identity_model(13, 7), options).get_providers()
    except Exception as error:
        text = str(error).splitlines()[0]
        return {"runs": False, "reason": text.partition(" with error: ")[2] or text}
    runs = name in used
    return {"runs": runs, "reason": None if runs else f"a session on it runs on {', '.join(used)}"}


def onnxruntime_info() -> dict[str, Any]:
    """ONNX Runtime version, state of its providers, newest opset and IR version."""
    ort = importlib.import_module("onnxruntime")
    file = getattr(ort, "__file__", None)
    report: dict[str, Any] = {
        "version": getattr(ort, "__version__", None),
        "hollow": not hasattr(ort, "InferenceSession"),
        "providers": {},
    }
    if report["hollow"] or file is None:
        return report | {"hollow": True}
    with contextlib.suppress(Exception):
        ort.set_default_logger_severity(4)
    if (Path(file).parent / "capi" / "libonnxruntime_providers_cuda.so").exists():
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()  # pip installs CUDA libraries outside the loader's path
    for name in ort.get_available_providers():
        if name not in REMOTE:
            report["providers"][name] = provider_status(ort, name, Path(file).parent)
    for name, module in PLUGINS.items():
        if importlib.util.find_spec(module) is not None:
            report["providers"][name] = plugin_status(ort, name, module)
    report["opset"] = version_limit(ort, r"till opset (\d+)", 99, 7)
    report["ir_version"] = version_limit(ort, r"max supported IR version: (\d+)", 13, 99)
    return report


def onnx_info() -> dict[str, Any]:
    """onnx version, newest opset and IR version."""
    module = importlib.import_module("onnx")
    return {
        "version": module.__version__,
        "opset": importlib.import_module("onnx.defs").onnx_opset_version(),
        "ir_version": int(module.IR_VERSION),
    }


def tensorrt_rtx_info() -> dict[str, Any]:
    """TensorRT-RTX version, version of the loaded library, and supported GPUs."""
    module = importlib.import_module("tensorrt_rtx")
    report: dict[str, Any] = {
        "version": getattr(module, "__version__", None),
        "hollow": not hasattr(module, "Builder"),
        "library": None,
        "gpus": [],
    }
    with contextlib.suppress(OSError, AttributeError):  # library not loaded, or without version
        major = str(report["version"]).partition(".")[0]
        library = ctypes.CDLL(f"libtensorrt_rtx.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        number = int(library.getInferLibVersion())
        report["library"] = f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
    for name in getattr(getattr(module, "ComputeCapability", None), "__members__", ()):
        if found := re.fullmatch(r"SM(\d+)(\d)", name):
            report["gpus"].append(f"{found[1]}.{found[2]}")
    return report


def library_info(name: str) -> dict[str, Any]:
    """Version of any other library."""
    return {"version": getattr(importlib.import_module(name), "__version__", None)}


def main() -> None:
    name = sys.argv[1]
    try:
        report = {"onnxruntime": onnxruntime_info, "onnx": onnx_info, "tensorrt_rtx": tensorrt_rtx_info}.get(
            name, lambda: library_info(name)
        )()
    except BaseException as error:  # any error of a broken library is the result
        report = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{RESULT_MARK}{json.dumps(report)}\n")


if __name__ == "__main__":
    main()

"""Plugin execution providers of ONNX Runtime: registered once per process, then selected by device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as state

from trt_engine.environment import distribution_version
from trt_engine.errors import SetupError, UsageError
from trt_engine.format import library_reason
from trt_engine.tensors import suggest

MIN_ONNXRUNTIME = (1, 25)
"""The first ONNX Runtime that binds arrays on plugin devices in Python."""
_NVIDIA = 0x10DE
"""NVIDIA's PCI vendor id."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin provider: package, settings and hints."""

    provider: str
    """ONNX Runtime's provider name."""
    module: str
    packages: tuple[str, ...]
    extra: str
    """The extra of trt-engine that installs the first of `packages`."""
    library: str
    """The inference library in its package, with `getInferLibVersion`."""
    product: str
    gpus: str
    """Supported compute capabilities."""
    cache_path: str
    """The setting for its kernel cache folder."""
    capture: Mapping[str, str]
    switches: tuple[str, ...]
    integers: tuple[str, ...]
    """Settings that take a whole number from 0 on."""
    strings: tuple[str, ...]
    withheld: Mapping[str, str]
    """Settings not available to users, each with a hint."""

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(sorted((*self.switches, *self.integers, *self.strings)))


_COMPILES_AHEAD = "`trt-engine build --backend tensorrt-rtx --gpus sm89` builds for a GPU that is not here"
_STREAMS = "leave it out: ONNX Runtime makes the streams"
PLUGINS: Mapping[str, Plugin] = {
    # names and types from tensorrt_rtx_provider_options.h in the package, release 0.5.0
    "tensorrt-rtx": Plugin(
        provider="NvTensorRTRTXExecutionProvider",
        module="onnxruntime_ep_nv_tensorrt_rtx",
        packages=("onnxruntime-ep-nv-tensorrt-rtx-cu13", "onnxruntime-ep-nv-tensorrt-rtx-cu12"),
        extra="ort-rtx",
        library="libtensorrt_rtx.so",
        product="TensorRT-RTX",
        gpus="8.6, 8.9, and from 12.0 on",
        cache_path="nv_runtime_cache_path",
        capture={"enable_cuda_graph": "1"},
        switches=(
            "nv_detailed_build_log", "nv_dump_subgraphs", "nv_enable_profiling", "nv_multi_profile_enable",
            "nv_persistent_context_memory", "nv_use_external_data_initializer", "nv_use_sync_gpu_allocator",
        ),
        integers=("nv_max_shared_mem_size", "nv_max_workspace_size", "nv_multi_rotary_cache_concat_offset"),
        strings=(
            "nv_op_types_to_exclude", "nv_profile_max_shapes", "nv_profile_min_shapes", "nv_profile_opt_shapes",
            "nv_profiling_output_file", "nv_runtime_cache_path", "nv_weight_streaming_budget",
        ),
        withheld={
            "enable_cuda_graph": "`trt-engine bench` captures a graph by itself; `--no-graph` leaves it out",
            "device_id": "`--device cuda:1` names the GPU",
            "user_compute_stream": _STREAMS,
            "has_user_compute_stream": _STREAMS,
            "user_aux_stream_array": _STREAMS,
            "nv_length_aux_stream_array": _STREAMS,
            "VkExternalComputeQueueDataParamsNV_data": "leave it out: it is an address for graphics programs",
            "nv_target_sm": _COMPILES_AHEAD,
            "nv_weight_stripped_engine_enable_experimental": _COMPILES_AHEAD,
        },
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ settings

_SWITCH_VALUES = {"on": "1", "yes": "1", "true": "1", "1": "1", "off": "0", "no": "0", "false": "0", "0": "0"}


def check_settings(name: str, given: Mapping[str, str]) -> None:
    """`UsageError` for unknown settings (the plugin would ignore them), withheld settings and invalid values."""
    plugin = PLUGINS[name]
    for setting, value in given.items():
        if setting in plugin.withheld:
            raise UsageError(f"`-O {name}.{setting}` is not offered", hint=plugin.withheld[setting])
        if setting not in plugin.settings:
            raise UsageError(
                f"the provider `{name}` has no setting `{setting}`", hint=suggest(setting, list(plugin.settings))
            )
        if setting in plugin.switches and value.strip().lower() not in _SWITCH_VALUES:
            raise UsageError(
                f"cannot read `{value}` as on or off", hint=f"`-O {name}.{setting}=on` or `-O {name}.{setting}=off`"
            )
        if setting in plugin.integers and not value.strip().isdecimal():
            raise UsageError(
                f"`-O {name}.{setting}` is `{value}`, expected a whole number from 0 on",
                hint=f"0 leaves it to {plugin.product}",
            )


def format_settings(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """The settings in the plugin's format: switches are `0` and `1`."""
    switches = (*PLUGINS[name].switches, *PLUGINS[name].capture)
    return {
        setting: _SWITCH_VALUES.get(value.strip().lower(), value) if setting in switches else value
        for setting, value in given.items()
    }


# ------------------------------------------------------------------------------------------------ package and devices


def installed(name: str) -> bool:
    """Whether the plugin's package is installed; imports nothing."""
    return importlib.util.find_spec(PLUGINS[name].module) is not None


def versions(name: str) -> str | None:
    """Versions of the package and its loaded library: `0.5.0, TensorRT-RTX 1.7.1`; None without a package."""
    plugin = PLUGINS[name]
    found = next((version for package in plugin.packages if (version := distribution_version(package))), None)
    if found is None:
        return None
    library = _library_version(plugin) if _registration_errors.get(name, "not registered") is None else None
    return f"{found}, {plugin.product} {library}" if library else found


def _library_version(plugin: Plugin) -> str | None:
    """The library's version: 10701 as `1.7.1`."""
    module = importlib.import_module(plugin.module)
    for path in sorted(Path(str(module.__file__)).parent.glob(f"{plugin.library}*")):
        with contextlib.suppress(OSError, AttributeError):
            number = int(ctypes.CDLL(str(path)).getInferLibVersion())
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return None


_register_lock = threading.Lock()
_registration_errors: dict[str, str | None] = {}
"""Registration error by plugin, None on success. A process registers a library once."""


def unusable_reason(name: str) -> str | None:
    """Why the plugin cannot be used: its library does not register, or it offers no device; None if it can.

    The first call registers the library.
    """
    with _register_lock:
        if name not in _registration_errors:
            _registration_errors[name] = _register(PLUGINS[name])
    return _registration_errors[name] or (None if _devices(PLUGINS[name]) else _no_device_reason(PLUGINS[name]))


def _register(plugin: Plugin) -> str | None:
    here = tuple(int(part) for part in re.findall(r"\d+", ort.__version__)[:2])
    if here < MIN_ONNXRUNTIME:
        return f"it needs onnxruntime {MIN_ONNXRUNTIME[0]}.{MIN_ONNXRUNTIME[1]} or later, here is {ort.__version__}"
    if _devices(plugin):  # registered by the host program
        return None
    try:
        with _preserve_library_path():
            package = importlib.import_module(plugin.module)
        ort.register_execution_provider_library(plugin.provider, package.get_library_path())
    except Exception as error:  # no common base, and a broken package may raise anything
        if "already registered" in str(error):
            return None
        text = library_reason(error)
        return text.partition(" with error: ")[2] or text
    return None


@contextlib.contextmanager
def _preserve_library_path() -> Iterator[None]:
    """Undo the package's change of `LD_LIBRARY_PATH`, which would make child processes load its TensorRT-RTX library."""
    before = os.environ.get("LD_LIBRARY_PATH")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("LD_LIBRARY_PATH", None)
        else:
            os.environ["LD_LIBRARY_PATH"] = before


def _devices(plugin: Plugin) -> list[Any]:
    return [item for item in ort.get_ep_devices() if item.ep_name == plugin.provider]


def _device_index(item: Any) -> int | None:
    """CUDA index of a plugin's device; None if unknown."""
    memory = item.memory_info(state.OrtDeviceMemoryType.DEFAULT)
    return None if memory is None else int(memory.device_id)


def _no_device_reason(plugin: Plugin) -> str:
    """Why the plugin offers no device, with its own reason if available (ONNX Runtime 1.26)."""
    listed = getattr(state, "get_hardware_devices", None)
    wants = f"it runs on NVIDIA GPUs of compute capability {plugin.gpus}"
    if listed is None:
        return f"it offers no device here, {wants}"
    boards = [item for item in listed() if item.vendor_id == _NVIDIA and item.type == state.OrtHardwareDeviceType.GPU]
    if not boards:
        return f"ONNX Runtime finds no NVIDIA GPU here (in /sys/class/drm, /sys/bus/pci), and {wants}"
    notes = []
    for board in boards:
        details = state.get_hardware_device_ep_incompatibility_details(plugin.provider, board)
        notes.append(str(details.get("notes") or "").strip().rstrip("."))
    reasons = "; ".join(dict.fromkeys(filter(None, notes)))
    return f"it takes no GPU of this machine: {reasons or wants}"


def ep_device(name: str, number: int) -> Any:
    """The plugin's device for that GPU; `SetupError` if there is none."""
    plugin = PLUGINS[name]
    offered = _devices(plugin)
    numbers = [_device_index(item) for item in offered]
    if number in numbers:
        return offered[numbers.index(number)]
    if numbers == [None] and number == 0:
        return offered[0]
    here = ", ".join(f"`cuda:{found}`" for found in numbers if found is not None) or "no GPU"
    raise SetupError(
        f"the provider `{name}` does not run on `cuda:{number}`, it offers {here}",
        hint=f"it runs on GPUs of compute capability {plugin.gpus}: `--device` with one of those, or `--providers cuda`",
    )


def plugin_hint(name: str, reason: str) -> str | None:
    """The hint for an unusable plugin; None if a library does not load."""
    plugin = PLUGINS[name]
    if not installed(name):
        first, *others = plugin.packages
        more = "".join(f"; on CUDA {package[-2:]}: `{package}`" for package in others)
        return f"`pip install 'trt-engine[{plugin.extra}]'`, or `pip install {first}`{more}"
    if "undefined symbol: cu" in reason or "undefined symbol: nvml" in reason:
        return "upgrade the NVIDIA driver: it is older than the package"
    if "onnxruntime" in reason and "or later" in reason:
        return "`pip install -U onnxruntime`"
    if "GPU" in reason:
        return "`nvidia-smi -L` lists the GPUs; `--providers cuda` runs on any of NVIDIA's, `--device cpu` on none"
    return None

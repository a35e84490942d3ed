"""CPU and GPU information: names, memory, clocks, throttling. Read-only."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Cpu:
    """The host CPU, from /proc/cpuinfo and the scheduler."""

    name: str
    cores: int
    """Cores available to this process (CPU affinity)."""
    features: tuple[str, ...]
    """Instruction-set features that affect kernel selection, sorted."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU, from NVML."""

    index: int
    """CUDA index, after `CUDA_VISIBLE_DEVICES`."""
    name: str
    uuid: str
    memory_mib: int
    compute_capability: str
    """As `9.0`."""
    driver: str


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clock rates and limits, a snapshot; None if unreadable."""

    cpu_mhz: float | None = None
    """Mean over the cores; None for a GPU."""
    load_average: float | None = None
    """Runnable processes, one-minute mean (`/proc/loadavg`)."""
    sm_mhz: int | None = None
    """GPU clock; None for a CPU, as the numbers below."""
    sm_max_mhz: int | None = None
    """The most that the GPU allows."""
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    """Throttle reasons, by NVML's names without the prefix."""


# Features by which MLAS (ONNX Runtime) and oneDNN select kernels and layouts.
_FEATURES = (
    "sse4_1 avx f16c avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 neon asimd asimddp asimdhp i8mm bf16 sve sve2"
).split()


@cache
def core_count() -> int:
    """The cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> Cpu:
    """The host CPU."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    return Cpu(name=name, cores=core_count(), features=tuple(sorted(flags.intersection(_FEATURES))))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised; None without the package or a driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: NVMLError_LibraryNotFound
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_indices(uuids: Sequence[str], visible_devices: str | None) -> list[int]:
    """Indices of the GPUs with these UUIDs that are visible under `CUDA_VISIBLE_DEVICES=asked`, in CUDA order.

    As in CUDA, the first invalid entry ends the list. (Unlike NVML, CUDA lists the fastest GPU first.)
    """
    if visible_devices is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in map(str.strip, visible_devices.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            number = int(entry)
        else:
            fitting = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
            if len(fitting) != 1:
                break
            number = fitting[0]
        if number in found:
            return []
        found.append(number)
    return found


def _handles(nvml: Any) -> list[tuple[Any, str]]:
    """NVML handle and UUID of each visible GPU, in CUDA order."""
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in every]
    return [(every[index], uuids[index]) for index in visible_indices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))]


@contextlib.contextmanager
def _reader(gpu: int) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """NVML, and a function that calls it for one GPU; the result is None without the GPU, or where it is not supported."""
    with _nvml() as nvml:
        handle = dict(enumerate(_handles(nvml) if nvml is not None else ())).get(gpu)

        def read(name: str, *args: Any) -> Any:
            if handle is not None:
                with contextlib.suppress(nvml.NVMLError):
                    return getattr(nvml, name)(handle[0], *args)
            return None

        yield nvml, read


def gpus() -> tuple[Gpu, ...]:
    """The visible GPUs, from NVML; empty without `nvidia-ml-py` or a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return ()
        found = []
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        for index, (handle, uuid) in enumerate(_handles(nvml)):
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            found.append(
                Gpu(
                    index=index,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    uuid=uuid,
                    memory_mib=nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20,
                    compute_capability=f"{major}.{minor}",
                    driver=driver,
                )
            )
        return tuple(found)


def has_gpu() -> bool:
    """Whether this process sees an NVIDIA GPU: by NVML, without `nvidia-ml-py` by its device file."""
    if importlib.util.find_spec("pynvml") is not None:
        return bool(gpus())
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists())


def gpu(number: int, boards: Sequence[Gpu] | None = None) -> Gpu | None:
    """The GPU `cuda:<number>` among `boards` (default: this machine's); None if NVML does not list it."""
    return next((board for board in (gpus() if boards is None else boards) if board.index == number), None)


def cuda_version() -> str | None:
    """The newest CUDA version supported by the driver, as `13.0`; None without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 1000 x major + 10 x minor
        return f"{number // 1000}.{number % 1000 // 10}"


_THROTTLE = {  # nvml.h, nvmlClocksEventReason*: those that reduce clocks
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


def clocks(gpu: int | None = None) -> Clocks:
    """Present clock rates of the host or of one GPU."""
    if gpu is None:
        mhz = load = None
        with contextlib.suppress(OSError, ValueError, IndexError):
            rates = [
                float(line.partition(":")[2])
                for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
                if line.startswith("cpu MHz")
            ]
            mhz = round(sum(rates) / len(rates), 1) if rates else None
        with contextlib.suppress(OSError):
            load = round(os.getloadavg()[0], 2)
        return Clocks(cpu_mhz=mhz, load_average=load)
    with _reader(gpu) as (nvml, read):
        if nvml is None:
            return Clocks()
        reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        power = read("nvmlDeviceGetPowerUsage")
        return Clocks(
            sm_mhz=read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            sm_max_mhz=read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            memory_mhz=read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            temperature_c=read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1000,
            throttled=tuple(name for bit, name in _THROTTLE.items() if reasons & bit),
        )


def memory_used(gpu: int) -> int | None:
    """Used GPU memory of all processes in bytes; None if NVML does not report it."""
    with _reader(gpu) as (_, read):
        found = read("nvmlDeviceGetMemoryInfo")  # MIG: administrators only
        return None if found is None else int(found.used)


def utilisation(gpu: int) -> float | None:
    """Fraction of the last sample period (1/6 to 1 s in NVML) with a kernel running on the GPU; None if unknown."""
    with _reader(gpu) as (_, read):
        found = read("nvmlDeviceGetUtilizationRates")  # not supported with MIG
        return None if found is None else float(found.gpu) / 100


@cache
def in_container() -> str | None:
    """`docker`, `podman`, `kubernetes` or `container` when this process runs in one, else None."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    with contextlib.suppress(OSError):
        if any(word in Path("/proc/1/cgroup").read_text() for word in ("docker", "containerd", "lxc")):
            return "container"
    return None

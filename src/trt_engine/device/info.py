"""What the machine's processors are and how they fare: names, memory, clocks, throttling. Reads, never sets."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "Clocks",
    "Cpu",
    "Gpu",
    "clocks",
    "cpu",
    "cuda_version",
    "gpu",
    "gpus",
    "in_container",
    "memory_used",
    "utilisation",
    "visible",
]


@dataclass(frozen=True, slots=True)
class Cpu:
    """The host processor as /proc/cpuinfo and the scheduler tell it."""

    name: str
    cores: int
    """Cores this process may use (affinity counted, not the whole machine)."""
    features: tuple[str, ...]
    """The instruction-set features that decide which kernels a library picks, sorted."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU as NVML tells it."""

    index: int
    """As CUDA counts them: `CUDA_VISIBLE_DEVICES` hides and orders."""
    name: str
    uuid: str
    memory_mib: int
    compute_capability: str
    """As `9.0`."""
    driver: str


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clock rates and limits at one moment; None where they cannot be read."""

    cpu_mhz: float | None = None
    load_average: float | None = None
    """Runnable processes, one-minute mean (`/proc/loadavg`)."""
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    """Reasons the GPU clocks are held down, by NVML's names without the prefix."""


# The features ONNX Runtime's MLAS and oneDNN choose their kernels and layouts by.
_FEATURES = (
    "sse4_1 avx f16c avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 neon asimd asimddp asimdhp i8mm bf16 sve sve2"
).split()


@cache
def cpu() -> Cpu:
    """The host processor."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cpu(name=name, cores=cores, features=tuple(sorted(flags.intersection(_FEATURES))))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised; None where the package or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: NVMLError_LibraryNotFound, which is no RuntimeError
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(uuids: Sequence[str], asked: str | None) -> list[int]:
    """Which of the GPUs with these identifiers a process with `CUDA_VISIBLE_DEVICES=asked` sees, in its order.

    CUDA's rule: the first entry that is no GPU ends the list. (Unlike NVML it counts the fastest first where boards differ.)
    """
    if asked is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in map(str.strip, asked.split(",")):
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
    """NVML's handle and identifier of every GPU this process sees, in CUDA's order."""
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in every]
    return [(every[index], uuids[index]) for index in visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))]


def gpus() -> tuple[Gpu, ...]:
    """The GPUs this process sees, as NVML tells them; empty without `nvidia-ml-py` or without a driver."""
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


def gpu(number: int, boards: Sequence[Gpu] | None = None) -> Gpu | None:
    """The GPU `cuda:N` names, of those given or of this machine's; None where NVML does not tell of it."""
    return next((board for board in (gpus() if boards is None else boards) if board.index == number), None)


def cuda_version() -> str | None:
    """The newest CUDA the driver serves, as `13.0`; None without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 1000 x major + 10 x minor
        return f"{number // 1000}.{number % 1000 // 10}"


_THROTTLE = {  # nvml.h, nvmlClocksEventReason*: those that hold clocks down
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


def clocks(gpu: int | None = None) -> Clocks:
    """Clock rates now, of the host or of one GPU."""
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
    with _nvml() as nvml:
        if nvml is None:
            return Clocks()
        handles = _handles(nvml)
        if gpu >= len(handles):
            return Clocks()
        handle = handles[gpu][0]

        def read(call: Any, *args: Any) -> Any:
            try:
                return call(handle, *args)
            except nvml.NVMLError:  # not every board answers every question
                return None

        reasons = read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        power = read(nvml.nvmlDeviceGetPowerUsage)
        return Clocks(
            sm_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            sm_max_mhz=read(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            memory_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            temperature_c=read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1000,
            throttled=tuple(name for bit, name in _THROTTLE.items() if reasons & bit),
        )


def memory_used(gpu: int) -> int | None:
    """Bytes taken on the GPU, by whoever works there; None where NVML does not tell."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        handles = _handles(nvml)
        if gpu >= len(handles):
            return None
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handles[gpu][0]).used)
        except nvml.NVMLError:  # a GPU in parts (MIG) tells administrators alone
            return None


def utilisation(gpu: int) -> float | None:
    """Share of the last moments (a sixth of a second to one second, NVML says) some kernel ran on the GPU; None unknown."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        handles = _handles(nvml)
        if gpu >= len(handles):
            return None
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(handles[gpu][0]).gpu) / 100
        except nvml.NVMLError:  # a GPU in parts (MIG) does not tell
            return None


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

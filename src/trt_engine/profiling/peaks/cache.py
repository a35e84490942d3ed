"""Peak rates of a device, measured once and cached beside the store's engines.

A peak is a rate or a cost that real work on this machine does not beat: the best of several runs of the simplest work
(one large matrix product, one long copy, empty kernels). The cache key is the device, its driver and the measuring
library; files are written atomically, and a damaged one is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import msgspec

from trt_engine.atomic_io import decode_json, ensure_folder, os_error, read_bounded, write_atomic
from trt_engine.device import info, parse_device
from trt_engine.environment import Environment, distribution_version, library_versions
from trt_engine.errors import SetupError, UsageError
from trt_engine.profiling.peaks.probe import PeakProbe
from trt_engine.records.profile import DevicePeak, DevicePeaks
from trt_engine.store import Store

log = logging.getLogger(__name__)

_SCHEMA = 1
_CPU_BUDGET_S, _GPU_BUDGET_S = 15, 25
"""Approximate seconds of a measurement; it is ended after four times that."""
_BUSY_SHARE = 0.1
"""CPU fraction of other processes above which a measurement is doubtful."""
_NVML_WINDOW_S = 1.5
"""Longer than NVML's utilization window of at most a second."""
_STORE_VARIABLE = "TRT_ENGINE_STORE"


def device_peaks(
    device: str,
    *,
    measure: bool = False,
    remeasure: bool = False,
    at_least: DevicePeaks | None = None,
    cache: PeakCache | None = None,
    gpus: Sequence[info.Gpu] | None = None,
) -> DevicePeaks | None:
    """Cached peaks of the device, or measured now if `measure` and none are cached; None if unknown.

    `remeasure` ignores the cache; values of `at_least`, an earlier measurement, stay if they are higher. Unmeasured peaks
    come from the data sheet (see `source`). `SetupError` or `UsageError` only with `measure`, for a missing device.
    """
    cache = cache or PeakCache()
    try:
        subject = _find_device(device, gpus)
    except (SetupError, UsageError):
        if measure:
            raise
        return None
    if measure:
        return subject.with_datasheet(
            cache.get_or_measure(subject.keys, lambda: _merge_highest(subject.measure(), at_least), remeasure=remeasure)
        )
    return subject.with_datasheet(cache.first(subject.keys))


def _merge_highest(now: DevicePeaks, before: DevicePeaks | None) -> DevicePeaks:
    """The best of both measurements of each peak."""
    if before is None or before.key != now.key:
        return now
    had = {item.name: item for item in before.peaks if item.source == "measured"}
    items = tuple(
        old
        if (old := had.get(item.name)) is not None
        and (old.value < item.value if item.unit == "us" else old.value > item.value)
        else item
        for item in now.peaks
    )
    return replace(now, peaks=items)


# ------------------------------------------------------------------------------------------------ kept


class PeakCache:
    """Peaks by key, in files. The default folder is in the store: the user's cache, or `$TRT_ENGINE_STORE`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Store().folder / "peaks"

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> DevicePeaks | None:
        """The peaks of this key, or None. A damaged file counts as none, with a warning."""
        path = self.path(key)
        try:
            raw = read_bounded(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the cached peaks in `%s` cannot be read: %s", path, error.strerror or error)
            return None
        try:
            found = decode_json(raw, _File)
            _check_peaks(found, key)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            log.warning("the cached peaks in `%s` are damaged and ignored: %s", path, error)
            return None
        return found.peaks

    def get_or_measure(
        self, keys: Sequence[str], measure: Callable[[], DevicePeaks], *, remeasure: bool = False
    ) -> DevicePeaks:
        """The peaks of the first key that has some, else those of `measure()`, cached under their key.

        A caller waits while another process measures, then takes its result: concurrent measurements would slow each other.
        If `measure` raises, or the process dies, the previous entry stays.
        """
        before = {key: self._stored_path(key) for key in keys}  # before reading: what appears after it is new
        if not remeasure and (had := self.first(keys)) is not None:
            return had
        with self._measure_lock() as may_write:
            for key in keys:  # written while we waited: as new as our measurement
                if self._stored_path(key) != before[key] and (had := self.get(key)) is not None:
                    return had
            found = measure()
            if may_write:
                self._store(found)
        return found

    def first(self, keys: Sequence[str]) -> DevicePeaks | None:
        """The peaks of the first key that has some."""
        return next((had for key in keys if (had := self.get(key)) is not None), None)

    def _stored_path(self, key: str) -> tuple[int, int] | None:
        """The identity of the key's file."""
        with contextlib.suppress(OSError):
            stated = self.path(key).stat()
            return stated.st_ino, stated.st_mtime_ns
        return None

    def _store(self, found: DevicePeaks) -> None:
        try:
            write_atomic(self.path(found.key), msgspec.json.format(msgspec.json.encode(_File(_SCHEMA, found))))
        except SetupError as error:
            log.warning("the peaks are not cached: %s", error.message)

    @contextlib.contextmanager
    def _measure_lock(self) -> Iterator[bool]:
        """Lock against measuring in other processes; False if the folder is not writable, and so not locked."""
        try:
            lock = filelock.FileLock(ensure_folder(self.folder, by=_STORE_VARIABLE) / "measuring.lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                log.info("another process measures peaks; waiting for it")
                lock.acquire()
        except (OSError, SetupError) as error:
            stated = error if isinstance(error, SetupError) else os_error(error, self.folder, by=_STORE_VARIABLE)
            log.warning("the peaks will not be cached: %s", stated.message)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


class _File(msgspec.Struct):
    """The content of a file."""

    schema: int
    peaks: DevicePeaks


def _check_peaks(found: _File, key: str) -> None:
    """`ValueError` for impossible values, or for another device."""
    if found.schema != _SCHEMA:
        raise ValueError(f"schema {found.schema}, expected {_SCHEMA}")
    if found.peaks.key != key:
        raise ValueError(f"they are of `{found.peaks.key}`")
    for item in found.peaks.peaks:
        if not (math.isfinite(item.value) and item.value > 0):
            raise ValueError(f"`{item.name}` is {item.value:g} {item.unit}")


# ------------------------------------------------------------------------------------------------ devices


@dataclass(frozen=True, slots=True)
class _Device:
    """A device to measure, with the available libraries: one key for each."""

    device: str
    name: str
    properties: tuple[str, ...]
    libraries: tuple[str, ...]
    """With their versions, the preferred one first."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.key(library) for library in self.libraries)

    def key(self, library: str) -> str:
        digest = hashlib.sha256(json.dumps([_SCHEMA, self.name, *self.properties, library]).encode()).hexdigest()[:12]
        return f"{re.sub(r'[^a-z0-9]+', '-', self.name.lower()).strip('-')[:60]}-{digest}"

    def measure(self) -> DevicePeaks:
        kind, number = parse_device(self.device)
        seconds = _CPU_BUDGET_S if kind == "cpu" else _GPU_BUDGET_S
        log.info("measuring the peaks of %s: about %d s, once", self.name, seconds)
        gauge = PeakProbe(budget_s=4.0 * seconds)
        notes: list[str] = []
        with _interference_notes(kind, number, notes):
            if kind == "cpu":
                from trt_engine.profiling.peaks.cpu import measure_cpu

                measure_cpu(gauge)
                library = self.libraries[0]
            else:
                library = self._measure_gpu(gauge, number)
        if not gauge.peaks:
            raise SetupError(
                f"nothing of `{self.device}` could be measured: {gauge.skipped[0]}", hint="`trt-engine doctor`"
            )
        for note in notes:
            log.warning("%s", note)
        return DevicePeaks(
            device=self.name,
            key=self.key(library),
            peaks=tuple(gauge.peaks),
            measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            environment=Environment.detect(None if kind == "cpu" else number),
            skipped=tuple(gauge.skipped),
            notes=tuple(notes),
        )

    def _measure_gpu(self, gauge: PeakProbe, number: int) -> str:
        from trt_engine.profiling.peaks import gpu

        library: gpu.TorchMatmul | str = "PyTorch with CUDA is not installed"
        if len(self.libraries) > 1:
            try:
                library = gpu.TorchMatmul(number)
            except SetupError as error:
                library = error.message
        gpu.measure_gpu(gauge, number, library)
        return self.libraries[-1 if isinstance(library, str) else 0]

    def with_datasheet(self, found: DevicePeaks | None) -> DevicePeaks | None:
        """Fill unmeasured peaks from the data sheet; None if there are none at all."""
        sheet = () if self.device == "cpu" else datasheet_peaks(self.name)
        if found is None:
            if not sheet:
                return None
            note = f"nothing was measured here: `trt-engine doctor --peaks --device {self.device}`"
            return DevicePeaks(self.name, self.keys[0], sheet, "", Environment.detect(), notes=(note,))
        names = {item.name for item in found.peaks}
        return replace(found, peaks=(*found.peaks, *(item for item in sheet if item.name not in names)))


_DRIVER_ALONE = "driver alone"


def _find_device(device: str, boards: Sequence[info.Gpu] | None) -> _Device:
    kind, number = parse_device(device)
    if kind == "fake":
        raise UsageError("the device `fake` has no peaks", hint="`--device cpu` or `--device cuda:0`")
    if kind == "cpu":
        cpu, have = info.cpu(), library_versions()
        stated = ", ".join(
            f"{name} {have[name]}" for name in ("onnxruntime", "onnxruntime-gpu", "numpy") if name in have
        )
        name = f"{cpu.name}, {cpu.cores} core{'s' if cpu.cores > 1 else ''}"
        return _Device("cpu", name, cpu.features, (stated,))
    board = info.gpu(number, boards)
    if board is None:
        raise SetupError(
            f"NVML does not list `cuda:{number}`",
            hint="`nvidia-smi -L` lists the GPUs; the package is `pip install nvidia-ml-py`",
        )
    return _Device(
        f"cuda:{number}",
        board.name,
        (board.compute_capability, board.driver, str(board.memory_mib)),
        _gpu_matmul_libraries(),
    )


def _gpu_matmul_libraries() -> tuple[str, ...]:
    """PyTorch, if it is installed with CUDA; whether it sees the GPU is known once it is imported."""
    version = distribution_version("torch")
    return (*(() if version is None or version.endswith("+cpu") else (f"torch {version}",)), _DRIVER_ALONE)


def _gpu_utilization(number: int) -> float | None:
    """GPU utilization by other processes; waits until NVML's window no longer covers this process."""
    used = info.utilisation(number)
    if used is not None and used > _BUSY_SHARE:
        time.sleep(_NVML_WINDOW_S)
        used = info.utilisation(number)
    return used


@contextlib.contextmanager
def _interference_notes(kind: str, number: int, notes: list[str]) -> Iterator[None]:
    """Notes on interference: other work on the device, throttled clocks."""
    from trt_engine.profiling.peaks.cpu import watch_other_load

    used = None if kind == "cpu" else _gpu_utilization(number)
    share = watch_other_load()
    yield
    if (others := share()) > _BUSY_SHARE:
        notes.append(
            f"other processes had {100 * others:.0f} % of this machine's processors while it was measured: "
            + ("the figures may be too low" if kind == "cpu" else "launches and transfers may look too slow")
        )
    if used is not None and used > _BUSY_SHARE:
        notes.append(f"the GPU was {100 * used:.0f} % busy before it was measured: the figures may be too low")
    if kind != "cpu" and (held := info.clocks(number).throttled):
        notes.append(f"the GPU's clocks were held down at the end ({', '.join(held)})")


# ------------------------------------------------------------------------------------------------ data sheets

_SOURCE = "{} data sheet by NVIDIA, dense (half of what it states with sparsity)"

# name as NVML has it -> name of the sheet, TFLOP/s (TOP/s of int8) by number type, memory GB/s
_DATASHEETS: dict[str, tuple[str, dict[str, float], float]] = {
    "NVIDIA H200": (
        "H200 Tensor Core GPU",
        {"fp32": 67, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5, "int8": 1979, "fp8": 1979},
        4800,
    ),
}


def datasheet_peaks(name: str) -> tuple[DevicePeak, ...]:
    """The data-sheet peaks of the GPU of that name; empty for an unlisted GPU."""
    if (sheet := _DATASHEETS.get(name)) is None:
        return ()
    title, rates, memory = sheet
    source = _SOURCE.format(title)
    return (
        *(
            DevicePeak(f"{dtype}_matrix", float(rate), "TOP/s" if dtype == "int8" else "TFLOP/s", "datasheet", source)
            for dtype, rate in rates.items()
        ),
        DevicePeak(
            "memory_copy", float(memory), "GB/s", "datasheet", f"{title} data sheet by NVIDIA, memory bandwidth"
        ),
    )

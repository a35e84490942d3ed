"""What a device can do at most: measured once, kept beside the store's engines, read by whoever judges a time.

A ceiling is a rate or a cost that real work on this machine does not beat: the best of several runs of the plainest work
there is (one large matrix product, one long copy, empty kernels). Kept by the device, its driver and the library that
measured; a file is whole or not there, and one that is damaged is measured again.
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

from trt_engine.device import info, parse_device
from trt_engine.environment import Environment, libraries, version_of
from trt_engine.errors import SetupError, UsageError
from trt_engine.files import ensure_folder, explain, write_whole
from trt_engine.profiling.datasheets import promised
from trt_engine.profiling.gauge import Gauge
from trt_engine.records import Ceiling, Ceilings
from trt_engine.store import Store

__all__ = ["Kept", "ceilings"]

log = logging.getLogger(__name__)

_SCHEMA = 1
_HOST_S, _GPU_S = 15, 25
"""What a measurement takes, about; it is ended after four times that."""
_BUSY = 0.1
"""Of the processors with other processes: above it, the figures are doubtful."""
_FORGOTTEN_S = 1.5
"""NVML's utilisation is of the last second at most."""
_BY = "TRT_ENGINE_STORE"


def ceilings(
    device: str,
    *,
    measure: bool = False,
    again: bool = False,
    kept: Kept | None = None,
    boards: Sequence[info.Gpu] | None = None,
) -> Ceilings | None:
    """What the device can do at most: as kept, or measured now if `measure` and nothing is kept; None where nothing tells.

    `again` measures whatever is kept. Where a ceiling was not measured and the maker's data sheet has it, that is in its
    place, said in `source`. `SetupError` or `UsageError` only with `measure`, for a device that is not there.
    """
    kept = kept or Kept()
    try:
        subject = _subject(device, boards)
    except (SetupError, UsageError):
        if measure:
            raise
        return None
    if measure:
        return subject.completed(kept.get_or_measure(subject.keys, subject.measure, again=again))
    found = next((had for key in subject.keys if (had := kept.get(key)) is not None), None)
    return subject.completed(found)


def _command_for(device: str) -> str:
    """What to type to have the ceilings of a device measured."""
    return f"trt-engine doctor --ceilings --device {device}"


# ------------------------------------------------------------------------------------------------ kept


class Kept:
    """Ceilings by key, in files. The default folder lies in the store: the user's cache, or `$TRT_ENGINE_STORE`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Store().folder / "ceilings"

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Ceilings | None:
        """The ceilings under this key; None where there are none. A damaged file is said, and as good as none."""
        path = self.path(key)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the ceilings kept in `%s` cannot be read: %s", path, error.strerror or error)
            return None
        try:
            found = msgspec.json.decode(raw, type=_File)
            _check(found, key)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            log.warning("the ceilings kept in `%s` are damaged and left out: %s", path, error)
            return None
        return found.ceilings

    def get_or_measure(self, keys: Sequence[str], measure: Callable[[], Ceilings], *, again: bool = False) -> Ceilings:
        """The ceilings under the first key that has some, else those of `measure()`, kept under the key they carry.

        Who comes while another process measures waits, and takes what that one found: two at once would slow each other.
        When `measure` raises, or the process dies, what was kept before is still there.
        """
        before = {key: self._written(key) for key in keys}  # before we look: what appears after the look is new to us
        if not again and (had := self._first(keys)) is not None:
            return had
        with self._alone() as may_write:
            for key in keys:  # what appeared while we waited is as new as ours would be
                if self._written(key) != before[key] and (had := self.get(key)) is not None:
                    return had
            found = measure()
            if may_write:
                self._keep(found)
        return found

    def _first(self, keys: Sequence[str]) -> Ceilings | None:
        return next((had for key in keys if (had := self.get(key)) is not None), None)

    def _written(self, key: str) -> tuple[int, int] | None:
        """Which file lies under the key."""
        with contextlib.suppress(OSError):
            told = self.path(key).stat()
            return told.st_ino, told.st_mtime_ns
        return None

    def _keep(self, found: Ceilings) -> None:
        try:
            write_whole(self.path(found.key), msgspec.json.format(msgspec.json.encode(_File(_SCHEMA, found))))
        except SetupError as error:
            log.warning("the ceilings are not kept: %s", error.message)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Inside, no other process measures; False where nothing can be written, and so nobody kept from measuring."""
        try:
            lock = filelock.FileLock(ensure_folder(self.folder, by=_BY) / "measuring.lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                log.info("another process measures ceilings; waiting for it")
                lock.acquire()
        except (OSError, SetupError) as error:
            told = error if isinstance(error, SetupError) else explain(error, self.folder, by=_BY)
            log.warning("the ceilings will not be kept: %s", told.message)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


class _File(msgspec.Struct):
    """What a file holds."""

    schema: int
    ceilings: Ceilings


def _check(found: _File, key: str) -> None:
    """`ValueError` for figures nobody can have measured, or for another device."""
    if found.schema != _SCHEMA:
        raise ValueError(f"schema {found.schema}, expected {_SCHEMA}")
    if found.ceilings.key != key:
        raise ValueError(f"they are of `{found.ceilings.key}`")
    for item in found.ceilings.items:
        if not (math.isfinite(item.value) and item.value > 0):
            raise ValueError(f"`{item.name}` is {item.value:g} {item.unit}")


# ------------------------------------------------------------------------------------------------ devices


@dataclass(frozen=True, slots=True)
class _Subject:
    """A device to be measured, and what it could be measured with: a key for each library."""

    device: str
    name: str
    facts: tuple[str, ...]
    libraries: tuple[tuple[str, str], ...]
    """Name and version, the preferred one first."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.key(told) for _, told in self.libraries)

    def key(self, library: str) -> str:
        digest = hashlib.sha256(json.dumps([_SCHEMA, self.name, *self.facts, library]).encode()).hexdigest()[:12]
        return f"{re.sub(r'[^a-z0-9]+', '-', self.name.lower()).strip('-')[:60]}-{digest}"

    def measure(self) -> Ceilings:
        kind, number = parse_device(self.device)
        seconds = _HOST_S if kind == "cpu" else _GPU_S
        log.info("measuring what %s can do at most: about %d s, once", self.name, seconds)
        gauge = Gauge(budget_s=4.0 * seconds)
        notes: list[str] = []
        with _watched(kind, number, notes):
            library = self._host(gauge) if kind == "cpu" else self._gpu(gauge, number)
        if not gauge.items:
            raise SetupError(
                f"nothing of `{self.device}` could be measured: {gauge.skipped[0]}", hint="trt-engine doctor"
            )
        for note in notes:
            log.warning("%s", note)
        return Ceilings(
            device=self.name,
            key=self.key(library),
            items=tuple(gauge.items),
            measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            environment=Environment.here(None if kind == "cpu" else number),
            skipped=tuple(gauge.skipped),
            notes=tuple(notes),
        )

    def _host(self, gauge: Gauge) -> str:
        from trt_engine.profiling import host_ceilings

        host_ceilings.measure(gauge)
        return self.libraries[0][1]

    def _gpu(self, gauge: Gauge, number: int) -> str:
        from trt_engine.profiling import gpu_ceilings

        reasons = []
        for name, told in self.libraries[:-1]:
            try:
                library = gpu_ceilings.instrument(name, number)
            except SetupError as error:
                reasons.append(error.message)
                continue
            gpu_ceilings.measure(gauge, number, library)
            return told
        why = "; ".join(reasons) or "none of PyTorch, CuPy and ONNX Runtime for CUDA is installed"
        gpu_ceilings.measure(gauge, number, gpu_ceilings.Nothing(why))
        return self.libraries[-1][1]

    def completed(self, found: Ceilings | None) -> Ceilings | None:
        """With the maker's figures where none was measured; None where there are none at all."""
        sheet = () if self.device == "cpu" else promised(self.name)
        if found is None:
            if not sheet:
                return None
            note = f"nothing was measured here: `{_command_for(self.device)}`"
            return Ceilings(self.name, self.keys[0], sheet, "", Environment.here(), notes=(note,))
        return replace(found, items=_filled(found.items, sheet))


def _filled(measured: Sequence[Ceiling], sheet: Sequence[Ceiling]) -> tuple[Ceiling, ...]:
    names = {item.name for item in measured}
    return (*measured, *(item for item in sheet if item.name not in names))


_DRIVER_ALONE = "driver alone"


def _subject(device: str, boards: Sequence[info.Gpu] | None) -> _Subject:
    kind, number = parse_device(device)
    if kind == "fake":
        raise UsageError("the device `fake` has no ceilings", hint="`--device cpu` or `--device cuda:0`")
    if kind == "cpu":
        cpu, have = info.cpu(), libraries()
        told = ", ".join(f"{name} {have[name]}" for name in ("onnxruntime", "onnxruntime-gpu", "numpy") if name in have)
        name = f"{cpu.name}, {cpu.cores} core{'s' if cpu.cores > 1 else ''}"
        return _Subject("cpu", name, cpu.features, (("onnxruntime", told),))
    board = info.gpu(number, boards)
    if board is None:
        raise SetupError(
            f"there is no `cuda:{number}` that NVML tells of",
            hint="`nvidia-smi -L` lists the GPUs; the package is `pip install nvidia-ml-py`",
        )
    return _Subject(
        f"cuda:{number}", board.name, (board.compute_capability, board.driver, str(board.memory_mib)), _gpu_libraries()
    )


def _gpu_libraries() -> tuple[tuple[str, str], ...]:
    """What could multiply matrices on a GPU, by what is installed; whether it sees the GPU is known once it is imported."""
    found = []
    for name, distributions in (
        ("torch", ("torch",)),
        ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),
        ("onnxruntime", ("onnxruntime-gpu",)),
    ):
        version = next((told for one in distributions if (told := version_of(one))), None)
        if version is not None and not version.endswith("+cpu"):
            found.append((name, f"{name} {version}"))
    return (*found, ("", _DRIVER_ALONE))


def _busy(number: int) -> float | None:
    """Share of the time a GPU works for others: what this process did last is in NVML's figure for a while."""
    used = info.utilisation(number)
    if used is not None and used > _BUSY:
        time.sleep(_FORGOTTEN_S)
        used = info.utilisation(number)
    return used


@contextlib.contextmanager
def _watched(kind: str, number: int, notes: list[str]) -> Iterator[None]:
    """Notes on what made the figures doubtful: other work on the device, clocks held down."""
    from trt_engine.profiling.host_ceilings import busy_elsewhere

    used = None if kind == "cpu" else _busy(number)
    share = busy_elsewhere()
    yield
    if (others := share()) > _BUSY:
        notes.append(
            f"other processes had {100 * others:.0f} % of this machine's processors while it was measured: "
            + ("the figures may be too low" if kind == "cpu" else "launches and transfers may look too slow")
        )
    if used is not None and used > _BUSY:
        notes.append(f"the GPU was {100 * used:.0f} % busy before it was measured: the figures may be too low")
    if kind != "cpu" and (held := info.clocks(number).throttled):
        notes.append(f"the GPU's clocks were held down at the end ({', '.join(held)})")

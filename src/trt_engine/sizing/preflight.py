"""The pre-flight: what is looked at before anything is spent, each a line with ok, warn or fail."""

from __future__ import annotations

import contextlib
import logging
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trt_engine.api.preparing import check_placement, placed_for
from trt_engine.backend import Backend, settled
from trt_engine.benchmark.child import memory_available
from trt_engine.config import BuildConfig, SizeConfig
from trt_engine.device import info, parse_device
from trt_engine.diagnosis import tensorrt as parts
from trt_engine.engine import Engine, Passport, passport_path
from trt_engine.environment import version_of
from trt_engine.errors import MemoryExhausted, ModelError, PrecisionError, SetupError, TrtEngineError, UsageError
from trt_engine.figures import size
from trt_engine.files import explain
from trt_engine.graph.load import check
from trt_engine.graph.quant_target import quant_target
from trt_engine.model import Model
from trt_engine.plans.installed import Installed, installed
from trt_engine.plans.versions import COMPUTE_CAPABILITY, Version, precision_since
from trt_engine.records import Check, Diagnosis
from trt_engine.sizing.layout import Layout
from trt_engine.store import Store
from trt_engine.tensors import Shape, dtype

__all__ = ["COMPUTE_CAPABILITY", "Estimate", "Preflight", "check_model_path", "estimate", "largest_batches"]

log = logging.getLogger(__name__)

_PROCESS_BYTES = 256 << 20  # the interpreter, numpy and ONNX Runtime in the process that measures
_SPARE_BYTES = 16 << 20  # logs, records, reports
_FORMATS = {
    ".pt": "PyTorch",
    ".pth": "PyTorch",
    ".pt2": "PyTorch",
    ".pb": "TensorFlow",
    ".tflite": "TensorFlow Lite",
    ".keras": "Keras",
    ".h5": "Keras",
    ".safetensors": "a checkpoint of weights",
}
HOW_TO_EXPORT = (
    'export one: `torch.onnx.export(model, (images,), "model.onnx", dynamo=True, dynamic_shapes=({0: "batch"},))` with '
    "an example batch of 2 or more; TensorFlow: `python -m tf2onnx.convert`; or download the model's own .onnx file"
)


def check_model_path(path: Path) -> None:
    """`ModelError` for a path that cannot be sized, saying how to get a model that can."""
    if path.suffix.lower() in _FORMATS:
        state = "is" if path.exists() else "would be"
        raise ModelError(f"`{path}` {state} {_FORMATS[path.suffix.lower()]}, expected ONNX", hint=HOW_TO_EXPORT)
    if path.suffix.lower() in (".engine", ".plan", ".trt"):
        raise ModelError(
            f"`{path}` is an engine, expected the ONNX model it is built from",
            hint=f"measure it: `trt-engine bench {path}`",
        )
    if not path.exists():
        near = sorted(item.name for item in path.parent.glob("*.onnx"))[:3] if path.parent.is_dir() else []
        hint = f"in that folder: {', '.join(near)}; or {HOW_TO_EXPORT}" if near else HOW_TO_EXPORT
        raise ModelError(f"there is no model at `{path}`", hint=hint)


def largest_batches(config: SizeConfig) -> tuple[int, ...]:
    """Every N the doubling may come to."""
    sizes = [min(config.start_batch, config.max_batch)]
    while sizes[-1] * 2 <= config.max_batch:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What building took before: seconds and bytes for one engine, and what that was read from."""

    seconds: float | None
    nbytes: int
    source: str


def estimate(model: Model, backend: str, passports: Iterable[Passport]) -> Estimate:
    """Build time and engine size from the passports of earlier engines: of this model, else scaled by the file's size."""
    known = [passport for passport in passports if passport.backend == backend]
    same = [passport for passport in known if passport.model.digest == model.digest]
    if same:
        seconds = statistics.median(passport.build.seconds for passport in same)
        nbytes = max(sum(item.nbytes for item in passport.payload) for passport in same)
        return Estimate(seconds, nbytes, f"from {len(same)} earlier engine{'s' * (len(same) > 1)} of this model")
    if known:
        per_byte = statistics.median(
            passport.build.seconds / max(1, sum(item.nbytes for item in passport.payload)) for passport in known
        )
        return Estimate(
            per_byte * model.nbytes, model.nbytes, f"scaled by size from {len(known)} earlier engines of other models"
        )
    return Estimate(None, model.nbytes, "no earlier record: the size of the model")


def _earlier_passports(layout: Layout, store: Store) -> list[Passport]:
    paths = [*(layout.folder / "engines").glob(f"{layout.stem}_*{layout.suffix}")]
    paths = [path for path in paths if passport_path(path).exists()] + [entry.path for entry in store.entries()[:50]]
    found = []
    for path in paths:
        with contextlib.suppress(TrtEngineError, OSError):
            found.append(Engine.open(path).passport)
    return found


@dataclass
class Preflight:
    """The checks of one run, in order; `run` raises the first failure after all were looked at."""

    model: Model
    layout: Layout
    config: SizeConfig
    build: BuildConfig
    card: Backend
    batches: Sequence[int]
    checks: list[Check] = field(default_factory=list)
    failures: list[TrtEngineError] = field(default_factory=list)
    here: Installed | None = None
    """The TensorRT and the GPUs to speak of; None: those of this machine, looked at when a check needs them."""

    def __post_init__(self) -> None:
        self.build = settled(self.build)

    def run(self) -> tuple[Check, ...]:
        """Every check, logged as it is made."""
        self.ok("model", f"`{self.model.path}`, {size(self.model.nbytes)}, opset {self.model.opsets.get('', '?')}")
        self._operators()
        self._versions()
        self._device()
        self._kernels()
        self._placement()
        self._folder()
        guess = estimate(self.model, self.card.name, _earlier_passports(self.layout, Store()))
        self._disk(guess)
        self._memory(guess)
        self._time(guess)
        if self.failures:
            raise self.failures[0]
        return tuple(self.checks)

    def ok(self, name: str, text: str) -> None:
        self.checks.append(Check(name, "ok", text))
        log.info("ok    %s: %s", name, text)

    def warn(self, name: str, text: str, hint: str | None = None) -> None:
        self.checks.append(Check(name, "warn", text, hint))
        log.warning("%s: %s%s", name, text, f" ({hint})" if hint else "")

    def fail(self, name: str, error: TrtEngineError) -> None:
        self.checks.append(Check(name, "fail", error.message, error.hint))
        self.failures.append(error)
        log.error("%s: %s", name, error.message)

    def _operators(self) -> None:
        try:
            if self.card.has("accepts") and not self.card.missing():
                self.card.call("accepts")(self.model)
            else:
                check(self.model)
        except ModelError as error:
            self.fail("operators", error)
        else:
            self.ok("operators", "all known")

    def _versions(self) -> None:
        if missing := self.card.missing():
            self.fail(
                "tool", SetupError(f"the backend `{self.card.name}` needs {', '.join(missing)}", hint=self.card.install)
            )
            return
        names = dict.fromkeys((*self.card.modules, "onnx", "numpy"))
        versions = [f"{name} {found}" for name in names if (found := version_of(name))]
        python = ".".join(map(str, sys.version_info[:3]))
        self.ok("tool", f"trt-engine {version_of('trt-engine')}, Python {python}, {', '.join(versions)}")

    def _device(self) -> None:
        try:
            kind, number = parse_device(self.build.device)
            if kind not in self.card.devices:
                raise UsageError(
                    f"the backend `{self.card.name}` runs on {', '.join(self.card.devices)}, not on `{self.build.device}`",
                    hint=f"`--device {self.card.devices[0]}`, or another `--backend`",
                )
        except UsageError as error:
            self.fail("device", error)
            return
        if kind != "cuda":
            host = info.cpu()
            self.ok(
                "device",
                f"{self.build.device}: {host.name}, {host.cores} cores" if kind == "cpu" else self.build.device,
            )
            return
        boards = info.gpus() if self.here is None else self.here.boards
        board = next((item for item in boards if item.index == number), None)
        if board is None and self.card.tools and not boards:  # the tool sees GPUs that NVML is not there to tell of
            self.warn(
                "device",
                f"no GPU can be seen from here (NVML is not there); {self.card.tools[0]} looks for "
                f"`{self.build.device}` itself",
            )
            self._tensorrt(None)
            return
        if board is None:
            self.fail(
                "device",
                SetupError(
                    f"`{self.build.device}` was asked for, and no such GPU was found",
                    hint="`nvidia-smi` lists the GPUs, `trt-engine doctor` says what is missing; or `--device cpu`",
                ),
            )
            return
        self.ok(
            "device",
            f"{board.name}, {board.memory_mib} MiB, compute capability {board.compute_capability}, driver {board.driver}",
        )
        self._precision(board)
        self._tensorrt(board)

    def _tensorrt(self, board: info.Gpu | None) -> None:
        """Bindings, libraries, trtexec and its package, the driver, this GPU and the precision, as `doctor` sees them."""
        by_tool = "trtexec" in self.card.tools
        if not (by_tool or "tensorrt" in self.card.modules) or self.card.missing():
            return
        here = replace(self.here or installed(), boards=() if board is None else (board,))
        own = replace(here, packages=(), bundled=()) if by_tool else here  # trtexec loads none of the wheels' libraries
        for look, seen in (
            (parts.versions_together, here),
            (parts.cuda_packages, own),
            (parts.two_on_one_path, own),
            (parts.driver_and_cuda, own),
            (parts.gpu_support, own),
        ):
            for item in look(seen):
                self._told(item)
        self._since(own.trtexec_version if by_tool else own.python_version, own.cuda or 12)

    def _told(self, item: Diagnosis) -> None:
        """A finding of `doctor` as a check of ours."""
        if item.status == "problem":
            self.fail(item.name, SetupError(item.found, hint=item.fix or "`trt-engine doctor` says more"))
        elif item.status == "warning":
            self.warn(item.name, item.found, item.fix)
        else:
            self.ok(item.name, item.found)

    def _since(self, version: Version | None, cuda: int) -> None:
        """The first TensorRT that has the type asked for."""
        asked = self.build.precision
        first = precision_since(asked) if asked is not None else None
        if version is not None and first is not None and version < first:
            self.fail(
                "precision-tensorrt",
                SetupError(
                    f"{asked} needs TensorRT {first} or newer, here is {version}",
                    hint=f'pip install "tensorrt-cu{cuda}>={first}"',
                ),
            )

    def _precision(self, board: info.Gpu) -> None:
        asked = self.build.precision
        if asked is None:
            return
        needed = COMPUTE_CAPABILITY[asked]
        found = tuple(int(part) for part in board.compute_capability.split("."))
        if found < needed:
            wanted = ".".join(map(str, needed))
            self.fail(
                "precision",
                SetupError(
                    f"{asked} needs compute capability {wanted}, {board.name} has {board.compute_capability}",
                    hint="`--precision fp16`" if found >= COMPUTE_CAPABILITY["fp16"] else "`--precision fp32`",
                ),
            )
        else:
            self.ok("precision", f"{asked} on compute capability {board.compute_capability}")

    def _kernels(self) -> None:
        """Whether the backend's kernels compute in the precision asked for, which a build would find out at its end."""
        if self.build.precision is None or not self.card.has("lacking") or self.failures:
            return
        if (error := self.card.call("lacking")(self.model, self.build)) is not None:
            self.fail("kernels", error)

    def _placement(self) -> None:
        """Whether quantised layers are placed for the library that runs them, or will be."""
        try:
            target, said = placed_for(self.model, self.build), check_placement(self.model, self.build)
        except PrecisionError as error:
            self.fail("quantisation", error)
            return
        if said is not None:
            self.warn("quantisation", said)
        elif target is not None:
            self.ok("quantisation", f"for {quant_target(target).title}")

    def _folder(self) -> None:
        place = _existing(self.layout.folder)
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            self.fail("folder", explain(error, self.layout.folder))
            return
        self.ok("folder", f"`{self.layout.folder}`{'' if self.layout.folder.exists() else ' (will be made)'}")

    def _disk(self, guess: Estimate) -> None:
        place = _existing(self.layout.folder)
        free = shutil.disk_usage(place).free
        least = 2 * guess.nbytes + _SPARE_BYTES  # one engine, in the store and in the folder
        most = 2 * guess.nbytes * len(self.batches) + _SPARE_BYTES
        text = f"{size(free)} free, {size(least)} needed, {size(most)} if N doubles to {self.batches[-1]}"
        if free < least:
            self.fail(
                "disk",
                SetupError(
                    f"the disk of `{self.layout.folder}` has {text}", hint="free some space, or `-o` another disk"
                ),
            )
        elif free < most:
            self.warn("disk", text, "`trt-engine cache prune` frees space")
        else:
            self.ok("disk", text)
        self._store_disk(guess)

    def _store_disk(self, guess: Estimate) -> None:
        """The engine is built in the store, which may lie on another disk."""
        folder = Store().folder
        place = _existing(folder)
        if place.stat().st_dev == _existing(self.layout.folder).stat().st_dev:
            return
        free, least = shutil.disk_usage(place).free, guess.nbytes + _SPARE_BYTES
        text = f"{size(free)} free on the disk of the store `{folder}`, {size(least)} needed"
        if free < least:
            self.fail(
                "store", SetupError(text, hint="`trt-engine cache prune`, or another disk with `TRT_ENGINE_STORE`")
            )
        else:
            self.ok("store", text)

    def _memory(self, guess: Estimate) -> None:
        free = memory_available()
        batch = self.batches[0]
        tensors = 2 * batch * sum(_bytes_per_row(spec.shape, spec.dtype) for spec in self.model.signature)
        least = 2 * self.model.nbytes + _PROCESS_BYTES
        usual = least + guess.nbytes + tensors
        text = f"{size(free)} available, about {size(usual)} needed at batch {batch}, plus what lies between the layers"
        if free < least:
            self.fail(
                "memory",
                MemoryExhausted(
                    f"{size(free)} of memory are available, loading the model takes {size(least)}",
                    hint="end other programs, or use a machine with more memory",
                ),
            )
        elif free < usual:
            self.warn("memory", text, "a smaller `--start-batch`")
        else:
            self.ok("memory", text)

    def _time(self, guess: Estimate) -> None:
        each = self.config.warmup_s + self.config.duration_s
        text = f"2 measurements of {each:g} s, and 1 more for every doubling"
        if guess.seconds is not None:
            text += f"; a build takes about {guess.seconds:.1f} s and {size(guess.nbytes)} ({guess.source})"
        else:
            text += "; no earlier build here to estimate from"
        self.ok("time", text)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that is there."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def _bytes_per_row(shape: Shape, kind: str) -> int:
    return dtype(kind).nbytes([max(step, 1) for step in shape[1:]])

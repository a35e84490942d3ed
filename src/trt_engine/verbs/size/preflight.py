"""Checks before a sizing run, each with the status ok, warn or fail."""

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

from trt_engine.atomic_io import os_error
from trt_engine.backend import BackendSpec, with_default_device
from trt_engine.config.build import BuildConfig
from trt_engine.device import info, parse_device
from trt_engine.device.host import available_memory
from trt_engine.engine import Engine, passport_path
from trt_engine.environment import distribution_version
from trt_engine.errors import MemoryExhausted, ModelError, PrecisionError, SetupError, TrtEngineError, UsageError
from trt_engine.format import format_bytes, quoted
from trt_engine.graph.load import check_operators
from trt_engine.graph.quant_target import quant_target
from trt_engine.model import Model
from trt_engine.records.diagnosis import Diagnosis
from trt_engine.records.passport import Passport
from trt_engine.records.size import PreflightCheck
from trt_engine.store import Store
from trt_engine.tensors import dtype
from trt_engine.trt.installation import Installation, detect_installation
from trt_engine.trt.versions import COMPUTE_CAPABILITY, Version, precision_since
from trt_engine.verbs.build.precision import plan_placement
from trt_engine.verbs.doctor import tensorrt_checks as parts
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.output_layout import OutputLayout

log = logging.getLogger(__name__)

_PROCESS_BYTES = 256 << 20  # interpreter, numpy and ONNX Runtime in the measuring process
_SLACK_BYTES = 16 << 20  # logs, records, reports
_NOT_ONNX = {
    ".pt": "PyTorch",
    ".pth": "PyTorch",
    ".pt2": "PyTorch",
    ".pb": "TensorFlow",
    ".tflite": "TensorFlow Lite",
    ".keras": "Keras",
    ".h5": "Keras",
    ".safetensors": "a checkpoint of weights",
}
EXPORT_HINT = (
    'export it: `torch.onnx.export(model, (images,), "model.onnx", dynamo=True, dynamic_shapes=({0: "batch"},))` with '
    "an example batch of 2 or more; TensorFlow: `python -m tf2onnx.convert`; or download the model's own .onnx file"
)


def check_model_path(path: Path) -> None:
    """Raise `ModelError` with an export hint for a path that cannot be sized."""
    if path.suffix.lower() in _NOT_ONNX:
        state = "is" if path.exists() else "would be"
        raise ModelError(f"`{path}` {state} {_NOT_ONNX[path.suffix.lower()]}, expected ONNX", hint=EXPORT_HINT)
    if path.suffix.lower() in (".engine", ".plan", ".trt"):
        is_bare = path.exists() and not Path(f"{path}.json").exists()  # without a passport: `bench` would refuse it
        raise ModelError(
            f"`{path}` is an engine, expected its ONNX model",
            hint=EXPORT_HINT if is_bare else f"measure it: `trt-engine bench {quoted(path)}`",
        )
    if not path.exists():
        near = sorted(item.name for item in path.parent.glob("*.onnx"))[:3] if path.parent.is_dir() else []
        hint = f"in that folder: {', '.join(near)}; or {EXPORT_HINT}" if near else EXPORT_HINT
        raise ModelError(f"no model at `{path}`", hint=hint)


def doubling_batches(config: SizeConfig) -> tuple[int, ...]:
    """Candidate values of N."""
    sizes = [min(config.start_batch, config.max_batch)]
    while sizes[-1] * 2 <= config.max_batch:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated seconds and bytes of one engine build, and their source."""

    seconds: float | None
    nbytes: int
    source: str


def estimate(model: Model, backend: str, passports: Iterable[Passport]) -> Estimate:
    """Estimate from passports of earlier engines of this model, else of other models scaled by file size."""
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
            per_byte * model.nbytes, model.nbytes, f"scaled by size from earlier engines of other models ({len(known)})"
        )
    return Estimate(None, model.nbytes, "no earlier record: size of the model")


def _earlier_passports(layout: OutputLayout, store: Store) -> list[Passport]:
    paths = [*(layout.folder / "engines").glob(f"{layout.stem}_*{layout.suffix}")]
    paths = [path for path in paths if passport_path(path).exists()] + [entry.path for entry in store.entries()[:50]]
    found = []
    for path in paths:
        with contextlib.suppress(TrtEngineError, OSError):
            found.append(Engine.open(path).passport)
    return found


@dataclass
class Preflight:
    """The checks of one run, in order; `run` raises the first failure after all checks."""

    model: Model
    layout: OutputLayout
    config: SizeConfig
    build: BuildConfig
    backend_spec: BackendSpec
    batches: Sequence[int]
    checks: list[PreflightCheck] = field(default_factory=list)
    failures: list[TrtEngineError] = field(default_factory=list)
    installation: Installation | None = None
    """TensorRT installation and GPUs to check; None: those of this machine."""

    def __post_init__(self) -> None:
        self.build = with_default_device(self.build)

    def run(self) -> tuple[PreflightCheck, ...]:
        """Run and log all checks."""
        self.add_ok(
            "model", f"`{self.model.path}`, {format_bytes(self.model.nbytes)}, opset {self.model.opsets.get('', '?')}"
        )
        self._check_operators()
        self._check_versions()
        self._check_device()
        self._check_kernels()
        self._check_placement()
        self._check_folder()
        guess = estimate(self.model, self.backend_spec.name, _earlier_passports(self.layout, Store()))
        self._check_disk(guess)
        self._check_memory(guess)
        self._estimate_time(guess)
        if self.failures:
            raise self.failures[0]
        return tuple(self.checks)

    def add_ok(self, name: str, text: str) -> None:
        self.checks.append(PreflightCheck(name, "ok", text))
        log.info("ok    %s: %s", name, text)

    def add_warning(self, name: str, text: str, hint: str | None = None) -> None:
        self.checks.append(PreflightCheck(name, "warn", text, hint))
        log.warning("%s: %s%s", name, text, f" ({hint})" if hint else "")

    def add_failure(self, name: str, error: TrtEngineError) -> None:
        self.checks.append(PreflightCheck(name, "fail", error.message, error.hint))
        self.failures.append(error)
        log.error("%s: %s", name, error.message)

    def _check_operators(self) -> None:
        try:
            if self.backend_spec.provides("check_model") and not self.backend_spec.missing_modules():
                self.backend_spec.load_function("check_model")(self.model)
            else:
                check_operators(self.model.graph, self.model.path)
        except ModelError as error:
            self.add_failure("operators", error)
        else:
            self.add_ok("operators", "all known")

    def _check_versions(self) -> None:
        if missing := self.backend_spec.missing_modules():
            self.add_failure(
                "tool",
                SetupError(
                    f"the backend `{self.backend_spec.name}` needs {', '.join(missing)}", hint=self.backend_spec.install
                ),
            )
            return
        names = dict.fromkeys((*self.backend_spec.modules, "onnx", "numpy"))
        versions = [f"{name} {found}" for name in names if (found := distribution_version(name))]
        python = ".".join(map(str, sys.version_info[:3]))
        self.add_ok("tool", f"trt-engine {distribution_version('trt-engine')}, Python {python}, {', '.join(versions)}")

    def _check_device(self) -> None:
        devices = self.backend_spec.devices
        try:
            kind, number = parse_device(self.build.device)
            if kind not in devices:
                raise UsageError(
                    f"the backend `{self.backend_spec.name}` runs on {', '.join(devices)}, not on `{self.build.device}`",
                    hint=f"`--device {devices[0]}`, or another `--backend`",
                )
        except UsageError as error:
            self.add_failure("device", error)
            return
        if kind != "cuda":
            host = info.cpu()
            self.add_ok(
                "device",
                f"{self.build.device}: {host.name}, {host.cores} cores" if kind == "cpu" else self.build.device,
            )
            return
        boards = info.gpus() if self.installation is None else self.installation.gpus
        board = next((item for item in boards if item.index == number), None)
        if board is None and self.backend_spec.tools and not boards:  # the tool finds GPUs without NVML
            self.add_warning(
                "device",
                f"no GPU visible (NVML is missing); {self.backend_spec.tools[0]} checks for `{self.build.device}`",
            )
            self._check_tensorrt(None)
            return
        if board is None:
            self.add_failure(
                "device",
                SetupError(
                    f"GPU `{self.build.device}` not found",
                    hint="`nvidia-smi` lists the GPUs, `trt-engine doctor` shows what is missing; or `--device cpu`",
                ),
            )
            return
        self.add_ok(
            "device",
            f"{board.name}, {board.memory_mib} MiB, compute capability {board.compute_capability}, driver {board.driver}",
        )
        self._check_precision(board)
        self._check_tensorrt(board)

    def _check_tensorrt(self, gpu: info.Gpu | None) -> None:
        """Checks of `doctor`: bindings, libraries, trtexec, driver, this GPU and the precision."""
        by_tool = "trtexec" in self.backend_spec.tools
        if not (by_tool or "tensorrt" in self.backend_spec.modules) or self.backend_spec.missing_modules():
            return
        here = replace(self.installation or detect_installation(), gpus=() if gpu is None else (gpu,))
        own = replace(here, packages=(), bundled=()) if by_tool else here  # trtexec does not load the wheels' libraries
        for look, seen in (
            (parts.version_consistency, here),
            (parts.cuda_packages, own),
            (parts.duplicate_libraries, own),
            (parts.driver_and_cuda, own),
            (parts.gpu_support, own),
        ):
            for item in look(seen):
                self._add_diagnosis(item)
        self._check_min_tensorrt(own.trtexec_version if by_tool else own.python_version, own.cuda_major or 12)

    def _add_diagnosis(self, item: Diagnosis) -> None:
        """Add a finding of `doctor` as a check."""
        if item.status == "problem":
            self.add_failure(item.name, SetupError(item.message, hint=item.fix or "see `trt-engine doctor`"))
        elif item.status == "warning":
            self.add_warning(item.name, item.message, item.fix)
        else:
            self.add_ok(item.name, item.message)

    def _check_min_tensorrt(self, version: Version | None, cuda: int) -> None:
        """Fail if TensorRT is older than the first release with the precision."""
        asked = self.build.precision
        first = precision_since(asked) if asked is not None else None
        if version is not None and first is not None and version < first:
            self.add_failure(
                "precision-tensorrt",
                SetupError(
                    f"{asked} needs TensorRT {first} or newer, installed is {version}",
                    hint=f'pip install "tensorrt-cu{cuda}>={first}"',
                ),
            )

    def _check_precision(self, gpu: info.Gpu) -> None:
        asked = self.build.precision
        if asked is None:
            return
        needed = COMPUTE_CAPABILITY[asked]
        found = tuple(int(part) for part in gpu.compute_capability.split("."))
        if found < needed:
            wanted = ".".join(map(str, needed))
            self.add_failure(
                "precision",
                SetupError(
                    f"{asked} needs compute capability {wanted}, {gpu.name} has {gpu.compute_capability}",
                    hint="`--precision fp16`" if found >= COMPUTE_CAPABILITY["fp16"] else "`--precision fp32`",
                ),
            )
        else:
            self.add_ok("precision", f"{asked} on compute capability {gpu.compute_capability}")

    def _check_kernels(self) -> None:
        """Check that the backend has kernels for the precision, before the build."""
        if self.build.precision is None or not self.backend_spec.provides("unsupported_precision") or self.failures:
            return
        if (error := self.backend_spec.load_function("unsupported_precision")(self.model, self.build)) is not None:
            self.add_failure("kernels", error)

    def _check_placement(self) -> None:
        """Check that Q/DQ placement matches the target library."""
        try:
            target, said = plan_placement(self.model, self.build)
        except PrecisionError as error:
            self.add_failure("quantisation", error)
            return
        if said is not None:
            self.add_warning("quantisation", said)
        elif target is not None:
            self.add_ok("quantisation", f"for {quant_target(target).title}")

    def _check_folder(self) -> None:
        place = _existing_parent(self.layout.folder)
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            self.add_failure("folder", os_error(error, self.layout.folder))
            return
        self.add_ok("folder", f"`{self.layout.folder}`{'' if self.layout.folder.exists() else ' (will be created)'}")

    def _check_disk(self, estimated: Estimate) -> None:
        place = _existing_parent(self.layout.folder)
        free = shutil.disk_usage(place).free
        least = 2 * estimated.nbytes + _SLACK_BYTES  # one engine, in store and folder
        most = 2 * estimated.nbytes * len(self.batches) + _SLACK_BYTES
        text = (
            f"{format_bytes(free)} free, {format_bytes(least)} needed, "
            f"{format_bytes(most)} if N doubles to {self.batches[-1]}"
        )
        full = SetupError(
            f"the disk of `{self.layout.folder}` has {text}", hint="free space, or use another disk with `-o`"
        )
        self._compare("disk", free, (least, most), text, full, "`trt-engine cache prune` frees space")
        self._check_store_disk(estimated)

    def _compare(
        self, name: str, free: int, needed: tuple[int, int], text: str, error: TrtEngineError, hint: str | None = None
    ) -> None:
        """Compare free bytes with the minimum (else `error`) and the usual need (else a warning with `hint`)."""
        if free < needed[0]:
            self.add_failure(name, error)
        elif free < needed[1]:
            self.add_warning(name, text, hint)
        else:
            self.add_ok(name, text)

    def _check_store_disk(self, estimated: Estimate) -> None:
        """Check the disk of the store, where engines are built, if it is a different one."""
        folder = Store().folder
        place = _existing_parent(folder)
        if place.stat().st_dev == _existing_parent(self.layout.folder).stat().st_dev:
            return
        free, least = shutil.disk_usage(place).free, estimated.nbytes + _SLACK_BYTES
        text = f"{format_bytes(free)} free on the disk of the store `{folder}`, {format_bytes(least)} needed"
        full = SetupError(text, hint="`trt-engine cache prune`, or another disk with `TRT_ENGINE_STORE`")
        self._compare("store", free, (least, least), text, full)

    def _check_memory(self, estimated: Estimate) -> None:
        free = available_memory()
        batch = self.batches[0]
        tensors = (
            2
            * batch
            * sum(dtype(spec.dtype).nbytes([max(step, 1) for step in spec.shape[1:]]) for spec in self.model.signature)
        )
        least = 2 * self.model.nbytes + _PROCESS_BYTES
        usual = least + estimated.nbytes + tensors
        text = f"{format_bytes(free)} available, about {format_bytes(usual)} needed at batch {batch}, plus activations"
        full = MemoryExhausted(
            f"{format_bytes(free)} of memory available, loading the model takes {format_bytes(least)}",
            hint="end other programs, or use a machine with more memory",
        )
        self._compare("memory", free, (least, usual), text, full, "use a smaller `--start-batch`")

    def _estimate_time(self, estimated: Estimate) -> None:
        each = self.config.warmup_s + self.config.duration_s
        text = f"2 measurements of {each:g} s, and 1 more for every doubling"
        if self.config.deadline_ms is not None and self.config.curve is None:
            text += f"; the latency curve takes {self.config.duration_s:g} s for each batch size and number of contexts"
        if estimated.seconds is not None:
            size = format_bytes(estimated.nbytes)
            text += f"; a build takes about {estimated.seconds:.1f} s and {size} ({estimated.source})"
        else:
            text += "; no earlier build for an estimate"
        self.add_ok("time", text)


def _existing_parent(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place

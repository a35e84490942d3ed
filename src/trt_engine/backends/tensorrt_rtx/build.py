"""Builds a TensorRT-RTX plan, for GPUs that need not be in this machine.

The builder fuses and plans; the machine that runs the plan compiles kernels. Nothing is timed, so a build has no timing
cache and takes seconds. Compute dtypes are read from the builder's log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trt_engine.backends.tensorrt import configure, cuda_driver
from trt_engine.backends.tensorrt.allocator import CountingAllocator
from trt_engine.backends.tensorrt.binding import TENSORRT_RTX
from trt_engine.backends.tensorrt.build import BuildJob
from trt_engine.backends.tensorrt.build_progress import BuildProgress, run_in_thread
from trt_engine.backends.tensorrt.cuda_driver import TargetGpu
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.backends.tensorrt.number_formats import GpuFormats
from trt_engine.config.build import BuildConfig
from trt_engine.errors import BuildError, EngineError, SetupError, UsageError
from trt_engine.graph import dtype_breakdown as of_graph
from trt_engine.graph.dtype_breakdown import data_types, first_float32_matmul
from trt_engine.model import Model
from trt_engine.plan_header import PlanHeader, plan_header
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.records.passport import DtypeShare, Precision, Requirements
from trt_engine.trt.gpu_targets import RTX_TARGETS, rtx_targets, sm_label
from trt_engine.trt.layers import dtype_shares, is_layer_list, parse_layer_list, read_layers
from trt_engine.trt.rtx_settings import RtxSettings, parse
from trt_engine.trt.versions import RTX_COMPUTE_CAPABILITY

_TURING = "7.5"
_FORMATS = GpuFormats(TENSORRT_RTX.product, RTX_COMPUTE_CAPABILITY, RTX_TARGETS)


class TensorRtRtxBuilder:
    """Builds one plan for one or several GPUs with TensorRT-RTX's builder."""

    def identity(self, config: BuildConfig) -> str:
        """`tensorrt-rtx 1.7.1.116 sm89,sm120`, or `... all`."""
        _, _, targets = _check_request(config)
        return f"tensorrt-rtx {TENSORRT_RTX.version_text} {','.join(map(sm_label, targets)) or 'all'}"

    def build(self, model: Model, config: BuildConfig, places: BuildPaths) -> BuildOutcome:
        settings, here, targets = _check_request(config)
        proto = model.proto
        formats = data_types(proto)
        warnings = []
        if not targets and (lacking := _FORMATS.unsupported(formats, DEFAULT_TARGETS)):
            targets = tuple(target for target in DEFAULT_TARGETS if target not in lacking)
            warnings.append(f"built for {', '.join(targets)}: {_format_unsupported(lacking)}")
        _FORMATS.check(model.path, formats, targets)
        if _TURING in targets and (node := first_float32_matmul(proto)) is not None:
            others = [sm_label(target) for target in targets if target != _TURING]
            raise SetupError(
                f"`{model.path.name}` multiplies matrices in FP32 (first in `{node}`), which TensorRT-RTX does not build "
                f"for {_TURING} (Turing)",
                hint="`trt-engine cast --to fp16` first" + (f", or `--gpus {','.join(others)}`" if others else ""),
            )
        if config.timing_cache is not None:
            warnings.append("`--timing-cache` is not used: TensorRT-RTX times nothing during a build")
        progress = BuildProgress(places.on_status)
        board = here if isinstance(here, TargetGpu) else None
        with _RtxLogger(places.log, binding=TENSORRT_RTX) as logger:
            job = _RtxBuildJob(
                model,
                config,
                settings.to_plan_settings,
                replace(places, timing_cache=None),
                board,
                logger,
                progress,
                warnings=warnings,
                log=logger,
                rtx_settings=settings,
                targets=targets,
                load_blocker=load_blocker(targets, here),
                formats=frozenset(formats),
            )
            return run_in_thread(job.run, progress)


def _check_request(config: BuildConfig) -> tuple[RtxSettings, TargetGpu | SetupError, tuple[str, ...]]:
    """The settings, the local GPU and the target GPUs (empty: all), validated; an error if unsupported."""
    settings = parse(config.options)
    TENSORRT_RTX.check_version()
    here = local_gpu(config.device)
    targets = build_targets(config, here)
    if config.precision is not None and (lacking := _FORMATS.unsupported({config.precision: ""}, targets)):
        having = [target for target in RTX_TARGETS if not _FORMATS.unsupported({config.precision: ""}, [target])]
        raise SetupError(
            f"TensorRT-RTX has no {config.precision} for {', '.join(lacking)}, it has it for {', '.join(having)}",
            hint=f"`--gpus {','.join(map(sm_label, having))}`, or another `--precision`",
        )
    wanted = "strip_weights" if settings.strip_weights else "refit" if settings.refit != "none" else None
    if wanted is not None and (reason := load_blocker(targets, here)) is not None:
        raise SetupError(
            f"`-O {wanted}` compiles kernels as it builds, which needs a GPU that the plan is for: {reason}",
            hint="leave it out, or build on a machine with such a GPU",
        )
    return settings, here, targets


def _format_unsupported(lacking: dict[str, str]) -> str:
    """`8.0, 8.6 have no fp8`."""
    kinds = {kind: [gpu for gpu, its in lacking.items() if its == kind] for kind in dict.fromkeys(lacking.values())}
    return "; ".join(
        f"{', '.join(gpus)} {'have' if len(gpus) > 1 else 'has'} no {kind}" for kind, gpus in kinds.items()
    )


class _RtxLogger(TensorRtLogger):
    """The logger, which also stores data only in the build log: layers, and memory of weights and activations."""

    layers: str | None = None
    activation_nbytes: int | None = None

    def log(self, severity: Any, msg: str) -> None:
        if is_layer_list(msg):
            self.layers = msg
        elif (found := _ACTIVATIONS.match(msg)) is not None:
            self.activation_nbytes = int(found[1])
        super().log(severity, msg)


_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass
class _RtxBuildJob(BuildJob):
    """A build of TensorRT-RTX."""

    log: _RtxLogger = field(kw_only=True)
    rtx_settings: RtxSettings = field(kw_only=True)
    targets: tuple[str, ...] = field(kw_only=True)
    """Compute capabilities; empty for the builder's default."""
    load_blocker: str | None = field(kw_only=True)
    """Why the plan cannot be loaded on this machine."""
    formats: frozenset[str] = field(kw_only=True)
    """Number formats of the graph."""

    def setting_warnings(self) -> Iterator[str]:
        if self.rtx_settings.weight_streaming:
            yield "weights that are streamed in make an inference slower, and no CUDA graph can be captured of it"
        if self.rtx_settings.profiling_verbosity != "detailed":
            yield "without `profiling_verbosity=detailed` the builder does not log its layers: no dtype breakdown"

    def configure(self, builder: Any, config: Any) -> None:
        binding, own = self.binding, self.rtx_settings
        self._set_targets(config)
        self._warn(*configure.set_workspace(binding, config, self.config.workspace_mib))
        configure.set_flag(binding, config, "TF32", self.config.precision == "tf32", "--precision")
        configure.set_refit(binding, config, self.settings)
        for name in ("weight_streaming", "require_user_allocation"):
            configure.set_flag(binding, config, name.upper(), getattr(own, name), f"-O {name}")
        configure.set_verbosity(binding, config, own.profiling_verbosity)

    def _set_targets(self, config: Any) -> None:
        config.num_compute_capabilities = len(self.targets)
        for index, target in enumerate(self.targets):
            member = self.binding.enum_member("ComputeCapability", sm_label(target), "--gpus")
            taken = config.set_compute_capability(member, index)
            if not taken or config.get_compute_capability(index) != member:
                raise UsageError(f"TensorRT-RTX does not take `--gpus {sm_label(target)}`", hint="`trt-engine doctor`")

    def note_settings(self, config: Any) -> None:
        trt = self.binding.trt
        self.notes |= {
            "typing": "strong",
            "tf32": "on" if config.get_flag(trt.BuilderFlag.TF32) else "off",
            "gpus": ", ".join(self.targets) or "all",
        }

    def check_plan(self) -> str:
        version = super().check_plan()
        header = plan_header(self.paths.payload)
        assert header is not None  # `check_plan` has read it
        if (why := _header_mismatch(header, self.targets, self.paths.payload.stat().st_size)) is not None:
            raise BuildError(f"the plan does not match the request: {why}", hint="`trt-engine doctor`")
        self.notes["weights"] = f"{header.weight_nbytes or 0} bytes"
        if self.log.activation_nbytes is not None:
            self.notes["activation_memory"] = f"{self.log.activation_nbytes} bytes"
        return version

    def verify_plan(self, allocator: CountingAllocator | None) -> dict[str, DtypeShare]:
        """Layer shares by dtype, from the engine if it loads on the local GPU, else from the builder's log."""
        found: dict[str, DtypeShare] = {}
        if self.load_blocker is not None:
            self.notes["not_loaded"] = self.load_blocker
        else:
            try:
                found = super().verify_plan(allocator)
            except EngineError as error:  # it loads, but has no layer information
                self._warn(f"the engine's own layers cannot be read: {error.message}")
        found = found or self._logged_layers()
        if "mxfp8" in self.formats and found and "mxfp8" not in found:
            self._warn_mxfp8(Precision(None, found).main_dtype or "floating point")
        return found

    def requirements(self, version: str, plugins: tuple[str, ...]) -> Requirements:
        header = plan_header(self.paths.payload)
        assert header is not None
        return Requirements(
            library="tensorrt-rtx",
            version=version,
            compute_capabilities=header.compute_capabilities,
            stripped=self.rtx_settings.strip_weights,
        )

    def _logged_layers(self) -> dict[str, DtypeShare]:
        if self.log.layers is None:
            return {}
        layers = read_layers(parse_layer_list(self.log.layers))
        self.notes |= {"layers": str(len(layers)), "layers_from": "the builder's log"}
        return dtype_shares(layers, self._macs_by_node())

    def _warn_mxfp8(self, kind: str) -> None:
        count = of_graph.count_parameters(self.model.graph).count
        self._warn(
            f"TensorRT-RTX unpacks MXFP8 and multiplies in {kind}, and keeps its scales in FP32, of small matrices one for "
            f"each weight: the plan has {self.notes['weights']} of weights, FP32 would be {4 * count} and FP8 {count}"
        )


def _header_mismatch(header: PlanHeader, targets: tuple[str, ...], nbytes: int) -> str | None:
    """The first mismatch between header and request; None if they match."""
    if header.product != TENSORRT_RTX.product:
        return f"it is a {header.title}"
    wanted = targets or DEFAULT_TARGETS
    if header.compute_capabilities != wanted:
        return f"requested were {', '.join(wanted)}, its header names {header.gpus or 'no GPU'}"
    return header.find_damage(nbytes)


DEFAULT_TARGETS = RTX_TARGETS[1:]
"""The builder's default targets. Source: the header of such a plan of 1.7.1, which has no 7.5."""
_RUN_OPTIONS = ("memory_strategy", "weight_streaming_budget", "count_allocations", "kernel_specialization")


def local_gpu(device: str) -> TargetGpu | SetupError:
    """The GPU of `cuda:0`, or why it is missing."""
    try:
        return cuda_driver.find_gpu(device)
    except SetupError as error:
        return error


def build_targets(config: BuildConfig, gpu: TargetGpu | SetupError) -> tuple[str, ...]:
    """The compute capabilities to build for: the requested, else the local GPU's; empty for all."""
    if config.gpus:
        return rtx_targets(config.gpus)
    own = gpu.compute_capability if isinstance(gpu, TargetGpu) else ""
    return (own,) if own in RTX_TARGETS else ()


def load_blocker(targets: tuple[str, ...], gpu: TargetGpu | SetupError) -> str | None:
    """Why a plan for these GPUs cannot be loaded on this machine; None where it can. No target stands for all of them."""
    if isinstance(gpu, SetupError):
        return f"no GPU can be used here: {gpu.message}"
    own = gpu.compute_capability
    if not own or own in (targets or DEFAULT_TARGETS):  # the fake device accepts any target
        return None
    return f"the plan is for {', '.join(targets or DEFAULT_TARGETS)}, and this machine has {gpu.name} ({own})"


def parity_options(model: Path, config: BuildConfig) -> dict[str, str] | str:
    """The `-O` to load an engine just built from `model`, or why it cannot be loaded here."""
    here = local_gpu(config.device)
    if (reason := load_blocker(build_targets(config, here), here)) is not None:
        return reason
    settings = parse(config.options)
    options = {name: config.options[name] for name in _RUN_OPTIONS if name in config.options}
    if settings.strip_weights:
        options["refit_from"] = str(model)
    return options

"""Settings of `build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trt_engine.config.parse import (
    device_name,
    parse_batch,
    parse_gpus,
    parse_names,
    parse_shapes,
    parse_workspace_mib,
)
from trt_engine.config.precision import PRECISIONS, PREPROCESS_METAVAR, parse_precisions
from trt_engine.config.profiles import Profile, check_known_shape, parse_profile, profile_for
from trt_engine.config.settings import Config, inputs_option, opt, path_text, settings
from trt_engine.errors import UsageError
from trt_engine.tensors import Shape, Signature
from trt_engine.units import parse_duration

OBJECTIVES = ("latency", "throughput", "deadline")
"""What candidates are compared by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig(Config):
    """Build settings."""

    GROUP: ClassVar[str] = "Build"

    backend: str = opt(
        "onnxruntime", "the backend that builds", flags="--backend -b", value_help="trt_engine.backend:backend_names"
    )
    device: str = opt(
        "", "the device to build for: cpu, cuda:0, ... [default: the backend's own, cpu where it has it]",
        parse=device_name, metavar="cpu|cuda:N",
    )  # fmt: skip
    precision: str | None = opt(None, "what the engine must compute in [default: as the graph is]", choices=PRECISIONS)
    calib_data: str | None = opt(
        None, "calibration data where `--precision` requires quantising the graph: a folder, .npz", metavar="DATA",
        group="Input", parse=path_text,
    )  # fmt: skip
    preprocess: str | None = opt(
        None, "how images of `--calib-data` become inputs, instead of what the model declares",
        metavar=PREPROCESS_METAVAR, group="Input", parse=path_text,
    )  # fmt: skip
    profiles: tuple[Profile, ...] = opt(
        (), "min,opt,max shapes, as images:1x3x640x640,8x3x640x640,64x3x640x640", flags="--profile",
        parse=parse_profile, multiple=True, metavar="SPEC", group="Input",
    )  # fmt: skip
    batch: tuple[int, int, int] | None = opt(
        None, "min:opt:max when only the batch moves", parse=parse_batch, metavar="MIN:OPT:MAX", group="Input",
        to_text=lambda batch: ":".join(map(str, batch)),
    )  # fmt: skip
    shapes: dict[str, Shape] = opt(
        {}, "sizes of dynamic dimensions, as images:1x3x640x640", parse=parse_shapes, metavar="SPEC", group="Input"
    )
    inputs: Path | None = inputs_option(
        "values of inputs that parity and calibration use, a .npz by name or a .npy of one; the engine takes their shapes "
        "unless others are given [default: seeded random]"
    )
    workspace_mib: int = opt(
        32768, "scratch memory the builder may use, as 32GiB (not for onnxruntime)",
        flags="--workspace", parse=parse_workspace_mib, metavar="SIZE", to_text=lambda mib: f"{mib}MiB", ge=1,
    )  # fmt: skip
    timing_cache: Path | None = opt(
        None, "the file tactics' timings are kept in [default: one in the store for each library version and GPU]",
        flags="--timing-cache", parse=Path, metavar="FILE", in_key=False,
    )  # fmt: skip
    gpus: tuple[str, ...] = opt(
        (), "GPUs the engine is for, as sm89,sm120, 8.9 or a GPU's name; one plan for all of them "
        "[default: this machine's GPU, else every GPU the backend builds for]", flags="--gpus", parse=parse_gpus,
        metavar="GPU[,GPU...]",
    )  # fmt: skip
    precisions: tuple[str, ...] = opt(
        (), "further precisions to build and measure, as fp16,bf16; the fastest that is accurate enough is chosen",
        parse=parse_precisions, metavar="P,P", group="Candidates",
    )  # fmt: skip
    time_budget_s: float | None = opt(
        None, "how long candidates are built and measured; 0 measures none [default: 5min; 20s where only settings of one "
        "backend are]", flags="--time-budget", parse=parse_duration, metavar="TIME", ge=0, group="Candidates",
    )  # fmt: skip
    optimize_for: str = opt(
        "latency", "what is measured: the median at the profile's optimum, queries per second at its maximum, or queries "
        "per second of those whose p99 is within `--deadline-ms`", choices=OBJECTIVES, group="Candidates",
    )  # fmt: skip
    max_p99_ms: float | None = opt(
        None,
        "the p99 that `--optimize-for deadline` allows",
        flags="--deadline-ms",
        gt=0,
        metavar="MS",
        group="Candidates",
    )
    accuracy_data: str | None = opt(
        None, "labelled dataset that every candidate is evaluated on, as for evaluate", metavar="DATASET",
        parse=path_text, in_key=False, group="Candidates",
    )  # fmt: skip
    accuracy_drop: float = opt(
        0.01, "how far a candidate's AP or top-1 may be below that of the first", ge=0, group="Candidates"
    )
    retry: bool = opt(
        True, "retry after known failures with changed settings, logged (`--no-retry` to stop at the first failure)",
        in_key=False, group="Advanced",
    )  # fmt: skip
    providers: tuple[str, ...] = opt(
        (), "ONNX Runtime's providers in order of preference, as cuda,cpu", parse=parse_names,
        metavar="cpu|cuda|tensorrt|tensorrt-rtx", group="Advanced",
    )  # fmt: skip
    allow_fallback: bool = opt(
        False, "let a provider that cannot run be replaced by the next; it is recorded", group="Advanced"
    )
    fuse: bool = opt(
        True,
        "fuse attention, norms and activations into ONNX Runtime's operators (`--no-fuse` to leave the graph as it is)",
        group="Advanced",
    )  # fmt: skip
    parity: bool = opt(
        True, "compare the engine with plain ONNX Runtime on one input (`--no-parity` to leave it out)", in_key=False,
        group="Advanced",
    )  # fmt: skip
    parity_rtol: float | None = opt(
        None, "largest difference allowed, relative to the largest reference value [default: 0.001, and more for a graph "
        "that rounds more coarsely than fp32]", in_key=False, gt=0, group="Advanced",
    )  # fmt: skip
    options: dict[str, str] = opt(
        {}, "the backend's own settings (a wrong name lists the right ones)", flags="-O --option", metavar="NAME=VALUE",
        multiple=True, group="Advanced",
    )  # fmt: skip

    def key(self) -> dict[str, Any]:
        """The settings that make two engines different, by name."""
        return {item.name: getattr(self, item.name) for item in settings(self) if item.in_key}

    def resolve(self, signature: Signature) -> tuple[Profile, ...]:
        """The profiles this model is built with; every dynamic dimension has a range in each.

        Raises `UsageError` for a name the model does not have and `ShapeError` for a missing dynamic size.
        """
        if self.profiles and self.batch:
            raise UsageError("`--profile` and `--batch` contradict each other", hint="give one of them")
        if not self.profiles:
            return (profile_for(signature, batch=self.batch, shapes=self.shapes, flag="--shapes"),)
        complete = []
        for profile in self.profiles:
            for name, span in profile.ranges.items():
                spec = signature.input(name)
                for shape in (span.min, span.opt, span.max):
                    check_known_shape(spec, shape, "--profile")
            for name in self.shapes:
                if name in profile.ranges:
                    raise UsageError(
                        f"input `{name}` has both a `--profile` and a `--shapes`",
                        hint="a profile has min, opt and max: leave `--shapes` out for this input",
                    )
                signature.input(name)
            complete.append(profile_for(signature, shapes=self.shapes, ranges=profile.ranges, flag="--shapes"))
        return tuple(complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleConfig(Config):
    """Settings of a bundle besides those of its builds."""

    dims: Any = opt(
        (), "range of a dimension, in all components or in one: T=16:64:512, joint.T=8, T=::512 (repeatable)",
        flags="--dim", multiple=True, metavar="DIM=MIN:OPT:MAX", accepts="Mapping[str, object] | Iterable[str]",
    )  # fmt: skip
    profiles: Any = opt(
        (), "range of one input, as encoder:audio_signal:1x128x16,1x128x64,1x128x512 (repeatable)", flags="--profile",
        multiple=True, metavar="COMPONENT:INPUT:SPEC", accepts="Iterable[str]",
    )  # fmt: skip
    onnx_dir: Path | None = opt(None, "folder of the ONNX files [default: that of META]", parse=Path, metavar="DIR")
    run: bool = opt(False, "run every engine, then all of them in a chain, on seeded inputs")
    rebuild: bool = opt(False, "build even if the folder or the store has the engines")
    overwrite: bool = opt(False, "overwrite existing files", group="Output")

"""Settings of `cast`, `quantize` and `ranges`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_engine.config.parse import parse_names, parse_shapes, parse_workspace_mib
from trt_engine.config.settings import Config, check_limits, inputs_option, opt
from trt_engine.errors import UsageError
from trt_engine.tensors import Shape, suggest

QUANTIZED_PRECISIONS = ("int8", "fp8", "int4", "nvfp4", "mxfp8")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", *QUANTIZED_PRECISIONS)
PREPROCESS_PRESETS = ("imagenet", "yolo", "rtdetr")
"""Pre-processing by name, wherever `--preprocess` takes a file; `yolo:640` names the size as well."""
PREPROCESS_METAVAR = "|".join(("FILE", *PREPROCESS_PRESETS))


def parse_precisions(text: str | Sequence[str]) -> tuple[str, ...]:
    names = parse_names(text)
    if (unknown := next((name for name in names if name not in PRECISIONS), None)) is not None:
        raise UsageError(f"unknown precision `{unknown}`", hint=suggest(unknown, PRECISIONS))
    return tuple(dict.fromkeys(names))


QUANT_TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda", "onnxruntime-tensorrt")
"""The libraries `quantize` places Q/DQ for (`graph/quant_target.py` has their rules)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs(Config):
    """Settings of runs on data, or on random inputs."""

    calib_data: Any = opt(None, "Images, a labelled dataset, .npy, .npz, .bin, .raw", metavar="PATH", group="Input")
    preprocess: Any = opt(
        None, "image pre-processing, instead of the declared one", metavar=PREPROCESS_METAVAR, group="Input",
        accepts="VisionSource | PreprocessFunction | None",
    )  # fmt: skip
    shapes: dict[str, Shape] = opt(
        {}, "shapes of random inputs, as input_ids:8x128", parse=parse_shapes, metavar="SPEC", group="Input"
    )
    inputs: Path | None = inputs_option(
        "values of inputs that the data has not, for every sample, a .npz by name or a .npy of one"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exclusions(_Inputs):
    """Settings of a rewrite: the nodes that it leaves alone."""

    exclude_nodes: tuple[str, ...] = opt(
        (), "leave this node, or PyTorch module (`layer4.1`), as it is", flags="--exclude-node", multiple=True,
        parse=str, metavar="NAME",
    )  # fmt: skip
    exclude_types: tuple[str, ...] = opt(
        (), "leave this operator type as it is", flags="--exclude-type", multiple=True, parse=str, metavar="OP"
    )
    exclude_patterns: tuple[str, ...] = opt(
        (), "leave nodes whose names or modules fit this pattern, as '/head/*'", flags="--exclude-pattern",
        multiple=True, parse=str, metavar="GLOB",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CastConfig(_Exclusions):
    """Settings of a cast to FP16 or BF16."""

    def __post_init__(self) -> None:
        check_limits(self)
        for flag in ("auto_exclude", "clamp_masks"):
            if self.autocast and getattr(self, flag):
                raise UsageError(
                    f"`--{flag.replace('_', '-')}` does not apply to `--autocast`", hint="leave one of them out"
                )

    calib_data: Any = opt(
        None, "Images, a labelled dataset, .npy, .npz, .bin, .raw for `--auto-exclude`, `--autocast` and parity "
        "[default: random]", metavar="PATH", group="Input",
    )  # fmt: skip
    ranges: Any = opt(
        None, "a report of `ranges`, or largest values by tensor: what leaves the range stays in FP32", flags="",
        accepts="RangesReport | CalibrationResult | Mapping[str, float] | None",
    )  # fmt: skip
    keep_io: bool = opt(True, "keep inputs and outputs in FP32 (`--no-keep-io` to cast them)")
    auto_exclude: bool = opt(False, "keep nodes in FP32 whose values leave the type's range on the data")
    max_constant: float | None = opt(None, "keep larger constants in FP32 [default: the type's maximum]", gt=0)
    clamp_masks: bool = opt(False, "clamp masks such as -1e9 to the type's largest value")
    autocast: bool = opt(False, "let NVIDIA ModelOpt's AutoCast decide (extra `quant`)")
    parity: bool = opt(True, "compare with the FP32 model in ONNX Runtime (`--no-parity` to leave it out)")
    seed: int = opt(0, "seed of random inputs", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesConfig(_Inputs):
    """Settings of a pass over a model's tensors."""

    calib_data: Any = opt(
        None, "Images, a labelled dataset, .npy, .npz, .bin, .raw [default: random inputs, a rough guess]", metavar="PATH",
        group="Input",
    )  # fmt: skip
    batch: int = opt(1, "rows per run", ge=1)
    max_samples: int | None = opt(None, "maximum of rows [default: all]", ge=1)
    headroom: float = opt(2.0, "factor by which values may grow", ge=1)
    memory_mib: int = opt(
        512, "memory for tensors at a time", flags="--memory-limit", parse=parse_workspace_mib, metavar="SIZE",
        to_text=lambda mib: f"{mib}MiB",
    )  # fmt: skip
    seed: int = opt(0, "seed of random inputs", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig(_Exclusions):
    """Quantisation settings: excluded nodes, calibration, weight rounding."""

    calib_data: Any = opt(
        None, "calibration data: images, a labelled dataset, .npy, .npz, .bin, .raw; `random` for a trial", metavar="DATA",
        group="Input",
    )  # fmt: skip
    preprocessing: Any = opt("", "what a `cache` knows a function of `preprocess` by: any JSON value", flags="")
    ranges: Any = opt(
        None, "known ranges of the activations, in place of data", flags="",
        accepts="CalibrationResult | Mapping[str, float] | None",
    )  # fmt: skip
    cache: Path | None = opt(None, "calibration cache; a hit needs no data", parse=Path, metavar="FILE", group="Input")
    emulate: Path | None = opt(
        None, "also write an FP32 graph that emulates the numerics on any CPU", parse=Path, metavar="FILE",
        group="Output",
    )  # fmt: skip
    target: str = opt(
        "tensorrt", "the library that will run the model: where its kernels want Q/DQ", choices=QUANT_TARGETS
    )
    dynamic: bool = opt(
        False, "quantise activations while running, without data (INT8 of MatMul and Gemm, `--target onnxruntime-cpu`)"
    )
    reduce_range: str = opt(
        "auto", "weights in 7 bits, so that kernels without VNNI do not overflow (`--target onnxruntime-cpu`; auto: as this "
        "processor needs)", choices=("auto", "on", "off"),
    )  # fmt: skip
    calibrator: Any = opt(
        None, "the rule for activations' ranges [default: mse for INT8, minmax for FP8 and NVFP4]",
        choices=("mse", "entropy", "percentile", "minmax"), accepts="Calibrator | str | None",
    )  # fmt: skip
    max_samples: int | None = opt(None, "how many samples of the data to take [default: all]", ge=1)
    calib_batch: int = opt(8, "how many samples run at once", ge=1)
    method: str = opt("rtn", "how weights are rounded: to nearest, or seen through the data", choices=("rtn", "awq"))
    block_size: int | None = opt(
        None, "elements under one scale in INT4 [default: the largest of 128, 64, 32, 16 that fits]"
    )
    weights_only: bool = opt(False, "leave activations as they are (NVFP4 and MXFP8; INT4 always does)")
    quantize_residuals: bool = opt(
        False, "quantise the other side of residual additions too, so that they fuse (INT8, FP8)"
    )
    bias_correction: bool = opt(
        True,
        "let biases take up what rounding weights takes away on average (INT8, FP8; `--no-bias-correction` to leave it)",
    )
    quantize_outputs: bool = opt(False, "quantise the last layer before each output as well")
    high_precision: str = opt("fp32", "what is not quantised computes in this", choices=("fp32", "fp16", "bf16"))
    emulate_convs: bool = opt(
        False, "let the emulation of INT4, NVFP4 and MXFP8 round convolutions too, which no kernel does"
    )
    parity: bool = opt(True, "compare with the model as it was (`--no-parity` to leave it out)")


QUANTIZE_DATA = ("calib_data", "preprocess", "preprocessing", "ranges", "cache", "emulate")
"""The settings of `QuantizeConfig` that name data and files of one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig(Config):
    """Settings of a calibration without a quantisation."""

    tensors: Any = opt(
        None, "the activations [default: all floating-point ones of the main graph]", flags="",
        accepts="Sequence[str] | None",
    )  # fmt: skip
    preprocess: Any = opt(
        None, "image pre-processing, instead of the declared one", flags="",
        accepts="VisionSource | PreprocessFunction | None",
    )  # fmt: skip
    preprocessing: Any = opt("", "what a `cache` knows a function of `preprocess` by: any JSON value", flags="")
    batch: int = opt(1, "rows per run", flags="")
    max_samples: int | None = opt(None, "maximum of samples [default: all]", flags="")
    cache: Path | None = opt(None, "the file of the result", flags="", parse=Path)
    memory_mib: int = opt(512, "memory for tensors at a time", flags="")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig(Config):
    """Settings of a search for the layers to quantise."""

    calib_data: Any = opt(
        None, "calibration data: a folder, .npy, .npz", metavar="DATA", accepts="Path | str | None",
    )  # fmt: skip
    to: str = opt("int8", "the format", choices=("int8", "fp8"))
    budget: float = opt(0.01, "maximum drop of AP or top-1: 0.01 is one point of AP", ge=0)
    subset: int = opt(128, "images for measuring each layer; the result is verified on all", ge=1)
    seed: int | None = opt(0, "seed of their selection", ge=0)
    max_groups: int | None = opt(
        None, "search over at most this many groups of neighbouring layers [default: every layer]", ge=1
    )
    batch: int | None = opt(None, "images per query [default: 8, within the profile]", ge=1)
    target: str | None = opt(
        None, "the library that will run the model [default: the measuring one]", choices=QUANT_TARGETS
    )
    preprocess: Any = opt(
        None, "Pre- and post-processing, instead of the declared one", metavar=PREPROCESS_METAVAR, group="Input",
        accepts="VisionSource | None",
    )  # fmt: skip
    out: Path | None = opt(
        None, "the folder for trials.jsonl, exclude.txt and search.json", flags="-o --out", parse=Path, group="Output"
    )
    overwrite: bool = opt(False, "overwrite existing files", group="Output")


def is_preset(preprocess: str) -> bool:
    """Whether that names a preset of pre-processing, `yolo` or `yolo:640`, and no file."""
    return preprocess.partition(":")[0] in PREPROCESS_PRESETS

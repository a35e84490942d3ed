"""The table of known failures of TensorRT and trtexec: their log texts, and what to do.

Texts are those of `samples/common` and `parsers/onnx` of the public TensorRT repository, of public logs, 8.5 to 11.1, and of
TensorRT-RTX 1.7; they are the same in trtexec's log and in the library's logger.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Rank = Literal["cause", "machine", "chain", "abort", "warning"]
"""Match types: a cause; a missing GPU or driver, also logged by builds that need none; a consequence of a cause; the end of
a process; a warning that explains other errors."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A failure's name, the pattern of its messages, and the hint of its error."""

    name: str
    pattern: re.Pattern[str]
    hint: str
    rank: Rank = "cause"


def _rule(name: str, pattern: str, hint: str, rank: Rank = "cause") -> Rule:
    return Rule(name, re.compile(pattern), hint, rank)


_MORE_WORKSPACE = "allow the builder more scratch memory: a larger `--workspace`, up to the GPU's memory"
_REBUILD = "build the engine again with the TensorRT that loads it; `trt-engine inspect` shows its version"
RULES: tuple[Rule, ...] = (  # the first match of a line wins
    _rule(
        "plugin_not_found",
        r"Plugin not found, are the plugin name, version, and namespace correct\?"
        r"|getPluginCreator could not find plugin|Cannot find plugin: |IPluginCreator not found in Plugin Registry"
        r"|No importer registered for op: \w+$"
        r"|[Pp]lugin (?:creator version \d+ )?was not found in (?:the )?plugin registry|failed to load \w+ plugin",
        "give the library that has the plugin (`-O plugins=libcustom.so`) or build where it is installed; for a model "
        "quantised with TensorRT's own operators (domains `trt`, `trt.plugins`) quantise the plain ONNX again with "
        "`trt-engine quantize`",
    ),
    _rule(
        "plugin_format_unsupported",
        r"could not find any supported formats consistent with input/output data types",
        "the plugin has no kernel for these data types: keep its inputs in fp32 (`trt-engine cast --exclude-node`)",
    ),
    _rule(
        "gpu_not_supported",
        r"Target GPU SM \d+ is not supported by this TensorRT release",
        "`trt-engine doctor` lists the TensorRT versions with kernels for this GPU",
    ),
    _rule(
        "gpu_not_supported",
        r"the model contains HW-specific datatypes",
        "quantise to a type the GPU has (INT8 runs on every one), or build for a GPU that has this one",
    ),
    _rule(
        "gpu_not_supported",
        r"Cannot compile operation (?:(?!Cannot compile).)* for \w+ \(SM\d+\)",
        "GPUs of that generation lack this kernel: `trt-engine cast --to fp16` for them, or build for newer ones alone",
    ),
    _rule(
        "build_target_invalid",
        r"Compute capability cannot be kNONE|Unexpected exception bad optional access",
        "the builder was not given every GPU it was to build for: name them, `--gpus sm89`",
    ),
    _rule(
        "platform_not_supported",
        r"does not support building engines on platforms other than",
        "build on that platform, or leave `-O runtime_platform` out",
    ),
    _rule(
        "weights_not_found",
        r"There are no weights named ",
        "names are those of the ONNX initializers; `-O refit=all` makes all of them replaceable",
    ),
    _rule(
        "data_type_not_supported",
        r"has datatype \w+ but is not consumed by",
        "4-bit tensors go into DequantizeLinear alone: give the network this input in another type and quantise it inside",
    ),
    _rule(
        "data_type_not_supported",
        r"Unsupported ONNX data type: (?!<UNKNOWN>)|Assertion failed: convert_?[dD]type\(",
        "this TensorRT lacks the type: `trt-engine lint --target tensorrt` names the tensor; put a Cast there",
    ),
    _rule(
        "scales_missing",
        r"no scaling factors detected|Missing scale and zero-point|quantizeBiasCommon|Assertion min_ <= max_ failed",
        "write the scales into the model, from finite data: `trt-engine quantize MODEL --to int8 --calib-data DATA`",
    ),
    _rule(
        "operator_not_supported",
        r"K exceeds the maximum value allowed",
        "TopK gives at most that many: a smaller K, or select outside the engine",
    ),
    _rule(
        "operator_not_supported",
        r"Attention operation was not supported by a dedicated kernel",
        "Attention has kernels for FP16 and BF16: `trt-engine cast --to fp16` or `--to bf16`; for FP32 export it as MatMul "
        "and Softmax (an opset before 23)",
    ),
    _rule(
        "operator_not_supported",
        r"was not supported by a dedicated kernel",
        "the operator has kernels for some data types and shapes alone: `trt-engine cast --to fp16` is the commonest",
    ),
    _rule(
        "onnx_parse_error",
        r"which is not an initializer|must be an initializer|must resolve to a build-time constant|axis is not a constant",
        "the value must be known when the engine is built: make it an initializer, or export again with fixed sizes",
    ),
    _rule(
        "build_stopped",
        r"\bBuildCanceled\b|Build canceled by user",
        "run it again; what was timed until then is in the timing cache",
    ),
    _rule(
        "file_not_found",
        r"Input file cannot be found, or is not a regular file|Error opening engine file|Could not open (?:file|input) "
        r"|[Ff]ailed to open (?:the )?(?:file|engine|model|weights|external|calibration)|Error reading engine file",
        "check the path, which is one of the folder that the program runs in: give the whole path",
    ),
    _rule(
        "unknown_option", r"Unknown option: ", "this trtexec does not have the option; `trtexec --help` lists its own"
    ),
    _rule(
        "static_model_given_shapes", r"Static model does not take explicit shapes", "leave the shapes out: none is open"
    ),
    _rule(
        "shape_mismatch",
        r"Static dimension mismatch while setting input shape|Required optimization profile is invalid"
        r"|The engine was built with static shapes for input tensor"
        r"|Cannot find input tensor with name (?:(?!Cannot find).)* in the network inputs"
        r"|Invalid tensor names found in --shapes"
        r"|values for profile \d+ violate shape constraints|reshape would change volume"
        r"|exceeds? min ~ max range|does not satisfy any optimization profile",
        "give shapes the model and its profiles hold (`trt-engine inspect` lists them)",
    ),
    _rule(
        "shape_mismatch",
        r"no optimization profile has been defined|dynamic input is missing dimensions|has no shape specified",
        "give the open sizes: `--batch 1:8:32`, or `--profile NAME:MIN:OPT:MAX` for other dimensions",
    ),
    _rule("insufficient_workspace", r"due to insufficient workspace|within workspace limit", _MORE_WORKSPACE),
    _rule(
        "out_of_memory",
        r"Requested amount of (?:GPU )?memory \(\d+ bytes\) could not be allocated|OutOfMemory"
        r"|User allocator error allocating|(?i:cuda(?:(?!cuda).)*out of memory)",
        "free the GPU of other processes, or build for a smaller batch",
    ),
    _rule(
        "library_not_found",
        r"version `\S+' not found \(required by",
        "it was compiled for a newer Linux than this one: install TensorRT's package for this distribution",
    ),
    _rule(
        "library_not_found",
        r"libnvinfer_lean",
        "a version-compatible plan needs TensorRT's lean runtime, which TensorRT-RTX does not have: leave "
        "`-O version_compatible` out, or install TensorRT's whole package",
    ),
    _rule(
        "library_not_found",
        r"error while loading shared libraries|symbol lookup error|cannot open shared object file"
        r"|(?:Could not|Unable to) (?:load|open) library",
        "put the folder of TensorRT's libraries into LD_LIBRARY_PATH",
    ),
    _rule(
        "no_implementation",
        r"has no runners that implement it",
        "this library has no kernel for the operator in these data types: `trt-engine lint` lists them; else end the "
        "graph before it and compute it outside the engine",
    ),
    _rule(
        "no_implementation",
        r"Could not find any implementation for node ",
        "`-O optimization_level=2` skips the optimisation that fails most often; a plugin's node needs its data types",
    ),
    _rule(
        "host_code_refused",
        r"engine_host_code_allowed|EngineHostCodeAllowed",
        "the plan holds code for the host: `-O allow_host_code=on` loads it, only where you trust who built it",
    ),
    _rule(
        "engine_incompatible",
        r"incompatible serialization version|stdVersionRead == kSERIALIZATION_VERSION|magicTagRead"
        r"|Serialization (?:assertion|Error)|not compatible with this version of TensorRT"
        r"|The engine plan file is generated on an incompatible device",
        _REBUILD,
    ),
    _rule("engine_incompatible", r"Engine deserialization failed", _REBUILD, "chain"),
    _rule("accuracy_failed", r"Accuracy validation FAILED", "outputs differ by more than `--accuracyThreshold`"),
    _rule(
        "cuda_unavailable",
        r"an illegal memory access was encountered",
        "random integers can be invalid indices: give trtexec the values of such inputs (`--loadInputs`)",
    ),
    _rule(
        "cuda_unavailable",
        r"CUDA driver version is insufficient for CUDA runtime version|no CUDA-capable device is detected"
        r"|Cannot find any available devices|Cannot find device ID|CUDA initialization failure|Cuda failure",
        "`nvidia-smi` must list the GPU; `trt-engine doctor` looks for the rest",
        "machine",
    ),
    _rule(
        "cuda_unavailable",
        r"CHECK\(status == CUDA_SUCCESS\) failed",
        "this step runs on the GPU, as it does for refittable and stripped engines: build where `nvidia-smi` lists one, or "
        "leave `-O refit` and `-O strip_weights` out",
    ),
    _rule(
        "builder_creation_failed",
        r"Builder creation failed",
        "`trt-engine doctor` looks at driver, CUDA and TensorRT's libraries",
        "chain",
    ),
    _rule(
        "onnx_parse_error",
        r"must have same input types|must be of same type",
        "the graph mixes data types that TensorRT does not convert: put a Cast between them",
    ),
    _rule(
        "onnx_parse_error",
        r"Failed to parse (?:onnx file|ONNX model)|Parsing model failed|UNSUPPORTED_NODE|INVALID_GRAPH|INVALID_NODE"
        r"|Model missing or format not recognized|ModelImporter\.cpp:\d+: (?:While parsing node|ERROR)",
        "`trt-engine inspect` lists what in the model TensorRT cannot take",
        "chain",
    ),
    _rule(
        "insufficient_workspace",
        r"Tactic Device request: \d+ ?[KMG]B Available: \d+|insufficient memory on requested size",
        _MORE_WORKSPACE,
        "warning",
    ),
    _rule(
        "aborted",
        r"Assertion failure: |Uncaught exception detected|terminate called|what\(\):  |-- assertion failed"
        r"|: Assertion [`\u2018][^`\u2018]*['\u2019] failed|^Assertion failed: .*, file "
        r"|(?:^|: line \d+: +\d+ )(?:Abort(?:ed)?|Segmentation fault|Illegal instruction|Bus error)\b",
        "an assertion or a fault inside a library ended the process: `-v` shows the messages before it",
        "abort",
    ),
)
RTX_HINTS = {
    "plugin_not_found": "TensorRT-RTX brings no plugins: end the graph before this operator and compute it outside the "
    "engine, write it with other operators, or build with TensorRT (`--backend tensorrt`)",
    "no_implementation": "TensorRT-RTX has no kernel for the operator in these data types: another type "
    "(`trt-engine cast`), the rest of the graph outside the engine, or `--backend tensorrt`",
}
"""Hints of failures where TensorRT-RTX lacks the option that helps with TensorRT."""

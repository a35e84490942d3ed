"""Why TensorRT or trtexec failed, from what it said.

The names are those of the project's log format (docs/trtexec.md) and `insufficient_workspace`, which the ladder
treats unlike any other. Tell-tale texts are those of `samples/common` and `parsers/onnx` of the public TensorRT repository
and of public logs, 8.5 to 11.1; they are the same whether trtexec printed them or the library's logger was told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from trt_engine.errors import (
    AccuracyError,
    BuildError,
    EngineError,
    MemoryExhausted,
    ModelError,
    SetupError,
    ShapeError,
    TrtEngineError,
)

__all__ = ["CAUSES", "Cause", "cause_of", "error_of"]


@dataclass(frozen=True, slots=True)
class Cause:
    """One known failure: its name, the message that carries it, and what the message holds."""

    name: str
    """One of `CAUSES`."""
    text: str
    node: str | None = None
    """The node of the graph, or of a missing plugin its name."""
    requested_bytes: int | None = None
    unknown_options: tuple[str, ...] = ()
    hint: str = ""
    """What to do, in the words of an error's hint."""

    @property
    def log_class(self) -> str:
        """The name as a log's `error_class`, whose list does not part a starved search from a fruitless one."""
        return "no_implementation" if self.name == "insufficient_workspace" else self.name


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    tells: re.Pattern[str]
    hint: str
    soft: bool = False
    """Warnings count too, and lines about a tactic that was skipped."""


def _rule(name: str, tells: str, hint: str, *, soft: bool = False) -> _Rule:
    return _Rule(name, re.compile(tells), hint, soft)


_MORE_WORKSPACE = "allow the builder more scratch memory: a larger `--workspace`, up to the GPU's memory"

_RULES: tuple[_Rule, ...] = (  # the more specific before what it also looks like
    _rule(
        "plugin_not_found",
        r"Plugin not found, are the plugin name, version, and namespace correct\?",
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
        "`trt-engine doctor` says which TensorRT versions have kernels for this GPU",
    ),
    _rule(
        "unknown_option",
        r"Unknown option: ",
        "this trtexec does not have the option; `trtexec --help` lists its own",
    ),
    _rule(
        "static_model_given_shapes",
        r"Static model does not take explicit shapes",
        "leave the shapes out: this model has no dynamic dimension",
    ),
    _rule(
        "shape_mismatch",
        r"Static dimension mismatch while setting input shape|Required optimization profile is invalid"
        r"|The engine was built with static shapes for input tensor"
        r"|Cannot find input tensor with name .* in the network inputs|Invalid tensor names found in --shapes",
        "give shapes the model and its profiles hold (`trt-engine inspect` lists them)",
    ),
    _rule(
        "insufficient_workspace",
        r"due to insufficient workspace",
        _MORE_WORKSPACE,
    ),
    _rule(
        "out_of_memory",
        r"Requested amount of GPU memory \(\d+ bytes\) could not be allocated|OutOfMemory"
        r"|(?i:cuda\w* ?(?:malloc|failure|error)?.*out of memory)",
        "free the GPU of other processes, or build for a smaller batch",
        soft=True,
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
        r"|Engine deserialization failed|The engine plan file is generated on an incompatible device",
        "build the engine again with the TensorRT that loads it; `trt-engine inspect` says which one made it",
    ),
    _rule(
        "accuracy_failed",
        r"Accuracy validation FAILED",
        "outputs differ from the references by more than `--accuracyThreshold`",
    ),
    _rule(
        "cuda_unavailable",
        r"CUDA driver version is insufficient for CUDA runtime version|no CUDA-capable device is detected"
        r"|Cannot find any available devices|Cannot find device ID|CUDA initialization failure|Cuda failure",
        "`nvidia-smi` must list the GPU; `trt-engine doctor` looks for the rest",
    ),
    _rule(
        "builder_creation_failed",
        r"Builder creation failed",
        "`trt-engine doctor` looks at driver, CUDA and TensorRT's libraries",
    ),
    _rule(
        "onnx_parse_error",
        r"Failed to parse onnx file|Parsing model failed|UNSUPPORTED_NODE|INVALID_GRAPH|INVALID_NODE"
        r"|Model missing or format not recognized|ModelImporter\.cpp:\d+: (?:While parsing node|ERROR)",
        "`trt-engine inspect` lists what in the model TensorRT cannot take",
    ),
    _rule(
        "insufficient_workspace",
        r"Tactic Device request: \d+ ?[KMG]B Available: \d+"
        r"|insufficient memory on requested size",
        _MORE_WORKSPACE,
        soft=True,
    ),
    _rule(
        "aborted",
        r"Assertion failure: |Uncaught exception detected|^Aborted\b|terminate called|Segmentation fault",
        "an assertion inside TensorRT failed: `-v` shows what it said before",
    ),
)
_STARVED = next(rule for rule in _RULES if rule.name == "insufficient_workspace" and rule.soft)

CAUSES: tuple[str, ...] = tuple(dict.fromkeys(rule.name for rule in _RULES))
"""The names a cause can have."""

_PREFIX = re.compile(
    r"^[\s>]*(?:\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] )?\[(?P<severity>[FEWIV])\] (?:\[TRT\] )?(?P<text>.*)$", re.DOTALL
)
_NODE = re.compile(
    r"implementation for node (?P<node>\{.*?\]\}|.+?)(?= due to insufficient workspace|\.(?:\)|\s|$)|\)?\s*$)"
)
_PARSED = re.compile(r"In node \d+ with name: (?P<node>.*?) and operator: (?P<operator>\S+)")
_PARSED_10 = re.compile(r"[Ww]hile parsing node number \d+ \[(?P<operator>\S+) ->")
_PLUGIN = re.compile(r"(?:using pluginName: |Searching for plugin: )(?P<node>[^,\s]+)")
_BYTES = re.compile(
    r"(?:GPU memory \(|Requested size was |tried to allocate )(?P<bytes>\d+) bytes"
    r"|Tactic Device request: (?P<count>\d+) ?(?P<unit>[KMG])B"
)
_UNKNOWN = re.compile(r"Unknown option: (?P<option>.*?)\s*$")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cause_of(messages: Iterable[str]) -> Cause | None:
    """The known failure behind these messages, the most specific one; None when none is recognised.

    Messages are lines of a trtexec log, or what TensorRT's logger was told at warning or worse. Of prefixed lines those of
    information are passed over, and warnings count only where a warning can be the reason.
    """
    lines = [_parted(message) for message in messages]
    found = next((hit for rule in _RULES if (hit := _hit(rule, lines))), None)
    if found is None:
        return None
    cause = _detailed(found, [text for _, text in lines])
    if cause.name == "no_implementation" and (starved := _hit(_STARVED, lines)):
        # tactics were left out for want of scratch memory and none remained: not the graph's fault
        wanted = [_requested(text) or 0 for severity, text in lines if _STARVED.tells.search(text)]
        return replace(starved, text=cause.text, node=cause.node, requested_bytes=max(wanted) or None)
    return cause


def error_of(cause: Cause, subject: str, *, log: Path | None = None) -> TrtEngineError:
    """The error to raise for a cause: its type says who must act. `subject` is what failed: "the build of `x.onnx`"."""
    text = cause.text if len(cause.text) <= 400 else f"{cause.text[:397]}..."
    message = f"{subject} failed ({cause.name}): {text}"
    hint = cause.hint + (f"; the whole log is `{log}`" if log is not None else "")
    kind = _KINDS.get(cause.name, BuildError)
    if kind is BuildError:
        return BuildError(message, hint=hint, cause=cause.name, node=cause.node)
    return kind(message, hint=hint, not_here=True if cause.name == "plugin_not_found" else None)


_KINDS: dict[str, type[TrtEngineError]] = {
    "plugin_not_found": ModelError,
    "plugin_format_unsupported": ModelError,
    "onnx_parse_error": ModelError,
    "static_model_given_shapes": ShapeError,
    "shape_mismatch": ShapeError,
    "out_of_memory": MemoryExhausted,
    "host_code_refused": EngineError,
    "engine_incompatible": EngineError,
    "gpu_not_supported": SetupError,
    "cuda_unavailable": SetupError,
    "builder_creation_failed": SetupError,
    "unknown_option": SetupError,
    "accuracy_failed": AccuracyError,
}


def _parted(message: str) -> tuple[str, str]:
    """Severity (empty for a line without prefix) and text."""
    match = _PREFIX.match(message.rstrip())
    return (match["severity"], match["text"]) if match else ("", message.rstrip())


def _hit(rule: _Rule, lines: list[tuple[str, str]]) -> Cause | None:
    """The first message that tells of this failure. A tactic that was skipped fails nothing."""
    for severity, text in lines:
        if severity in ("I", "V") or (severity == "W" and not rule.soft):
            continue
        if not rule.soft and "Skipping tactic" in text:
            continue
        if rule.tells.search(text):
            return Cause(rule.name, text.strip(), hint=rule.hint)
    return None


def _detailed(cause: Cause, texts: list[str]) -> Cause:
    """The cause with node, bytes and options its messages hold."""
    if cause.name == "unknown_option":
        options = tuple(match["option"] for text in texts if (match := _UNKNOWN.search(text)))
        return replace(cause, unknown_options=tuple(dict.fromkeys(options)))
    if cause.name in ("out_of_memory", "insufficient_workspace"):
        sizes = [size for text in texts if (size := _requested(text))]
        node = next((match["node"] for text in texts if (match := _NODE.search(text))), None)
        return replace(cause, node=node, requested_bytes=max(sizes, default=None))
    if cause.name == "no_implementation" and (match := _NODE.search(cause.text)):
        return replace(cause, node=match["node"])
    if cause.name == "plugin_not_found":
        node = (
            _first(texts, _PLUGIN, "node")
            or _first(texts, _PARSED, "operator")
            or _first(texts, _PARSED_10, "operator")
        )
        return replace(cause, node=node)
    if cause.name == "onnx_parse_error":
        telling = next((text for text in texts if _PARSED.search(text)), None)
        node = _first(texts, _PARSED, "node") or _first(texts, _PARSED_10, "operator")
        return replace(cause, node=node, text=(telling or _explanation(texts) or cause.text).strip())
    return cause


def _explanation(texts: list[str]) -> str | None:
    """The parser's own reason, which stands in the line after `ERROR: file:line In function f:`."""
    for at, text in enumerate(texts[:-1]):
        if "In function" in text and text.rstrip().endswith(":"):
            return texts[at + 1]
    return None


def _first(texts: list[str], pattern: re.Pattern[str], group: str) -> str | None:
    return next((match[group] for text in texts if (match := pattern.search(text))), None)


def _requested(text: str) -> int | None:
    match = _BYTES.search(text)
    if match is None:
        return None
    return int(match["bytes"]) if match["bytes"] else int(match["count"]) * _UNITS[match["unit"]]

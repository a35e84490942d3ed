"""Why TensorRT or trtexec failed, from its messages.

The names are those of the project's log format (docs/trtexec.md) and `insufficient_workspace`, which the ladder
treats unlike any other. Tell-tale texts are those of `samples/common` and `parsers/onnx` of the public TensorRT repository
and of public logs, 8.5 to 11.1; they are the same in trtexec's log and in the library's logger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trt_engine import figures
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

__all__ = ["CAUSES", "Cause", "cause_of", "error_of", "errors_of", "node_of", "telling_error"]


@dataclass(frozen=True, slots=True)
class Cause:
    """One known failure: its name, the message that carries it, and what the message holds."""

    name: str
    """One of `CAUSES`."""
    text: str
    node: str | None = None
    """The node of the graph by its full path; of a missing plugin whose node has no path the plugin's name."""
    plugin: str | None = None
    """The name of a missing plugin."""
    requested_bytes: int | None = None
    unknown_options: tuple[str, ...] = ()
    hint: str = ""
    """What to do, in the words of an error's hint."""

    @property
    def log_class(self) -> str:
        """The name as a log's `error_class`, whose list does not part a starved search from a fruitless one."""
        return "no_implementation" if self.name == "insufficient_workspace" else self.name


_Rank = Literal["cause", "chain", "abort", "warning"]
"""What a match is: a cause; a step that follows from one; the end of a process; a warning that only explains others."""


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    tells: re.Pattern[str]
    hint: str
    rank: _Rank = "cause"


def _rule(name: str, tells: str, hint: str, rank: _Rank = "cause") -> _Rule:
    return _Rule(name, re.compile(tells), hint, rank)


_MORE_WORKSPACE = "allow the builder more scratch memory: a larger `--workspace`, up to the GPU's memory"
_BUILD_AGAIN = "build the engine again with the TensorRT that loads it; `trt-engine inspect` says which one made it"

_RULES: tuple[_Rule, ...] = (  # the first that matches a line names it
    _rule(
        "plugin_not_found",
        r"Plugin not found, are the plugin name, version, and namespace correct\?"
        r"|getPluginCreator could not find plugin|Cannot find plugin: |IPluginCreator not found in Plugin Registry",
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
        "gpu_not_supported",
        r"the model contains HW-specific datatypes|Cannot compile operation .* for \w+ \(SM\d+\)",
        "this GPU does not compute in a data type of the graph: FP8 needs compute capability 8.9, NVFP4 and MXFP8 10.0",
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
        r"|Cannot find input tensor with name .* in the network inputs|Invalid tensor names found in --shapes"
        r"|values for profile \d+ violate shape constraints|but no optimization profile has been defined",
        "give shapes the model and its profiles hold (`trt-engine inspect` lists them)",
    ),
    _rule(
        "insufficient_workspace",
        r"due to insufficient workspace|within workspace limit",
        _MORE_WORKSPACE,
    ),
    _rule(
        "out_of_memory",
        r"Requested amount of (?:GPU )?memory \(\d+ bytes\) could not be allocated|OutOfMemory"
        r"|User allocator error allocating|(?i:cuda\w* ?(?:malloc|failure|error)?.*out of memory)",
        "free the GPU of other processes, or build for a smaller batch",
    ),
    _rule(
        "library_not_found",
        r"version `\S+' not found \(required by",
        "it was compiled for a newer Linux than this one: install TensorRT's package for this distribution",
    ),
    _rule(
        "library_not_found",
        r"error while loading shared libraries|symbol lookup error|cannot open shared object file"
        r"|(?:Could not|Unable to) (?:load|open) library",
        "put the folder of TensorRT's libraries into LD_LIBRARY_PATH",
    ),
    _rule(
        "no_implementation",
        r"Could not find any implementation for node |has no runners that implement it",
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
        _BUILD_AGAIN,
    ),
    _rule("engine_incompatible", r"Engine deserialization failed", _BUILD_AGAIN, "chain"),
    _rule(
        "accuracy_failed",
        r"Accuracy validation FAILED",
        "outputs differ from the references by more than `--accuracyThreshold`",
    ),
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
        r"Failed to parse onnx file|Parsing model failed|UNSUPPORTED_NODE|INVALID_GRAPH|INVALID_NODE"
        r"|Model missing or format not recognized|ModelImporter\.cpp:\d+: (?:While parsing node|ERROR)",
        "`trt-engine inspect` lists what in the model TensorRT cannot take",
        "chain",
    ),
    _rule(
        "insufficient_workspace",
        r"Tactic Device request: \d+ ?[KMG]B Available: \d+"
        r"|insufficient memory on requested size",
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
_MEMORY = next(rule for rule in _RULES if rule.name == "out_of_memory")
_STARVED = next(rule for rule in _RULES if rule.rank == "warning")

CAUSES: tuple[str, ...] = tuple(dict.fromkeys(rule.name for rule in _RULES))
"""The names a cause can have."""

_PREFIX = re.compile(
    r"^[\s>]*(?:\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] )?\[(?P<severity>[FEWIV])\](?: \[TRT\](?= |$))?(?: (?P<text>.*))?$",
    re.DOTALL,
)
_CHAIN = re.compile(
    r"(?:Engine could not be created from network|Building engine failed|Failed to create engine from model or file"
    r"|Failed to parse onnx file|Parsing model failed|Network And Config setup failed|Engine (?:set up|creation) failed"
    r"|Inference set up failed|Error occurred during inference)"
)
"""What trtexec prints behind an error: how far the run came, and nothing of the reason."""
_ASSERTION = re.compile(r"[Aa]ssertion\b(?:(?![Aa]ssertion).)*\bfailed|Assertion failure: |what\(\):  ")
_NODE = re.compile(
    r"implementation for node (?P<node>\{.*?\]\}|.+?)(?= due to insufficient workspace|\.(?:\)|\s|$)|\)?\s*$)"
    r"|failed\. (?P<runner>\S+) has no runners that implement it"
)
_LAYER = re.compile(r"Error Code:? \d+: [\w ]+ \((?:I\w+Layer )?(?P<node>/.*?|[^\s()]+?): ")
"""The layer at the beginning of a message of the library: `Internal Error (/a/b/Tile_1: ...`."""
_PARSED = re.compile(r"In node -?\d+ with name: (?P<node>.*?) and operator: (?P<operator>\S+)")
_PARSING = re.compile(r"[Ww]hile parsing node number \d+ \[(?P<operator>\S+) ->")
_NAME = re.compile(r'^(?:ModelImporter\.cpp:\d+: )?(?:name: "(?P<quoted>(?:[^"\\]|\\.)+)"|Node name: (?P<plain>\S.*))$')
"""The name in the parser's print of a node; the names of its attributes are indented."""
_PLUGIN = re.compile(r"(?:pluginName: |Searching for plugin: |could not find plugin:? |Cannot find plugin: )([^,\s]+)")
_ALLOCATION = re.compile(
    r"(?:Requested amount of (?:GPU )?memory \(|Requested size was |tried to allocate |error allocating )(\d+)[ -]byte"
)
_TACTIC = re.compile(r"Tactic Device request: (\d+) ?([KMG])B")
_UNKNOWN = re.compile(r"Unknown option: ([^\s=]+)")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class _Line:
    severity: str
    """Empty for a line without prefix, which is an error."""
    text: str
    skipped: bool = False
    """It is about a tactic that was left out, which fails nothing by itself."""

    @property
    def error(self) -> bool:
        """True for what can carry a cause. The size of a failed allocation is a warning."""
        told = self.severity in ("E", "F", "") or (self.severity == "W" and _ALLOCATION.search(self.text) is not None)
        return told and not self.skipped


def cause_of(messages: Iterable[str]) -> Cause | None:
    """The known failure behind these messages; None when none is recognised.

    Messages are lines of a trtexec log, or those of TensorRT's logger at warning or worse. The cause is the first error that
    is more than a step behind another one. What was skipped or only warned of explains a search without a result.
    """
    lines = _lines(messages)
    first: dict[str, tuple[_Rule, int]] = {}
    for at, line in enumerate(lines):
        if line.error and (rule := next((rule for rule in _RULES if rule.tells.search(line.text)), None)):
            first.setdefault(rule.rank, (rule, at))
    found = first.get("cause") or first.get("chain")
    if found is not None and found[0].name != "no_implementation":
        return _detailed(*found, lines)
    searched = [line for line in lines if line.severity not in ("I", "V")]
    if memory := [line for line in searched if line.skipped and _MEMORY.tells.search(line.text)]:
        return _out_of_memory(memory, lines)
    if found is None and (aborted := first.get("abort")):
        return _detailed(*aborted, lines)
    if starved := [line for line in searched if _STARVED.tells.search(line.text)]:
        # tactics were left out for want of scratch memory and none remained: not the graph's fault
        text = lines[found[1]].text if found else starved[0].text
        return Cause(
            _STARVED.name, text.strip(), node=node_of(text), requested_bytes=_largest(starved), hint=_STARVED.hint
        )
    return _detailed(*found, lines) if found else None


def errors_of(messages: Iterable[str]) -> list[str]:
    """The texts of the errors, without those of skipped tactics."""
    return [line.text.strip() for line in _lines(messages) if line.error and line.severity != "W"]


def telling_error(errors: Sequence[str], *, ended: bool) -> str | None:
    """The error to show where no cause is known: the first that says why, or the last assertion of a process that died."""
    if not ended and (asserted := next((text for text in reversed(errors) if _ASSERTION.search(text)), None)):
        return asserted
    return next((text for text in errors if not _CHAIN.match(text)), errors[0] if errors else None)


def node_of(text: str) -> str | None:
    """The node or layer that a message of the library names, by its full path."""
    if match := _NODE.search(text):
        return match["node"] or match["runner"]
    match = _PARSED.search(text) or _LAYER.search(text)
    return match["node"] if match else None


def error_of(cause: Cause, subject: str, *, log: Path | None = None) -> TrtEngineError:
    """The error to raise for a cause: its type says who must act. `subject` is what failed: "the build of `x.onnx`"."""
    text = cause.text if len(cause.text) <= 400 else f"{cause.text[:397]}..."
    details = [
        f"{kind} `{name}`"
        for kind, name in (("plugin", cause.plugin), ("node", cause.node))
        if name and name not in text
    ]
    if cause.requested_bytes:
        details.append(f"asked for {figures.size(cause.requested_bytes)} ({cause.requested_bytes} bytes)")
    message = "; ".join((f"{subject} failed ({cause.name}): {text}", *details))
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
    "library_not_found": SetupError,
    "unknown_option": SetupError,
    "accuracy_failed": AccuracyError,
}


def _lines(messages: Iterable[str]) -> list[_Line]:
    """Every line of the messages. A failed allocation that a skipped tactic follows belongs to that tactic."""
    lines: list[_Line] = []
    for message in messages:
        match = _PREFIX.match(message.rstrip())
        severity, text = (match["severity"], match["text"] or "") if match else ("", message.rstrip())
        lines += (_Line(severity, part) for part in text.split("\n"))
    failed: list[int] = []
    for at, line in enumerate(lines):
        if line.severity in ("I", "V"):
            continue
        if "Skipping tactic" in line.text:
            for one in (*failed, at):
                lines[one] = replace(lines[one], skipped=True)
            failed = []
        elif _MEMORY.tells.search(line.text):
            failed.append(at)
        elif line.severity != "W":
            failed = []
    return lines


def _detailed(rule: _Rule, at: int, lines: Sequence[_Line]) -> Cause:
    """The cause with node, plugin, bytes and options its messages hold."""
    errors = [line for line in lines if line.error]
    cause = Cause(rule.name, lines[at].text.strip(), node=node_of(lines[at].text), hint=rule.hint)
    if rule.name == "unknown_option":
        # a value is left out: it can be a path or a key
        options = dict.fromkeys(match[1] for line in errors if (match := _UNKNOWN.search(line.text)))
        return replace(cause, text=f"Unknown option: {', '.join(options)}", unknown_options=tuple(options))
    if rule.name == "out_of_memory":
        return _out_of_memory([line for line in errors if _MEMORY.tells.search(line.text)], lines)
    if rule.name == "insufficient_workspace":
        return replace(cause, requested_bytes=_largest(lines))
    if rule.name == "plugin_not_found":
        return _missing_plugin(cause, at, lines)
    if rule.name == "onnx_parse_error" and rule.rank == "chain":
        return _refused(cause, at, lines)
    if rule.name == "aborted":
        text = telling_error([line.text.strip() for line in errors if _ASSERTION.search(line.text)], ended=False)
        return replace(cause, text=text or cause.text)
    return cause


def _out_of_memory(failed: Sequence[_Line], lines: Sequence[_Line]) -> Cause:
    """The allocation that failed, by the line that has its size."""
    sized = max(failed, key=lambda line: _allocated(line.text) or 0)
    node = next(
        (node for line in lines if line.error and "implementation for" in line.text and (node := node_of(line.text))),
        None,
    )
    return Cause(_MEMORY.name, sized.text.strip(), node=node, requested_bytes=_allocated(sized.text), hint=_MEMORY.hint)


def _missing_plugin(cause: Cause, at: int, lines: Sequence[_Line]) -> Cause:
    """With the plugin's name and the path of the node that needs it."""
    at = next(
        (later for later in range(at, len(lines)) if lines[later].error and "Plugin not found" in lines[later].text), at
    )
    operator, node = _parsed_at(at, lines)
    looked_for = [match[1] for line in lines[: at + 1] if (match := _PLUGIN.search(line.text))]
    plugin = looked_for[-1] if looked_for else operator
    # a name without a path tells less than the plugin's
    return replace(
        cause, text=lines[at].text.strip(), plugin=plugin, node=node if node and "/" in node else plugin or node
    )


def _refused(cause: Cause, at: int, lines: Sequence[_Line]) -> Cause:
    """With the parser's own reason and the path of the node it was at."""
    errors = [line.text for line in lines if line.error]
    if summary := next((text for text in errors if _PARSED.search(text)), None):
        return replace(cause, text=summary.strip(), node=node_of(summary))
    operator, node = _parsed_at(at, lines)
    reason = _explanation(errors)
    if operator and reason and reason.endswith("] false"):  # the check of an operator that is never taken
        reason = f"the parser takes no {operator}: {reason}"
    return replace(cause, text=reason or telling_error(errors, ended=True) or cause.text, node=node or operator)


def _parsed_at(at: int, lines: Sequence[_Line]) -> tuple[str | None, str | None]:
    """Operator and name of the node that the parser was at, at that line."""
    if match := _PARSED.search(lines[at].text):
        return match["operator"], match["node"]
    began = next((before for before in range(at, -1, -1) if _PARSING.search(lines[before].text)), None)
    if began is None:
        return None, None
    operator = _PARSING.search(lines[began].text)
    for line in lines[began + 1 :]:
        if _PARSING.search(line.text):
            break
        if match := _NAME.match(line.text):
            return operator and operator["operator"], match["plain"] or re.sub(r"\\(.)", r"\1", match["quoted"])
    return operator and operator["operator"], None


def _explanation(errors: Sequence[str]) -> str | None:
    """The parser's own reason: the lines behind `ERROR: file:line In function f:`, up to its next message."""
    began = next((at for at, text in enumerate(errors) if "In function" in text and text.rstrip().endswith(":")), None)
    if began is None:
        return None
    reason: list[str] = []
    for text in errors[began + 1 :]:
        if not (text.startswith("[") or "Error Code" in text):
            break
        reason.append(text.strip())
    return "; ".join(reason) or None


def _allocated(text: str) -> int | None:
    match = _ALLOCATION.search(text)
    return int(match[1]) if match else None


def _largest(lines: Sequence[_Line]) -> int | None:
    """The most that a tactic asked for."""
    sizes = [int(match[1]) * _UNITS[match[2]] for line in lines if (match := _TACTIC.search(line.text))]
    return max(sizes, default=None)

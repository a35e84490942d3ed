"""Why TensorRT or trtexec failed, from its messages.

The names are those of the log format (docs/trtexec.md) and `insufficient_workspace`, which is retried. The patterns are
in `failure_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trt_engine import format
from trt_engine.errors import (
    AccuracyError,
    BuildError,
    EngineError,
    MemoryExhausted,
    ModelError,
    ProfileError,
    SetupError,
    ShapeError,
    TrtEngineError,
    UsageError,
)
from trt_engine.format import shorten_middle
from trt_engine.trt import versions
from trt_engine.trt.failure_rules import RTX_HINTS, RULES, Rule
from trt_engine.trt.known_warnings import find_known_warning
from trt_engine.trt.parser_messages import ParserError, parser_error_reason, plain_text


@dataclass(frozen=True, slots=True)
class Cause:
    """One known failure: its name, its message, and the details in that message."""

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
    """The hint of the error."""

    @property
    def log_class(self) -> str:
        """The name as a log's `error_class`, which has one name for every failed tactic search."""
        return "no_implementation" if self.name == "insufficient_workspace" else self.name


_MEMORY = next(rule for rule in RULES if rule.name == "out_of_memory")
_WARNING_RULE = next(rule for rule in RULES if rule.rank == "warning")
CAUSES: tuple[str, ...] = tuple(dict.fromkeys(rule.name for rule in RULES))
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
    r"implementation for node (?P<node>\{.*?\]\}|.+?)(?= due to insufficient workspace|\.(?:\)|\s|$)|\)?$)"
    r"|failed\. (?P<runner>\S+) has no runners that implement it"
)
_LAYER = re.compile(
    r"(?:Error Code:? \d+: [\w ]+ \(|violate shape constraints: )(?:I\w+Layer )?(?P<node>/.*?|[^\s()\[][^\s()]*?): "
    r"|Cannot compile operation '(?P<operation>[^']*)' for "
)
"""The layer at the beginning of a message of the library: `Internal Error (/a/b/Tile_1: ...`."""
_PARSED = re.compile(r"In node -?\d+ with name: (?P<node>(?:(?!In node ).)*?) and operator: (?P<operator>\S+)")
_PARSING = re.compile(
    r"[Ww]hile parsing node number (?P<number>\d+) \[(?P<operator>\S+) ->(?: \"(?P<output>(?:[^\"\\]|\\.)*)\")?"
)
_NAME = re.compile(r'^(?:ModelImporter\.cpp:\d+: )?(?:name: "(?P<quoted>(?:[^"\\]|\\.)+)"|Node name: (?P<plain>\S.*))$')
"""The name in the parser's print of a node; the names of its attributes are indented."""
_PLUGIN = re.compile(r"(?:pluginName: |Searching for plugin: |could not find plugin:? |Cannot find plugin: )([^,\s]+)")
_ALLOCATION = re.compile(
    r"(?:Requested amount of (?:GPU )?memory \(|Requested size was |tried to allocate |error allocating )(\d{1,18})[ -]byte"
)
_TACTIC = re.compile(r"Tactic Device request: (\d{1,18}) ?([KMG])B")
_UNKNOWN = re.compile(r"Unknown option: ([^\s=]+)")
_DATA_TYPES = re.compile(r"HW-specific datatypes: (\w[\w, ]*)")
_VIOLATED = re.compile(r"k(MIN|OPT|MAX) values for profile (\d+) violate shape constraints")
_FUNCTION = re.compile(r"In function (check\w+)")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class _LogLine:
    severity: str
    """Empty for a line without prefix, which is an error."""
    text: str
    skipped: bool = False
    """It is about a skipped tactic, which is not an error by itself."""

    @property
    def may_hold_cause(self) -> bool:
        """True if the line may hold a cause. The size of a failed allocation is a warning."""
        grave = self.severity in ("E", "F", "") or (self.severity == "W" and _ALLOCATION.search(self.text) is not None)
        return grave and not self.skipped and find_known_warning(self.text) is None


def find_cause(messages: Iterable[str]) -> Cause | None:
    """The known failure behind these messages; None when none is recognised.

    Messages are lines of a trtexec log, or those of TensorRT's logger at warning or worse. The cause is the first error that
    is not a consequence of another. Skipped tactics and warnings explain a tactic search without a result.
    """
    lines = _parse_lines(messages)
    first: dict[str, tuple[Rule, int]] = {}
    for at, line in enumerate(lines):
        if line.may_hold_cause and (rule := next((rule for rule in RULES if rule.pattern.search(line.text)), None)):
            first.setdefault(rule.rank, (rule, at))
    found = first.get("cause") or first.get("machine") or first.get("chain")
    if found is not None and found[0].name != "no_implementation":
        return _add_details(*found, lines)
    searched = [line for line in lines if line.severity not in ("I", "V")]
    if memory := [line for line in searched if line.skipped and _MEMORY.pattern.search(line.text)]:
        return _out_of_memory(memory, lines)
    if found is None and (aborted := first.get("abort")):
        return _add_details(*aborted, lines)
    if starved := [line for line in searched if _WARNING_RULE.pattern.search(line.text)]:
        # all tactics were skipped for lack of scratch memory: not the graph's fault
        text = lines[found[1]].text if found else starved[0].text
        return Cause(
            _WARNING_RULE.name,
            text.strip(),
            node=extract_node(text),
            requested_bytes=_max_tactic_bytes(starved),
            hint=_WARNING_RULE.hint,
        )
    return _add_details(*found, lines) if found else None


def error_texts(messages: Iterable[str]) -> list[str]:
    """The texts of the errors, without those of skipped tactics."""
    return [line.text.strip() for line in _parse_lines(messages) if line.may_hold_cause and line.severity != "W"]


def main_error(errors: Sequence[str], *, crashed: bool) -> str | None:
    """The error to show for an unknown cause: the first that states a reason, or the last assertion of a crashed process."""
    if not crashed and (asserted := next((text for text in reversed(errors) if _ASSERTION.search(text)), None)):
        return asserted
    return next((text for text in errors if not _CHAIN.match(text)), errors[0] if errors else None)


def extract_node(text: str) -> str | None:
    """The full path of the node or layer named in a library message."""
    if match := _NODE.search(text.rstrip()):
        return match["node"] or match["runner"]
    if match := _PARSED.search(text):
        return match["node"]
    match = _LAYER.search(text)
    return match["node"] or match["operation"] if match else None


def cause_hint(cause: Cause, product: str = "TensorRT") -> str:
    """The hint for a cause with that library."""
    return RTX_HINTS.get(cause.name, cause.hint) if product == "TensorRT-RTX" else cause.hint


def make_error(cause: Cause, subject: str, *, product: str = "TensorRT") -> TrtEngineError:
    """The exception for a cause. `subject` is what failed: "the build of `x.onnx`"."""
    # for a crashed process, the assertion is the cause
    text = cause.text if cause.name == "aborted" else plain_text(cause.text, product)
    text = shorten_middle(text, 400)
    details = [
        f"{kind} `{name}`"
        for kind, name in (("plugin", cause.plugin), ("node", cause.node))
        if name and name not in text
    ]
    if cause.requested_bytes:
        details.append(f"requested {format.format_bytes(cause.requested_bytes)} ({cause.requested_bytes} bytes)")
    message = "; ".join((f"{subject} failed ({cause.name}): {text}", *details))
    hint = cause_hint(cause, product)
    kind = ProfileError if _VIOLATED.search(cause.text) else _ERROR_TYPES.get(cause.name, BuildError)
    if kind is BuildError:
        return BuildError(message, hint=hint, cause=cause.name, node=cause.node)
    return kind(message, hint=hint, machine_specific=True if cause.name == "plugin_not_found" else None)


_ERROR_TYPES: dict[str, type[TrtEngineError]] = {
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
    "operator_not_supported": ModelError,
    "data_type_not_supported": ModelError,
    "scales_missing": ModelError,
    "platform_not_supported": SetupError,
    "build_target_invalid": UsageError,
    "weights_not_found": UsageError,
    "file_not_found": UsageError,
}


def _parse_lines(messages: Iterable[str]) -> list[_LogLine]:
    """Every line of the messages. A failed allocation that a skipped tactic follows belongs to that tactic."""
    lines: list[_LogLine] = []
    for message in messages:
        match = _PREFIX.match(message.rstrip())
        severity, text = (match["severity"], match["text"] or "") if match else ("", message.rstrip())
        lines += (_LogLine(severity, part) for part in text.split("\n"))
    failed: list[int] = []
    for at, line in enumerate(lines):
        if line.severity in ("I", "V"):
            continue
        if "Skipping tactic" in line.text:
            for one in (*failed, at):
                lines[one] = replace(lines[one], skipped=True)
            failed = []
        elif _MEMORY.pattern.search(line.text):
            failed.append(at)
        elif line.severity != "W":
            failed = []
    return lines


def _add_details(rule: Rule, at: int, lines: Sequence[_LogLine]) -> Cause:
    """The cause with node, plugin, bytes and options its messages hold."""
    errors = [line for line in lines if line.may_hold_cause]
    cause = Cause(rule.name, lines[at].text.strip(), node=extract_node(lines[at].text), hint=rule.hint)
    if rule.name == "unknown_option":
        # a value is left out: it can be a path or a key
        options = dict.fromkeys(match[1] for line in errors if (match := _UNKNOWN.search(line.text)))
        return replace(cause, text=f"Unknown option: {', '.join(options)}", unknown_options=tuple(options))
    if rule.name == "gpu_not_supported" and (found := _DATA_TYPES.search(cause.text)):
        needed = [_capability_hint(name) for name in found[1].replace(",", " ").split()]
        return replace(cause, hint="; ".join((*dict.fromkeys(filter(None, needed)), rule.hint)))
    if found := _VIOLATED.search(cause.text):
        sizes = {"MIN": "smallest", "OPT": "usual", "MAX": "largest"}[found[1]]
        at_layer = f" at layer `{cause.node}`" if cause.node else ""
        return replace(
            cause,
            hint=f"the {sizes} sizes of profile {found[2]} do not fit the graph{at_layer}: give others, or export the model "
            "with that dimension open",
        )
    if rule.name == "out_of_memory":
        return _out_of_memory([line for line in errors if _MEMORY.pattern.search(line.text)], lines)
    if rule.name == "insufficient_workspace":
        return replace(cause, requested_bytes=_max_tactic_bytes(lines))
    if rule.name == "plugin_not_found":
        return _add_plugin(cause, at, lines)
    if rule.name == "onnx_parse_error" and rule.rank == "chain":
        return _add_parser_reason(cause, at, lines)
    if rule.name == "onnx_parse_error" and cause.node is None:
        return replace(cause, node=_parser_position(at, lines)[1] or _parsed_output(at, lines))
    if rule.name == "aborted":
        text = main_error([line.text.strip() for line in errors if _ASSERTION.search(line.text)], crashed=False)
        return replace(cause, text=text or cause.text)
    return cause


def _out_of_memory(failed: Sequence[_LogLine], lines: Sequence[_LogLine]) -> Cause:
    """The cause of a failed allocation, from the line with its size."""
    sized = max(failed, key=lambda line: _allocation_bytes(line.text) or 0)
    node = next(
        (
            node
            for line in lines
            if line.may_hold_cause and "implementation for" in line.text and (node := extract_node(line.text))
        ),
        None,
    )
    return Cause(
        _MEMORY.name, sized.text.strip(), node=node, requested_bytes=_allocation_bytes(sized.text), hint=_MEMORY.hint
    )


def _add_plugin(cause: Cause, at: int, lines: Sequence[_LogLine]) -> Cause:
    """The cause with the plugin's name and the path of the node that needs it."""
    at = next(
        (
            later
            for later in range(at, len(lines))
            if lines[later].may_hold_cause and "Plugin not found" in lines[later].text
        ),
        at,
    )
    operator, node = _parser_position(at, lines)
    looked_for = [match[1] for line in lines[: at + 1] if (match := _PLUGIN.search(line.text))]
    plugin = looked_for[-1] if looked_for else operator
    # a name without a path is less specific than the plugin's
    return replace(
        cause, text=lines[at].text.strip(), plugin=plugin, node=node if node and "/" in node else plugin or node
    )


def _add_parser_reason(cause: Cause, at: int, lines: Sequence[_LogLine]) -> Cause:
    """The cause with the parser's reason and the path of its node."""
    errors = [line.text for line in lines if line.may_hold_cause]
    if summary := next((text for text in errors if _PARSED.search(text)), None):
        return replace(cause, text=summary.strip(), node=extract_node(summary))
    _, node = _parser_position(at, lines)
    reason = _parser_reason(errors)
    if reason and reason.endswith("] false"):  # the check of an operator that the parser does not have
        checked = next((match[1] for text in errors if (match := _FUNCTION.search(text))), "")
        reason = f"{parser_error_reason(ParserError('false', 'UNSUPPORTED_NODE', function=checked))}: {reason}"
    node = node or _parsed_output(at, lines)
    return replace(cause, text=reason or main_error(errors, crashed=True) or cause.text, node=node)


def _parser_position(at: int, lines: Sequence[_LogLine]) -> tuple[str | None, str | None]:
    """Operator and name of the node being parsed at that line."""
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


def _parsed_output(at: int, lines: Sequence[_LogLine]) -> str | None:
    """The first output, or else the number, of a node without a name that is being parsed at that line."""
    began = next((match for before in range(at, -1, -1) if (match := _PARSING.search(lines[before].text))), None)
    if began is None:
        began = next((match for line in lines if (match := _PARSING.search(line.text))), None)
    if began is None:
        return None
    return began["output"] or f"node {began['number']} ({began['operator']})"


def _parser_reason(errors: Sequence[str]) -> str | None:
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


def _allocation_bytes(text: str) -> int | None:
    match = _ALLOCATION.search(text)
    return int(match[1]) if match else None


def _max_tactic_bytes(lines: Sequence[_LogLine]) -> int | None:
    """The largest tactic request, in bytes."""
    sizes = [int(match[1]) * _UNITS[match[2]] for line in lines if (match := _TACTIC.search(line.text))]
    return max(sizes, default=None)


def _capability_hint(data_type: str) -> str | None:
    """The compute capability a data type needs by the compiler's name of it: `fp8_e4m3`; None for an unknown one."""
    name = {"fp8": "fp8", "fp4": "nvfp4"}.get(data_type.partition("_")[0])
    if name is None:
        return None
    major, minor = versions.COMPUTE_CAPABILITY[name]
    return f"{name.upper()} needs compute capability {major}.{minor} or later"

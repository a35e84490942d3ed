"""Errors of TensorRT's ONNX parser and messages of its library, without their C++.

The parser describes an error by the failed condition: `false` for an unsupported operator,
`p == 1 && "Only L1 ..."`, `Assertion failed: mode == "none": ScatterND ...`, or what the library logged meanwhile.
Source: `STATIC_CHECK` and `ASSERT_*` of the public ONNX parser, and the 914 refusals of TensorRT-RTX 1.7.1 over the tests
of ONNX's backends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParserError:
    """One error of an ONNX parser, as its bindings give it."""

    description: str
    code: str = ""
    """The name of its error code: `UNSUPPORTED_NODE`."""
    node: int = -1
    """The index of the node in its graph or function; -1 where it is about an input, an output or an initializer."""
    name: str = ""
    operator: str = ""
    function: str = ""
    """The parser function that failed: `checkDet`."""
    file: str = ""
    """That function's source file; for an input, its name."""
    local_functions: tuple[str, ...] = ()
    """The local functions around the node, outermost first, as `node (function)`."""


def format_parser_error(error: ParserError, product: str = "TensorRT") -> str:
    """One plain sentence: ``node 3 `/head/Det` (Det): TensorRT's parser does not have this operator``."""
    place = _error_location(error)
    reason = parser_error_reason(error, product)
    return f"{place}: {reason}" if place else reason


def parser_error_reason(error: ParserError, product: str = "TensorRT") -> str:
    """The reason of a parser error, without the node."""
    first, _, logged = error.description.strip().partition("\n")
    if first.startswith("Invalid Node - ") and logged:
        name = error.name or first.removeprefix("Invalid Node - ").strip()
        return _logged_reason(logged.split("\n"), name, product)
    reason = _description_reason(" ".join(error.description.split()))
    if reason is None or reason == "false":
        reason = _CODES.get(error.code, "{product}'s parser rejects it without a reason")
        if failed_operator(error) and not error.operator:
            reason = reason.replace("this operator", f"the operator {failed_operator(error)}")
        return reason.format(product=product)
    return _KNOWN[reason].format(product=product) if reason in _KNOWN else _clean_text(reason)


def failed_operator(error: ParserError) -> str:
    """The unsupported operator, from the error or the parser's function; else empty."""
    if error.operator:
        return error.operator
    found = _FUNCTION.match(error.function)
    return found[1] if found and found[1] not in _NOT_OPERATORS else ""


def plain_text(text: str, product: str = "TensorRT") -> str:
    """A library message without function, error code, source file and C++ condition."""
    if refusal := parse_logged_error(text):
        return parser_error_reason(refusal, product)
    whole = " ".join(text.split())
    inner = _FRAME.sub("", whole, count=1)
    inner = inner.removesuffix(")") if inner != whole else _IMPORTER.sub("", inner)
    inner = _MYELIN.sub("", inner)
    function = _SOURCE.search(inner)
    inner = _SOURCE.sub(" ", inner)
    if found := _CONDITION.match(inner):
        inner = found["text"]
    if found := _CHECK.search(inner):
        if not inner[found.end() :].strip(" ."):
            where = f" (`{function['function']}`)" if function and function["function"] else ""
            what = "a CUDA call" if "CUDA_SUCCESS" in found[0] else "an internal check"
            return f"{what} of {product} failed{where}, and it gives no reason"
        inner = inner[found.end() :]
    return _clean_text(inner) or whole


def drop_driver_errors(messages: Iterable[str]) -> list[str]:
    """The messages without those of a missing driver, which builds without a GPU log too."""
    found = list(messages)
    return [text for text in found if "catchCudaError" not in text] or found


def parse_logged_error(text: str) -> ParserError | None:
    """The refusal in the parser's log record `ERROR: file:line In function f:` with `[8] text` behind it; else None."""
    found = _RECORD.search(text)
    if found is None:
        return None
    number = int(found["number"])
    code = _NUMBERS[number] if number < len(_NUMBERS) else ""
    return ParserError(found["text"], code, function=found["function"], file=found["file"])


# ------------------------------------------------------------------------------------------------ one refusal

_CODES = {  # for a condition without a text
    "UNSUPPORTED_NODE": "{product}'s parser does not have this operator",
    "UNSUPPORTED_NODE_ATTR": "{product}'s parser does not have an attribute of this operator, or its value",
    "UNSUPPORTED_NODE_INPUT": "{product}'s parser does not support an input of this operator",
    "UNSUPPORTED_NODE_DATATYPE": "{product}'s parser does not support this operator with these data types",
    "UNSUPPORTED_NODE_DYNAMIC": "{product}'s parser does not support this operator with dynamic shapes",
    "UNSUPPORTED_NODE_SHAPE": "{product}'s parser does not support this operator with these shapes",
    "UNSUPPORTED_GRAPH": "{product}'s parser does not support this graph",
    "INVALID_NODE": "{product}'s parser finds this node invalid and gives no reason",
    "INVALID_GRAPH": "{product}'s parser finds the graph invalid and gives no reason",
    "INVALID_VALUE": "{product}'s parser finds a value invalid and gives no reason",
    "MODEL_DESERIALIZE_FAILED": "{product}'s parser cannot read the file as an ONNX model",
    "MEM_ALLOC_FAILED": "{product}'s parser ran out of memory",
}
_KNOWN = {  # texts that only the parser's authors understand
    "Failed to convert ONNX date type to TensorRT data type.": "{product} does not have this ONNX data type",
    "Plugin not found, are the plugin name, version, and namespace correct?": (
        "{product}'s parser does not have this operator, and no plugin provides it"
    ),
}
_FUNCTION = re.compile(r"(?:import|check)([A-Z]\w*)$")
_NOT_OPERATORS = {
    "FallbackPluginImporter", "Graph", "Initializer", "Initializers", "Input", "Inputs", "LocalFunction", "NotInvalidType",
    "Output", "Outputs", "PluginV2", "Subgraph",
}  # fmt: skip
_NESTED = re.compile(r"\(\w+\): [A-Z][A-Z_]+: ")
"""Ends `In node -1 with name:  and operator:  (importInitializers): UNSUPPORTED_NODE: `, another refusal inside this one."""
_NUMBERS = (  # of the parser's `ErrorCode`, 8.5 to 11.4
    "SUCCESS", "INTERNAL_ERROR", "MEM_ALLOC_FAILED", "MODEL_DESERIALIZE_FAILED", "INVALID_VALUE", "INVALID_GRAPH",
    "INVALID_NODE", "UNSUPPORTED_GRAPH", "UNSUPPORTED_NODE", "UNSUPPORTED_NODE_ATTR", "UNSUPPORTED_NODE_INPUT",
    "UNSUPPORTED_NODE_DATATYPE", "UNSUPPORTED_NODE_DYNAMIC", "UNSUPPORTED_NODE_SHAPE", "REFIT_FAILED",
)  # fmt: skip
_RECORD = re.compile(
    r"(?<!\S)(?P<file>\S+):\d+ In function (?P<function>\w+):\s+\[(?P<number>\d{1,3})\] (?P<text>.*)", re.DOTALL
)
_LITERALS = re.compile(r'&& (?P<literals>"(?:[^"\\]|\\.)*"(?: "(?:[^"\\]|\\.)*")*)$')
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_EXPRESSION = re.compile(r"==|!=|&&|\|\||->|::|^!|\(\)")


def _error_location(error: ParserError) -> str:
    """The node or input of an error; empty if it names neither."""
    if error.node < 0:
        if error.function == "importInput" and error.file and not error.file.endswith((".cpp", ".h")):
            return f"input `{error.file}`"
        return failed_operator(error)
    place = f"node {error.node}"
    if error.name:
        place += f" `{error.name}`"
    if error.operator:
        place += f" ({error.operator})"
    return place + "".join(f" in `{item}`" for item in reversed(error.local_functions))


def _description_reason(description: str) -> str | None:
    """The text of a description that begins with its condition; None for a condition alone."""
    if "In node " in description and (nested := _NESTED.search(description)):
        return _description_reason(description[nested.end() :])
    condition, failed = description.removeprefix("Assertion failed: "), description.startswith("Assertion failed: ")
    if found := _LITERALS.search(condition):
        return "".join(_LITERAL.findall(found["literals"])).replace('\\"', '"')
    if failed:
        return _after_condition(condition)
    return (
        None if _EXPRESSION.search(description) and not re.search(r"[a-z] [a-z]", description) else description or None
    )


def _after_condition(text: str) -> str | None:
    """What follows the first `: ` outside of brackets and quotation marks; None where nothing does."""
    depth, quoted = 0, False
    for at, sign in enumerate(text):
        if sign == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == ":" and depth <= 0 and text[at + 1 : at + 2] == " " and text[at - 1 : at] != " ":
            return text[at + 2 :].strip() or None
    return None


def _logged_reason(lines: list[str], name: str, product: str) -> str:
    """The library's reason logged while parsing a node, ignoring a missing driver."""
    texts = []
    for line in drop_driver_errors(line for line in lines if line.strip()):
        text = plain_text(line, product)
        if name and (prefix := re.match(r"[^\s:]+: ", text)) and text.startswith(name):
            text = text[prefix.end() :]
        texts.append(text)
    return "; ".join(dict.fromkeys(texts))


# ------------------------------------------------------------------------------------------------ the library's messages

_FRAME = re.compile(
    r"^(?:Error\[\d+\]: )?(?:\[[^\]\s]*\] |[\w~]+::[\w~]+: )?(?:\[[^\]\s]*\] )?Error Code:? \d+: [\w ]+ \("
)
"""`IBuilder::buildSerializedNetwork: Error Code 4: Internal Error (`, before the text of a message."""
_IMPORTER = re.compile(r"^ModelImporter\.cpp:\d+: ")
_SOURCE = re.compile(r"\bIn (?P<function>\S+) at /[\w./]*(?::\d+)?|;? ?\[\w+\.(?:cpp|h)(?::\w*)*:\d+(?:: \w+)?\]")
_MYELIN = re.compile(r"^\(?\[\w+\.(?:cpp|h):\d+: \w+\] (?:MyelinCheckException: \w+\.(?:cpp|h):\d+: )?")
_CONDITION = re.compile(r"Parameter check failed, condition: .*?\. (?P<text>[A-Z].*)$")
_CHECK = re.compile(
    r"\b(?:Serialization a|A)ssertion (?:(?!ssertion ).)*? failed\.\s*|\bCHECK\((?:(?!CHECK\().)*?\) failed\.\s*"
)
_TYPES = {
    "kFLOAT": "float32", "kHALF": "float16", "kBF16": "bfloat16", "kINT8": "int8", "kINT32": "int32", "kINT64": "int64",
    "kUINT8": "uint8", "kBOOL": "bool", "kFP8": "float8", "kINT4": "int4", "kFP4": "float4", "kE8M0": "float8_e8m0",
}  # fmt: skip
_LAYER = re.compile(r"\bI([A-Z]\w*)Layer (\S+): (?:\2: )?")
"""`ITopKLayer top: top: `, the class and name of a layer."""
_ENUM = re.compile(r"\b(?:\w+::)?(k[A-Z][A-Z0-9_]*)\b")


def _clean_text(text: str) -> str:
    """Enum members by their plain names, no doubled blanks, no full stop at the end."""
    text = _ENUM.sub(lambda found: _TYPES.get(found[1], found[1][1:]), text)
    text = _LAYER.sub(r"layer `\2` (\1): ", text)
    text = text.replace(" == ", " = ").replace(" != ", " is not ")
    return re.sub(r"\s+([.;,])", r"\1", re.sub(r"\s+", " ", text)).strip(" ;").rstrip(".!")

"""Precision that a library in front of TensorRT requests from its builder: Ultralytics, mmdeploy, torch2trt, Holoscan."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from trt_engine.verbs.migrate.rules import RuleSet
from trt_engine.verbs.migrate.shell import is_said
from trt_engine.verbs.migrate.source import Hit, line_before
from trt_engine.verbs.migrate.version_guards import last_name

_YOLO = re.compile(
    r"\byolo\s[^\n;&|]*\bformat=[\"']?(?:engine|tensorrt)\b[^\n;&|]*"
    r"|\bexport\.py\s[^\n;&|]*--include[ =][^\n;&|]*\b(?:engine|trt)\b[^\n;&|]*"
    r"|\bbuild_image_encoder_engine\s[^\n;&|]*"
)
_WORD = re.compile(r"(?<!\S)(?:--)?(half|int8|fp16_mode)(?:=(\w+))?(?!\S)", re.IGNORECASE)
_HOLOSCAN = re.compile(r"^[ \t]*enable_fp16[ \t]*:[ \t]*[\"']?true\b", re.MULTILINE | re.IGNORECASE)
_OPTION = re.compile(
    r"\b(trt_(?:fp16|bf16|int8)_enable|ORT_TENSORRT_(?:FP16|BF16|INT8)_ENABLE)[\"']?"
    r"(?:\s*[|=:]|[ \t]*(?:\n[ \t]*|,[ \t]*)[\"']?value[\"']?:)\s*[\"']?(?:1|true)\b",
    re.I,
)
_OFF = ("0", "false", "none", "no")


def scan_wrappers(text: str, rules: RuleSet) -> Iterator[Hit]:
    """What command lines and configurations ask of such a library."""
    rule = rules.by_id.get("wrapper-precision")
    if rule is not None:
        for command in _YOLO.finditer(text):
            if "predict" not in command[0] and not is_said(line_before(text, command.start())):
                for found in _WORD.finditer(text, *command.span()):
                    if (found[2] or "true").lower() not in _OFF:
                        yield Hit(rule, *found.span())
        if re.search(r"backend[ \t]*:[ \t]*[\"']?(?:trt|tensorrt)\b", text):
            for found in _HOLOSCAN.finditer(text):
                yield Hit(rule, found.start() + len(found[0]) - len(found[0].lstrip()), found.end())
    yield from scan_options(text, rules)


def scan_options(text: str, rules: RuleSet) -> Iterator[Hit]:
    """Options of ONNX Runtime's provider that are set in a text of any language."""
    if (option := rules.by_id.get("ort-precision-option")) is not None:
        for found in _OPTION.finditer(text):
            said = is_said(line_before(text, found.start()))
            if "value" in found[0] or not said:  # `- name: OPTION`, and its value below
                yield Hit(option, *found.span())


def asked_precision(call: ast.Call, text: str) -> ast.keyword | None:
    """The argument of a call that requests a lower precision; `text` is the whole file."""
    name = last_name(call.func)
    given = {item.arg: item for item in call.keywords if item.arg is not None}
    if (found := given.get("enabled_precisions")) is not None and "torch_tensorrt" in text:
        low = {"half", "float16", "bfloat16", "int8", "float8_e4m3fn", "fp16"}
        return found if any(last_name(one) in low for one in ast.walk(found.value)) else None
    for key in ("half", "int8"):
        if _format(given.get("format")) in ("engine", "tensorrt") and _is_set(given.get(key)):
            return given[key]
    for key in [name for name in ("fp16_mode", "int8_mode") if _is_set(given.get(name))]:
        near = (
            name in ("torch2trt", "TRTModule")
            or "import torch2trt as" in text
            or re.search(rf"^\s*from [\w.]*(?:tensorrt|trt)\b[\w.]* import [^\n]*\b{name}\b", text, re.MULTILINE)
            or (name == "dict" and re.search(r"[\"']tensorrt|tensorrt_config", text))
        )
        if near:
            return given[key]
    if "holoscan" in text and _format(given.get("backend")) == "trt" and _is_set(given.get("enable_fp16")):
        return given["enable_fp16"]
    found = given.get("precision_mode")
    if found is not None and re.search("Trt|CONVERSION_PARAMS", ast.unparse(call.func)):
        return None if "FP32" in (last_name(found.value), _text(found.value).upper()) else found
    for key in ("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable"):
        if _is_set(given.get(key)):
            return given[key]
    return None


def _text(node: ast.AST) -> str:
    return str(node.value).lower() if isinstance(node, ast.Constant) else ""


def _format(item: ast.keyword | None) -> str:
    return _text(item.value) if item is not None else ""


def _is_set(item: ast.keyword | None) -> bool:
    return item is not None and isinstance(item.value, ast.Constant) and bool(item.value.value)

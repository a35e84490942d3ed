"""Settings that lost their effect in configurations: DeepStream's nvinfer, Triton's config.pbtxt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trt_engine.verbs.migrate.rules import RuleSet
from trt_engine.verbs.migrate.source import Edit, Hit, line_before, model_values

_NVINFER = re.compile(r"^[ \t]*(?:\[property\]|property\s*:)[ \t\r]*$", re.MULTILINE)
_NVINFER_KEY = re.compile(
    r"^[ \t]*(?:model-engine-file|onnx-file|network-mode|network-type|gie-unique-id|model-file|uff-file)\s*[=:]",
    re.MULTILINE,
)
_SETTING = re.compile(r"^[ \t]*([\w-]+)[ \t]*[=:][ \t]*([^\n#;]*)(?:[#;][^\n]*)?$\n?", re.MULTILINE)
_MODES = {"1": "INT8", "2": "FP16"}
_COMMANDS = {
    "INT8": "trt-engine quantize {model} --to int8 --calib-data DATA -o {stem}.int8.onnx",
    "FP16": "trt-engine cast {model} --to fp16 -o {stem}.fp16.onnx",
}


def is_nvinfer(text: str) -> bool:
    """Whether a file configures DeepStream's nvinfer."""
    return bool(_NVINFER.search(text) and _NVINFER_KEY.search(text))


def scan_nvinfer(text: str, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in a configuration of nvinfer, of either syntax."""
    settings = [(found, found[1], found[2].strip()) for found in _SETTING.finditer(text)]
    models = [value for _, key, value in settings if key == "onnx-file"]
    values = {"model": "MODEL.onnx", "stem": "MODEL"} | model_values(models[0] if models else None)
    for found, key, value in settings:
        rule = rules.keys.get(key)
        span = found.start(1), found.start(2) + len(found[2].rstrip())
        if rule is not None and value and not (key == "force-implicit-batch-dim" and value == "0"):
            edits = (Edit(found.start(), found.end(), ""),) if rule.drop and found[0].strip() else ()
            yield Hit(rule, *span, edits, values)
        rule = rules.by_id.get("caffe-uff-parser")
        if rule is not None and key == "model-file" and value.endswith(".caffemodel"):
            yield Hit(rule, *span, (), values)  # other files are read by a library of the user
        rule = rules.by_id.get("deepstream-network-mode")
        if rule is not None and key == "network-mode" and value in _MODES:
            command = _COMMANDS[_MODES[value]].format(**values)
            yield Hit(rule, *span, (), {"value": _MODES[value], "command": command})


_ACCELERATOR = re.compile(r"name\s*:\s*\"tensorrt\"", re.IGNORECASE)
_PARAMETER = re.compile(
    r"key\s*:\s*\"(precision_mode|trt_fp16_enable|trt_int8_enable|int8_calibration_table_name|int8_use_native_calibration_table)\""
    r"\s*,?\s*value\s*:\s*(?:\{\s*string_value\s*:\s*)?\"([^\"]*)\""
)


def scan_triton(text: str, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in a config.pbtxt of Triton: precision that its TensorRT accelerator was given."""
    rule = rules.by_id.get("triton-precision-mode")
    if rule is None or not _ACCELERATOR.search(text):
        return
    for found in _PARAMETER.finditer(text):
        if "#" not in line_before(text, found.start()) and found[2].upper() not in ("FP32", "0", "FALSE", ""):
            yield Hit(rule, found.start(), found.end())

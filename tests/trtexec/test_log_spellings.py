"""A log is read whatever a container, a scheduler or a terminal wrote around its lines, and whoever printed the messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trt_engine.benchmark.trtexec_style_log import parse_log

LOGS = Path(__file__).parent / "logs"
MARKER = "# --- log follows; a parser is fed only what is below this line ---\n"
_LINE = re.compile(r"^(?:\[[^\]]*\] )?\[(?P<letter>[FEWIV])\] (?P<library>\[TRT\] )?(?P<text>.*)$")
_WORDS = {"F": "ERROR", "E": "ERROR", "W": "WARNING", "I": "INFO", "V": "VERBOSE"}


def _lines(name: str) -> list[str]:
    (log,) = LOGS.rglob(f"{name}*.log")
    text = log.read_text()
    return (text.partition(MARKER)[2] or text).rstrip("\n").split("\n")


def _facts(lines: list[str]) -> dict[str, Any]:
    found = msgspec.to_builtins(parse_log("\n".join(lines) + "\n"))
    names = "status end_marker error_class error_node error_plugin trt_version throughput_qps gpu latency_ms".split()
    return {name: found.get(name) for name in names}


def _wrapped(lines: list[str]) -> list[str]:
    return [line[at : at + 120] for line in lines for at in range(0, max(len(line), 1), 120)]


AROUND: dict[str, Callable[[list[str]], list[str]]] = {
    "docker -t": lambda lines: [f"2024-05-01T12:34:56.{at:06d}123Z {line}" for at, line in enumerate(lines)],
    "Kubernetes": lambda lines: [f"2024-05-01T12:34:56.123456789+02:00 stderr F {line}" for line in lines],
    "kubectl": lambda lines: [f"[pod/trt-7d9f/builder] 2024-05-01T12:34:56.1Z {line}" for line in lines],
    "docker compose": lambda lines: [f"\x1b[36mbuilder-1  | \x1b[0m{line}" for line in lines],
    "journald": lambda lines: [f"May 01 12:34:56 host trtexec[12]: {line}" for line in lines],
    "docker build": lambda lines: [f"#12 {at}.123 {line}" for at, line in enumerate(lines)],
    "JSON": lambda lines: [json.dumps({"log": f"{line}\n", "stream": "stdout"}) for line in lines],
    "a Python logger": lambda lines: [f"2024-05-01 12:34:56,123 - INFO - {line}" for line in lines],
    "ROS": lambda lines: [f"[trtexec-1] {line}" for line in lines],
    "indented": lambda lines: [f"    {line}" for line in lines],
    "colours without their escape": lambda lines: [f"[1;32m{line}[0m" for line in lines],
    "wrapped": _wrapped,
    "a banner without command": lambda lines: [re.sub(r"^(&&&& .*?\]) # .*", r"\1", line) for line in lines],
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["01-", "03-", "05-", "13-", "24-"])
def test_what_is_written_around_the_lines_of_a_log_changes_nothing_in_it(name: str, around: str) -> None:
    lines = _lines(name)
    assert _facts(AROUND[around](lines)) == _facts(lines)


PRINTED: dict[str, Callable[[str, str], str]] = {
    "Python": lambda letter, text: f"[05/01/2024-12:34:56] [TRT] [{letter}] {text}",
    "TensorRT 7": lambda letter, text: f"[TensorRT] {_WORDS[letter]}: {text}",
    "nvinfer": lambda letter, text: f"{_WORDS[letter]}: [TRT]: {text}",
    "GStreamer": lambda letter, text: (
        f"0:00:01.123456789  12 0x55d5c8 {_WORDS[letter]}      nvinfer gstnvinfer.cpp:676:gst_nvinfer_logger:<gie> "
        f"NvDsInferContext[UID 1]: {text}"
    ),
    "Triton": lambda letter, text: (
        f'{letter.replace("V", "I").replace("F", "E")}0501 12:34:56.1 12 logging.cc:40] "{text}"'
    ),
    "ONNX Runtime": lambda letter, text: (
        f"2024-05-01 12:34:56.1 [{letter}:onnxruntime:Default, tensorrt_execution_provider.h:82 log] "
        f"[2024-05-01 12:34:56   {_WORDS[letter]}] {text}"
    ),
    "torch_tensorrt": lambda letter, text: f"{_WORDS[letter]}: [Torch-TensorRT TensorRT Conversion Context] - {text}",
    "TensorRT-LLM": lambda letter, text: f"[TensorRT-LLM][{_WORDS[letter]}] {text}",
    "spdlog": lambda letter, text: f"[2024-05-01 12:34:56.123] [{_WORDS[letter].lower()}] {text}",
}


@pytest.mark.parametrize("printed", PRINTED)
@pytest.mark.parametrize("name", ["05-", "11-", "14-", "16-", "19-"])
def test_the_failure_is_found_in_messages_of_tensorrt_that_another_program_printed(name: str, printed: str) -> None:
    lines = [line for line in _lines(name) if not line.startswith("&&&&")]
    said = [
        PRINTED[printed](match["letter"], match["text"]) if (match := _LINE.match(line)) else line for line in lines
    ]
    report, expected = parse_log("\n".join(said)), parse_log("\n".join(lines))
    assert (report.producer, report.status) == ("TensorRT", "failed")
    assert (report.error_class, report.error_node) == (expected.error_class, expected.error_node)
    assert report.error_hint == expected.error_hint


@pytest.mark.parametrize(
    ("text", "error", "node"),
    [
        (
            '[E] [TRT] ModelImporter.cpp:948: While parsing node number 103 [Where -> "/sam/Where_6_output_0"]:\n'
            "[E] [TRT] ModelImporter.cpp:953: ERROR: ModelImporter.cpp:1 In function parseNode:\n[6] Invalid Node - x\n"
            "[E] Failed to parse onnx file\n",
            "onnx_parse_error",
            "/sam/Where_6_output_0",
        ),
        ("[E] [TRT] Input file cannot be found, or is not a regular file: models/net.onnx\n", "file_not_found", None),
        ("[E] [TRT] ModelImporter.cpp:914: Failed to open weights file: /w/net.onnx.data\n", "file_not_found", None),
        ("[E] Error[3]: Supplied binding dimension [4,3] exceed min ~ max range\n", "shape_mismatch", None),
        ("[E] Error[4]: (images: dynamic input is missing dimensions in profile 0.)\n", "shape_mismatch", None),
        ("[E] Error[4]: (Missing scale and zero-point for tensor a, expect fall back)\n", "scales_missing", None),
        ("[E] [TRT] In function parseGraph:\n[8] No importer registered for op: NonZero\n", "plugin_not_found", None),
        (
            "[E] Error[7]: Error Code 7: Internal Error (/a/R_3: reshape would change volume 2 to 16)\n",
            "shape_mismatch",
            "/a/R_3",
        ),
    ],
)
def test_a_failure_has_its_own_name_and_the_place_that_the_log_gives(text: str, error: str, node: str | None) -> None:
    report = parse_log(f"&&&& RUNNING TensorRT.trtexec [TensorRT v101303] [b9]\n{text}&&&& FAILED TensorRT.trtexec "
                       "[TensorRT v101303] [b9]\n")  # fmt: skip
    assert (report.trt_version, report.trt_build, report.error_class) == ("10.13.3", 9, error)
    assert msgspec.to_builtins(report).get("error_node") == node
    assert report.error_hint

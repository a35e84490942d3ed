"""Causes of failures: which line tells, which does not, and whose error it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trt_engine.errors import ProfileError
from trt_engine.trt.failure_causes import CAUSES, Cause, cause_hint, find_cause, make_error
from trt_engine.trt.known_warnings import find_known_warning

PAGE = Path(__file__).parents[2] / "docs" / "trtexec.md"
REAL = json.loads((Path(__file__).parent / "rtx_messages.json").read_text())["messages"]
NO_DRIVER = "[E] (cudaError 35: CUDA driver version is insufficient for CUDA runtime version)"
NO_KERNEL = "[E] Error[10]: Error Code 10: Internal Error (Could not find any implementation for node conv.)"


def exit_codes() -> dict[str, int]:
    """What the page says of every cause, by its name."""
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    return {name: int(code) for names, code in rows for name in re.findall(r"`([a-z_]+)`", names)}


@pytest.mark.parametrize("name", sorted({*CAUSES} - {"insufficient_workspace"}))
def test_a_cause_ends_a_build_with_the_exit_code_of_the_page(name: str) -> None:
    assert make_error(Cause(name, "x"), "the build").exit_code == exit_codes()[name]


def test_a_starved_search_is_a_failed_build_whose_cause_can_be_asked_for() -> None:
    error = make_error(Cause("insufficient_workspace", "x", node="conv"), "the build")
    assert (error.exit_code, getattr(error, "cause", None)) == (5, "insufficient_workspace")


@pytest.mark.parametrize(
    "line",
    [
        "[I] [TRT] Could not find any implementation for node conv.",
        "[V] [TRT] Cuda failure is what this option looks for",
        "[W] [TRT] Could not find any implementation for node conv.",
        "[E] Error[9]: Skipping tactic 0x0 due to exception Assertion failure: x",
    ],
)
def test_what_is_told_in_passing_is_no_cause(line: str) -> None:
    assert find_cause([line]) is None
    assert find_cause([f"[06/05/2026-11:05:37] {line}", NO_KERNEL]) == find_cause([NO_KERNEL])


@pytest.mark.parametrize(
    "warning",
    [
        "[W] [TRT] Tactic Device request: 1024MB Available: 512MB. Device memory is insufficient to use tactic.",
        "[W] [TRT] Skipping tactic 3 due to insufficient memory on requested size of 1024 detected for tactic 0x3.",
    ],
)
def test_tactics_left_out_for_want_of_memory_make_no_implementation_a_starved_search(warning: str) -> None:
    assert find_cause([warning]).name == "insufficient_workspace"  # type: ignore[union-attr]
    found = find_cause([warning, NO_KERNEL])
    assert found is not None and (found.name, found.node) == ("insufficient_workspace", "conv")


@pytest.mark.parametrize(
    ("lines", "name", "node"),
    [
        (["[E] [TRT] ModelImporter.cpp:776: While parsing node number 12 [NonZero -> \"y\"]:",
          "[E] Failed to parse onnx file"],
         "onnx_parse_error", "y"),
        (["[E] [TRT] ModelImporter.cpp:776: While parsing node number 3 [Mine -> \"y\"]:",
          "[E] Plugin not found, are the plugin name, version, and namespace correct?"], "plugin_not_found", "Mine"),
        (["[E] Required optimization profile is invalid"], "shape_mismatch", None),
        ([f"    {NO_KERNEL}"], "no_implementation", "conv"),
        ([f"> [06/05/2026-11:05:37] {NO_KERNEL}"], "no_implementation", "conv"),
    ],
)  # fmt: skip
def test_a_cause_has_its_name_and_its_node(lines: list[str], name: str, node: str | None) -> None:
    found = find_cause(lines)
    assert found is not None and (found.name, found.node) == (name, node)
    assert not found.text.startswith(("[", ">", " "))


def test_a_plan_with_code_for_the_host_is_an_engine_that_a_yes_loads() -> None:
    line = "[E] IRuntime::deserializeCudaEngine: Error Code 4: API Usage Error (engine_host_code_allowed is not set)"
    found = find_cause([line, "[E] Engine deserialization failed"])
    assert found is not None and found.name == "host_code_refused"
    error = make_error(found, "loading `net.engine`")
    assert error.exit_code == 10 and "`-O allow_host_code=on`" in (error.hint or "")


@pytest.mark.parametrize("real", REAL, ids=lambda real: f"{real['name']}-{real['text'][-40:-10]}")
def test_every_real_message_has_its_cause_and_a_hint_that_helps(real: dict[str, str]) -> None:
    line = real["text"] if real["severity"] == "-" else f"[{real['severity']}] {real['text']}"
    cause, warning = find_cause([line]), find_known_warning(real["text"])
    if real["kind"] == "warning":
        assert warning is not None and (warning.name, cause) == (real["name"], None)
        assert real["hint"] in warning.hint
        return
    assert cause is not None and (cause.name, cause.node) == (real["name"], real["node"])
    assert warning is None and real["hint"] in cause_hint(cause, "TensorRT-RTX")
    error = make_error(cause, "the build of `x.onnx`", product="TensorRT-RTX")
    assert error.hint == cause_hint(cause, "TensorRT-RTX")
    assert error.exit_code == (exit_codes() | {"insufficient_workspace": 5})[cause.name]
    assert not re.search(r"/_src/|\.cpp|Error Code|::", error.message), error.message


def test_a_log_of_all_the_warnings_is_no_failure() -> None:
    warned = [
        f"[{real['severity']}] {real['text']}" for real in REAL if real["kind"] == "warning" and real["severity"] != "-"
    ]
    assert find_cause(warned) is None
    for real in REAL:
        if real["kind"] == "cause":
            assert getattr(find_cause([*warned, f"[E] {real['text']}"]), "name", None) == real["name"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_missing_driver_explains_only_what_nothing_else_does(order: int) -> None:
    mixed = (
        "[E] ITensor::getDimensions: Error Code 4: API Usage Error (add: SUM must have same input types. They differ.)"
    )
    found = find_cause([mixed, NO_DRIVER][::order])
    assert found is not None and (found.name, found.node) == ("onnx_parse_error", "add")
    chain = "[E] Builder creation failed"
    assert find_cause([NO_DRIVER, chain][::order]).name == "cuda_unavailable"  # type: ignore[union-attr]


def test_a_profile_the_graph_cannot_have_is_a_profile_error_with_profile_and_layer() -> None:
    (real,) = (real for real in REAL if "violate shape constraints" in real["text"])
    cause = find_cause([f"[E] {real['text'].replace('kOPT', 'kMAX').replace('profile 0', 'profile 1')}"])
    assert cause is not None
    error = make_error(cause, "the build of `x.onnx`")
    assert type(error) is ProfileError
    assert "reshape would change volume 12 to 16" in error.message
    assert (error.hint or "").startswith("the largest sizes of profile 1 do not fit the graph at layer `rs`")


def test_a_data_type_names_the_compute_capability_it_needs() -> None:
    line = "[E] Cannot compile for target(s) sm80, because the model contains HW-specific datatypes: fp8_e4m3, fp4_e2m1, x."
    hint = find_cause([line]).hint  # type: ignore[union-attr]
    assert hint.startswith(
        "FP8 needs compute capability 8.9 or later; NVFP4 needs compute capability 10.0 or later; quantise"
    )


def test_a_refusal_in_a_log_names_the_operator_and_keeps_its_code() -> None:
    lines = [
        '[E] ModelImporter.cpp:140: While parsing node number 0 [Det -> "y"]:',
        "[E] ModelImporter.cpp:142: --- Begin node ---\nNode name: determinant",
        "[E] ModelImporter.cpp:143: --- End node ---",
        "[E] ModelImporter.cpp:151: ERROR: onnxOpCheckers.cpp:1130 In function checkDet:\n[8] false",
    ]
    found = find_cause(lines)
    assert found is not None and (found.name, found.node) == ("onnx_parse_error", "determinant")
    assert found.text == "TensorRT's parser does not have the operator Det: [8] false"
    lines[-1] = (
        "[E] ModelImporter.cpp:151: ERROR: a.cpp:1 In function f:\n[8] Assertion failed: x: Axis must be an initializer!"
    )
    found = find_cause(lines)
    assert found is not None and (found.name, found.node) == ("onnx_parse_error", "determinant")
    assert "make it an initializer" in found.hint

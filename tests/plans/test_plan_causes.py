"""Causes of failures: which line tells, which does not, and whose error it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trt_engine.plans.causes import CAUSES, Cause, cause_of, error_of

PAGE = Path(__file__).parents[2] / "docs" / "trtexec.md"
NO_KERNEL = "[E] Error[10]: Error Code 10: Internal Error (Could not find any implementation for node conv.)"


def exit_codes() -> dict[str, int]:
    """What the page says of every cause, by its name."""
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    return {name: int(code) for names, code in rows for name in re.findall(r"`([a-z_]+)`", names)}


@pytest.mark.parametrize("name", sorted({*CAUSES} - {"insufficient_workspace"}))
def test_a_cause_ends_a_build_with_the_exit_code_of_the_page(name: str) -> None:
    assert error_of(Cause(name, "x"), "the build").exit_code == exit_codes()[name]


def test_a_starved_search_is_a_failed_build_whose_cause_can_be_asked_for() -> None:
    error = error_of(Cause("insufficient_workspace", "x", node="conv"), "the build")
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
    assert cause_of([line]) is None
    assert cause_of([f"[06/05/2026-11:05:37] {line}", NO_KERNEL]) == cause_of([NO_KERNEL])


@pytest.mark.parametrize(
    "warning",
    [
        "[W] [TRT] Tactic Device request: 1024MB Available: 512MB. Device memory is insufficient to use tactic.",
        "[W] [TRT] Skipping tactic 3 due to insufficient memory on requested size of 1024 detected for tactic 0x3.",
    ],
)
def test_tactics_left_out_for_want_of_memory_make_no_implementation_a_starved_search(warning: str) -> None:
    assert cause_of([warning]).name == "insufficient_workspace"  # type: ignore[union-attr]
    found = cause_of([warning, NO_KERNEL])
    assert found is not None and (found.name, found.node) == ("insufficient_workspace", "conv")


@pytest.mark.parametrize(
    ("lines", "name", "node"),
    [
        (["[E] [TRT] ModelImporter.cpp:776: While parsing node number 12 [NonZero -> \"y\"]:",
          "[E] Failed to parse onnx file"],
         "onnx_parse_error", "NonZero"),
        (["[E] [TRT] ModelImporter.cpp:776: While parsing node number 3 [Mine -> \"y\"]:",
          "[E] Plugin not found, are the plugin name, version, and namespace correct?"], "plugin_not_found", "Mine"),
        (["[E] Required optimization profile is invalid"], "shape_mismatch", None),
        ([f"    {NO_KERNEL}"], "no_implementation", "conv"),
        ([f"> [06/05/2026-11:05:37] {NO_KERNEL}"], "no_implementation", "conv"),
    ],
)  # fmt: skip
def test_a_cause_has_its_name_and_its_node(lines: list[str], name: str, node: str | None) -> None:
    found = cause_of(lines)
    assert found is not None and (found.name, found.node) == (name, node)
    assert not found.text.startswith(("[", ">", " "))


def test_a_plan_with_code_for_the_host_is_an_engine_that_a_yes_loads() -> None:
    line = "[E] IRuntime::deserializeCudaEngine: Error Code 4: API Usage Error (engine_host_code_allowed is not set)"
    found = cause_of([line, "[E] Engine deserialization failed"])
    assert found is not None and found.name == "host_code_refused"
    error = error_of(found, "loading `net.engine`")
    assert error.exit_code == 10 and "`-O allow_host_code=on`" in (error.hint or "")

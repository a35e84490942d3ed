"""GPUs an engine is built for: every spelling of one is one, and what is not built for says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.errors import UsageError
from trt_engine.trt.gpu_targets import GPUS, RTX_TARGETS, compute_capability, rtx_targets, sm_label
from trt_engine.trt.versions import find_architecture, parse_capability

NAMES = [(name, target) for target, names in GPUS.items() for name in names.split(", ")]


def spellings(target: str) -> list[str]:
    digits = target.replace(".", "")
    return [target, digits, f"sm{digits}", f"sm_{digits}", f"SM{digits}", f"SM_{digits}", f" sm{digits} "]


targets = st.sampled_from(RTX_TARGETS)
named = st.sampled_from([(name, target) for name, target in NAMES if target in RTX_TARGETS])


@given(
    st.lists(
        targets.flatmap(lambda one: st.tuples(st.just(one), st.sampled_from(spellings(one)))), min_size=1, max_size=4
    )
)
def test_order_spelling_and_repetition_make_no_other_targets(chosen: list[tuple[str, str]]) -> None:
    found = rtx_targets([text for _, text in chosen])
    assert found == tuple(sorted({target for target, _ in chosen}, key=RTX_TARGETS.index))
    assert rtx_targets(found) == found and rtx_targets(found[::-1]) == found
    assert rtx_targets([sm_label(one) for one in found]) == found


@given(
    named,
    st.sampled_from([str, str.lower, str.upper]),
    st.sampled_from([" ", "", "-", "_"]),
    st.sampled_from(["", "NVIDIA ", "NVIDIA GeForce "]),
    st.sampled_from(["", " Laptop GPU", " SUPER", "-SXM4-80GB", " Generation", " Blackwell Workstation Edition"]),
)
def test_a_name_is_known_in_any_case_and_spacing_and_in_its_full_length(item, case, blank, maker, rest) -> None:
    name, target = item
    assert rtx_targets([maker + case(name).replace(" ", blank) + rest]) == (target,)


@given(st.text(max_size=30))
def test_any_text_is_a_target_or_a_usage_error_with_a_hint(text: str) -> None:
    try:
        assert rtx_targets([text])[0] in RTX_TARGETS
    except UsageError as error:
        assert error.hint and text in error.message


def test_the_table_has_known_capabilities_and_no_name_twice() -> None:
    assert all(find_architecture(parse_capability(target) or (0, 0)) is not None for target in (*GPUS, *RTX_TARGETS))
    squeezed = [name.lower().replace(" ", "") for name, _ in NAMES]
    assert len(squeezed) == len(set(squeezed))
    assert all(compute_capability(name) == target for name, target in NAMES)


@pytest.mark.parametrize(
    ("name", "target", "kind"),
    [
        ("H100", "9.0", "Hopper"),
        ("NVIDIA H200", "9.0", "Hopper"),
        ("NVIDIA H100 80GB HBM3", "9.0", "Hopper"),
        ("sm_90a", "9.0", "Hopper"),
        ("B200", "10.0", "Blackwell"),
        ("Jetson AGX Orin", "8.7", "Ampere"),
        ("V100", "7.0", "Volta"),
    ],
)
def test_a_gpu_without_rtx_gets_the_reason(name: str, target: str, kind: str) -> None:
    with pytest.raises(UsageError) as refused:
        rtx_targets(["sm89", name])
    assert target in refused.value.message and kind in refused.value.message and refused.value.hint


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("RTX 4091", "`RTX 4090`"), ("rtx 6000", "`RTX 6000 Ada`"), ("A100x", "`A100`"), ("sm88", ""), ("current", "")],
)
def test_an_unknown_gpu_lists_the_nearest_and_the_known(typed: str, nearest: str) -> None:
    with pytest.raises(UsageError) as refused:
        rtx_targets([typed])
    hint = refused.value.hint or ""
    assert nearest in hint and all(sm_label(target) in hint for target in RTX_TARGETS)

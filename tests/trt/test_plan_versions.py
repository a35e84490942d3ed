"""What is known of TensorRT's versions: what is stated is answered, what is not stated is not known."""

from __future__ import annotations

import pytest

from trt_engine.trt import versions


def v(text: str) -> versions.Version:
    found = versions.Version.parse(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("11.4.0.106", (11, 4, 0, 106)),
        ("10.0.1", (10, 0, 1)),
        ("10.16.1.11-1+cuda13.0", (10, 16, 1, 11)),
        ("8.6.1.post1", (8, 6, 1)),
        ("v10.3", (10, 3)),
        ("", None),
        ("nightly", None),
    ],
)
def test_a_version_is_read_as_far_as_it_is_one(text: str, parts: tuple[int, ...] | None) -> None:
    found = versions.Version.parse(text)
    assert (found.parts if found else None) == parts


def test_the_number_of_a_banner_is_the_version_before_and_after_ten() -> None:
    told = [str(versions.Version.from_number(number)) for number in (8502, 8601, 9300, 100001, 101600, 110400)]
    assert told == ["8.5.2", "8.6.1", "9.3.0", "10.0.1", "10.16.0", "11.4.0"]
    assert str(versions.Version.from_number(101601, 11)) == "10.16.1.11"


@pytest.mark.parametrize(
    ("built", "here", "compatible", "runs"),
    [
        ("10.16.1.11", "10.16.1.11", False, True),
        ("10.16.1.11", "10.16.1.12", False, False),
        ("10.3.0.26", "10.16.1.11", False, False),
        ("10.3.0.26", "10.16.1.11", True, True),
        ("10.16.1.11", "10.3.0.26", True, False),
        ("10.16.1.11", "11.4.0.106", True, True),
        ("11.0.0.1", "10.16.1.11", True, False),
        ("8.6.1.6", "10.16.1.11", True, True),
        ("8.6.1.6", "11.4.0.106", True, False),
        ("8.6.1.6", "8.6.2.3", True, True),
        ("9.3.0.1", "11.4.0.106", True, False),
        ("8.5.2.2", "8.6.1.6", True, False),
    ],
)
def test_plans_move_between_versions_only_where_that_is_promised(
    built: str, here: str, compatible: bool, runs: bool
) -> None:
    assert versions.can_load_plan(v(here), v(built), version_compatible=compatible) is runs


@pytest.mark.parametrize(
    ("version", "gpu", "known"),
    [
        ("8.6.1", "7.0", True),
        ("10.4.0", "7.0", True),
        ("10.5.0", "7.0", False),
        ("11.4.0", "7.0", False),
        ("8.6.1", "6.1", True),
        ("10.0.1", "6.1", False),
        ("9.0.1", "5.2", False),
        ("10.7.0", "12.0", False),
        ("10.8.0", "12.0", True),
        ("10.8.0", "10.0", True),
        ("10.8.0", "12.1", None),
        ("11.4.0", "12.1", True),
        ("10.9.0", "11.0", None),
        ("10.13.0", "11.0", True),
        ("8.6.1", "9.0", None),
        ("10.0.1", "9.0", True),
        ("11.4.0", "7.5", True),
        ("11.4.0", "14.0", None),
        ("8.4.0", "8.0", None),
    ],
)
def test_each_tensorrt_has_its_gpus_and_unknown_is_not_yes(version: str, gpu: str, known: bool | None) -> None:
    parsed = versions.parse_capability(gpu)
    assert parsed is not None
    assert versions.supports(v(version), parsed) is known


def test_every_fact_about_gpus_names_its_source_and_no_capability_stands_twice() -> None:
    assert all(row.source for row in versions.ARCHITECTURES)
    every = [item for row in versions.ARCHITECTURES for item in row.capabilities]
    assert len(every) == len(set(every))
    assert (
        versions.supported_versions_text((7, 0)) == "before 10.5"
        and versions.supported_versions_text((12, 0)) == "10.8 or newer"
    )
    assert versions.supported_versions_text((99, 0)) is None


def test_a_compute_capability_is_read_in_both_spellings() -> None:
    assert [versions.parse_capability(text) for text in ("9.0", "sm_90", "sm_90a", "SM120", "12.0")] == [
        (9, 0), (9, 0), (9, 0), (12, 0), (12, 0),
    ]  # fmt: skip
    assert versions.parse_capability("Hopper") is versions.parse_capability("") is None


@pytest.mark.parametrize(
    ("precision", "least", "since"),
    [
        ("tf32", (8, 0), None), ("bf16", (8, 0), "10.0"), ("fp8", (8, 9), "10.0"), ("int4", (7, 5), "10.0"),
        ("nvfp4", (10, 0), "10.8"), ("mxfp8", (10, 0), "10.12"),
    ],
)  # fmt: skip
def test_a_precision_needs_the_gpu_and_the_tensorrt_that_have_it(
    precision: str, least: tuple[int, int], since: str | None
) -> None:
    assert versions.COMPUTE_CAPABILITY[precision] == least
    assert versions.precision_since(precision) == (None if since is None else versions.Version.parse(since))


def test_the_wheel_is_the_one_the_driver_can_serve() -> None:
    assert versions.wheel_spec(v("11.4.0.106")) == '"tensorrt-cu13==11.4.0.*"'
    assert versions.wheel_spec(v("11.4.0.106"), "580.159.03") == '"tensorrt-cu13==11.4.0.*"'
    assert versions.wheel_spec(v("11.4.0.106"), "550.54.15") == '"tensorrt-cu12==11.4.0.*"'
    assert versions.wheel_spec(v("10.3.0.26"), "580.159.03") == '"tensorrt-cu12==10.3.0.*"'
    assert versions.wheel_spec(v("8.6.1.6")) == '"tensorrt==8.6.1"'


def test_drivers_and_cuda_are_answered_from_what_is_published() -> None:
    assert versions.min_driver_branch(v("11.4.0"), 13) == 580
    assert versions.min_driver_branch(v("11.4.0"), 12) == 535
    assert versions.min_driver_branch(v("10.3.0"), 12) == 525
    assert versions.min_driver_branch(None, 14) is None
    assert versions.cuda_majors(v("11.4.0")) == (12, 13) and versions.cuda_majors(v("10.3.0")) == (11, 12)


@pytest.mark.parametrize(
    ("of", "driver", "expected"),
    [
        ((3, 5), None, None),  # no TensorRT from 8.6 on runs on Kepler
        ((5, 2), None, '"tensorrt<9.0"'),
        ((6, 1), None, '"tensorrt<10.0"'),
        ((7, 0), "580.1", '"tensorrt-cu12<10.5"'),
        ((9, 0), "580.1", '"tensorrt-cu13>=10.13.2"'),
        ((9, 0), None, '"tensorrt-cu13>=10.13.2"'),
        ((9, 0), "550.54.15", '"tensorrt-cu12>=10.0"'),
        ((12, 0), "570.86", '"tensorrt-cu12>=10.8"'),
        ((12, 1), "580.1", '"tensorrt-cu13>=10.16"'),
        ((99, 0), "580.1", None),
    ],
)
def test_the_wheel_for_a_gpu_is_one_that_runs_on_it_and_on_the_driver(
    of: tuple[int, int], driver: str | None, expected: str | None
) -> None:
    assert versions.wheel_for_gpu(of, driver) == expected


@pytest.mark.parametrize(
    ("driver", "branch"), [("580.159.03", 580), ("580", 580), (None, None), ("", None), ("N/A", None)]
)
def test_the_branch_of_a_driver_is_its_first_number(driver: str | None, branch: int | None) -> None:
    assert versions.driver_branch(driver) == branch

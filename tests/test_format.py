"""A value reads the same wherever it stands: so many digits that count, in the unit that suits it."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trt_engine
from trt_engine.escapes import escape_control, escape_json
from trt_engine.format import (
    format_bytes,
    format_count,
    format_ms,
    format_number,
    format_percent,
    format_quantity,
    format_us,
    library_reason,
)
from trt_engine.reporting.document import clean_text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.26, "0.260"), (4.5, "4.50"), (764.2, "764"), (1979, "1979"), (12345.6, "12346"), (0, "0"), (-2.5, "-2.50"),
        (9.999, "10.0"), (99.96, "100"), (0.09996, "0.100"), (0.000123, "0.000123"), (0.0000123, "1.23e-05"),
        (float("inf"), "inf"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_a_figure_has_three_digits_that_count(value: float, shown: str) -> None:
    assert format_number(value) == shown


@given(st.floats(1e-4, 1e12), st.integers(2, 6))
def test_a_figure_is_within_half_of_its_last_digit_and_has_no_exponent(value: float, digits: int) -> None:
    shown = format_number(value, digits)
    assert "e" not in shown
    assert math.isclose(float(shown), value, rel_tol=0.5000001 * 10 ** (1 - digits))
    assert len(shown.replace(".", "").lstrip("0")) >= digits


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.26, "TFLOP/s", "260 GFLOP/s"), (376.2, "TFLOP/s", "376 TFLOP/s"), (1979, "TOP/s", "1979 TOP/s"),
        (4012, "GB/s", "4.01 TB/s"), (53.6, "GB/s", "53.6 GB/s"), (0.0123, "GB/s", "12.3 MB/s"),
        (0, "GB/s", "0 GB/s"), (2.53, "us", "2.53 us"), (0.26, "FLOP/B", "0.260 FLOP/B"), (2000, "/s", "2000 /s"),
    ],
)  # fmt: skip
def test_a_rate_is_in_the_thousands_that_suit_it_and_other_units_stay(value: float, unit: str, shown: str) -> None:
    assert format_quantity(value, unit) == shown


def test_times_keep_the_unit_they_are_measured_in() -> None:
    assert (format_ms(2.629), format_ms(0.5), format_ms(12345.6)) == ("2.63 ms", "0.500 ms", "12346 ms")
    assert (format_us(2.5), format_us(1500)) == ("2.50 us", "1500 us")


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (704000, "687.5 KiB"), (1 << 20, "1.0 MiB"),
        (143771 << 20, "140.4 GiB"), (5 << 40, "5120.0 GiB"),
    ],
)  # fmt: skip
def test_a_size_is_in_the_largest_unit_that_holds_one(nbytes: int, shown: str) -> None:
    assert format_bytes(nbytes) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (38240, "38,240"), (103_912_000, "103.9 M"), (4_089_184_256, "4.089 G"), (2_250_000_000_000, "2.250 T")],
)
def test_a_count_of_operations_has_four_digits_from_a_million_on(value: int, shown: str) -> None:
    assert format_count(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "0 %"), (0.001, "<1 %"), (0.005, "<1 %"), (0.0051, "1 %"), (0.874, "87 %"), (1, "100 %")]
)
def test_a_little_share_is_not_nothing(share: float, shown: str) -> None:
    assert format_percent(share) == shown


@pytest.mark.parametrize("name", ["rnn", "/".join(["If_0_else_branch__Inline_0__"] * 40)])
def test_a_librarys_message_keeps_its_reason_whatever_stands_before_it(name: str) -> None:
    assert library_reason(f"node {name} failed: 3 dimensions expected\nframe #0").endswith("3 dimensions expected")
    assert library_reason(f"while running {name}:\n  3 dimensions expected\nframe #0").endswith("3 dimensions expected")
    assert len(library_reason(f"node {name} failed: 3 dimensions expected")) <= 400
    assert library_reason(KeyError()) == "KeyError"


def test_no_module_cuts_a_librarys_message_itself() -> None:
    cut = re.compile(
        r"str\((error|rejected|stated|failed|exc)\)[^#\n]*(\[0\]|\[:\d+\]|partition\(.\\n)|\{error(!r)?\}\"\[:"
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in Path(trt_engine.__file__).parent.rglob("*.py")
        if path.name != "import_probe.py"  # a program of its own
        for line in path.read_text().splitlines()
        if cut.search(line) and "==> Context" not in line
    ]
    assert not found, "use `format.library_reason`"


HIDDEN = [sign for sign in map(chr, range(0x30000)) if unicodedata.category(sign) in ("Cc", "Cf", "Zl", "Zp")] + [
    *"\u034f\u115f\u3164\ufe0f\uffa0\U000e0041\U000e0100\ue000\ufffe\ud800"
]


def test_every_character_that_hides_or_reorders_is_an_escape_in_text_and_in_json() -> None:
    for sign in HIDDEN:
        assert sign not in escape_control(f"a{sign}b") and sign not in clean_text(f"a{sign}b")
        if sign >= "\x7f":
            document = escape_json(json.dumps(f"a{sign}b", ensure_ascii=False))
            assert sign not in document and json.loads(document) == f"a{sign}b"


def test_letters_of_all_scripts_stay_as_they_are() -> None:
    text = "größe 模型 مدل модель ✓ → ×\u00a0\u3000🙂 é e\u0301"
    assert escape_control(text) == text and escape_json(text) == text

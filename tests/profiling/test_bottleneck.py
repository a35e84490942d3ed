"""The verdict says what the figures show: planted profiles whose answer is known, missing facts, and no more than that."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_engine.cli.verbs_table import VERBS, command_module
from trt_engine.environment import Environment
from trt_engine.profiling import roofline
from trt_engine.profiling.bottleneck import find_bottleneck
from trt_engine.profiling.instruments.capture import Capture
from trt_engine.profiling.kernel_categories import time_breakdown
from trt_engine.records.profile import (
    Activity,
    Bottleneck,
    Category,
    DevicePeak,
    DevicePeaks,
    KernelRow,
    LayerProfile,
    LayerRow,
    TimeBreakdown,
)

HERE = Environment.detect()

GPU: dict[str, tuple[float, str]] = {
    "fp32_matrix": (50, "TFLOP/s"),
    "tf32_matrix": (400, "TFLOP/s"),
    "fp16_matrix": (800, "TFLOP/s"),
    "fp8_matrix": (1400, "TFLOP/s"),
    "int8_matrix": (1500, "TOP/s"),
    "memory_copy": (4000, "GB/s"),
    "memory_read": (4000, "GB/s"),
    "launch": (2.5, "us"),
    "launch_graph": (1.0, "us"),
}
CPU: dict[str, tuple[float, str]] = {
    "fp32_matrix": (0.2, "TFLOP/s"),
    "fp32_matrix_blas": (0.18, "TFLOP/s"),
    "int8_matrix": (1.0, "TOP/s"),
    "memory_copy": (20, "GB/s"),
    "memory_read": (15, "GB/s"),
    "call": (4.0, "us"),
    "node": (0.25, "us"),
}


def limits(figures: dict[str, tuple[float, str]] = GPU, *, source: str = "measured", **changed: Any) -> DevicePeaks:
    items = tuple(DevicePeak(name, value, unit, source, "planted") for name, (value, unit) in figures.items())  # type: ignore[arg-type]
    return DevicePeaks("planted", "key", items, "2026-01-01T00:00:00Z", HERE, **changed)


def without(*names: str) -> DevicePeaks:
    return limits({name: value for name, value in GPU.items() if name not in names})


def kernel(category: Category, ms: float, count: float = 1, name: str = "k") -> KernelRow:
    """`count` launches of one kernel in an inference, `ms` of them together; 10 inferences captured."""
    mean_us = ms / count * 1e3
    return KernelRow(
        name=name, short_name=name, category=category, calls=int(10 * count), per_inference=count, total_ms=10 * ms,
        mean_us=mean_us, median_us=mean_us, min_us=mean_us, max_us=mean_us, share=0.0,
    )  # fmt: skip


def layer(
    category: Category, ms: float, *, flops: float | None = None, nbytes: float | None = None, **more: Any
) -> LayerRow:
    return LayerRow(
        name=more.pop("name", category), kind=category, category=category, mean_ms=ms, median_ms=ms, share=0.0,
        calls=more.pop("calls", 1.0), flops=None if flops is None else int(flops),
        nbytes=None if nbytes is None else int(nbytes), **more,
    )  # fmt: skip


def profile(*rows: LayerRow, clock: str = "device", instrument: str = "tensorrt IProfiler 11.4.0") -> LayerProfile:
    return LayerProfile(rows, 10, instrument, clock=clock)  # type: ignore[arg-type]


def judged(**facts: Any) -> Bottleneck:
    given_: dict[str, Any] = {
        "split": TimeBreakdown(wall_ms=10.0),
        "layers": None,
        "kernels": (),
        "peaks": limits(),
        "flops": None,
        "nbytes": None,
        "batch": 8,
        "device": "cuda:0",
        "precision": "fp16",
        "engine": "model.engine",
    }
    given_ |= facts
    return find_bottleneck(roofline.ProfileFacts(device_peaks=given_.pop("peaks"), **given_))


def on_cpu(**facts: Any) -> Bottleneck:
    return judged(**({"device": "cpu", "precision": "fp32", "peaks": limits(CPU)} | facts))


TB, TERA = 1e12, 1e12


def planted(bound: str, **facts: Any) -> tuple[str, dict[str, Any]]:
    return bound, facts


def planted_cpu(bound: str, **facts: Any) -> tuple[str, dict[str, Any]]:
    return bound, {"device": "cpu", "precision": "fp32", "peaks": limits(CPU)} | facts


PLANTED = {
    "launch calls fill the time, kernels a tenth of it": planted(
        "launch",
        split=TimeBreakdown(wall_ms=2.0, busy_ms=0.2, idle_ms=1.8, launch_ms=1.6, kernels=400, gpu_ms=1.9),
        kernels=(kernel("element-wise", 0.2, 400),),
    ),
    "no launch times were captured, but 400 launches at 2.5 us are half of 2 ms": planted(
        "launch",
        split=TimeBreakdown(wall_ms=2.0, busy_ms=0.2, kernels=400, gpu_ms=1.9),
        kernels=(kernel("element-wise", 0.2, 400),),
    ),
    "a framework spends 8 us on each kernel, of which launching is a part": planted(
        "launch",
        split=TimeBreakdown(wall_ms=2.0, busy_ms=0.4, kernels=200, gpu_ms=1.95, launch_ms=0.5, idle_ms=1.6),
        kernels=(kernel("matrix", 0.4, 200),),
    ),
    "a graph of tiny kernels with gaps between them": planted(
        "launch",
        split=TimeBreakdown(wall_ms=1.0, busy_ms=0.4, idle_ms=0.6, kernels=300, gpu_ms=0.98, launch_ms=0.004),
        kernels=(kernel("matrix", 0.4, 300),),
    ),
    "a graph without gaps, its kernels hardly longer than empty ones": planted(
        "launch",
        split=TimeBreakdown(wall_ms=0.5, busy_ms=0.48, idle_ms=0.02, kernels=300, gpu_ms=0.49, launch_ms=0.004),
        kernels=(kernel("element-wise", 0.48, 300),),
    ),
    "the host works 7 of 10 ms before it launches the first of few kernels": planted(
        "host",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=2.9, idle_ms=7.1, launch_ms=0.05, kernels=20, gpu_ms=3.0),
        kernels=(kernel("matrix", 2.9, 20),),
    ),
    "the host works 7 of 10 ms before it launches the first of many kernels": planted(
        "host",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=2.9, kernels=400, gpu_ms=3.0),
        kernels=(kernel("matrix", 2.9, 400),),
    ),
    "a node on the host in the middle: one long gap, few kernels": planted(
        "host",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=3.0, idle_ms=7.0, launch_ms=0.6, kernels=20, gpu_ms=9.9),
        kernels=(kernel("matrix", 3.0, 20),),
    ),
    "copies take 6 of 10 ms": planted(
        "copy",
        split=TimeBreakdown(wall_ms=10.0, h2d_ms=5.0, d2h_ms=1.0, compute_ms=3.5, gpu_ms=3.5, busy_ms=9.4),
        kernels=(kernel("matrix", 3.4, 20),),
    ),
    "copies beside the computation and longer than it": planted(
        "copy", split=TimeBreakdown(wall_ms=6.0, h2d_ms=5.5, d2h_ms=0.1, compute_ms=4.0, gpu_ms=4.0)
    ),
    "matrix layers at 75 % of the rate": planted(
        "compute",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9),
        kernels=(kernel("matrix", 8.0, 40), kernel("element-wise", 1.8, 20)),
        layers=profile(
            layer("matrix", 8.0, flops=0.75 * 800 * TERA * 8e-3, nbytes=0.1 * 4 * TB * 8e-3),
            layer("element-wise", 1.8, flops=1e6, nbytes=0.7 * 4 * TB * 1.8e-3),
        ),
    ),
    "the same without layer times, from kernels by category and the work of the model": planted(
        "compute",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9),
        kernels=(kernel("matrix", 8.0, 40), kernel("element-wise", 1.8, 20)),
        flops=int(0.75 * 800 * TERA * 8e-3),
    ),
    "no kernels and no layers: the model as a whole at 60 % of the rate": planted(
        "compute", split=TimeBreakdown(wall_ms=10.0, gpu_ms=9.9), flops=int(0.6 * 800 * TERA * 9.9e-3)
    ),
    "short kernels that do reach the rate of matrix products": planted(
        "compute",
        split=TimeBreakdown(wall_ms=0.5, busy_ms=0.48, idle_ms=0.02, kernels=300, gpu_ms=0.49, launch_ms=0.004),
        kernels=(kernel("matrix", 0.48, 300),),
        flops=int(0.6 * 800 * TERA * 0.48e-3),
    ),
    "element-wise layers at 70 % of the copy rate": planted(
        "bandwidth",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9),
        kernels=(kernel("element-wise", 7.0, 40), kernel("matrix", 2.8, 20)),
        layers=profile(
            layer("matrix", 2.8, flops=0.6 * 800 * TERA * 2.8e-3, nbytes=1e9),
            layer("element-wise", 7.0, flops=1e9, nbytes=0.7 * 4 * TB * 7e-3),
        ),
    ),
    "thin matrix products that read their weights at the copy rate (batch 1)": planted(
        "bandwidth",
        split=TimeBreakdown(wall_ms=1.0, busy_ms=0.95, kernels=10, gpu_ms=0.98),
        kernels=(kernel("matrix", 0.95, 10),),
        layers=profile(layer("matrix", 0.95, flops=3e9, nbytes=0.8 * 4 * TB * 0.95e-3)),
        batch=1,
    ),
    "element-wise kernels of unknown bytes, long ones: by their kind": planted(
        "bandwidth",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9),
        kernels=(kernel("element-wise", 7.0, 40), kernel("matrix", 2.8, 20)),
        flops=int(0.6 * 800 * TERA * 2.8e-3),
    ),
    "matrix layers at a fifth of either limit": planted(
        "unknown",
        split=TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9),
        kernels=(kernel("matrix", 9.8, 60),),
        layers=profile(layer("matrix", 9.8, flops=0.2 * 800 * TERA * 9.8e-3, nbytes=0.2 * 4 * TB * 9.8e-3)),
    ),
    "a CPU at 80 % of what it multiplies": planted_cpu(
        "compute",
        split=TimeBreakdown(wall_ms=10.0, compute_ms=9.9),
        layers=profile(layer("matrix", 9.0, flops=0.8 * 0.2 * TERA * 9e-3, nbytes=1e6), clock="host"),
    ),
    "a CPU whose element-wise layers move 90 % of what its memory does": planted_cpu(
        "bandwidth",
        split=TimeBreakdown(wall_ms=10.0, compute_ms=9.9),
        layers=profile(
            layer("element-wise", 8.0, flops=1e6, nbytes=0.9 * 20e9 * 8e-3),
            layer("matrix", 1.0, flops=0.15e9, nbytes=1e5),
            clock="host",
        ),
    ),
    "a CPU that runs a thousand nodes of nothing": planted_cpu(
        "host",
        split=TimeBreakdown(wall_ms=0.4, compute_ms=0.39),
        layers=profile(
            *(layer("element-wise", 0.0003, flops=64, nbytes=512, name=f"n{index}") for index in range(1000)),
            clock="host",
        ),
    ),
    "a CPU that spends its time around the call": planted_cpu(
        "host",
        split=TimeBreakdown(wall_ms=10.0, compute_ms=2.0),
        layers=profile(layer("matrix", 2.0, flops=0.3e9, nbytes=1e5), clock="host"),
    ),
    "a CPU whose element-wise layers are faster than its memory: they work from the cache": planted_cpu(
        "unknown",
        split=TimeBreakdown(wall_ms=10.0, compute_ms=9.9),
        layers=profile(layer("element-wise", 9.0, flops=1e6, nbytes=3 * 20e9 * 9e-3), clock="host"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_found(name: str) -> None:
    bound, facts = PLANTED[name]
    found = judged(**facts)
    assert found.bound == bound, found.summary
    words = {"bandwidth": "memory-bound: "}.get(bound, f"{bound}-bound: ")
    assert found.summary.startswith("unknown: " if bound == "unknown" else words)
    assert found.evidence
    assert found.next_step and found.command


def test_on_a_processor_a_layer_of_unknown_bytes_stays_untold_beside_others_that_are_judged() -> None:
    rows = (
        layer("matrix", 3.0, flops=0.2 * 0.2 * TERA * 3e-3, nbytes=1e5, name="a"),
        layer("matrix", 2.0, flops=0.5 * 0.2 * TERA * 2e-3, nbytes=1e5, name="b"),
        layer("element-wise", 4.9, name="c"),
    )
    found = on_cpu(split=TimeBreakdown(wall_ms=10.0, compute_ms=9.9), layers=profile(*rows, clock="host"), flops=10**7)
    assert found.bound == "unknown"


def test_a_type_that_is_hardly_faster_is_not_offered() -> None:
    hardly = {
        name: (value * 0.6, unit) if name in ("fp8_matrix", "int8_matrix") else (value, unit)
        for name, (value, unit) in GPU.items()
    }
    assert "FP8" not in _matrix_at(0.8, peaks=limits(hardly)).summary


def test_the_sentence_gives_the_rate_beside_the_ceiling() -> None:
    found = judged(**PLANTED["element-wise layers at 70 % of the copy rate"][1])
    assert "70 % of the time goes to element-wise layers that move 2.80 of the 4.00 TB/s" in found.summary
    assert found.confidence == "estimated"  # bytes are counted, not measured


def test_fp16_is_offered_where_it_halves_the_bytes_and_not_where_they_are_halves_already() -> None:
    facts = PLANTED["element-wise layers at 70 % of the copy rate"][1]
    assert "FP16 halves the bytes" in judged(**facts | {"precision": "fp32"}).summary
    assert "--precision fp16" in str(judged(**facts | {"precision": "fp32"}).command)
    assert "FP16" not in judged(**facts).summary


# ------------------------------------------------------------------------------------------------ boundaries


def _matrix_at(share: float, memory: float = 0.01, **facts: Any) -> Bottleneck:
    """10 ms of one matrix layer at these shares of the two peaks."""
    row = layer("matrix", 9.8, flops=share * 800 * TERA * 9.8e-3, nbytes=memory * 4 * TB * 9.8e-3)
    return judged(
        split=TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9), kernels=(kernel("matrix", 9.8, 60),),
        layers=profile(row), **facts,
    )  # fmt: skip


def test_against_a_data_sheet_limits_begin_lower_for_nothing_reaches_its_rates() -> None:
    sheet = limits(source="datasheet")
    assert _matrix_at(roofline.NEAR_COMPUTE * roofline.DATASHEET_SHARE + 1e-6, peaks=sheet).bound == "compute"
    assert _matrix_at(roofline.NEAR_COMPUTE * roofline.DATASHEET_SHARE - 1e-6, peaks=sheet).bound == "unknown"


def test_a_vit_measured_on_an_h200_is_compute_bound_with_much_left_to_better_kernels() -> None:
    """Figures of benchmarks/results/gpu-profile-h200.jsonl: ViT-B/16 in FP16, batch 64, ONNX Runtime; 2.25 TFLOP."""
    facts: dict[str, Any] = {
        "split": TimeBreakdown(
            wall_ms=10.78, compute_ms=10.76, busy_ms=10.27, idle_ms=0.62, launch_ms=1.55, kernels=282, gpu_ms=10.76
        ),
        "kernels": (
            kernel("matrix", 5.96, 98), kernel("element-wise", 2.11, 96), kernel("normalisation", 1.55, 37),
            kernel("reformat", 0.59, 49), kernel("copy", 0.04, 2),
        ),
        "flops": int(2.25e12), "batch": 64,
    }  # fmt: skip
    for peaks in (
        limits(),
        limits({name: value for name, value in GPU.items() if name != "launch"}, source="datasheet"),
    ):
        found = judged(**facts, peaks=peaks)
        assert found.bound == "compute"
        assert "55 % of the time goes to matrix kernels at 378 of the 800 TFLOP/s " in found.summary
        promised = peaks.peaks[0].source == "datasheet"
        assert ("its data sheet promises in FP16; FP8 is promised at" in found.summary) is promised
        assert (
            "this device multiplies in FP16; FP8 multiplies 1.8 times as fast here" in found.summary
        ) is not promised
        assert ("memory-bound", "40 % of the time") in found.evidence


def test_bytes_from_a_cache_do_not_hide_that_arithmetic_is_the_limit() -> None:
    found = _matrix_at(0.6, 1.6)
    assert found.bound == "compute", found.summary
    assert _matrix_at(roofline.NEAR_COMPUTE + 1e-6, roofline.ABOVE_MEMORY_PEAK + 1e-6).bound == "compute"
    assert _matrix_at(roofline.NEAR_COMPUTE + 1e-6, roofline.ABOVE_MEMORY_PEAK - 1e-6).bound == "bandwidth"


def test_kernels_side_by_side_and_copies_beside_them_leave_the_idling_that_is_there() -> None:
    # two kernels of 5 ms at once, then 4 ms of copy, every 10 ms
    found = judged(
        split=_captured_split((0, 5), (0, 5), copied=(5, 9), wall_ms=10.0), kernels=(kernel("matrix", 10.0, 2),)
    )
    told = dict(found.evidence)
    assert told["kernels"] == "5.00 ms (50 %)"
    assert told["copies"] == "4.00 ms (40 %)"
    assert told["idle"] == "10 %"


def test_what_is_copied_is_not_counted_as_kernels_as_well() -> None:
    found = judged(split=_captured_split(copied=(0, 5), wall_ms=10.0))
    told = dict(found.evidence)
    assert told["copies"] == "5.00 ms (50 %)"
    assert told["kernels"] == "0 ms (0 %)"
    assert told["idle"] == "50 %"


def _captured_split(*kernels_ms: tuple[int, int], copied: tuple[int, int], wall_ms: float) -> TimeBreakdown:
    """Of one inference with these kernels, each on a stream of its own, and one copy back."""
    items = [
        Activity("kernel", "k", start * 10**6, end * 10**6, stream=number)
        for number, (start, end) in enumerate(kernels_ms)
    ]
    items.append(Activity("copy", "Device-to-Host", copied[0] * 10**6, copied[1] * 10**6))
    return time_breakdown(Capture(tuple(items), None, ((0, 10**7),), "s"), wall_ms=wall_ms)


def test_a_gap_of_a_few_launches_is_the_price_of_launching_and_a_longer_one_is_other_work() -> None:
    def waiting(gap_us: float) -> Bottleneck:
        wall = 0.3 + 100 * gap_us / 1e3
        split = TimeBreakdown(wall_ms=wall, busy_ms=0.3, kernels=100, gpu_ms=wall)
        return judged(split=split, kernels=(kernel("matrix", 0.3, 100),))

    assert waiting(2.5 * roofline.MAX_LAUNCH_GAPS - 0.1).bound == "launch"
    assert waiting(2.5 * roofline.MAX_LAUNCH_GAPS + 0.1).bound == "host"


def test_work_faster_than_its_ceiling_shows_that_the_ceiling_is_wrong_and_judges_nothing() -> None:
    assert _matrix_at(roofline.ABOVE_PEAK - 0.01).bound == "compute"
    found = _matrix_at(roofline.ABOVE_PEAK + 0.01)
    assert (found.bound, found.confidence) == ("unknown", "none")
    assert "1.2 times the measured FP16 peak of this device" in found.summary
    assert found.command == "trt-engine doctor --peaks --remeasure --device cuda:0"


# ------------------------------------------------------------------------------------------------ missing facts


def test_without_ceilings_the_command_that_measures_them_is_named() -> None:
    for device, name in (("cuda:1", "device"), ("cpu", "processor")):
        found = judged(
            peaks=None, device=device, flops=10**12, nbytes=10**9,
            split=TimeBreakdown(wall_ms=10.0, compute_ms=9.9, gpu_ms=None if device == "cpu" else 9.9),
        )  # fmt: skip
        assert (found.bound, found.confidence) == ("unknown", "none")
        assert f"its distance from the peak of this {name} is unknown: no peak was measured here" in found.summary
        assert found.command == f"trt-engine profile model.engine --device {device} --batch 8 --peaks"


def test_an_idle_device_without_ceilings_waits_for_the_host_and_the_price_of_launches_is_named_as_missing() -> None:
    split = TimeBreakdown(wall_ms=2.0, busy_ms=0.2, kernels=400)
    found = judged(split=split, peaks=None, kernels=(kernel("matrix", 0.2, 400),))
    assert found.bound == "host"
    assert "the launch cost of 400 kernels is unknown" in found.summary
    assert "--peaks" in str(found.command)


def test_a_precision_without_a_rate_is_named_with_the_reason_it_was_skipped() -> None:
    gone = dataclasses.replace(without("fp8_matrix"), skipped=("fp8_matrix: this GPU has no FP8",))
    found = _matrix_at(0.3, precision="fp8", peaks=gone)
    found = judged(
        split=TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9), kernels=(kernel("matrix", 9.8, 60),),
        precision="fp8", peaks=gone, flops=10**12,
    )  # fmt: skip
    assert found.bound == "unknown"
    assert "no rate of FP8 products was measured here (fp8_matrix: this GPU has no FP8)" in found.summary


def test_what_a_busy_machine_measured_is_said_beside_the_figures() -> None:
    noted = limits(notes=("other processes had 60 % of this machine's processors",))
    assert ("peaks", noted.notes[0]) in _matrix_at(0.8, peaks=noted).evidence


def test_a_faster_type_is_offered_only_where_this_device_multiplies_faster_in_it() -> None:
    assert "FP8 multiplies 1.8 times as fast here" in _matrix_at(0.8).summary
    slow = without("fp8_matrix", "int8_matrix")
    assert "only fewer operations help" in _matrix_at(0.8, peaks=slow).summary


def test_layers_of_another_type_are_held_against_the_rate_of_that_type() -> None:
    rows = (
        layer("matrix", 6.0, flops=0.6 * 1400 * TERA * 6e-3, nbytes=1e6, name="a", precision="fp8"),
        layer("matrix", 3.8, flops=0.6 * 800 * TERA * 3.8e-3, nbytes=1e6, name="b", precision="fp16"),
    )
    split = TimeBreakdown(wall_ms=10.0, busy_ms=9.8, kernels=60, gpu_ms=9.9)
    found = judged(split=split, kernels=(kernel("matrix", 9.8, 60),), layers=profile(*rows), precision="fp8")
    assert (
        "98 % of the time goes to matrix layers at 840 of the 1400 TFLOP/s this device multiplies in FP8"
        in found.summary
    )


def test_idling_is_said_beside_another_verdict() -> None:
    row = layer("matrix", 6.0, flops=0.8 * 800 * TERA * 6e-3, nbytes=1e6)
    split = TimeBreakdown(wall_ms=10.0, busy_ms=6.0, kernels=60, gpu_ms=9.9)
    found = judged(split=split, kernels=(kernel("matrix", 6.0, 60),), layers=profile(row))
    assert found.bound == "compute"
    assert "40 % of the time is idle" in found.summary


# ------------------------------------------------------------------------------------------------ properties

times = st.floats(0.001, 50.0)
shares = st.floats(0.0, 1.1)
categories = st.sampled_from(["matrix", "attention", "element-wise", "normalisation", "copy", "reformat", "other"])


@st.composite
def situations(draw: Any) -> dict[str, Any]:
    """Facts that fit together: kernels, their layers' work, a wall that holds them."""
    peaks = draw(
        st.sampled_from([limits(), limits(source="datasheet"), without("launch"), without("memory_copy"), None])
    )
    rows, kernels = [], []
    for index in range(draw(st.integers(0, 4))):
        category, ms, count = draw(categories), draw(times), draw(st.integers(1, 300))
        known = draw(st.booleans())
        kernels.append(kernel(category, ms, count, f"k{index}"))
        rows.append(
            layer(
                category, ms, name=f"l{index}",
                flops=draw(shares) * 800 * TERA * ms / 1e3 if known else None,
                nbytes=draw(shares) * 4 * TB * ms / 1e3 if known else None,
            )
        )  # fmt: skip
    working = sum(row.mean_ms for row in rows) or draw(times)
    h2d, idle = draw(st.one_of(st.none(), times)), draw(st.floats(0.0, 50.0))
    window = working + draw(st.floats(0.0, 1.0)) * idle
    split = TimeBreakdown(
        wall_ms=working + idle + (h2d or 0.0),
        h2d_ms=h2d,
        gpu_ms=draw(st.sampled_from([None, window])),
        busy_ms=working + (h2d or 0.0) if kernels else None,
        kernels=sum(row.per_inference for row in kernels) if kernels else None,
        launch_ms=draw(st.one_of(st.none(), st.floats(0.0, 20.0))),
    )
    return {
        "split": split,
        "kernels": tuple(kernels),
        "layers": profile(*rows, clock=draw(st.sampled_from(["device", "launch"])))
        if rows and draw(st.booleans())
        else None,
        "peaks": peaks,
        "flops": draw(st.one_of(st.none(), st.integers(0, 10**14))),
        "nbytes": draw(st.one_of(st.none(), st.integers(0, 10**12))),
        "precision": draw(st.sampled_from(["fp32", "fp16", "int8", "fp8", "nvfp4", ""])),
        "device": draw(st.sampled_from(["cuda:0", "cuda:3", "cpu", "fake:0"])),
        "batch": draw(st.integers(1, 512)),
        "engine": draw(st.sampled_from(["model.engine", "my model's.onnx", "-odd.engine"])),
        "model": draw(st.sampled_from(["MODEL.onnx", "my model's.onnx", "-odd.onnx"])),
        "settings": draw(st.sampled_from([{}, {"intra_op_threads": "1"}, {"tactic": "a b"}])),
        "max_batch": draw(st.sampled_from([None, 1, 10**6])),
        "fixed_batch": draw(st.booleans()),
    }


@settings(deadline=None)
@given(situations())
def test_whatever_the_facts_there_is_a_verdict_with_a_command_that_the_command_line_takes(
    facts: dict[str, Any],
) -> None:
    found = judged(**facts)
    assert found.summary and found.next_step
    assert "nan" not in found.summary.lower() and "inf " not in found.summary
    parses(str(found.command))


TINY = "a CPU that runs a thousand nodes of nothing"
CACHES = "a CPU whose element-wise layers are faster than its memory: they work from the cache"


def test_bytes_that_move_faster_than_memory_are_said_to_come_from_caches() -> None:
    found = judged(**PLANTED[CACHES][1])
    assert "300 % of what this processor moves from memory" in found.summary
    assert "their bytes come from caches" in found.summary
    assert "caches" not in judged(**PLANTED["matrix layers at a fifth of either limit"][1]).summary


def test_the_next_command_keeps_the_settings_the_engine_was_profiled_with() -> None:
    given_ = {"intra_op_threads": "2", "graph_optimization": "basic x"}
    found = judged(**PLANTED[TINY][1], settings=given_)
    assert shlex.split(str(found.command))[-4:] == ["-O", "intra_op_threads=2", "-O", "graph_optimization=basic x"]
    compute = judged(**PLANTED["a CPU at 80 % of what it multiplies"][1], settings=given_)
    assert "MODEL.onnx" in str(compute.command) and "-O" not in str(compute.command), "another engine, other settings"


@pytest.mark.parametrize(
    ("given_", "suggested"), [({}, "1"), ({"intra_op_threads": "2"}, "1"), ({"intra_op_threads": "1"}, "0")]
)
def test_another_number_of_threads_is_suggested_than_the_one_that_ran(given_: dict[str, str], suggested: str) -> None:
    command = str(judged(**PLANTED[CACHES][1], settings=given_).command)
    assert command.count("intra_op_threads") == 1
    assert command.endswith(f"-O intra_op_threads={suggested}")
    parses(command)


# ------------------------------------------------------------------------------------------------ commands


def parses(line: str) -> None:
    """The command line as the tool itself reads it: a verb of its own, options it has."""
    words = shlex.split(line)
    assert words[0] == "trt-engine" and words[1] in VERBS, line
    command: click.Command = importlib.import_module(command_module(words[1])).command
    command.make_context(words[1], words[2:])


def faster(times: float, *, ms: float = 5.0) -> LayerProfile:
    """A convolution that calculates so many times as fast as the FP16 peak of `GPU`, beside one far below it."""
    peak = GPU["fp16_matrix"][0] * 1e12
    return profile(
        layer("matrix", ms, flops=times * peak * ms / 1e3, nbytes=1e6, name="conv7"),
        layer("matrix", 5.0, flops=0.1 * peak * 5e-3, nbytes=1e6, name="conv8"),
    )


def test_a_layer_faster_than_the_measured_peak_proves_that_peak_wrong() -> None:
    def above(layers: LayerProfile, peaks: DevicePeaks | None = None) -> str | None:
        return roofline.describe_above_peak(layers, (), peaks or limits(), "fp16", "cuda:0")

    assert above(faster(2.9)) == "conv7 computes at 290 % of the measured peak"
    assert above(faster(0.99)) is None
    assert above(faster(2.9, ms=0.01)) is None, "too short to prove anything"
    assert above(faster(2.9), limits(source="datasheet")) is None, "a promise is not measured again"
    moved = profile(layer("copy", 5.0, nbytes=1e15, name="copy1"))
    assert above(moved) is None, "bytes in a cache move faster than memory"


def test_where_a_layer_is_still_faster_than_the_peak_the_next_step_measures_the_peaks_and_not_the_same_again() -> None:
    found = judged(layers=faster(2.9), split=TimeBreakdown(wall_ms=10.2, busy_ms=10.0, gpu_ms=10.0))
    assert found.command == "trt-engine doctor --peaks --remeasure --device cuda:0"
    assert "conv7 computes at 290 % of the measured peak" in found.next_step and found.confidence == "none"
    below = judged(layers=faster(0.9), split=TimeBreakdown(wall_ms=10.2, busy_ms=10.0, gpu_ms=10.0))
    assert "--remeasure" not in (below.command or "")


def test_without_peaks_the_slowest_layer_leads() -> None:
    found = judged(layers=faster(0.5, ms=6.0), peaks=None, split=TimeBreakdown(wall_ms=11.2, busy_ms=11.0, gpu_ms=11.0))
    assert found.summary.startswith("the slowest layer is `conv7` (matrix): 6")
    assert "--peaks" in (found.command or "")


def test_without_kernels_a_low_rate_of_the_whole_is_not_taken_for_slow_kernels() -> None:
    found = judged(split=TimeBreakdown(wall_ms=10.0, gpu_ms=9.9), flops=int(0.1 * 800 * TERA * 9.9e-3), nbytes=10**6)
    assert found.bound == "unknown"
    assert "the kernels' part of it is unknown" in found.summary
    assert "--profiler cupti" in str(found.command)

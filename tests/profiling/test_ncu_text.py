"""What `ncu` prints, of any version: exact figures, and an error that says what is wrong with the rest."""

from __future__ import annotations

import pytest
from nsight_samples import sample

from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.profiling.instruments.ncu import KernelLaunch, base_name, kernel_counters, parse_output

H200, H200_DETAILS = "ncu-raw-2025.3.1-h200.csv", "ncu-details-2025.3.1-h200.csv"
SHAPE, REFUSED = "ncu-raw-shape.csv", "ncu-err-nvgpuctrperm.txt"

DURATION = "gpu__time_duration.sum"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"


# ------------------------------------------------------------------------------------------------ exact figures


def test_a_whole_raw_page_of_an_h200_is_read_to_the_last_figure() -> None:
    launches = parse_output(sample(H200))
    assert [base_name(item.kernel) for item in launches] == ["axpy", "axpy", "sgemm", "sgemm"]
    assert [item.metrics[DURATION] for item in launches] == [8224, 6656, 348064, 94912]
    assert [item.metrics[COMPUTE] for item in launches] == [6.65, 7.4, 73.97, 68.02]
    assert [item.metrics[MEMORY] for item in launches] == [51.23, 26.43, 74.05, 68.03]
    first = launches[0]
    assert len(first.metrics) == 549 and first.metrics["launch__registers_per_thread"] == 32
    assert first.metrics["dram__cycles_elapsed.avg.per_second"] == 3177042801.56
    assert first.units["dram__cycles_elapsed.avg.per_second"] == "hz" and first.units[DURATION] == "ns"


def test_counters_of_an_h200_are_found_under_the_names_a_capture_has() -> None:
    wide = "void (anonymous namespace)::axpy<float, 1>(float, float const*, float*, int)"
    narrow = "void (anonymous namespace)::axpy<float, 4>(float, float const*, float*, int)"
    gemm = "sgemm(int, float const*, float const*, float*)"
    found = kernel_counters(parse_output(sample(H200)), [gemm, wide, narrow])
    assert [(item.kernel, item.launches, item.duration_us) for item in found] == [
        (gemm, 2, (348.064 + 94.912) / 2), (wide, 1, 6.656), (narrow, 1, 8.224),
    ]  # fmt: skip
    assert found[0].compute_pct == pytest.approx((73.97 * 348064 + 68.02 * 94912) / (348064 + 94912))
    assert (found[2].memory_pct, found[2].dram_pct, found[2].occupancy_pct) == (51.23, 21.36, 21.18)


def test_a_raw_page_with_separators_is_read_by_its_units() -> None:
    first, second = parse_output(sample(SHAPE))
    assert first.kernel == "void <unnamed>::w13_kernel<4, 1>(const __half *, const int *)"
    assert first.metrics == {"dram__bytes_read.sum": 5156128, "dram__bytes_write.sum": 5760, DURATION: 28448}
    assert second.metrics == {"dram__bytes_read.sum": 2591712, "dram__bytes_write.sum": 0, DURATION: 13312}


# ------------------------------------------------------------------------------------------------ other versions

HEADER = '"ID","Process ID","Process Name","Host Name","Kernel Name"'


@pytest.mark.parametrize(
    ("unit", "value", "base", "wanted"),
    [
        ("usecond", "12.50", "ns", 12500), ("msecond", "1.50", "ns", 1.5e6), ("us", "3.20", "ns", 3200),
        ("Kbyte", "32.77", "byte", 32770), ("Mbyte/second", "1.50", "byte/s", 1.5e6), ("Gbyte/s", "2.00", "byte/s", 2e9),
        ("cycle/nsecond", "1.25", "hz", 1.25e9), ("Ghz", "1.98", "hz", 1.98e9), ("%", "65.70", "%", 65.7),
        ("Kbyte/block", "1.02", "byte/block", 1020), ("register/thread", "32", "register/thread", 32), ("", "n/a", "", None),
    ],
)  # fmt: skip
def test_values_come_in_base_units(unit: str, value: str, base: str, wanted: float | None) -> None:
    (found,) = parse_output(f'{HEADER},"m"\n"","","","","","{unit}"\n"0","1","a","b","f","{value}"\n')
    assert found.metrics.get("m") == (None if wanted is None else pytest.approx(wanted))
    assert wanted is None or found.units["m"] == base


def test_advice_over_several_lines_and_lines_of_others_in_between_are_read() -> None:
    rules = '"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"'
    text = (
        f'==PROF== Connected to process 1\nhello, "world"\n{HEADER},{rules}\n'
        '"0","1","a","b","f","S","Duration","ns","10",\n==PROF== Disconnected from process 1\n'
        '"0","1","a","b","f","S","","","","R","OPT","first line\n  and the ""second"", of it"\nbye\n'
    )
    (found,) = parse_output(text)
    assert found.advice == ('first line and the "second", of it',) and found.metrics == {DURATION: 10}


@pytest.mark.parametrize(
    ("kernel", "base"),
    [
        ("ampere_fp16_s1688gemm_fp16_64x128", "ampere_fp16_s1688gemm_fp16_64x128"),
        ("void <unnamed>::axpy<float, 4>(T1, const T1 *, T1 *, int)", "axpy"),
        ("void at::native::(anonymous namespace)::f<(bool)1, std::array<char*, 3ul> >(int, at::X<(int)3>)", "f"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16>(typename T::Params)", "Kernel2"),
        ("f(void (*)(int), int) [clone .kd]", "f"),
        ("void g<h(int)::{lambda(int)#1}>(int)", "g"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
    ],
)  # fmt: skip
def test_the_base_of_a_name_is_its_function(kernel: str, base: str) -> None:
    assert base_name(kernel) == base


def test_of_instances_of_one_template_the_one_asked_for_is_taken() -> None:
    launches = [
        KernelLaunch(f"void k<{kind}, (int){width}>({kind} *)", {DURATION: width})
        for kind, width in (("float", 4), ("__half", 4), ("float", 8))
    ]
    wanted = ["void k<float, 8>(float*)", "void k<__half, 4>(__half*)", "void k<float, 4>(float*)", "other"]
    assert [item.metrics[DURATION] for item in kernel_counters(launches, wanted)] == [8, 4, 4]
    assert [item.kernel for item in kernel_counters(launches, wanted)] == wanted[:3]


# ------------------------------------------------------------------------------------------------ damaged


@pytest.mark.parametrize("name", [H200_DETAILS, SHAPE])
def test_a_text_cut_anywhere_never_gives_a_figure_of_its_own(name: str) -> None:
    text = sample(name)
    whole = [item.metrics for item in parse_output(text)]
    for count in range(0, len(text), 3):
        try:
            found = parse_output(text[:count])
        except ProfilerUnavailable:
            continue
        for item, complete in zip(found, whole, strict=False):
            assert item.metrics.items() <= complete.items(), text[count - 80 : count]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the output of ncu is empty"),
        ("\n\n", "the output of ncu is empty"),
        ("\x00\x01 garbage", "no table of ncu was found; the text begins with"),
        (f'{HEADER},"m"\n', "has a header and no launches"),
        (f'{HEADER},"m"\n"","","","","","ns"\n', "has a header and no launches"),
        (f'{HEADER},"m"\n"0","1"\n', "line 2 has 2 values, the header 6"),
        (f'{HEADER},"m"\n"0","1","a","b","f","12', "is cut: line 2 ends inside a value"),
        (
            "==PROF== Connected\n==ERROR== Unknown error on device 0.\n",
            "ncu measured nothing: Unknown error on device 0.",
        ),
        ("==WARNING== No kernels were profiled.\n", "ncu measured nothing: No kernels were profiled"),
    ],
)
def test_what_is_no_table_is_refused_with_what_was_found_and_how_to_get_one(text: str, reason: str) -> None:
    with pytest.raises(ProfilerUnavailable) as refused:
        parse_output(text)
    assert reason in refused.value.message and "--page raw" in (refused.value.hint or "")


def test_a_refused_permission_is_told_with_its_three_fixes() -> None:
    with pytest.raises(ProfilerUnavailable, match="ERR_NVGPUCTRPERM") as refused:
        parse_output(sample(REFUSED))
    fix = refused.value.hint or ""
    assert all(text in fix for text in ("sudo", "--cap-add=SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0"))

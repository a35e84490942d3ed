"""What `nsys stats` prints, of any version and locale: exact figures, and an error that says what is wrong with the rest."""

from __future__ import annotations

import pytest
from nsight_samples import sample

from trt_engine.profiling.capture import ProfilerUnavailable
from trt_engine.profiling.nsys import StatsTable, activities_of, read_stats

KERNELS, CALLS, CONSOLE = (
    "nsys-cuda_gpu_kern_sum-2024.6.2.csv", "nsys-cuda_api_sum-2024.6.2.csv", "nsys-stats-console-2023.1.2.txt",
)  # fmt: skip


def by_report(text: str) -> dict[str, StatsTable]:
    return {table.report: table for table in read_stats(text)}


# ------------------------------------------------------------------------------------------------ exact figures


def test_the_kernel_summary_of_2024_is_read_to_the_last_figure() -> None:
    (table,) = read_stats(sample(KERNELS))
    assert table.report == "cuda_gpu_kern_sum" and len(table.rows) == 15
    assert table.columns[1:3] == ("Total Time (ns)", "Instances")
    assert table.rows[2] == {
        "Time (%)": 16.2, "Total Time (ns)": 32179988, "Instances": 128, "Avg (ns)": 251406.2, "Med (ns)": 249467.5,
        "Min (ns)": 113790, "Max (ns)": 390073, "StdDev (ns)": 135318.3,
        "Name": "ampere_fp16_s1688gemm_fp16_64x128_sliced1x2_ldg8_f2f_tn",
    }  # fmt: skip
    assert sum(int(row["Total Time (ns)"] or 0) for row in table.rows) == 198511027
    assert sum(int(row["Instances"] or 0) for row in table.rows) == 679


def test_the_call_summary_of_2024_is_read_to_the_last_figure() -> None:
    (table,) = read_stats(sample(CALLS))
    assert len(table.rows) == 11 and table.rows[0]["Num Calls"] == 293
    assert sum(int(row["Total Time (ns)"] or 0) for row in table.rows) == 2176478030
    assert table.rows[-1]["Name"] == "cuCtxSynchronize" and table.rows[-1]["StdDev (ns)"] == 0.0


def test_a_console_of_2023_is_read_report_by_report_and_skipped_ones_are_empty() -> None:
    found = by_report(sample(CONSOLE))
    assert list(found) == [
        "nvtx_sum", "osrt_sum", "cuda_api_sum", "cuda_gpu_kern_sum", "cuda_gpu_mem_time_sum", "cuda_gpu_mem_size_sum",
        "openmp_sum", "opengl_khr_range_sum", "opengl_khr_gpu_range_sum", "vulkan_marker_sum", "um_sum", "openacc_sum",
    ]  # fmt: skip
    assert found["nvtx_sum"].rows == () and found["nvtx_sum"].skipped == (
        "does not contain NV Tools Extension (NVTX) data."
    )
    assert len(found["osrt_sum"].rows) == 24 and found["osrt_sum"].rows[20]["Avg (ns)"] == 79.2
    assert found["cuda_gpu_kern_sum"].rows == (
        {"Time (%)": 98.6, "Total Time (ns)": 24472143, "Instances": 1, "Avg (ns)": 24472143.0, "Med (ns)": 24472143.0,
         "Min (ns)": 24472143, "Max (ns)": 24472143, "StdDev (ns)": 0.0,
         "Name": "mult_square_matrix(int *, int *, int *, int)"},
        {"Time (%)": 1.4, "Total Time (ns)": 347803, "Instances": 2, "Avg (ns)": 173901.5, "Med (ns)": 173901.5,
         "Min (ns)": 173694, "Max (ns)": 174109, "StdDev (ns)": 293.4, "Name": "stencil_2D(int *, int *)"},
    )  # fmt: skip
    assert [(row["Operation"], row["Total (MB)"], row["Count"]) for row in found["cuda_gpu_mem_size_sum"].rows] == [
        ("[CUDA memcpy HtoD]", 21.218, 5), ("[CUDA memcpy DtoH]", 12.731, 3),
    ]  # fmt: skip
    assert [row["Total Time (ns)"] for row in found["cuda_gpu_mem_time_sum"].rows] == [2097125, 1473453]


def test_sums_of_the_console_agree_with_their_own_averages() -> None:
    for table in read_stats(sample(CONSOLE)):
        for row in table.rows:
            count = row.get("Num Calls") or row.get("Instances") or row.get("Count")
            total, mean = row.get("Total Time (ns)"), row.get("Avg (ns)")
            if isinstance(total, int) and isinstance(mean, float) and isinstance(count, int):
                assert total == pytest.approx(mean * count, abs=0.05 * count + 0.5)


# ------------------------------------------------------------------------------------------------ other versions and locales

EUROPEAN = str.maketrans(".,", ",.")


def test_a_console_of_another_locale_has_the_same_figures() -> None:
    english = sample(CONSOLE)
    lines = [
        line.translate(EUROPEAN) if line.lstrip()[:1].isdigit() else line for line in english.splitlines()
    ]  # names of kernels have commas of their own: those lines begin with a number too
    wanted, found = read_stats(english), read_stats("\n".join(lines))
    for one, other in zip(wanted, found, strict=True):
        numbers = [
            {name: value for name, value in row.items() if name not in ("Name", "Operation")} for row in one.rows
        ]
        assert [{name: row[name] for name in numbers[0]} for row in other.rows] == numbers


@pytest.mark.parametrize("blank", ["\u00a0", "\u202f", "'", " "])
def test_thousands_parted_by_blanks_and_apostrophes_are_numbers(blank: str) -> None:
    text = sample(CONSOLE).replace(",", "\0")
    text = "".join(
        blank if letter == "\0" and text[at - 1].isdigit() and text[at + 1].isdigit() else letter.replace("\0", ",")
        for at, letter in enumerate(text)
    )
    assert by_report(text)["osrt_sum"].rows[0]["Total Time (ns)"] == 4706607597


def test_the_columns_of_2022_are_read_by_name() -> None:
    (table,) = read_stats(
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),GridXYZ,BlockXYZ,Name\n"
        '100.0,300,2,150.0,150.0,100,200,70.7,  64    1    1, 256    1    1,"void f<int, 2>(int, ""x"")"\n'
    )
    assert table.rows[0]["Name"] == 'void f<int, 2>(int, "x")' and table.rows[0]["Total Time (ns)"] == 300
    assert str(table.rows[0]["GridXYZ"]).split() == ["64", "1", "1"]


def test_reports_of_older_names_have_today_s() -> None:
    text = (
        "Processing [x.sqlite] with [/opt/nvidia/nsight-systems/2021.5.1/host-linux-x64/reports/gpukernsum.py]... \n\n"
        "Time(%),Total Time (ns),Instances,Average (ns),Minimum (ns),Maximum (ns),Name\n50.0,10,1,10,10,10,f\n"
    )
    assert by_report(text)["cuda_gpu_kern_sum"].rows[0]["Name"] == "f"


def test_units_of_another_timeunit_stay_in_the_header() -> None:
    (table,) = read_stats("Time (%)\tTotal Time (usec)\tInstances\tName\n100.0\t12.500\t1\tf(int, int)\n")
    assert table.rows[0] == {"Time (%)": 100.0, "Total Time (usec)": 12.5, "Instances": 1, "Name": "f(int, int)"}


def test_several_csv_reports_on_one_console_are_kept_apart() -> None:
    text = (
        "Generating SQLite file x.sqlite from x.nsys-rep\nProcessing [x.sqlite] with [/a/cuda_gpu_kern_sum.py]... \n"
        f"{sample(KERNELS)}\nProcessing [x.sqlite] with [/a/cuda_gpu_mem_time_sum.py]... \n"
        "SKIPPED: x.sqlite does not contain GPU memory data.\n\nProcessing [x.sqlite] with [/a/cuda_api_sum.py]... \n"
        f"{sample(CALLS)}"
    )
    assert {name: len(table.rows) for name, table in by_report(text).items()} == {
        "cuda_gpu_kern_sum": 15, "cuda_gpu_mem_time_sum": 0, "cuda_api_sum": 11,
    }  # fmt: skip


def test_a_trace_as_text_gives_activities() -> None:
    found = activities_of(
        read_stats(
            "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
            "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name\n"
            '2000,300,118,8,4,1,128,1,1,40,0.001,0.000,,,,,NVIDIA H200 (1),1,,7,"void f<1, 2>(int)"\n'
            "1000,500,117,,,,,,,,,,4.194,8388.0,Pageable,Device,NVIDIA H200 (1),1,,13,[CUDA memcpy Host-to-Device]\n"
            "3000,5,119,,,,,,,,,,0.001,1.0,Device,,NVIDIA H200 (1),1,,7,[CUDA memset]\n"
        )
    )
    assert [(item.kind, item.name, item.start_ns, item.end_ns) for item in found] == [
        ("copy", "Host-to-Device", 1000, 1500),
        ("kernel", "void f<1, 2>(int)", 2000, 2300),
        ("memset", "memset", 3000, 3005),
    ]
    copy, kernel, _ = found
    assert (copy.nbytes, copy.stream, copy.device) == (4194000, 13, 1)
    assert (kernel.grid, kernel.block, kernel.registers, kernel.shared_bytes) == ((8, 4, 1), (128, 1, 1), 40, 1000)
    assert kernel.correlation == 118


# ------------------------------------------------------------------------------------------------ damaged


@pytest.mark.parametrize("name", [KERNELS, CALLS, CONSOLE])
def test_a_text_cut_after_any_line_is_read_as_far_as_it_goes_or_refused_in_words(name: str) -> None:
    lines = sample(name).splitlines(keepends=True)
    whole = read_stats("".join(lines))
    rows = {row["Name"] if "Name" in row else row["Operation"] for table in whole for row in table.rows}
    for count in range(len(lines) + 1):
        try:
            found = read_stats("".join(lines[:count]))
        except ProfilerUnavailable as error:
            assert "nsys stats" in str(error)
        else:
            assert {row.get("Name") or row.get("Operation") for table in found for row in table.rows} <= rows


@pytest.mark.parametrize("name", [KERNELS, CONSOLE])
def test_a_text_cut_anywhere_never_gives_a_figure_of_its_own(name: str) -> None:
    text = sample(name)
    for count in range(0, len(text), 7):
        try:
            found = read_stats(text[:count])
        except ProfilerUnavailable:
            continue
        for table in found:
            for row in table.rows[:-1]:  # the last one may have lost the end of its name
                assert all(value is not None for value in row.values())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the text of `nsys stats` is empty"),
        ("\n \n", "the text of `nsys stats` is empty"),
        ("\x00\x01\xff garbage", "no table of `nsys stats` was found; the text begins with"),
        ("Time (%),Total Time (ns),Instances\n50.0,12\n", "line 2 has 2 fields, the header has 3: `50.0,12`"),
        (
            " ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):\n\n",
            "`cuda_gpu_kern_sum` is cut: it has a title and no rows",
        ),
        (" Time (%)  Name\n --------  ----\n     98.6\n", "line 3 has a row that does not fit the columns above it"),
    ],
)
def test_what_is_no_table_is_refused_with_what_was_found_and_how_to_get_one(text: str, reason: str) -> None:
    with pytest.raises(ProfilerUnavailable) as refused:
        read_stats(text)
    assert reason in refused.value.message and "nsys stats -r" in (refused.value.hint or "")

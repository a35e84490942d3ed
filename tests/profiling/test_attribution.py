"""Which layer a kernel belongs to: what was heard, what the host was at, or the order; and nothing where nothing tells."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from trt_engine.errors import EngineError
from trt_engine.profiling.attribution import attribute, onnxruntime_node_spans, transfer_attribution
from trt_engine.profiling.instruments.capture import Capture, HostSpan, Launch
from trt_engine.records.profile import Activity, Category, LayerProfile, LayerRow

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"


def row(name: str, category: Category = "other", mean_ms: float = 1.0, calls: float = 1) -> LayerRow:
    return LayerRow(name, "", category, mean_ms, mean_ms, 0.0, calls)


def profile(*rows: LayerRow) -> LayerProfile:
    return LayerProfile(rows, 1, "scripted")


def captured(
    names: list[str], inferences: int = 2, period: int = 1000, ranges: list[str | None] | None = None
) -> Capture:
    """Each inference launches the kernels one after the other, 10 ns each, and they run 100 ns later."""
    activities, launches = [], []
    for turn in range(inferences):
        for index, name in enumerate(names):
            at, number = 1 + turn * period + index * 10, 1 + turn * len(names) + index
            launches.append(Launch("cudaLaunchKernel", at, at + 5, number, 1))
            heard = ranges[index] if ranges else None
            activities.append(Activity("kernel", name, at + 100, at + 108, correlation=number, stream=7, range=heard))
    windows = tuple((1 + turn * period, turn * period + 900) for turn in range(inferences))
    return Capture(tuple(activities), 0, windows, "scripted", launches=tuple(launches))


def test_a_kernel_belongs_to_what_the_host_was_at_as_it_launched_it() -> None:
    spans = [HostSpan("Conv_0", 0, 8), HostSpan("body", 10, 30), HostSpan("MatMul_1", 20, 30)]
    found = attribute(captured(["a", "b", "c"], inferences=1), spans=spans)
    assert found.layers == {0: "Conv_0", 1: "body", 2: "MatMul_1"}  # the innermost
    assert (found.method, found.share, found.note) == ("host spans", 1.0, "")


def test_a_kernel_nobody_launched_in_a_span_has_no_layer_and_the_share_says_so() -> None:
    found = attribute(captured(["a", "b"], inferences=1), spans=[HostSpan("Conv_0", 0, 8)])
    assert found.layers == {0: "Conv_0"} and found.share == 0.5
    assert found.note == "1 of 2 kernels were launched where no host span was"


def test_ranges_that_are_heard_are_layers() -> None:
    found = attribute(captured(["a", "b"], ranges=["conv1", "fc"]))
    assert found.layers == {0: "conv1", 1: "fc", 2: "conv1", 3: "fc"} and found.method == "ranges"


def test_layers_that_run_one_kernel_each_pair_by_order() -> None:
    layers = profile(
        row("node_conv2d_myl0_1", "matrix"), row("shape", "control"), row("__myl_MaxrSubExpSum_myl5_4", "normalisation")
    )
    found = attribute(captured(["sm80_xmma_fprop", "__myl_MaxrSubExpSum_0x1f"]), layers=layers)
    assert found.method == "order" and found.share == 1.0
    assert found.layers == {
        0: "node_conv2d_myl0_1", 1: "__myl_MaxrSubExpSum_myl5_4", 2: "node_conv2d_myl0_1", 3: "__myl_MaxrSubExpSum_myl5_4"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "rows"),
    [
        (["gemm", "gemm"], [row("a", "matrix")]),  # more kernels than layers
        (["gemm"], [row("a", "matrix"), row("b", "matrix")]),  # fewer
        (["gemm", "softmax_warp"], [row("a", "normalisation"), row("b", "matrix")]),  # they do other things
        (["__myl_AddMul_0x1"], [row("__myl_MaxrSub_myl0_1", "element-wise")]),  # other operations in the names
        (["gemm"], [row("a", "matrix", calls=3.0)]),  # a loop
        ([], [row("a", "matrix")]),
    ],
)
def test_what_does_not_pair_is_not_guessed(kernels: list[str], rows: list[LayerRow]) -> None:
    found = attribute(captured(kernels), layers=profile(*rows))
    assert found.layers == {} and found.method == "" and found.share == 0.0 and found.note


# ------------------------------------------------------------------------------------------------ ONNX Runtime


def watched(tmp_path: Path, runs: int) -> tuple[Path, list[tuple[int, int]]]:
    """A real profile, and when the host began and ended the runs, by another clock."""
    import time

    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "p")
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(DIGITS), options, providers=["CPUExecutionProvider"])
    (spec,) = session.get_inputs()
    shape = [size if isinstance(size, int) else 2 for size in spec.shape]
    feeds, windows = {spec.name: np.zeros(shape, np.float32)}, []
    for _ in range(runs):
        start = time.perf_counter_ns()
        session.run(None, feeds)
        windows.append((start, time.perf_counter_ns()))
    return Path(session.end_profiling()), windows


def test_the_nodes_of_a_real_profile_come_to_lie_in_the_windows_of_the_capture(tmp_path: Path) -> None:
    path, windows = watched(tmp_path, 8)
    spans = onnxruntime_node_spans(path, windows[3:])
    nodes = sum(event["name"].endswith("_kernel_time") for event in json.loads(path.read_text()))
    assert len(spans) == nodes and nodes >= 8
    last = spans[-(nodes // 8) :]
    slack = 100_000  # the profile cuts its times to microseconds, and Python's call is around the run
    assert all(windows[-1][0] - slack <= span.start_ns <= span.end_ns <= windows[-1][1] + slack for span in last)


def test_clocks_that_differ_by_some_microseconds_are_brought_together_by_what_was_launched() -> None:
    # nodes of 8 microseconds with 4 between them, each launching 2 microseconds after its start; runs 20 off their windows
    events: list[dict[str, object]] = []
    for turn in range(3):
        begin = 1_000_000 + turn * 1000
        events.append({"name": "model_run", "cat": "Session", "ts": begin, "dur": 120})
        events += [
            {"name": f"n{index}_kernel_time", "cat": "Node", "ts": begin + 5 + index * 12, "dur": 8}
            for index in range(9)
        ]
    ahead = 77_000_000_000
    windows = tuple((ahead + turn * 1_000_000 - 60_000, ahead + turn * 1_000_000 + 141_000) for turn in range(3))
    launches = tuple(
        Launch(
            "cudaLaunchKernel", at := ahead + turn * 1_000_000 + 7_000 + index * 12_000, at + 500, 1 + turn * 9 + index
        )
        for turn in range(3)
        for index in range(9)
    )
    activities = tuple(
        Activity("kernel", f"k{call.correlation}", call.end_ns, call.end_ns + 9, correlation=call.correlation)
        for call in launches
    )
    capture = Capture(activities, 0, windows, "scripted", launches=launches)
    found = attribute(capture, spans=onnxruntime_node_spans(events, windows, launches))
    assert found.layers == {index: f"n{index % 9}" for index in range(27)}


def test_one_window_that_was_held_up_does_not_cost_the_others_their_names() -> None:
    events: list[dict[str, object]] = []
    for turn in range(4):
        events.append({"name": "model_run", "cat": "Session", "ts": turn * 1000, "dur": 100})
        events.append({"name": "n_kernel_time", "cat": "Node", "ts": turn * 1000 + 10, "dur": 50})
    windows = [(turn * 1_000_000 + 7_000_000 - 5_000, turn * 1_000_000 + 7_000_000 + 106_000) for turn in range(4)]
    windows[2] = (windows[2][0], windows[2][1] + 800_000)  # the host was held up after the run
    found = onnxruntime_node_spans(events, windows)
    assert [round((span.start_ns - 7_010_000) / 1e6, 2) for span in found] == [0, 1, 2, 3]


def test_a_profile_whose_runs_do_not_lie_on_the_windows_names_nothing(tmp_path: Path) -> None:
    path, windows = watched(tmp_path, 4)
    hour = 3_600_000_000_000  # no run is held up so long
    crooked = [(start + index * hour, end + index * hour) for index, (start, end) in enumerate(windows)]
    assert onnxruntime_node_spans(path, crooked) == ()
    assert onnxruntime_node_spans(path, windows * 2) == () and onnxruntime_node_spans(path, []) == ()


@pytest.mark.parametrize("text", ["", "[{", '{"traceEvents": []}'])
def test_a_file_that_is_no_profile_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(EngineError, match="not an ONNX Runtime profile"):
        onnxruntime_node_spans(path, [(0, 1)])
    with pytest.raises(EngineError, match="not an ONNX Runtime profile"):
        onnxruntime_node_spans(tmp_path / "not there.json", [(0, 1)])


# ------------------------------------------------------------------------------------------------ from run to run


def test_layers_found_while_watching_closely_name_the_kernels_of_an_undisturbed_capture() -> None:
    slow, fast = captured(["a", "b", "a"], period=5000), captured(["a", "b", "a"], inferences=3, period=700)
    found = attribute(slow, spans=[HostSpan("x", 0, 12), HostSpan("y", 20, 30), HostSpan("x", 5000, 5012),
                                   HostSpan("y", 5020, 5030)])  # fmt: skip
    carried = transfer_attribution(slow, found, fast)
    assert carried.layers == {turn * 3 + index: name for turn in range(3) for index, name in enumerate("xxy")}
    assert carried.method == "host spans" and carried.share == 1.0


def test_other_kernels_take_no_layers_over() -> None:
    known = captured(["a", "b"])
    found = attribute(known, spans=[HostSpan("x", 0, 5000)])
    assert found.share == 1.0
    other = transfer_attribution(known, found, captured(["b", "a"]))
    assert other.layers == {} and "same kernels" in other.note
    nsys = captured(["a", "void <unnamed>::b<4>(const int *)"])
    assert (
        transfer_attribution(captured(["a", "void (anonymous namespace)::b<4>(int const*)"]), found, nsys).share == 1.0
    )
    partly = dataclasses.replace(found, layers={0: "x", 1: "y", 3: "z"})  # the second inference says otherwise of `b`
    assert transfer_attribution(known, partly, known).layers == {0: "x", 2: "x"}
    uneven = dataclasses.replace(known, activities=known.activities[:-1])
    assert transfer_attribution(uneven, found, captured(["a", "b"])).layers == {}
    assert transfer_attribution(known, attribute(known), known).layers == {}

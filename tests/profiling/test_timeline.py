"""The timeline opens in Perfetto: valid JSON, slices that nest on their tracks, arrows from launch to kernel."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trt_engine.profiling.instruments.capture import Launch
from trt_engine.profiling.timeline import write_timeline
from trt_engine.records.profile import Activity, LayerProfile, LayerRow

AT = 1_795_314_347_208_977_982
"""A clock that counts from 1970, as CUPTI's does."""


def read(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    return document["traceEvents"]  # type: ignore[no-any-return]


def keep_the_rules(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """What every timeline of ours holds; the slices by track."""
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    tracks = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXsf" and isinstance(event["name"], str)
        assert event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            assert (event["pid"], event["tid"]) in threads
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        open_: list[float] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1], "a slice reaches out of the one it lies in"
            open_.append(end)
    for phase in "sf":
        for event in events:
            if event["ph"] == phase:
                inside = [
                    item
                    for item in tracks[event["pid"], event["tid"]]
                    if item["ts"] <= event["ts"] <= item["ts"] + item["dur"] + 1e-6
                ]
                assert inside, "an arrow that begins or ends nowhere"
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and all(starts[key] <= ends[key] for key in starts)
    return tracks


def kernel(name: str, start: int, end: int, **more: Any) -> Activity:
    return Activity("kernel", name, AT + start, AT + end, **more)


def test_devices_streams_launches_and_inferences_have_tracks_of_their_own(tmp_path: Path) -> None:
    activities = (
        Activity("copy", "Host-to-Device", AT + 50, AT + 150, stream=7, nbytes=4000, correlation=1),
        kernel("void ns::gemm<int>(int)", 200, 1200, stream=7, correlation=2, grid=(4, 1, 1), range="conv1"),
        kernel("softmax_warp", 300, 800, stream=8, correlation=3),
        kernel("gemm", 300, 900, device=1, stream=7, correlation=4),
    )
    calls = (("cudaMemcpyAsync", 5), ("cudaLaunchKernel", 5), ("cudaLaunchKernel", 6), ("cudaLaunchKernel", 6))
    launches = [
        Launch(name, AT + 10 * number, AT + 10 * number + 9, number, thread)
        for number, (name, thread) in enumerate(calls, 1)
    ]
    path = write_timeline(
        tmp_path / "t.json", activities=activities, launches=launches, windows=[(AT, AT + 1300), (AT + 1400, AT + 1500)],
        layers_of={1: "Conv_0"}, title="digits",
    )  # fmt: skip
    assert json.loads(path.read_text())["otherData"] == {"title": "digits", "base_ns": str(AT)}
    events = read(path)
    tracks = keep_the_rules(events)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"inferences", "host: calls into CUDA", "GPU 0", "GPU 1"}
    threads = sorted(event["args"]["name"] for event in events if event["name"] == "thread_name")
    assert threads == [
        "inferences", "layers of stream 7", "stream 7", "stream 7", "stream 8", "thread 5", "thread 6"
    ]  # fmt: skip
    gemm = next(event for event in events if event["name"] == "gemm" and event["args"].get("grid"))
    assert (gemm["ts"], gemm["dur"], gemm["cat"]) == (0.2, 1.0, "matrix")
    assert gemm["args"]["kernel"] == "void ns::gemm<int>(int)" and gemm["args"]["layer"] == "Conv_0"
    copy = next(event for event in events if event["name"] == "copy Host-to-Device")
    assert copy["args"]["GB/s"] == 40.0 and copy["cat"] == "copy"
    assert sum(event["ph"] == "f" for event in events) == 4
    assert len(tracks) == 7


def test_nanoseconds_survive_a_clock_that_counts_from_1970(tmp_path: Path) -> None:
    day = 86_400_000_000_000
    activities = [kernel("a", 0, 1), kernel("b", day + 1, day + 4)]
    events = read(write_timeline(tmp_path / "t.json", activities=activities))
    found = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert found == {"a": (0.0, 0.001), "b": (86_400_000_000.001, 0.003)}


def test_a_graphs_launch_has_one_arrow_and_all_its_kernels(tmp_path: Path) -> None:
    activities = [kernel(f"k{index}", 100 + 10 * index, 108 + 10 * index, correlation=9) for index in range(50)]
    launch = Launch("cudaGraphLaunch", AT, AT + 90, 9)
    events = read(write_timeline(tmp_path / "t.json", activities=activities[25:] + activities[:25], launches=[launch]))
    keep_the_rules(events)
    assert [event["ts"] for event in events if event["ph"] == "f"] == [0.1]
    assert sum(event["ph"] == "X" for event in events) == 51 and sum(event["ph"] == "s" for event in events) == 1


def test_layer_means_stand_in_a_row_of_their_own(tmp_path: Path) -> None:
    rows = tuple(LayerRow(name, "Conv", "matrix", ms, ms, 0.5, 1) for name, ms in (("a", 1.5), ("b", 0.25), ("c", 0.0)))
    layers = LayerProfile(rows, 3, "scripted 1.0")
    events = read(write_timeline(tmp_path / "t.json", layers=layers, windows=[(AT + 1000, AT + 9000)]))
    keep_the_rules(events)
    found = {event["name"]: (event["ts"], event["dur"]) for event in events if event.get("cat") == "matrix"}
    assert found == {"a": (0.0, 1500.0), "b": (1500.0, 250.0), "c": (1750.0, 0.0)}


spans = st.tuples(st.integers(0, 200), st.integers(0, 50)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    st.lists(st.tuples(spans, st.integers(0, 2), st.integers(0, 1), st.integers(0, 6)), max_size=20),
    st.lists(st.tuples(spans, st.integers(1, 6), st.integers(0, 2)), max_size=12, unique_by=lambda item: item[1]),
    st.lists(spans, max_size=4),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_overlaps_comes_to_lie_on_lanes_that_nest(
    tmp_path: Path,
    work: list[tuple[tuple[int, int], int, int, int]],
    calls: list[tuple[tuple[int, int], int, int]],
    windows: list[tuple[int, int]],
) -> None:
    activities = [
        kernel("k", *span, stream=stream, device=device, correlation=number) for span, stream, device, number in work
    ]
    launches = [
        Launch("cudaLaunchKernel", AT + start, AT + end, number, thread) for (start, end), number, thread in calls
    ]
    layers_of = {index: f"layer {index // 3}" for index in range(0, len(activities), 2)}
    path = write_timeline(
        tmp_path / "t.json", activities=activities, launches=launches, layers_of=layers_of,
        windows=[(AT + start, AT + end) for start, end in windows],
    )  # fmt: skip
    tracks = keep_the_rules(read(path))
    drawn = [
        event for slices in tracks.values() for event in slices if event["cat"] not in ("layer", "launch", "inference")
    ]
    assert len(drawn) == len(activities)

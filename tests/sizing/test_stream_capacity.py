"""The largest number of sources within a deadline: monotone in sources and GPUs, best policy, interval, limits."""

from __future__ import annotations

import dataclasses
import re
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from onnx_models import conv_net
from sizing.conftest import MakeModel
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.streams import BatchPolicy, SourceGroup, parse_policy, parse_share, parse_sources
from trt_engine.environment import Environment
from trt_engine.errors import ModelError, UsageError
from trt_engine.records.streams import CurvePoint, FrameMemory, StreamCapacity
from trt_engine.reporting.streams import _verification_table
from trt_engine.verbs.size import capacity, stream_capacity
from trt_engine.verbs.size.arrivals import Sources
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.curve import captured_sizes, grid_batches, keep_points, service_times, uses_graphs
from trt_engine.verbs.size.size_plan import plan
from trt_engine.verbs.size.stream_run import _graph_sizes
from trt_engine.verbs.size.stream_worker import DriveMessage

BATCHES = (1, 2, 4, 8, 16, 32)


def points(
    frames: FrameMemory = "host", *, factor: float = 1.0, contexts: tuple[int, ...] = (1, 2), spread: float = 0.05
) -> list[CurvePoint]:
    """A device that takes 3 ms and 0.8 ms for each row, nearly serial between contexts; turns differ by 2 %."""
    rng = np.random.default_rng(7)
    found = []
    for busy in contexts:
        for batch in BATCHES:
            mean_ms = factor * (3 + 0.8 * batch) * busy**0.85
            turns = [mean_ms * (1 + 0.02 * turn) * rng.gamma(spread**-2, spread**2, 200) for turn in (-1, 0, 1)]
            turns_ms = tuple(tuple(turn.tolist()) for turn in turns)
            found.append(CurvePoint("sha256:0", "cpu", batch, busy, frames, turns_ms, Environment.detect(), ""))
    return found


def model(fps: float = 30.0, deadline_s: float = 0.05, late: float = 0.01, **more: int) -> capacity.StreamModel:
    return capacity.StreamModel(service_times(points()), parse_mix(f"1@{fps}"), deadline_s, late, **more)


def parse_mix(text: str) -> Sources:
    return Sources(parse_sources(text))


@pytest.mark.parametrize(
    "policy", [pytest.param(BatchPolicy(1, 0.0), marks=pytest.mark.slow), BatchPolicy(8, 5.0), BatchPolicy(16, 0.0, 2)]
)
def test_more_sources_are_never_less_late(policy: BatchPolicy) -> None:
    one = model()
    most = one.upper_bound(policy)
    shares = [one.late_share(count, policy) for count in range(1, most + 3)]
    assert all(after >= before - 0.004 for before, after in pairwise(shares))
    assert shares[0] == 0
    assert shares[-1] == 1


def test_more_gpus_are_never_worse_and_one_less_is_late() -> None:
    one, policy = model(), BatchPolicy(8, 2.0)
    wanted = parse_mix("300@30,100@5")
    shares = [one.late_share_of(wanted.share_of(gpus), policy) for gpus in range(1, 40)]
    assert all(after <= before + 0.004 for before, after in pairwise(shares))
    found = capacity.gpus_for(one, wanted, policy, spare=2)
    assert found is not None
    assert found.total == found.needed + 2
    assert shares[found.needed - 1] <= one.late < shares[found.needed - 2]


def test_the_best_policy_serves_no_fewer_than_any_other() -> None:
    one = model()
    policy, streams = capacity.best_policy(one, capacity.candidate_policies(one.service, one.deadline_s))
    assert one.late_share(streams, policy) <= one.late
    assert one.late_share(streams + 1, policy) > one.late
    for other in (BatchPolicy(1, 0.0), BatchPolicy(8, 5.0), BatchPolicy(32, 0.0), BatchPolicy(16, 10.0, 2)):
        assert one.largest(other) <= streams


def test_nine_sites_of_ten_are_within_the_share_that_is_named_for_them() -> None:
    """Sources keep their phases, so a site's share is not the mean of all sites."""
    one, policy = model(deadline_s=0.02), BatchPolicy(8, 5.0)
    most = one.largest(policy)
    named = one.worst_phases(most, policy)
    assert named > one.late_share(most, policy) > 0
    sites = [
        late / total
        for late, total in islice(model(deadline_s=0.02, seed=5)._phases(one.mix.scaled(most), policy, 60_000.0), 60)
    ]
    assert 0.75 < np.mean(np.array(sites) <= named) < 0.98


def config(**values: object) -> SizeConfig:
    return SizeConfig(deadline_ms=50.0, late=0.01, **values)  # type: ignore[arg-type]


def test_the_answer_has_its_interval_limit_and_settings() -> None:
    found = stream_capacity.find_capacity(points(), config(), images_per_s=1000.0).capacity
    assert 0 < found.low <= found.streams <= found.high
    assert found.streams <= found.upper_bound
    assert found.upper_bound == pytest.approx(1000 * 2 * 32 / (2**0.85 * 28.6) / 30, rel=0.02), "2 contexts at batch 32"
    assert found.late_share <= 0.01
    assert found.policies[0].policy == found.policy
    assert all(other.streams <= found.streams for other in found.policies)
    assert found.limit in ("compute", "deadline")
    assert found.deepstream == {
        "batch-size": str(found.policy.max_batch),
        "batched-push-timeout": f"{1000 * found.policy.max_wait_ms:.0f}",
        "interval": "0",
    }
    rows = re.search(r"max_rows_waiting=(\d+)", found.batching)
    assert rows is not None
    assert int(rows[1]) >= 64 * found.policy.max_batch


@pytest.mark.slow
def test_the_interval_holds_what_an_independent_curve_gives() -> None:
    """The turns of the curve differ by 2 %, so the interval is wider than one stream."""
    found = stream_capacity.find_capacity(points(), config(), images_per_s=1000.0).capacity
    slower = stream_capacity.find_capacity(points(factor=1.01), config(), images_per_s=1000.0).capacity
    assert found.low <= slower.streams <= found.high
    assert found.low < found.high


def test_turns_that_have_nothing_in_common_give_an_interval_with_an_end() -> None:
    turns = {(1, 1): [[1e-3] * 8, [1e3] * 8]}
    policy = BatchPolicy(1, 0.0, 1)
    low, high = capacity.bootstrap_interval(lambda rng: capacity.resample(turns, rng), model(), policy, 2)
    assert low <= 2 <= high <= 300


@pytest.mark.slow
@pytest.mark.parametrize("turns", [3, 8])
def test_a_curve_drawn_again_is_as_far_away_as_a_later_turn(turns: int) -> None:
    """Of later turns of a machine whose speed varies by 4 %, 90 % are within the interval of 90 %."""
    rng = np.random.default_rng(11)
    inside = 0
    for _ in range(150):
        speeds = np.exp(rng.normal(0, 0.04, turns + 1))
        measured = {(4, 1): [(5.0 * speed * rng.gamma(400, 1 / 400, 60)).tolist() for speed in speeds[1:]]}
        means = [capacity.resample(measured, rng).mean_s(4) for _ in range(40)]
        low, high = np.quantile(means, [0.05, 0.95], method="weibull")
        inside += low <= 5e-3 * speeds[0] <= high
    assert 0.85 <= inside / 150 <= 0.95


@pytest.mark.slow
def test_a_second_model_on_crops_takes_its_share_of_the_gpu(tmp_path: Path) -> None:
    """Frames/s are at most those of both models' times added; `--interval` halves the frames and the crops."""
    path = tmp_path / "curve.jsonl"
    keep_points(path, points(factor=0.1))
    alone = stream_capacity.find_capacity(points(), config(), 1000.0).capacity
    both = stream_capacity.find_capacity(points(), config(crops=4, then=tmp_path), 1000.0).capacity
    frame_ms = 2**0.85 / 2 * (28.6 / 32 + 4 * 0.1 * 28.6 / 32)  # of two contexts, in batches of 32
    assert both.upper_bound == pytest.approx(1e3 / frame_ms / 30, abs=1)
    assert 0.6 * alone.streams < both.streams < 0.8 * alone.streams and both.low <= both.streams <= both.high
    assert len(both.crop_curve) == len(both.curve) == len(alone.curve)
    skipping = stream_capacity.find_capacity(points(), config(crops=4, then=tmp_path, interval=1), 1000.0).capacity
    assert skipping.streams > 1.8 * both.streams and skipping.deepstream["interval"] == "1"
    other = [dataclasses.replace(point, device="cuda:0") for point in points()]
    with pytest.raises(UsageError, match="is not measured on `cuda:0`"):
        stream_capacity.find_capacity(other, config(crops=4, then=tmp_path), 1000.0)


def test_the_second_model_of_a_cascade_is_sized_first_with_the_same_limits_in_a_folder_of_its_own(
    tmp_path: Path,
) -> None:
    first, second = conv_net(tmp_path / "first.onnx"), conv_net(tmp_path / "second.onnx")
    cascade = SizeConfig(
        deadline_ms=50.0,
        crops=4,
        then=second,
        contexts=(1, 2, 3),
        max_batch=8,
        min_streams=9,
        sources=parse_sources("3@25"),
        out=tmp_path / "run",
    )
    job = plan(first, cascade, BuildConfig(shapes={"images": (2, 3, 8, 8)}))
    assert job.second is not None and job.second.layout.folder == tmp_path / "run" / "then"
    assert job.second.model.path == second and job.second.command == job.command and job.second.build.shapes == {}
    own = job.second.config
    assert (own.contexts, own.max_batch, own.deadline_ms, own.min_streams, own.sources) == (
        (1, 2, 3),
        8,
        50.0,
        None,
        None,
    )
    with pytest.raises(ModelError, match="no model at"):
        plan(first, dataclasses.replace(cascade, then=tmp_path / "nowhere.onnx"), BuildConfig())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="cannot read the latency curve"):
        plan(first, dataclasses.replace(cascade, then=tmp_path / "empty"), BuildConfig())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cascade_is_measured_and_counted_in_one_run(tmp_path: Path) -> None:
    report = te.size(
        conv_net(tmp_path / "first.onnx"), then=conv_net(tmp_path / "second.onnx"), crops=3, deadline_ms=500, fps=1.0,
        max_batch=2, contexts=(1,), duration_s=0.2, warmup_s=0.1, out=tmp_path / "run",
    )  # fmt: skip
    assert isinstance(report.capacity, StreamCapacity) and report.capacity.crops == 3 and report.capacity.crop_curve
    assert report.artifacts["then"] == str(tmp_path / "run" / "then")
    again = te.size(
        tmp_path / "first.onnx", then=tmp_path / "run" / "then", crops=6, deadline_ms=500, fps=1.0, max_batch=2,
        contexts=(1,), duration_s=0.2, warmup_s=0.1, out=tmp_path / "run",
    )  # fmt: skip
    assert isinstance(again.capacity, StreamCapacity) and again.capacity.upper_bound < report.capacity.upper_bound


def test_no_stream_is_an_answer_with_its_reason() -> None:
    found = stream_capacity.find_capacity(points(), dataclasses.replace(config(), deadline_ms=2.0), 1000.0).capacity
    assert (found.streams, found.low) == (0, 0)
    assert found.limit == "deadline"
    assert "batch 1 takes 3.7" in found.limit_reason


@pytest.mark.slow
def test_upload_is_the_limit_where_frames_on_the_device_serve_more() -> None:
    both = [*points(), *points("device", factor=0.5)]
    found = stream_capacity.find_capacity(both, config(), 1000.0).capacity
    assert found.limit == "upload"
    resident = stream_capacity.find_capacity(both, config(frames="device"), 1000.0).capacity
    assert resident.streams > 1.5 * found.streams
    assert resident.limit != "upload"


@pytest.mark.slow
def test_decoders_limit_the_streams_and_the_gpus() -> None:
    fast = points(factor=0.1)
    wide = config(codec="h264", sources=parse_sources("1000@30"), policy=BatchPolicy(16, 5.0))
    found = stream_capacity.find_capacity(fast, wide, 10_000.0, gpu="NVIDIA A100-SXM4-80GB").capacity
    assert found.decode is not None
    assert found.streams == found.decode.streams == 5 * 771 // 30
    assert found.limit == "decode"
    assert found.mix == (SourceGroup(128, 30.0),)
    assert found.gpus is not None
    assert found.gpus.needed == 8, "1000 streams over 128"
    assert stream_capacity.find_capacity(fast, wide, 10_000.0, gpu="NVIDIA T1000").capacity.decode is None


def test_decoder_figures_name_their_source_and_are_not_guessed() -> None:
    mix = (SourceGroup(1, 30.0),)
    found = stream_capacity.decode_limit("NVIDIA L40S", "av1", mix)
    assert found is not None
    assert (found.decoders, found.frames_per_s, found.source) == (3, 3 * 1018, stream_capacity.SOURCE)
    assert stream_capacity.decode_limit("NVIDIA L4", "hevc", mix).frames_per_s == 4 * 1641  # type: ignore[union-attr]
    assert stream_capacity.decode_limit("NVIDIA H200", "av1", mix) is None, "Hopper does not decode AV1"
    assert stream_capacity.decode_limit(None, "h264", mix) is None


def test_verification_compares_the_same_arrivals() -> None:
    answer = stream_capacity.find_capacity(points(), config(policy=parse_policy("16,17ms")), 1000.0)
    request = stream_capacity.drive_request(answer, 5.0)
    assert len(request.times_s) == pytest.approx(5 * 30 * answer.capacity.streams, rel=0.01)
    batches = [(rows, 2 * answer.model.service.mean_s(rows)) for rows in (1, 2)]
    good = stream_capacity.verify(
        answer, request, DriveMessage([0.010] * len(request.times_s), batches), 5.0
    ).verification
    assert good is not None
    assert (good.late, good.dropped, good.passed) == (0, 0, True)
    assert good.predicted_p50_ms > 3
    assert good.predicted_batch_ms is not None
    assert good.observed_batch_ms == pytest.approx(2 * good.predicted_batch_ms)
    assert "took 2.00 times as long" in str(
        [*_verification_table(dataclasses.replace(answer.capacity, verification=good))]
    )
    latencies = [0.010] * (len(request.times_s) - 80) + [None] * 70 + [0.2] * 10
    bad = stream_capacity.verify(answer, request, DriveMessage(latencies, []), 5.0).verification
    assert bad is not None
    assert (bad.late, bad.dropped, bad.passed) == (10, 70, False)
    assert bad.observed_batch_ms is None
    assert bad.observed_share == pytest.approx(80 / len(request.times_s))


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_share, "-1%"), (parse_share, "100%"), (parse_share, "5%%"), (parse_share, "nan"), (parse_share, "few"),
        (parse_sources, "200"),
        (parse_sources, "3@1e-9"), (parse_sources, "0@25"), (parse_sources, "5@0"), (parse_sources, "5@nan"),
        (parse_sources, ""), (parse_policy, "8"), (parse_policy, "0,5ms"), (parse_policy, "8,5ms,0"),
        (parse_policy, "8,soon"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(parse, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        parse(text)


def test_the_grid_ends_with_the_engines_batch() -> None:
    assert grid_batches(1) == (1,)
    assert grid_batches(8) == (1, 2, 4, 8)
    assert grid_batches(24) == (1, 2, 4, 8, 16, 24)


def test_sizes_measured_with_graphs_are_those_to_paste() -> None:
    """Frames on the device are measured alone: they have no sizes that batches are padded to."""
    captured = [dataclasses.replace(point, graphs="on") for point in points()]
    found = stream_capacity.find_capacity([*captured, *points("device")], config(policy=BatchPolicy(8, 5.0)), 1000.0)
    assert found.capacity.batching.startswith("te.load(engine, contexts=1, graphs=(1, 2, 4, 8), batching=te.Batching(")
    assert found.graphs == (1, 2, 4, 8)
    assert found.model.service.mean_s(5) == found.model.service.mean_s(8)
    assert captured_sizes(captured) == BATCHES and captured_sizes(points()) == ()


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["", "none: the CPU runs `NonZero`"])
def test_without_graphs_nothing_is_padded_and_none_are_recommended(graphs: str) -> None:
    found = stream_capacity.find_capacity(
        [dataclasses.replace(point, graphs=graphs) for point in points()], config(), 1000.0
    )
    assert "graphs" not in found.capacity.batching and found.graphs == ()
    service = found.model.service
    assert service.mean_s(4) < service.mean_s(6) < service.mean_s(8)


def test_graphs_of_the_callers_sizes_are_measured_or_refused(make_model: MakeModel, tmp_path: Path) -> None:
    net = make_model()
    engine = te.build(net, out=tmp_path / "net.engine", batch=(1, 4, 8))
    static = te.build(net, out=tmp_path / "static.engine", batch=(8, 8, 8))

    def sizes(engine: te.Engine, graphs: bool | tuple[int, ...] | None, **values: object) -> tuple[int, ...]:
        job = plan(net, config(out=tmp_path / "out", **values), BuildConfig(), RuntimeConfig(graphs=graphs))
        return _graph_sizes(job, engine, (1, 2, 4, 8))

    assert sizes(engine, None) == sizes(engine, True) == (1, 2, 3, 4, 6, 8)
    assert sizes(engine, (8, 5)) == (5, 8)
    assert sizes(static, None) == sizes(static, (8,)) == (8,)
    with pytest.raises(UsageError, match=r"batches of 1, 5, which the engine does not take"):
        sizes(static, (1, 5, 8))
    with pytest.raises(UsageError, match="policy has batches of 8, the largest graph is of 5"):
        sizes(engine, (1, 5), policy=BatchPolicy(8, 1.0))


def test_graphs_are_for_gpus_and_not_against_the_users_will() -> None:
    assert uses_graphs(RuntimeConfig(), "cuda:0")
    assert not uses_graphs(RuntimeConfig(), "cpu")
    assert uses_graphs(RuntimeConfig(graphs=(1, 4)), "cuda:0")
    assert not uses_graphs(RuntimeConfig(graphs=False), "cuda:0")
    assert not uses_graphs(RuntimeConfig(graphs=()), "cuda:0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sources": "10@30"}, "needs a deadline"),
        ({"verify_s": 10.0}, "needs a deadline"),
        ({"deadline_ms": 50.0, "spare_gpus": 1}, "needs the sources"),
        ({"crops": 4}, "needs a deadline"),
        ({"deadline_ms": 50.0, "crops": 4}, "need each other"),
        ({"video": ("clip.mp4",), "crops": 4}, "need each other"),
        ({"deadline_ms": 50.0, "then": Path("second.onnx")}, "need each other"),
        ({"deadline_ms": 50.0, "frames": "device", "verify_s": 5.0}, "host memory"),
        ({"deadline_ms": 50.0, "policy": BatchPolicy(8, 5.0, 4)}, "4 contexts"),
        ({"deadline_ms": 50.0, "policy": BatchPolicy(128, 5.0), "max_batch": 64}, "batches of 128"),
    ],
)
def test_settings_without_effect_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stream_capacity.check_settings(SizeConfig(**values))  # type: ignore[arg-type]

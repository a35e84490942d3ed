"""What the doubling promises, over planted throughputs; a graph of fixed shapes has an engine for each batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import at, record

import onnx_models as models
import trt_engine as te
from brittle import brittle, foreign, installed
from trt_engine.errors import BuildError, MemoryExhausted
from trt_engine.records.bench import BenchRecord
from trt_engine.verbs.size import curve
from trt_engine.verbs.size.doubling import Doubling, images_per_s, peak_streams


class Bench:
    """Builds engines that are their own largest batch, and measures them at the throughput planted for a batch."""

    def __init__(self, images: Callable[[int], int], *, fits: int = 1 << 30, built_fits: int = 1 << 30) -> None:
        self.images, self.fits, self.built_fits = images, fits, built_fits
        self.built: list[int] = []
        self.measured: list[tuple[int, int]] = []

    def build(self, batch: int) -> int:
        if batch > self.built_fits:
            raise MemoryExhausted("no room to build", hint="less")
        self.built.append(batch)
        return batch

    def measure(self, engine: int, batch: int) -> BenchRecord:
        if engine > self.fits:
            raise MemoryExhausted("no room to run", hint="less")
        self.measured.append((engine, batch))
        return at(self.images(batch), batch)

    def search(self, start: int = 64, limit: int = 1024) -> Doubling[int]:
        found: Doubling[int] = Doubling(self.build, self.measure)
        found.run(start, limit)
        return found


rising = st.tuples(st.integers(1, 200_000), st.integers(0, 200)).map(
    lambda pair: lambda batch: max(1, pair[0] * batch // (batch + pair[1]))
)


@given(images=rising, start=st.integers(2, 256), limit=st.integers(2, 4096))
def test_k_engines_give_k_plus_one_measurements_and_n_doubles_strictly(
    images: Callable[[int], int], start: int, limit: int
) -> None:
    bench = Bench(images)
    found = bench.search(start, limit)
    first = min(start, limit)
    assert bench.built == [first << step for step in range(len(bench.built))]
    assert bench.measured == [(first, 1), *((batch, batch) for batch in bench.built)]
    assert (found.engines, found.measurements) == (len(bench.built), len(bench.built) + 1)
    assert max(bench.built) <= limit


@given(images=rising, start=st.integers(2, 256), limit=st.integers(2, 4096))
def test_the_search_ends_exactly_where_the_source_says(images: Callable[[int], int], start: int, limit: int) -> None:
    found = Bench(images).search(start, limit)
    *before, (last, answer) = found.succeeded
    assert all(math.floor(images(batch) / 30) > batch for batch, _ in before)
    peak = peak_streams(answer, 30)
    assert peak == images(last) // 30
    assert found.stop_reason == ("peak_within_batch" if peak <= last else "max_batch")
    assert peak <= last or last * 2 > limit


@pytest.mark.parametrize(
    ("images", "engines"), [(64 * 30, 1), (64 * 30 + 29, 1), (65 * 30, 2), (128 * 30, 2), (129 * 30, 3), (256 * 30, 3)]
)
def test_peak_equal_to_n_stops_and_one_stream_more_doubles(images: int, engines: int) -> None:
    found = Bench(lambda _: images).search()
    assert (found.engines, found.measurements) == (engines, engines + 1)
    assert found.stop_reason == "peak_within_batch"


@given(fits=st.integers(1, 2048), start=st.integers(1, 512), whole=st.booleans())
def test_out_of_memory_keeps_the_last_good_answer_and_is_never_tried_again(fits: int, start: int, whole: bool) -> None:
    bench = Bench(lambda _: 10**7, fits=fits if whole else 1 << 30, built_fits=1 << 30 if whole else fits)
    found = bench.search(start, 1024)
    last, answer = found.succeeded[-1]
    assert last == answer.batch <= fits
    assert len(set(found.oom_batches)) == len(found.oom_batches)
    assert all(batch > fits for batch in found.oom_batches)
    assert found.stop_reason == ("out_of_memory" if found.oom_batches else "max_batch")


def test_a_first_engine_that_does_not_fit_is_halved_until_one_does() -> None:
    bench = Bench(lambda batch: 3 * batch * 30 // 2 if batch < 16 else 1, fits=20)
    found = bench.search()
    assert found.oom_batches == [64, 32]
    assert [engine for engine, _ in found.succeeded] == [16]
    assert found.stop_reason == "peak_within_batch"
    assert found.measurements == 2


def test_another_failure_ends_the_search_and_leaves_what_was_known() -> None:
    class Breaks(Bench):
        def build(self, batch: int) -> int:
            if batch > 64:
                raise BuildError("no implementation for node `x`")
            return super().build(batch)

    bench = Breaks(lambda _: 10_000)
    found: Doubling[int] = Doubling(bench.build, bench.measure)
    with pytest.raises(BuildError):
        found.run(64, 1024)
    assert [engine for engine, _ in found.succeeded] == [64]
    assert found.stop_reason is None


@given(
    streams=st.integers(1, 5000),
    batch=st.sampled_from([1, 3, 7, 64, 96, 128]),
    fps=st.sampled_from([24, 25, 29.97, 30, 59.94]),
)
def test_exactly_enough_images_are_enough_streams(streams: int, batch: int, fps: float) -> None:
    hundredths = round(fps * 100) * streams  # images in 100 s
    exact = record(batch, queries=hundredths, wall_s=float(100 * batch))
    assert peak_streams(exact, fps) == streams
    assert peak_streams(record(batch, queries=hundredths - 1, wall_s=float(100 * batch)), fps) == streams - 1


def test_a_length_in_tenths_of_seconds_costs_no_stream() -> None:
    # 1920 images/s exactly; in binary 192 / 6.4 x 64 / 30 could fall on either side of 64
    assert peak_streams(record(64, queries=192, wall_s=6.4), 30) == 64
    assert float(images_per_s(record(64, queries=192, wall_s=6.4))) == 1920.0
    assert peak_streams(record(1, queries=3, wall_s=0.1), 30) == 1
    assert peak_streams(record(1, queries=0, wall_s=0.0), 30) == 0


@pytest.mark.slow
def test_a_graph_that_builds_at_fixed_shapes_alone_is_sized_with_an_engine_for_each_batch(monkeypatch, tmp_path: Path):
    brittle(monkeypatch)(foreign(lambda model, config: not any(spec.dynamic for spec in model.signature.inputs)))
    installed(tmp_path / "site", monkeypatch)
    net = models.conv_net(tmp_path / "net.onnx")
    report = te.size(
        net,
        backend="brittle",
        start_batch=4,
        max_batch=4,
        duration_s=0.1,
        warmup_s=0.0,
        out=tmp_path / "out",
        fps=0.001,
    )
    assert [result.batch for result in report.batches] == [1, 4]
    assert report.engines_built == 2
    names = {path.name for path in (tmp_path / "out" / "engines").iterdir()}
    assert {"net_dynamic_b4.onnx", "net_static_b1.onnx"} <= names
    assert any("batch 1 has a separate engine" in note for note in report.notes)
    assert any("build retry" in note for note in report.notes)


def test_the_curve_of_an_engine_with_static_shapes_has_its_batch_alone(monkeypatch, tmp_path: Path):
    brittle(monkeypatch)(foreign(lambda model, config: not any(spec.dynamic for spec in model.signature.inputs)))
    installed(tmp_path / "site", monkeypatch)
    measured = []

    def measure(engine, grid, runtime, device):
        measured.append(grid.batches)
        raise MemoryExhausted("full")

    monkeypatch.setattr(curve, "measure_host_curve", measure)
    net, limits = models.conv_net(tmp_path / "net.onnx"), {"start_batch": 4, "max_batch": 4, "fps": 0.001}
    with pytest.raises(MemoryExhausted):
        te.size(net, backend="brittle", duration_s=0.1, warmup_s=0.0, out=tmp_path / "out", deadline_ms=50, **limits)
    assert measured == [(4,)]


def test_the_timings_of_a_run_lie_beside_its_engines(monkeypatch, tmp_path: Path):
    kept = []

    def fails(model, config):
        kept.append(config.timing_cache)
        return

    brittle(monkeypatch)(fails)
    installed(tmp_path / "site", monkeypatch)
    net = models.conv_net(tmp_path / "net.onnx")
    te.size(net, backend="brittle", start_batch=1, max_batch=1, duration_s=0.05, warmup_s=0.0, out=tmp_path / "out")
    assert kept == [tmp_path / "out" / "engines" / "timing.cache"]

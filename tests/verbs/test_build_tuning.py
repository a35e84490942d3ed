"""Settings measured before a build: what is chosen, what is not eligible, what the passport and the reports hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from trt_engine.backends.onnxruntime import tuning
from trt_engine.benchmark.closed_loop import QueryBurst
from trt_engine.benchmark.interleaving import EngineOpener, Schedule
from trt_engine.benchmark.statistics import Restart
from trt_engine.config.build import BuildConfig
from trt_engine.equivalence.sorted_outputs import compare_outputs
from trt_engine.errors import UsageError
from trt_engine.graph.load import open_model
from trt_engine.records.passport import Tuning
from trt_engine.verbs import build_tuning

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"
ONE = {"options": {"intra_op_threads": "1"}}
NHWC = {"cuda.prefer_nhwc": "1"}
SLOW = {"graph_optimization": "none"}


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What the backend offers for every graph."""
    offered: list[dict[str, str]] = []
    monkeypatch.setattr(tuning, "tuning_candidates", lambda model, config: tuple(offered))
    return offered


def build(tmp_path: Path, **settings: object) -> te.Engine:
    return te.build(DIGITS, batch=(1, 4, 8), store=te.Store(tmp_path / "store"), **(ONE | settings))


def tuned(engine: te.Engine) -> Tuning:
    assert engine.passport.build.tuning is not None
    return engine.passport.build.tuning


def pairs_of(monkeypatch: pytest.MonkeyPatch, *others_ms: Sequence[float]) -> None:
    """Rounds in which the requested settings take 10 ms, and each candidate in turn these times."""
    times = iter(others_ms)

    def measured(sides: Sequence[EngineOpener], schedule: Schedule) -> list[Restart]:
        for side in sides:
            with side() as burst:
                assert burst(0.0, 1, 0).samples_ms
        return [tuple((QueryBurst((10.0,), 0.01), QueryBurst((ms,), ms / 1e3)) for ms in next(times))]

    monkeypatch.setattr(build_tuning, "measure_interleaved", measured)


def test_the_fastest_settings_are_built_with_and_recorded(
    tmp_path: Path, candidates: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates += [{"spinning": "off"}, {"graph_optimization": "extended"}, {"arena": "off"}]
    pairs_of(monkeypatch, [9.5] * 8, [6.0, 6.1] * 4, [11.0] * 8)
    engine = build(tmp_path)
    found = tuned(engine)
    assert [trial.options for trial in found.trials] == [{}, *candidates]
    assert found.chosen == 2
    assert found.trials[0].median_ms == 10.0 and found.trials[2].slower_pct == pytest.approx(-39.5)
    assert found.trials[2].interval_pct == pytest.approx((-40.0, -39.0))
    assert engine.passport.build.notes["graph_optimization"] == "extended"
    assert engine.passport.build.config["options"] == ONE["options"] | candidates[1]
    assert found.shapes["images"][0] == 4
    assert found.summary.startswith("graph_optimization=extended: 39.5 % faster than as requested (4 of 4 measured")
    assert te.Engine.open(engine.path).passport.build.tuning == found
    assert te.inspect(engine.path).passport == te.Engine.open(engine.path).passport


@pytest.mark.parametrize("times", [[9.9] * 8, [2.0, 18.0] * 4, [20.0] * 8])
def test_a_gain_that_is_small_uncertain_or_none_changes_nothing(
    tmp_path: Path, candidates: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, times: list[float]
) -> None:
    candidates.append({"graph_optimization": "extended"})
    pairs_of(monkeypatch, times)
    engine = build(tmp_path)
    assert tuned(engine).chosen == 0
    assert engine.passport.build.config["options"] == ONE["options"]
    assert "nothing was faster" in tuned(engine).summary


def test_a_real_trial_has_its_median_and_interval(
    tmp_path: Path, candidates: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_tuning, "_TRIAL_S", 0.1)
    candidates.append(SLOW)
    trial = tuned(build(tmp_path)).trials[1]
    assert trial.median_ms is not None and trial.median_ms > 0
    assert trial.slower_pct is not None and trial.interval_pct is not None
    assert trial.interval_pct[0] <= trial.slower_pct <= trial.interval_pct[1]


def test_settings_that_do_not_build_are_named_and_passed_over(tmp_path: Path, candidates: list[dict[str, str]]) -> None:
    candidates.append({"no_such_setting": "1"})
    trial = tuned(build(tmp_path)).trials[1]
    assert trial.slower_pct is None and trial.note is not None and "no_such_setting" in trial.note


def test_settings_that_change_the_outputs_are_not_eligible(
    tmp_path: Path, candidates: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates.append({"graph_optimization": "all"})
    monkeypatch.setattr(
        build_tuning, "compare_outputs", lambda got, want, *rest: compare_outputs(_scaled(got), want, *rest)
    )
    found = tuned(build(tmp_path, options=ONE["options"] | SLOW))
    assert found.chosen == 0
    assert found.trials[1].note is not None and "differs" in found.trials[1].note


def _scaled(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs that differ by five per cent."""
    return {name: np.asarray(value) * 1.05 for name, value in outputs.items()}


def test_time_that_is_up_leaves_the_rest_unmeasured(tmp_path: Path, candidates: list[dict[str, str]]) -> None:
    candidates += [SLOW, SLOW | {"spinning": "off"}]
    found = tuned(build(tmp_path, time_budget_s=1e-6))
    assert [trial.note for trial in found.trials[1:]] == ["not reached in the time given"] * 2


def test_no_time_measures_nothing(tmp_path: Path, candidates: list[dict[str, str]]) -> None:
    candidates.append(SLOW)
    assert build(tmp_path, time_budget_s=0).passport.build.tuning is None


def test_a_base_that_does_not_build_fails_as_without_tuning(tmp_path: Path, candidates: list[dict[str, str]]) -> None:
    candidates.append(SLOW)
    with pytest.raises(UsageError, match="graph_optimization"):
        build(tmp_path, options={"graph_optimization": "most"})


def test_candidates_fit_the_graph_and_leave_requested_settings_alone() -> None:
    model = open_model(DIGITS)

    def offered(**settings: Any) -> list[dict[str, str]]:
        return list(tuning.tuning_candidates(model, BuildConfig(**({"device": "cuda:0", "fuse": False} | settings))))

    assert offered() == [NHWC, NHWC | {"separate_conv_bias": "on"}]
    assert {"cuda.sdpa_kernel": "1"} in offered(fuse=True)
    assert offered(device="cpu") == offered(providers=("tensorrt", "cuda")) == []
    assert offered(options={"cuda.prefer_nhwc": "0"}) == []
    assert offered(options=NHWC) == [{"separate_conv_bias": "on"}]
    assert offered(options={"separate_conv_bias": "off"}) == [NHWC]


def test_biases_are_separated_in_nhwc_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layout NHWC"):
        build(tmp_path, options={"separate_conv_bias": "on"})

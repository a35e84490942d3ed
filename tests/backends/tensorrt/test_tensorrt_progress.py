"""Progress of a build: which phases are under way, and how long each took by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from trt_engine.backends.tensorrt import build_progress as progress_module
from trt_engine.backends.tensorrt.build_progress import BuildProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    yield now


def test_a_phase_is_noted_by_the_time_outside_of_the_phases_within_it(clock: list[float]) -> None:
    progress = BuildProgress()
    names = ["Building engine", "Building engine from subgraph", "Computing profile costs", "Timing tactics"]
    for parent, name in itertools.pairwise([None, *names]):
        progress.phase_start(name, parent, 1)
        clock[0] += 1.0 if name != "Timing tactics" else 6.0
    assert progress.phase().startswith("Building engine 0/1, Building engine from subgraph 0/1, ")
    for name in reversed(names):
        assert progress.step_complete(name, 0)
        progress.phase_finish(name)
    assert progress.seconds == dict.fromkeys(names[:3], 1.0) | {"Timing tactics": 6.0}
    assert sum(progress.seconds.values()) == clock[0], "nothing is counted twice"
    assert progress.slowest_phases().startswith("Timing tactics 6.0 s, ")
    assert progress.phase() == "" and progress.error is None

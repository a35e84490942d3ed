"""Measures settings of a backend before a build, and chooses the fastest that leaves the outputs as they are."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_engine.backend import BackendSpec, get_backend
from trt_engine.benchmark.bench_inputs import feeds_for
from trt_engine.benchmark.closed_loop import effective_protocol
from trt_engine.benchmark.interleaving import Schedule, measure_interleaved, open_in_process
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.equivalence.sorted_outputs import compare_outputs, sorted_outputs
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.errors import TrtEngineError
from trt_engine.model import Model
from trt_engine.protocols import Session
from trt_engine.records.bench import Protocol
from trt_engine.records.passport import Tuning, TuningTrial
from trt_engine.tensors import Tensors
from trt_engine.verbs.load import load
from trt_engine.verbs.speed_check import median_interval

log = logging.getLogger(__name__)

_MIN_GAIN_PCT = 2.0
"""A gain whose interval reaches below this is not worth other settings: two loads of one engine differ as much."""
_TRIAL_S = 2.0
"""Longest time of one trial whose queries are short."""
_MIN_ROUNDS = 6
"""Fewer rounds give no 95 % interval of their median."""

BuildTrial = Callable[[BuildConfig, Path], Engine]
"""Builds and seals an engine with these settings in a new folder."""


def tune(
    model: Model, config: BuildConfig, folder: Path, tolerance: Callable[[Engine], Tolerance], build: BuildTrial
) -> tuple[BuildConfig, Tuning | None]:
    """The settings with the fastest of the backend's candidates, and what was measured; None where nothing was.

    Takes `config.tuning_s` at most, exceeded by the trial under way. A candidate that does not build or run, or whose
    outputs differ from those of the requested settings by more than `tolerance`, is not eligible.
    """
    spec = get_backend(config.backend)
    if not config.tuning_s or not spec.provides("tuning"):
        return config, None
    candidates: Sequence[dict[str, str]] = spec.load_function("tuning")(model, config)
    if not candidates:
        return config, None
    log.info(
        "measuring %d groups of settings for up to %g s (`--tuning 0` leaves it out)", len(candidates), config.tuning_s
    )
    began = time.monotonic()
    try:
        comparison = _TuningRun.open(spec, model, config, folder, tolerance, build)
    except TrtEngineError as error:
        log.warning("the settings of `%s` were not measured: %s", spec.name, error.message)
        return config, None
    trials = [TuningTrial({})]
    for number, options in enumerate(candidates, start=1):
        left_s = config.tuning_s - (time.monotonic() - began)
        if left_s <= 0:
            trials.append(TuningTrial(options, note="not reached in the time given"))
            continue
        trial = comparison.measure(options, number, min(left_s / (len(candidates) - number + 1), _TRIAL_S))
        log.info("%s", _trial_text(trial))
        trials.append(trial)
    if comparison.base_ms:
        trials[0] = TuningTrial({}, median_ms=statistics.median(comparison.base_ms))
    gains = [
        (trial.slower_pct, at)
        for at, trial in enumerate(trials)
        if trial.slower_pct is not None and trial.interval_pct is not None and trial.interval_pct[1] < -_MIN_GAIN_PCT
    ]
    chosen = min(gains, default=(0.0, 0))[1]
    found = Tuning(
        trials=tuple(trials),
        chosen=chosen,
        shapes={name: tuple(value.shape) for name, value in comparison.feeds.items()},
        protocol="two loaded engines in alternating bursts, transfers left out"
        + ", as CUDA graphs" * comparison.protocol.graph,
        budget_s=config.tuning_s,
        seconds=time.monotonic() - began,
    )
    log.info("%s", found.summary)
    return replace(config, options=config.options | trials[chosen].options), found


@dataclass(slots=True)
class _TuningRun:
    """The engine of the requested settings, its outputs, and the rules that every trial is measured by."""

    spec: BackendSpec
    config: BuildConfig
    folder: Path
    build: BuildTrial
    base: Engine
    feeds: Tensors
    outputs: Mapping[str, Any]
    sorted_names: tuple[str, ...]
    tolerance: Tolerance
    protocol: Protocol
    base_ms: list[float]

    @classmethod
    def open(
        cls,
        spec: BackendSpec,
        model: Model,
        config: BuildConfig,
        folder: Path,
        tolerance: Callable[[Engine], Tolerance],
        build: BuildTrial,
    ) -> _TuningRun:
        """Build and run the requested settings. Raises what their build or their first inference raises."""
        base = build(config, folder / "0")
        rules = BenchConfig(warmup_s=0.0, duration_s=0.0, transfers=False)
        feeds, _ = feeds_for(base, rules)
        session = _load(spec, base, config)
        try:
            _, protocol = effective_protocol(session, rules)
        finally:
            session.close()
        outputs = _outputs(base, config, feeds)
        names = sorted_outputs(model.proto)
        return cls(spec, config, folder, build, base, feeds, outputs, names, tolerance(base), protocol, [])

    def measure(self, options: dict[str, str], number: int, seconds: float) -> TuningTrial:
        """The candidate beside the base for about `seconds`."""
        try:
            engine = self.build(replace(self.config, options=self.config.options | options), self.folder / str(number))
            if (difference := self._output_difference(engine)) is not None:
                return TuningTrial(options, note=difference)
            sides = [
                lambda side=side: open_in_process(
                    lambda: _load(self.spec, side, self.config), side, self.feeds, self.protocol, []
                )
                for side in (self.base, engine)
            ]
            (rounds,) = measure_interleaved(sides, Schedule(seconds, restarts=1, min_rounds=_MIN_ROUNDS))
        except TrtEngineError as error:
            return TuningTrial(options, note=f"does not run: {error.message}")
        medians = [tuple(statistics.median(burst.samples_ms) for burst in pair) for pair in rounds]
        slower = [100 * (other / base - 1) for base, other in medians]
        self.base_ms += [base for base, _ in medians]
        return TuningTrial(
            options,
            median_ms=statistics.median(other for _, other in medians),
            slower_pct=statistics.median(slower),
            interval_pct=median_interval(slower),
        )

    def _output_difference(self, engine: Engine) -> str | None:
        """How the outputs differ from the base's beyond the tolerance; None where they do not."""
        outputs = _outputs(engine, self.config, self.feeds)
        for name, error in compare_outputs(outputs, self.outputs, self.sorted_names, self.tolerance).items():
            if (violation := self.tolerance.violation(error, None)) is not None:
                return f"output `{name}` differs: {violation}"
        return None


def _load(spec: BackendSpec, engine: Engine, config: BuildConfig) -> Session:
    session: Session = spec.load_component("runtime")().load(
        engine, RuntimeConfig(allow_fallback=config.allow_fallback)
    )
    return session


def _outputs(engine: Engine, config: BuildConfig, feeds: Tensors) -> Mapping[str, Any]:
    with load(engine, verify=False, allow_fallback=config.allow_fallback) as runner:
        return runner.infer(feeds)


def _trial_text(trial: TuningTrial) -> str:
    names = " ".join(f"{name}={value}" for name, value in trial.options.items())
    if trial.slower_pct is None or trial.interval_pct is None:
        return f"{names}: {trial.note}"
    low, high = trial.interval_pct
    return f"{names}: {trial.median_ms:.3f} ms, {trial.slower_pct:+.1f} % ({low:+.1f} to {high:+.1f})"

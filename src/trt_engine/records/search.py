"""Results of `search`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.percentiles import Summary


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Measured result of one set of quantised layers."""

    metric: float
    images: int
    nbytes: int
    batch: int
    samples_ms: tuple[float, ...]
    """One time for each query; empty where no kernel computes the format."""
    measured_on: Literal["model", "kernels", "emulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial(TrialResult):
    """One measurement of a search: a line of trials.jsonl."""

    key: str
    """Digest of the search, the images and the layers: equal keys are never measured twice."""
    search: str
    """Digest of all that a measurement depends on: model, dataset, calibration, settings."""
    stage: Literal["baseline", "all", "alone", "prefix", "one more", "verified"]
    nodes: tuple[str, ...]
    """The layers that were quantised."""
    macs: float
    """Their share of the multiply-adds."""
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchGroup:
    """Layers that are quantised together, and what that costs with all others in float."""

    nodes: tuple[str, ...]
    """Names of the layers."""
    macs: float
    """Their share of the multiply-adds."""
    drop: float | None
    """Loss of the metric on the subset; None where not measured because all layers together meet the budget."""
    quantized: bool
    """They are quantised in the result."""
    modules: tuple[str | None, ...] = ()
    """The PyTorch module of each node; None where that is not known."""


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """One mixture of layers in the table of accuracy against speed and size."""

    stage: Literal["baseline", "all", "alone", "prefix", "one more", "verified"]
    """`baseline`: none; `all`; `alone`: one group; `prefix`: the cheapest groups; `one more`: one group besides;
    `verified`: on all images."""
    layers: int
    """Number of quantised layers."""
    macs: float
    """Their share of the multiply-adds."""
    images: int
    metric: float
    drop: float
    """Against the unquantised model, on the same images."""
    nbytes: int
    batch: int
    latency_ms: Summary | None
    """Time per batch; None where no kernel computes the format."""
    measured_on: Literal["model", "kernels", "emulation"]
    """`model`: not quantised; `kernels`: by the runtime's kernels; `emulation`: an FP32 graph that rounds alike."""
    pareto: bool
    """Pareto-optimal: no other point on the same images has a larger share and a larger metric."""


@dataclass(frozen=True, slots=True)
class SearchReport(RichDisplay):
    """Report of `search`: layers that can be quantised within the budget, and the cost of every layer."""

    model: str
    digest: str
    """Digest of everything a measurement depends on: a search with the same one resumes here."""
    to: str
    dataset: str
    metric: str
    budget: float
    baseline: float
    """Metric of the unquantised model, on the full dataset."""
    metric_value: float
    """Metric with the chosen layers quantised, on the full dataset."""
    drop: float
    """`baseline` less `metric_value`."""
    quantized: tuple[str, ...]
    excluded: tuple[str, ...]
    """Layers the format could take that stay in float."""
    macs: float
    """Share of the multiply-adds that is quantised."""
    nbytes_before: int
    nbytes: int
    images: int
    subset: int
    groups: tuple[SearchGroup, ...]
    """By `drop`, the largest first."""
    points: tuple[SearchPoint, ...]
    """Every measured set, most images first."""
    trials: int
    """Number of measured sets."""
    new_trials: int
    """Number of new trials; the others were in the log."""
    next_command: str | None
    """Command that writes the verified model; None when no layer can be quantised."""
    environment: Environment
    seconds: float
    artifacts: dict[str, str]
    warnings: tuple[str, ...] = ()

"""`search`: which layers of a model may be quantised when the task metric may lose so much, by measurement.

`plan` looks at everything and writes nothing; `run` measures. Every measurement is in `trials.jsonl` when it is made, so a
run that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.api.evaluating import declared_for
from trt_engine.api.pictures import CalibrationInputs, Given, inputs_of
from trt_engine.api.preparing import placement_target
from trt_engine.config import BuildConfig, QuantizeConfig, RuntimeConfig, words
from trt_engine.device import parse_device
from trt_engine.environment import Environment, version_of
from trt_engine.errors import Interrupted, UsageError
from trt_engine.files import ensure_folder, json_bytes, write_whole
from trt_engine.graph import walk
from trt_engine.graph.census import layers_of
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths
from trt_engine.model import Model
from trt_engine.precision.formats import format_named
from trt_engine.precision.quantize import quantize
from trt_engine.precision.samples import open_samples
from trt_engine.records import MAIN_FIGURE, SearchGroup, SearchPoint, SearchReport, SearchTrial, document, summarize
from trt_engine.search.measure import Calibration, Mixture
from trt_engine.search.selection import Group, Selection, grouped, most_trials, select
from trt_engine.search.trials import Trials, digest_of
from trt_engine.vision.datasets import Dataset, open_dataset
from trt_engine.vision.declaration import Vision

__all__ = ["EXCLUDE", "FORMATS", "REPORT", "TRIALS", "Plan", "plan", "run", "search"]

log = logging.getLogger(__name__)

FORMATS = ("int8", "fp8")
TRIALS, EXCLUDE, REPORT = "trials.jsonl", "exclude.txt", "search.json"
_SUBSET = 128


def search(model: Path | str, dataset: Path | str, **settings: Any) -> SearchReport:
    """The largest part of `model` that may be quantised within a budget of the task metric, and the list of the rest.

    `settings` are those of `plan`. Needs a model that declares its pre- and post-processing and a dataset with labels.
    """
    return run(plan(model, dataset, **settings))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a search would do: the layers in question, how they are measured, where it writes."""

    model: Model
    to: str
    budget: float
    groups: tuple[Group, ...]
    mixture: Mixture
    dataset: Dataset
    vision: Vision
    subset: int
    digest: str
    """Of everything that a measurement depends on."""
    out: Path
    command: str
    preprocess: str | None = None
    """The preset or the file that was named in place of what the model declares."""

    @property
    def metric(self) -> str:
        return MAIN_FIGURE[self.vision.postprocess.task]

    @property
    def expected(self) -> int:
        """Measurements it takes at most, about."""
        return most_trials(len(self.groups))


def plan(
    model: Path | str,
    dataset: Path | str,
    *,
    to: str = "int8",
    budget: float = 0.01,
    data: Path | str | None = None,
    out: Path | str,
    subset: int = _SUBSET,
    seed: int | None = 0,
    groups: int | None = None,
    batch: int | None = None,
    preprocess: Given | None = None,
    target: str | None = None,
    config: QuantizeConfig | None = None,
    runtime: RuntimeConfig | None = None,
    command: str = "",
    yes: bool = False,
) -> Plan:
    """What `search` with the same arguments would do; nothing is written.

    `data` is what calibration sees, `subset` how many pictures the cost of each layer is measured on, `groups` how many
    parts of the model are told apart at most (default: every layer), `config` how to quantise, `target` the library that
    will run the model (default: the one that measures here).
    """
    config, runtime = config or QuantizeConfig(), runtime or RuntimeConfig()
    if target is None and config.target == QuantizeConfig().target:
        target = placement_target(BuildConfig(device=runtime.device or "", providers=runtime.providers), to)
    config = dataclasses.replace(config, target=target or config.target)
    _check(to, budget, subset, groups, config)
    opened = open_model(model)
    vision = declared_for(opened.path, preprocess)
    listed = open_dataset(dataset)
    if not listed.labelled:
        raise UsageError(f"`{listed.path}` has no labels to measure by", hint="annotations, or an .npz with `labels`")
    if data is None:
        raise UsageError(
            f"`{to}` needs the ranges of activations, and there is no data to find them in",
            hint="`--calibrate DATA` (a folder, .npy, .npz) of what the network was trained on, not of the dataset",
        )
    every = QuantizeConfig(target=config.target, heads=True, parity=False)
    layers = quantize(opened, to, config=every, dry_run=True).quantized
    wanted = {item.node for item in quantize(opened, to, config=config, dry_run=True).quantized}
    all_layers = tuple(dict.fromkeys(item.node for item in layers))
    shares = _shares(opened)
    parts = grouped([(name, shares.get(name, 0.0)) for name in all_layers if name in wanted], groups)
    settled = dataclasses.replace(config, exclude_nodes=(), exclude_types=(), exclude_patterns=(), heads=True)
    digest = digest_of(
        [
            version_of("trt-engine"), opened.digest, _digest_of_dataset(listed), vision.as_dict(), to,
            msgspec.to_builtins(dataclasses.asdict(settled)), _digest_of_data(Path(data)), subset, seed, batch,
            msgspec.to_builtins(dataclasses.asdict(runtime)),
        ]
    )  # fmt: skip
    folder = Path(out)
    _may_write(folder, digest, yes)
    inputs = _readable(opened, vision, data)
    mixture = Mixture(
        model=opened,
        to=to,
        layers=all_layers,
        config=settled,
        calibration=Calibration(data, inputs, folder / f"calibration-{digest}.json"),
        dataset=listed,
        vision=vision,
        folder=folder,
        batch=batch,
        seed=seed,
        runtime=runtime,
    )
    named = str(preprocess) if isinstance(preprocess, str | Path) else None
    return Plan(opened, to, budget, tuple(parts), mixture, listed, vision, subset, digest, folder, command, named)


def run(planned: Plan) -> SearchReport:
    """Measure, choose, verify on the whole dataset, and write the list of layers that stay in float."""
    began = time.monotonic()
    ensure_folder(planned.out)
    trials = Trials(
        planned.out / TRIALS,
        planned.digest,
        planned.mixture,
        subset=planned.subset,
        images=len(planned.dataset.items),
        expected=planned.expected,
    )
    log.info(
        "%d layers in %d groups to %s; %s may drop by %g; at most about %d measurements",
        sum(len(group.nodes) for group in planned.groups), len(planned.groups), planned.to, planned.metric,
        planned.budget, planned.expected,
    )  # fmt: skip
    try:
        base = trials.trial((), "whole", "baseline")
        if not math.isfinite(base.metric) or base.metric <= 0:
            raise UsageError(
                f"the model's own {planned.metric} on `{planned.dataset.path}` is {base.metric:g}: there is nothing to keep",
                hint="look at its declared pre- and post-processing with `trt-engine evaluate`",
            )
        found = select(planned.groups, trials, planned.budget)
        final = trials.trial(found.chosen, "whole", "verified")
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"the search was stopped after {len(trials.made)} measurements, which are in `{trials.path}`",
            hint="the same command goes on from there",
        ) from error
    report = _report(planned, trials, found, base, final, time.monotonic() - began)
    _write(planned, report)
    return report


# ------------------------------------------------------------------------------------------------ before


def _check(to: str, budget: float, subset: int, groups: int | None, config: QuantizeConfig) -> None:
    if to not in FORMATS:
        raise UsageError(f"cannot search for `{to}`", hint="expected " + " or ".join(f"`{name}`" for name in FORMATS))
    format_named(to)
    if not 0 <= budget < math.inf:
        raise UsageError(f"the budget is {budget}, expected 0 or more", hint="`--budget 0.01` is one point of AP")
    if subset < 1:
        raise UsageError(f"the subset is {subset}, expected 1 or more", hint=f"as {_SUBSET}")
    if groups is not None and groups < 1:
        raise UsageError(f"{groups} groups, expected 1 or more", hint="leave it out: every layer is one")
    if config.weights_only or config.convolutions or config.block is not None or config.method != "rtn":
        raise UsageError("these settings are for formats with blocks", hint=f"they do not belong to `{to}`")


def _readable(model: Model, vision: Vision, data: Path | str) -> CalibrationInputs:
    """The calibration data as the model's inputs, and the first of it read: calibration comes after a measurement."""
    inputs = inputs_of(model, data, vision)
    if data != "random":
        next(iter(open_samples(inputs.data, model.signature, limit=1)), None)
    return inputs


def _shares(model: Model) -> dict[str, float]:
    """Each node's share of the multiply-adds, by its label."""
    macs: dict[str, int] = defaultdict(int)
    for layer in layers_of(read_proto(model.path)):
        macs[walk.label(layer.step.node)] += layer.macs
    total = sum(macs.values())
    return {name: value / total for name, value in macs.items()} if total else {}


def _digest_of_dataset(dataset: Dataset) -> str:
    """Which pictures, how large their files, and what is true about them; no picture is decoded for it."""
    total = hashlib.sha256()
    for item in dataset.items:
        size = item.path.stat().st_size if item.path is not None else 0
        total.update(json_bytes([item.name, item.image_id, item.label, size]))
    total.update(json_bytes([dataset.kind, dataset.categories, dataset.truth, dataset.labels]))
    if dataset.arrays is not None:
        total.update(dataset.arrays.tobytes())
    return total.hexdigest()


def _digest_of_data(data: Path) -> list[list[Any]]:
    """Names, sizes and times of the calibration files: changed files make another search."""
    if not data.exists():  # `random`, or an error that `quantize` tells better
        return [[str(data)]]
    files = sorted(item for item in data.rglob("*") if item.is_file()) if data.is_dir() else [data]
    return [[item.name, item.stat().st_size, item.stat().st_mtime_ns] for item in files]


def _may_write(folder: Path, digest: str, yes: bool) -> None:
    """`UsageError` for a folder with the answer to another question; one's own is gone on with."""
    path = folder / REPORT
    if yes or not path.exists():
        return
    try:
        mine = msgspec.json.decode(path.read_bytes()).get("digest") == digest
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        mine = False
    if not mine:
        raise UsageError(
            f"`{path}` is of another search (model, dataset, calibration or settings differ)",
            hint="`--yes` overwrites it, or name another folder with `-o`; measurements are kept either way",
        )


# ------------------------------------------------------------------------------------------------ after


def _report(
    planned: Plan, trials: Trials, found: Selection, base: SearchTrial, final: SearchTrial, seconds: float
) -> SearchReport:
    excluded = planned.mixture.excluded(final.nodes)
    paths = {
        "trials": str(trials.path), "exclude": str(planned.out / EXCLUDE), "report": str(planned.out / REPORT),
    }  # fmt: skip
    modules = ModulePaths(read_proto(planned.model.path))
    warnings = []
    if not final.nodes:
        warnings.append(f"no layer can be quantised to {planned.to} without {planned.metric} dropping too far")
    if planned.subset < len(planned.dataset.items) and len(trials.made) > 2:
        log.debug("costs were measured on %d of %d pictures", planned.subset, len(planned.dataset.items))
    device = planned.mixture.runtime.device or "cpu"
    return SearchReport(
        model=str(planned.model.path),
        digest=planned.digest,
        to=planned.to,
        dataset=str(planned.dataset.path),
        metric=planned.metric,
        budget=planned.budget,
        baseline=base.metric,
        found=final.metric,
        drop=base.metric - final.metric,
        quantized=final.nodes,
        excluded=excluded,
        macs=final.macs,
        nbytes_before=base.nbytes,
        nbytes=final.nbytes,
        images=final.images,
        subset=min(planned.subset, len(planned.dataset.items)),
        groups=tuple(
            SearchGroup(
                group.nodes,
                group.macs,
                found.drops.get(group),
                group in found.chosen,
                tuple(map(modules.of, group.nodes)),
            )
            for group in sorted(planned.groups, key=lambda item: -found.drops.get(item, 0.0))
        ),
        points=_points(trials.made),
        trials=len(trials.made),
        measured=trials.measured,
        next_command=_quantize_command(planned, final.nodes, excluded),
        environment=Environment.here(parse_device(device)[1] if device.startswith("cuda") else None),
        seconds=seconds,
        artifacts=paths,
        warnings=tuple(warnings),
    )


def _points(trials: Sequence[SearchTrial]) -> tuple[SearchPoint, ...]:
    """Every mixture, most pictures and largest share first, with those marked that no other beats in both."""
    bases = {trial.images: trial.metric for trial in trials if not trial.nodes}
    points = []
    for trial in sorted(trials, key=lambda item: (-item.images, -item.macs, -item.metric)):
        beaten = any(
            other.images == trial.images
            and other.macs >= trial.macs
            and other.metric >= trial.metric
            and (other.macs, other.metric) != (trial.macs, trial.metric)
            for other in trials
        )
        points.append(
            SearchPoint(
                stage=trial.stage,
                layers=len(trial.nodes),
                macs=trial.macs,
                images=trial.images,
                metric=trial.metric,
                drop=bases[trial.images] - trial.metric,
                nbytes=trial.nbytes,
                batch=trial.batch,
                latency_ms=summarize(trial.samples_ms),
                measured_on=trial.measured_on,
                pareto=not beaten,
            )
        )
    return tuple(points)


def _quantize_command(planned: Plan, nodes: Sequence[str], excluded: Sequence[str]) -> str | None:
    """What makes the model that was verified; None when there is none."""
    if not nodes:
        return None
    calibration, path = planned.mixture.calibration, planned.model.path
    typed = ["trt-engine", "quantize", str(path), "--to", planned.to, "--calibrate", str(calibration.data)]
    if planned.preprocess is not None and calibration.inputs.recorded is not None:
        typed += ["--preprocess", planned.preprocess]
    typed += ["--cache", str(calibration.cache), *words(planned.mixture.config)]
    if excluded:
        typed += ["--exclude-node", f"@{planned.out / EXCLUDE}"]
    return shlex.join([*typed, "-o", str(path.with_suffix(f".{planned.to}.onnx"))])


def _write(planned: Plan, report: SearchReport) -> None:
    write_whole(planned.out / EXCLUDE, "".join(f"{name}\n" for name in report.excluded))
    raw = msgspec.json.format(json_bytes(document("search", report, command=planned.command)), indent=2)
    write_whole(planned.out / REPORT, raw + b"\n")
    for warning in report.warnings:
        log.warning("%s", warning)

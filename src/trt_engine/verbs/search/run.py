"""`search`: find the layers that can be quantized within a budget of the task metric, by measurement.

`plan` validates and writes nothing; `run` measures. Each measurement is appended to `trials.jsonl`, so an interrupted run
can be resumed.
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
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from trt_engine.atomic_io import decode_json, encode_json, ensure_folder, read_bounded, write_atomic
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import QUANTIZE_DATA, QuantizeConfig, SearchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import replace_values, setting_names, to_argv
from trt_engine.device import parse_device
from trt_engine.environment import Environment, distribution_version
from trt_engine.errors import Interrupted, UsageError
from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import compute_layers
from trt_engine.graph.load import open_model
from trt_engine.graph.module_paths import ModulePaths
from trt_engine.model import Model
from trt_engine.precision.quantize_model import quantize
from trt_engine.precision.samples import open_samples
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.percentiles import summarize
from trt_engine.records.search import SearchGroup, SearchPoint, SearchReport, SearchTrial
from trt_engine.reporting.tables import batch_option
from trt_engine.verbs.build.precision import placement_target
from trt_engine.verbs.calibration_images import CalibrationInputs, images_as_inputs
from trt_engine.verbs.evaluate.run import resolve_spec
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.search.selection import LayerGroup, Selection, group_layers, max_trials, select
from trt_engine.verbs.search.trial import Calibration, MixedPrecision, TrialLog, json_digest
from trt_engine.vision.datasets import Dataset, open_dataset
from trt_engine.vision.spec import Vision

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import SearchSettings

log = logging.getLogger(__name__)

TRIALS_FILE, EXCLUDE_FILE, REPORT_FILE = "trials.jsonl", "exclude.txt", "search.json"


@public_function
@takes_model("model")
def search(
    model: AnyModel,
    dataset: Path | str,
    *,
    search: SearchConfig | None = None,
    config: QuantizeConfig | None = None,
    runtime: RuntimeConfig | None = None,
    **settings: Unpack[SearchSettings],
) -> SearchReport:
    """Find the largest part of `model` that can be quantized within a budget of the task metric.

    `settings` are those of `SearchConfig`. Needs a model that declares its pre- and post-processing, a labelled dataset, and
    `calib_data`. Raises `UsageError` for a dataset without labels, missing calibration data, or a metric that is 0 before
    the search; `Interrupted` after Ctrl-C: what was measured is in the log, and a later call resumes there.
    """
    return run(plan(on_disk(model), dataset, replace_values(search or SearchConfig(), settings), config, runtime))


@dataclass(frozen=True, slots=True)
class SearchJob:
    """A planned search: layers, measurement settings and output folder."""

    model: Model
    settings: SearchConfig
    groups: tuple[LayerGroup, ...]
    mixed_precision: MixedPrecision
    dataset: Dataset
    vision: Vision
    digest: str
    """Digest of everything that a measurement depends on."""
    out: Path
    command: str

    @property
    def metric(self) -> str:
        return MAIN_METRIC[self.vision.postprocess.task]

    @property
    def max_measurements(self) -> int:
        """Approximate maximum number of measurements."""
        return max_trials(len(self.groups))


def plan(
    model: Path | str,
    dataset: Path | str,
    search: SearchConfig,
    config: QuantizeConfig | None = None,
    runtime: RuntimeConfig | None = None,
    *,
    command: str = "",
) -> SearchJob:
    """Plan a `search`; writes nothing."""
    runtime = runtime or RuntimeConfig()
    config = _quantize_config(search, config or QuantizeConfig(), runtime)
    opened = open_model(model)
    vision = resolve_spec(opened.path, search.preprocess)
    listed = open_dataset(dataset)
    if not listed.labelled:
        raise UsageError(f"`{listed.path}` has no labels to measure by", hint="annotations, or an .npz with `labels`")
    if search.calib_data is None:
        raise UsageError(
            f"`{search.to}` needs the ranges of activations, and no calibration data is given",
            hint="`--calib-data DATA` (a folder, .npy, .npz) of what the network was trained on, not of the dataset",
        )
    all_layers, groups = _layer_groups(opened, search, config)
    settled = dataclasses.replace(
        config, exclude_nodes=(), exclude_types=(), exclude_patterns=(), quantize_outputs=True
    )
    settings = [
        search.to,
        {name: getattr(settled, name) for name in sorted(setting_names(settled) - {*QUANTIZE_DATA})},
        _calibration_digest(Path(search.calib_data)),
        search.subset,
        search.seed,
        search.batch,
        dataclasses.asdict(runtime),
    ]
    digest = json_digest(
        [distribution_version("trt-engine"), opened.digest, _dataset_digest(listed), vision.as_dict(), *settings]
    )
    folder = search.out or Path(f"{opened.path.stem}.search")
    _check_output(folder, digest, search)
    mixture = MixedPrecision(
        model=opened,
        to=search.to,
        layers=all_layers,
        config=settled,
        calibration=Calibration(
            search.calib_data,
            _open_calibration(opened, vision, search.calib_data),
            folder / f"calibration-{digest}.json",
        ),
        dataset=listed,
        vision=vision,
        folder=folder,
        batch=search.batch,
        seed=search.seed,
        runtime=runtime,
    )
    return SearchJob(opened, search, groups, mixture, listed, vision, digest, folder, command)


def _quantize_config(search: SearchConfig, config: QuantizeConfig, runtime: RuntimeConfig) -> QuantizeConfig:
    """The settings of every quantisation, for the library that measures unless another is named."""
    if config.weights_only or config.emulate_convs or config.block_size is not None or config.method != "rtn":
        raise UsageError("these settings are for formats with blocks", hint=f"they do not belong to `{search.to}`")
    target = search.target
    if target is None and config.target == QuantizeConfig().target:
        target = placement_target(BuildConfig(device=runtime.device or "", providers=runtime.providers), search.to)
    return dataclasses.replace(config, target=target or config.target)


def run(job: SearchJob) -> SearchReport:
    """Measure, select, verify on the whole dataset, and write the list of excluded layers."""
    began = time.monotonic()
    ensure_folder(job.out)
    trials = TrialLog(
        job.out / TRIALS_FILE,
        job.digest,
        job.mixed_precision,
        subset=job.settings.subset,
        images=len(job.dataset.items),
        expected=job.max_measurements,
    )
    log.info(
        "%d layers in %d groups to %s; %s may drop by %g; at most about %d measurements",
        sum(len(group.nodes) for group in job.groups), len(job.groups), job.settings.to, job.metric,
        job.settings.budget, job.max_measurements,
    )  # fmt: skip
    try:
        base = trials.trial((), "whole", "baseline")
        if not math.isfinite(base.metric) or base.metric <= 0:
            raise UsageError(
                f"the model's own {job.metric} on `{job.dataset.path}` is {base.metric:g}, expected above 0",
                hint="check its declared pre- and post-processing with `trt-engine evaluate`",
            )
        found = select(job.groups, trials, job.settings.budget)
        final = trials.trial(found.chosen, "whole", "verified")
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"the search was stopped after {len(trials.trials)} measurements, which are in `{trials.path}`",
            hint="run the same command to resume",
        ) from error
    report = _make_report(job, trials, found, base, final, time.monotonic() - began)
    _write_files(job, report)
    return report


# ------------------------------------------------------------------------------------------------ before


def _layer_groups(
    model: Model, search: SearchConfig, config: QuantizeConfig
) -> tuple[tuple[str, ...], tuple[LayerGroup, ...]]:
    """All layers that can be quantized, and the groups of those that `config` does not exclude."""
    every = QuantizeConfig(target=config.target, quantize_outputs=True, parity=False)
    layers = quantize(model, search.to, config=every, dry_run=True).quantized
    wanted = {item.node for item in quantize(model, search.to, config=config, dry_run=True).quantized}
    names = tuple(dict.fromkeys(item.node for item in layers))
    shares = _mac_shares(model)
    groups = group_layers([(name, shares.get(name, 0.0)) for name in names if name in wanted], search.max_groups)
    return names, tuple(groups)


def _open_calibration(model: Model, vision: Vision, calib_data: Path | str) -> CalibrationInputs:
    """Open the calibration data and read its first sample, before the first measurement."""
    inputs = images_as_inputs(model, calib_data, vision)
    if calib_data != "random":
        next(iter(open_samples(inputs.calib_data, model.signature, limit=1)), None)
    return inputs


def _mac_shares(model: Model) -> dict[str, float]:
    """Fraction of MACs by node label."""
    macs: dict[str, int] = defaultdict(int)
    for layer in compute_layers(model.proto):
        macs[walk.label(layer.step.node)] += layer.macs
    total = sum(macs.values())
    return {name: value / total for name, value in macs.items()} if total else {}


def _dataset_digest(dataset: Dataset) -> str:
    """Digest of image names, file sizes and ground truth, without decoding."""
    total = hashlib.sha256()
    for item in dataset.items:
        size = item.path.stat().st_size if item.path is not None else 0
        total.update(encode_json([item.name, item.image_id, item.label, size]))
    total.update(encode_json([dataset.kind, dataset.categories, dataset.ground_truth, dataset.labels]))
    if dataset.arrays is not None:
        total.update(dataset.arrays.tobytes())
    return total.hexdigest()


def _calibration_digest(data: Path) -> list[list[Any]]:
    """Names, sizes and times of the calibration files."""
    if not data.exists():  # `random`, or an error that `quantize` reports
        return [[str(data)]]
    files = sorted(item for item in data.rglob("*") if item.is_file()) if data.is_dir() else [data]
    return [[item.name, item.stat().st_size, item.stat().st_mtime_ns] for item in files]


def _check_output(folder: Path, digest: str, search: SearchConfig) -> None:
    """Raise `UsageError` if the folder contains the report of another search or budget; the same search is resumed."""
    path = folder / REPORT_FILE
    if search.overwrite or not path.exists():
        return
    try:
        written = decode_json(read_bounded(path))
        mine, budget = written.get("digest") == digest, written.get("budget")
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        mine, budget = False, None
    if mine and budget != search.budget:
        raise UsageError(
            f"`{path}` is of the budget {budget:g}, now it is {search.budget:g}",
            hint="`--overwrite` overwrites it, or name another folder with `-o`; measurements are kept either way",
        )
    if not mine:
        raise UsageError(
            f"`{path}` is of another search (model, dataset, calibration or settings differ)",
            hint="`--overwrite` overwrites it, or name another folder with `-o`; measurements are kept either way",
        )


# ------------------------------------------------------------------------------------------------ after


def _make_report(
    job: SearchJob, trials: TrialLog, selection: Selection, base: SearchTrial, final: SearchTrial, seconds: float
) -> SearchReport:
    excluded = job.mixed_precision.excluded_nodes(final.nodes)
    paths = {
        "trials": str(trials.path), "exclude": str(job.out / EXCLUDE_FILE), "report": str(job.out / REPORT_FILE),
    }  # fmt: skip
    modules = ModulePaths(job.model.proto)
    warnings = []
    if not final.nodes:
        warnings.append(f"no layer can be quantised to {job.settings.to} without {job.metric} dropping too far")
    times = slowdown(base, final) if final.nodes and job.settings.target is None else 0.0
    if keep_original := times > _NO_FASTER and times != 1:
        pace = "slower" if times > 1 / _NO_FASTER else "no faster"
        warnings.append(
            f"the result is {pace} than the original here: {times:.2f}x its time by the median of the trials; keep the "
            "original for this device, or name another one with `--target`"
        )
    if job.settings.subset < len(job.dataset.items) and len(trials.trials) > 2:
        log.debug("costs were measured on %d of %d images", job.settings.subset, len(job.dataset.items))
    device = job.mixed_precision.runtime.device or "cpu"
    return SearchReport(
        model=str(job.model.path),
        digest=job.digest,
        to=job.settings.to,
        dataset=str(job.dataset.path),
        metric=job.metric,
        budget=job.settings.budget,
        baseline=base.metric,
        metric_value=final.metric,
        drop=base.metric - final.metric,
        quantized=final.nodes,
        excluded=excluded,
        macs=final.macs,
        nbytes_before=base.nbytes,
        nbytes=final.nbytes,
        images=final.images,
        subset=min(job.settings.subset, len(job.dataset.items)),
        groups=tuple(
            SearchGroup(
                group.nodes,
                group.macs,
                selection.drops.get(group),
                group in selection.chosen,
                tuple(map(modules.path_of, group.nodes)),
            )
            for group in sorted(job.groups, key=lambda item: -selection.drops.get(item, 0.0))
        ),
        points=_search_points(trials.trials),
        trials=len(trials.trials),
        new_trials=trials.measured,
        next_command=f"trt-engine build {shlex.quote(str(job.model.path))}{batch_option(str(job.model.path), batch=False)}"
        if keep_original
        else _quantize_command(job, final.nodes, excluded),
        environment=Environment.detect(parse_device(device)[1] if device.startswith("cuda") else None),
        seconds=seconds,
        artifacts=paths,
        warnings=tuple(warnings),
    )


_NO_FASTER = 0.95
"""Share of the original's time: trials are measured one after another, and a smaller gain is none."""


def slowdown(base: SearchTrial, other: SearchTrial) -> float:
    """Median time of `other` over that of `base`; 1 where they were not measured alike."""
    first, second = summarize(base.samples_ms), summarize(other.samples_ms)
    emulated = "emulation" in (base.measured_on, other.measured_on)
    if first is None or second is None or not first.median or emulated or base.batch != other.batch:
        return 1.0
    return second.median / first.median


def _search_points(trials: Sequence[SearchTrial]) -> tuple[SearchPoint, ...]:
    """All measured sets, most images and largest share first, with the Pareto-optimal ones marked."""
    bases = {trial.images: trial.metric for trial in trials if not trial.nodes}
    points = []
    for trial in sorted(trials, key=lambda item: (-item.images, -item.macs, -item.metric)):
        beaten = any(
            other.images == trial.images
            and other.macs >= trial.macs
            and other.metric >= trial.metric
            and (other.macs, other.metric) != (trial.macs, trial.metric)
            and not slowdown(trial, other) > 1
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


def _quantize_command(job: SearchJob, nodes: Sequence[str], excluded: Sequence[str]) -> str | None:
    """The command that writes the verified model, or None."""
    if not nodes:
        return None
    calibration, path = job.mixed_precision.calibration, job.model.path
    typed = ["trt-engine", "quantize", str(path), "--to", job.settings.to, "--calib-data", str(calibration.data)]
    if isinstance(job.settings.preprocess, str | Path) and calibration.inputs.provenance is not None:
        typed += ["--preprocess", str(job.settings.preprocess)]
    typed += ["--cache", str(calibration.cache), *to_argv(job.mixed_precision.config)]
    if excluded:
        typed += ["--exclude-node", f"@{job.out / EXCLUDE_FILE}"]
    return shlex.join([*typed, "-o", str(path.with_suffix(f".{job.settings.to}.onnx"))])


def _write_files(job: SearchJob, report: SearchReport) -> None:
    write_atomic(job.out / EXCLUDE_FILE, "".join(f"{name}\n" for name in report.excluded))
    write_document(job.out / REPORT_FILE, "search", report, command=job.command)
    for warning in report.warnings:
        log.warning("%s", warning)

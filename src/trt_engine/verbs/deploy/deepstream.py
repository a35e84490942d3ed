"""`deploy deepstream`: nvinfer's configuration as key file and YAML, labels, and a pipeline for deepstream-app.

Keys of the pipeline: "DeepStream Reference Application - deepstream-app" of NVIDIA's DeepStream documentation. Those of
nvinfer are made by `nvinfer_keys`, which `size` prints too.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from trt_engine.atomic_io import read_bounded
from trt_engine.config.streams import BatchPolicy
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.errors import SetupError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.records.deploy import DeployedModel, DeployedSetting, PreprocessDifference
from trt_engine.records.streams import StreamCapacity
from trt_engine.reporting.size import nvinfer_lines
from trt_engine.runtime.batch_rows import BatchLayout
from trt_engine.tensors import Shape, Signature
from trt_engine.verbs.deploy import nvinfer_preprocess
from trt_engine.verbs.deploy.config import DeepstreamConfig
from trt_engine.verbs.deploy.job import DeployJob, Written
from trt_engine.verbs.deploy.measured import MeasuredRun, match_runs, read_runs
from trt_engine.verbs.nvinfer_keys import NvinferConfig, nvinfer_config
from trt_engine.verbs.serve.run import name_engines
from trt_engine.vision.spec import Vision, resolve_vision, vision_of, vision_of_model

NVINFER_FILE, NVINFER_YAML = "config_infer_primary.txt", "config_infer_primary.yml"
APP_FILE, LABELS_FILE = "deepstream_app_config.txt", "labels.txt"
_PLAN_BACKENDS = ("tensorrt", "trtexec")
_SAMPLE = "file:///opt/nvidia/deepstream/deepstream/samples/streams/sample_1080p_h264.mp4"
_DEFAULT_FPS = 30.0
_SECONDARY_ROWS = 16
_SECONDARY_BATCH = f"up to {_SECONDARY_ROWS} objects of a batch of frames at once"
_NOT_MEASURED = "not measured: `trt-engine size MODEL --deadline-ms MS -o DIR`, then `--sized DIR`"

log = logging.getLogger(__name__)

Groups = dict[str, dict[str, str]]
"""Keys of a key file, by group."""


@dataclass(slots=True)
class _Source:
    """What is deployed: an engine, or the model that nvinfer builds."""

    name: str
    thing: Engine | Model
    signature: Signature
    shapes: dict[str, Shape]
    """Opt shapes, where the engine has a profile."""
    vision: Vision | None
    max_batch: int | None
    """None where any batch can be built."""
    precision: str


@dataclass(slots=True)
class _Sizing:
    """Streams, batch, timeout and interval, each with where it comes from."""

    streams: int = 1
    batch: int = 1
    timeout_us: int = 0
    interval: int = 0
    settings: list[DeployedSetting] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write(job: DeployJob) -> Written:
    """Stage the configurations and the engines or models."""
    config: DeepstreamConfig = job.config
    ((name, path),) = job.sources.items()
    source = _open(name, path, job.engines.get(name), config)
    run = _measured_run(job, config)
    sizing = _size(source, config, run)
    first = _write_network(job, source, sizing.batch, config, {"process-mode": "1", "interval": str(sizing.interval)})
    differences, notes = _differences(first.keys, source, config)
    groups = _pipeline(sizing, config, first.keys)
    deployed = [_deployed(job, source, tuple(sizing.settings), (*_without_warning(first), *sizing.notes, *notes))]
    warnings = [first.warning]
    for number, second in enumerate(config.secondary, start=2):
        made, network = _write_secondary(job, second, number, sizing, config)
        keys = made.keys
        groups[f"secondary-gie{number - 2}"] = {
            "enable": "1", "gpu-id": "0", "gie-unique-id": keys["gie-unique-id"],
            "operate-on-gie-id": keys["operate-on-gie-id"], "batch-size": keys["batch-size"],
            "model-engine-file": keys["model-engine-file"], "config-file": _file_name(NVINFER_FILE, number),
            **({"labelfile-path": keys["labelfile-path"]} if "labelfile-path" in keys else {}),
        }  # fmt: skip
        settings = (DeployedSetting("batch-size", keys["batch-size"], _SECONDARY_BATCH),)
        deployed.append(_deployed(job, network, settings, _without_warning(made)))
        warnings.append(made.warning)
    job.write(APP_FILE, format_groups(groups))
    command = shlex.join(["deepstream-app", "-c", str(job.out / APP_FILE)])
    said = tuple(warning for warning in warnings if warning is not None)
    for warning in said:
        log.warning("%s", warning)
    return Written(tuple(deployed), command, notes=said, preprocessing=tuple(differences))


def _write_network(
    job: DeployJob, source: _Source, batch: int, config: DeepstreamConfig, more: dict[str, str], number: int = 1
) -> NvinferConfig:
    """Stage one network with its configuration and labels; the keys written."""
    files = _copy_source(job, source, batch, config)
    classes = source.vision.postprocess.classes if source.vision is not None else ()
    labels = _file_name(LABELS_FILE, number)
    made = nvinfer_config(
        source.signature, source.shapes, source.vision, **files, batch=batch, precision=source.precision,
        labels_file=labels if classes else None, gie_id=number,
    )  # fmt: skip
    if not made.keys:
        raise UsageError(
            f"`{source.name}` has no image input, which nvinfer needs (four dimensions, 1, 3 or 4 channels)",
            hint="`--preprocess` declares one; for other inputs: Gst-nvdspreprocess",
        )
    keys = made.keys | more
    job.write(_file_name(NVINFER_FILE, number), _key_file(keys, made))
    job.write(_file_name(NVINFER_YAML, number), _yaml_file(keys, made))
    if classes:
        job.write(labels, _labels(classes, keys["network-type"]))
    return replace(made, keys=keys)


def _write_secondary(
    job: DeployJob, path: Path, number: int, sizing: _Sizing, config: DeepstreamConfig
) -> tuple[NvinferConfig, _Source]:
    """A network that gets the objects of the first one, cut from the frames."""
    ((name, found),) = name_engines([path]).items()
    if name in job.sources:
        raise UsageError(
            f"two networks are named `{name}`", hint=f"`--secondary` of a file with another name: `{path}`"
        )
    engine = None if is_onnx_model(found) else Engine.open(found)
    job.sources[name] = found
    if engine is not None:
        engine.verify()
        job.engines[name] = engine
    source = _open(name, found, engine, replace(config, preprocess=None))
    batch = min(source.max_batch or _SECONDARY_ROWS, _SECONDARY_ROWS) if source.signature.batch_axis else 1
    more = {"process-mode": "2", "operate-on-gie-id": "1"}
    return _write_network(job, source, batch, config, more, number), source


def _deployed(
    job: DeployJob, source: _Source, settings: tuple[DeployedSetting, ...], notes: tuple[str, ...]
) -> DeployedModel:
    backend = source.thing.passport.backend if isinstance(source.thing, Engine) else None
    return DeployedModel(source.name, str(job.sources[source.name]), job.digest(source.name), backend, settings, notes)


def _without_warning(made: NvinferConfig) -> tuple[str, ...]:
    return tuple(note for note in made.notes if note != made.warning)


def _file_name(name: str, number: int) -> str:
    """The file of the first network, or of another one: `config_infer_secondary2.txt`, `labels2.txt`."""
    if number == 1:
        return name
    stem, _, suffix = name.partition(".")
    return f"{stem.replace('primary', 'secondary')}{number}.{suffix}"


def _open(name: str, path: Path, engine: Engine | None, config: DeepstreamConfig) -> _Source:
    if engine is None:
        model = open_model(path)
        vision = vision_of_model(model)
        source = _Source(name, model, model.signature, {}, vision, None, config.precision)
        if not model.signature.batch_axis:
            source.max_batch = max((spec.shape[0] for spec in model.signature.inputs if spec.shape), default=1)
    else:
        passport = engine.passport
        if passport.backend not in _PLAN_BACKENDS:
            raise UsageError(
                f"nvinfer cannot load `{path.name}`, an engine of {passport.backend}",
                hint=f"its model (`{passport.model.file}`), which nvinfer builds, or an engine of "
                "`trt-engine build MODEL --backend tensorrt`",
            )
        shapes = {item: span.opt for item, span in passport.profiles[0].ranges.items()} if passport.profiles else {}
        precision = passport.precision.requested or passport.precision.main_dtype or "fp16"
        source = _Source(
            name, engine, engine.signature, shapes, vision_of(engine), _max_batch(engine), precision
        )  # fmt: skip
    if config.preprocess is not None:
        source.vision = resolve_vision(config.preprocess, source.signature, source.vision)
    return source


def _max_batch(engine: Engine) -> int:
    spans = [span for profile in engine.passport.profiles[:1] for span in profile.ranges.values() if span.min]
    smallest = max((span.min[0] for span in spans), default=1)
    if (reason := engine.signature.row_dependence) is not None and smallest > 1:
        raise UsageError(
            f"`{engine.path.name}` has no result for each frame of a batch: {reason}", hint="build it for a batch of 1"
        )
    try:
        return BatchLayout.from_signature(engine.signature, engine.passport.profiles).max_rows or 1
    except UsageError:
        return 1


def _measured_run(job: DeployJob, config: DeepstreamConfig) -> MeasuredRun | None:
    """The run that measured the engine; of a model, the run that is given."""
    if len(config.sized) > 1:
        raise UsageError("several `size` runs are given for one engine", hint="one `--sized DIR`")
    if job.engines:
        return next(iter(match_runs(config.sized, job.engines).values()), None)
    return next(iter(read_runs(config.sized)), None)


def _size(source: _Source, config: DeepstreamConfig, run: MeasuredRun | None) -> _Sizing:
    """Streams, batch, timeout and interval, as requested, measured, or usual."""
    made, reason = _Sizing(), _NOT_MEASURED
    capacity = run.capacity if run is not None else None
    if run is not None:
        reason = f"`{run.folder}`: " + (
            f"{capacity.streams} streams within {capacity.deadline_ms:g} ms"
            if capacity is not None
            else "peak streams by compute alone, without a deadline"
        )
        made.streams = (capacity.streams if capacity is not None else run.report.peak_streams) or 1
    measured = reason
    if config.streams is not None or (run is None and config.source):
        made.streams, reason = config.streams or len(config.source), "as requested"
    fps, batch, why = _DEFAULT_FPS, made.streams, "one frame of each source" if run is None else measured
    timeout_us, why_timeout = round(1e6 / fps), f"one frame's time at {fps:g} frames/s; {_NOT_MEASURED}"
    if capacity is not None:
        assert run is not None
        policy = capacity.policy
        if policy.contexts > 1:
            note = f"{capacity.streams} streams were sized with {policy.contexts} contexts"
            found = _one_context(run.folder, capacity)
            if found is None:
                made.notes.append(f"{note}, nvinfer has one and serves fewer: `--contexts 1` of `size`")
            else:
                policy, one = found
                made.notes.append(f"{note}; with the one context of nvinfer: {one}")
                measured = f"`{run.folder}`: {one} streams within {capacity.deadline_ms:g} ms with one context"
                if config.streams is None:
                    made.streams, reason = max(one, 1), measured
        cameras = run.report.video
        if cameras is not None and config.streams is None and cameras.streams < made.streams:
            made.streams = max(cameras.streams, 1)
            reason = f"`{run.folder}`: {cameras.streams} cameras over the whole path; limit {cameras.limit}"
        batch, timeout_us, why = policy.max_batch, round(policy.max_wait_ms * 1e3), measured
        made.interval, why_timeout = capacity.interval, measured
    elif run is not None:
        batch, timeout_us = min(run.best_batch, made.streams), round(1e6 / run.report.fps)
        why_timeout = f"one frame's time at {run.report.fps:g} frames/s: no deadline was sized"
    if source.max_batch is not None and (batch > source.max_batch or not source.signature.batch_axis):
        batch, why = source.max_batch, source.signature.row_dependence or "the engine's batch"
    made.batch, made.timeout_us = max(batch, 1), timeout_us
    made.settings += [
        DeployedSetting("sources", str(made.streams), reason),
        DeployedSetting("batch-size", str(made.batch), why),
        DeployedSetting("batched-push-timeout", str(made.timeout_us), why_timeout),
        DeployedSetting("interval", str(made.interval), measured if capacity is not None else "every frame"),
    ]
    return made


def _one_context(folder: Path, capacity: StreamCapacity) -> tuple[BatchPolicy, int] | None:
    """The policy with one context and the streams it serves, by the curve of the run; None where that is not there."""
    if capacity.crops or not (folder / "curve.jsonl").is_file():
        return None
    from trt_engine.verbs.size.stream_capacity import one_context

    return one_context(folder / "curve.jsonl", capacity)


def _copy_source(job: DeployJob, source: _Source, batch: int, config: DeepstreamConfig) -> dict[str, Any]:
    """Stage the engine, or the model with its side files; the files by keyword of `nvinfer_config`."""
    if isinstance(source.thing, Engine):
        job.copy_engine(source.thing, f"{source.name}.engine")
        return {"onnx_file": None, "engine_file": f"{source.name}.engine"}
    model = source.thing
    job.copy_file(model.path, model.path.name)
    for item in model.external:
        job.copy_file(item.path, item.location)
    # the name that nvinfer itself gives the engine it builds
    return {"onnx_file": model.path.name, "engine_file": f"{model.path.name}_b{batch}_gpu0_{config.precision}.engine"}


def _differences(
    keys: Mapping[str, str], source: _Source, config: DeepstreamConfig
) -> tuple[list[PreprocessDifference], list[str]]:
    """Differences of the configuration written, and of the one to check; a note where it cannot be compared."""
    given = nvinfer_preprocess.read_keys(config.check) if config.check is not None else None
    if source.vision is None:
        hint = "declare it, or give `--preprocess` (`trt-engine docs vision`)"
        if given is not None:
            raise UsageError("`--check` needs the model's own pre-processing, which it does not declare", hint=hint)
        return [], [f"pre-processing is not compared: the model declares none; {hint}"]
    try:
        image = _read_image(config)
        checked = [(NVINFER_FILE, keys), *([(str(config.check), given)] if given is not None else [])]
        name = str(config.image) if config.image is not None else "test image"
        found = [
            nvinfer_preprocess.compare(one, source.vision.preprocess, image, file=file, image=name)
            for file, one in checked
        ]
        if given is not None and config.check is not None:
            more = _other_findings(given, keys, config.check, source.vision.postprocess.classes)
            found[-1] = replace(found[-1], findings=(*found[-1].findings, *more))
    except SetupError as error:  # pillow is not installed
        if given is not None or config.image is not None:
            raise
        return [], [f"pre-processing is not compared: {error.message}; {error.hint}"]
    return found, []


_CHECKED_KEYS = ("batch-size", "network-type", "num-detected-classes", "cluster-mode", "output-instance-mask")


def _other_findings(
    given: Mapping[str, str], written: Mapping[str, str], file: Path, classes: Sequence[str]
) -> list[str]:
    """Differences of a configuration's batch, classes and labels from those written."""
    usual = {"batch-size": "1", "network-type": "0", "output-instance-mask": "0"}
    found = []
    for name in _CHECKED_KEYS:
        mine, own = given.get(name, usual.get(name)), written.get(name, usual.get(name))
        if own is not None and mine != own:
            what = "is missing" if mine is None else f"is {mine}"
            found.append(
                f"{name} {what}, expected {own}" + (" (the batch deployed here)" if name == "batch-size" else "")
            )
    built = re.search(r"_b(\d+)_", given.get("model-engine-file", ""))
    if built is not None and built[1] != given.get("batch-size", "1"):
        found.append(f"model-engine-file is of batch {built[1]}, batch-size is {given.get('batch-size', 'missing')}")
    labels = given.get("labelfile-path")
    if labels is None or not classes:
        return found + (["labelfile-path is missing: objects have numbers for names"] if classes else [])
    try:
        text = read_bounded(file.parent / labels).decode("utf-8", "replace")
    except OSError as error:
        return [*found, f"labelfile-path `{labels}` cannot be read: {(error.strerror or str(error)).lower()}"]
    named = [
        part.strip() for part in (text.replace(";", "\n") if written["network-type"] == "1" else text).splitlines()
    ]
    named = [part for part in named if part]
    if len(named) != len(classes):
        found.append(f"`{labels}` has {len(named)} labels, the model {len(classes)} classes")
    else:
        moved = [f"{index} is {mine}, the model's is {own}" for index, (mine, own) in
                 enumerate(zip(named, _labels(classes, "0").splitlines(), strict=True)) if mine != own]  # fmt: skip
        if moved:
            found.append(f"`{labels}`: label {moved[0]}" + (f", and {len(moved) - 1} more" if len(moved) > 1 else ""))
    return found


def _read_image(config: DeepstreamConfig) -> Any:
    if config.image is None:
        return nvinfer_preprocess.sample_image()
    import numpy as np

    from trt_engine.vision.preprocess import open_image

    return np.asarray(open_image(config.image).convert("RGB"))


# ------------------------------------------------------------------------------------------------ files


def format_groups(groups: Mapping[str, Mapping[str, str]]) -> str:
    """A key file as GLib reads it."""
    return "\n".join(
        "\n".join([f"[{group}]", *(f"{name}={value}" for name, value in keys.items()), ""])
        for group, keys in groups.items()
    )


def _key_file(keys: Mapping[str, str], made: NvinferConfig) -> str:
    lines = nvinfer_lines(keys, made.notes)
    return "\n".join([*lines, ""]) + ("\n" + format_groups(made.class_groups) if made.class_groups else "")


def _yaml_file(keys: Mapping[str, str], made: NvinferConfig) -> str:
    """The same keys as YAML: numbers as numbers, lists of numbers with semicolons as text."""
    groups = {"property": dict(keys), **made.class_groups}
    plain = {group: {name: _plain(value) for name, value in found.items()} for group, found in groups.items()}
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text + "".join(f"# {note}\n" for note in made.notes)


def _plain(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _labels(classes: Sequence[str], network_type: str) -> str:
    """One class a line for a detector; for a classifier all on one line, with semicolons."""
    clean = [" ".join(name.replace(";", ",").split()) or "-" for name in classes]
    return (";".join(clean) if network_type == "1" else "\n".join(clean)) + "\n"


def _pipeline(sizing: _Sizing, config: DeepstreamConfig, keys: Mapping[str, str]) -> Groups:
    """Groups of deepstream-app: sources, muxer, nvinfer, and a sink that measures and shows nothing."""
    groups: Groups = {
        "application": {"enable-perf-measurement": "1", "perf-measurement-interval-sec": "5"},
        "tiled-display": {"enable": "0"},
    }
    uris = config.source or (_SAMPLE,)
    for index, uri in enumerate(uris[: sizing.streams]):
        live = uri.startswith("rtsp")
        share = sizing.streams // len(uris) + (index < sizing.streams % len(uris))
        for uri_of_one in [uri] * share if live else [uri]:  # `num-sources` repeats files alone
            groups[f"source{len(groups) - 2}"] = {
                "enable": "1", "type": "4" if live else "3", "uri": uri_of_one, "num-sources": str(1 if live else share),
                "gpu-id": "0",
            }  # fmt: skip
    live = any(uri.startswith("rtsp") for uri in uris)
    groups["streammux"] = {
        "gpu-id": "0", "live-source": str(int(live)), "batch-size": str(sizing.batch),
        "batched-push-timeout": str(sizing.timeout_us), "width": "1920", "height": "1080", "enable-padding": "0",
    }  # fmt: skip
    groups["primary-gie"] = {
        "enable": "1", "gpu-id": "0", "gie-unique-id": keys["gie-unique-id"], "batch-size": str(sizing.batch),
        "interval": str(sizing.interval), "model-engine-file": keys["model-engine-file"], "config-file": NVINFER_FILE,
    }  # fmt: skip
    if "labelfile-path" in keys:
        groups["primary-gie"]["labelfile-path"] = keys["labelfile-path"]
    groups["osd"] = {"enable": "0"}
    groups["sink0"] = {"enable": "1", "type": "1", "sync": str(int(live)), "gpu-id": "0"}
    groups["tests"] = {"file-loop": "0"}
    return groups

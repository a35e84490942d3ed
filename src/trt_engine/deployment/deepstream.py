"""`deploy deepstream`: nvinfer's configuration as key file and YAML, labels, and a pipeline for deepstream-app.

Keys of the pipeline: "DeepStream Reference Application - deepstream-app" of NVIDIA's DeepStream documentation. Those of
nvinfer are made by `sizing.deepstream`, which `size` prints too.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from trt_engine.config.deploy import DeepstreamConfig
from trt_engine.deployment import nvinfer_preprocess
from trt_engine.deployment.job import DeployJob, Written
from trt_engine.deployment.measured import MeasuredRun, match_runs, read_runs
from trt_engine.engine import Engine
from trt_engine.errors import SetupError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.records.deploy import DeployedModel, DeployedSetting, PreprocessDifference
from trt_engine.reporting.sections.size_sections import nvinfer_lines
from trt_engine.runtime.batch_rows import BatchLayout
from trt_engine.sizing.deepstream import NvinferConfig, nvinfer_config
from trt_engine.tensors import Shape, Signature
from trt_engine.vision.spec import Vision, resolve_vision, vision_of, vision_of_model

NVINFER_FILE, NVINFER_YAML = "config_infer_primary.txt", "config_infer_primary.yml"
APP_FILE, LABELS_FILE = "deepstream_app_config.txt", "labels.txt"
_PLAN_BACKENDS = ("tensorrt", "trtexec")
_SAMPLE = "file:///opt/nvidia/deepstream/deepstream/samples/streams/sample_1080p_h264.mp4"
_DEFAULT_FPS = 30.0
_NOT_MEASURED = "not measured: `trt-engine size MODEL --deadline-ms MS -o DIR`, then `--sized DIR`"

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


def write(job: DeployJob) -> Written:
    """Stage the configurations and the engine or model."""
    config: DeepstreamConfig = job.config
    source = _open(job, config)
    run = _measured_run(job, config)
    sizing = _size(source, config, run)
    files = _copy_source(job, source, sizing.batch, config)
    classes = source.vision.postprocess.classes if source.vision is not None else ()
    made = nvinfer_config(
        source.signature, source.shapes, source.vision, **files, batch=sizing.batch, precision=source.precision,
        labels_file=LABELS_FILE if classes else None,
    )  # fmt: skip
    if not made.keys:
        raise UsageError(
            f"`{source.name}` has no image input, which nvinfer needs (four dimensions, 1, 3 or 4 channels)",
            hint="`--preprocess` declares one; for other inputs: Gst-nvdspreprocess",
        )
    keys = dict(made.keys) | {"process-mode": "1", "interval": str(sizing.interval)}
    differences, notes = _differences(keys, source, config)
    job.write(NVINFER_FILE, _key_file(keys, made))
    job.write(NVINFER_YAML, _yaml_file(keys, made))
    if classes:
        job.write(LABELS_FILE, _labels(classes, made.keys["network-type"]))
    job.write(APP_FILE, format_groups(_pipeline(sizing, config, keys)))
    deployed = DeployedModel(
        source.name, str(job.sources[source.name]), job.digest(source.name),
        source.thing.passport.backend if isinstance(source.thing, Engine) else None, tuple(sizing.settings),
        (*made.notes, *notes),
    )  # fmt: skip
    command = shlex.join(["deepstream-app", "-c", str(job.out / APP_FILE)])
    return Written((deployed,), command, preprocessing=tuple(differences))


def _open(job: DeployJob, config: DeepstreamConfig) -> _Source:
    ((name, path),) = job.sources.items()
    engine = job.engines.get(name)
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
                hint=f"its model (`{passport.model.file}`), which nvinfer builds, or `--backend tensorrt`",
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
    if (reason := engine.signature.row_dependence) is not None and _smallest_batch(engine) > 1:
        raise UsageError(
            f"`{engine.path.name}` has no result for each frame of a batch: {reason}", hint="build it for a batch of 1"
        )
    try:
        return BatchLayout.from_signature(engine.signature, engine.passport.profiles).max_rows or 1
    except UsageError:
        return 1


def _smallest_batch(engine: Engine) -> int:
    sizes = [span.min[0] for profile in engine.passport.profiles[:1] for span in profile.ranges.values() if span.min]
    return max(sizes, default=1)


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
    made.settings.append(DeployedSetting("sources", str(made.streams), reason))
    fps, batch, why = _DEFAULT_FPS, made.streams, "one frame of each source" if run is None else measured
    timeout_us, why_timeout = round(1e6 / fps), f"one frame's time at {fps:g} frames/s; {_NOT_MEASURED}"
    if capacity is not None:
        batch, timeout_us = capacity.policy.max_batch, round(capacity.policy.max_wait_ms * 1e3)
        made.interval, why_timeout = capacity.interval, measured
    elif run is not None:
        batch, timeout_us = min(run.best_batch, made.streams), round(1e6 / run.report.fps)
        why_timeout = f"one frame's time at {run.report.fps:g} frames/s: no deadline was sized"
    if source.max_batch is not None and (batch > source.max_batch or not source.signature.batch_axis):
        batch, why = source.max_batch, source.signature.row_dependence or "the engine's batch"
    made.batch, made.timeout_us = max(batch, 1), timeout_us
    made.settings += [
        DeployedSetting("batch-size", str(made.batch), why),
        DeployedSetting("batched-push-timeout", str(made.timeout_us), why_timeout),
        DeployedSetting("interval", str(made.interval), measured if capacity is not None else "every frame"),
    ]
    return made


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
    """Of the configuration written, and of the one to check; a note where it cannot be compared."""
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
    except SetupError as error:  # pillow is not installed
        if given is not None or config.image is not None:
            raise
        return [], [f"pre-processing is not compared: {error.message}; {error.hint}"]
    return found, []


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

"""From the model that was given to the model that is built: cast or quantised first, where its graph is not what
`--precision` asks for (TensorRT 11 and ONNX Runtime take the precision from the graph alone)."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from trt_engine.backend import quant_target_of
from trt_engine.config import BuildConfig, QuantizeConfig, is_preset
from trt_engine.engine import NOT_FUSED, QUANT_TARGET
from trt_engine.errors import FeedError, PrecisionError
from trt_engine.files import digest
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.graph.findings import few
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.quant_placement import PlacedGraph
from trt_engine.graph.quant_target import quant_target
from trt_engine.model import Model
from trt_engine.precision.contract import Proof, prove
from trt_engine.precision.rules import check_strong_typing
from trt_engine.vision.declaration import read_json

__all__ = [
    "Prepared",
    "check_calibration",
    "check_data",
    "check_placement",
    "data_digest",
    "placed_for",
    "placement_target",
    "prepare",
    "preprocess_digest",
    "refuse_unpreparable",
]

log = logging.getLogger(__name__)

_CAST = ("fp16", "bf16")
_FLOATS = ("fp32", "tf32", *_CAST)
_WITHOUT_DATA = ("int4",)
"""Weights alone are quantised: nothing has to be calibrated."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The model to build, and what was done to it."""

    model: Model
    steps: tuple[str, ...] = ()
    """In words, for the passport; none for a model that is built as it was given."""
    notes: dict[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    """Nodes the preparation left as they were, on purpose."""


def refuse_unpreparable(model: Model, config: BuildConfig) -> None:
    """`PrecisionError` for a precision that needs calibration data nobody gave, before anything is spent."""
    asked, target = config.precision, quant_target_of(config)
    if asked is None or asked in _FLOATS:
        return
    proof = _proof(model, asked)
    if not proof.kept and target is not None and asked not in quant_target(target).formats:
        raise PrecisionError(
            f"{proof.describe()}; {quant_target(target).title} has no {asked} kernels to quantise it for",
            hint=f"build for a device that has {asked} kernels, or leave `--precision` out",
        )
    if not proof.kept and asked not in _WITHOUT_DATA and not config.calibrate:
        path = str(model.path)
        made = str(model.path.with_suffix(f".{asked}.onnx"))
        aimed = ["--target", target] if target is not None else []
        command = shlex.join(["trt-engine", "quantize", path, "--to", asked, *aimed, "--calibrate"])
        without = target is not None and asked == "int8" and quant_target(target).dynamic
        raise PrecisionError(
            proof.describe(),
            hint=f"give calibration data with `--calibrate DATA`, or quantise first: "
            f"`{command} DATA -o {shlex.quote(made)}`"
            + (" (`--dynamic` in place of `--calibrate DATA` needs no data, for MatMul and Gemm)" if without else ""),
        )


def check_data(data: str | None, preprocess: str | None = None) -> None:
    """`FeedError` for calibration data that is not there, `UsageError` for a file of pre-processing that is not."""
    if data is not None and data != "random" and not Path(data).exists():
        raise FeedError(f"no such file or folder `{data}`", hint="check the path of the data (`--calibrate`)")
    if preprocess is not None and not is_preset(preprocess):
        read_json(Path(preprocess))


def data_digest(data: str) -> str:
    """What calibration data holds, in one number: a file, or all files of a folder; `FeedError` if it cannot be read."""
    if data == "random":
        return data
    path = Path(data)
    try:
        if not path.is_dir():
            return digest(path)
        found = sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())
        whole = hashlib.sha256()
        for name in found:
            whole.update(f"{name}\0{digest(path / name)}\n".encode())
        return f"{len(found)} files {whole.hexdigest()}"
    except OSError as error:
        raise FeedError(
            f"the data `{data}` cannot be read: {error.strerror or error}", hint="check its rights"
        ) from error


def preprocess_digest(preprocess: str | None) -> str | None:
    """The preset's name, or what the file of pre-processing holds."""
    if preprocess is None or is_preset(preprocess):
        return preprocess
    return json.dumps(read_json(Path(preprocess)), sort_keys=True)


def check_calibration(model: Model, config: BuildConfig) -> str | None:
    """What to say of calibration data that this build has no use for; `FeedError` for data that is not there."""
    data, asked = config.calibrate, config.precision
    check_data(data, config.preprocess)
    if data is None:
        return f"`--preprocess {config.preprocess}` is not used without `--calibrate`" if config.preprocess else None
    unused = f"`--calibrate {data}` is not used"
    if asked is None:
        return f"{unused}: nothing is quantised unless `--precision` asks for it, as `--precision int8`"
    if asked in _FLOATS:
        return f"{unused}: `--precision {asked}` quantises nothing"
    return f"{unused}: the graph is {asked} already" if _proof(model, asked).kept else None


def placement_target(config: BuildConfig, to: str) -> str | None:
    """The target that a model is quantised for where these settings build it; None where that is open, and where the
    library has no kernels of that format, so that no placement is its own."""
    target = quant_target_of(config)
    return target if target is not None and to in quant_target(target).formats else None


def placed_for(model: Model, config: BuildConfig) -> str | None:
    """The target whose kernels the quantised layers of this build are for: of a graph that has some, or gets them; None for
    others."""
    asked = config.precision
    quantises = asked is not None and asked not in _FLOATS
    return quant_target_of(config) if quantises or PlacedGraph(read_proto(model.path)) else None


def check_placement(model: Model, config: BuildConfig) -> str | None:
    """What to say of a model whose quantised layers are placed for another library than will run them; `PrecisionError`
    where `--precision` asks for what its kernels cannot compute then. Nothing is built."""
    target, asked = quant_target_of(config), config.precision
    if target is None or asked == "fp32":
        return None
    placed = PlacedGraph(read_proto(model.path))
    said = placed.misfit(target)
    if said is None:
        return None
    hint = placed.remedy(target)
    if asked == placed.format and _proof(model, asked).kept:
        raise PrecisionError(
            f"asked for {asked}: {said}", hint=f"{hint}; or leave `--precision` out to build the graph as it is"
        )
    return f"{said} ({hint})"


def prepare(model: Model, config: BuildConfig, folder: Path) -> Prepared:
    """The model in the precision asked for: itself where it is that already, else a copy in `folder`."""
    target = quant_target_of(config)
    if target in _STRONGLY_TYPED:
        _say_typing(model)
    asked = config.precision
    if asked is None or asked in ("fp32", "tf32") or _proof(model, asked).kept:
        said = PlacedGraph(read_proto(model.path)).misfit(target) if target is not None else None
        return Prepared(model, notes={NOT_FUSED: said} if said is not None else {})
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / model.path.name
    return _cast(model, asked, made) if asked in _CAST else _quantize(model, asked, config, made, target)


_STRONGLY_TYPED = ("tensorrt", "tensorrt-rtx")


def _say_typing(model: Model) -> None:
    """Warn of what TensorRT's strong typing holds against the Q/DQ pairs of a model as it was brought."""
    proto = read_proto(model.path)
    if not any(is_quantize(place.node) or is_dequantize(place.node) for place in walk.nodes(proto)):
        return
    for finding in few(check_strong_typing(proto), 3):
        if finding.severity != "info":
            log.warning("%s: %s (%s)", finding.code, finding.message, finding.where)


def _proof(model: Model, asked: str) -> Proof:
    return prove(asked, read_proto(model.path))


def _cast(model: Model, to: str, target: Path) -> Prepared:
    from trt_engine.precision.cast import cast

    report = cast(model.path, to, out=target)
    made = open_model(target)
    step = f"cast to {to}: {report.nodes_cast} of {report.nodes} nodes, {len(report.kept)} kept in fp32"
    log.info("the graph is not %s: %s", to, step)
    notes = {"prepared": step, "prepared_digest": made.digest}
    if report.kept:
        notes["kept_in_fp32"] = ", ".join(f"{item.node} ({item.code})" for item in report.kept[:32])
    return Prepared(made, (step, *report.notes), notes)


def _quantize(model: Model, to: str, config: BuildConfig, out: Path, target: str | None) -> Prepared:
    from trt_engine.api.calibrating import quantize

    aimed = QuantizeConfig(target=target) if target is not None else None
    report = quantize(model, to, out=out, data=config.calibrate, preprocess=config.preprocess, config=aimed)
    made = open_model(out)
    whom = f" for {quant_target(target).title}" if target is not None else ""
    step = f"quantised to {to}{whom}: {len(report.quantized)} nodes, {len(report.left)} left as they were"
    log.info("the graph is not %s: %s", to, step)
    notes = {"prepared": step, "prepared_digest": made.digest, "calibrated_with": config.calibrate or "nothing"}
    if pixels := (report.calibration or {}).get("preprocess"):
        notes["preprocess"] = json.dumps(pixels)
    if target is not None:
        notes[QUANT_TARGET] = target
        if (said := PlacedGraph(read_proto(out)).misfit(target)) is not None:
            notes[NOT_FUSED] = said
    return Prepared(made, (step,), notes, tuple(item.node for item in report.left))

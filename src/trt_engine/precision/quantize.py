"""From a plain ONNX model to one whose graph says, by Q/DQ pairs, what is computed in INT8, FP8, INT4, NVFP4 or MXFP8.

TensorRT 11 takes its precision from the graph alone, and TensorRT 10 does so in strongly typed mode. What is written for it
keeps their rules: symmetric, build-time scales, zero points of zero, blocks along the axis that is summed over. For ONNX
Runtime's CPU provider pairs stand where its integer kernels want them (`cpu_placement`, `cpu_qdq`, `dynamic`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from trt_engine.config import QuantizeConfig
from trt_engine.engine import Precision
from trt_engine.environment import Environment
from trt_engine.equivalence.tolerance import LOST
from trt_engine.errors import ModelError, UsageError
from trt_engine.files import staging_folder
from trt_engine.graph import walk
from trt_engine.graph.census import census, is_dequantize, is_quantize
from trt_engine.graph.load import check, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, carry, with_modules
from trt_engine.graph.names import unique_names
from trt_engine.graph.operators import is_trt_only
from trt_engine.graph.quant_target import METADATA_KEY, QuantTarget, quant_target
from trt_engine.model import Model
from trt_engine.precision import awq, bias, stored
from trt_engine.precision.batch_norm import fold_batch_norms
from trt_engine.precision.calibrate import CalibrationResult, Calibrator, MseCalibrator, calibrate
from trt_engine.precision.cast import cast_proto, refuse_target
from trt_engine.precision.comparison import Comparison, Measured, open_batch
from trt_engine.precision.convolutions import round_convolutions
from trt_engine.precision.cpu_placement import fitting_sites, integer_graph
from trt_engine.precision.cpu_qdq import CpuWriter, Range, weight_bits
from trt_engine.precision.dynamic import DynamicWriter, dynamic_sites
from trt_engine.precision.emulate import emulated
from trt_engine.precision.formats import Format, format_named
from trt_engine.precision.fused_kernels import integer_kernels, named_layers, optimized_graph
from trt_engine.precision.opsets import raise_opset
from trt_engine.precision.placement import CONVOLUTIONS, Exclusions, Left, Placement, Site, given_block, place
from trt_engine.precision.qdq import Writer, narrow
from trt_engine.precision.rules import check_strong_typing
from trt_engine.precision.samples import Preprocess, Samples, open_samples, random_samples
from trt_engine.precision.surgery import Weights
from trt_engine.records import IntegerKernels, LeftNode, QuantizedNode, QuantizeReport
from trt_engine.runtime.feeds import shapes_of

__all__ = ["quantize"]

log = logging.getLogger(__name__)

FORMATS = ("int8", "fp8", "int4", "nvfp4", "mxfp8")
_FLOOR = {"int8": 13, "fp8": 19, "int4": 21, "nvfp4": 23, "mxfp8": 21}
"""First opset a graph of ours needs: MXFP8's operators are TensorRT's own, so its E8M0 scales ask for none."""
_KERNELS = ("int8", "fp8", "int4")
"""What ONNX Runtime runs on a CPU as it is written: in kernels of the type where it has them, else in FP32 from the
same rounded numbers."""
_CALIBRATOR = {"int8": "mse", "fp8": "minmax", "nvfp4": "minmax"}
_RANDOM = 16


def quantize(
    model: Model | Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    data: Any = None,
    calibrator: Calibrator | str | None = None,
    ranges: CalibrationResult | Mapping[str, float] | None = None,
    cache: Path | str | None = None,
    preprocess: Preprocess | None = None,
    preprocessing: Any = "",
    emulate: Path | str | None = None,
    config: QuantizeConfig | None = None,
    yes: bool = False,
    dry_run: bool = False,
    **settings: Any,
) -> QuantizeReport:
    """Write the model in `to`: int8, fp8, int4, nvfp4 or mxfp8.

    `data` is what calibration sees: a folder, a file, an iterable of feeds, or `"random"`, which is recorded as such.
    `ranges` are ranges known already, in place of data. `emulate` is where an FP32 graph goes that computes the same on any
    CPU. `settings` are those of `QuantizeConfig`, by name. Raises `ModelError` when nothing in the model can be quantised.
    """
    started = time.monotonic()
    config = dataclasses.replace(config or QuantizeConfig(), **settings)
    form = format_named(to)
    if form.name not in FORMATS:
        raise UsageError(f"`{to}` is a cast, not a quantisation", hint=f"`trt-engine cast MODEL --to {to}`")
    opened = model if isinstance(model, Model) else open_model(model)
    job = _Job(
        model=opened,
        form=form,
        target=quant_target(config.target),
        config=config,
        out=_target(out, opened, yes),
        emulation=_target(emulate, opened, yes),
        calibrator=_calibrator(calibrator or config.calibrator or _CALIBRATOR.get(form.name, "minmax"), form, config),
        ranges=ranges,
        cache=Path(cache) if cache is not None else None,
        preprocess=preprocess,
        preprocessing=preprocessing,
        data=data,
    )
    return job.run(started, dry_run=dry_run)


def _calibrator(chosen: Calibrator | str, form: Format, config: QuantizeConfig) -> Calibrator | str:
    """The calibrator itself where it must know that zero points are free."""
    asymmetric = form.name == "int8" and not quant_target(config.target).symmetric
    return MseCalibrator(asymmetric=True) if chosen == "mse" and asymmetric else chosen


def _target(path: Path | str | None, model: Model, yes: bool) -> Path | None:
    if path is None:
        return None
    refuse_target(Path(path), model, yes=yes)
    return Path(path)


@dataclass(slots=True)
class _Job:
    """One model on its way to one format."""

    model: Model
    form: Format
    target: QuantTarget
    config: QuantizeConfig
    out: Path | None
    emulation: Path | None
    calibrator: Calibrator | str
    ranges: CalibrationResult | Mapping[str, float] | None
    cache: Path | None
    preprocess: Preprocess | None
    preprocessing: Any
    data: Any
    warnings: list[str] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    """What calibration was made of, for the report."""
    extremes: Mapping[str, Range] | None = None
    """Smallest and largest value of each tensor, where calibration kept them."""
    layers: dict[str, str] = field(default_factory=dict)
    """The operators with weights by label, and which of them are left: for `kernels`."""
    left: Sequence[Left] = ()
    kernels: IntegerKernels | None = None

    @property
    def for_cpu(self) -> bool:
        """True where pairs stand for ONNX Runtime's integer kernels."""
        return self.target.results and self.form.name == "int8"

    def run(self, started: float, *, dry_run: bool) -> QuantizeReport:
        form, config = self.form, self.config
        _fit_together(form, config, self.target, self.out, self.emulation, dry_run)
        proto = read_proto(self.model.path)
        _must_be_plain(proto, self.model)
        if renamed := unique_names(proto):
            self._warn(f"{renamed} nodes had the name of another and got one of their own")
        opset = walk.opsets_of(proto).get("", 0)
        rewritten = raise_opset(proto, _FLOOR[form.name])
        check(self.model, proto)
        weights = Weights(proto, self.model.path.parent)
        if self.for_cpu and fold_batch_norms(proto, weights):
            weights = Weights(proto, self.model.path.parent)
        placement, alone = self._placed(proto, weights)
        if not self.for_cpu:
            writer: Writer | CpuWriter | DynamicWriter = Writer(proto, form, config, weights, placement)
        elif config.dynamic:
            writer = DynamicWriter(proto, weights, placement, weight_bits(config.reduce_range))
        else:
            between = integer_graph(proto, placement, weights, self._exclusions)
            writer = CpuWriter(proto, weights, placement, between, weight_bits(config.reduce_range), self._exclusions)
        if self.for_cpu:
            self.layers, self.left = named_layers(proto), placement.left
        draft = _Draft(self, placement, alone, rewritten, opset, started)
        if dry_run:
            return draft.finished(walk.opsets_of(proto)[""], writer.planned(), {}, None, None)
        needed = list(writer.activations)
        if form.name == "nvfp4" and not config.weights_only:
            needed = list(dict.fromkeys([*needed, *(site.activation for site in alone)]))
        samples = self._samples(bool(needed))
        amax = self._ranges(needed, samples)
        if isinstance(writer, DynamicWriter):
            writer.write()
        elif isinstance(writer, CpuWriter):
            writer.write(self._spans(amax), self._means(placement, samples))
        else:
            writer.write(amax, self._moments(placement, samples), self._means(placement, samples))
        measured, files = self._written(proto, weights, alone, samples, amax)
        for name, error in (measured.outputs if measured is not None else {}).items():
            if not (error.noise or 0.0) <= LOST:
                self._warn(
                    f"`{name}` is not the model's any more: {error.noise_channel or 'the output'} differs by "
                    f"{error.noise:.2g} of its variation; `trt-engine search` finds the layers to leave out"
                )
        return draft.finished(walk.opsets_of(proto)[""], writer.written, files, measured, proto)

    def _warn(self, said: str) -> None:
        self.warnings.append(said)
        log.warning("%s", said)

    @property
    def _exclusions(self) -> Exclusions:
        config = self.config
        return Exclusions(config.exclude_nodes, config.exclude_types, config.exclude_patterns)

    def _placed(self, proto: ModelProto, weights: Weights) -> tuple[Placement, list[Site]]:
        """Where Q/DQ goes, and the convolutions that only the emulation rounds."""
        form, config = self.form, self.config
        found = place(
            proto, form, weights, exclude=self._exclusions, block=given_block(form, config.block),
            weights_only=config.weights_only, convolutions=config.convolutions,
        )  # fmt: skip
        if self.for_cpu:
            found = fitting_sites(proto, found, weights)
            if config.dynamic:
                found = dynamic_sites(found)
        if not config.heads:
            found = without_heads(proto, found)
        alone: list[Site] = []
        if form.granularity == "block":
            alone = [site for site in found.sites if site.node.op_type in CONVOLUTIONS]
            found.sites = [site for site in found.sites if site.node.op_type not in CONVOLUTIONS]
        if not found.sites and (not alone or self.out is not None):
            raise self._nothing(found)
        return found, alone

    def _nothing(self, found: Placement) -> ModelError:
        name, form = self.model.path.name, self.form.name
        if not found.left:
            return ModelError(f"`{name}` has no layer with weights to quantise", hint="`trt-engine inspect` shows them")
        reasons = list(dict.fromkeys(item.reason for item in found.left))
        only_convolutions = all(item.op in CONVOLUTIONS for item in found.left)
        hint = (
            "use `--to int8` or `--to fp8`; `--emulate FILE --convolutions` measures what rounding them would cost"
            if only_convolutions and self.form.granularity == "block"
            else "another `--block`, fewer exclusions, or another format"
        )
        more = f" and {len(reasons) - 2} reasons more" if len(reasons) > 2 else ""
        return ModelError(
            f"`{name}` has nothing to quantise to {form}: of {len(found.left)} layers with weights, "
            f"{'; '.join(reasons[:2])}{more}",
            hint=hint,
        )

    # -------------------------------------------------------------------------------------------- data

    def _samples(self, needed: bool) -> Samples | None:
        config, signature = self.config, self.model.signature
        if isinstance(self.data, str) and self.data == "random":
            shapes = shapes_of(signature, None, batch=open_batch(signature, config.sample_batch))
            made = random_samples(self.model, shapes, _RANDOM)
            self._warn("calibrated on random feeds: the ranges say little about real data")
            return made
        if self.data is not None:
            return open_samples(
                self.data, signature, batch=config.sample_batch, limit=config.samples, preprocess=self.preprocess
            )
        if config.method == "awq":
            raise UsageError(
                "AWQ looks at what activations carry, and there is no data",
                hint="`--calibrate DATA`, or `--method rtn`",
            )
        hit = self.cache is not None and self.cache.exists()
        if needed and self.ranges is None and not hit:
            raise UsageError(
                f"`{self.form.name}` needs the ranges of activations, and there is no data to find them in",
                hint="`--calibrate DATA` (a folder, .npy, .npz); `--calibrate random` for a mere trial",
            )
        return None

    def _ranges(self, tensors: list[str], samples: Samples | None) -> dict[str, float]:
        """How far each activation reaches."""
        if not tensors:
            return {}
        result = self.ranges
        if result is None:
            result = calibrate(
                self.model, samples, self.calibrator, tensors=tensors, preprocess=self.preprocess,
                preprocessing=self.preprocessing, cache=self.cache,
            )  # fmt: skip
        if isinstance(result, CalibrationResult):
            self.calibration = {
                "calibrator": result.calibrator, "settings": result.settings, "samples": result.rows,
                "batches": result.batches, "data": result.described, "digest": result.data,
                "random": samples is not None and samples.random, "cached": result.from_cache,
                "skipped": result.skipped,
            }  # fmt: skip
            self.warnings.extend(result.warnings)
            self.extremes = result.extremes
            known: Mapping[str, float] = result.amax
        else:
            self.calibration, known = {"calibrator": "given", "ranges": len(result)}, result
        missing = [name for name in tensors if name not in known]
        if missing:
            raise UsageError(
                f"the ranges lack {len(missing)} of {len(tensors)} activations, `{missing[0]}` among them",
                hint="calibrate with these tensors too",
            )
        return {name: float(known[name]) for name in tensors}

    def _spans(self, amax: Mapping[str, float]) -> dict[str, Range]:
        """From where to where each activation reaches: what was seen, cut off where the calibrator cuts it off."""
        if self.extremes is None:
            return {name: (-reach, reach) for name, reach in amax.items()}
        if amax and not self.extremes:
            where = f"`{self.cache}`" if self.cache is not None else "the ranges given"
            raise UsageError(
                f"{where} lack the smallest value of each tensor, which zero points are made of",
                hint="an earlier version wrote them: delete the cache and calibrate again",
            )
        spans = {}
        for name, reach in amax.items():
            low, high = self.extremes.get(name, (-reach, reach))
            spans[name] = max(low, -reach), min(high, reach)
        return spans

    def _moments(self, placement: Placement, samples: Samples | None) -> dict[str, awq.Moments]:
        if self.config.method != "awq" or samples is None:
            return {}
        if not samples.again and self.calibration is not None:
            raise UsageError(
                "AWQ and calibration each go through the data, and this iterator can be gone through once",
                hint="give a list, or a function that returns an iterable",
            )
        found = awq.collect(self.model, placement.activations, samples)
        if self.calibration is None:
            self.calibration = {"samples": samples.total, "data": samples.describe, "random": samples.random}
        return found

    def _means(self, placement: Placement, samples: Samples | None) -> bias.Means:
        """What biases are corrected with; nothing where the format has no such correction or there is no data."""
        if not self.config.bias_correction or self.form.name not in ("int8", "fp8") or self.calibration is None:
            return {}
        kept = self.cache.with_name(f"{self.cache.name}.means.npz") if self.cache is not None else None
        digest = str(self.calibration.get("digest"))
        wanted = {(site.activation, bias.axis_of(site)) for site in placement.sites}
        found = bias.load_means(kept, digest) if kept is not None else None
        if found is not None and wanted <= set(found):
            return dict(found)
        if samples is None or not samples.again:
            self._warn("biases are not corrected: that takes a pass over the data, which is not there any more")
            return {}
        made = bias.channel_means(self.model, placement.sites, samples)
        if kept is not None:
            bias.save_means(kept, made, digest)
        return made

    # -------------------------------------------------------------------------------------------- files

    def _written(
        self,
        proto: ModelProto,
        weights: Weights,
        alone: list[Site],
        samples: Samples | None,
        amax: Mapping[str, float],
    ) -> tuple[Measured | None, dict[str, Path]]:
        """The quantised model and its emulation at their places, compared with the model as it was."""
        folder, rest = self.model.path.parent, self.config.high_precision
        carry(proto, read_proto(self.model.path))
        # what a CPU computes around 16-bit Q/DQ says little of the file: the emulation keeps the rest in FP32
        kernels = self.form.name in _KERNELS and not alone and rest == "fp32"
        compared = Comparison(self.model, samples) if self.config.parity else None
        files: dict[str, Path] = {}
        external = bool(self.model.external)
        with staging_folder(self.out or self.emulation or self.model.path) as stage:
            if self.emulation is not None or (compared is not None and not kernels):
                made = _copy(proto)
                round_convolutions(made, weights, self.form, alone, None if self.config.weights_only else amax)
                emulated(made, folder)
                carry(made, proto)
                target = self.emulation or stage / "emulation.onnx"

                def prove(path: Path) -> None:
                    if compared is not None and not kernels:
                        compared.measure(path, "emulation", "all")

                stored.write(made, target, (), folder, external=external, prove=prove)
                if self.emulation is not None:
                    files["emulation"] = self.emulation
                    log.info("emulation: `%s`", self.emulation)
            if self.out is not None:

                def prove_model(path: Path) -> None:
                    _must_be_valid(path, self.model, self.target)
                    if self.for_cpu:
                        self.kernels = integer_kernels(self.layers, optimized_graph(path, stage), self.left)
                    if compared is not None and kernels:
                        compared.measure(path, "kernels", "basic" if self.form.name == "fp8" else "all")

                sources: Sequence[stored.Source] = ()
                written = _copy(proto)
                if rest != "fp32":
                    kept = [node.name for node in proto.graph.node if is_dequantize(node)]
                    written, changes = cast_proto(
                        proto, rest, folder=folder, name=str(self.model.path),
                        exclude_nodes=kept if self.form.name == "nvfp4" else (),  # both levels of scales stay FP32
                    )  # fmt: skip
                    narrow(written)
                    sources = changes.sources
                props = {item.key: item.value for item in written.metadata_props}
                onnx.helper.set_model_props(written, props | {METADATA_KEY: self.target.name})
                stored.write(written, self.out, sources, folder, external=external, prove=prove_model)
                files["model"] = self.out
                log.info("quantised model: `%s`", self.out)
                if (side := stored.side_file(self.out)).exists():
                    files["weights"] = side
        return (compared.result if compared is not None else None), files


def _copy(proto: ModelProto) -> ModelProto:
    made = ModelProto()
    made.CopyFrom(proto)
    return made


# ------------------------------------------------------------------------------------------------ before


def _fit_together(
    form: Format, config: QuantizeConfig, target: QuantTarget, out: Path | None, emulation: Path | None, dry_run: bool
) -> None:
    """`UsageError` for settings that contradict each other, the format or the target."""
    _fit_target(form, config, target, emulation)
    dynamic = form.name in ("nvfp4", "mxfp8")
    if out is None and emulation is None and not dry_run:
        raise UsageError("there is nowhere to write to", hint="`-o OUT.onnx`, or `--dry-run`")
    if config.weights_only and not dynamic and form.name != "int4":
        raise UsageError(
            f"`{form.name}` with activations left in float is no faster anywhere",
            hint="leave `--weights-only` out, or take `--to int4` or `--to nvfp4`",
        )
    if config.method == "awq" and form.granularity != "block":
        raise UsageError(
            f"AWQ rounds weights in blocks, and `{form.name}` has none",
            hint="`--calibrator mse`, `entropy` or `percentile` clips activations; leave `--method` out",
        )
    if config.residuals and form.granularity == "block":
        raise UsageError("`--residuals` is for INT8 and FP8", hint="leave it out")
    if config.convolutions and form.granularity != "block":
        raise UsageError(f"`{form.name}` takes convolutions anyway", hint="leave `--convolutions` out")
    if config.convolutions and emulation is None:
        raise UsageError(
            f"no kernel takes convolutions in `{form.name}`, so only an emulation can have them",
            hint="add `--emulate EMULATION.onnx`",
        )


def _fit_target(form: Format, config: QuantizeConfig, target: QuantTarget, emulation: Path | None) -> None:
    if form.name not in target.formats:
        if target.name == "onnxruntime-cuda":
            raise UsageError(
                f"{target.title} has no kernels for Q/DQ in `{form.name}`: it would compute in floating point, with the "
                "rounding on top",
                hint="`--target onnxruntime-tensorrt` or `tensorrt`; `trt-engine cast MODEL --to fp16`; `--to int4` for "
                "weights of MatMul",
            )
        raise UsageError(
            f"{target.title} has no kernels for `{form.name}`",
            hint=f"`--to {'` or `--to '.join(target.formats)}`, or another `--target`",
        )
    if config.dynamic and (form.name != "int8" or not target.dynamic):
        raise UsageError(
            f"`--dynamic` is for INT8 on `onnxruntime-cpu`, not for {form.name} on `{target.name}`: "
            "TensorRT wants the scales of INT8 when it builds",
            hint="`--target onnxruntime-cpu`, or `--calibrate DATA` in place of `--dynamic`",
        )
    if config.dynamic and emulation is not None:
        raise UsageError("a dynamically quantised model runs on any CPU as it is", hint="leave `--emulate` out")
    if config.reduce_range == "on" and (form.name != "int8" or not target.results):
        raise UsageError("`--reduce-range on` is for INT8 on `onnxruntime-cpu`", hint="leave it out")
    if target.results and form.name == "int8" and config.high_precision != "fp32":
        raise UsageError(
            f"{target.title} has no integer kernels between layers in {config.high_precision}",
            hint="leave `--high-precision` out",
        )


def _must_be_plain(proto: ModelProto, model: Model) -> None:
    """`ModelError` for a model that is quantised already."""
    for found in walk.nodes(proto):
        node = found.node
        if is_quantize(node) or is_dequantize(node) or node.op_type in _INTEGER_OPS:
            raise ModelError(
                f"`{model.path.name}` is quantised already: it has `{node.op_type}` (node `{walk.label(node)}`)",
                hint="start from the model as it was exported, in FP32",
            )


_INTEGER_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulNBits")


def without_heads(proto: ModelProto, found: Placement) -> Placement:
    """The placement without the last layer on the way to each output: what is decoded there (boxes, scores) is not
    averaged out by layers after it. All of them stay when there would be nothing else."""
    leads: set[str] = set()
    heads: set[str] = set()
    sites = {site.key for site in found.sites}
    for node in reversed(proto.graph.node):
        ours = bool(node.output) and node.output[0] in sites
        on = any(name in leads for name in node.output)
        if ours and not on:
            heads.add(node.output[0])
        if on or ours:
            leads.update(node.input[:1] if ours else node.input)
    kept = [site for site in found.sites if site.key not in heads]
    if not kept:
        return found
    left = [
        Left(site.label, site.node.op_type, "it is the last layer before an output (`--heads` takes it too)")
        for site in found.sites
        if site.key in heads
    ]
    return Placement(kept, [*found.left, *left], found.facts)


def _must_be_valid(path: Path, model: Model, target: QuantTarget) -> None:
    """`ModelError` unless what was written is what ONNX takes, and for TensorRT its strongly typed networks."""
    proto = read_proto(path)
    check(path, proto)
    # shapes are inferred through standard operators alone; TensorRT's own have no schema here
    full = not any(is_trt_only(found.node) for found in walk.nodes(proto))
    try:
        onnx.checker.check_model(str(path), full_check=full)
    except Exception as error:  # the checker and the inference raise whatever their C++ side throws
        raise ModelError(
            f"`{model.path.name}` quantised is not valid ONNX: {' '.join(str(error).split())[:300]}",
            hint="leave the node it names out with `--exclude-node`",
        ) from error
    for finding in check_strong_typing(proto) if target.strong_typing else ():
        if finding.severity == "error":
            raise ModelError(
                f"`{model.path.name}` quantised breaks TensorRT's typing: {finding.message}",
                hint=finding.hint or "leave the node it names out with `--exclude-node`",
            )


# ------------------------------------------------------------------------------------------------ the report


@dataclass(frozen=True, slots=True)
class _Draft:
    """What is known of the report before anything is written."""

    job: _Job
    placement: Placement
    alone: list[Site]
    rewritten: tuple[str, ...]
    opset: int
    started: float

    def finished(
        self,
        opset: int,
        nodes: list[QuantizedNode],
        files: Mapping[str, Path],
        measured: Measured | None,
        proto: ModelProto | None,
    ) -> QuantizeReport:
        """The report; of a dry run without `proto`."""
        job, config = self.job, self.job.config
        paths = ModulePaths(read_proto(job.model.path))
        sizes = [files[name].stat().st_size for name in ("model", "weights") if name in files]
        lies = f"{job.form.name}, in the emulation alone"
        alone = [QuantizedNode(site.label, site.node.op_type, lies, site.activation, None, 0.0) for site in self.alone]
        return QuantizeReport(
            model=str(job.model.path),
            out=str(files["model"]) if "model" in files else None,
            to=job.form.name,
            target=job.target.name,
            method="dynamic" if config.dynamic else "awq" if config.method == "awq" else "rtn",
            weights_only=config.weights_only or job.form.weights_only,
            high_precision=config.high_precision,
            quantized=with_modules((*nodes, *alone), paths),
            left=with_modules([LeftNode(item.node, item.op, item.reason) for item in self.placement.left], paths),
            opset_before=self.opset,
            opset=opset,
            nbytes_before=job.model.nbytes,
            nbytes=sum(sizes) if sizes else None,
            precision=Precision(job.form.name, census(proto) if proto is not None else {}),
            calibration=job.calibration,
            parity=measured.outputs if measured is not None else None,
            parity_inputs=measured.inputs if measured is not None else None,
            measured_on=measured.on if measured is not None else None,
            rewritten=self.rewritten,
            integer_kernels=job.kernels,
            seconds=time.monotonic() - self.started,
            environment=Environment.here(),
            artifacts={name: str(path) for name, path in files.items()},
            dry_run=proto is None,
            warnings=tuple(job.warnings),
        )

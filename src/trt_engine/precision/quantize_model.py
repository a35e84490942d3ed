"""Quantize an ONNX model with explicit Q/DQ pairs to INT8, FP8, INT4, NVFP4 or MXFP8.

TensorRT 11, and TensorRT 10 in strongly typed mode, take precision from the graph alone and require symmetric constant
scales, zero points of 0, and blocks along the reduction axis. For ONNX Runtime's CPU provider the pairs match its integer
kernels (`cpu_qdq`, `cpu_layer_selection`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from trt_engine.atomic_io import staging_folder
from trt_engine.config.precision import QUANTIZED_PRECISIONS, CastConfig, QuantizeConfig
from trt_engine.config.settings import replace_values
from trt_engine.environment import Environment
from trt_engine.equivalence.tolerance import lost_text
from trt_engine.errors import ModelError, UsageError
from trt_engine.format import join_names
from trt_engine.graph import stored_tensors, walk
from trt_engine.graph.dtype_breakdown import dtype_shares, is_dequantize
from trt_engine.graph.edit_graph import Weights, fold_batch_norms, make_names_unique
from trt_engine.graph.load import check_operators, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, add_modules, carry_module_paths
from trt_engine.graph.opset import raise_opset
from trt_engine.graph.quant_target import METADATA_KEY, QuantTarget, quant_target
from trt_engine.model import Model
from trt_engine.precision import weight_correction
from trt_engine.precision.calibration import CalibrationResult, calibrate
from trt_engine.precision.calibrators import Calibrator, HistogramCalibrator
from trt_engine.precision.cast_model import cast_proto, check_target
from trt_engine.precision.cpu_layer_selection import (
    find_integer_graph,
    join_biases,
    join_hard_sigmoids,
    select_cpu_layers,
)
from trt_engine.precision.cpu_qdq import CpuQdqWriter, DynamicQuantWriter, Range, select_dynamic_layers, weight_bits
from trt_engine.precision.emulate import check_biases, emulate_convolutions, emulate_proto
from trt_engine.precision.formats import Format, get_format
from trt_engine.precision.layer_selection import (
    CONV_OPS,
    LOG_REASON,
    Exclusions,
    LayerSelection,
    QuantizableLayer,
    check_block_size,
    select_layers,
    skip_output_layers,
)
from trt_engine.precision.qdq import QdqWriter, strip_half_casts
from trt_engine.precision.quantize_checks import (
    UNFUSED_REASON,
    ParityCheck,
    QuantizedParity,
    check_not_quantized,
    check_quantized_model,
    check_settings,
    count_integer_kernels,
    name_layers,
    optimize_graph,
    random_shapes,
)
from trt_engine.precision.samples import Samples, open_samples, random_samples
from trt_engine.precision.weight_correction import fold_weights
from trt_engine.records.passport import Precision
from trt_engine.records.precision import IntegerKernels, QuantizedNode, QuantizeReport, UnquantizedNode
from trt_engine.runtime.feeds import read_values

log = logging.getLogger(__name__)

_MIN_OPSET = {"int8": 13, "fp8": 19, "int4": 21, "nvfp4": 23, "mxfp8": 21}
"""Minimum opset by format; MXFP8 uses TensorRT's own operators, which need none for E8M0."""
_CPU_FORMATS = ("int8", "fp8", "int4")
"""Formats that ONNX Runtime runs on a CPU, in their kernels or in FP32 from the same rounded values."""
_DEFAULT_CALIBRATORS = {"int8": "mse", "fp8": "minmax", "nvfp4": "minmax"}
_RANDOM_BATCHES = 16


def quantize(
    model: Model | Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    config: QuantizeConfig | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    **settings: Any,
) -> QuantizeReport:
    """Quantize the model to int8, fp8, int4, nvfp4 or mxfp8.

    `settings` are those of `QuantizeConfig`: `preprocess` is a function of a path here, `preprocessing` what a cache
    knows it by. Raises `UsageError`, `ModelError` if nothing can be quantized, and `AccuracyError` for a dead output
    channel.
    """
    started = time.monotonic()
    config = replace_values(config or QuantizeConfig(), settings)
    form = get_format(to)
    if form.name not in QUANTIZED_PRECISIONS:
        raise UsageError(f"`{to}` is a cast, not a quantisation", hint=f"`trt-engine cast MODEL --to {to}`")
    opened = model if isinstance(model, Model) else open_model(model)
    check_not_quantized(opened)  # before shapes and data are looked at
    on_random = isinstance(config.calib_data, str) and config.calib_data == "random"
    if config.shapes and not (on_random or config.calib_data is None):
        raise UsageError("`--shapes` is for random inputs, and the data has its own shapes", hint="leave one out")
    if on_random or config.shapes:
        given = read_values(config.inputs, opened.signature)
        shapes = random_shapes(opened.signature, config.calib_batch, config.shapes, given)
        config = dataclasses.replace(
            config, calib_data=random_samples(opened, shapes, _RANDOM_BATCHES, given=given) if on_random else None
        )
    job = _QuantizeJob(
        model=opened,
        form=form,
        target=quant_target(config.target),
        config=config,
        out=_check_output(out, opened, overwrite),
        emulation_path=_check_output(config.emulate, opened, overwrite),
        calibrator=_resolve_calibrator(
            config.calibrator or _DEFAULT_CALIBRATORS.get(form.name, "minmax"), form, config
        ),
        started=started,
    )
    return job.run(dry_run=dry_run)


def _resolve_calibrator(chosen: Calibrator | str, form: Format, config: QuantizeConfig) -> Calibrator | str:
    """Create the MSE calibrator for formats with free zero points, else return `chosen`."""
    asymmetric = form.name == "int8" and not quant_target(config.target).symmetric
    return HistogramCalibrator("mse", asymmetric=True) if chosen == "mse" and asymmetric else chosen


def _check_output(path: Path | str | None, model: Model, overwrite: bool) -> Path | None:
    if path is not None:
        check_target(Path(path), model, overwrite=overwrite)
    return Path(path) if path is not None else None


class _UnfusedLayersError(Exception):
    """Layers with Q/DQ pairs that ONNX Runtime computes in FP32."""

    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__(*labels)
        self.labels = labels


@dataclass(slots=True)
class _QuantizeJob:
    """Quantizes one model to one format."""

    model: Model
    form: Format
    target: QuantTarget
    config: QuantizeConfig
    out: Path | None
    emulation_path: Path | None
    calibrator: Calibrator | str
    started: float
    warnings: list[str] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    """Calibration settings and data, for the report."""
    min_max: Mapping[str, Range] | None = None
    """Minimum and maximum of each tensor, if recorded by calibration."""
    layers: dict[str, str] = field(default_factory=dict)
    """Operator by label of the layers with weights."""
    unquantized: Sequence[UnquantizedNode] = ()
    emulated_only: list[QuantizableLayer] = field(default_factory=list)
    rewritten: tuple[str, ...] = ()
    kernels: IntegerKernels | None = None
    dropped: set[str] = field(default_factory=set)
    """Layers whose pairs ONNX Runtime did not fuse in a trial."""
    computed: set[str] = field(default_factory=set)
    """Outputs of layers in float whose weights stay computed."""

    @property
    def for_cpu(self) -> bool:
        """True if the pairs target ONNX Runtime's integer kernels."""
        return self.target.results and self.form.name == "int8"

    def run(self, *, dry_run: bool) -> QuantizeReport:
        form, config = self.form, self.config
        check_settings(form, config, self.target, self.out, self.emulation_path, dry_run)
        proto, weights, placement, writer = self._place()
        if dry_run:
            return self._make_report(walk.opsets_of(proto)[""], writer.plan(), {}, None, None)
        needed = list(writer.range_tensors)
        if form.name == "nvfp4" and not config.weights_only:
            needed = list(dict.fromkeys([*needed, *(site.activation for site in self.emulated_only)]))
        samples = self._open_samples(bool(needed))
        amax = self._find_amax(needed, samples)
        stats = self._collect_stats(placement, samples) if isinstance(writer, QdqWriter) else {}
        means = {} if isinstance(writer, DynamicQuantWriter) else self._collect_means(placement, samples)
        ranges = self._clip_ranges(amax) if isinstance(writer, CpuQdqWriter) else {}
        while True:
            if isinstance(writer, DynamicQuantWriter):
                writer.write()
            elif isinstance(writer, CpuQdqWriter):
                writer.write(ranges, means)
            else:
                writer.write(amax, stats, means)
            try:
                measured, files = self._write_models(proto, weights, samples, amax)
                break
            except _UnfusedLayersError as found:
                log.info(
                    "left in fp32, as ONNX Runtime does not fuse their Q/DQ pairs: %s", join_names(found.labels, 4)
                )
                self.dropped.update(found.labels)
                before = writer
                proto, weights, placement, writer = self._place()
                assert isinstance(before, CpuQdqWriter) and isinstance(writer, CpuQdqWriter)
                ranges = {name: before.range_of(name) for name in writer.range_tensors}
        for name, error in (measured.outputs if measured is not None else {}).items():
            if why := lost_text(error):
                self._warn(
                    f"`{name}` no longer matches the model: {why}; `trt-engine search` finds the layers to leave out"
                )
        return self._make_report(walk.opsets_of(proto)[""], writer.quantized_nodes, files, measured, proto)

    def _place(self) -> tuple[ModelProto, Weights, LayerSelection, QdqWriter | CpuQdqWriter | DynamicQuantWriter]:
        """The graph to be written, its weights, the layers to quantize and the writer of their pairs."""
        form, config = self.form, self.config
        proto = read_proto(self.model.path)
        if (renamed := make_names_unique(proto)) and not (self.dropped or self.computed):
            self._warn(f"{renamed} nodes had the name of another and got one of their own")
        in_16_bit = not self.for_cpu and not {"fp16", "bf16"}.isdisjoint(dtype_shares(walk.index_of(proto)))
        self.rewritten = raise_opset(proto, max(_MIN_OPSET[form.name], 19 if in_16_bit else 0))  # of scales in 16 bits
        check_operators(walk.index_of(proto), self.model.path)
        check_biases(proto, self.model.path)
        weights = Weights(proto, self.model.path.parent)
        if folded := fold_weights(proto, weights, self.computed):
            weights = Weights(proto, self.model.path.parent)
            found, emulated = self._select_layers(proto, weights)
            if floats := folded - {site.output_name for site in (*found.layers, *emulated)}:
                self.computed |= floats
                return self._place()
        if self.for_cpu:
            if fold_batch_norms(proto, weights):
                weights = Weights(proto, self.model.path.parent)
            self.layers = name_layers(proto)
        placement, self.emulated_only = self._select_layers(proto, weights)
        self.unquantized = placement.unquantized
        if not self.for_cpu:
            return proto, weights, placement, QdqWriter(proto, form, config, weights, placement)
        bits = weight_bits(config.reduce_range)
        if config.dynamic:
            return proto, weights, placement, DynamicQuantWriter(proto, weights, placement, bits)
        join_biases(proto, placement, weights, self._exclusions)
        join_hard_sigmoids(proto, weights, self._exclusions)
        between = find_integer_graph(proto, placement, weights, self._exclusions)
        return proto, weights, placement, CpuQdqWriter(proto, weights, placement, between, bits, self._exclusions)

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        log.warning("%s", message)

    @property
    def _exclusions(self) -> Exclusions:
        return Exclusions.of(self.config)

    def _select_layers(self, proto: ModelProto, weights: Weights) -> tuple[LayerSelection, list[QuantizableLayer]]:
        """Select the layers to quantize, and the convolutions that only the emulation rounds."""
        form, config = self.form, self.config
        found = select_layers(
            proto, form, weights, exclude=self._exclusions, block_size=check_block_size(form, config.block_size),
            weights_only=config.weights_only, include_convolutions=config.emulate_convs,
        )  # fmt: skip
        elsewhere = bool(found.layers)
        if self.for_cpu:
            found = select_cpu_layers(found, weights)
            if config.dynamic:
                found = select_dynamic_layers(found)
        if not config.quantize_outputs:
            found = skip_output_layers(proto, found)
        if self.dropped:
            found = found.without(lambda site: UNFUSED_REASON if site.label in self.dropped else None)
        alone: list[QuantizableLayer] = []
        if form.granularity == "block":
            alone = [site for site in found.layers if site.node.op_type in CONV_OPS]
            found.layers = [site for site in found.layers if site.node.op_type not in CONV_OPS]
        if not found.layers and (not alone or self.out is not None):
            raise self._nothing_to_quantize(found, elsewhere)
        return found, alone

    def _nothing_to_quantize(self, selection: LayerSelection, elsewhere: bool) -> ModelError:
        name, form = self.model.path.name, self.form.name
        if not selection.unquantized:
            return ModelError(f"`{name}` has no layer with weights to quantise", hint="`trt-engine inspect` shows them")
        reasons = list(dict.fromkeys(item.reason for item in selection.unquantized))
        only_convolutions = all(item.op in CONV_OPS for item in selection.unquantized)
        hint = (
            "use `--to int8` or `--to fp8`; `--emulate FILE --emulate-convs` measures what rounding them would cost"
            if only_convolutions and self.form.granularity == "block"
            else "export it with the input fixed that decides the branches: layers in bodies are not quantised"
            if all("in the body of" in reason for reason in reasons)
            else "leave it in FP32, and quantise the network that reads its features"
            if reasons == [LOG_REASON]
            else "`trt-engine build` runs it in fp32; `--dynamic` quantises while running"
            if self.dropped
            else "another `--block-size` or format; `trt-engine build` runs it as it is"
            if self.form.granularity == "block"
            else "`trt-engine build` runs it as it is"
            + "; `--target tensorrt` quantises it for a GPU" * (self.for_cpu and elsewhere)
        )
        more = f" and {len(reasons) - 2} reasons more" if len(reasons) > 2 else ""
        return ModelError(
            f"`{name}` has nothing to quantise to {form}: of {len(selection.unquantized)} layers with weights, "
            f"{'; '.join(reasons[:2])}{more}",
            hint=hint,
        )

    # -------------------------------------------------------------------------------------------- data

    def _open_samples(self, needed: bool) -> Samples | None:
        config = self.config
        if config.calib_data is not None:
            samples = open_samples(
                config.calib_data, self.model.signature, batch=config.calib_batch, limit=config.max_samples,
                preprocess=config.preprocess, given=read_values(config.inputs, self.model.signature), model=self.model,
            )  # fmt: skip
            if samples.random:
                self._warn("calibrated on random feeds: the ranges do not represent real data")
            return samples
        if config.method == "awq":
            raise UsageError(
                "AWQ needs activations, and no data is given",
                hint="`--calib-data DATA`, or `--method rtn`",
            )
        if needed and config.ranges is None and not (config.cache is not None and config.cache.exists()):
            raise UsageError(
                f"`{self.form.name}` needs the ranges of activations, and no calibration data is given",
                hint="`--calib-data DATA` (a folder, .npy, .npz); `--calib-data random` for a trial run",
            )
        return None

    def _find_amax(self, tensors: list[str], samples: Samples | None) -> dict[str, float]:
        """The calibrated range of each activation."""
        if not tensors:
            return {}
        config = self.config
        result: CalibrationResult | Mapping[str, float] | None = config.ranges
        if result is None:
            result = calibrate(
                self.model, samples, self.calibrator, tensors=tensors, preprocess=config.preprocess,
                preprocessing=config.preprocessing, cache=config.cache,
            )  # fmt: skip
        if isinstance(result, CalibrationResult):
            self.calibration = {
                "calibrator": result.calibrator, "settings": result.settings, "samples": result.rows,
                "batches": result.batches, "data": result.data_source, "digest": result.data,
                "random": samples is not None and samples.random, "cached": result.from_cache,
                "skipped": result.skipped,
            }  # fmt: skip
            self.warnings.extend(result.warnings)
            self.min_max = result.min_max
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

    def _clip_ranges(self, amax: Mapping[str, float]) -> dict[str, Range]:
        """Minimum and maximum of each activation, clipped to the calibrated range."""
        if self.min_max is None:
            return {name: (-reach, reach) for name, reach in amax.items()}
        if amax and not self.min_max:
            where = f"`{self.config.cache}`" if self.config.cache is not None else "the ranges given"
            raise UsageError(
                f"{where} lack the minimum of each tensor, which zero points need",
                hint="an earlier version wrote them: delete the cache and calibrate again",
            )
        spans = {}
        for name, reach in amax.items():
            low, high = self.min_max.get(name, (-reach, reach))
            spans[name] = max(low, -reach), min(high, reach)
        return spans

    def _collect_stats(
        self, selection: LayerSelection, samples: Samples | None
    ) -> dict[str, weight_correction.ChannelStats]:
        if self.config.method != "awq" or samples is None:
            return {}
        if not samples.repeatable and self.calibration is not None:
            raise UsageError(
                "AWQ and calibration each need a pass over the data, and this iterator allows one",
                hint="give a list, or a function that returns an iterable",
            )
        found = weight_correction.collect_channel_stats(self.model, selection.activations, samples)
        if self.calibration is None:
            self.calibration = {"samples": samples.total, "data": samples.description, "random": samples.random}
        return found

    def _collect_means(self, selection: LayerSelection, samples: Samples | None) -> weight_correction.ChannelMeans:
        """The channel means for bias correction; empty without data or for other formats."""
        if not self.config.bias_correction or self.form.name not in ("int8", "fp8") or self.calibration is None:
            return {}
        cache = self.config.cache
        kept = cache.with_name(f"{cache.name}.means.npz") if cache is not None else None
        digest = str(self.calibration.get("digest"))
        wanted = {(site.activation, weight_correction.channel_axis(site)) for site in selection.layers}
        found = weight_correction.load_means(kept, digest) if kept is not None else None
        if found is not None and wanted <= set(found):
            return dict(found)
        if samples is None or not samples.repeatable:
            self._warn("biases are not corrected: that needs another pass over the data, which is exhausted")
            return {}
        made = weight_correction.channel_means(self.model, selection.layers, samples)
        if kept is not None:
            weight_correction.save_means(kept, made, digest)
        return made

    # -------------------------------------------------------------------------------------------- files

    def _write_models(
        self,
        proto: ModelProto,
        weights: Weights,
        samples: Samples | None,
        amax: Mapping[str, float],
    ) -> tuple[QuantizedParity | None, dict[str, Path]]:
        """Write the quantized model and its emulation, and compare one with the source model."""
        config = self.config
        folder, rest = self.model.path.parent, config.high_precision
        carry_module_paths(proto, self.model.proto)
        # a CPU run around 16-bit Q/DQ does not represent the file: the emulation keeps the rest in FP32
        kernels = self.form.name in _CPU_FORMATS and not self.emulated_only and rest == "fp32"
        compared = ParityCheck(self.model, samples, config.shapes, config.inputs) if config.parity else None
        files: dict[str, Path] = {}
        with staging_folder(self.out or self.emulation_path or self.model.path) as stage:
            if self.emulation_path is not None or (compared is not None and not kernels):
                made = deepcopy(proto)
                emulate_convolutions(
                    made, weights, self.form, self.emulated_only, None if config.weights_only else amax
                )
                emulate_proto(made, folder)
                carry_module_paths(made, proto)
                target = self.emulation_path or stage / "emulation.onnx"

                def prove(path: Path) -> None:
                    if compared is not None and not kernels:
                        compared.measure(path, "emulation", "all")

                stored_tensors.write_model(made, target, (), folder, external=bool(self.model.external), validate=prove)
                if self.emulation_path is not None:
                    files["emulation"] = self.emulation_path
                    log.info("emulation: `%s`", self.emulation_path)
            if self.out is not None:

                def prove_model(path: Path) -> None:
                    check_quantized_model(path, self.model, self.target)
                    if self.for_cpu:
                        self.kernels = count_integer_kernels(self.layers, optimize_graph(path, stage), self.unquantized)
                        unfused = [item.node for item in self.kernels.not_fused if item.reason == UNFUSED_REASON]
                        if not config.dynamic and rest == "fp32" and not self.dropped.issuperset(unfused):
                            raise _UnfusedLayersError(unfused)
                    if compared is not None and kernels:
                        compared.measure(path, "kernels", "basic" if self.form.name == "fp8" else "all")

                self._write_quantized(proto, self.out, prove_model)
                files |= stored_tensors.written_files(self.out)
                log.info("quantised model: `%s`", self.out)
        return (compared.result if compared is not None else None), files

    def _write_quantized(self, proto: ModelProto, out: Path, validate: Callable[[Path], None]) -> None:
        """Write the graph with Q/DQ, its other nodes in the requested high precision."""
        folder, rest = self.model.path.parent, self.config.high_precision
        sources: Sequence[stored_tensors.DeferredCast] = ()
        written = deepcopy(proto)
        if rest != "fp32":
            kept = tuple(node.name for node in proto.graph.node if is_dequantize(node))
            exclude = kept if self.form.name == "nvfp4" else ()  # both levels of scales stay FP32
            written, changes = cast_proto(
                proto, rest, folder=folder, config=CastConfig(exclude_nodes=exclude), name=str(self.model.path)
            )
            strip_half_casts(written)
            sources = changes.deferred
        props = {item.key: item.value for item in written.metadata_props}
        onnx.helper.set_model_props(written, props | {METADATA_KEY: self.target.name})
        stored_tensors.write_model(written, out, sources, folder, external=bool(self.model.external), validate=validate)

    def _make_report(
        self,
        opset: int,
        nodes: list[QuantizedNode],
        files: Mapping[str, Path],
        measured: QuantizedParity | None,
        proto: ModelProto | None,
    ) -> QuantizeReport:
        """Build the report; a dry run has `proto=None`."""
        config = self.config
        paths = ModulePaths(self.model.proto)
        sizes = [files[name].stat().st_size for name in ("model", "weights") if name in files]
        emulated = f"{self.form.name}, in the emulation alone"
        alone = [
            QuantizedNode(site.label, site.node.op_type, emulated, site.activation, None, 0.0)
            for site in self.emulated_only
        ]
        return QuantizeReport(
            model=str(self.model.path),
            out=str(files["model"]) if "model" in files else None,
            to=self.form.name,
            target=self.target.name,
            method="dynamic" if config.dynamic else "awq" if config.method == "awq" else "rtn",
            weights_only=config.weights_only or self.form.weights_only,
            high_precision=config.high_precision,
            quantized=add_modules((*nodes, *alone), paths),
            unquantized=add_modules(self.unquantized, paths),
            opset_before=self.model.opsets.get("", 0),
            opset=opset,
            nbytes_before=self.model.nbytes,
            nbytes=sum(sizes) if sizes else None,
            precision=Precision(self.form.name, dtype_shares(walk.index_of(proto)) if proto is not None else {}),
            calibration=self.calibration,
            parity=measured.outputs if measured is not None else None,
            parity_inputs=measured.inputs if measured is not None else None,
            measured_on=measured.on if measured is not None else None,
            rewritten=self.rewritten,
            integer_kernels=self.kernels,
            seconds=time.monotonic() - self.started,
            environment=Environment.detect(),
            artifacts={name: str(path) for name, path in files.items()},
            dry_run=proto is None,
            warnings=tuple(self.warnings),
        )

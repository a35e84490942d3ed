"""Checks of `quantize`: its settings, the written model, its fused kernels and the difference of its outputs.

A model that sorts (TopK, NonMaxSuppression) is compared before sorting, since near-equal scores may swap.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import ModelProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.ort_values import run_arrays
from trt_engine.config.precision import QuantizeConfig
from trt_engine.equivalence.output_error import compare_output, worst_errors
from trt_engine.equivalence.parity import open_with_outputs
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.sorted_outputs import comparable_tensors
from trt_engine.equivalence.tolerance import DEAD_STD_RATIO
from trt_engine.errors import AccuracyError, ModelError, UsageError
from trt_engine.format import library_reason
from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.load import check_operators, read_proto
from trt_engine.graph.operators import checker_error, is_trt_only
from trt_engine.graph.quant_target import QuantTarget
from trt_engine.graph.typing_rules import check_strong_typing
from trt_engine.model import Model
from trt_engine.precision.formats import Format
from trt_engine.precision.layer_selection import LINEAR_OPS
from trt_engine.precision.samples import Samples
from trt_engine.records.parity import OutputError
from trt_engine.records.precision import IntegerKernels, UnquantizedNode
from trt_engine.runtime.feeds import complete_shapes, describe_inputs, read_values, set_values, shapes_of
from trt_engine.tensors import Shape, Signature, Tensors


def check_settings(
    form: Format, config: QuantizeConfig, target: QuantTarget, out: Path | None, emulation: Path | None, dry_run: bool
) -> None:
    """Raise `UsageError` for settings that conflict with each other, the format or the target."""
    check_target_support(form, config, target, emulation)
    dynamic = form.name in ("nvfp4", "mxfp8")
    if out is None and emulation is None and not dry_run:
        raise UsageError("no output is given", hint="`-o OUT.onnx`, or `--dry-run`")
    if config.weights_only and not dynamic and form.name != "int4":
        raise UsageError(
            f"`{form.name}` with float activations is not faster on any target",
            hint="leave `--weights-only` out, or take `--to int4` or `--to nvfp4`",
        )
    if config.method == "awq" and form.granularity != "block":
        raise UsageError(
            f"AWQ rounds weights in blocks, and `{form.name}` has none",
            hint="`--calibrator mse`, `entropy` or `percentile` clips activations; leave `--method` out",
        )
    if config.quantize_residuals and form.granularity == "block":
        raise UsageError("`--quantize-residuals` is for INT8 and FP8", hint="leave it out")
    if config.emulate_convs and form.granularity != "block":
        raise UsageError(f"`{form.name}` takes convolutions anyway", hint="leave `--emulate-convs` out")
    if config.emulate_convs and emulation is None:
        raise UsageError(
            f"no kernel takes convolutions in `{form.name}`, so only an emulation can have them",
            hint="add `--emulate EMULATION.onnx`",
        )


def check_target_support(form: Format, config: QuantizeConfig, target: QuantTarget, emulation: Path | None) -> None:
    """Raise `UsageError` for settings that no kernels of the target support."""
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
            hint="`--target onnxruntime-cpu`, or `--calib-data DATA` in place of `--dynamic`",
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


def check_not_quantized(model: Model) -> None:
    """Raise `ModelError` for a quantized model."""
    for found in walk.nodes(model.proto):
        node = found.node
        if is_quantize(node) or is_dequantize(node) or node.op_type in _INTEGER_OPS:
            raise ModelError(
                f"`{model.path.name}` is quantised already: it has `{node.op_type}` (node `{walk.label(node)}`)",
                hint="start from the model as it was exported, in FP32",
            )


_INTEGER_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulNBits")


def check_quantized_model(path: Path, model: Model, target: QuantTarget) -> None:
    """Raise `ModelError` unless the written model is valid ONNX and, for TensorRT, strongly typed."""
    proto = read_proto(path)
    check_operators(walk.index_of(proto), path)
    # shape inference needs schemas, which TensorRT's operators lack
    full = not any(is_trt_only(found.node) for found in walk.nodes(proto))
    error = checker_error(path, full=full)
    if error is not None and checker_error(model.path, full=full) is None:  # what was brought is not judged here
        raise ModelError(
            f"`{model.path.name}` quantised is not valid ONNX: {library_reason(error, whole=True)}",
            hint="leave the node it names out with `--exclude-node`",
        ) from error
    for finding in check_strong_typing(proto) if target.strong_typing else ():
        if finding.severity == "error":
            raise ModelError(
                f"`{model.path.name}` quantised breaks TensorRT's typing: {finding.message}",
                hint=finding.hint or "leave the node it names out with `--exclude-node`",
            )


INTEGER_KERNELS = frozenset(
    "QLinearConv QLinearMatMul QGemm MatMulIntegerToFloat DynamicQuantizeMatMul MatMulInteger ConvInteger QLinearAdd "
    "QLinearMul QLinearSigmoid QLinearLeakyRelu QLinearConcat QLinearAveragePool QLinearGlobalAveragePool QLinearSoftmax "
    "QLinearWhere".split()
)
UNFUSED_REASON = "ONNX Runtime computes it in FP32: this version has no integer kernel for its Q/DQ pattern"


def optimize_graph(path: Path, folder: Path) -> ModelProto:
    """Return ONNX Runtime's optimized CPU graph without weights; nodes keep their names.

    Raises the `TrtEngineError` for a model that ONNX Runtime does not load.
    """
    target = folder / "optimized.onnx"
    # not `all`, which changes layouts and renames nodes
    options = session.session_options(
        OnnxRuntimeOptions(arena=False), level="extended", save=target, weights="optimized.weights"
    )
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except session.ERRORS as error:
        raise session.translate_load_error(error, path) from error
    return onnx.load(str(target), load_external_data=False)


def count_integer_kernels(
    before: Mapping[str, str], optimized: ModelProto, left: Sequence[UnquantizedNode]
) -> IntegerKernels:
    """Count fused and unfused layers; `before`: operator by node label, `left`: unquantized nodes with reasons."""
    now = {found.node.name: found.node.op_type for found in walk.nodes(optimized)}
    reasons = {item.node: item.reason for item in left}
    layers: dict[str, tuple[int, int]] = {}
    slow: list[UnquantizedNode] = []
    for label, op in before.items():
        fused = now.get(label) in INTEGER_KERNELS
        done, count = layers.get(op, (0, 0))
        layers[op] = done + fused, count + 1
        if not fused:
            slow.append(UnquantizedNode(label, op, reasons.get(label, UNFUSED_REASON)))
    kernels = Counter(op for op in now.values() if op in INTEGER_KERNELS)
    return IntegerKernels(layers, tuple(slow), dict(kernels.most_common()))


def name_layers(proto: ModelProto) -> dict[str, str]:
    """Name every linear layer by its label, and return its operator by that name."""
    found = {}
    for place in walk.nodes(proto):
        node = place.node
        if node.op_type in LINEAR_OPS and not walk.domain_of(node):
            node.name = walk.label(node)
            found[node.name] = node.op_type
    return found


log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_ROWS = 8


@dataclass(frozen=True, slots=True)
class QuantizedParity:
    """Output errors of the quantized model."""

    outputs: dict[str, OutputError]
    """Error by output, or by sorted tensor."""
    inputs: str
    on: Literal["kernels", "emulation"]
    """How the quantized model was computed."""


class ParityCheck:
    """Compares a model with its quantized version."""

    def __init__(
        self, model: Model, samples: Samples | None, shapes: Mapping[str, Shape], inputs: Path | None = None
    ) -> None:
        self.model, self._shapes, self._inputs = model, shapes, inputs
        self.result: QuantizedParity | None = None
        self._tensors = comparable_tensors(model.proto)
        self._feeds, self._feeds_source = self._make_feeds(samples)
        self._expected: list[dict[str, Array]] = []

    def _make_feeds(self, samples: Samples | None) -> tuple[list[dict[str, Array]], str]:
        if samples is not None and samples.repeatable:
            rows, batches = 0, list[dict[str, Array]]()
            for batch in samples:
                batches.append(batch.feeds)
                rows += batch.rows
                if rows >= _ROWS:
                    break
            if batches:
                return batches, f"{rows} rows of {samples.description}"
        signature = self.model.signature
        try:
            given = read_values(self._inputs, signature)
            shapes = complete_shapes(signature, random_shapes(signature, _ROWS, self._shapes, given), given)
            feeds = random_inputs(self.model.path, set_values(signature, given), shapes, values=given)
            return [feeds], describe_inputs(signature, self._inputs, given, "seeded random, seed 0")
        except (UsageError, ModelError) as error:
            log.info("no comparison with the model as it was: %s", error.message)
            return [], ""

    def measure(self, path: Path, on: Literal["kernels", "emulation"], level: str) -> None:
        """Run both models; detects a broken graph, not task accuracy.

        Raises `AccuracyError` for a channel that is constant. The `TrtEngineError` of a model that does not run is raised as
        it is.
        """
        if not self._feeds:
            return
        self._expected = self._expected or self._run(self.model.path, "none")
        got, errors = self._run(path, level), dict[str, OutputError]()
        for name in self._tensors:
            pairs = _joined([(one[name], other[name]) for one, other in zip(got, self._expected, strict=True)])
            errors[name] = worst_errors([compare_output(*pair) for pair in pairs], [1] * len(pairs))
        self.result = QuantizedParity(errors, self._feeds_source, on)
        for name, error in errors.items():
            if error.std_ratio < DEAD_STD_RATIO:
                raise AccuracyError(
                    f"{error.std_ratio_channel} of `{name}` is dead in the quantised model: {error.std_ratio:.1%} of its "
                    f"variation is left on {self._feeds_source}",
                    hint="calibrate with data like the model's own, or leave the layers before it out (`--exclude-node`); "
                    "`trt-engine search` finds them; `--no-parity` writes the model all the same",
                )

    def _run(self, path: Path, level: str) -> list[dict[str, Array]]:
        names, loaded = self._tensors, open_with_outputs(path, self._tensors, level)
        try:
            return [dict(zip(names, run_arrays(loaded, names, feeds), strict=True)) for feeds in self._feeds]
        except session.ERRORS as error:
            raise session.translate_run_error(error) from error


def _joined(pairs: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """The batches of one output, by both models, as one: a channel may be constant in a single row. Each stays as it is
    where their sizes differ."""
    sizes = {array.shape[1:] for pair in pairs for array in pair}
    if pairs[0][0].ndim and len(sizes) == 1 and all(len(one) == len(other) for one, other in pairs):
        return [(np.concatenate([one for one, _ in pairs]), np.concatenate([other for _, other in pairs]))]
    return pairs


def random_shapes(
    signature: Signature, rows: int, overrides: Mapping[str, Shape], given: Tensors | None = None
) -> dict[str, Shape]:
    """Shapes of random inputs: `overrides`, those of the arrays that are `given` (of any dtype), and for other inputs with a
    dynamic batch the same batch, or `rows`.

    Raises `ShapeError` for a batch that the model does not take, or dynamic sizes that are not given.
    """
    overrides = {**{name: tuple(np.shape(array)) for name, array in (given or {}).items()}, **overrides}
    batches = {shape[0] for name, shape in overrides.items() if shape and signature.input(name).shape[:1] == (-1,)}
    if len(batches) > 1:  # inputs whose first dimensions are not one batch
        return shapes_of(signature, None, overrides=overrides)
    movable = any(spec.shape and spec.shape[0] < 0 for spec in signature.inputs)
    return shapes_of(signature, None, batch=next(iter(batches), rows) if movable else None, overrides=overrides)

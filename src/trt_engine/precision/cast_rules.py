"""Why a node stays in FP32 when a model is cast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, TensorProto

from trt_engine.graph import stored_tensors
from trt_engine.graph.module_paths import ModulePaths, add_modules
from trt_engine.graph.typed_graph import BFLOAT16, FLOAT, FLOAT16, Op, Tensor
from trt_engine.model import Model
from trt_engine.records.base import Finding
from trt_engine.records.precision import CastReport, Fp32Node

Variant = Literal["float", "low"]
ELEM_TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
TYPE_STRS = {"fp16": FLOAT16, "bf16": BFLOAT16}
NUMPY_DTYPES: dict[str, Any] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
MAX_FINITE = {"fp16": 65504.0, "bf16": float(np.float32(3.3895314e38))}
"""Largest finite value of each type."""
FP32_INPUTS_FROM = {"Resize": 1, "Upsample": 1}
"""First input that must be FP32: region of interest and scales."""
ANY_TYPE_INPUT = frozenset("Cast CastLike Shape Size".split())
"""Operators whose first input may have any type, so that it needs no Cast."""
CONTROL_FLOW = frozenset("If Loop Scan".split())
LAYOUT_OPS = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Expand Tile Slice Gather GatherElements GatherND Concat Split Identity "
    "Pad Compress ReverseSequence".split()
)
ARITHMETIC_OPS = frozenset(
    "Add Sub Mul Div Mod Floor Ceil Round Neg Abs Sqrt Pow Min Max Clip Exp Log Sin Cos Reciprocal Sign Where Sum CumSum "
    "Equal Less Greater LessOrEqual GreaterOrEqual ReduceMax ReduceMin ReduceSum ReduceProd Range Cast".split()
)
PROPAGATING_OPS = LAYOUT_OPS | frozenset("Add Sub Mul Where Neg Abs Sum".split())
"""Operators that propagate values outside the range."""
INDEX_TYPES = frozenset(f"tensor({kind})" for kind in ("int16", "int32", "int64", "uint16", "uint32", "uint64"))
MASK_OPS = frozenset("Where Add Sub Mul Sum Min Max Expand Unsqueeze Reshape Concat Slice Identity Gather Tile".split())
DTYPE_ATTRIBUTES = {
    "Cast": "to", "RandomNormal": "dtype", "RandomUniform": "dtype", "RandomNormalLike": "dtype",
    "RandomUniformLike": "dtype", "EyeLike": "dtype", "Bernoulli": "dtype", "HannWindow": "output_datatype",
    "HammingWindow": "output_datatype", "BlackmanWindow": "output_datatype", "MelWeightMatrix": "output_datatype",
    "DequantizeLinear": "output_dtype",
}  # fmt: skip
"""The attribute that sets an operator's output type."""
FREE_OUTPUT_TYPE = frozenset((*DTYPE_ATTRIBUTES, "Constant", "ConstantOfShape", "CastLike", *CONTROL_FLOW))
"""Operators whose output type does not follow from their inputs alone."""
FP32_ONLY = dict.fromkeys(
    "BlackmanWindow HammingWindow HannWindow MelWeightMatrix RandomNormal RandomUniform".split(),
    "ONNX Runtime's kernels for the CPU write FP32 or FP64 alone",
) | {"BitCast": "it reads the bits of its input", "MeanVarianceNormalization": "its definition holds constants of FP32"}
"""Operators that must stay in FP32 although their schema allows the low type."""
UNDER_ROOT_OPS = LAYOUT_OPS | frozenset(
    "Add Sub Mul Div Neg Abs Max Min Clip Relu Sum Reciprocal Sqrt Mean ReduceMean ReduceSum ReduceMax GlobalAveragePool "
    "AveragePool".split()
)
"""Operators that lead from a square to the root of a normalisation."""
SQUARE_SUMS = frozenset("ReduceSumSquare ReduceL2 LpNormalization GlobalLpPool".split())
"""Operators that square and add up inside: TensorRT writes them out, in the type they are in."""
QDQ = ("QuantizeLinear", "DequantizeLinear")
MAX_SCALE_ERROR = 0.01
"""Largest relative error of a scale stored in the low type; beyond it the scale stays in FP32."""


@dataclass(slots=True)
class CastChanges:
    """Statistics and notes of a cast."""

    opset: tuple[int, ...]
    """Opset before and after."""
    nodes: int = 0
    nodes_cast: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    kept: list[Fp32Node] = field(default_factory=list)
    casts_added: int = 0
    casts_removed: int = 0
    converted: int = 0
    duplicated: list[str] = field(default_factory=list)
    clamped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deferred: list[stored_tensors.DeferredCast] = field(default_factory=list)
    """External weights to convert when the result is written."""

    def to_report(
        self, model: Model, to: str, keep_io: bool, findings: tuple[Finding, ...], paths: ModulePaths
    ) -> CastReport:
        return CastReport(
            model=str(model.path),
            out=None,
            to=to,
            method="built-in",
            keep_io=keep_io,
            opset=(self.opset[0], self.opset[1]),
            nodes=self.nodes,
            nodes_cast=self.nodes_cast,
            operators_cast=dict(self.operators.most_common()),
            fp32_nodes=add_modules(self.kept, paths),
            casts_added=self.casts_added,
            casts_removed=self.casts_removed,
            constants_converted=self.converted,
            duplicated_constants=tuple(self.duplicated),
            constants_clamped=tuple(self.clamped),
            nbytes_before=model.nbytes,
            nbytes_after=None,
            findings=add_modules(findings, paths, "location"),
            notes=tuple(self.notes),
        )


def fp32_tensors(tensors: Iterable[Tensor | None]) -> list[tuple[int, Tensor]]:
    """The FP32 ones of a node's inputs or outputs, with their positions."""
    return [(at, item) for at, item in enumerate(tensors) if item is not None and item.type_str == FLOAT]


def uses_fp32(op: Op) -> bool:
    return bool(fp32_tensors((*op.inputs, *op.outputs)))


def runtime_inputs(graph: GraphProto) -> list[onnx.ValueInfoProto]:
    constants = {item.name for item in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in constants]


def is_constant(tensor: Tensor) -> bool:
    return tensor.value is not None or (
        tensor.producer is not None and tensor.producer.node.op_type in ("Constant", "ConstantOfShape")
    )


def is_read_by(op: Op, kinds: Iterable[str], depth: int = 4) -> bool:
    """True if one of these operators reads the result, directly or through layout ops."""
    users = [user for made in op.outputs if made is not None for user, _ in made.consumers]
    return any(
        user.node.op_type in kinds
        or (depth > 0 and user.node.op_type in LAYOUT_OPS and is_read_by(user, kinds, depth - 1))
        for user in users
    )


def to_half(values: npt.NDArray[Any], to: str) -> npt.NDArray[Any]:
    """The values in FP16 or BF16 (`to`), in their shape; those beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(NUMPY_DTYPES[to])

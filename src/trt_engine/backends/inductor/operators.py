"""The operators the importer has, without PyTorch: what a build refuses before it starts."""

from __future__ import annotations

from trt_engine.errors import ModelError
from trt_engine.graph import walk
from trt_engine.graph.load import parse_errors
from trt_engine.graph.operators import check_nodes
from trt_engine.model import Model

SUPPORTED = frozenset(
    """
    Abs Add And ArgMax ArgMin AveragePool BatchNormalization Cast CastLike Ceil Clip Concat Constant ConstantOfShape
    Conv Cos DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand Flatten Floor Gather GatherElements GatherND
    Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GridSample HardSigmoid HardSwish Identity
    InstanceNormalization IsNaN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax MatMul Max MaxPool
    Min Mod Mul Neg NonZero Not Or PRelu Pad Pow QuantizeLinear Range Reciprocal ReduceL2 ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum Relu Reshape Resize Round Shape Sigmoid Sign Sin Size Slice Softmax Softplus Split
    Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Unsqueeze Where
    """.split()
)
MAX_OPSET = 23
"""The newest opset whose meaning the rules were written for."""


def check_model(model: Model) -> None:
    """`ModelError` naming the operators that the importer lacks."""
    with parse_errors(model.path):
        lacking = dict.fromkeys(
            walk.qualified_name(node)
            for node, *_ in model.graph.nodes
            if (node.domain, node.op_type) not in model.graph.functions
            and (walk.domain_of(node) or node.op_type not in SUPPORTED)
        )
        if lacking:
            names = ", ".join(f"`{name}`" for name in list(lacking)[:8])
            raise ModelError(
                f"`{model.path}` has operators the backend `inductor` does not import: {names}",
                hint="`-b onnxruntime` runs them",
            )
        if (opset := model.opsets.get("", 0)) > MAX_OPSET:
            raise ModelError(
                f"`{model.path}` has opset {opset}, the backend `inductor` imports up to {MAX_OPSET}",
                hint="export it with `opset_version=20`, or `-b onnxruntime`",
            )
        check_nodes(model.graph)
    for spec in model.signature:
        if spec.dtype in ("string", "complex64", "complex128") or spec.dtype.endswith(("int4", "int2", "4_e2m1fn")):
            raise ModelError(f"`{spec.name}` is {spec.dtype}, which its engines do not take", hint="`-b onnxruntime`")

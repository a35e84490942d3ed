"""Categories of kernels and operators, by name.

Names are those of cuBLAS, cuDNN, CUTLASS, TensorRT and Myelin, ONNX Runtime, PyTorch, Triton. The first matching rule wins,
so specific names precede general ones.
"""

from __future__ import annotations

import functools
import re

from trt_engine.records.profile import NON_COMPUTE, Category
from trt_engine.trt.layers import myelin_operations

Rules = tuple[tuple[Category, str], ...]

# ------------------------------------------------------------------------------------------------ kernels

_INSIDE: Rules = (  # anywhere in the name: a generic kernel's purpose is in its template arguments
    (
        "attention",
        r"fmha|flash_?(fwd|attn|attention|fprop)|flash::|sdpa|mha_(fwd|fprop)|multihead|cutlass_?mha|paged_?attention",
    ),
    ("reformat", r"op_cast|\bcastfunctor|float16_copy_kernel|float8_copy|bfloat16_copy_kernel|half2float|float2half"),
    ("copy", r"direct_copy_kernel|copy_device_to_device|catarraybatchedcopy"),
    ("reduction", r"topk"),
    ("other", r"radixsort|bitonicsort|mergesort|\bnms"),
)
_OWN: Rules = (  # in the short name, without namespaces and arguments
    ("element-wise", r"^op_(generic_)?tensor_kernel"),  # cuDNN's sums and products of tensors: the bias of a convolution
    ("attention", r"attention|attn(?!_softmax)|\bmha"),
    ("normalisation", r"softmax"),
    ("matrix", r"split_?k_?reduce|gemm|gemv|gevv|matmul|xmma|nvjet|fprop|dgrad|wgrad"),
    ("normalisation", r"(layer|batch|group|instance|rms|l2|lp)_*norm|norm_kernel|normalization|bn_fw|rowwisemoments"),
    ("reformat", r"nchw_?to_?nhwc|nhwc_?to_?nchw|to_?nc\dhw|reformat|transpose|permut|tensortransform|im2col|col2im"),
    ("reformat", r"quant|convert_|_cast_|cast_?kernel|impl_cast|unpermute|copyvectorized|copypacked|foldedhost|reorder"),
    ("matrix", r"conv(?!ert)|winograd|wmma|tensorop|dot_kernel|cublas|magma|fft"),
    ("reduction", r"pool(?!ed)"),
    ("copy", r"memcpy|memmove|copy|concat|\bcat|split|slice|gather|scatter|expand|(?<![a-z])(tile|pad)|stack"),
    ("copy", r"index_?select|index_elementwise|index_put|embedding"),
    ("reduction", r"reduc|arg(max|min)|logsumexp|cumsum|scan|_sum_|sum_kernel|mean_kernel|histogram"),
    (
        "element-wise",
        r"element_?wise|pointwise|eltwise|activation|gelu|relu|silu|swish|sigmoid|tanh|erf|clip|clamp|bias|add|mul(?!t)|sub|div"
        r"|upsample|resize|interpolat|pow|sqrt|exp(?!and)|where|scale|rope|rotary|glu|dropout|fill|axpy|compare|unary|binary|ternary",
    ),
)  # fmt: skip
_ARGUMENTS: Rules = (  # in the whole name, if the kernel's short name has no match: `cutlass::Kernel2<...gemm...>`
    ("matrix", r"gemm|gemv|fprop|conv2d|tensorop|matmul|cublas"),
    ("normalisation", r"softmax|layer_?norm"),
    ("reduction", r"reduce"),
    ("element-wise", r"element_?wise|pointwise|activation"),
)
_TRITON = re.compile(r"^triton_(poi|red|per|tem|for)_fused_?(.*)")
"""Pointwise, reduction, persistent reduction, template, several of them; then the operators of the graph."""
_TRITON_KINDS: dict[str, Category] = {
    "poi": "element-wise", "red": "reduction", "per": "reduction", "tem": "matrix", "for": "element-wise",
}  # fmt: skip
_TRITON_MOVES = frozenset("clone cat copy permute transpose view t expand stack slice constant pad nd 0".split())


def _compile_rules(rules: Rules) -> tuple[tuple[Category, re.Pattern[str]], ...]:
    return tuple((category, re.compile(pattern)) for category, pattern in rules)


_INSIDE_RULES, _OWN_RULES, _ARGUMENT_RULES = _compile_rules(_INSIDE), _compile_rules(_OWN), _compile_rules(_ARGUMENTS)


def _first_match(rules: tuple[tuple[Category, re.Pattern[str]], ...], text: str) -> Category | None:
    return next((category for category, pattern in rules if pattern.search(text)), None)


@functools.lru_cache(maxsize=4096)
def kernel_category(name: str) -> Category:
    """The category of a kernel by its name; `other` if unknown."""
    if (words := _myelin_category(name)) is not None:
        return words
    own, whole = short_name(name).lower(), name.lower()
    if found := _TRITON.match(own):
        return _triton_category(found[1], found[2])
    return (
        _first_match(_INSIDE_RULES, whole)
        or _first_match(_OWN_RULES, own)
        or _first_match(_ARGUMENT_RULES, whole)
        or "other"
    )


def _triton_category(kind: str, operators: str) -> Category:
    if re.search(r"softmax|norm", operators):
        return "normalisation"
    if kind == "tem" and re.search(r"attention|sdpa", operators):
        return "attention"
    words = [word for word in operators.split("_") if word and not word.isdigit()]
    if kind == "poi" and words and all(word in _TRITON_MOVES for word in words):
        return "copy"
    return _TRITON_KINDS[kind]


# ------------------------------------------------------------------------------------------------ Myelin

_MYELIN_COPIES = frozenset("Move Conc Slic Resh Copy Repl Bro Broa Pad Gath Expa Sque Unsq Iden".split())
_MYELIN_REFORMATS = frozenset("Cast Tran Trans Quan Dequ".split())
_MYELIN_REDUCTIONS = frozenset("Sum Sumr Maxr Minr Mean Redu Prod Argm Topk Pool".split())
"""`Max` alone is element-wise."""


def _myelin_category(name: str) -> Category | None:
    """For Myelin kernels, named by their operations: `__myl_MaxrSubExpSum_myl5_4`."""
    known = myelin_operations(name)
    if known & {"Mha", "Fmha"}:
        return "attention"
    if known & {"Fc", "Gemm", "Conv", "Matm", "Dot"}:
        return "matrix"
    if ("Exp" in known and known & {"Sum", "Sumr"}) or ("Mean" in known and known & {"Sqrt", "Rsqr", "Rsqrt", "Rcp"}):
        return "normalisation"
    if known & {"Sqrt", "Rsqr", "Rsqrt"} and known & {"Sum", "Sumr"}:
        return "normalisation"
    if known and known <= _MYELIN_COPIES:
        return "copy"
    if known and known <= _MYELIN_COPIES | _MYELIN_REFORMATS:
        return "reformat"
    if known & _MYELIN_REDUCTIONS:
        return "reduction"
    return "element-wise" if known else None


# ------------------------------------------------------------------------------------------------ operators


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.lower().split())


_KINDS: tuple[tuple[Category, frozenset[str]], ...] = (
    ("matrix", _word_set(
        "Einsum GRU GRUUnit LSTM RNN AttnLSTM DynamicQuantizeLSTM MoE MoEPacked QMoE RouterGateUpProj FullyConnected fc "
        "correlation Myelin ForeignNode Det Inverse WordConvEmbedding"
    )),
    ("copy", _word_set(
        "Crop DynamicSlice GivenTensorFill Identity Concat Split SplitToSequence Slice Gather GatherElements "
        "GatherND Scatter ScatterElements ScatterND Expand ExpandDims Tile Pad Reshape Squeeze Unsqueeze Flatten "
        "Dropout Copy Move Padding Trilu Compress ReverseSequence Constant QLinearConcat Concatenation "
        "TensorScatter OneHot GatherBlockQuantized CenterCropPad RemovePadding RestorePadding ConcatFromSequence "
        "SequenceAt SequenceConstruct SequenceInsert SequenceErase SequenceEmpty MemcpyToHost MemcpyFromHost "
        "Memcpy UnfoldTensor TorchEmbedding EmptyLike Fill GatherPacked"
    )),
    ("reformat", _word_set(
        "Cast CastLike BitCast Transpose Shuffle Reformat ReorderInput ReorderOutput DepthToSpace SpaceToDepth "
        "QuantizeLinear DequantizeLinear DynamicQuantizeLinear QuantizeBFP DequantizeBFP QuantizeWithOrder "
        "DequantizeWithOrder Quantize Dequantize Col2Im Im2Col TRT_FP8QuantizeLinear TRT_FP8DequantizeLinear "
        "TRT_INT4QuantizeLinear TRT_INT4DequantizeLinear TRT_FP4DynamicQuantize TRT_MXFP8DynamicQuantize "
        "TRT_MXFP8DequantizeLinear DynamicQuantize"
    )),
    ("control", _word_set(
        "If Loop Scan Shape Size Range ConstantOfShape SequenceMap SequenceLength Optional OptionalGetElement "
        "OptionalHasElement shape_call signal wait NoOp Conditional Iterator Recurrence TripLimit host Assertion "
        "ShapeHostToDeviceCopy DeviceToShapeHostCopy BeamSearch GreedySearch Sampling WhisperBeamSearch EyeLike"
    )),
    ("reduction", _word_set(  # TopK reads whole rows and writes a few values of each
        "ArgMax ArgMin CumSum CumProd Reduce QLinearReduceMean ReduceSumInteger CDist TopK"
    )),
    ("normalisation", _word_set("Hardmax LRN MeanVarianceNormalization LpNormalization")),
    ("element-wise", _word_set(  # Resize too: a few operations per value
        "Resize Upsample "
        "Affine ImageScaler ParametricSoftplus ScaledTanh Abs Acos Acosh Add And Asin Asinh Atan Atanh BiasAdd "
        "BiasDropout BiasGelu BiasSplitGelu BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor "
        "BitmaskBiasDropout BitmaskDropout Ceil Celu Clip ComplexMul ComplexMulConj Cos Cosh Div Elu Equal Erf "
        "Exp FastGelu Floor GatedAdd Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less "
        "LessOrEqual Log Max Mean Min Mish Mod Mul MulInteger Neg Not Or Pow PRelu QLinearAdd QLinearLeakyRelu "
        "QLinearMul QLinearSigmoid QLinearWhere QOrderedGelu QuickGelu Reciprocal Relu RotaryEmbedding "
        "MRotaryEmbedding GemmaRotaryEmbedding Round ScaledSiLU Selu Shrink Sigmoid Sign Sin Sinh Softplus "
        "Softsign Sqrt Sub Sum SwiGLU Swish Tan Tanh ThresholdedRelu Where Xor ElementWise Unary PointWise "
        "PointWiseV2 Activation Scale Select kgen Cumulative"
    )),
)  # fmt: skip
_KIND = {word: category for category, words in _KINDS for word in words}
_KIND_RULES = _compile_rules((
    ("attention", r"attention|mha"),
    ("matrix", r"conv|gemm|matmul|matrix_?multiply"),
    ("normalisation", r"norm|softmax"),
    ("reduction", r"pool|^reduce"),
))  # fmt: skip
_NODE_RULES = _compile_rules((  # the last word of a node's name, as exporters write it: `Conv_12`, `node_max_pool2d_1`
    ("attention", r"attention|(?<![a-z])mha(?![a-z])"),
    ("matrix", r"conv(?!ert)|gemm|matmul|linear(?!_?quant)|einsum|(?<![a-z])(fc|lstm|gru|b?mm)(?![a-z])"),
    ("normalisation", r"norm|softmax"),
    ("reduction", r"pool|reduce|arg(max|min)|(?<![a-z])mean(?![a-z])"),
    ("element-wise", r"(?<![a-z])(add|mul|sub|div|pow|sqrt|exp|erf|clip|clamp|where|pwn)(?![a-z])"),
    ("element-wise", r"relu|gelu|silu|sigmoid|tanh"),
    ("reformat", r"transpose|permute|cast|quantize|shuffle|reformat"),
    ("copy", r"reshape|view|flatten|concat|slice|gather|expand|squeeze|split|pad|identity|copy|(?<![a-z])cat(?![a-z])"),
    ("control", r"(?<![a-z])(shape|size|if|loop|range)(?![a-z])"),
))  # fmt: skip


@functools.lru_cache(maxsize=4096)
def operator_category(kind: str, *, name: str = "", is_data_movement: bool = False) -> Category:
    """The category of an operator (ONNX, ONNX Runtime) or a layer (TensorRT), by kind, else by name.

    `is_data_movement`: it only moves data, whatever its name.
    """
    kind = kind.lower()
    found = _KIND.get(kind) or (_first_match(_KIND_RULES, kind) if kind else None)
    if (found is None or kind == "kgen") and name:  # Myelin's kernel names are more specific
        found = _name_category(name) or found
    if is_data_movement and found not in NON_COMPUTE:
        return "reformat"
    return found or "other"


def _name_category(name: str) -> Category | None:
    """The category by a layer's name: that of its most expensive node."""
    if name.startswith("Reformatting CopyNode"):
        return "reformat"
    if (own := _myelin_category(name)) is not None:
        return own
    if "ForeignNode[" in name:
        return "matrix"
    found = [_first_match(_NODE_RULES, part.rpartition("/")[2].lower()) for part in re.split(r" \+ |[\x1e\x1f,]", name)]
    return next((category for category, _ in _NODE_RULES if category in found), None)


# ------------------------------------------------------------------------------------------------ names

_OPERATOR = re.compile(r"\boperator\s*(<=>|->\*?|<<=?|>>=?|\(\)|\[\]|[<>=!+\-*/%^&|~]=?|&&|\|\||new|delete)")
_ANONYMOUS = ("(anonymous namespace)", "<unnamed>", "{anonymous}")
_CUTLASS = re.compile(r"\bcutlass\w*::(Kernel2?|device_kernel)<(?:[\w:]*\benable_\w+<)*")
_MANGLED = re.compile(r"^_ZN?K?(?=\d)")


@functools.lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template and call arguments.

    CUTLASS names every kernel the same; its first template argument is used instead.
    """
    while found := _CUTLASS.search(name):
        name = _first_argument(name[found.end() :]) or found[1]
    text = name.strip()
    if _MANGLED.match(text):
        return _mangled_name(text)
    for unnamed in _ANONYMOUS:
        text = text.replace(unnamed, "anonymous")
    if not any(letter in text for letter in "<(: "):
        return text or name
    kept, depth, index = [], 0, 0
    while index < len(text):
        if depth == 0 and (found := _OPERATOR.match(text, index)):
            kept.append(found[0])
            index = found.end()
            continue
        letter = text[index]
        if letter in "<({[":
            if depth == 0 and letter == "(":
                break  # the call's arguments: the name ends here
            depth += 1
        elif letter in ">)}]" and not (letter == ">" and text[index - 1 : index] == "-"):
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(letter)
        index += 1
    own = "".join(kept).strip()
    own = own.rpartition("::")[2] if "operator" not in own else own[own.rindex("operator") :]
    if not own.startswith("operator"):
        own = own.rpartition(" ")[2]
    return own or text


def _first_argument(text: str) -> str:
    """The first of the template arguments in `text`, which begins after their bracket."""
    depth = 0
    for index, letter in enumerate(text):
        if depth == 0 and letter in ",>":
            return text[:index]
        depth += (letter in "<({[") - (letter in ">)}]")
    return text


def _mangled_name(text: str) -> str:
    """The last name of a mangled nested name; the text itself if it cannot be parsed."""
    index, found = len(_MANGLED.match(text)[0]), ""  # type: ignore[index]
    while index < len(text) and (digits := re.match(r"\d+", text[index:])):
        index += len(digits[0])
        word = text[index : index + int(digits[0])]
        index += int(digits[0])
        if not word.startswith("_GLOBAL__N_"):
            found = word
    return found or text

"""What a kernel or an operator does, read from its name.

The names are what the libraries call their own: cuBLAS, cuDNN, CUTLASS, TensorRT and Myelin, ONNX Runtime, PyTorch, Triton.
The first rule that fits decides, so that special names stand before general ones.
"""

from __future__ import annotations

import functools
import re

from trt_engine.traces import MOVES, Category

__all__ = ["of_kernel", "of_operator", "short"]

Rules = tuple[tuple[Category, str], ...]

# ------------------------------------------------------------------------------------------------ kernels

_INSIDE: Rules = (  # anywhere in the name: what a general kernel was made for stands in its template arguments
    (
        "attention",
        r"fmha|flash_?(fwd|attn|attention|fprop)|flash::|sdpa|mha_(fwd|fprop)|multihead|cutlass_?mha|paged_?attention",
    ),
    ("reformat", r"op_cast|\bcastfunctor|float16_copy_kernel|float8_copy|bfloat16_copy_kernel|half2float|float2half"),
    ("copy", r"direct_copy_kernel|copy_device_to_device|catarraybatchedcopy"),
    ("reduction", r"topk"),
    ("other", r"radixsort|bitonicsort|mergesort|\bnms"),
)
_OWN: Rules = (  # in the kernel's own name, without namespaces and arguments
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
_ARGUMENTS: Rules = (  # in the whole name, where the kernel's own says nothing: `cutlass::Kernel2<...gemm...>`
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


def _compiled(rules: Rules) -> tuple[tuple[Category, re.Pattern[str]], ...]:
    return tuple((category, re.compile(pattern)) for category, pattern in rules)


_INSIDE_RULES, _OWN_RULES, _ARGUMENT_RULES = _compiled(_INSIDE), _compiled(_OWN), _compiled(_ARGUMENTS)


def _first(rules: tuple[tuple[Category, re.Pattern[str]], ...], text: str) -> Category | None:
    return next((category for category, pattern in rules if pattern.search(text)), None)


@functools.lru_cache(maxsize=4096)
def of_kernel(name: str) -> Category:
    """What a kernel does, by its name; `other` where the name does not tell."""
    if (words := _myelin(name)) is not None:
        return words
    own, whole = short(name).lower(), name.lower()
    if found := _TRITON.match(own):
        return _of_triton(found[1], found[2])
    return _first(_INSIDE_RULES, whole) or _first(_OWN_RULES, own) or _first(_ARGUMENT_RULES, whole) or "other"


def _of_triton(kind: str, operators: str) -> Category:
    if re.search(r"softmax|norm", operators):
        return "normalisation"
    if kind == "tem" and re.search(r"attention|sdpa", operators):
        return "attention"
    words = [word for word in operators.split("_") if word and not word.isdigit()]
    if kind == "poi" and words and all(word in _TRITON_MOVES for word in words):
        return "copy"
    return _TRITON_KINDS[kind]


# ------------------------------------------------------------------------------------------------ Myelin

_MYELIN = re.compile(r"^_+myl_([A-Za-z]+)")
_MYELIN_WORD = re.compile(r"[A-Z][a-z]*")
_MYELIN_COPIES = frozenset("Move Conc Slic Resh Copy Repl Bro Broa Pad Gath Expa Sque Unsq Iden".split())
_MYELIN_REFORMATS = frozenset("Cast Tran Trans Quan Dequ".split())
_MYELIN_REDUCTIONS = frozenset("Sum Sumr Maxr Minr Mean Redu Prod Argm Topk Pool".split())
"""`Max` alone is the larger of two."""


def _myelin(name: str) -> Category | None:
    """For the kernels Myelin writes itself, which are named by their operations: `__myl_MaxrSubExpSum_myl5_4`."""
    found = _MYELIN.match(name)
    if found is None:
        return None
    words = _MYELIN_WORD.findall(found[1])
    known = set(words)
    if known & {"Mha", "Fmha"}:
        return "attention"
    if known & {"Fc", "Gemm", "Conv", "Matm", "Dot"}:
        return "matrix"
    if ("Exp" in known and known & {"Sum", "Sumr"}) or ("Mean" in known and known & {"Sqrt", "Rsqr", "Rsqrt", "Rcp"}):
        return "normalisation"
    if known & {"Sqrt", "Rsqr", "Rsqrt"} and known & {"Sum", "Sumr"}:
        return "normalisation"
    if words and known <= _MYELIN_COPIES:
        return "copy"
    if words and known <= _MYELIN_COPIES | _MYELIN_REFORMATS:
        return "reformat"
    if known & _MYELIN_REDUCTIONS:
        return "reduction"
    return "element-wise" if words else None


# ------------------------------------------------------------------------------------------------ operators


def _words(text: str) -> frozenset[str]:
    return frozenset(text.lower().split())


_KINDS: tuple[tuple[Category, frozenset[str]], ...] = (
    ("matrix", _words(
        "Einsum GRU GRUUnit LSTM RNN AttnLSTM DynamicQuantizeLSTM MoE QMoE FullyConnected fc correlation Myelin "
        "ForeignNode Det Inverse WordConvEmbedding"
    )),
    ("copy", _words(
        "Crop DynamicSlice GivenTensorFill Identity Concat Split SplitToSequence Slice Gather GatherElements "
        "GatherND Scatter ScatterElements ScatterND Expand ExpandDims Tile Pad Reshape Squeeze Unsqueeze Flatten "
        "Dropout Copy Move Padding Trilu Compress ReverseSequence Constant QLinearConcat Concatenation "
        "TensorScatter OneHot GatherBlockQuantized CenterCropPad RemovePadding RestorePadding ConcatFromSequence "
        "SequenceAt SequenceConstruct SequenceInsert SequenceErase SequenceEmpty MemcpyToHost MemcpyFromHost "
        "Memcpy UnfoldTensor TorchEmbedding EmptyLike Fill"
    )),
    ("reformat", _words(
        "Cast CastLike BitCast Transpose Shuffle Reformat ReorderInput ReorderOutput DepthToSpace SpaceToDepth "
        "QuantizeLinear DequantizeLinear DynamicQuantizeLinear QuantizeBFP DequantizeBFP QuantizeWithOrder "
        "DequantizeWithOrder Quantize Dequantize Col2Im Im2Col TRT_FP8QuantizeLinear TRT_FP8DequantizeLinear "
        "TRT_INT4QuantizeLinear TRT_INT4DequantizeLinear TRT_FP4DynamicQuantize TRT_MXFP8DynamicQuantize "
        "TRT_MXFP8DequantizeLinear DynamicQuantize"
    )),
    ("control", _words(
        "If Loop Scan Shape Size Range ConstantOfShape SequenceMap SequenceLength Optional OptionalGetElement "
        "OptionalHasElement shape_call signal wait NoOp Conditional Iterator Recurrence TripLimit host Assertion "
        "ShapeHostToDeviceCopy DeviceToShapeHostCopy BeamSearch GreedySearch Sampling WhisperBeamSearch EyeLike"
    )),
    ("reduction", _words(  # TopK reads whole rows and keeps a few of each
        "ArgMax ArgMin CumSum CumProd Reduce QLinearReduceMean ReduceSumInteger CDist TopK"
    )),
    ("normalisation", _words("Hardmax LRN MeanVarianceNormalization LpNormalization")),
    ("element-wise", _words(  # Resize as well: each value it writes is a few operations on the few it reads
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
_KIND_RULES = _compiled((
    ("attention", r"attention|mha"),
    ("matrix", r"conv|gemm|matmul|matrix_?multiply"),
    ("normalisation", r"norm|softmax"),
    ("reduction", r"pool|^reduce"),
))  # fmt: skip
_NODE_RULES = _compiled((  # the last word of a node's name, as exporters write it: `Conv_12`, `node_max_pool2d_1`
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
def of_operator(kind: str, *, name: str = "", moves: bool = False) -> Category:
    """What an operator (ONNX, ONNX Runtime) or a layer (TensorRT) does, by its kind, else by its name.

    `moves`: it is known to compute nothing, whatever it is called.
    """
    found = _of_kind(kind.lower())
    if (found is None or kind.lower() == "kgen") and name:  # Myelin's own kernels tell more in their names
        found = _of_name(name) or found
    if moves and found not in MOVES:
        return "reformat"
    return found or "other"


def _of_kind(kind: str) -> Category | None:
    return _KIND.get(kind) or (_first(_KIND_RULES, kind) if kind else None)


def _of_name(name: str) -> Category | None:
    """By a layer's name: of the nodes it was made of, the one with most to do speaks for it."""
    if name.startswith("Reformatting CopyNode"):
        return "reformat"
    if (own := _myelin(name)) is not None:
        return own
    if "ForeignNode[" in name:
        return "matrix"
    found = [_first(_NODE_RULES, part.rpartition("/")[2].lower()) for part in re.split(r" \+ |[\x1e\x1f,]", name)]
    return next((category for category, _ in _NODE_RULES if category in found), None)


# ------------------------------------------------------------------------------------------------ names

_OPERATOR = re.compile(r"\boperator\s*(<=>|->\*?|<<=?|>>=?|\(\)|\[\]|[<>=!+\-*/%^&|~]=?|&&|\|\||new|delete)")
_ANONYMOUS = ("(anonymous namespace)", "<unnamed>", "{anonymous}")
_CUTLASS = re.compile(r"\bcutlass\w*::(Kernel2?|device_kernel)<(?:[\w:]*\benable_\w+<)*")
_MANGLED = re.compile(r"^_ZN?K?(?=\d)")


@functools.lru_cache(maxsize=4096)
def short(name: str) -> str:
    """A kernel's own name: without return type, namespaces, template and call arguments.

    CUTLASS calls every kernel the same: there the name is its first template argument, which says what was made of it.
    """
    while found := _CUTLASS.search(name):
        name = _first_argument(name[found.end() :]) or found[1]
    text = name.strip()
    if _MANGLED.match(text):
        return _of_mangled(text)
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
                break  # the call's arguments: what follows is no part of the name
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
    """Of template arguments, from behind their bracket: what stands before the comma, or the end, of that level."""
    depth = 0
    for index, letter in enumerate(text):
        if depth == 0 and letter in ",>":
            return text[:index]
        depth += (letter in "<({[") - (letter in ">)}]")
    return text


def _of_mangled(text: str) -> str:
    """The last name of a mangled nested name; the text where it is none we can read."""
    index, found = len(_MANGLED.match(text)[0]), ""  # type: ignore[index]
    while index < len(text) and (digits := re.match(r"\d+", text[index:])):
        index += len(digits[0])
        word = text[index : index + int(digits[0])]
        index += int(digits[0])
        if not word.startswith("_GLOBAL__N_"):
            found = word
    return found or text

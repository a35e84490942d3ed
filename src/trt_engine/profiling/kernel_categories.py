"""Categories of kernels and operators, by name; the kernels and the time breakdown of an inference.

Names are those of cuBLAS, cuDNN, CUTLASS, TensorRT and Myelin, ONNX Runtime, PyTorch, Triton. The first matching rule wins,
so specific names precede general ones.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from trt_engine.profiling.instruments.capture import Capture, window_of
from trt_engine.records.profile import (
    CATEGORIES,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    NON_COMPUTE,
    Activity,
    Category,
    CategoryShare,
    KernelRow,
    TimeBreakdown,
)
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


_NS_PER_MS = 1e6
T = TypeVar("T")


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the intervals' union, in ns."""
    total = 0
    reached: int | None = None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total += max(0, end - start)
            reached = max(start, end)
        elif end > reached:
            total += end - reached
            reached = end
    return total


def busy_ns(activities: Iterable[Activity]) -> int:
    """Busy time in ns: the union of each device's intervals, summed over devices."""
    by_device: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for item in activities:
        by_device[item.device].append((item.start_ns, item.end_ns))
    return sum(union_ns(intervals) for intervals in by_device.values())


def split_by_inference(capture: Capture) -> tuple[tuple[Activity, ...], ...]:
    """The activities of each inference: those launched in its window."""
    launched = {launch.correlation: launch.start_ns for launch in capture.launches}
    found: list[list[Activity]] = [[] for _ in capture.inferences]
    windows = sorted(capture.inferences)
    for item in capture.activities:
        number = window_of(windows, launched.get(item.correlation, item.start_ns))
        if number is not None:
            found[number].append(item)
    return tuple(tuple(items) for items in found)


# ------------------------------------------------------------------------------------------------ rows


def kernel_rows(
    activities: Sequence[Activity], inferences: int, layers: Mapping[int, str] | None = None
) -> tuple[KernelRow, ...]:
    """The kernels by total time, longest first; `layers` names the layer of an activity by its index in `activities`.

    Grid, block, registers and shared memory are set if equal in all launches of a kernel.
    """
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(activities):
        if item.kind == "kernel":
            groups[item.name].append(index)
    spent = {
        name: sum(activities[index].end_ns - activities[index].start_ns for index in indices)
        for name, indices in groups.items()
    }
    whole = sum(spent.values())
    return tuple(
        _kernel_row(name, [activities[index] for index in groups[name]], spent[name] / whole if whole else 0.0, inferences,
             _layers_by_time(activities, groups[name], layers or {}))
        for name in sorted(groups, key=lambda name: (-spent[name], name))
    )  # fmt: skip


def _kernel_row(
    name: str, items: Sequence[Activity], share: float, inferences: int, layers: tuple[str, ...]
) -> KernelRow:
    lengths_us = [(item.end_ns - item.start_ns) / 1e3 for item in items]
    return KernelRow(
        name=name,
        short_name=short_name(name),
        category=kernel_category(name),
        calls=len(items),
        per_inference=len(items) / inferences if inferences else 0.0,
        total_ms=sum(item.end_ns - item.start_ns for item in items) / _NS_PER_MS,
        mean_us=statistics.fmean(lengths_us),
        median_us=statistics.median(lengths_us),
        min_us=min(lengths_us),
        max_us=max(lengths_us),
        share=share,
        layers=layers,
        grid=_common_value(item.grid for item in items),
        block=_common_value(item.block for item in items),
        registers=_common_value(item.registers for item in items),
        shared_bytes=_common_value(item.shared_bytes for item in items),
    )


def _common_value(values: Iterable[T]) -> T | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _layers_by_time(
    activities: Sequence[Activity], indices: Sequence[int], layers: Mapping[int, str]
) -> tuple[str, ...]:
    """The layers of these launches, longest time first."""
    spent: Counter[str] = Counter()
    for index in indices:
        if index in layers:
            spent[layers[index]] += activities[index].end_ns - activities[index].start_ns
    return tuple(sorted(spent, key=lambda name: (-spent[name], name)))


def category_shares(rows: Sequence[KernelRow], inferences: int) -> tuple[CategoryShare, ...]:
    """The time of one inference by kernel category, longest first; without empty categories."""
    return share_by_category(((row.category, row.total_ms, row.calls) for row in rows), inferences)


def share_by_category(times: Iterable[tuple[Category, float, float]], inferences: int) -> tuple[CategoryShare, ...]:
    """The shares of one inference from the category, time in ms and calls of each row of `inferences`."""
    spent: defaultdict[Category, float] = defaultdict(float)
    called: defaultdict[Category, float] = defaultdict(float)
    for category, ms, calls in times:
        spent[category] += ms
        called[category] += calls
    whole = sum(spent.get(name, 0.0) for name in CATEGORIES)
    return tuple(
        CategoryShare(name, ms / inferences, ms / whole if whole else 0.0, max(1, round(called[name] / inferences)))
        for name, ms in sorted(spent.items(), key=lambda item: (-item[1], CATEGORIES.index(item[0])))
        if inferences
    )


# ------------------------------------------------------------------------------------------------ where time goes


def time_breakdown(
    capture: Capture,
    *,
    wall_ms: float,
    gpu_ms: float | None = None,
    h2d_ms: float | None = None,
    d2h_ms: float | None = None,
) -> TimeBreakdown:
    """The time breakdown of one inference. Values measured without a profiler are passed in and override what the
    capture shows: `compute_ms` is `gpu_ms` if given, else the union of all but host copies.

    Idle time is without activity from the first activity of an inference to the first of the next; the last inference
    counts its busy time alone. Times of several devices are summed.
    """
    count = len(capture.inferences)
    if not count:
        return TimeBreakdown(wall_ms=wall_ms, compute_ms=gpu_ms, gpu_ms=gpu_ms, h2d_ms=h2d_ms, d2h_ms=d2h_ms)
    items = capture.activities
    busy = busy_ns(items)
    total = sum(item.end_ns - item.start_ns for item in items)
    here = [item for item in items if item.kind != "copy" or item.name not in (*HOST_TO_DEVICE, *DEVICE_TO_HOST)]

    def each(ns: float) -> float:
        return ns / count / _NS_PER_MS

    def copied(ways: tuple[str, ...]) -> float:
        return each(busy_ns(item for item in items if item.kind == "copy" and item.name in ways))

    working = each(busy_ns(here))
    return TimeBreakdown(
        wall_ms=wall_ms,
        h2d_ms=copied(HOST_TO_DEVICE) if h2d_ms is None else h2d_ms,
        compute_ms=working if gpu_ms is None else gpu_ms,
        d2h_ms=copied(DEVICE_TO_HOST) if d2h_ms is None else d2h_ms,
        busy_ms=each(busy),
        idle_ms=_idle_ns(capture) / _NS_PER_MS,
        launch_ms=None if capture.launch_ns is None else each(capture.launch_ns),
        kernels=sum(item.kind == "kernel" for item in items) / count,
        overlap_ms=each(total - busy),
        gpu_ms=gpu_ms,
        working_ms=working,
    )


def _idle_ns(capture: Capture) -> float:
    """Idle ns per inference, including the gap to the next; within it if there is only one."""
    by_device: defaultdict[int, list[list[Activity]]] = defaultdict(list)
    for items in split_by_inference(capture):
        for device in {item.device for item in items}:
            by_device[device].append([item for item in items if item.device == device])
    total = 0.0
    for runs in by_device.values():
        first = min(item.start_ns for item in runs[0])
        if len(runs) == 1:
            span = max(item.end_ns for item in runs[0]) - first
            total += span - busy_ns(runs[0])
            continue
        last = min(item.start_ns for item in runs[-1])
        until_last = [(item.start_ns, min(item.end_ns, last)) for run in runs for item in run if item.start_ns < last]
        total += (last - first - union_ns(until_last)) / (len(runs) - 1)
    return total

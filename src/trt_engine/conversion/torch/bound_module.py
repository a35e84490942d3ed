"""A PyTorch module bound to example inputs: names, shapes and dynamic axes."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trt_engine.arrayfiles import Array
from trt_engine.conversion.axes import Axes, Axis, axes_for, sizes_of
from trt_engine.conversion.examples import Example, array_of, with_batch_2
from trt_engine.conversion.torch.loaded_module import LoadedModule
from trt_engine.conversion.torch.user_code import user_code_errors
from trt_engine.conversion.torch.value_reads import user_frame
from trt_engine.errors import ModelError, UsageError
from trt_engine.tensors import Shape, format_shape, suggest


@dataclass
class BoundModule:
    """The module bound to named inputs."""

    loaded: LoadedModule
    names: tuple[str, ...]
    """ONNX input names."""
    keywords: tuple[str | None, ...]
    """`forward` argument of each input; None: positional."""
    examples: dict[str, Example]
    axes: Axes
    outputs: tuple[str, ...]
    notes: tuple[str, ...]
    batch_statistics: str | None = None
    """Source line that normalises with batch statistics."""

    def example(self) -> dict[str, Array]:
        """Example inputs of the export."""
        return {name: array_of(name, item, item.shape) for name, item in self.examples.items()}

    def feeds(self, shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
        """Inputs of these shapes."""
        return {name: array_of(name, item, tuple(shapes[name]), seed) for name, item in self.examples.items()}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs of the source."""
        with user_code_errors("running the source"), inference_mode():
            tensors = [to_torch(feeds[name]) for name in self.names]
            leaves = flatten_outputs(call_module(self.loaded.module, tensors, self.keywords))
        found = [_to_numpy(tensor) for _, tensor in leaves]
        if len(found) != len(self.outputs):
            raise ModelError(
                f"the source gives {len(found)} outputs for these sizes and {len(self.outputs)} for the example",
                hint="an ONNX graph has one set of outputs; return the same for every size",
            )
        return dict(zip(self.outputs, found, strict=True))


@contextlib.contextmanager
def inference_mode() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def call_module(module: Any, tensors: Sequence[Any], keywords: Sequence[str | None]) -> Any:
    args = [tensor for tensor, keyword in zip(tensors, keywords, strict=True) if keyword is None]
    kwargs = {keyword: tensor for tensor, keyword in zip(tensors, keywords, strict=True) if keyword is not None}
    return module(*args, **kwargs)


def to_torch(array: Array) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))  # a copy: the source may write into its inputs


def _to_numpy(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return np.asarray(tensor.float().numpy()).astype(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def flatten_outputs(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Tensors in a module's result, named by keys and fields."""
    if isinstance(value, torch.Tensor):
        return [(name or "output", value)]
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif hasattr(value, "_fields"):
        items = [(key, getattr(value, key)) for key in value._fields]
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(item.name, getattr(value, item.name)) for item in fields(value)]
    elif isinstance(value, tuple | list):
        tensors = [item for item in value if item is not None]
        single = len(tensors) == 1 and not name
        items = [
            ("output" if single else f"output_{at}" if not name else str(at), item) for at, item in enumerate(value)
        ]
    else:
        return []
    found = []
    for key, item in items:
        found += flatten_outputs(item, f"{name}_{key}" if name else key)
    return found


def bind_inputs(
    loaded: LoadedModule, given: Sequence[Example], dynamic: Axes | None, *, text: str, all_outputs: bool = False
) -> BoundModule:
    """Bind the source to inputs: those given, else its own examples. Runs it once, to raise its errors now."""
    notes: list[str] = []
    said: list[str] = []
    examples, keywords = _name_inputs(loaded, list(given), notes)
    if loaded.program is not None:
        axes = _program_axes(loaded, examples, dynamic)
    else:
        shapes = {name: item.shape for name, item in examples.items()}
        axes = axes_for(dynamic, shapes, loaded.dynamic if not given or loaded.examples else None)
        axes = {name: positions for name, positions in axes.items() if positions}
        examples, said = with_batch_2(examples, axes)
        notes += said
        sizes_of(axes, {name: item.shape for name, item in examples.items()})
    call = BoundModule(loaded, tuple(examples), keywords, examples, axes, (), ())

    def hint(error: BaseException) -> str:
        expected = _expected_inputs(loaded, examples, error)
        if "=VALUE" in expected:
            return expected
        return f"{'; '.join(said)}: `--static` keeps every size; else {expected}" if said else expected

    statistics = _BatchStatisticsMode()
    with user_code_errors(f"running `{text}` on the example inputs", hint=hint), inference_mode():
        tensors = [to_torch(array) for array in call.example().values()]
        with statistics:
            result = call_module(loaded.module, tensors, keywords)
    call.batch_statistics = statistics.place
    leaves = flatten_outputs(result)
    if not all_outputs and len(leaves) > 1:
        leaves, note = _drop_training_outputs(call, leaves)
        notes += [note] if note else []
    outputs = [name for name, _ in leaves]
    if not outputs:
        raise ModelError(
            f"`{text}` returns a {type(result).__name__} without tensors", hint="return tensors, or a dict of them"
        )
    call.outputs, call.notes = _distinct_names(outputs, set(examples)), tuple(notes)
    return call


class _BatchStatisticsMode(TorchDispatchMode):  # type: ignore[misc]
    """Records the first line that normalises with `training=True`."""

    supports_higher_order_operators = True  # torch.cond runs as it does without the mode

    def __init__(self) -> None:
        super().__init__()
        self.place: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.place is None and "batch_norm" in func.__name__:
            names = [item.name for item in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            if given.get("training") is True or given.get("train") is True:
                frame = user_frame(sys._getframe(1))
                self.place = (
                    f"{frame.f_code.co_filename}:{frame.f_lineno} in `{frame.f_code.co_name}`"
                    if frame is not None
                    else "a line of TorchScript"
                )
        return func(*args, **(kwargs or {}))


def _drop_training_outputs(
    call: BoundModule, outputs: list[tuple[str, Any]]
) -> tuple[list[tuple[str, Any]], str | None]:
    """Outputs without training-only ones, if the source has an export mode, and a note on the dropped ones.

    Ultralytics-style detectors have an attribute `export` on their heads (and `dynamic`, for anchors recomputed at
    every size), which their own exporter sets.
    """
    heads = [
        (name, item) for name, item in call.loaded.module.named_modules() if getattr(item, "export", None) is False
    ]
    before = [
        (item, name, getattr(item, name)) for _, item in heads for name in ("export", "dynamic") if hasattr(item, name)
    ]
    for item, name, _ in before:
        setattr(item, name, True)
    kept: list[tuple[str, Any]] = []
    with contextlib.suppress(Exception), inference_mode():
        tensors = [to_torch(array) for array in call.example().values()]
        kept = flatten_outputs(call_module(call.loaded.module, tensors, call.keywords)) if heads else []
    if not 0 < len(kept) < len(outputs):
        for item, name, value in before:
            setattr(item, name, value)
        return outputs, None
    gone = [name for name, value in outputs if not any(_equal_tensors(value, other) for _, other in kept)]
    where = ", ".join(f"`{name}` ({type(item).__name__})" for name, item in heads)
    return kept, (
        f"dropped as training-only outputs: {', '.join(f'`{name}`' for name in gone)} (`export` was set on {where}); "
        "`--all-outputs` keeps them"
    )


def _equal_tensors(one: Any, two: Any) -> bool:
    return bool(one.shape == two.shape and torch.allclose(one.float(), two.float(), rtol=1e-3, atol=1e-4))


_USUAL_INPUTS = (
    (r"mask", "2x128:int64@1..1"),
    (r"type_ids|segment", "2x128:int64@0..1"),
    (r"decoder_input_ids", "2x16:int64"),
    (r"ids|token|index|indices", "2x128:int64"),
    (r"input_features|mel|fbank|spec", "2x80x3000"),
    (r"input_values|wave|wav|audio|speech|pcm", "2x16000"),
    (r"pixel|image|img|picture", "2x3x224x224"),
)
"""Shapes of inputs by what is in their names."""


def suggest_inputs(loaded: LoadedModule, names: Sequence[str] = ()) -> list[str]:
    """What to give for the inputs: by their names, the first also by the module's first layer with weights."""
    wanted = list(names or required_parameters(loaded) or ("x",))
    plain = plain_parameters(loaded)
    first = _first_layer_input(loaded.module)
    found = []
    for name in wanted:
        usual = next((shape for pattern, shape in _USUAL_INPUTS if re.search(pattern, name, re.IGNORECASE)), None)
        if name in plain:
            found.append(f"{name}=VALUE")
        elif not found and first is not None:
            found.append(f"{name}:{first}")
        else:
            found.append(f"{name}:{usual or 'SHAPE'}")
    return found


def required_parameters(loaded: LoadedModule) -> list[str]:
    """Arguments of forward without a default; all of a script's."""
    try:
        items = inspect.signature(loaded.module.forward).parameters
    except (TypeError, ValueError, AttributeError):
        return list(loaded.parameters)
    needed = [name for name in loaded.parameters if name not in items or items[name].default is inspect.Parameter.empty]
    if needed:
        return needed
    main = getattr(loaded.module, "main_input_name", None)  # of transformers, where every argument has a default
    first = main if isinstance(main, str) and main in items else next(iter(loaded.parameters), "x")
    return [first, *(name for name in loaded.parameters if name == "decoder_input_ids")]


def plain_parameters(loaded: LoadedModule) -> set[str]:
    """Arguments of forward that are declared as numbers or flags, not tensors."""
    if loaded.scripted:
        with contextlib.suppress(AttributeError, RuntimeError):
            return {
                item.name
                for item in loaded.module.forward.schema.arguments[1:]
                if str(item.type) in ("int", "float", "bool")
            }
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        items = inspect.signature(loaded.module.forward).parameters.values()
        return {item.name for item in items if item.annotation in (int, float, bool, "int", "float", "bool")}
    return set()


def _first_layer_input(module: Any) -> str | None:
    """The shape that the first layer with weights reads; None where its kind does not fix the rank."""
    for item in module.modules():
        if isinstance(item, torch.nn.Conv2d):
            return f"2x{item.in_channels}x224x224"
        if isinstance(item, torch.nn.Conv1d):
            return f"2x{item.in_channels}x{16000 if item.in_channels == 1 else 3000}"
        if isinstance(item, torch.nn.Conv3d):
            return f"2x{item.in_channels}x16x112x112"
        if isinstance(item, torch.nn.Embedding):
            return f"2x128:int64@0..{item.num_embeddings - 1}"
        if isinstance(item, torch.nn.Linear):
            return f"2x{item.in_features}"
        if isinstance(item, torch.nn.RNNBase):
            return f"2x100x{item.input_size}" if item.batch_first else f"100x2x{item.input_size}"
    return None


def _expected_inputs(loaded: LoadedModule, examples: Mapping[str, Example], error: BaseException) -> str:
    takes = ", ".join(loaded.parameters) or "tensors"
    if plain := [name for name in loaded.parameters if name in plain_parameters(loaded)]:
        return f"its forward takes ({takes}); `{plain[0]}` is not a tensor: `--input {plain[0]}=VALUE`"
    embedding = _failed_embedding(error)
    for at, (name, item) in enumerate(examples.items()):
        parameter = name if name in loaded.parameters or at >= len(loaded.parameters) else loaded.parameters[at]
        if embedding is not None and item.shape == embedding[0]:
            typed = f"{parameter}:{format_shape(item.shape)}:int64@0..{embedding[1] - 1}"
            return f"its forward takes ({takes}); an embedding of {embedding[1]} rows reads `{parameter}`: `--input {typed}`"
    first = next(iter(examples.items()), None)
    if first is None:
        return f"its forward takes ({takes}); give shapes and types it can run with (`-vv` shows the whole stack)"
    parameter = first[0] if first[0] in loaded.parameters or not loaded.parameters else loaded.parameters[0]
    kind = (
        "int64" if re.search(r"\b(Long|Int)\b", str(error)) and first[1].dtype.startswith("float") else first[1].dtype
    )
    typed = f"`--input {parameter}:{format_shape(first[1].shape)}:{kind}`"
    return (
        f"its forward takes ({takes}); give shapes and types it can run with, as {typed} (`-vv` shows the whole stack)"
    )


def _failed_embedding(error: BaseException) -> tuple[Shape, int] | None:
    """Index shape of a failed embedding lookup, and its number of rows."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, given = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(module, torch.nn.Embedding) and isinstance(given, torch.Tensor):
            return tuple(given.shape), module.num_embeddings
    return None


_RECIPES = (("RTDetr", "rtdetr"), ("Detr", "detr"), ("Bert", "bert"), ("ViT", "vit"))


def find_recipe(call: BoundModule) -> str | None:
    """Script of examples/recipes that converts this architecture."""
    names = [type(item).__name__ for item in call.loaded.module.modules()]
    for prefix, recipe in _RECIPES:
        if any(name.startswith(prefix) for name in names):
            return f"examples/recipes/{recipe}.py"
    ours = any(type(item).__module__.startswith("ultralytics.") for item in call.loaded.module.modules())
    return "examples/recipes/yolo.py" if ours else None


def _distinct_names(names: Sequence[str], taken: set[str]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        made, count = re.sub(r"[^\w.]", "_", name), 1
        while made in taken or made in found:
            made, count = f"{name}_out" if count == 1 else f"{name}_out{count}", count + 1
        found.append(made)
    return tuple(found)


def _name_inputs(
    loaded: LoadedModule, given: list[Example], notes: list[str]
) -> tuple[dict[str, Example], tuple[str | None, ...]]:
    parameters = loaded.parameters
    if not given:
        given = list(loaded.examples)
        if not given:
            raise UsageError(
                f"the inputs are unknown; its forward takes ({', '.join(parameters) or 'tensors'})",
                hint=f"`{' '.join(f'--input {text}' for text in suggest_inputs(loaded))}`",
            )
    elif loaded.examples and all(item.name is not None for item in given):
        known = {item.name: item for item in loaded.examples}
        if known and all(item.name in known for item in given):  # some of the source's own, replaced
            replaced = {item.name: item for item in given}
            given = [_like_example(replaced.get(name, item), item) for name, item in known.items()]
    names = [item.name for item in given]
    if loaded.program is not None:
        return _name_program_inputs(loaded, given)
    matched = [name for name in names if name in parameters]
    if names and len(matched) == len(names) and not loaded.scripted:
        return {str(item.name): item for item in given}, tuple(str(item.name) for item in given)
    if matched and len(matched) < len([name for name in names if name is not None]) and not loaded.any_keyword:
        foreign = next(name for name in names if name is not None and name not in parameters)
        raise UsageError(f"its forward takes no `{foreign}`", hint=suggest(foreign, list(parameters)))
    if loaded.scripted and matched and len(matched) == len(names):  # by position, in the order of its forward
        given = sorted(given, key=lambda item: parameters.index(str(item.name)))
    elif parameters and len(given) > len(parameters) and not loaded.any_keyword:
        raise UsageError(
            f"{len(given)} inputs are given, and its forward takes {len(parameters)}: {', '.join(parameters)}",
            hint="one `--input` for each",
        )
    if loaded.any_keyword and not parameters and all(name is not None for name in names) and not loaded.scripted:
        return {str(item.name): item for item in given}, tuple(str(item.name) for item in given)
    made: dict[str, Example] = {}
    for at, item in enumerate(given):
        parameter = parameters[at] if at < len(parameters) else f"input_{at}"
        name = item.name or parameter
        if item.name and item.name != parameter and at < len(parameters):
            notes.append(f"`{name}` goes to the argument `{parameter}`, by position")
        made[name] = item
    return made, (None,) * len(made)


def _name_program_inputs(
    loaded: LoadedModule, given: list[Example]
) -> tuple[dict[str, Example], tuple[str | None, ...]]:
    """Names of an exported program's inputs, in the order of its forward."""
    made = {}
    for at, item in enumerate(given):
        name = item.name or (loaded.parameters[at] if at < len(loaded.parameters) else "")
        if name not in loaded.parameters:
            raise UsageError(f"the exported program has no input `{name}`", hint=suggest(name, loaded.parameters))
        made[name] = item
    if lacking := [name for name in loaded.parameters if name not in made]:
        raise UsageError(
            f"the input `{lacking[0]}` of the exported program has no example",
            hint=next(f"--input {text}" for text in suggest_inputs(loaded, lacking)),
        )
    ordered = {name: made[name] for name in loaded.parameters}
    return ordered, loaded.keywords if len(loaded.keywords) == len(ordered) else (None,) * len(ordered)


def _like_example(given: Example, known: Example) -> Example:
    """With only a shape given, dtype and range of the source's own example apply."""
    if given is known or given.array is not None or given.dtype != "float32" or known.dtype == "float32":
        return given
    return Example(given.name, given.shape, known.dtype, known.low, known.high)


_NUMBERED = re.compile(r"[su]\d+")
"""Names `torch.export` gives to unnamed sizes."""


def _program_axes(loaded: LoadedModule, examples: Mapping[str, Example], dynamic: Axes | None) -> Axes:
    """Dynamic axes of an exported program, under the requested names."""
    found: Axes = {}
    names = {str(name) for name in loaded.program.graph_signature.user_inputs}
    ranges = loaded.program.range_constraints
    own: dict[str, str] = {}
    for node in loaded.program.graph.nodes:
        if node.op != "placeholder" or node.name not in names or "val" not in node.meta:
            continue
        for at, size in enumerate(getattr(node.meta["val"], "shape", ())):
            if not isinstance(size, torch.SymInt):
                continue
            factor, root = size.node.expr.as_coeff_Mul()
            if not root.is_Symbol or not factor.is_Integer:
                continue
            limits, step = ranges.get(root), int(factor)
            low, high = (int(limits.lower), limits.upper) if limits is not None else (1, None)
            # unbounded: an infinity of torch or sympy, or the largest integer
            top = step * int(high) if high is not None and high.is_Integer and int(high) < 1 << 31 else None
            plain = f"{node.name}_{at}" if _NUMBERED.fullmatch(str(root)) else str(root)
            symbol = own.setdefault(str(size.node.expr), "batch" if at == 0 and "batch" not in own.values() else plain)
            found.setdefault(node.name, {})[at] = Axis(symbol, step * max(low, 1), top, step)
    if dynamic is None:
        return found
    asked = axes_for(dynamic, {name: item.shape for name, item in examples.items()})
    renamed: dict[str, str] = {}
    for name, positions in asked.items():
        for at, axis in positions.items():
            if at not in found.get(name, {}):
                raise ModelError(
                    f"axis {at} of `{name}` is fixed at {examples[name].shape[at]} in the exported program, and "
                    f"`{axis.symbol}` was to be dynamic",
                    hint=f'export it again with `dynamic_shapes={{"{name}": {{{at}: torch.export.Dim("{axis.symbol}")}}}}`',
                )
            renamed[found[name][at].symbol] = axis.symbol
    return {
        name: {at: replace(axis, symbol=renamed.get(axis.symbol, axis.symbol)) for at, axis in positions.items()}
        for name, positions in found.items()
    }

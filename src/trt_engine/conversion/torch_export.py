"""PyTorch modules and exported programs to ONNX: the dynamo exporter, and the TorchScript exporter behind it."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trt_engine.conversion.axes import Axes, Axis, axes_for, sizes_of, symbols_of
from trt_engine.conversion.examples import Example, array_of, raised
from trt_engine.conversion.exporting import Array, Exported
from trt_engine.conversion.torch_loading import Loaded, own_code, place_of
from trt_engine.conversion.value_reads import ValueRead, own_frame, read_at, value_reads
from trt_engine.errors import MemoryExhausted, ModelError, UsageError
from trt_engine.files import explain
from trt_engine.tensors import Shape, closest, format_shape

__all__ = ["Call", "ExportFailed", "bound", "export", "frozen_values", "recipe_of"]

log = logging.getLogger(__name__)

_HIGHEST_TORCHSCRIPT = 20
"""The highest opset the TorchScript exporter writes (torch 2.13)."""
_PREFIX = "source."


class ExportFailed(Exception):
    """An exporter could not; the text says why, in one line."""

    def __init__(self, reason: str, read: ValueRead | None = None) -> None:
        super().__init__(reason)
        self.read = read
        """The line that depends on the values of a tensor, where that is why."""


@dataclass
class Call:
    """The module bound to named inputs: how it is called, with what, and what its outputs are called."""

    loaded: Loaded
    names: tuple[str, ...]
    """Of the inputs in ONNX."""
    keywords: tuple[str | None, ...]
    """The argument of `forward` each goes to; None: by position."""
    examples: dict[str, Example]
    axes: Axes
    outputs: tuple[str, ...]
    notes: tuple[str, ...]
    batch_statistics: str | None = None
    """The line that normalises with the statistics of the inputs at hand."""

    def example(self) -> dict[str, Array]:
        """The inputs it is exported with."""
        return {name: array_of(name, item, item.shape) for name, item in self.examples.items()}

    def feeds(self, shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
        """Inputs of these shapes."""
        return {name: array_of(name, item, tuple(shapes[name]), seed) for name, item in self.examples.items()}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The source's own outputs."""
        with own_code("running the source"), _calm():
            tensors = [_tensor(feeds[name]) for name in self.names]
            leaves = _leaves(_call(self.loaded.module, tensors, self.keywords))
        found = [_numpy(tensor) for _, tensor in leaves]
        if len(found) != len(self.outputs):
            raise ModelError(
                f"the source gives {len(found)} outputs for these sizes and {len(self.outputs)} for the example",
                hint="an ONNX graph has one set of outputs; return the same for every size",
            )
        return dict(zip(self.outputs, found, strict=True))


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _call(module: Any, tensors: Sequence[Any], keywords: Sequence[str | None]) -> Any:
    args = [tensor for tensor, keyword in zip(tensors, keywords, strict=True) if keyword is None]
    kwargs = {keyword: tensor for tensor, keyword in zip(tensors, keywords, strict=True) if keyword is not None}
    return module(*args, **kwargs)


def _tensor(array: Array) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))  # a copy: the source may write into its inputs


def _numpy(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return np.asarray(tensor.float().numpy()).astype(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def _leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """The tensors in what a module returns, with the names its keys and fields give them."""
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
        found += _leaves(item, f"{name}_{key}" if name else key)
    return found


# ------------------------------------------------------------------------------------------------ binding


def bound(
    loaded: Loaded, given: Sequence[Example], dynamic: Axes | None, *, text: str, all_outputs: bool = False
) -> Call:
    """The source with its inputs: those given, else those it brings; run once, so that what it raises is told now."""
    notes: list[str] = []
    said: list[str] = []
    examples, keywords = _named(loaded, list(given), notes)
    if loaded.program is not None:
        axes = _program_axes(loaded, examples, dynamic)
    else:
        shapes = {name: item.shape for name, item in examples.items()}
        axes = axes_for(dynamic, shapes, loaded.dynamic if not given or loaded.examples else None)
        axes = {name: positions for name, positions in axes.items() if positions}
        examples, said = raised(examples, axes)
        notes += said
        sizes_of(axes, {name: item.shape for name, item in examples.items()})
    call = Call(loaded, tuple(examples), keywords, examples, axes, (), ())

    def hint(error: BaseException) -> str:
        expected = _expected(loaded, examples, error)
        return f"{'; '.join(said)}: `--fixed` keeps every size; else {expected}" if said else expected

    statistics = _BatchStatistics()
    with own_code(f"running `{text}` on the example inputs", hint=hint), _calm():
        tensors = [_tensor(array) for array in call.example().values()]
        with statistics:
            result = _call(loaded.module, tensors, keywords)
    call.batch_statistics = statistics.place
    leaves = _leaves(result)
    if not all_outputs and len(leaves) > 1:
        leaves, note = _in_export_mode(call, leaves)
        notes += [note] if note else []
    outputs = [name for name, _ in leaves]
    if not outputs:
        raise ModelError(
            f"`{text}` returns a {type(result).__name__} without tensors", hint="return tensors, or a dict of them"
        )
    call.outputs, call.notes = _distinct(outputs, set(examples)), tuple(notes)
    return call


class _BatchStatistics(TorchDispatchMode):  # type: ignore[misc]
    """Notes the first line that normalises with `training=True`, whatever an exporter writes it as."""

    supports_higher_order_operators = True  # torch.cond runs as it does without the mode

    def __init__(self) -> None:
        super().__init__()
        self.place: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.place is None and "batch_norm" in func.__name__:
            names = [item.name for item in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            if given.get("training") is True or given.get("train") is True:
                frame = own_frame(sys._getframe(1))
                self.place = (
                    f"{frame.f_code.co_filename}:{frame.f_lineno} in `{frame.f_code.co_name}`"
                    if frame is not None
                    else "a line of TorchScript"
                )
        return func(*args, **(kwargs or {}))


def _in_export_mode(call: Call, outputs: list[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], str | None]:
    """The outputs without those of training, where the source has a mode for exporters, and a note that names the rest.

    Detectors in the style of Ultralytics have an attribute `export` on their heads (and `dynamic`, for anchors made anew
    at every size), which their own exporter sets.
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
    with contextlib.suppress(Exception), _calm():
        tensors = [_tensor(array) for array in call.example().values()]
        kept = _leaves(_call(call.loaded.module, tensors, call.keywords)) if heads else []
    if not 0 < len(kept) < len(outputs):
        for item, name, value in before:
            setattr(item, name, value)
        return outputs, None
    gone = [name for name, value in outputs if not any(_equal(value, other) for _, other in kept)]
    where = ", ".join(f"`{name}` ({type(item).__name__})" for name, item in heads)
    return kept, (
        f"left out as outputs of training: {', '.join(f'`{name}`' for name in gone)} (`export` was set on {where}); "
        "`--all-outputs` keeps them"
    )


def _equal(one: Any, two: Any) -> bool:
    return bool(one.shape == two.shape and torch.allclose(one.float(), two.float(), rtol=1e-3, atol=1e-4))


def _expected(loaded: Loaded, examples: Mapping[str, Example], error: BaseException) -> str:
    takes = ", ".join(loaded.parameters) or "tensors"
    embedding = _embedding_of(error)
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


def _embedding_of(error: BaseException) -> tuple[Shape, int] | None:
    """The shape of what an embedding could not look up, and how many rows it has."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, given = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(module, torch.nn.Embedding) and isinstance(given, torch.Tensor):
            return tuple(given.shape), module.num_embeddings
    return None


_RECIPES = (("RTDetr", "rtdetr"), ("Detr", "detr"), ("Bert", "bert"), ("ViT", "vit"))


def recipe_of(call: Call) -> str | None:
    """The script of examples/recipes that converts this architecture."""
    names = [type(item).__name__ for item in call.loaded.module.modules()]
    for prefix, recipe in _RECIPES:
        if any(name.startswith(prefix) for name in names):
            return f"examples/recipes/{recipe}.py"
    ours = any(type(item).__module__.startswith("ultralytics.") for item in call.loaded.module.modules())
    return "examples/recipes/yolo.py" if ours else None


def _distinct(names: Sequence[str], taken: set[str]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        made, count = re.sub(r"[^\w.]", "_", name), 1
        while made in taken or made in found:
            made, count = f"{name}_out" if count == 1 else f"{name}_out{count}", count + 1
        found.append(made)
    return tuple(found)


def _named(loaded: Loaded, given: list[Example], notes: list[str]) -> tuple[dict[str, Example], tuple[str | None, ...]]:
    parameters = loaded.parameters
    if not given:
        given = list(loaded.examples)
        if not given:
            raise UsageError(
                f"nothing says what the inputs look like; its forward takes ({', '.join(parameters) or 'tensors'})",
                hint=" ".join(f"--input {name}:2x3x224x224" for name in parameters[:1] or ("x",)),
            )
    elif loaded.examples and all(item.name is not None for item in given):
        known = {item.name: item for item in loaded.examples}
        if known and all(item.name in known for item in given):  # some of the source's own, replaced
            replaced = {item.name: item for item in given}
            given = [_like(replaced.get(name, item), item) for name, item in known.items()]
    names = [item.name for item in given]
    if loaded.program is not None:
        return _of_program(loaded, given)
    matched = [name for name in names if name in parameters]
    if names and len(matched) == len(names) and not loaded.scripted:
        return {str(item.name): item for item in given}, tuple(str(item.name) for item in given)
    if matched and len(matched) < len([name for name in names if name is not None]) and not loaded.any_keyword:
        foreign = next(name for name in names if name is not None and name not in parameters)
        raise UsageError(f"its forward takes no `{foreign}`", hint=closest(foreign, list(parameters)))
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


def _of_program(loaded: Loaded, given: list[Example]) -> tuple[dict[str, Example], tuple[str | None, ...]]:
    """An exported program is called with what it was exported with, under the names it has."""
    made = {}
    for at, item in enumerate(given):
        name = item.name or (loaded.parameters[at] if at < len(loaded.parameters) else "")
        if name not in loaded.parameters:
            raise UsageError(f"the exported program has no input `{name}`", hint=closest(name, loaded.parameters))
        made[name] = item
    if lacking := [name for name in loaded.parameters if name not in made]:
        raise UsageError(
            f"nothing says what the input `{lacking[0]}` of the exported program looks like",
            hint=f"--input {lacking[0]}:2x3x224x224",
        )
    ordered = {name: made[name] for name in loaded.parameters}
    return ordered, loaded.keywords if len(loaded.keywords) == len(ordered) else (None,) * len(ordered)


def _like(given: Example, known: Example) -> Example:
    """Given by shape alone, the type and range of the source's own example hold."""
    if given is known or given.array is not None or given.dtype != "float32" or known.dtype == "float32":
        return given
    return Example(given.name, given.shape, known.dtype, known.low, known.high)


_NUMBERED = re.compile(r"[su]\d+")
"""What `torch.export` calls a size nobody named."""


def _program_axes(loaded: Loaded, examples: Mapping[str, Example], dynamic: Axes | None) -> Axes:
    """The dynamic axes an exported program has, under the names asked for."""
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
            # open above is an infinity of torch's or of sympy's, or the largest integer
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


# ------------------------------------------------------------------------------------------------ exporters


class _Flat(torch.nn.Module):  # type: ignore[misc]
    """The source as a module of plain tensors: in by position, out as a tuple."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.source = call.loaded.module
        self._keywords = call.keywords

    def forward(self, *tensors: Any) -> Any:
        found = tuple(tensor for _, tensor in _leaves(_call(self.source, tensors, self._keywords)))
        return found if len(found) > 1 else found[0]


def export(call: Call, exporter: str, opset: int, folder: Path) -> Exported:
    """The source as a raw ONNX file in `folder`; `ExportFailed` with the reason where this exporter cannot."""
    path = folder / f"{exporter}.onnx"
    roots: dict[str, tuple[str, int]] = {}
    try:
        if exporter == "dynamo":
            roots = _dynamo(call, opset, path)
        else:
            _torchscript(call, opset, path)
    except (ExportFailed, KeyboardInterrupt):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryExhausted(
            "the export needs more memory than there is", hint="give a smaller example `--input`"
        ) from error
    except BaseException as error:  # exporters let through what the user's code raises under them
        for item in _chain(error):
            if isinstance(item, OSError) and item.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise explain(item, folder.parent) from error
        raise _failed(error) from error
    versions = dict(call.loaded.versions)
    with contextlib.suppress(ImportError):
        import onnxscript

        versions["onnxscript"] = str(onnxscript.__version__)
    symbols = {name: {at: axis.symbol for at, axis in positions.items()} for name, positions in call.axes.items()}
    return Exported(
        path,
        call.run,
        exporter,
        call.example(),
        symbols,
        (*call.loaded.notes, *call.notes),
        versions,
        limits=symbols_of(call.axes),
        feeds=call.feeds,
        specialized=lambda: _where_specialized(call),
        roots=roots,
        modules=frozenset(name for name, _ in call.loaded.module.named_modules() if name),
        batch_statistics=call.batch_statistics,
    )


def _dynamo(call: Call, opset: int, path: Path) -> dict[str, tuple[str, int]]:
    if call.loaded.scripted:
        raise ExportFailed("it reads Python code, and this is TorchScript")
    args = tuple(_tensor(array) for array in call.example().values())
    if call.loaded.program is not None:
        for size in call.loaded.program.range_constraints:
            if not size.is_Symbol:
                raise ExportFailed(
                    f"torch {torch.__version__} does not write a program that was saved with an axis in steps (`{size}`)"
                )
    with _silent(), _calm(), _len_as_size(call.loaded.module):
        if call.loaded.program is not None:
            program = torch.onnx.export(
                call.loaded.program, dynamo=True, input_names=list(call.names), output_names=list(call.outputs),
                opset_version=opset, verbose=False,
            )  # fmt: skip
        else:
            program = torch.onnx.export(
                _Flat(call).eval(), args, dynamo=True, input_names=list(call.names), output_names=list(call.outputs),
                dynamic_shapes=(_dims(call),), opset_version=opset, verbose=False, optimize=True,
            )  # fmt: skip
    large = sum(parameter.nbytes for parameter in call.loaded.module.state_dict().values()) > _INLINE_UP_TO
    program.save(str(path), external_data=large)
    return _roots(call, getattr(program, "exported_program", None))


def _roots(call: Call, program: Any) -> dict[str, tuple[str, int]]:
    """What the exporter's own symbols are: `s35` -> (`height`, 32) where the height is `32*s35`."""
    if program is None:
        return {}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [str(name) for name in program.graph_signature.user_inputs]
    found = {}
    for name, value in zip(call.names, (values.get(item) for item in inputs), strict=False):
        for at, axis in call.axes.get(name, {}).items():
            sizes = getattr(value, "shape", ())
            if at < len(sizes) and isinstance(sizes[at], torch.SymInt):
                factor, root = sizes[at].node.expr.as_coeff_Mul()
                if root.is_Symbol and factor.is_Integer:
                    found[str(root)] = (axis.symbol, int(factor))
    return found


_INLINE_UP_TO = 1 << 30


def _dims(call: Call) -> tuple[dict[int, Any] | None, ...]:
    made: dict[str, Any] = {}
    for positions in call.axes.values():
        for axis in positions.values():
            if axis.symbol not in made:
                high = None if axis.high is None else axis.high // axis.step
                low = axis.low // axis.step
                name = axis.symbol if axis.step == 1 else f"_{axis.symbol}"
                dim = torch.export.Dim(name, min=low, max=high) if high != low else None
                made[axis.symbol] = dim * axis.step if dim is not None and axis.step > 1 else dim
    return tuple(
        {at: made[axis.symbol] for at, axis in call.axes[name].items()} if name in call.axes else None
        for name in call.names
    )


def _torchscript(call: Call, opset: int, path: Path) -> None:
    if call.loaded.program is not None:
        raise ExportFailed("it traces modules, and this is an exported program")
    args = tuple(_tensor(array) for array in call.example().values())
    dynamic = {name: {at: axis.symbol for at, axis in positions.items()} for name, positions in call.axes.items()}
    with _silent(), _without_fd_1(), _calm(), _len_as_size(call.loaded.module):
        # a script is exported as it is: called inside a trace, its weights are not part of that trace
        module = call.loaded.module if call.loaded.scripted else _Flat(call).eval()
        torch.onnx.export(
            module, args, str(path), dynamo=False, verbose=True, input_names=list(call.names),
            output_names=list(call.outputs), dynamic_axes=dynamic, opset_version=min(opset, _HIGHEST_TORCHSCRIPT),
            do_constant_folding=True,
        )  # fmt: skip


@contextlib.contextmanager
def _len_as_size(module: Any) -> Iterator[None]:
    """`len(tensor)` must be a number in Python, `tensor.shape[0]` stays a size: the files of the source read the latter."""
    files = {sys.modules.get(type(item).__module__) for item in module.modules()}
    patched = [file for file in files if file is not None and "len" not in vars(file) and _own_file(file)]
    for file in patched:
        file.len = _rows  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for file in patched:
            del file.len


def _own_file(file: Any) -> bool:
    return file.__name__.split(".")[0] not in ("torch", "trt_engine", "builtins")


def _rows(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else len(value)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What the exporters print and log goes to our debug log."""
    names = (
        "torch.onnx",
        "torch.export",
        "torch._export",
        "torch.fx",
        "torch._dynamo",
        "onnxscript",
        "onnx_ir",
        "torch",
    )
    loggers = [logging.getLogger(name) for name in names]
    levels = [item.level for item in loggers]
    said = io.StringIO()
    for item in loggers:
        item.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    finally:
        for item, level in zip(loggers, levels, strict=True):
            item.setLevel(level)
        if text := said.getvalue().strip():
            log.debug("%s", text[-4000:])


@contextlib.contextmanager
def _without_fd_1() -> Iterator[None]:
    """`verbose=True` is what makes the TorchScript exporter note source lines; it prints the graph too, from C++."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with tempfile.TemporaryFile() as instead:
            os.dup2(instead.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


_USER_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what is behind it, outermost first."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    return chain


def _failed(error: BaseException) -> ExportFailed:
    """One line: what the innermost error says, and the place in the user's file where it names one."""
    chain = _chain(error)
    told = next(
        (
            item
            for item in chain
            if not type(item).__name__.endswith(("TorchExportError", "OnnxExporterError", "ConversionError"))
        ),
        chain[0],
    )
    lines = [line.strip() for line in str(told).splitlines() if line.strip()]
    text = f"{type(told).__name__}: {lines[0] if lines else ''}"[:300]
    places = [match for match in _USER_LINE.finditer(str(told)) if not _of_a_library(match["file"])]
    place = f"{places[-1]['file']}:{places[-1]['line']} in `{places[-1]['function']}`" if places else place_of(told)
    guard = next((item for item in chain if _VALUE_GUARD.search(f"{type(item).__name__}: {item}")), None)
    line = (_guarded_line(guard) or (places[-1] if places else None)) if guard is not None else None
    read = read_at(line["file"], int(line["line"]), line["function"]) if line is not None else None
    if read is not None:
        return ExportFailed(str(read), read)
    return ExportFailed(text + (f" ({place})" if place else ""))


_VALUE_GUARD = re.compile(r"GuardOnDataDependent|data-dependent expression|[Dd]ata-dependent branching|item\(\) on")


def _guarded_line(error: BaseException) -> re.Match[str] | None:
    """The line of the source at which `torch.export` met a condition on values."""
    lines = [match for match in _USER_LINE.finditer(str(error)) if "/torch/" not in match["file"]]
    return lines[-1] if lines else None


def frozen_values(call: Call) -> list[ValueRead]:
    """The lines of the source that read values of tensors while it is traced: what they decide would be frozen."""
    if call.loaded.scripted or call.loaded.program is not None:
        return []
    args = tuple(_tensor(array) for array in call.example().values())
    with _silent(), _len_as_size(call.loaded.module):
        return value_reads(_Flat(call).eval(), args)


def _of_a_library(path: str) -> bool:
    return "site-packages" in path or "/lib/python" in path or path.startswith("<")


_GUARD = re.compile(r"(?:eval|set_replacement:?) .*?(?P<file>\S+\.py):(?P<line>\d+) in (?P<function>\w+)")


def _where_specialized(call: Call) -> str | None:
    """The line of the user's file where an open size first became a number for `torch.export`; None where it says none."""
    if call.loaded.scripted or call.loaded.program is not None:
        return None
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, ear = logging.getLogger("torch.fx.experimental.symbolic_shapes"), Ear()
    args = tuple(_tensor(array) for array in call.example().values())
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        with _silent(), _calm(), _len_as_size(call.loaded.module):
            logger.setLevel(logging.INFO)
            logger.handlers[:], logger.propagate = [ear], False
            torch.export.export(_Flat(call).eval(), args, dynamic_shapes=(_dims(call),), strict=False)
    except Exception as error:  # it fails as it failed before; what it said on the way is wanted
        log.debug("%s", error)
    finally:
        logger.handlers[:], logger.propagate, logger.level = before
    for line in heard:
        if "Eq(" in line or "set_replacement" in line:
            match = _GUARD.search(line)
            if match is not None and not _of_a_library(match["file"]):
                return f"{Path(match['file']).name}:{match['line']} in `{match['function']}`"  # torch cuts paths short
    return None

"""Finds where Python reads tensor values while PyTorch traces a module: decisions of an `if` are frozen in the graph.

PyTorch's `TracerWarning` does not distinguish sizes from values and misses `range(tensor)`, `list[tensor]` and
`torch.equal`. Here each read is looked up in the traced graph: sizes are covered by comparing at several sizes, values
are not. Pure guards (`assert`, `if ...: raise`) freeze nothing.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

_METHODS = (
    "__bool__ __int__ __float__ __complex__ __index__ __array__ item tolist numpy equal allclose is_nonzero".split()
)
_FUNCTIONS = ("equal", "allclose", "is_nonzero", "tensor", "as_tensor")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_SIZES = frozenset(("aten::size", "aten::numel", "aten::_shape_as_tensor", "aten::len", "aten::dim", "prim::shape"))
_SHAPED_BY_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        "nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "bincount", "repeat_interleave",
    )
) | {"torchvision::nms"}  # fmt: skip


@dataclass(frozen=True)
class ValueRead:
    """A source line that reads tensor values during tracing."""

    statement: str
    place: str
    """`net.py:6 in forward`."""
    branch: bool
    """True for a condition, False for a number or array."""

    def __str__(self) -> str:
        keeps = "one branch" if self.branch else "the value of the example"
        return f"`{self.statement}` at {self.place} depends on the values of a tensor: the export would keep {keeps}"


def value_reads(module: Any, args: tuple[Any, ...]) -> list[ValueRead]:
    """Value reads that a trace of `module(*args)` freezes, one per line, in order.

    Errors of the trace are ignored: the export raises them too.
    """
    found: dict[tuple[str, Any], ValueRead] = {}
    graph = _TracedGraph(len(args))

    def heard(name: str, tensors: list[Any], frame: FrameType | None) -> None:
        if torch._C._get_tracing_state() is None or frame is None:
            return
        if not any(graph.reads_values(torch._C._get_value_trace(item)) for item in tensors):
            return
        read = read_at(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if read is not None:
            branch = read.branch or name in ("__bool__", "equal", "allclose", "is_nonzero")
            found.setdefault((read.statement, frame.f_code), ValueRead(read.statement, read.place, branch))

    def picked(indices: Any, result: Any) -> None:
        masks = [item for item in _flatten(indices) if isinstance(item, torch.Tensor) and item.dtype is torch.bool]
        if torch._C._get_tracing_state() is not None and any(
            graph.reads_values(torch._C._get_value_trace(mask)) for mask in masks
        ):
            graph.shaped_by_values(torch._C._get_value_trace(result))

    with _patch_reads(heard, picked), warnings.catch_warnings(), torch.no_grad(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        torch.jit._get_trace_graph(module, args)
    return list(found.values())


@contextlib.contextmanager
def _patch_reads(
    on_read: Callable[[str, list[Any], FrameType | None], None], picked: Callable[[Any, Any], None]
) -> Iterator[None]:
    """Patch every conversion from tensor to Python to call back with the tensors and the reading frame; `x[...]`
    calls `picked`. A tensor as slice bound is recorded, not read."""
    kept: list[tuple[Any, str, Any]] = []
    slicing = 0

    def patch(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        @functools.wraps(before)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tensors = [item for item in _flatten(args[:2]) if isinstance(item, torch.Tensor)]
            if not (slicing and name == "__index__"):
                on_read(name, tensors, user_frame(sys._getframe(1)))
            return before(*args, **kwargs)

        kept.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wrapper)

    def slices(name: str) -> None:
        before = getattr(torch.Tensor, name)

        @functools.wraps(before)
        def wrapper(self: Any, indices: Any, *value: Any) -> Any:
            nonlocal slicing
            slicing += 1
            try:
                result = before(self, indices, *value)
            finally:
                slicing -= 1
            if name == "__getitem__":
                picked(indices, result)
            return result

        kept.append((torch.Tensor, name, vars(torch.Tensor).get(name)))
        setattr(torch.Tensor, name, wrapper)

    try:
        slices("__getitem__")
        slices("__setitem__")
        for name in _METHODS:
            patch(torch.Tensor, name)
        for name in _FUNCTIONS:
            patch(torch, name)
        yield
    finally:
        for owner, name, before in reversed(kept):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Innermost frame outside PyTorch and this package."""
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return frame


# ------------------------------------------------------------------------------------------------ lines of the source


def read_at(file: str, line: int, function: str) -> ValueRead | None:
    """The statement at a source line, as a value read; None for a pure guard."""
    place = f"{file}:{line} in `{function}`"
    statement = _statement(file, line)
    if statement is None:
        return ValueRead(linecache.getline(file, line).strip() or "a statement", place, False)
    if _only_guards(statement):
        return None
    return ValueRead(_first_code_line(statement), place, isinstance(statement, ast.If | ast.While))


_WIDTH = 80


def _first_code_line(statement: ast.stmt) -> str:
    """First line of the statement; the head of an `if` or loop."""
    if isinstance(statement, ast.If | ast.While):
        text = f"{'if' if isinstance(statement, ast.If) else 'while'} {ast.unparse(statement.test)}:"
    else:
        text = ast.unparse(statement).splitlines()[0]
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


@functools.lru_cache(maxsize=32)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


_HOLDERS = (ast.FunctionDef, ast.ClassDef, ast.With, ast.Try)


def _statement(file: str, line: int) -> ast.stmt | None:
    """Innermost statement at a line; of an `if` or loop only the head counts."""
    tree = _tree(file)
    found: ast.stmt | None = None
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.stmt) or isinstance(node, _HOLDERS):
            continue
        head: ast.AST = node.test if isinstance(node, ast.If | ast.While) else node
        head = node.iter if isinstance(node, ast.For) else head
        first, last = node.lineno, getattr(head, "end_lineno", None) or node.lineno
        if first <= line <= last and (found is None or node.lineno > found.lineno):
            found = node
    return found


def _only_guards(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assert):
        return True
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and all(isinstance(item, ast.Raise | ast.Assert | ast.Pass) or _warns(item) for item in statement.body)
    )


_WARNING_CALLS = frozenset("warn warning warning_once info debug print".split())


def _warns(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in _WARNING_CALLS


# ------------------------------------------------------------------------------------------------ the traced graph


class _Dependence(NamedTuple):
    """How a traced value depends on input values."""

    values: bool
    shape: bool


_NEITHER = _Dependence(False, False)


class _TracedGraph:
    """Looks up in a running trace whether a value depends on input values or only on shapes."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._known: dict[int, _Dependence] = {}
        """By the number of the value: names change while a graph is traced."""

    def shaped_by_values(self, value: Any) -> None:
        """True for shapes that depend on values, as of `x[mask]`. A running trace has no types, so operators decide."""
        self._known[value.unique()] = _Dependence(True, True)

    def reads_values(self, value: Any) -> bool:
        stack = [(value, False)]
        while stack:
            item, ready = stack.pop()
            if item.unique() in self._known:
                continue
            node = item.node()
            if node.kind() == "prim::Param":
                for at, output in enumerate(node.outputs()):  # parameters and buffers follow the inputs
                    self._known[output.unique()] = _Dependence(at < self._inputs, False)
            elif ready:
                found = self._dependence(node)
                for output in node.outputs():
                    self._known[output.unique()] = found
            else:
                stack.append((item, True))
                stack += [(other, False) for other in node.inputs() if other.unique() not in self._known]
        return self._known[value.unique()].values

    def _dependence(self, node: Any) -> _Dependence:
        kind, inputs = node.kind(), list(node.inputs())
        known = [self._known.get(item.unique(), _NEITHER) for item in inputs]
        if kind in _SIZES:
            return _Dependence(known[0].shape, False)
        if any(True for _ in node.blocks()):
            return _Dependence(True, True)  # a scripted function: what is inside may follow values
        values = any(item.values for item in known)
        # a size is not a tensor: `x.narrow(1, 0, n)`
        sizes = any(
            one.values for one, item in zip(known, inputs, strict=True) if item.type().kind() in ("IntType", "ListType")
            and "Tensor" not in str(item.type())
        )  # fmt: skip
        shape = any(item.shape for item in known) or sizes
        if kind.endswith("_like") or kind.startswith("aten::new_"):
            return _Dependence(known[0].shape or any(item.values for item in known[1:]), shape)
        shape = shape or (values and kind in _SHAPED_BY_VALUES)
        shape = shape or (kind == "aten::where" and len(inputs) == 1 and values)
        return _Dependence(values, shape)

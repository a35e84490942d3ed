"""The PyTorch module path of a node (`layer2.0.conv1`), read from exporter metadata and kept through rewrites.

Stored as one entry of the node's `metadata_props`, a field that readers of older IR versions skip.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from onnx import ModelProto, NodeProto

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import consumers_of

KEY = "trt_engine.module"
_SCOPES, _RULE = "pkg.torch.onnx.name_scopes", "pkg.onnxscript.rewriter.rule_name"
_MAX_SCOPES_LENGTH = 1 << 14
"""Maximum characters of an exporter's scope list."""
_MAX_FUSED_NODES = 200
"""Maximum nodes fused into one node; beyond it, a tensor name is reused by chance."""
_CALL = re.compile(r"_\d+(?=\.|$)")
_LINEAR = re.compile("Conv|Gemm|MatMul|Einsum|Attention|LSTM|GRU|RNN")


def module_of(node: NodeProto) -> str:
    """Module path of a node; empty if unknown, and for the root module.

    Read from our own entry, the dynamo exporter's metadata, or the TorchScript exporter's names.
    """
    metadata: dict[str, str] = {item.key: item.value for item in node.metadata_props}
    if KEY in metadata:
        return metadata[KEY]
    if _SCOPES in metadata:
        if "BatchNorm" in metadata.get(_RULE, "") and len(node.input) > 1 and node.input[1].endswith(".weight"):
            return str(node.input[1]).removesuffix(".weight")  # fused by the exporter, named after the normalisation
        return _last_module(metadata[_SCOPES])
    return _path_from_scoped_name(node.name)


def names_of(node: NodeProto) -> tuple[str, ...]:
    """Names that identify a node: its name, its module, and every enclosing module."""
    parts = module_of(node).split(".")
    return walk.label(node), *(".".join(parts[:end]) for end in range(len(parts), 0, -1) if parts[0])


def _last_module(scopes: str) -> str:
    """`layer2.0.bn1` of `['', 'layer2', 'layer2.0', 'layer2.0.bn1', 'relu_5']`: the last entry is not a module."""
    try:
        found = ast.literal_eval(scopes) if len(scopes) <= _MAX_SCOPES_LENGTH else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[-2], str):
        return ""
    return found[-2].partition("@")[0]  # `relu@1` is a second call


def _path_from_scoped_name(name: str) -> str:
    """`layer2.0.conv1` of `/layer2/layer2.0/conv1/Conv`."""
    if not name.startswith("/"):
        return ""
    parts: list[str] = []
    for scope in name.split("/")[1:-1]:  # scopes repeat enclosing containers: `down.0` in `layer2.0.down` is its child
        repeated = (at for at in range(len(parts)) if scope.startswith(".".join(parts[at:]) + "."))
        parts = [*parts[: next(repeated, len(parts))], *scope.split(".")]
    return ".".join(parts)


def name_module(node: NodeProto, prefix: str | None = None, modules: Collection[str] = ()) -> None:
    """Replace the exporter's entry by our own, without the `prefix` of a wrapper module.

    With `modules`, the names of the source, TorchScript's suffix of a second call (`relu_1` of `relu`) is removed.
    """
    path = module_of(node)
    path = "" if path == prefix else path.removeprefix(f"{prefix}.")
    if path not in modules and (plain := _CALL.sub("", path)) in modules:
        path = plain
    kept = [item for item in node.metadata_props if item.key not in (KEY, _SCOPES)]
    del node.metadata_props[:]
    node.metadata_props.extend(kept)
    _write(node, path)


def _write(node: NodeProto, path: str) -> None:
    if path:
        node.metadata_props.add(key=KEY, value=path)


def common_module(paths: Iterable[str]) -> str:
    """Innermost module that contains all of these; empty for the root."""
    split = [path.split(".") for path in paths]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _merged_path(nodes: Iterable[tuple[str, bool]]) -> str:
    """Module path of fused nodes: of those that multiply, else of all."""
    known = [(path, linear) for path, linear in nodes if path]
    return common_module([path for path, linear in known if linear] or [path for path, _ in known])


class ModulePaths:
    """Module paths of a model, by the names that reports and backends give nodes, results and weights."""

    def __init__(self, proto: ModelProto | None) -> None:
        self._found: dict[str, tuple[str, bool]] = {}
        known: list[tuple[NodeProto, tuple[str, bool]]] = []
        for node in walk.all_nodes(proto) if proto is not None else ():
            if path := module_of(node):
                self._found.setdefault(walk.label(node), (path, _multiplies(node)))
                known.append((node, (path, _multiplies(node))))
        for node, entry in known:
            for name in node.output:
                self._found.setdefault(name, entry)
                self._found.setdefault(f"node_of_{name}", entry)  # TensorRT's parser, for a node without a name
        stored = {item.name for graph in walk.graphs(proto) for item in graph.initializer} if known and proto else set()
        for node, entry in known:
            for name in stored.intersection(node.input):
                self._found.setdefault(name, entry)

    def __bool__(self) -> bool:
        return bool(self._found)

    def path_of(self, *names: str | None) -> str | None:
        """Module path of a layer fused from the named nodes; None if unknown."""
        return (
            _merged_path(
                # a node missing in the model may have TorchScript's name
                self._found.get(name) or (_path_from_scoped_name(name), bool(_LINEAR.search(name.rpartition("/")[2])))
                for name in names
                if name
            )
            or None
        )


def add_modules(items: Iterable[Any], paths: ModulePaths, field: str = "node") -> tuple[Any, ...]:
    """The records with `module` set from the node named in `field`."""
    return tuple(replace(item, module=paths.path_of(getattr(item, field))) for item in items)


# ------------------------------------------------------------------------------------------------ rewrites


def _multiplies(node: NodeProto) -> bool:
    return _LINEAR.search(node.op_type) is not None


def carry_module_paths(made: ModelProto, before: ModelProto) -> bool:
    """Copy module paths from `before` to the nodes of the rewritten model that have none, in place.

    Returns False if no node of `before` has a path. A node with an output or name of `before` takes the path of the
    nodes between its inputs and that output. A new node takes the path of its readers, else of its producers.
    """
    sources = _OriginalNodes(before)
    if not sources.any:
        return False
    nodes = [place.node for place in walk.nodes(made)]
    here = {name for node in nodes for name in node.output if name}
    new = []
    for node in nodes:
        if any(item.key in (KEY, _SCOPES) for item in node.metadata_props):
            continue
        known = sources.path_of(node, here)
        if known is None:
            new.append(node)
        else:
            _write(node, known)
    _fill_new_nodes(nodes, new)
    return True


def _fill_new_nodes(nodes: list[NodeProto], new: list[NodeProto]) -> None:
    readers = consumers_of(nodes)
    makers = {name: node for node in nodes for name in node.output}
    unknown = {id(node) for node in new}  # a new node's name may be a tensor's, not a module's

    def path_of(node: NodeProto) -> str:
        return module_of(node) if id(node) not in unknown or node.metadata_props else ""

    for node in reversed(new):
        paths = {path_of(reader) for name in node.output for reader in readers.get(name, ())}
        if len(paths) == 1:
            _write(node, paths.pop())
    for node in new:
        if not node.metadata_props and node.input and node.input[0] in makers:
            _write(node, path_of(makers[node.input[0]]))


class _OriginalNodes:
    """Nodes of a model before a rewrite."""

    def __init__(self, proto: ModelProto) -> None:
        nodes = [place.node for place in walk.nodes(proto)]
        self.any = any(map(module_of, nodes))
        self.makers = {name: node for node in nodes for name in node.output if name}
        self.named = {node.name: node for node in nodes if node.name}

    def path_of(self, node: NodeProto, here: set[str]) -> str | None:
        """Module path of the nodes that a node replaces; None for a new node."""
        ends = [name for name in node.output if name in self.makers]
        if not ends and node.name in self.named:
            ends = [name for name in self.named[node.name].output if name]
        if not ends:
            return None
        behind = self._between(ends, here, {*node.input})
        return _merged_path((module_of(item), _multiplies(item)) for item in behind)

    def _between(self, ends: list[str], here: set[str], inputs: set[str]) -> list[NodeProto]:
        """Nodes that produce these tensors, back to the inputs and to tensors of other new nodes (`here`)."""
        found: dict[str, NodeProto] = {}
        waiting = list(ends)
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.makers or (name not in ends and (name in here or name in inputs)):
                continue
            found[name] = self.makers[name]
            if len(found) > _MAX_FUSED_NODES:
                return [self.makers[name] for name in ends]
            waiting += found[name].input
        return list(found.values())

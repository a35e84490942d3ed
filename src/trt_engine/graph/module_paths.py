"""The PyTorch module path of a node, `layer2.0.conv1`: read from what exporters write, and kept through rewrites.

One short entry of the node's `metadata_props` holds it. Readers of an older IR version skip it: it is a field of its own.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from onnx import ModelProto, NodeProto

from trt_engine.graph import walk

__all__ = ["KEY", "ModulePaths", "carry", "common", "module_of", "name_module", "names_of", "with_modules"]

KEY = "trt_engine.module"
_SCOPES, _RULE = "pkg.torch.onnx.name_scopes", "pkg.onnxscript.rewriter.rule_name"
_LONGEST = 1 << 14
"""Characters of an exporter's list of scopes beyond which it is not read."""
_MOST = 200
"""More nodes than this do not become one node: a tensor's name is used again by chance."""
_CALL = re.compile(r"_\d+(?=\.|$)")
_LINEAR = re.compile("Conv|Gemm|MatMul|Einsum|Attention|LSTM|GRU|RNN")


def module_of(node: NodeProto) -> str:
    """The path of the module that a node computes; empty where it is not known, and for the root module.

    From our own entry, what PyTorch's dynamo exporter writes, or the names of its TorchScript exporter.
    """
    metadata: dict[str, str] = {item.key: item.value for item in node.metadata_props}
    if KEY in metadata:
        return metadata[KEY]
    if _SCOPES in metadata:
        if "BatchNorm" in metadata.get(_RULE, "") and len(node.input) > 1 and node.input[1].endswith(".weight"):
            return str(node.input[1]).removesuffix(
                ".weight"
            )  # fused by the exporter, under the name of the normalisation
        return _last_module(metadata[_SCOPES])
    return _of_scoped_name(node.name)


def names_of(node: NodeProto) -> tuple[str, ...]:
    """What a person can call a node: its name, its module, and every module around that one."""
    parts = module_of(node).split(".")
    return walk.label(node), *(".".join(parts[:end]) for end in range(len(parts), 0, -1) if parts[0])


def _last_module(scopes: str) -> str:
    """`layer2.0.bn1` of `['', 'layer2', 'layer2.0', 'layer2.0.bn1', 'relu_5']`: the last entry is not a module."""
    try:
        found = ast.literal_eval(scopes) if len(scopes) <= _LONGEST else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[-2], str):
        return ""
    return found[-2].partition("@")[0]  # `relu@1` is a second call


def _of_scoped_name(name: str) -> str:
    """`layer2.0.conv1` of `/layer2/layer2.0/conv1/Conv`."""
    if not name.startswith("/"):
        return ""
    path = ""
    for scope in name.split("/")[1:-1]:
        path = _joined(path, scope)
    return path


def _joined(path: str, scope: str) -> str:
    """A scope repeats the names of the containers around it: `down.0` in `layer2.0.down` is `layer2.0.down.0`."""
    parts = path.split(".") if path else []
    for at in range(len(parts)):
        if scope.startswith(".".join(parts[at:]) + "."):
            return ".".join((*parts[:at], scope))
    return ".".join((*parts, scope))


def name_module(node: NodeProto, prefix: str | None = None, modules: Collection[str] = ()) -> None:
    """Write our entry in place of the exporter's, less the `prefix` of a wrapper module.

    Of `modules`, the names the source has, TorchScript's number of a second call (`relu_1` of `relu`) is taken off.
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


def common(paths: Iterable[str]) -> str:
    """The innermost module that holds all of these; empty where that is the root."""
    split = [path.split(".") for path in paths]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _main(nodes: Iterable[tuple[str, bool]]) -> str:
    """The path of several nodes that are one now: that of those that multiply, else of all."""
    known = [(path, linear) for path, linear in nodes if path]
    return common([path for path, linear in known if linear] or [path for path, _ in known])


class ModulePaths:
    """The module paths of a model's nodes, by the names that reports and backends give nodes, their results and weights."""

    def __init__(self, proto: ModelProto | None) -> None:
        self._found: dict[str, tuple[str, bool]] = {}
        known: list[tuple[NodeProto, tuple[str, bool]]] = []
        for place in walk.nodes(proto) if proto is not None else ():
            node = place.node
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

    def of(self, *names: str | None) -> str | None:
        """The path of the layer made of the nodes with these names; None where it is not known."""
        return _main(self._found.get(name) or _told_by(name) for name in names if name) or None


def _told_by(name: str) -> tuple[str, bool]:
    """Of a node that the model does not have, or without the model: TorchScript's names are paths."""
    return _of_scoped_name(name), _LINEAR.search(name.rpartition("/")[2]) is not None


def with_modules(items: Iterable[Any], paths: ModulePaths, field: str = "node") -> tuple[Any, ...]:
    """Records that name a node in `field`, each with its `module`."""
    return tuple(replace(item, module=paths.of(getattr(item, field))) for item in items)


# ------------------------------------------------------------------------------------------------ rewrites


def _multiplies(node: NodeProto) -> bool:
    return _LINEAR.search(node.op_type) is not None


def carry(made: ModelProto, before: ModelProto) -> bool:
    """Give the nodes of a rewritten model that have no path that of the nodes in `before` they were made of, in place.

    False where no node of `before` has one.

    A node with an output or a name that `before` has stands for what lies between its inputs and that output there. One
    that is new takes the path of the layers that read it, else of the one that it reads: it was put in for them.
    """
    sources = _Sources(before)
    if not sources.any:
        return False
    nodes = [place.node for place in walk.nodes(made)]
    here = {name for node in nodes for name in node.output if name}
    new = []
    for node in nodes:
        if any(item.key in (KEY, _SCOPES) for item in node.metadata_props):
            continue
        known = sources.of(node, here)
        if known is None:
            new.append(node)
        else:
            _write(node, known)
    _fill(nodes, new)
    return True


def _fill(nodes: list[NodeProto], new: list[NodeProto]) -> None:
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    makers = {}
    for node in nodes:
        for name in node.input:
            readers[name].append(node)
        for name in node.output:
            makers[name] = node
    unknown = {id(node) for node in new}  # the name of a new node may be that of a tensor, which is not its module

    def path_of(node: NodeProto) -> str:
        return module_of(node) if id(node) not in unknown or node.metadata_props else ""

    for node in reversed(new):
        paths = {path_of(reader) for name in node.output for reader in readers[name]}
        if len(paths) == 1:
            _write(node, paths.pop())
    for node in new:
        if not node.metadata_props and node.input and node.input[0] in makers:
            _write(node, path_of(makers[node.input[0]]))


class _Sources:
    """The nodes of a model before it was rewritten."""

    def __init__(self, proto: ModelProto) -> None:
        nodes = [place.node for place in walk.nodes(proto)]
        self.any = any(map(module_of, nodes))
        self.makers = {name: node for node in nodes for name in node.output if name}
        self.named = {node.name: node for node in nodes if node.name}

    def of(self, node: NodeProto, here: set[str]) -> str | None:
        """The path of what a node was made of; None for a node that is new."""
        ends = [name for name in node.output if name in self.makers]
        if not ends and node.name in self.named:
            ends = [name for name in self.named[node.name].output if name]
        if not ends:
            return None
        behind = self._between(ends, here, {*node.input})
        return _main((module_of(item), _multiplies(item)) for item in behind)

    def _between(self, ends: list[str], here: set[str], inputs: set[str]) -> list[NodeProto]:
        """The nodes that made these tensors, back to the inputs and to what another node makes (`here`)."""
        found: dict[str, NodeProto] = {}
        waiting = list(ends)
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.makers or (name not in ends and (name in here or name in inputs)):
                continue
            found[name] = self.makers[name]
            if len(found) > _MOST:
                return [self.makers[name] for name in ends]
            waiting += found[name].input
        return list(found.values())

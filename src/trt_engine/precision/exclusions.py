"""Nodes that the caller leaves in the precision they have: by name, operator or pattern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onnx import ModelProto, NodeProto

from trt_engine.config.precision import CastConfig, QuantizeConfig
from trt_engine.errors import UsageError
from trt_engine.graph import walk
from trt_engine.graph.module_paths import names_of
from trt_engine.tensors import suggest


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Nodes that the caller excludes."""

    nodes: Sequence[str] = ()
    """Names of nodes, their modules or their outputs."""
    types: Sequence[str] = ()
    """Operators, with their domain unless it is the standard one."""
    patterns: Sequence[str] = ()
    """Shell patterns for names of nodes and PyTorch modules, as `/head/*` and `layer4.*`."""

    @classmethod
    def of(cls, config: CastConfig | QuantizeConfig) -> Exclusions:
        return cls(config.exclude_nodes, config.exclude_types, config.exclude_patterns)

    def reason(self, node: NodeProto) -> str | None:
        """Why a node is excluded, or None."""
        if not set(self.nodes).isdisjoint(_names(node)):
            return "excluded by name"
        if walk.qualified_name(node) in self.types:
            return f"excluded by operator `{walk.qualified_name(node)}`"
        fitting = (item for item in self.patterns if any(fnmatchcase(name, item) for name in names_of(node)))
        return next((f"excluded by `{pattern}`" for pattern in fitting), None)

    def check(self, proto: ModelProto) -> None:
        """Raise `UsageError` for a name, operator or pattern without a match, such as a typing error."""
        nodes = [place.node for place in walk.nodes(proto)]
        names = {name for node in nodes for name in _names(node)}
        types = {walk.qualified_name(node) for node in nodes}
        for given, known, flag in ((self.nodes, names, "node"), (self.types, types, "operator")):
            for item in given:
                if item not in known:
                    raise UsageError(f"the model has no {flag} `{item}` to exclude", hint=suggest(item, sorted(known)))
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for node in nodes for name in names_of(node)):
                raise UsageError(
                    f"no node name matches the pattern `{pattern}`", hint="`*` matches anything, as in `/head/*`"
                )


def _names(node: NodeProto) -> Iterator[str]:
    yield from names_of(node)
    yield from filter(None, node.output)

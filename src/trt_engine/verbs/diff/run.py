"""Structural differences of two engines: fused or split layers, changed dtypes, kernels, shapes or times.

Layers are matched by ONNX nodes if both sides report them: layers that share a node, directly or transitively, are one
group. One to one is a layer that may have changed; several to fewer were fused. Layers without nodes (reformats, and
engines that report names alone) are matched by name, then by position between matched neighbours, as are unknown types.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import onnx

from trt_engine.atomic_io import as_path
from trt_engine.engine import is_onnx_model
from trt_engine.errors import UsageError
from trt_engine.format import format_ms
from trt_engine.graph.module_paths import common_module
from trt_engine.profiling.engine_structure import Structure, StructureLayer, read_structure
from trt_engine.public_function import public_function
from trt_engine.records.compare import EngineDiff, LayerChange, StructureCount
from trt_engine.records.profile import CATEGORIES
from trt_engine.tensors import format_shape

Pair = tuple[list[StructureLayer], list[StructureLayer]]
_Name = Hashable | None
"""The key that matches a layer on both sides; None: unmatched."""
Change = Literal["fused", "split", "added", "removed", "tactic", "type", "shape", "time", "reformat"]

_MIN_SHARE, _MIN_MS = 0.05, 0.001
"""Minimum relative and absolute change of a layer's time; `compare` decides about the engine's."""
_NUMBERED = re.compile(r"\d+")
_ORDER = ("type", "fused", "split", "removed", "added", "tactic", "shape", "reformat", "time")
_MAX_NAMES = 4
"""Maximum number of names or kinds in a group's text."""


@public_function
def diff(
    before: Path | str,
    after: Path | str,
    *,
    layer_times: tuple[Path | str | None, Path | str | None] = (None, None),
    model: Path | str | None = None,
) -> EngineDiff:
    """Structural differences of the engine `after` from `before`, longest time first.

    Each is an engine (of TensorRT or ONNX Runtime), an ONNX model, an inspector's JSON or a `profile.json`; `layer_times`
    are files with their layers' times. The nodes of ONNX Runtime's graphs are traced back to `model`, or to the side that is
    a model; else by their names, which misses some fusions. Raises as `structure.read_structure` does. `UsageError` for a
    `model` that is not an ONNX file, or `layer_times` that are not two.
    """
    before, after = as_path(before, "`before`"), as_path(after, "`after`")
    if not isinstance(layer_times, tuple | list) or len(layer_times) != 2:
        raise UsageError(
            f"`layer_times` is {layer_times!r}, expected two files",
            hint="`layer_times=(before, after)`, None for one without",
        )
    first, second = (None if one is None else as_path(one, "`layer_times`") for one in layer_times)
    if model is not None and not is_onnx_model(model := as_path(model, "`model`")):
        raise UsageError(f"`{model}` is not an ONNX model", hint="the `.onnx` file that both were built from")
    if model is None:
        model = next((side for side in (before, after) if is_onnx_model(side)), None)
    return diff_structures(read_structure(before, first, model=model), read_structure(after, second, model=model))


def diff_structures(before: Structure, after: Structure) -> EngineDiff:
    """Structural differences of two structures."""
    groups = _match_layers(before.layers, after.layers)
    changes, same = [], 0
    for first, second in groups:
        change = _classify_change(first, second)
        if change is None:
            same += 1
        else:
            changes.append(change)
    unknown = {
        part.kind
        for part in (*before.layers, *after.layers)
        if part.category == "other"
        and part.kind
        and not onnx.defs.has(part.kind)  # TensorRT's layers have the same names
    }
    return EngineDiff(
        before=before.label,
        after=after.label,
        sources=(before.schema, after.schema),
        counts=_count_changes(before.layers, after.layers),
        changes=tuple(
            sorted(changes, key=lambda one: (-max(one.before_ms or 0.0, one.after_ms or 0.0), _ORDER.index(one.change)))
        ),
        unchanged=same,
        unknown_kinds=tuple(sorted(unknown)),
        build={
            name: (before.build.get(name), after.build.get(name))
            for name in dict.fromkeys((*before.build, *after.build))
            if before.build and after.build and before.build.get(name) != after.build.get(name)
        },
        warnings=_diff_warnings(before, after),
    )


# ------------------------------------------------------------------------------------------------ who belongs to whom


def _match_layers(before: Sequence[StructureLayer], after: Sequence[StructureLayer]) -> list[Pair]:
    """Groups of matched layers, ordered by their first layer; an unmatched layer is a group of one."""
    leader = list(range(len(before) + len(after)))

    def find(place: int) -> int:
        while leader[place] != place:
            leader[place] = place = leader[leader[place]]
        return place

    def join(first: int, second: int) -> None:
        leader[max(find(first), find(second))] = min(find(first), find(second))

    parts, offset = (*before, *after), len(before)
    made: dict[str, list[int]] = defaultdict(list)
    for place, part in enumerate(parts):
        for node in part.onnx_nodes:
            made[node].append(place)
    matched = set()
    for places in made.values():
        mine = [place for place in places if place < offset]
        theirs = [place for place in places if place >= offset]
        if mine and theirs:
            matched.update(places)
            for place in places[1:]:
                join(places[0], place)
    for key in (_reformat_key, _exact_name, _unnumbered_name):
        _join_by_key(key, parts, offset, matched, join)
    _join_between(parts, offset, matched, join)
    groups: dict[int, Pair] = {}
    for place, part in enumerate(parts):
        groups.setdefault(find(place), ([], []))[place >= offset].append(part)
    return list(groups.values())


def _is_reformat(part: StructureLayer) -> bool:
    """Whether the builder inserted, and so named, the layer."""
    return part.category == "reformat" and not part.onnx_nodes


def _reformat_key(part: StructureLayer) -> _Name:
    """The output of a reformat, its only identity: builders generate its name."""
    return (part.kind, part.dtypes, part.shapes) if _is_reformat(part) else None


def _exact_name(part: StructureLayer) -> _Name:
    return None if _is_reformat(part) else part.name or ("", part.kind)


def _unnumbered_name(part: StructureLayer) -> _Name:
    """The name without its generated numbers, with the kind."""
    return (_NUMBERED.sub("#", part.name), part.kind) if part.name and not _is_reformat(part) else None


def _join_by_key(
    name: Callable[[StructureLayer], _Name],
    parts: Sequence[StructureLayer],
    offset: int,
    matched: set[int],
    join: Callable[[int, int], None],
) -> None:
    """Match unmatched layers of the same name on both sides, repeated names in order."""
    waiting: dict[_Name, list[int]] = defaultdict(list)
    for place in range(offset):
        if place not in matched and (called := name(parts[place])) is not None:
            waiting[called].append(place)
    for place in range(offset, len(parts)):
        if place not in matched and (mine := waiting.get(name(parts[place]))):
            other = mine.pop(0)
            join(other, place)
            matched.update((other, place))


def _join_between(
    parts: Sequence[StructureLayer], offset: int, matched: set[int], join: Callable[[int, int], None]
) -> None:
    """Match single unmatched layers of one category between the same matched neighbours."""
    mine, theirs = (
        _unmatched_runs(parts, range(offset), matched),
        _unmatched_runs(parts, range(offset, len(parts)), matched),
    )
    for where, places in mine.items():
        others = theirs.get(where, [])
        alone = len(places) == len(others) == 1 and not any(_is_reformat(parts[place]) for place in (*places, *others))
        if alone and parts[places[0]].category == parts[others[0]].category:
            join(places[0], others[0])
            matched.update((places[0], others[0]))


def _unmatched_runs(
    parts: Sequence[StructureLayer], places: Iterable[int], matched: set[int]
) -> dict[tuple[str, str], list[int]]:
    """Unmatched positions by the names of their matched neighbours."""
    found: dict[tuple[str, str], list[int]] = {}
    before, run = "", []
    for place in places:
        if place not in matched:
            run.append(place)
            continue
        if run:
            found[before, _NUMBERED.sub("#", parts[place].name)] = run
        before, run = _NUMBERED.sub("#", parts[place].name), []
    if run:
        found[before, ""] = run
    return found


# ------------------------------------------------------------------------------------------------ what changed


def _classify_change(first: list[StructureLayer], second: list[StructureLayer]) -> LayerChange | None:
    """The change of a group; None if it is unchanged."""
    if not first or not second:
        return _unmatched_change(first or second, "removed" if first else "added")
    if len(first) == len(second) == 1:
        return _compare_pair(first[0], second[0])
    if len(first) == len(second) and all(
        _compare_pair(one, other) is None for one, other in zip(first, second, strict=True)
    ):
        return None
    kind: Change = "fused" if len(second) < len(first) else "split" if len(second) > len(first) else "tactic"
    texts = [f"{_format_kinds(first)} -> {_format_kinds(second)}"]
    types = tuple(dict.fromkeys(part.precision for part in group if part.precision) for group in (first, second))
    if types[0] and types[1] and list(types[0]) != list(types[1]):
        texts.append(f"{', '.join(types[0])} -> {', '.join(types[1])}")
    return _make_change(kind, first, second, "; ".join(texts))


def _unmatched_change(parts: list[StructureLayer], change: Literal["added", "removed"]) -> LayerChange:
    part = parts[0]
    what = " ".join(filter(None, (part.kind or "layer", part.precision or "/".join(filter(None, part.dtypes)))))
    kind: Change = "reformat" if part.category == "reformat" else change
    text = f"{change}: {what}" if kind == "reformat" else what
    return _make_change(kind, parts if change == "removed" else [], parts if change == "added" else [], text)


def _compare_pair(one: StructureLayer, other: StructureLayer) -> LayerChange | None:
    found: list[tuple[Change, str]] = []
    if one.precision and other.precision and one.precision != other.precision:
        found.append(("type", f"{one.precision} -> {other.precision}"))
    elif any(one.dtypes) and any(other.dtypes) and one.dtypes != other.dtypes and len(one.dtypes) == len(other.dtypes):
        found.append(("type", f"{_dtypes(one)} -> {_dtypes(other)}"))
    if one.kind != other.kind and one.kind and other.kind:
        found.append(("tactic", f"{one.kind} -> {other.kind}"))
    if one.tactic != other.tactic and one.tactic and other.tactic:
        found.append(("tactic", f"{one.tactic} -> {other.tactic}"))
    if any(one.shapes) and any(other.shapes) and one.shapes != other.shapes and len(one.shapes) == len(other.shapes):
        found.append(("shape", f"{_tensor_shapes(one)} -> {_tensor_shapes(other)}"))
    if set(one.onnx_nodes) != set(other.onnx_nodes) and one.onnx_nodes and other.onnx_nodes:
        found.append(_node_changes(one, other))
    if not found and one.ms is not None and other.ms is not None:
        gap = abs(other.ms - one.ms)
        if gap > _MIN_MS and gap > _MIN_SHARE * max(one.ms, other.ms):
            found.append(("time", f"{format_ms(one.ms)} -> {format_ms(other.ms)}"))
    if not found:
        return None
    return _make_change(found[0][0], [one], [other], "; ".join(text for _, text in found))


def _node_changes(one: StructureLayer, other: StructureLayer) -> tuple[Change, str]:
    """A one-to-one change of nodes: those added and those removed."""
    gained = [name for name in other.onnx_nodes if name not in one.onnx_nodes]
    lost = [name for name in one.onnx_nodes if name not in other.onnx_nodes]
    texts = [f"takes in {_format_names(gained)}"] if gained else []
    texts += [f"leaves out {_format_names(lost)}"] if lost else []
    return ("fused" if len(gained) >= len(lost) else "split"), ", ".join(texts)


def _make_change(
    change: Change, first: Sequence[StructureLayer], second: Sequence[StructureLayer], text: str
) -> LayerChange:
    return LayerChange(
        change=change,
        before=tuple(part.name for part in first),
        after=tuple(part.name for part in second),
        text=text,
        before_ms=_total_ms(first),
        after_ms=_total_ms(second),
        onnx_nodes=tuple(dict.fromkeys(node for part in (*first, *second) for node in part.onnx_nodes)),
        module=_common_module(first, second),
    )


def _common_module(first: Sequence[StructureLayer], second: Sequence[StructureLayer]) -> str | None:
    """The module of the change, from the side with fewer layers: a fused layer is named by what multiplies."""
    for side in sorted((second, first), key=len):
        if paths := {part.module for part in side if part.module}:
            return common_module(paths) or None
    return None


def _total_ms(parts: Sequence[StructureLayer]) -> float | None:
    times = [part.ms for part in parts if part.ms is not None]
    return sum(times) if times else None


def _format_kinds(parts: Sequence[StructureLayer]) -> str:
    """`Sigmoid + Mul`, `3 Mul + Add`: the layers' kinds, each once; names of those without a kind."""
    counts = Counter(part.kind or f"`{part.name}`" for part in parts)
    words = [f"{count} {kind}" if count > 1 else kind for kind, count in counts.items()]
    more = f" + {len(words) - _MAX_NAMES} more" if len(words) > _MAX_NAMES else ""
    return " + ".join(words[:_MAX_NAMES]) + more


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"`{name}`" for name in names[:_MAX_NAMES]) + more


def _dtypes(part: StructureLayer) -> str:
    return ", ".join(name or "?" for name in part.dtypes)


def _tensor_shapes(part: StructureLayer) -> str:
    return ", ".join(format_shape(shape) if shape else "scalar" for shape in part.shapes)


# ------------------------------------------------------------------------------------------------ both as wholes


def _count_changes(before: Sequence[StructureLayer], after: Sequence[StructureLayer]) -> tuple[StructureCount, ...]:
    """Counts of layers, fused layers, categories and compute dtypes; without those missing on both sides."""
    rows = [
        StructureCount("layers", len(before), len(after)),
        StructureCount(
            "of several nodes", *(sum(len(part.onnx_nodes) > 1 for part in side) for side in (before, after))
        ),
    ]
    categories = [Counter(part.category for part in side) for side in (before, after)]
    types = [Counter(part.precision for part in side if part.precision) for side in (before, after)]
    kinds = [Counter(part.kind for part in side if part.kind) for side in (before, after)]
    rows += [StructureCount(name, categories[0][name], categories[1][name]) for name in CATEGORIES]
    rows += [StructureCount(f"in {name}", types[0][name], types[1][name]) for name in sorted({*types[0], *types[1]})]
    rows += [
        StructureCount(f"kind {name}", kinds[0][name], kinds[1][name])
        for name in sorted({*kinds[0], *kinds[1]})
        if kinds[0][name] != kinds[1][name]
    ]
    return tuple(row for row in rows if row.before or row.after)


def _diff_warnings(before: Structure, after: Structure) -> tuple[str, ...]:
    stated = [*before.warnings, *after.warnings]
    models = [side.build.get("model") for side in (before, after)]
    if all(models) and models[0] != models[1]:
        stated.append("the engines were made of different models: layers are matched by the nodes' names alone")
    nodes = [{node for part in side.layers for node in part.onnx_nodes} for side in (before, after)]
    if all(nodes) and not nodes[0] & nodes[1]:
        stated.append("no ONNX node is in both: these are not two engines of one model, or its nodes were renamed")
    if before.is_timed != after.is_timed:
        stated.append("only one side has times: give both (`--layer-times`) to see which layers cost more")
    return tuple(stated)

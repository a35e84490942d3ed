"""How two engines differ in structure: what was fused or split, what changed its type, kernel, shape or time.

Layers are matched by the ONNX nodes they were made of, where both sides tell them: layers that share a node, directly or
through others, are one group. One against one is a layer that may have changed; several against fewer were fused. What has
no nodes (reformats, and engines that tell names alone) is matched by name, then by what stands in the same place between
matched neighbours. A layer type nobody here has heard of is matched the same way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx

from trt_engine.comparisons import EngineDiff, LayerChange, StructureCount
from trt_engine.engine import is_bare_model
from trt_engine.errors import UsageError
from trt_engine.figures import in_ms
from trt_engine.files import path_of
from trt_engine.graph.module_paths import common
from trt_engine.profiling.structure import Part, Structure, read_structure
from trt_engine.tensors import format_shape
from trt_engine.traces import CATEGORIES

__all__ = ["diff", "differences"]

Pair = tuple[list[Part], list[Part]]
_Name = Hashable | None
"""What a layer is known by on both sides; None: by nothing."""
Change = Literal["fused", "split", "added", "removed", "tactic", "type", "shape", "time", "reformat"]

_LEAST_SHARE, _LEAST_MS = 0.05, 0.001
"""A layer's time has changed when it did so by more than this share of itself and by more than a microsecond; whether the
engine's has is a question for `compare`."""
_NUMBERED = re.compile(r"\d+")
_ORDER = ("type", "fused", "split", "removed", "added", "tactic", "shape", "reformat", "time")
_LONGEST = 4
"""So many names or kinds of a group are spelled out in its text."""


def diff(
    before: Path | str,
    after: Path | str,
    *,
    times: tuple[Path | str | None, Path | str | None] = (None, None),
    model: Path | str | None = None,
) -> EngineDiff:
    """How the engine `after` differs from `before` in structure, most time first.

    Each is an engine (of TensorRT or ONNX Runtime), an ONNX model, an inspector's JSON or a `profile.json`; `times` are
    files with their layers' times. The nodes of ONNX Runtime's graphs are traced back to `model`, or to the side that is a
    model; else by their names, which does not tell all that was fused. Raises what `structure.read_structure` raises.
    """
    before, after = path_of(before, "`before`"), path_of(after, "`after`")
    if not isinstance(times, tuple | list) or len(times) != 2:
        raise UsageError(
            f"`times` is {times!r}, expected two files", hint="`times=(before, after)`, None for one without"
        )
    first, second = (None if one is None else path_of(one, "`times`") for one in times)
    if model is not None and not is_bare_model(model := path_of(model, "`model`")):
        raise UsageError(f"`{model}` is no ONNX model", hint="the `.onnx` file that both were made of")
    if model is None:
        model = next((side for side in (before, after) if is_bare_model(side)), None)
    return differences(read_structure(before, first, model=model), read_structure(after, second, model=model))


def differences(before: Structure, after: Structure) -> EngineDiff:
    """The same for two structures that were read already."""
    groups = _groups(before.parts, after.parts)
    changes, same = [], 0
    for first, second in groups:
        change = _change(first, second)
        if change is None:
            same += 1
        else:
            changes.append(change)
    unknown = {
        part.kind for part in (*before.parts, *after.parts) if part.category == "other" and not _known(part.kind)
    }
    return EngineDiff(
        before=before.label,
        after=after.label,
        read_as=(before.schema, after.schema),
        counts=_counts(before.parts, after.parts),
        changes=tuple(sorted(changes, key=_rank)),
        same=same,
        unknown_kinds=tuple(sorted(unknown)),
        build=_settings(before.build, after.build),
        warnings=_warnings(before, after),
    )


def _known(kind: str) -> bool:
    """Whether it is an operator of ONNX: TensorRT's layers have the same names."""
    return not kind or onnx.defs.has(kind)


# ------------------------------------------------------------------------------------------------ who belongs to whom


def _groups(before: Sequence[Part], after: Sequence[Part]) -> list[Pair]:
    """Groups of layers that belong together, by the first of each; a layer alone has nobody on the other side."""
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
    for name in (_as_reformat, _exact, _plain):
        _join_by(name, parts, offset, matched, join)
    _join_between(parts, offset, matched, join)
    groups: dict[int, Pair] = {}
    for place, part in enumerate(parts):
        groups.setdefault(find(place), ([], []))[place >= offset].append(part)
    return list(groups.values())


def _reformats(part: Part) -> bool:
    """Put in by the builder, and so named by it."""
    return part.category == "reformat" and not part.onnx_nodes


def _as_reformat(part: Part) -> _Name:
    """What a reformat makes, which is all there is to tell one from another: their names are dealt out anew each time."""
    return (part.kind, part.dtypes, part.shapes) if _reformats(part) else None


def _exact(part: Part) -> _Name:
    return None if _reformats(part) else part.name or ("", part.kind)


def _plain(part: Part) -> _Name:
    """The name without its numbers, which a builder deals out too; with the kind, as little else is left."""
    return (_NUMBERED.sub("#", part.name), part.kind) if part.name and not _reformats(part) else None


def _join_by(
    name: Callable[[Part], _Name],
    parts: Sequence[Part],
    offset: int,
    matched: set[int],
    join: Callable[[int, int], None],
) -> None:
    """Join what is left and has the same name on both sides, those of one name in their order."""
    waiting: dict[_Name, list[int]] = defaultdict(list)
    for place in range(offset):
        if place not in matched and (called := name(parts[place])) is not None:
            waiting[called].append(place)
    for place in range(offset, len(parts)):
        if place not in matched and (mine := waiting.get(name(parts[place]))):
            other = mine.pop(0)
            join(other, place)
            matched.update((other, place))


def _join_between(parts: Sequence[Part], offset: int, matched: set[int], join: Callable[[int, int], None]) -> None:
    """Join single leftovers of one category that alone stand between the same matched neighbours."""
    mine, theirs = _gaps(parts, range(offset), matched), _gaps(parts, range(offset, len(parts)), matched)
    for where, places in mine.items():
        others = theirs.get(where, [])
        alone = len(places) == len(others) == 1 and not any(_reformats(parts[place]) for place in (*places, *others))
        if alone and parts[places[0]].category == parts[others[0]].category:
            join(places[0], others[0])
            matched.update((places[0], others[0]))


def _gaps(parts: Sequence[Part], places: Iterable[int], matched: set[int]) -> dict[tuple[str, str], list[int]]:
    """The unmatched places by the names of the matched ones before and behind them."""
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


def _change(first: list[Part], second: list[Part]) -> LayerChange | None:
    """What is not the same in a group; None where nothing is."""
    if not first or not second:
        return _alone(first or second, "removed" if first else "added")
    if len(first) == len(second) == 1:
        return _one(first[0], second[0])
    if len(first) == len(second) and all(_one(one, other) is None for one, other in zip(first, second, strict=True)):
        return None
    kind: Change = "fused" if len(second) < len(first) else "split" if len(second) > len(first) else "tactic"
    texts = [f"{_kinds(first)} -> {_kinds(second)}"]
    types = tuple(dict.fromkeys(part.precision for part in group if part.precision) for group in (first, second))
    if types[0] and types[1] and list(types[0]) != list(types[1]):
        texts.append(f"{', '.join(types[0])} -> {', '.join(types[1])}")
    return _made(kind, first, second, "; ".join(texts))


def _alone(parts: list[Part], change: Literal["added", "removed"]) -> LayerChange:
    part = parts[0]
    what = " ".join(filter(None, (part.kind or "layer", part.precision or "/".join(filter(None, part.dtypes)))))
    kind: Change = "reformat" if part.category == "reformat" else change
    text = f"{change}: {what}" if kind == "reformat" else what
    return _made(kind, parts if change == "removed" else [], parts if change == "added" else [], text)


def _one(one: Part, other: Part) -> LayerChange | None:
    found: list[tuple[Change, str]] = []
    if one.precision and other.precision and one.precision != other.precision:
        found.append(("type", f"{one.precision} -> {other.precision}"))
    elif any(one.dtypes) and any(other.dtypes) and one.dtypes != other.dtypes and len(one.dtypes) == len(other.dtypes):
        found.append(("type", f"{_types(one)} -> {_types(other)}"))
    if one.kind != other.kind and one.kind and other.kind:
        found.append(("tactic", f"{one.kind} -> {other.kind}"))
    if one.tactic != other.tactic and one.tactic and other.tactic:
        found.append(("tactic", f"{one.tactic} -> {other.tactic}"))
    if any(one.shapes) and any(other.shapes) and one.shapes != other.shapes and len(one.shapes) == len(other.shapes):
        found.append(("shape", f"{_shapes(one)} -> {_shapes(other)}"))
    if set(one.onnx_nodes) != set(other.onnx_nodes) and one.onnx_nodes and other.onnx_nodes:
        found.append(_absorbed(one, other))
    if not found and one.ms is not None and other.ms is not None:
        gap = abs(other.ms - one.ms)
        if gap > _LEAST_MS and gap > _LEAST_SHARE * max(one.ms, other.ms):
            found.append(("time", f"{in_ms(one.ms)} -> {in_ms(other.ms)}"))
    if not found:
        return None
    return _made(found[0][0], [one], [other], "; ".join(text for _, text in found))


def _absorbed(one: Part, other: Part) -> tuple[Change, str]:
    """One layer for one, of other nodes: what it took in, and what it let go."""
    gained = [name for name in other.onnx_nodes if name not in one.onnx_nodes]
    lost = [name for name in one.onnx_nodes if name not in other.onnx_nodes]
    texts = [f"takes in {_listed(gained)}"] if gained else []
    texts += [f"leaves out {_listed(lost)}"] if lost else []
    return ("fused" if len(gained) >= len(lost) else "split"), ", ".join(texts)


def _made(change: Change, first: Sequence[Part], second: Sequence[Part], text: str) -> LayerChange:
    return LayerChange(
        change=change,
        before=tuple(part.name for part in first),
        after=tuple(part.name for part in second),
        text=text,
        before_ms=_ms(first),
        after_ms=_ms(second),
        onnx_nodes=tuple(dict.fromkeys(node for part in (*first, *second) for node in part.onnx_nodes)),
        module=_module(first, second),
    )


def _module(first: Sequence[Part], second: Sequence[Part]) -> str | None:
    """The module that the change is in, as the side with fewer layers has it: a fused layer is named by what multiplies."""
    for side in sorted((second, first), key=len):
        if paths := {part.module for part in side if part.module}:
            return common(paths) or None
    return None


def _ms(parts: Sequence[Part]) -> float | None:
    times = [part.ms for part in parts if part.ms is not None]
    return sum(times) if times else None


def _rank(change: LayerChange) -> tuple[float, int]:
    return -max(change.before_ms or 0.0, change.after_ms or 0.0), _ORDER.index(change.change)


def _kinds(parts: Sequence[Part]) -> str:
    """`Sigmoid + Mul`, `3 Mul + Add`: what the layers are, each kind once; the names of those that have no kind."""
    counts = Counter(part.kind or f"`{part.name}`" for part in parts)
    words = [f"{count} {kind}" if count > 1 else kind for kind, count in counts.items()]
    more = f" + {len(words) - _LONGEST} more" if len(words) > _LONGEST else ""
    return " + ".join(words[:_LONGEST]) + more


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LONGEST} more" if len(names) > _LONGEST else ""
    return ", ".join(f"`{name}`" for name in names[:_LONGEST]) + more


def _types(part: Part) -> str:
    return ", ".join(name or "?" for name in part.dtypes)


def _shapes(part: Part) -> str:
    return ", ".join(format_shape(shape) if shape else "scalar" for shape in part.shapes)


# ------------------------------------------------------------------------------------------------ both as wholes


def _counts(before: Sequence[Part], after: Sequence[Part]) -> tuple[StructureCount, ...]:
    """Layers, fused ones, categories, and layers by the type they compute in; what both lack is left out."""
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


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, where both sides have a passport."""
    if not before or not after:
        return {}
    return {
        name: (before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    }


def _warnings(before: Structure, after: Structure) -> tuple[str, ...]:
    told = [*before.warnings, *after.warnings]
    models = [side.build.get("model") for side in (before, after)]
    if all(models) and models[0] != models[1]:
        told.append("the engines were made of different models: layers are matched by the nodes' names alone")
    nodes = [{node for part in side.parts for node in part.onnx_nodes} for side in (before, after)]
    if all(nodes) and not nodes[0] & nodes[1]:
        told.append("no ONNX node is in both: these are not two engines of one model, or its nodes were renamed")
    if before.timed != after.timed:
        told.append("only one side has times: give both (`--times`) to see which layers cost more")
    return tuple(told)

"""Sentences of a bottleneck: evidence, shares and the slowest kernels; the next experiment, with its command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trt_engine.format import (
    format_ms,
    format_number,
    format_percent,
    format_quantity,
    format_us,
    node_label,
    scale_unit,
)
from trt_engine.profiling.roofline import NOTABLE_IDLE, Part, ProfileFacts, Roofline, WorkGroup, above_peak_text
from trt_engine.records.profile import DevicePeak


def overhead_text(facts: ProfileFacts) -> str:
    """`the call costs 3.88 us and each of 40 nodes 0.22 us`: the larger part first."""
    node, call, nodes = facts.peaks.get("node"), facts.peaks.get("call"), node_count(facts)
    each = node.value if node is not None else 0.0
    stated = [(nodes * each, f"each of {nodes:.0f} nodes" if nodes > 1 else "the only node", each)]
    if call is not None:
        stated.append((call.value, "the call", call.value))
    (_, first, price), *rest = sorted(stated, reverse=True)
    return f"{first} costs {format_us(price)}" + "".join(f" and {name} {format_us(us)}" for _, name, us in rest)


def node_count(facts: ProfileFacts) -> float:
    return sum(row.calls for row in facts.layers.rows) if facts.layers is not None else 0.0


def node_overhead_ms(facts: ProfileFacts) -> float | None:
    """Overhead of the nodes of one inference, and of the call."""
    node, call = facts.peaks.get("node"), facts.peaks.get("call")
    if node is None or facts.layers is None:
        return None
    return (node_count(facts) * node.value + (call.value if call else 0.0)) / 1e3


Evidence = tuple[tuple[str, str], ...]


def slowest_text(facts: ProfileFacts) -> str:
    """The slowest layer, else kernel, in a sentence; empty without their times."""
    found = facts.layers
    if found is not None and found.rows and found.clock != "launch":
        row = max(found.rows, key=lambda row: row.median_ms)
        name = node_label(row.name, row.module)
        of_all = f"{format_ms(row.median_ms)}, {format_percent(row.share)} of the layers' time"
        return f"the slowest layer is `{name}` ({row.kind or row.category}): {of_all}"
    if facts.kernels:
        first = max(facts.kernels, key=lambda row: row.share)
        return (
            f"the slowest kernel is `{first.short_name}`: {format_ms(first.ms_per_inference)}, "
            f"{format_percent(first.share)} of the kernels' time"
        )
    return ""


def collect_evidence(
    facts: ProfileFacts, roof: Roofline | None, total: float, parts: Mapping[Part, float] | None = None
) -> Evidence:
    """The evidence in order: the time, its parts, launches, the rates relative to the peaks."""
    split, limits, shares = facts.split, facts.peaks, parts or {}
    copies, kernels, window, count = facts.copies_ms, facts.kernels_ms, facts.window_ms, facts.kernel_count
    if limits.on_host:
        kernels = count = None

    def of_total(ms: float) -> str:
        return f"{format_ms(ms)} ({format_percent(ms / total)})"

    costs = (
        (label, limits.get(name)) for name, label in (("launch", "a launch"), ("launch_graph", "a kernel in a graph"))
    )
    found: tuple[tuple[str, str | None], ...] = (
        ("time of one inference", format_ms(split.wall_ms)),
        (
            "with copies, sequentially",
            f"{format_ms(total)}: the base of the shares" if parts and facts.time_label != "the time" else None,
        ),
        (
            "copies",
            None if copies is None else f"{format_ms(copies)} ({format_percent(shares.get('copy', copies / total))})",
        ),
        ("kernels", None if kernels is None else of_total(kernels)),
        ("computing", None if window is None or kernels is not None else of_total(window)),
        ("around the call" if limits.on_host else "idle", format_percent(shares["idle"]) if "idle" in shares else None),
        (
            "overhead of nodes",
            f"{node_count(facts):.0f} nodes, {format_percent(shares['overhead'])}" if shares.get("overhead") else None,
        ),
        ("kernels of one inference", None if count is None else f"{count:.0f}"),
        *((f"{label} costs", format_us(item.value)) for label, item in costs if item is not None),
        ("launch calls, as captured", None if split.launch_ms is None else format_ms(split.launch_ms)),
        *(_roofline_evidence(facts, roof, shares) if roof is not None else ()),
        *(("peaks", note) for note in (limits.peaks.notes if limits.peaks is not None else ())),
    )
    return tuple((label, text) for label, text in found if text is not None)


def _roofline_evidence(facts: ProfileFacts, roof: Roofline, parts: Mapping[Part, float]) -> Iterable[tuple[str, str]]:
    limits = facts.peaks
    names: dict[Part, str] = {
        "compute": "compute-bound", "memory": "memory-bound", "neither": "neither",
        "untold": "unclassified",
    }  # fmt: skip
    for part, label in names.items():
        if parts.get(part):
            yield label, f"{format_percent(parts[part])} of {facts.time_label}"
    matrix, memory = limits.matrix(), limits.memory
    for one in sorted(roof.groups, key=lambda one: -one.ms)[:3]:
        sides = []
        for ceiling, share in (
            (limits.matrix(one.precision), one.share_of_matrix(limits)),
            (memory, one.share_of_memory(limits)),
        ):
            if ceiling is not None and share:  # copies compute nothing
                sides.append(
                    f"{format_quantity(share * ceiling.value, ceiling.unit)} ({format_percent(share)} of the peak)"
                )
        if sides:
            yield one.name, f"{format_ms(one.ms)}: {', '.join(sides)}"
    if facts.flops and facts.nbytes:
        yield "operations per byte", f"{format_number(facts.flops / facts.nbytes)} FLOP/B"
    if (ridge := limits.ridge) is not None:
        yield "compute is the nearer limit from", f"{format_number(ridge)} FLOP/B"
    for item in (matrix, memory):
        if item is not None:
            sheet = " (data sheet, not measured)" if item.source == "datasheet" else ""
            yield item.name, f"{format_quantity(item.value, item.unit)}{sheet}"


def rate_of_peak(rate: float, ceiling: DevicePeak) -> str:
    """`376 of the 990 TFLOP/s`: both in the peak's unit."""
    most, unit = scale_unit(ceiling.value, ceiling.unit)
    return f"{format_number(rate * most / ceiling.value)} of the {format_number(most)} {unit}"


def categories_text(found: Sequence[WorkGroup], roof: Roofline) -> str:
    """The categories of the groups: `matrix and attention layers`."""
    if roof.whole_model:
        return "the model as a whole"
    times: dict[str, float] = {}
    for one in found:
        times[one.category or "other"] = times.get(one.category or "other", 0.0) + one.ms
    total = sum(times.values()) or 1.0
    names = [name for name, ms in sorted(times.items(), key=lambda item: -item[1]) if ms >= 0.1 * total][:3]
    kind = "kernels" if found and found[0].name.endswith(" kernels") else "layers"
    return f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {kind}"


def idle_text(parts: Mapping[Part, float]) -> str:
    idle = parts.get("idle", 0.0)
    return f" ({format_percent(idle)} of the time is idle)" if idle >= NOTABLE_IDLE else ""


def device_text(facts: ProfileFacts) -> str:
    return "this processor" if facts.peaks.on_host else "this device"


def device_rate_text(facts: ProfileFacts, ceiling: DevicePeak, verb: str) -> str:
    """`this device multiplies`, if measured."""
    return f"{device_text(facts)} {verb}" if ceiling.source == "measured" else "its data sheet promises"


def peak_text(ceiling: DevicePeak) -> str:
    return ceiling.name.partition("_")[0].upper()


# ------------------------------------------------------------------------------------------------ the next experiment


def remeasure_peaks(facts: ProfileFacts, higher: tuple[WorkGroup, float]) -> dict[str, Any]:
    """The next experiment if the peak itself is wrong."""
    return {
        "next_step": f"the peaks of {device_text(facts)}, measured again while it is idle: "
        f"{above_peak_text(*higher)}, so it was "
        "measured on a busy machine, or the layer needs fewer operations than counted (Winograd)",
        "command": f"trt-engine doctor --peaks --remeasure --device {facts.device}",
        "confidence": "none",
    }


def with_settings(facts: ProfileFacts, command: str | None) -> str | None:
    """The command, with the profiled `-O` if it runs this engine, so that one thing changes at a time."""
    runs_it = (f"trt-engine bench {facts.engine_argument}", f"trt-engine profile {facts.engine_argument}")
    if command is None or not command.startswith(runs_it):
        return command
    given = [f"-O {shlex.quote(f'{name}={value}')}" for name, value in facts.settings.items()]
    return " ".join([command, *(words for words in given if words.partition("=")[0] + "=" not in command)])


def double_batch(facts: ProfileFacts, why: str) -> tuple[str, str]:
    """The experiment of twice the batch, and its command: with another engine, or model, if this one does not take it."""
    batch = 2 * facts.batch
    if facts.fixed_batch:
        return (
            f"a model with an open batch, then twice the batch: {why}",
            f"trt-engine inspect {facts.model_argument}",
        )
    taken = facts.max_batch is None or batch <= facts.max_batch
    if taken:
        sizes = facts.sizes_at(batch, engine=True)
        return f"twice the batch: {why}", f"trt-engine bench {facts.engine_argument}{facts.device_flag}{sizes}"
    return (
        f"an engine for twice the batch (this one takes {facts.max_batch} at most): {why}",
        f"trt-engine bench {facts.model_argument}{facts.device_flag}{facts.sizes_at(batch)}",
    )


def change_threads(facts: ProfileFacts) -> tuple[str, str]:
    """One thread if several ran; all threads if the engine was limited to one."""
    command = f"trt-engine bench {facts.engine_argument}{facts.sizes_at(facts.batch, engine=True)}"
    if facts.settings.get(_THREADS) == "1":  # 0: ONNX Runtime uses all cores
        return "all threads: this one alone may be the limit", f"{command} -O {_THREADS}=0"
    return (
        "other thread counts, which show work that is too small or uneven for all threads",
        f"{command} -O {_THREADS}=1",
    )


_THREADS = "intra_op_threads"
_NEXT_TYPES: dict[str, tuple[str, ...]] = {
    "fp32": ("fp16", "bf16", "tf32"), "tf32": ("fp16", "bf16"), "fp16": ("fp8", "int8"), "bf16": ("fp8", "int8"),
}  # fmt: skip
_WORTH = 1.3
"""Minimum speedup of a dtype: less is lost in conversions."""


def faster_dtype(facts: ProfileFacts, now: DevicePeak) -> tuple[str, DevicePeak] | None:
    """The first faster dtype of this device, by measured (or data-sheet) rates."""
    have = now.name.partition("_")[0]
    for name in ("int8",) if facts.peaks.on_host and have == "fp32" else _NEXT_TYPES.get(have, ()):
        other = facts.peaks.matrix(name)
        if other is not None and other.name.startswith(name) and other.value >= _WORTH * now.value:
            return name, other
    return None


def measure_in_precision(facts: ProfileFacts, precision: str) -> str:
    """The command to measure the model in that dtype, with a backend that has kernels for it."""
    narrow = precision in ("int8", "fp8")
    seen = facts.layers.instrument if facts.layers is not None else ""
    by_tensorrt = not facts.peaks.on_host and (narrow or seen.startswith(("tensorrt", "trtexec")))
    words = [f"trt-engine bench {facts.model_argument}", f"--precision {precision}"]
    words += ["--calib-data DATA"] if narrow else []
    words += ["--backend tensorrt"] if by_tensorrt else []
    return " ".join([*words, f"--device {facts.device}{facts.sizes_at(facts.batch)}"])

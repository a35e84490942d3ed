"""The bottleneck of an engine: launches, copies, bandwidth, arithmetic or the host, from measurements alone.

The time of one inference is split into copies, compute-bound kernels, memory-bound kernels, kernels at neither limit,
unclassified kernels, and idle time of the device. The largest part is the bottleneck. If a measurement is missing, the
result names it and the command that takes it. The method is in docs/bottleneck.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trt_engine.format import format_ms, format_percent, format_us
from trt_engine.profiling.bottleneck_text import (
    Evidence,
    categories_text,
    change_threads,
    collect_evidence,
    device_rate_text,
    device_text,
    double_batch,
    faster_dtype,
    idle_text,
    measure_in_precision,
    node_overhead_ms,
    overhead_text,
    peak_text,
    rate_of_peak,
    remeasure_peaks,
    slowest_text,
    with_settings,
)
from trt_engine.profiling.roofline import (
    ABOVE_PEAK,
    LAUNCH_BOUND_SHARE,
    MAX_LAUNCH_GAPS,
    NOTABLE_IDLE,
    SHORT_KERNEL_US,
    Part,
    ProfileFacts,
    Roofline,
    build_roofline,
    compute_dtype,
    group_above_peak,
    is_positive,
    rate_tflops,
    weighted_mean,
    work_groups,
)
from trt_engine.records.profile import Bottleneck


def find_bottleneck(facts: ProfileFacts) -> Bottleneck:
    """The bottleneck of the engine in one sentence, with its evidence and the next experiment."""
    if not is_positive(facts.split.wall_ms):
        return _unknown("no inference time was measured", "measure it", f"trt-engine bench {facts.engine_argument}", ())
    found = _cpu_bottleneck(facts) if facts.peaks.on_host else _device_bottleneck(facts)
    if (
        found.bound in ("compute", "unknown")
        and (higher := group_above_peak(work_groups(facts, facts.split.wall_ms)[0], facts.peaks, ABOVE_PEAK))
        is not None
    ):
        found = replace(found, **remeasure_peaks(facts, higher))
    return replace(found, command=with_settings(facts, found.command))


def _device_bottleneck(facts: ProfileFacts) -> Bottleneck:
    wall = facts.split.wall_ms
    copies = facts.copies_ms or 0.0
    kernels, window = facts.kernels_ms, facts.window_ms
    working = kernels if kernels is not None else window
    if working is None:
        return _unknown(
            "no device time was measured", "a benchmark with device times",
            f"trt-engine bench {facts.engine_argument} --device {facts.device}", collect_evidence(facts, None, wall),
        )  # fmt: skip
    total = facts.total_ms
    roof = build_roofline(facts, working)
    parts: dict[Part, float] = {name: share * working / total for name, share in roof.shares.items()}
    parts["copy"] = copies / total
    parts["idle"] = max(0.0, total - copies - working) / total
    evidence = collect_evidence(facts, roof, total, parts)
    largest = max(_ORDER, key=lambda name: parts.get(name, 0.0))
    if largest == "copy":
        return _copy_bound(facts, parts, evidence)
    if largest == "idle":
        return _idle_bound(facts, parts, total, evidence)
    shown = largest == "compute" or (largest == "memory" and not roof.inferred_by_kind)
    if not shown and (found := _small_kernel_bound(facts, evidence)) is not None:
        return found
    if kernels is None and largest in ("neither", "untold") and facts.peaks.matrix() is not None and facts.flops:
        return _unknown(
            f"{format_ms(working)} pass between the first and the last work of the device, and the kernels' part of it "
            "is unknown",
            "the times of its kernels",
            facts.command("profile", "--profiler cupti"),
            evidence,
        )
    return _working_bottleneck(facts, roof, parts, largest, evidence)


_ORDER: tuple[Part, ...] = ("idle", "overhead", "copy", "memory", "compute", "neither", "untold")
"""Tie-break order of equal parts: directly measured before derived ones."""


def _copy_bound(facts: ProfileFacts, parts: Mapping[Part, float], evidence: Evidence) -> Bottleneck:
    up, down = facts.split.h2d_ms or 0.0, facts.split.d2h_ms or 0.0
    longer = "to the device" if up >= down else "back"
    sentence = (
        f"copy-bound: {format_percent(parts['copy'])} of the time goes to copies between host and device "
        f"({format_ms(max(up, down))} "
        f"of them {longer}); overlap them with compute, or use smaller inputs"
    )
    return Bottleneck(
        "copy", sentence, evidence,
        "two queries in flight, so that copies overlap compute",
        facts.command("bench", "--transfers --streams 2"),
    )  # fmt: skip


def _idle_bound(facts: ProfileFacts, parts: Mapping[Part, float], total: float, evidence: Evidence) -> Bottleneck:
    """The device waits for launches, or for other host work."""
    idle = parts["idle"]
    kernels, window, launched = facts.kernels_ms, facts.window_ms, facts.kernel_count
    waits = f"{format_percent(idle)} of the time the device is idle"
    outside = None if window is None else max(0.0, total - (facts.copies_ms or 0.0) - window)
    inside = None if window is None or kernels is None else max(0.0, window - kernels)
    if outside is not None and outside > (inside or 0.0):
        return _host_bound(
            facts, f"host-bound: {waits}, {format_ms(outside)} of it before and after its work", evidence
        )
    share, source = _launch_share(facts, total)
    cost = facts.peaks.get("launch")
    gap_us = idle * total * 1e3 / launched if launched else None
    many = f"{launched:.0f} kernels" if launched else "its kernels"
    if share is not None and share >= LAUNCH_BOUND_SHARE:
        return _launch_bound(
            facts, f"launch-bound: {waits}, and {source} of {many} take {format_percent(share)} of the total", evidence
        )
    called_little = facts.split.launch_ms is not None and share is not None and share < LAUNCH_BOUND_SHARE / 10
    if not called_little and gap_us is not None and cost is not None and gap_us <= MAX_LAUNCH_GAPS * cost.value:
        return _launch_bound(
            facts,
            f"launch-bound: {waits}, {format_us(gap_us)} for each of {many}, of which the launch alone costs "
            f"{format_us(cost.value)}",
            evidence,
        )
    node = facts.peaks.get("launch_graph")
    if called_little and inside and gap_us is not None and node is not None and gap_us <= MAX_LAUNCH_GAPS * node.value:
        sentence = (
            f"launch-bound: {waits}, {format_us(gap_us)} after each of {many}, although few calls launch them (a "
            f"graph); fewer "
            "and larger kernels help"
        )
        return Bottleneck("launch", sentence, evidence, *double_batch(facts, "the same kernels with twice the work"))
    if share is None and cost is None:
        sentence = f"host-bound: {waits}; the launch cost of {many} is unknown without this device's peaks"
        return Bottleneck(
            "host", sentence, evidence, "the launch cost here, then the profile again",
            facts.command("profile", "--peaks"),
        )  # fmt: skip
    stated = f", and launches take {format_percent(share)} of the total" if share is not None else ""
    return _host_bound(facts, f"host-bound: {waits}{stated}", evidence)


def _launch_share(facts: ProfileFacts, total: float) -> tuple[float | None, str]:
    """The share of the time in launches: as captured, else kernels times launch cost."""
    split = facts.split
    if split.launch_ms is not None:
        captured = (split.busy_ms or 0.0) + (split.idle_ms or 0.0)  # the captured time, which the capture slows
        return min(1.0, split.launch_ms / max(captured, total)), "launch calls"
    cost = facts.peaks.get("launch")
    if cost is None or facts.kernel_count is None:
        return None, ""
    return min(1.0, facts.kernel_count * cost.value / 1e3 / total), f"launches at {format_us(cost.value)} each"


def _launch_bound(facts: ProfileFacts, sentence: str, evidence: Evidence) -> Bottleneck:
    return Bottleneck(
        "launch", f"{sentence}; a CUDA graph launches them at once", evidence,
        "replay the kernels as one CUDA graph, or use a larger batch if they are one already",
        facts.command("bench", "--graph"),
    )  # fmt: skip


def _host_bound(facts: ProfileFacts, sentence: str, evidence: Evidence) -> Bottleneck:
    return Bottleneck(
        "host", f"{sentence}; more queries in flight keep the device busy", evidence,
        "two queries in flight: if the throughput rises, the host was the bottleneck",
        facts.command("bench", "--streams 2"),
    )  # fmt: skip


def _small_kernel_bound(facts: ProfileFacts, evidence: Evidence) -> Bottleneck | None:
    """If as many empty kernels take a large share of the kernels' time; else None."""
    cost, launched, working = facts.peaks.get("launch_graph"), facts.kernel_count, facts.kernels_ms
    if (
        cost is None
        or not launched
        or not working
        or (share := launched * cost.value / 1e3 / working) < LAUNCH_BOUND_SHARE
    ):
        return None
    sentence = (
        f"launch-bound: {launched:.0f} kernels of {format_us(working * 1e3 / launched)} each, and an empty one takes "
        f"{format_us(cost.value)} in a graph, {format_percent(min(share, 1.0))} of that; fewer and larger ones help"
    )
    return Bottleneck("launch", sentence, evidence, *double_batch(facts, "the same kernels with twice the work"))


def _cpu_bottleneck(facts: ProfileFacts) -> Bottleneck:
    """On a CPU the time splits into the nodes' work, their overhead, and the time around the call."""
    wall = facts.split.wall_ms
    call = min(facts.split.compute_ms if facts.split.compute_ms is not None else wall, wall)
    overhead = min(node_overhead_ms(facts) or 0.0, call)
    working = call - overhead
    roof = build_roofline(facts, working)
    parts: dict[Part, float] = {name: share * working / wall for name, share in roof.shares.items()}
    parts["idle"] = (wall - call) / wall
    parts["overhead"] = overhead / wall
    evidence = collect_evidence(facts, roof, wall, parts)
    largest = max(_ORDER, key=lambda name: parts.get(name, 0.0))
    if largest == "idle":
        sentence = (
            f"host-bound: {format_percent(parts['idle'])} of the time is spent around the call of the engine, not in it"
        )
        return Bottleneck(
            "host", f"{sentence}; a larger batch amortizes it", evidence,
            *double_batch(facts, "the time around the call stays the same"),
        )  # fmt: skip
    if largest == "overhead":
        sentence = (
            f"host-bound: {overhead_text(facts)} before any computation, {format_percent(parts['overhead'])} of the time; "
            "fewer nodes or a larger batch help"
        )
        return Bottleneck("host", sentence, evidence, *double_batch(facts, "as many nodes, each with more to do"))
    return _working_bottleneck(facts, roof, parts, largest, evidence)


def _working_bottleneck(
    facts: ProfileFacts, roof: Roofline, parts: Mapping[Part, float], largest: Part, evidence: Evidence
) -> Bottleneck:
    known = {"compute": _compute_bound, "memory": _memory_bound, "neither": _below_roofs}
    return known.get(largest, _unknown_limit)(facts, roof, parts, evidence)


def _compute_bound(facts: ProfileFacts, roof: Roofline, parts: Mapping[Part, float], evidence: Evidence) -> Bottleneck:
    found = roof.groups_at("compute", facts.peaks)
    ceiling = facts.peaks.matrix(found[0].precision)
    assert ceiling is not None  # a compute-bound group has a known peak
    rate = rate_tflops([one for one in found if facts.peaks.matrix(one.precision) == ceiling])
    if ceiling.source == "measured" and rate > ABOVE_PEAK * ceiling.value:
        return _unknown(
            f"{categories_text(found, roof)} compute at {rate / ceiling.value:.1f} times the measured "
            f"{peak_text(ceiling)} peak of "
            f"{device_text(facts)}: it was measured on a busy machine, or they need fewer operations than counted "
            f"(Winograd)",
            "the peaks of this device, measured again while it is idle",
            f"trt-engine doctor --peaks --remeasure --device {facts.device}",
            evidence,
        )
    sentence = (
        f"compute-bound: {format_percent(parts['compute'])} of {facts.time_label} goes to {categories_text(found, roof)} at "
        f"{rate_of_peak(rate, ceiling)} {device_rate_text(facts, ceiling, 'multiplies')} in {peak_text(ceiling)}"
    )
    faster = faster_dtype(facts, ceiling)
    if faster is None:
        next_ = "no other type is faster here: fewer operations (a smaller model), or another device"
        return Bottleneck(
            "compute", f"{sentence}; only fewer operations help{idle_text(parts)}", evidence, next_,
            f"trt-engine inspect {facts.engine_argument}", "estimated",
        )  # fmt: skip
    name, other = faster
    times = f"{other.value / ceiling.value:.1f} times"
    promised = "datasheet" in (ceiling.source, other.source)
    gain = f"is promised at {times} the rate" if promised else f"multiplies {times} as fast here"
    return Bottleneck(
        "compute",
        f"{sentence}; {name.upper()} {gain}{idle_text(parts)}",
        evidence,
        f"the model in {name.upper()}, with its latency and accuracy compared",
        measure_in_precision(facts, name),
        "estimated",
    )


def _memory_bound(facts: ProfileFacts, roof: Roofline, parts: Mapping[Part, float], evidence: Evidence) -> Bottleneck:
    found = roof.groups_at("memory", facts.peaks)
    what = categories_text(found, roof)
    share = f"memory-bound: {format_percent(parts['memory'])} of {facts.time_label} goes to {what}"
    shown = [one for one in found if one.nbytes is not None and facts.peaks.memory is not None]
    ceiling = facts.peaks.memory
    if roof.inferred_by_kind or not shown or ceiling is None:
        sentence = f"{share}, which move bytes and compute little (by category: their bytes or the peak are unknown)"
    else:
        moved = sum(one.nbytes or 0.0 for one in shown) / (sum(one.ms for one in shown) / 1e3) / 1e9
        cached = (
            ", part of it from caches (or the peak was measured on a busy machine)" if moved > ceiling.value else ""
        )
        sentence = (
            f"{share} that move {rate_of_peak(moved, ceiling)} {device_rate_text(facts, ceiling, 'moves')}{cached}"
        )
    halves = compute_dtype(facts.precision, on_host=facts.peaks.on_host) in ("fp32", "tf32") and not facts.peaks.on_host
    moving = sum(one.ms for one in found if one.category in ("copy", "reformat"))
    if halves:
        advice, next_, command = "FP16 halves the bytes", "the model in FP16", measure_in_precision(facts, "fp16")
    elif moving * 2 > sum(one.ms for one in found):
        advice, next_ = "copies and layout changes are often avoidable", "the nodes of the model that cause them"
        command = f"trt-engine lint {facts.model_argument}"
    elif not facts.peaks.on_host and facts.layers is not None and facts.layers.instrument.startswith("onnxruntime"):
        advice, next_ = "fused into their neighbours they move less", "TensorRT, which fuses more layers"
        where = f"--device {facts.device}{facts.sizes_at(facts.batch)}"
        command = f"trt-engine bench {facts.model_argument} --backend tensorrt {where}"
    else:
        advice, next_ = (
            "fused into their neighbours they move less",
            "the nodes of the model that could be fused or removed",
        )
        command = f"trt-engine lint {facts.model_argument}"
    return Bottleneck("bandwidth", f"{sentence}; {advice}{idle_text(parts)}", evidence, next_, command, "estimated")


def _below_roofs(facts: ProfileFacts, roof: Roofline, parts: Mapping[Part, float], evidence: Evidence) -> Bottleneck:
    """Both limits are known and far: the bottleneck is not measured."""
    found = roof.groups_at("neither", facts.peaks)
    sides = [
        f"{format_percent(weighted_mean(found, values))} of what {device_text(facts)} {verb}"
        for verb, values in (
            ("multiplies", [one.share_of_matrix(facts.peaks) for one in found]),
            ("moves from memory", [one.share_of_memory(facts.peaks) for one in found]),
        )
        if any(value is not None for value in values)
    ]
    moved = weighted_mean(found, [one.share_of_memory(facts.peaks) for one in found])
    why = "their bytes come from caches: " if moved > 1 else ""
    sentence = (
        f"unknown: {format_percent(parts['neither'])} of {facts.time_label} goes to {categories_text(found, roof)} "
        f"that reach "
        f"{' and '.join(sides)}, "
        f"so {why}neither compute nor memory is the bottleneck{idle_text(parts)}"
    )
    if facts.peaks.on_host:
        next_, command = change_threads(facts)
    elif parts.get("idle", 0.0) >= NOTABLE_IDLE:
        next_ = "one CUDA graph, which removes the gaps, before examining kernels"
        command = facts.command("bench", "--graph")
    elif (
        facts.kernels and facts.kernel_count and (facts.kernels_ms or 0.0) * 1e3 / facts.kernel_count >= SHORT_KERNEL_US
    ):
        next_ = "hardware counters of the longest kernels: they show what the kernels wait for"
        command = facts.command("profile", "--ncu 3")
    else:
        next_, command = double_batch(facts, "if the time per image drops, the kernels were too small for the device")
    return Bottleneck("unknown", sentence, evidence, next_, command, "estimated")


def _unknown_limit(facts: ProfileFacts, roof: Roofline, parts: Mapping[Part, float], evidence: Evidence) -> Bottleneck:
    """The device is busy, and the data to classify its work is missing."""
    worker = "processor" if facts.peaks.on_host else "device"
    works = f"{format_percent(parts['untold'])} of {facts.time_label} the {worker} is busy"
    limits = facts.peaks
    if roof.unattributed > parts["untold"] / 2:
        return _unknown(
            f"{format_percent(min(roof.unattributed, parts['untold']))} of {facts.time_label} is outside all "
            f"layers' times: between "
            "layers, or in layers delayed by other work of the machine",
            "the same profile on an idle machine",
            facts.command("profile"),
            evidence,
        )
    if limits.peaks is None or (limits.matrix() is None and limits.memory is None):
        slowest = slowest_text(facts)
        leads = f"{slowest}; its distance from" if slowest else f"{works}; its distance from"
        return Bottleneck(
            "unknown", f"{leads} the peak of {device_text(facts)} is unknown: no peak was measured here", evidence,
            f"the peaks of {device_text(facts)}, measured once (about 20 s), then the profile again",
            facts.command("profile", "--peaks"), "none",
        )  # fmt: skip
    if compute_dtype(facts.precision, on_host=limits.on_host) is None:
        stated = f"of `{facts.precision}`" if facts.precision else "of its unknown compute dtype"
        return _unknown(
            f"{works}, and no peak {stated} is known", "the engine's compute dtype",
            f"trt-engine inspect {facts.engine_argument}", evidence,
        )  # fmt: skip
    if limits.matrix() is None:
        return _unknown(
            f"{works}, and no rate of {facts.precision.upper()} products was measured here"
            + "".join(f" ({text})" for text in limits.peaks.skipped if text.startswith(facts.precision.lower()))[:300],
            "the peaks with a library that supports that type (PyTorch)",
            f"trt-engine doctor --peaks --remeasure --device {facts.device}", evidence,
        )  # fmt: skip
    if facts.flops is None or (roof.whole_model and facts.nbytes is None):
        missing = "operations" if facts.flops is None else "bytes"
        return _unknown(
            f"{works}, and its {missing} are not counted", "the work of the model, counted from its ONNX file",
            f"trt-engine inspect {facts.model_argument}", evidence,
        )  # fmt: skip
    if limits.on_host or not facts.kernels:
        profiler = "layers" if limits.on_host else "cupti"
        return _unknown(
            f"{works}, and its work is unknown",
            "the times of its layers, with their work",
            facts.command("profile", f"--profiler {profiler}"),
            evidence,
        )
    return _unknown(
        f"{works}, most of it in kernels with unknown operations and bytes",
        "hardware counters of the longest kernels",
        facts.command("profile", "--ncu 3"), evidence,
    )  # fmt: skip


def _unknown(missing: str, next_: str, command: str, evidence: Evidence) -> Bottleneck:
    return Bottleneck("unknown", f"unknown: {missing}", evidence, next_, command, "none")

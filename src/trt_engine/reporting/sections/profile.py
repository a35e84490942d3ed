"""Where the time goes: verdicts, the split of an inference, kernels and layers by category, the ladder, ceilings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trt_engine.figures import percent, scaled, si, size
from trt_engine.reporting.charts import Stack, Stacked
from trt_engine.reporting.contents import Block, Commands, Facts, Figure, Notice, Paragraph, Section, Table, clean
from trt_engine.reporting.figures import column, count, number
from trt_engine.reporting.sections.parts import cleaned, per, plural, sentence, table, told, varying, words
from trt_engine.reporting.sections.scene import Scene
from trt_engine.traces import CATEGORIES, KernelRow, ProfileReport

__all__ = ["breakdown", "figures", "kernels", "layers", "notices", "profiled", "rungs", "verdicts"]

Named = Sequence[tuple[str, ProfileReport]]

_BARS = 16  # in one chart
_TABLES = 4  # kernel tables on one page
_ROWS, _FEW = 25, 10  # rows of a table that stands alone, and of one among several
_LONG = 180  # letters of a name that another has too
_REST = len(CATEGORIES)

_BOUND = {
    "launch": "launch-bound",
    "copy": "copy-bound",
    "bandwidth": "bandwidth-bound",
    "compute": "compute-bound",
    "host": "host-bound",
    "unknown": "not known",
}


def figures(profile: ProfileReport) -> Iterator[Figure]:
    yield Figure("bound", _BOUND[profile.verdict.bound], f"verdict, {profile.verdict.confidence}")
    yield Figure("ms per inference", number(profile.split.wall_ms), f"batch {profile.batch}, profiler off")
    if profile.split.kernels is not None:
        yield Figure("kernels", number(profile.split.kernels), "launched in one inference")
    elif profile.layers is not None:
        yield Figure("layers", count(len(profile.layers.rows)), "timed by the backend")


def notices(named: Named) -> Iterator[Notice]:
    for name, profile in named:
        if not profile.complete:
            yield Notice(clean(f"The profile of {name} was interrupted; what it has stands below."))


def verdicts(named: Named) -> Section | None:
    """What holds each engine back, in a sentence and its figures."""
    if not named:
        return None
    blocks: list[Block] = []
    if len(named) > 1:
        alike: dict[tuple[str, str, str], list[tuple[str, str | None]]] = {}
        for name, profile in named:
            said = profile.verdict
            alike.setdefault((_BOUND[said.bound], said.sentence, said.next), []).append((name, said.command))
        rows = [(_all_of(group, named), *said) for said, group in alike.items()]
        blocks.append(words("What holds each engine back", ("engine", "bound", "verdict", "next experiment"), rows))
        commands = [clean(line) for (_, line), *_ in alike.values() if line]  # one engine stands for those alike
        if commands:
            blocks.append(Commands(tuple(dict.fromkeys(commands))))
    else:
        verdict = named[0][1].verdict
        blocks.append(Paragraph(clean(sentence(verdict.sentence))))
        if verdict.evidence:
            blocks.append(Facts(cleaned(verdict.evidence)))
        known = {
            "estimated": f" The verdict is estimated: it rests on {named[0][1].rests_on}.",
            "none": " Nothing was measured that a verdict could rest on.",
        }.get(verdict.confidence, "")
        blocks.append(Paragraph(clean(f"Next: {sentence(verdict.next)}{known}")))
        if verdict.command:
            blocks.append(Commands((clean(verdict.command),)))
    return Section("verdict", "Verdict", tuple(blocks))


def _all_of(group: Sequence[tuple[str, str | None]], named: Named) -> str:
    return f"all {len(named)}" if len(group) == len(named) else ", ".join(name for name, _ in group)


def breakdown(named: Named) -> Section | None:
    """One inference by category of kernel or layer, and by where its wall time goes."""
    if not named:
        return None
    blocks: list[Block] = []
    charts = [chart for chart in (_stacked(named, True), _stacked(named, False)) if chart is not None]
    if charts:
        blocks.append(tuple(charts))
    categories = [name for name in CATEGORIES if any(_ms(profile, name) for _, profile in named)]
    per_image = len({profile.batch for _, profile in named}) > 1
    if categories:
        rows: list[tuple[str, Sequence[str]]] = []
        for category in categories:
            times = column([_ms(profile, category) / (profile.batch if per_image else 1) for _, profile in named])
            shares = [_share(profile, category) for _, profile in named]
            rows.append((category, [f"{ms} ({percent(share)})" for ms, share in zip(times, shares, strict=True)]))
        counted = ["kernels" if profile.kernels else "layers" for _, profile in named]
        caption = f"Milliseconds per {'image' if per_image else 'inference'} by category, with the share of their sum"
        lead = [("engine", [name for name, _ in named]), *varying([("of", counted)])]
        blocks.append(table(caption, [*lead, *rows], words=len(lead)))
    blocks.append(_split(named))
    blocks.append(
        Paragraph(
            f"{_clocks(named)} A dash means that the rung used does not measure it. Shares are of the categories' sum, "
            "which kernels that ran side by side may carry beyond the wall time."
        )
    )
    return Section("breakdown", "Where the time goes", tuple(blocks))


def _clocks(named: Named) -> str:
    """What each time of the split was measured by."""
    known = [profile for _, profile in named if profile.split.gpu_ms is not None]
    wall = "Wall time is the host's clock without a profiler"
    if not known:
        return f"{wall}; the device's times come from the profiler, whose own cost is in them."
    if all(profile.protocol.clock == "device events" for profile in known):
        wall = "Wall time is the mean from one end to the next, by events of the device without a profiler"
    longer = any(profile.outlasts_the_whole for profile in known)
    replayed = ", in which a graph is replayed" if all(profile.protocol.graph for profile in known) else ""
    return (
        f"{wall}. Copies and computation are by events of the device, one query at a time, without a profiler"
        + (f"; such a computation can be longer than the wall time{replayed}." if longer else ".")
        + " What is busy, idle, launching and side by side the profiler tells, whose own cost is in it."
    )


def _ms(profile: ProfileReport, category: str) -> float:
    return next((item.ms for item in profile.categories if item.category == category), 0.0)


def _share(profile: ProfileReport, category: str) -> float:
    total = sum(item.ms for item in profile.categories)
    return _ms(profile, category) / total if total else 0.0


def _stacked(named: Named, by_kernel: bool) -> Stacked | None:
    """Categories of those profiled by kernel, or of those profiled by layer: the two do not compare."""
    shown = [(name, p) for name, p in named if p.categories and bool(p.kernels) == by_kernel][:_BARS]
    if not shown:
        return None
    per_image = len({profile.batch for _, profile in shown}) > 1
    what = "kernel" if by_kernel else "layer"
    present = [index for index, name in enumerate(CATEGORIES) if any(_ms(profile, name) for _, profile in shown)]
    outside = [max(0.0, p.split.wall_ms - sum(item.ms for item in p.categories)) for _, p in shown]
    rest = any(ms > 0.005 * profile.split.wall_ms for ms, (_, profile) in zip(outside, shown, strict=True))
    parts = [(CATEGORIES[index], index) for index in present] + ([(f"outside of {what}s", _REST)] if rest else [])
    stacks = []
    for (name, profile), other in zip(shown, outside, strict=True):
        scale = profile.batch if per_image else 1
        values = [_ms(profile, CATEGORIES[index]) / scale for index in present] + ([other / scale] if rest else [])
        stacks.append(Stack(name, tuple(values)))
    said = (
        f"{stack.label}: "
        + ", ".join(f"{part} {number(ms)}" for (part, _), ms in zip(parts, stack.values, strict=True) if ms)
        + " ms"
        for stack in stacks
    )
    return Stacked(
        f"categories-{what}s",
        f"One {'image' if per_image else 'inference'} by category of {what}",
        told(said),
        "ms",
        tuple(parts),
        tuple(stacks),
    )


def _split(named: Named) -> Table:
    splits = [(profile.split, profile.batch) for _, profile in named]
    fields = (
        ("wall", "wall_ms"),
        ("copy in", "h2d_ms"),
        ("compute", "compute_ms"),
        ("copy out", "d2h_ms"),
        ("busy", "busy_ms"),
        ("idle", "idle_ms"),
        ("launching", "launch_ms"),
        ("side by side", "overlap_ms"),
    )
    columns: list[tuple[str, Sequence[str]]] = [
        ("engine", [name for name, _ in named]),
        ("batch", [str(batch) for _, batch in splits]),
    ]
    for title, name in fields:
        values = [getattr(split, name) for split, _ in splits]
        if any(value is not None for value in values):
            if name == "overlap_ms":  # less is the clocks' doing
                values = [None if value is None else round(value, 4) for value in values]
            columns.append((title, column(values)))
    if any(split.kernels is not None for split, _ in splits):
        columns.append(("kernels", ["–" if split.kernels is None else per(split.kernels) for split, _ in splits]))
    return table("One inference, in ms", columns, words=1)


def kernels(named: Named) -> Section | None:
    """The kernels with most time, of each engine."""
    shown = [(name, profile) for name, profile in named if profile.kernels]
    if not shown:
        return None
    blocks: list[Block] = []
    limit = _ROWS if len(shown) == 1 else _FEW
    for name, profile in shown[:_TABLES]:
        rows = profile.kernels[:limit]
        which = "" if len(shown) == 1 else f" of {name}"
        more = f", the {limit} longest of {len(profile.kernels)}" if len(profile.kernels) > limit else ""
        columns: list[tuple[str, Sequence[str]]] = [
            ("kernel", _told_apart(rows)),
            ("category", [row.category for row in rows]),
            ("per inference", [per(row.per_inference) for row in rows]),
            ("ms", column([row.per_inference * row.mean_us / 1000 for row in rows])),
            ("share %", column([100 * row.share for row in rows], 2)),
            ("mean µs", column([row.mean_us for row in rows])),
            ("max µs", column([row.max_us for row in rows])),
        ]
        label = profile.layers.label if profile.layers is not None else str
        if any(row.layers for row in rows):
            columns.append(("launched by", [_few([label(name) for name in row.layers]) for row in rows]))
        blocks.append(table(f"Kernels{which}{more}; ms in one inference", columns, words=2, also=("launched by",)))
    if len(shown) > _TABLES:
        blocks.append(Paragraph(f"Shown: {_TABLES} of {len(shown)} engines; each record has all its kernels."))
    counters = [(name, item) for name, profile in named for item in profile.counters]
    if counters:
        columns = [
            *varying([("engine", [name for name, _ in counters])]),
            ("kernel", [_cut(item.kernel) for _, item in counters]),
            ("launches", [count(item.launches) for _, item in counters]),
            ("µs", column([item.duration_us for _, item in counters])),
            ("compute % of peak", column([item.compute_pct for _, item in counters])),
            ("memory % of peak", column([item.memory_pct for _, item in counters])),
            ("DRAM % of peak", column([item.dram_pct for _, item in counters])),
            ("occupancy %", column([item.occupancy_pct for _, item in counters])),
        ]
        blocks.append(
            table(
                "By Nsight Compute, of the first launches of each, one by one and with cold caches",
                columns,
                words=len(columns) - 6,
            )
        )
        advice = list(dict.fromkeys((_cut(item.kernel), said) for _, item in counters for said in item.advice))
        if advice:
            blocks.append(words("What Nsight Compute advises", ("kernel", "advice"), advice[:_ROWS]))
    return Section("kernels", "Kernels", tuple(blocks))


def layers(named: Named) -> Section | None:
    """The layers with most time, of each engine."""
    shown = [(name, profile, profile.layers) for name, profile in named if profile.layers and profile.layers.rows]
    if not shown:
        return None
    blocks: list[Block] = []
    limit = _ROWS if len(shown) == 1 else _FEW
    for name, _, found in shown[:_TABLES]:
        rows = sorted(found.rows, key=lambda row: -row.median_ms)[:limit]  # one slow call decides a mean
        which = "" if len(shown) == 1 else f" of {name}"
        more = f", the {limit} longest of {len(found.rows)}" if len(found.rows) > limit else ""
        shares = [("share %", column([100 * row.share for row in rows], 2))] if found.clock != "launch" else []
        columns: list[tuple[str, Sequence[str]]] = [
            *([("module", [_cut(row.module or "-") for row in rows])] if any(row.module for row in rows) else []),
            ("layer", [_cut(row.name) for row in rows]),
            ("kind", [_cut(row.kind) for row in rows]),
            ("category", [row.category for row in rows]),
            ("median ms", column([row.median_ms for row in rows])),
            ("mean ms", column([row.mean_ms for row in rows])),
            *shares,
            ("calls", [per(row.calls) for row in rows]),
            *varying([("", [clean(" ".join([*row.dtypes, row.provider, row.device]).strip()) for row in rows])]),
        ]
        blocks.append(
            table(f"Layers{which}{more}, by {clean(found.instrument)}", columns, words=3 + (columns[0][0] == "module"))
        )
        blocks += [Notice(clean(sentence(note)), "info") for note in found.notes]
    if len(shown) > _TABLES:
        blocks.append(Paragraph(f"Shown: {_TABLES} of {len(shown)} engines; each record has all its layers."))
    return Section("layers", "Layers", tuple(blocks))


def rungs(scene: Scene, named: Named) -> Section | None:
    """Which step of the ladder was used, why others were not, and what the device can do at most."""
    if not named:
        return None
    blocks: list[Block] = []
    ladders: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, profile in named:
        steps: tuple[tuple[str, ...], ...] = tuple(
            (rung.name, "used" if rung.used else "no", rung.reason + (f"; {rung.fix}" if rung.fix else ""))
            for rung in profile.rungs
        )
        ladders.setdefault(steps, []).append(name)
    for ladder, which in ladders.items():
        if not ladder:
            continue
        where = (
            "" if len(ladders) == 1 else ": " + ", ".join(which[:_TABLES]) + (" and others" * (len(which) > _TABLES))
        )
        marked = [index for index, step in enumerate(ladder) if step[1] == "used"]
        blocks.append(words(f"The ladder of instruments{where}", ("rung", "", "why"), ladder, marked))
    measured = {profile.ceilings.key: profile.ceilings for _, profile in named if profile.ceilings}
    for found in measured.values():
        most = [scaled(item.value, item.unit) for item in found.items]
        columns: list[tuple[str, Sequence[str]]] = [
            ("ceiling", [clean(item.name.replace("_", " ")) for item in found.items]),
            ("how", [clean(f"{item.source}: {item.how}") for item in found.items]),
            ("value", [number(value) for value, _ in most]),
            ("unit", [unit for _, unit in most]),
        ]
        if found.items:
            blocks.append(table(clean(f"What {found.device} can do at most"), columns, words=2))
        blocks += [Notice(clean(sentence(reason)), "info") for reason in found.skipped]
    ran = {fact for record in scene.records for fact in (*record.facts.items(), ("inputs", record.inputs))}
    facts = [
        (f"{name}: {key}" if len(named) > 1 else key, value)
        for name, p in named
        for key, value in _counted(p.facts)
        if (key, value) not in ran  # told where it is said what ran
    ]
    if facts and len(named) <= _TABLES:
        blocks.append(Facts(cleaned(facts)))
    if len(named) == 1:
        blocks.append(Paragraph(f"{plural(named[0][1].inferences, 'inference')} captured with the profiler on."))
    return Section("instruments", "Instruments", tuple(blocks)) if blocks else None


def _counted(facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Facts as they are read: the work of an inference in its units."""
    for key, value in facts.items():
        if key == "flops" and value.isdecimal():
            yield "operations of one inference", f"{si(int(value))}FLOP"
        elif key == "flops_from":
            yield "operations counted from", value
        elif key == "nbytes" and value.isdecimal():
            yield "bytes it moves at least", size(int(value))
        else:
            yield key.replace("_", " ") if key == "layers_of_kernels" else key, value


def _few(names: Sequence[str], most: int = 2) -> str:
    return _cut(", ".join(names[:most])) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _told_apart(rows: Sequence[KernelRow]) -> list[str]:
    """Kernels by their own names; those of one name with what a template made of it."""
    own = [_cut(row.short or row.name) for row in rows]
    return [_made_of(row.name) if own.count(name) > 1 else name for row, name in zip(rows, own, strict=True)]


def _made_of(name: str) -> str:
    """The whole name without what it returns and is called with."""
    text = clean(name).removeprefix("void ")
    whole = text[: text.index(">(") + 1] if ">(" in text else text
    return whole if len(whole) <= _LONG else f"{whole[: _LONG - 40]}…{whole[-39:]}"


def profiled(scene: Scene) -> Named:
    """Every profile of the run by name."""
    return [(name, profile) for name, profile, _ in scene.profiles]


def _cut(text: str) -> str:
    """A name as a table takes it: templates of kernels run to thousands of letters."""
    text = clean(text)
    return text if len(text) <= 90 else f"{text[:60]}…{text[-29:]}"

"""Parts that several results share: findings, output differences, signatures, next commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trt_engine.config.profiles import Profile
from trt_engine.format import format_bytes, format_ms, format_percent, join_names
from trt_engine.records.base import Finding
from trt_engine.records.parity import OutputError, Parity
from trt_engine.records.passport import Precision, Tuning
from trt_engine.reporting.document import Fact, Table
from trt_engine.tensors import Signature, format_shape


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """`warning: code: message` and its hint."""
    for item in findings:
        yield f"{item.severity}: {item.code}: {item.full_message}"
        if item.hint:
            yield f"  hint: {item.hint}"


def first_lines(lines: Sequence[str], most: int, rest: str = "") -> list[str]:
    """The first lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more{rest}"] if len(lines) > most else [])]


def name_groups(items: Iterable[tuple[str, str]], most: int) -> dict[str, str]:
    """Names by reason: `a, b and 3 more`."""
    groups: dict[str, list[str]] = {}
    for reason, name in items:
        groups.setdefault(reason, []).append(name)
    return {reason: join_names(names, most) for reason, names in groups.items()}


def shapes_text(shapes: Mapping[str, Sequence[int]], sign: str = ":") -> str:
    return ", ".join(f"{name}{sign}{format_shape(tuple(shape))}" for name, shape in shapes.items())


def requested_text(precision: Precision) -> str:
    return f" (requested: {precision.requested})" if precision.requested else ""


def layer_shares(precision: Precision, of: str = "") -> str:
    shares = precision.compute_shares.items()
    return ", ".join(f"{name} {format_percent(share.layers)}{of}" for name, share in shares)


def largest_difference(outputs: Mapping[str, OutputError]) -> str:
    """The output with the largest difference, and its location."""
    if not outputs:
        return "no output was compared"
    name, error = max(outputs.items(), key=lambda item: item[1].max_rel)
    return ", ".join(filter(None, (f"{name}: {error.summary}", error.rms_text)))


def parity_fact(parity: Parity | None) -> Fact:
    """The difference between engine and model outputs."""
    if parity is None:
        return "parity", None
    rms = " RMS" if parity.metric == "rms_rel" else ""
    worst = max(parity.outputs, key=lambda name: parity.outputs[name].max_rel, default="")
    limit = parity.limits.get(worst, parity.tolerance)
    raised = ", raised as the model itself moves with rounding" if worst in parity.limits else ""
    lines = [f"{largest_difference(parity.outputs)}, allowed {limit:.3g}{rms}{raised}"]
    if parity.source_errors:
        lines.append(f"from the model as it was given: {largest_difference(parity.source_errors)} (not judged)")
    return "parity", lines


def signature_facts(signature: Signature, profiles: Sequence[Profile] = ()) -> list[Fact]:
    """Inputs, outputs and profiles, one row each."""
    return [
        *(("input", str(spec)) for spec in signature.inputs),
        *(("output", str(spec)) for spec in signature.outputs),
        *((f"profile {index}", str(profile)) for index, profile in enumerate(profiles)),
    ]


def smoke_time(smoke: Mapping[str, float]) -> str:
    """Times of a smoke run."""
    return (
        f"loaded in {format_ms(smoke['load_ms'])}, first inference {format_ms(smoke['first_ms'])}, "
        f"second {format_ms(smoke['second_ms'])} (seed {smoke['seed']})"
    )


def sized(text: object, nbytes: int | None) -> str:
    """`model.engine (4.0 KiB)`."""
    return f"{text}" if nbytes is None else f"{text} ({format_bytes(nbytes)})"


def batch_option(model: str) -> str:
    """` --batch 1:8:64` for a model with only a dynamic batch, which `build` would fix at 1."""
    from trt_engine.graph.load import open_model

    signature = open_model(Path(model)).signature
    alone = {at for spec in signature.inputs for at in spec.dynamic} == {0}
    return " --batch 1:8:64" if alone else ""


def candidate_table(tuning: Tuning | None) -> Iterator[Table]:
    """One row per candidate of a search, the chosen one marked; nothing without a search."""
    if tuning is None:
        return
    rows = []
    for item in tuning.candidates:
        slower = "" if item.slower_pct is None else f"{item.slower_pct:+.1f} %"
        interval = "" if item.interval_pct is None else "{:+.1f} to {:+.1f} %".format(*item.interval_pct)
        times = tuple("" if value is None else format_ms(value) for value in (item.median_ms, item.p99_ms))
        built = "" if item.build_s is None else f"{item.build_s:.1f} s"
        metric = "" if item.metric is None else f"{item.metric:.4f}"
        rows.append((item.label, built, metric, *times, slower, interval, item.note or ""))
    columns = ("candidate", "built", "accuracy", "median", "p99", "slower", "95 %", "left out because")
    used = [at for at in range(len(columns)) if at == 0 or any(row[at] for row in rows)]
    left = frozenset(place for place, at in enumerate(used) if at in (0, len(columns) - 1))
    yield Table(
        f"Candidates, by {tuning.optimize_for}",
        tuple(columns[at] for at in used),
        tuple(tuple(row[at] for at in used) for row in rows),
        left,
        frozenset([tuning.chosen]),
    )

"""What a comparison is asked for: engines or records, rules, a baseline, how long; checked before anything is opened."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trt_engine.benchmark.paired import LEAST_LOADS
from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.files import explain, path_of
from trt_engine.runfiles import COMPARE

__all__ = ["LOADS", "Asked", "Rule", "asked_for", "numbered", "rules_of"]

LOADS = 12
"""How often everything is loaded anew, when nobody says how often."""
_DURATION_S = 20.0
"""For everything, when nobody says how long."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One `--fail-if`, read."""

    text: str
    metric: Literal["median", "mean", "p99", "error"]
    limit: float
    """Per cent; of `error` a difference over the scale of its channel."""
    maybe: bool = False
    """Fails when it cannot be excluded, not only when it was found."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What to compare with what, by which rules, for how long, and where it is written."""

    engines: tuple[Engine | Path, ...]
    """Engines, bare models, or records (`FILE.jsonl`, `FILE.jsonl:3`)."""
    rules: tuple[Rule, ...]
    baseline: Path | None
    """The file of the base, in place of the first engine."""
    loads: int
    writes: dict[str, Path]
    """The report at `compare`, the first engine's times at `baseline`: those that somebody wants."""
    config: BenchConfig
    runtime: RuntimeConfig

    @property
    def duration_s(self) -> float:
        """For everything together."""
        return _DURATION_S if self.config.duration_s is None else self.config.duration_s

    @property
    def names(self) -> list[str]:
        """What is compared, as typed."""
        return [str(item.path if isinstance(item, Engine) else item) for item in self.engines]

    @property
    def recorded(self) -> list[bool]:
        """By what is compared, whether it is a record."""
        return [_is_record(item) for item in self.engines]


def asked_for(
    engines: Sequence[Engine | Path | str],
    *,
    fail_if: Sequence[str],
    baseline: Path | str | None,
    save_baseline: Path | str | None,
    loads: int,
    out: Path | str | None,
    yes: bool,
    config: BenchConfig,
    runtime: RuntimeConfig,
) -> Asked:
    """The arguments as values; `UsageError` for what makes no comparison, and for what may not be written over."""
    opened = tuple(item if isinstance(item, Engine) else path_of(item, "an engine") for item in engines)
    base, kept, folder = (
        None if given is None else path_of(given, f"`{name}`")
        for name, given in (("baseline", baseline), ("save_baseline", save_baseline), ("out", out))
    )
    rules = tuple(rules_of(fail_if))
    _check(opened, rules, base, kept, loads)
    writes = _writes(None if folder is None else folder / COMPARE, kept, yes)
    return Asked(opened, rules, base, loads, writes, config, runtime)


_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_RULE = re.compile(
    rf"(?P<maybe>maybe-)?(?:(?P<metric>median|mean|p99)-)?slower:(?P<pct>{_NUMBER})%|error:(?P<error>{_NUMBER})",
    re.IGNORECASE | re.ASCII,
)


def rules_of(texts: Sequence[str]) -> list[Rule]:
    """The rules of `--fail-if`; `UsageError` for what cannot be read."""
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, Sequence):
        raise UsageError(f"`fail_if` is {texts!r}, expected a list of rules", hint='`fail_if=["slower:3%"]`')
    found = []
    for text in texts:
        match = _RULE.fullmatch(str(text).strip())
        if match is None or not math.isfinite(float(match["error"] or match["pct"])):
            raise UsageError(
                f"cannot read the rule `{text}`",
                hint="`slower:3%`, `p99-slower:5%`, `mean-slower:3%`, `maybe-slower:3%` or `error:1e-3`",
            )
        if match["error"] is not None:
            found.append(Rule(text, "error", float(match["error"])))
        else:
            metric: Any = (match["metric"] or "median").lower()
            found.append(Rule(text, metric, float(match["pct"]), match["maybe"] is not None))
    return found


def numbered(names: Sequence[str]) -> list[str]:
    """As typed; what is named twice is numbered."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found


def _is_record(item: Engine | Path) -> bool:
    return isinstance(item, Path) and re.search(r"\.jsonl(:\d+)?$", str(item)) is not None


def _check(
    engines: Sequence[Engine | Path],
    rules: Sequence[Rule],
    baseline: Path | None,
    save_baseline: Path | None,
    loads: int,
) -> None:
    alone = baseline is not None or save_baseline is not None
    if not engines or (len(engines) < 2 and not alone):
        raise UsageError(
            f"{len(engines)} engine{'' if len(engines) == 1 else 's'} to compare, expected two or more",
            hint="`trt-engine compare A B`, or `trt-engine compare A --baseline FILE`",
        )
    if len(engines) < 2 and baseline is None and rules:
        raise UsageError("one engine alone passes or fails no rule", hint="name another, or `--baseline FILE`")
    if baseline is not None and any(rule.metric == "error" for rule in rules):
        raise UsageError("a baseline file holds no outputs to compare", hint="name the engine itself for `error:`")
    if save_baseline is not None and any(map(_is_record, engines)):
        raise UsageError(
            "records make no baseline: they were measured alone", hint="name the engine to measure it in turns"
        )
    if not isinstance(loads, int):
        raise UsageError(f"`loads` is {loads!r}, expected a whole number", hint=f"`loads={LOADS}`")
    if loads < LEAST_LOADS:
        raise UsageError(
            f"`loads` is {loads}: fewer than {LEAST_LOADS} tell nothing of how much loads differ",
            hint=f"`--loads {LOADS}`",
        )


def _writes(report: Path | None, baseline: Path | None, yes: bool) -> dict[str, Path]:
    """What is written where; `UsageError` for what may not be written over."""
    places = {name: place for name, place in (("compare", report), ("baseline", baseline)) if place is not None}
    for place in places.values():
        try:
            folder, there = place.is_dir(), place.exists()
        except OSError as error:
            raise explain(error, place) from error
        if folder:
            raise UsageError(f"`{place}` is a folder, expected a file or a new name", hint="add a file name")
        if there and not yes:
            raise UsageError(f"`{place}` is there already", hint="`--yes` overwrites it")
    return places

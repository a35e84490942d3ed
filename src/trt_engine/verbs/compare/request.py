"""A comparison request: engines or records, rules, a baseline, duration; checked before anything is opened."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trt_engine.atomic_io import as_path, os_errors
from trt_engine.benchmark.speed_difference import MIN_RESTARTS
from trt_engine.config.bench import BenchConfig, CompareConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.reporting.report import check_overwrite
from trt_engine.run_folder import COMPARE

_DURATION_S = 20.0
"""Default duration of the whole comparison, in s."""


@dataclass(frozen=True, slots=True)
class GateRule:
    """One `--fail-if`, read."""

    text: str
    metric: Literal["median", "mean", "p99", "error"]
    limit: float
    """Per cent; of `error` a difference over the scale of its channel."""
    point_estimate: bool = False
    """Fails when it cannot be excluded, not only when it was found."""


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """What to compare, with which rules, duration and output files."""

    engines: tuple[Engine | Path, ...]
    """Engines, bare models, or records (`FILE.jsonl`, `FILE.jsonl:3`)."""
    rules: tuple[GateRule, ...]
    options: CompareConfig
    writes: dict[str, Path]
    """Requested output files: the report at `compare`, the first engine's times at `baseline`."""
    config: BenchConfig
    runtime: RuntimeConfig
    build: BuildConfig

    @property
    def duration_s(self) -> float:
        """For everything together."""
        return _DURATION_S if self.config.duration_s is None else self.config.duration_s

    @property
    def labels(self) -> list[str]:
        """Names of the compared items, as typed."""
        return [str(item.path if isinstance(item, Engine) else item) for item in self.engines]

    @property
    def from_records(self) -> list[bool]:
        """By what is compared, whether it is a record."""
        return [_is_record(item) for item in self.engines]


def parse_request(
    engines: Sequence[Engine | Path | str],
    options: CompareConfig,
    config: BenchConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
) -> CompareRequest:
    """The arguments as values; `UsageError` for what makes no comparison, and for what may not be written over."""
    opened = tuple(item if isinstance(item, Engine) else as_path(item, "an engine") for item in engines)
    rules = tuple(parse_gates(options.fail_if))
    _check_request(opened, rules, options)
    writes = _output_files(options)
    if options.out is not None:
        check_overwrite(options.out, overwrite=options.overwrite)
    return CompareRequest(opened, rules, options, writes, config, runtime, build)


_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_RULE = re.compile(
    rf"(?P<maybe>maybe-)?(?:(?P<metric>median|mean|p99)-)?slower:(?P<pct>{_NUMBER})%|error:(?P<error>{_NUMBER})",
    re.IGNORECASE | re.ASCII,
)


def parse_gates(texts: Sequence[str]) -> list[GateRule]:
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
            found.append(GateRule(text, "error", float(match["error"])))
        else:
            metric: Any = (match["metric"] or "median").lower()
            found.append(GateRule(text, metric, float(match["pct"]), match["maybe"] is not None))
    return found


def unique_labels(names: Sequence[str]) -> list[str]:
    """As typed; what is named twice is numbered."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found


def _is_record(item: Engine | Path) -> bool:
    return isinstance(item, Path) and re.search(r"\.jsonl(:\d+)?$", str(item)) is not None


def _check_request(engines: Sequence[Engine | Path], rules: Sequence[GateRule], options: CompareConfig) -> None:
    baseline, save_baseline = options.baseline, options.save_baseline
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
            "records make no baseline: they were measured alone", hint="name the engine to measure it interleaved"
        )
    if options.restarts < MIN_RESTARTS:
        raise UsageError(
            f"`restarts` is {options.restarts}: fewer than {MIN_RESTARTS} do not show how much restarts differ",
            hint=f"`--restarts {CompareConfig().restarts}`",
        )


def _output_files(options: CompareConfig) -> dict[str, Path]:
    """Output files; `UsageError` for one that may not be overwritten."""
    named = {"compare": options.out and options.out / COMPARE, "baseline": options.save_baseline}
    places = {name: place for name, place in named.items() if place is not None}
    for place in places.values():
        with os_errors(place):
            folder, there = place.is_dir(), place.exists()
        if folder:
            raise UsageError(f"`{place}` is a folder, expected a file or a new name", hint="add a file name")
        if there and not options.overwrite:
            raise UsageError(f"`{place}` is there already", hint="`--overwrite` overwrites it")
    return places

"""Works out anew what follows from the facts of recorded profiles: kernels' short names, categories, bottleneck, reports.

For a change of the rules: what was measured stays as it is, and needs no GPU a second time.

    python tools/judge_again.py benchmarks/results/profile-vit-b64-h200 benchmarks/results/three-way-h200
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.profiling.bottleneck import find_bottleneck
from trt_engine.profiling.kernel_categories import category_shares, kernel_category, short_name
from trt_engine.profiling.roofline import ProfileFacts
from trt_engine.records.profile import ProfileReport
from trt_engine.reporting.report import report


def judged(found: ProfileReport, *, typed: str | None = None) -> ProfileReport:
    """The same profile by the rules of today. `typed` is the model that was profiled, where none is its engine was."""
    rows = tuple(
        replace(row, category=kernel_category(row.name), short_name=short_name(row.name)) for row in found.kernels
    )
    named = shlex.split(found.bottleneck.command or "")[2:3]
    flops, nbytes = (
        int(found.runtime_info[name]) if name in found.runtime_info else None for name in ("flops", "nbytes")
    )
    facts = ProfileFacts(
        split=found.time_breakdown, layers=found.layers, kernels=rows, device_peaks=found.peaks, batch=found.batch,
        device=found.device, precision=found.precision, engine=typed or found.engine,
        model=next((path for path in [typed, *named] if path and path != found.engine), "MODEL.onnx"),
        flops=flops, nbytes=nbytes, max_batch=None if typed else found.batch,
    )  # fmt: skip
    shares = category_shares(rows, found.inferences) if rows else found.categories
    return replace(found, kernels=rows, categories=shares, bottleneck=find_bottleneck(facts))


def judged_in(document: dict[str, Any]) -> bool:
    """Puts the profile of a `profile.json`, or of a cell, in its place; False for a document without one."""
    cell = document.get("schema") != "trt-engine/profile"
    place = document.get("profile") if cell else document
    if not place:
        return False
    typed = None if cell else shlex.split(document["command"])[2]
    made = msgspec.json.decode(msgspec.json.encode(judged(msgspec.convert(place, ProfileReport), typed=typed)))
    place.update({name: made[name] for name in ("kernels", "categories", "bottleneck")})
    return True


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        for file in (folder / "profile.json", *sorted((folder / "cells").glob("*.json"))):
            if not file.is_file():
                continue
            raw = file.read_bytes()
            document = msgspec.json.decode(raw)
            if judged_in(document):
                again = msgspec.json.encode(document)
                lines = raw.count(b"\n") > 1
                file.write_bytes((msgspec.json.format(again, indent=2) if lines else again) + b"\n")
        text = folder / ("REPORT.txt" if (folder / "run.json").is_file() else "report.txt")
        for page, format_ in ((text, "text"), (folder / "report.md", "md"), (folder / "report.html", "html")):
            page.write_text(report(folder, format_), encoding="utf-8")  # type: ignore[arg-type]
        sys.stdout.write(f"judged again: {folder}\n")


if __name__ == "__main__":
    main()

"""Write docs/schemas/: the JSON Schema of every document a verb prints with `--json`, from the record types.

python tools/schemas.py            write them
python tools/schemas.py --check    exit 1 if one is not up to date
"""

from __future__ import annotations

import argparse
import inspect as inspect_source
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_engine.records import (
    batch,
    bench,
    build,
    bundle,
    compare,
    convert,
    deploy,
    diagnosis,
    evaluate,
    infer,
    inspect,
    lint,
    loadtest,
    migrate,
    precision,
    profile,
    search,
    serve,
    size,
    sweep,
    upgrade,
)
from trt_engine.reporting.pack import PackReport
from trt_engine.sweep.plan_file import plan_schema

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
PLAN = FOLDER.parent / "run.schema.json"
"""Of the file that `run` reads."""
DRAFT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class ReportDocument:
    """What `report` says: the run it read, its main figures, and the file it wrote."""

    run: str
    summary: dict[str, Any]
    """The run as data, samples summarised."""
    artifacts: dict[str, str]
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class PackDocument(PackReport):
    """What `pack` says: the archive, what is in it and what is not. Of a dry run: what would be."""

    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineDocument(inspect.EngineReport):
    """What `inspect` says of an engine or of a bare plan; here `command` is what to type next, where there is something."""

    verdict: Literal["loads", "penalty", "unknown", "rebuild", "refuse"]
    """The `status` of `compatibility`."""
    reason: str
    invocation: str
    """What was typed."""


@dataclass(frozen=True, kw_only=True)
class LogDocument(bench.LogReport):
    """What `bench --parse-log` finds in a log; here `command` is trtexec's, as its banner has it."""

    invocation: str
    """What was typed."""


@dataclass(frozen=True)
class Completion:
    """What `completion` says: the script to evaluate and the line that does so in every new shell."""

    shell: Literal["bash", "zsh", "fish"]
    script: str
    install: str
    """The line that enables it in every new shell."""


@dataclass(frozen=True)
class Example:
    """What `example` has written, and what to type next."""

    model: str
    image: str
    next_command: str


@dataclass(frozen=True)
class DocsPage:
    """One page: its name for `trt-engine docs NAME`, its first heading, its file; null for a generated page."""

    name: str
    """For `trt-engine docs NAME`."""
    title: str
    path: str | None


@dataclass(frozen=True)
class Docs:
    """The pages that `docs` lists, or the one it prints."""

    pages: tuple[DocsPage, ...]
    text: str | None
    """Of the one page that was named."""


@dataclass(frozen=True)
class ErrorDetails:
    """An error as a person reads it."""

    type: str
    message: str
    hint: str | None
    exit_code: int


@dataclass(frozen=True)
class Error:
    """What any verb says when it cannot do what was asked."""

    error: ErrorDetails
    verdict: Literal["refuse"] | None = None
    """Of `inspect`, for an engine by name that is none by content; with its `reason`, and `command` to make one."""
    reason: str | None = None
    invocation: str | None = None
    """What was typed; None but for `inspect`."""
    tensorrt_version: str | None = None
    """Of a plan whose passport alone is damaged."""


# document -> its types; several where a verb answers differently for different files
DOCUMENTS: dict[str, tuple[type, ...]] = {
    "size": (size.SizeReport, size.SizePlan),
    "inspect": (inspect.ModelReport, EngineDocument, inspect.RunReport, bundle.BundleState),
    "lint": (lint.LintReport,),
    "migrate": (migrate.MigrateReport,),
    "convert": (convert.ConvertReport,),
    "build": (build.BuildReport, build.BuildEachReport),
    "validate": (build.ValidateReport,),
    "bundle": (bundle.BundleReport,),
    "cast": (precision.CastReport,),
    "quantize": (precision.QuantizeReport,),
    "search": (search.SearchReport, search.SearchPlan),
    "bench": (bench.BenchReport, bench.BenchPlan),
    "bench-log": (LogDocument,),
    "profile": (profile.ProfileReport, profile.ProfilePlan),
    "loadtest": (loadtest.LoadtestReport, loadtest.LoadtestPlan),
    "compare": (compare.CompareReport, compare.ComparePlan),
    "upgrade-check": (upgrade.UpgradeReport,),
    "diff": (compare.EngineDiff,),
    "infer": (infer.InferReport, infer.InferPlan),
    "evaluate": (evaluate.EvaluateReport, evaluate.EvaluatePlan),
    "serve": (serve.ServeReport,),
    "batch": (batch.BatchReport, batch.BatchPlan),
    "deploy": (deploy.DeployReport,),
    "run": (sweep.RunSummary, sweep.RunPlan),
    "run-manifest": (sweep.RunManifest,),
    "report": (ReportDocument,),
    "pack": (PackDocument,),
    "doctor": (diagnosis.DoctorReport,),
    "cache": (build.CacheReport,),
    "ranges": (precision.RangesReport, precision.RangesPlan),
    "example": (Example,),
    "docs": (Docs,),
    "completion": (Completion,),
    "error": (Error,),
}


def common(name: str) -> dict[str, Any]:
    """The keys every document has."""
    text = {"type": "string"}
    return {
        "schema": {"const": f"trt-engine/{name}"},
        "schema_version": {"const": 1},
        "tool": {"type": "object", "properties": {"name": {"const": "trt-engine"}, "version": text},
                 "required": ["name", "version"]},
        "command": {**text, "description": "The command line, to be repeated by paste."},
        "warnings": {"type": "array", "items": text},
    }  # fmt: skip


def of_any_release(node: Any) -> Any:
    """`node` as every release of msgspec writes it: 0.23 dedents a docstring and gives the default of an empty mapping."""
    if isinstance(node, list):
        return [of_any_release(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: of_any_release(value) for key, value in node.items() if (key, value) != ("default", {})}
    if isinstance(described := out.get("description"), str):
        out["description"] = inspect_source.cleandoc(described)
    return out


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of one document."""
    types = DOCUMENTS[name]
    refs, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    definitions = of_any_release(definitions)
    keys = common(name)
    if LogDocument in types:  # of a log without its banner there is none
        keys["command"] = {
            "type": ["string", "null"],
            "description": "trtexec's command line; of our logs, what was typed.",
        }
    own = refs[0] if len(types) == 1 else {"anyOf": list(refs)}
    return {
        "$schema": DRAFT,
        "title": f"trt-engine/{name}",
        "description": "; or: ".join((item.__doc__ or "").strip().splitlines()[0].rstrip(".") for item in types) + ".",
        "type": "object",
        "properties": keys,
        "required": list(keys),
        **own,
        "$defs": dict(sorted(definitions.items())),
    }


def text(name: str) -> str:
    return json.dumps(schema(name), indent=2) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    stale = [path.name for path in FOLDER.glob("*.json") if path.stem not in DOCUMENTS]
    wanted = {FOLDER / f"{name}.json": text(name) for name in DOCUMENTS}
    wanted[PLAN] = json.dumps(plan_schema(), indent=2) + "\n"
    for path, made in wanted.items():
        if path.exists() and path.read_text() == made:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(made)
    if stale:
        sys.stderr.write(f"{'not up to date' if check else 'written'}: {', '.join(stale)}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Write docs/schemas/, the JSON Schema of every document a verb prints with `--json`, from the record types, and
docs/run.schema.json, that of a plan.

python tools/schemas.py            write them
python tools/schemas.py --check    exit 1 if one is not up to date
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect as inspect_source
import json
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_engine.config.settings import settings
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
from trt_engine.records.dry_run import DryRun
from trt_engine.reporting.pack import PackReport
from trt_engine.verbs.run.plan_file import PlanFile
from trt_engine.verbs.run.yaml_schema import setting_aliases, union_members

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
    "size": (size.SizeReport, DryRun),
    "inspect": (inspect.ModelReport, EngineDocument, inspect.RunReport, bundle.BundleState),
    "lint": (lint.LintReport,),
    "migrate": (migrate.MigrateReport,),
    "convert": (convert.ConvertReport,),
    "build": (build.BuildReport, build.BuildEachReport),
    "validate": (build.ValidateReport,),
    "bundle": (bundle.BundleReport,),
    "cast": (precision.CastReport,),
    "quantize": (precision.QuantizeReport,),
    "search": (search.SearchReport, DryRun),
    "bench": (bench.BenchReport, DryRun),
    "bench-log": (LogDocument,),
    "profile": (profile.ProfileReport, DryRun),
    "loadtest": (loadtest.LoadtestReport, DryRun),
    "compare": (compare.CompareReport, DryRun),
    "upgrade-check": (upgrade.UpgradeReport,),
    "diff": (compare.EngineDiff,),
    "infer": (infer.InferReport, DryRun),
    "evaluate": (evaluate.EvaluateReport, DryRun),
    "serve": (serve.ServeReport,),
    "batch": (batch.BatchReport, DryRun),
    "deploy": (deploy.DeployReport,),
    "run": (sweep.RunSummary, sweep.RunPlan),
    "run-manifest": (sweep.RunManifest,),
    "report": (ReportDocument,),
    "pack": (PackDocument,),
    "doctor": (diagnosis.DoctorReport,),
    "cache": (build.CacheReport,),
    "ranges": (precision.RangesReport, DryRun),
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


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of a plan."""
    definitions: dict[str, Any] = {}
    whole = _object_schema(PlanFile, definitions)
    return {
        "$schema": DRAFT,
        "title": "trt-engine run plan",
        "description": (PlanFile.__doc__ or "").strip().splitlines()[0],
        **whole,
        "$defs": dict(sorted(definitions.items())),
    }


def _object_schema(form: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, properties, required = typing.get_type_hints(form), {}, []
    for item in dataclasses.fields(form):
        meta = item.metadata
        if meta.get("config") is not None:
            made: dict[str, Any] = {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    name: {"description": one.help} | ({"enum": [*one.choices]} if one.choices else {})
                    for one in settings(meta["config"])
                    if one.name not in meta["leave_out"]
                    for name in setting_aliases(one)
                },
            }
        else:
            made = _type_schema(hints[item.name], definitions, meta)
        properties[item.name] = {**made, "description": meta["help"]}
        for also in meta.get("also", ()):
            properties[also] = {**made, "description": f"Alias of `{item.name}`."}
        if item.default is item.default_factory is dataclasses.MISSING:
            names = [item.name, *meta.get("also", ())]
            required.append(
                {"required": names} if len(names) == 1 else {"oneOf": [{"required": [name]} for name in names]}
            )
    stated = {"type": "object", "additionalProperties": False, "properties": properties}
    return stated | ({"allOf": required} if required else {})


def _type_schema(kind: Any, definitions: dict[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    members = union_members(kind)
    if len(members) > 1:
        return {"anyOf": [_type_schema(one, definitions, limits) for one in members]}
    origin = typing.get_origin(kind)
    if origin is Literal:
        return {"enum": list(typing.get_args(kind))}
    if origin is tuple:
        inner = union_members(typing.get_args(kind)[0])
        many = {"type": "array", "minItems": 1, "items": _type_schema(typing.get_args(kind)[0], definitions, limits)}
        alone = [_type_schema(one, definitions, limits) for one in inner if not dataclasses.is_dataclass(one)]
        return {"anyOf": [many, *alone]}  # a list of one may be written as its item
    if origin is dict:
        inner = typing.get_args(kind)[1]  # a string may look like a number: `optimization_level: 4`
        values = {"type": ["string", "number", "boolean"]} if inner is str else _type_schema(inner, definitions, {})
        return {"type": "object", "additionalProperties": values}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        name = kind.__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = {
                "description": (kind.__doc__ or "").strip().splitlines()[0],
                **_object_schema(kind, definitions),
            }
        return {"$ref": f"#/$defs/{name}"}
    made = {"type": {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}[kind]}
    if kind in (int, float):
        made |= {"minimum": limits["least"]} if limits.get("least") is not None else {}
        made |= {"maximum": limits["most"]} if limits.get("most") is not None else {}
    return made


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

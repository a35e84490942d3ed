"""MkDocs hooks of `make docs`: generated reference pages, tables of measurements, and a site without external addresses.

The pages of `reference/` exist in the site alone (some of them in `trt-engine docs` too): they are written from the
settings classes, the tables of trtexec and inductor, docs/schemas and `trt_engine.errors` whenever the site is built.
A page of `TABLES` has a line `<!-- tables -->`, which becomes the tables of its program in benchmarks/ over the
committed records.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
sys.path.append(str(ROOT / "tools"))

import packages  # noqa: E402

from trt_engine import errors  # noqa: E402
from trt_engine.verbs.docs.generated_pages import inductor_page, settings_page, trtexec_page  # noqa: E402

_WORKER = "assets/iframe-worker.js"
_PARSE_QUERY = r"""split(/"([^"]+)"/g)"""
_PLAIN_QUERY = (
    r"""replace(/(^|\s)-+(?=\S)|:/g,"$1 ")"""
    r""".replace(/\b(a|an|and|are|as|be|by|can|do|does|for|from|how|i|in|into|is|it|many|my|not|of|on|one|or|several|the|to|was|what|where|which|why|with|without|your)\b/gi,"")."""
)
"""Search for `Unknown option: --fp16`: a dash would exclude a word, a colon name a field; `as` would find `asyncio`."""
_SEARCHED = {
    "alternatives.md": "tokenizer llm text",
    "backends.md": "default",
    "batch.md": "parquet files",
    "bottleneck.md": "bound memory",
    "build.md": "dynamic kv",
    "bundle.md": "encoder decoder whisper speech asr",
    "cache.md": "delete remove old disk",
    "cameras.md": "cascade fps frames gpu late",
    "compare.md": "compare speed faster",
    "convert.md": "face hugging huggingface",
    "deploy.md": "bbox config.pbtxt nms",
    "deployment.md": "compatible container deserialize docker version offline internet",
    "devices.md": "zero",
    "diff.md": "regression ci gate",
    "errors.md": "exit ctrl json schema",
    "extending.md": "custom",
    "onnxruntime.md": "external onnxruntime",
    "pack.md": "share colleague send",
    "precision.md": "nan",
    "profile.md": "nsight nsys",
    "protocols.md": "warm warmup clocks throttling noisy noise unstable",
    "python.md": "api asyncio await ctrl fastapi fork gunicorn notebook python",
    "quantize.md": "accuracy dropped calibration",
    "ranges.md": "nan overflow",
    "runtime.md": "gpu kv multi zero gpus graphs",
    "search.md": "accuracy dropped",
    "serve.md": "authentication certificate tls https ssl dynamic fastapi shared token "
    "health kubernetes metrics probe prometheus retry server shutdown",
    "ship.md": "production",
    "tensorrt.md": "compatible licence license refit plugin timing install weights reuse",
    "troubleshooting.md": "faq logging onnxruntime amd arm cuda jetson oom rocm windows",
    "trtexec.md": "saveengine trtexec",
    "upgrade-check.md": "regression ci gate",
    "vision.md": "decoder decoders detr nms preprocessing segmentation masks keypoints",
}
"""Words that people search a page by and that its title lacks. The search ranks them over titles."""
_EXTERNAL = re.compile(r"https?://(?!www\.w3\.org/)[^\s\"'`<>)\\]+")


def _cell(text: object) -> str:
    """Text of a table's cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _code(text: object) -> str:
    return f"`{str(text).replace('|', chr(92) + '|')}`"


_EACH_DOCUMENT = {
    "schema": "Name of the document, as `trt-engine/bench`.",
    "schema_version": "Version of its fields.",
    "tool": "`name` and `version` of trt-engine.",
    "command": "The command line, to be repeated by paste.",
    "warnings": "Warnings, as printed.",
}
"""Fields of all documents, which the page lists once."""
_COMMON = {
    "artifacts": "Written files by role.",
    "backend": "Backend by name.",
    "baseline": "What the others are compared with.",
    "batch": "Rows of one inference.",
    "budget": "Largest allowed drop of the metric: 0.01 is one point.",
    "complete": "False for a partial report, after an interruption or an error.",
    "compute_capability": "Compute capability of the GPU: `8.9`.",
    "compute_ms": "Time of the computation.",
    "connections": "Outputs that feed inputs, declared and inferred.",
    "contexts": "Batches at once.",
    "d2h_ms": "Copies from the device.",
    "dataset": "Path of the dataset.",
    "dataset_kind": "`coco`: annotations; `folders`: one for each class; `arrays`: an .npz; `pictures`: no labels.",
    "device": "`cpu`, or `cuda:N`.",
    "digest": "SHA-256 of the contents.",
    "dry_run": "True if nothing was written.",
    "duration_s": "Length of the measurement.",
    "engine": "Path or name of the engine.",
    "engine_bytes": "Size of the engine with its side files.",
    "enqueue_ms": "Host time to enqueue an inference.",
    "environment": "Machine, libraries and drivers.",
    "findings": "Problems found, with severity and hint.",
    "fix": "Command or step that solves the problem.",
    "folder": "Folder of the results.",
    "fps": "Frames per second of one source.",
    "gpu": "Name of the GPU; None without one.",
    "h2d_ms": "Copies to the device.",
    "hint": "What to do next.",
    "identity": "Builder: library, version, providers, instruction sets.",
    "images": "Number of images.",
    "images_per_s": "Queries per second times the batch.",
    "inputs": "Where the inputs came from: `seeded random, seed 0`, a file's name.",
    "instability": "Why the measurement is not stable.",
    "interface": "`engine`: in this process.",
    "ir_version": "ONNX's IR version.",
    "key": "The engine's key in the store.",
    "latency_ms": "Time of one query, copies included.",
    "macs": "Multiply-adds of one inference.",
    "max": "Largest value.",
    "mean": "Mean.",
    "mean_ms": "Mean.",
    "median": "Median.",
    "median_ms": "Median.",
    "message": "What was found, in one sentence.",
    "metric": "AP or top1.",
    "min": "Smallest value.",
    "model": "Path or name of the model.",
    "nbytes": "Size in bytes.",
    "nbytes_before": "Size of the source model, side files included.",
    "node": "Its name, or its first output where it has none.",
    "nodes": "Number of nodes; of a whole model those of bodies and local functions too.",
    "not_finite": "Rows of the outputs that held NaN or infinities and were dropped.",
    "op": "ONNX operator.",
    "operator": "ONNX operator.",
    "operators": "Number of nodes by operator.",
    "opset": "Opset of the standard domain.",
    "out": "Written file, or output folder.",
    "p90": "90th percentile.",
    "p95": "95th percentile.",
    "p99": "99th percentile.",
    "p99_ms": "99th percentile.",
    "parity": "Comparison with plain ONNX Runtime; None where there was none.",
    "passport": "What the build recorded; None for a bare plan.",
    "path": "Path of the file or folder.",
    "percentiles": "Requested percentiles; others follow from the samples.",
    "precision": "Precision: requested, or found in the engine.",
    "predictions": "Number of scored detections or classified images.",
    "preflight": "Checks before the run.",
    "profiles": "Min, opt and max shapes.",
    "protocol": "Rules of the measurement.",
    "qps": "Queries (not images) per second.",
    "queries": "Number of measured queries, warm-up not counted.",
    "reason": "Why, in one sentence.",
    "retries": "Preparation of the graph, then the tries after a failed build with their results.",
    "runtime_info": "What ran: backend, device, providers, threads.",
    "samples_ms": "Every sample.",
    "seconds": "Duration of the command or step.",
    "shapes": "Shapes of the inputs, by name.",
    "signature": "Inputs and outputs: names, dtypes, shapes.",
    "smoke_run": "Inputs, outputs and times of a run on seeded inputs; with `--run`.",
    "stable": "True if the figures can be trusted.",
    "started": "Start time, ISO 8601 in UTC.",
    "steps": "Steps of the run, in order.",
    "subset": "Number of images for the cost of each group.",
    "to": "Requested format: `fp16`, `int8`.",
    "type": "Name of the error class.",
    "wall_s": "Duration of the whole run.",
    "warmup_queries": "Queries before the measurement.",
    "warmup_s": "Warm-up before the measurement.",
    "warnings": "Warnings, as printed.",
    "writes": "Files that a run would write.",
}
"""Meaning of fields without a note of their own."""


def _field_notes() -> dict[str, dict[str, str]]:
    """Field docstrings of the records, by class and field, with those of its bases."""
    notes: dict[str, dict[str, str]] = {}
    bases: dict[str, list[str]] = {}
    folder = ROOT / "src" / "trt_engine"
    others = ("device/info.py", "environment.py", "reporting/pack.py", "run_folder.py", "tensors.py")
    paths = [*folder.glob("records/*.py"), *folder.glob("config/*.py"), *(folder / name for name in others)]
    for path in [*paths, ROOT / "tools" / "schemas.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            for item, after in zip(node.body, node.body[1:], strict=False):
                is_note = (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                )
                if is_note and isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    notes.setdefault(node.name, {})[item.target.id] = str(after.value.value)

    def inherited(name: str) -> dict[str, str]:
        below: dict[str, str] = {}
        for base in bases.get(name, []):
            below |= inherited(base)
        return below | notes.get(name, {})

    return {name: inherited(name) for name in bases}


def _type(schema: dict[str, Any]) -> str:
    """The type of a schema in one phrase."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(item) for item in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"array of {_type(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(kind)


def _fields(schema: dict[str, Any], notes: dict[str, str]) -> Iterator[str]:
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    required = schema.get("required", [])
    for name, item in schema.get("properties", {}).items():
        note = item.get("description") or notes.get(name) or _COMMON.get(name, "")
        yield f"| {_code(name)} | {_cell(_type(item))}{'' if name in required else ', optional'} | {_cell(note)} |"
    yield ""


def records_page() -> str:
    """The fields of every JSON document, from docs/schemas."""
    notes = _field_notes()
    lines = [
        "# Records",
        "",
        "Every verb prints one JSON document with `--json` and writes the same fields to its run folder; Python",
        "returns an object with these attributes. Units are in the names: `_ms`, `_s`, `_mib`. Shared types are at the end.",
        "Every document also has:",
        "",
        "| field | meaning |",
        "|---|---|",
        *(f"| {_code(name)} | {_cell(meaning)} |" for name, meaning in _EACH_DOCUMENT.items()),
        "",
    ]
    shared: dict[str, dict[str, Any]] = {}
    for path in sorted((ROOT / "docs" / "schemas").glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        types = schema.get("$defs", {})
        shared |= types
        ends = [_type(item) for item in schema.get("anyOf", []) if "$ref" in item] or (
            [_type(schema)] if "$ref" in schema else []
        )
        lines += [
            f"## {schema.get('title', path.stem).removeprefix('trt-engine/')}",
            "",
            _cell(schema.get("description", "")),
            "",
        ]
        if ends:
            named = ", or ".join(f"[{name}](#type-{name.lower()})" for name in ends)
            lines += [f"The fields of {named}.", ""]
        own = {name: item for name, item in schema.get("properties", {}).items() if name not in _EACH_DOCUMENT}
        if own:
            lines += _fields({"properties": own, "required": schema.get("required", [])}, {})
    for name, item in sorted(shared.items()):
        lines += [f"### {name} {{#type-{name.lower()}}}", "", _cell(item.get("description", "")), ""]
        lines += _fields(item, notes.get(name, {})) if item.get("properties") else [_cell(_type(item)), ""]
    return "\n".join(lines)


def error_classes() -> list[type[errors.TrtEngineError]]:
    """The error classes, the base first."""
    found = [
        item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, errors.TrtEngineError)
    ]
    return [item for item in found if item.__module__ == errors.__name__ and not item.__name__.startswith("_")]


def errors_page() -> str:
    """The error classes with exit code and HTTP status."""
    lines = [
        "# Error classes",
        "",
        "Every error has `message`, `hint`, `exit_code` and `http_status`, and survives pickling. Examples, signals",
        "and the terminal: [exit codes and messages](../errors.md).",
        "",
        "| class | base | exit code | HTTP status | meaning |",
        "|---|---|---|---|---|",
    ]
    for item in error_classes():
        base = item.__bases__[0].__name__
        meaning = _cell((item.__doc__ or "").split("\n\n")[0])
        lines.append(f"| {_code(item.__name__)} | {_code(base)} | {item.exit_code} | {item.http_status} | {meaning} |")
    return "\n".join(lines) + "\n"


def notebook_page(name: str) -> str:
    """A notebook of examples/ with its outputs; the search leaves the outputs out."""
    parts = []
    for cell in json.loads((ROOT / "examples" / "notebooks" / name).read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for data in (output["data"] for output in cell.get("outputs", ()) if "data" in output):
            text = html.escape("".join(data["text/plain"]))
            shown = "".join(data["text/html"]) if "text/html" in data else f'<pre class="result">{text}</pre>'
            shown = shown.replace("<table>", '<table class="result">')  # the theme frames a table without a class
            parts.append("<div data-search-exclude>" + re.sub(r"\n\s*", "\n", shown) + "</div>")
    return "\n\n".join(parts) + "\n"


PAGES = {
    "notebooks/measure.md": lambda: notebook_page("measure.ipynb"),
    "notebooks/pytorch.md": lambda: notebook_page("pytorch.ipynb"),
    "reference/settings.md": settings_page,
    "reference/trtexec.md": trtexec_page,
    "reference/inductor.md": inductor_page,
    "reference/records.md": records_page,
    "reference/errors.md": errors_page,
    "reference/packages.md": packages.page,
}

TABLES = {
    "export-table.md": "export_table.py",
    "gpu-suite.md": "gpu/suite_table.py",
    "gpu-zoo.md": "gpu/zoo.py",
    "precision-table.md": "precision_table.py",
    "world.md": "world.py",
}
"""Page of measurements -> the program in benchmarks/ whose `tables()` renders them."""
TABLES_HERE = "<!-- tables -->"


def measured_tables(page: str) -> str:
    """The tables of a page of measurements, from the committed records."""
    program = ROOT / "benchmarks" / TABLES[page]
    if str(program.parent) not in sys.path:
        sys.path.append(str(program.parent))
    made: str = importlib.import_module(program.stem).tables()
    return made


def on_files(files: Any, config: Any) -> Any:
    """MkDocs: the generated pages join the files of docs/."""
    from mkdocs.structure.files import File

    for name, write in PAGES.items():
        files.append(File.generated(config, name, content=write()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs: links to files outside docs/ become text; lists and code get their blank lines.

    The search prefers the pages of questions and verbs, and lists the reference and notebooks last.
    """
    if page.file.src_uri in TABLES:
        markdown = markdown.replace(TABLES_HERE, measured_tables(page.file.src_uri))
    above = page.parent.title if page.parent is not None else ""
    boost = 0.5 if page.file.src_uri in PAGES else {"How to": 2, "Verbs": 2, "Reference": 0.5}.get(above, 1)
    page.meta["search"] = {"boost": boost}
    page.meta["tags"] = _SEARCHED.get(page.file.src_uri, "").split()
    markdown = (
        re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!\w+\.md)[^)]*\)", r"\1", markdown)
        if "/" not in page.file.src_uri
        else markdown
    )
    return separate_blocks(markdown)


def separate_blocks(markdown: str) -> str:
    """Python-Markdown needs a blank line before a list and around a block of code, and four spaces before what belongs to
    an item of a list, which the terminal's readers do not."""
    lines: list[str] = []
    fence, ended, indent, loose = "", False, 0, False
    item = re.compile(r"\s*(?:[-*]|\d+\.) +")
    for line in markdown.split("\n"):
        mark = re.match(r"\s*(`{3,})", line)
        before = lines[-1] if lines else ""
        starts_list = item.match(line) and not item.match(before) and (loose or not before.startswith("  "))
        starts_code = mark is not None and line.startswith("`")
        if before.strip() and ((not fence and (starts_list or starts_code)) or (ended and line.strip())):
            lines.append("")
        ended = bool(fence) and line.strip() == fence and line.startswith("`")
        if not fence and line[:1].strip():  # an item's text begins at `indent`
            found = item.match(line)
            indent, loose = (found.end(), False) if found else (0, False)
        elif indent and line.startswith(" " * indent):
            line = " " * max(4 - indent, 0) + line
        loose = loose or (not line.strip() and indent > 0)
        if mark and not fence:
            fence, line = mark[1], re.sub(r"(`\w+) .*", r"\1", line)  # `python gpu` is Python
        elif line.strip() == fence:
            fence = ""
        lines.append(line)
    return "\n".join(lines)


_DOCS_COMMAND = re.compile(r"<code>trt-engine docs ([a-z][\w/-]*)</code>")


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """MkDocs: a flag such as `--to` and `5 %` in a table are not broken; `trt-engine docs NAME` is a link."""

    def link(found: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{found[1]}.md")
        return found[0] if target is None else f'<a href="{target.url_relative_to(page.file)}">{found[0]}</a>'

    html = _DOCS_COMMAND.sub(link, html)
    flag = re.compile(r"(?<![\w-])(?:--?[a-zA-Z][\w-]*|trt-engine\b)")
    html = re.sub(r"(?<=\d) (?=%[^<]*</td>)", "&nbsp;", html)
    return re.sub(
        r"(?<=<code>)[^<]+(?=</code>)", lambda code: flag.sub(r'<span class="flag">\g<0></span>', code[0]), html
    )


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """MkDocs: the theme's search worker for pages opened from disk comes from the site itself."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "../" * page.url.count("/") + _WORKER)


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """MkDocs: the same for the page of an unknown address."""
    return output.replace("https://unpkg.com/iframe-worker/shim", _WORKER)


def on_post_build(config: Any, **_: Any) -> None:
    """MkDocs: addresses that the theme's scripts hold for features not in use here are removed."""
    for path in Path(config["site_dir"]).rglob("*"):
        if path.suffix in (".js", ".css"):
            text = path.read_text(encoding="utf-8")
            made = _EXTERNAL.sub("about:blank", text)
            if path.parent.name == "workers":
                assert _PARSE_QUERY in made, "the theme reads queries in another way: see `_PARSE_QUERY`"
                made = made.replace(_PARSE_QUERY, _PLAIN_QUERY + _PARSE_QUERY)
            if made != text and path.name != "search_index.js":
                path.write_text(made, encoding="utf-8")
        elif path.suffix == ".map" or path.name in ("sitemap.xml.gz", "sitemap.xml"):
            path.unlink()

"""`te.migrate`: what the target release of TensorRT removed, renamed or gave another meaning, in files and folders."""

from __future__ import annotations

import ast
import bisect
import contextlib
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import quote

from trt_engine.atomic_io import all_or_nothing, as_list, as_path, open_regular, os_error, write_atomic, write_json
from trt_engine.config.settings import replace_values
from trt_engine.environment import distribution_version
from trt_engine.errors import SetupError, UsageError
from trt_engine.format import library_reason
from trt_engine.public_function import public_function
from trt_engine.records.migrate import MigrateReport, MigrationFinding, SkippedFile
from trt_engine.tensors import suggest
from trt_engine.verbs.migrate import cpp_source, python_values, requirements, shell
from trt_engine.verbs.migrate.config import MigrateConfig
from trt_engine.verbs.migrate.python_source import scan_python
from trt_engine.verbs.migrate.rules import RuleSet, all_rules, parse_release, rules_between
from trt_engine.verbs.migrate.source import (
    MAX_BYTES,
    Edit,
    Hit,
    Kind,
    Source,
    apply_edits,
    find_files,
    line_before,
    model_values,
    read_source,
)

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import MigrateSettings


_CONCERNS = (
    "trt", "tensorrt", "polygraphy", "nvinfer", "nvonnxparser", "nvparsers", "nvcaffe", "nvuff", "network-mode", "nvcr.io",
    "onnx-file", "uff-file", "ultralytics", "format=", "fp16_mode", "enable_fp16", "image_encoder_engine", "--include",
)  # fmt: skip
"""One of these is in every file that a rule concerns, in whatever case, or a name of the C++ API."""
_INSTALL = "`pip install 'trt-engine[migrate]'`"
_MAX_PASSES = 4
_PARSED = ("python", "notebook", "cpp")
_MAX_LINE, _MAX_BLANKS = 20_000, 500


@public_function
@all_or_nothing()
def migrate(
    paths: Sequence[Path | str] | Path | str,
    *,
    config: MigrateConfig | None = None,
    **settings: Unpack[MigrateSettings],
) -> MigrateReport:
    """What in files and folders TensorRT's target release does not take, or takes in another meaning.

    Python, notebooks, C++ and CUDA (extra `migrate`), command lines of trtexec and polygraphy in shell, Dockerfiles,
    Makefiles and YAML, DeepStream and Triton configurations, requirements, images and CMake. `settings` are those of
    `MigrateConfig`; with `fix` the mechanical changes are written to the files, with `diff` only shown. Raises
    `UsageError` for a path, release or rule that does not exist, `SetupError` where there is C++ alone and no parser.
    """
    config = replace_values(config or MigrateConfig(), settings)
    if config.fix and config.diff:
        raise UsageError(
            "`--diff` writes nothing, and `--fix` does", hint="leave one out: `--fix` shows the diff as well"
        )
    places = [as_path(path, "`paths`") for path in as_list(paths, "`paths`")]
    known = {rule.id for rule in all_rules()}
    for name in set(config.rules) - known:
        raise UsageError(f"unknown rule `{name}`", hint=suggest(name, sorted(known)))
    if config.sarif is not None and config.sarif.is_file() and not _is_object(config.sarif):
        raise UsageError(f"`{config.sarif}` is not a SARIF log", hint="name another file for `--sarif`")
    scan = _Scan(rules_between(parse_release(config.from_release), parse_release(config.to_release)), config)
    for path, kind in find_files(places, config.exclude):
        scan.file(path, kind)
    if scan.without_parser and not scan.checked:
        raise SetupError(f"{len(scan.without_parser)} C++ files need the parser, which is not installed", hint=_INSTALL)
    report = scan.report(tuple(map(str, places)))
    if config.sarif is not None:
        write_json(config.sarif, sarif_log(report.findings), by="--sarif")
    return report


def _is_object(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(64).lstrip()[:1] in (b"", b"{")


@dataclass
class _Scan:
    rules: RuleSet
    config: MigrateConfig
    findings: list[MigrationFinding] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    without_parser: list[Path] = field(default_factory=list)
    diffs: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    checked: int = 0
    ignored: int = 0

    def file(self, path: Path, kind: Kind) -> None:
        """Check one file, and fix it."""
        try:
            size = path.stat().st_size
            text = read_source(path)  # of a larger file the beginning
        except UsageError as error:
            self._skip(path, error.message.partition("` is ")[2])
            return
        except OSError as error:
            self._skip(path, (error.strerror or "cannot be read").lower())
            return
        if text is None:
            self._skip(path, "a binary file")
            return
        lower = text.lower()
        if not any(word in lower for word in _CONCERNS) and not cpp_source.may_concern(text):
            self.checked += kind != "cpp" or cpp_source.is_available()
            return
        if size > MAX_BYTES and kind != "log":
            self._skip(path, f"larger than {MAX_BYTES >> 20} MiB")
            return
        if kind == "cpp" and cpp_source.may_concern(text) and not cpp_source.is_available():
            self.without_parser.append(path)
            self._skip(path, f"C++ needs {_INSTALL}")
            return
        self.checked += 1
        if kind not in _PARSED and (longest := max(map(len, text.split("\n")))) > _MAX_LINE:
            self._skip(path, f"has a line of {longest} characters: not written by a person")
            return
        if (blanks := max(map(len, re.findall(r"\s+", text)), default=0)) > _MAX_BLANKS:  # each pattern tries them all
            self._skip(path, f"has {blanks} blanks in a row: not written by a person")
            return
        source = Source(path, text)
        try:
            hits = self._hits(source, kind)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self._skip(path, f"does not parse: {library_reason(error)}")
            return
        if (self.config.fix or self.config.diff) and any(hit.edits for hit in hits):
            new = self._fix(source, kind, hits)
            if new != source.text:
                source, hits = self._change(path, new, kind, source, hits)
        self.findings += (_finding(source, hit) for hit in hits)

    def _hits(self, source: Source, kind: Kind) -> list[Hit]:
        wanted = self.config.rules
        places = {(hit.rule.id, hit.start, hit.end): hit for hit in scan_source(source, kind, self.rules)}
        found = [hit for hit in places.values() if not wanted or hit.rule.id in wanted]
        kept = [hit for hit in found if not source.is_ignored(hit.rule.id, hit.start)]
        self.ignored += len(found) - len(kept)
        return sorted(kept, key=lambda hit: (hit.start, hit.rule.id))

    def _fix(self, source: Source, kind: Kind, hits: Iterable[Hit]) -> str:
        """The text with the mechanical changes made, and again until nothing is left of them."""
        before, text = self.ignored, source.text
        for _ in range(_MAX_PASSES):
            edits = [edit for hit in hits for edit in hit.edits]
            new = apply_edits(text, edits)
            if not edits or new == text or not _parses(Source(source.path, new), kind, self.rules):
                break
            text = new
            hits = self._hits(Source(source.path, text), kind)
        self.ignored = before
        return text

    def _change(self, path: Path, new: str, kind: Kind, source: Source, hits: list[Hit]) -> tuple[Source, list[Hit]]:
        """Write the new text with `fix`; what is left to find afterwards."""
        lines = (part.splitlines(keepends=True) for part in (source.text, new))
        self.diffs += _diff_lines(path, *lines)
        if not self.config.fix:
            return source, hits
        try:
            mode = path.stat().st_mode
            write_atomic(path, (source.mark + new).encode("utf-8", "surrogateescape"))
            path.chmod(mode)
        except OSError as error:
            raise os_error(error, path) from error
        self.fixed.append(str(path))
        before, source = self.ignored, Source(path, new)
        hits = self._hits(source, kind)
        self.ignored = before
        return source, hits

    def _skip(self, path: Path, reason: str) -> None:
        self.skipped.append(SkippedFile(str(path), reason))

    def report(self, paths: tuple[str, ...]) -> MigrateReport:
        counts = Counter(item.severity for item in self.findings)
        shown = self.config.fix or self.config.diff
        return MigrateReport(
            paths=paths,
            from_release=".".join(map(str, self.rules.start)),
            to_release=".".join(map(str, self.rules.target)),
            findings=tuple(self.findings),
            counts={"error": counts["error"], "warning": counts["warning"], "ignored": self.ignored},
            files_checked=self.checked,
            files_skipped=tuple(self.skipped),
            diff="".join(self.diffs) if shown else None,
            files_fixed=tuple(self.fixed),
        )


def scan_source(source: Source, kind: Kind, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in a text of some kind; `SyntaxError` or `ValueError` for one that does not parse."""
    text = source.text
    if kind == "python":
        yield from scan_python(source, rules)
        if source.path.name == "setup.py":
            yield from requirements.scan_requirements(text, rules)
    elif kind == "notebook":
        yield from scan_notebook(source, rules)
    elif kind == "cpp":
        if cpp_source.may_concern(text):
            yield from cpp_source.scan_cpp(source, rules)
        yield from python_values.scan_options(text, rules)
    elif kind == "pbtxt":
        yield from scan_triton(text, rules)
    elif kind == "requirements":
        yield from requirements.scan_requirements(text, rules)
        yield from requirements.scan_dependencies(text, rules)
        yield from shell.scan_text(text, rules)
    elif kind == "config" and _NVINFER.search(text) and _NVINFER_KEY.search(text):
        yield from scan_nvinfer(text, rules)
    elif source.path.suffix in (".toml", ".ini", ".cfg"):
        yield from scan_commands(text, rules)
    elif kind == "markdown":
        blocks = shell.fenced_commands(text)
        yield from scan_commands(blocks, rules)
        yield from requirements.scan_releases(blocks, rules)
        yield from scan_embedded(source, rules)
    elif kind == "log":
        yield from shell.scan_text(shell.logged_commands(text), rules)
    elif kind in ("shell", "cmake") or source.path.suffix in (".yml", ".yaml"):
        lines = text if kind in ("shell", "cmake") else shell.join_yaml_lines(text)
        lines = shell.join_options(lines) if kind == "cmake" else lines
        yield from scan_commands(lines, rules)
        yield from requirements.scan_dependencies(text, rules)
        yield from requirements.scan_releases(text, rules)
        yield from scan_embedded(source, rules)


def _finding(source: Source, hit: Hit) -> MigrationFinding:
    line, column = source.place(hit.start)
    shown = " ".join(source.text[hit.start : hit.end].split()) or source.line(line).strip()
    return MigrationFinding(
        rule=hit.rule.id,
        severity=hit.rule.severity,
        kind=hit.rule.kind,
        since=hit.rule.since,
        file=str(source.path),
        line=line,
        column=column,
        text=shown[:120].encode("utf-8", "replace").decode(),
        why=hit.why,
        replacement=hit.replacement,
        source=hit.rule.source,
        fixable=bool(hit.edits),
    )


def _parses(source: Source, kind: Kind, rules: RuleSet) -> bool:
    try:
        list(scan_source(source, kind, rules))
    except (SyntaxError, ValueError):
        return False
    return True


def _diff_lines(path: Path, old: list[str], new: list[str]) -> Iterator[str]:
    name = path.as_posix().lstrip("/")
    for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
        shown = line.encode("utf-8", "replace").decode()
        yield shown if shown.endswith("\n") else f"{shown}\n\\ No newline at end of file\n"


def sarif_log(findings: Sequence[MigrationFinding]) -> dict[str, Any]:
    """A SARIF log of one run: the rules that found something, and a result for each finding."""
    used = {item.rule for item in findings}
    rules = [rule for rule in all_rules() if rule.id in used]
    index = {rule.id: at for at, rule in enumerate(rules)}
    driver = {
        "name": "trt-engine migrate",
        "version": distribution_version("trt-engine") or "unknown",
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": f"{rule.kind} since TensorRT {rule.since}"},
                "fullDescription": {"text": rule.why},
                "help": {"text": f"{rule.replacement}\nSource: {rule.source}"},
                "defaultConfiguration": {"level": rule.severity},
            }
            for rule in rules
        ],
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(item, index[item.rule]) for item in findings]}],
    }


def _result(finding: MigrationFinding, index: int) -> dict[str, Any]:
    path = Path(finding.file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    region = {"startLine": finding.line, "startColumn": finding.column}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {
            "text": f"`{finding.text}`: {finding.why} (TensorRT {finding.since}); instead: {finding.replacement}"
        },
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}],
    }


_NVINFER = re.compile(r"^[ \t]*(?:\[property\]|property\s*:)[ \t\r]*$", re.MULTILINE)
_NVINFER_KEY = re.compile(
    r"^[ \t]*(?:model-engine-file|onnx-file|network-mode|network-type|gie-unique-id|model-file|uff-file)\s*[=:]",
    re.MULTILINE,
)
_SETTING = re.compile(r"^[ \t]*([\w-]+)[ \t]*[=:][ \t]*([^\n#;]*)(?:[#;][^\n]*)?$\n?", re.MULTILINE)
_MODES = {"1": "INT8", "2": "FP16"}
_COMMANDS = {
    "INT8": "trt-engine quantize {model} --to int8 --calib-data DATA -o {stem}.int8.onnx",
    "FP16": "trt-engine cast {model} --to fp16 -o {stem}.fp16.onnx",
}


def scan_nvinfer(text: str, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in a configuration of nvinfer, of either syntax."""
    settings = [(found, found[1], found[2].strip()) for found in _SETTING.finditer(text)]
    models = [value for _, key, value in settings if key == "onnx-file"]
    values = {"model": "MODEL.onnx", "stem": "MODEL"} | model_values(models[0] if models else None)
    for found, key, value in settings:
        rule = rules.keys.get(key)
        span = found.start(1), found.start(2) + len(found[2].rstrip())
        if rule is not None and value and not (key == "force-implicit-batch-dim" and value == "0"):
            edits = (Edit(found.start(), found.end(), ""),) if rule.drop and found[0].strip() else ()
            yield Hit(rule, *span, edits, values)
        rule = rules.by_id.get("caffe-uff-parser")
        if rule is not None and key == "model-file" and value.endswith(".caffemodel"):
            yield Hit(rule, *span, (), values)  # other files are read by a library of the user
        rule = rules.by_id.get("deepstream-network-mode")
        if rule is not None and key == "network-mode" and value in _MODES:
            command = _COMMANDS[_MODES[value]].format(**values)
            yield Hit(rule, *span, (), {"value": _MODES[value], "command": command})


_ACCELERATOR = re.compile(r"name\s*:\s*\"tensorrt\"", re.IGNORECASE)
_PARAMETER = re.compile(
    r"key\s*:\s*\"(precision_mode|trt_fp16_enable|trt_int8_enable|int8_calibration_table_name|int8_use_native_calibration_table)\""
    r"\s*,?\s*value\s*:\s*(?:\{\s*string_value\s*:\s*)?\"([^\"]*)\""
)


def scan_triton(text: str, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in a config.pbtxt of Triton: precision that its TensorRT accelerator was given."""
    rule = rules.by_id.get("triton-precision-mode")
    if rule is None or not _ACCELERATOR.search(text):
        return
    for found in _PARAMETER.finditer(text):
        if "#" not in line_before(text, found.start()) and found[2].upper() not in ("FP32", "0", "FALSE", ""):
            yield Hit(rule, found.start(), found.end())


_MAGIC = re.compile(r"^([ \t]*)(?:\w+[ \t]*=[ \t]*)?[%!](?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)
_SHELL_CELL = re.compile(r"\s*%%(?:bash|sh|cmd|powershell|script\s+\S*sh\b|writefile\s+(?!\S*\.(?:py|txt|json)\s))")
_TEXT = re.compile(r"\s*\w+\s*\+?=\s*f?[\"']")
"""A line of Python that gives a variable a text, which `{name}` in a magic stands for."""


def scan_notebook(source: Source, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in the code cells of an .ipynb file, placed at their lines in it; `ValueError` for a damaged one.

    Nothing is edited: the text is inside JSON.
    """
    cells = list(_code_cells(json.loads(source.text)))
    lines = [line for cell in cells for line in cell]
    places = list(_places(source.text, lines))
    python = Source(source.path, "\n".join(map(_as_python, cells)))
    found: list[Hit] = []
    with contextlib.suppress(SyntaxError):  # `return` and `await` outside of functions
        found += scan_python(python, rules)
    magics = "\n".join(line for cell in cells for line in _commands(cell))
    commands = Source(source.path, magics)
    for view, hits in ((python, found), (commands, scan_commands(magics, rules))):
        for hit in hits:
            line, column = view.place(hit.start)
            start = places[line - 1]
            start += column - 1 if source.text.startswith(lines[line - 1][: column - 1], start) else 0
            yield Hit(hit.rule, start, start, (), hit.values)


_HEREDOC = re.compile(r"^(?=[^\n]*(?:python|\.py\b))[^\n]*<<[^\n]*\n", re.MULTILINE)
_TERMINATOR = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)(?!\w)\1")
_WORD_LINE = re.compile(r"^[ \t]*(\w+)[ \t\r]*$", re.MULTILINE)
_ARGUMENT = re.compile(
    r"\bpython[\d.]*[ \t]+-c[ \t]+(?P<mark>['\"])(?P<code>(?:\\.|(?!(?P=mark))[^\\]){0,4000})(?P=mark)", re.DOTALL
)
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*\{?\.?(?P<language>python|py|cpp|c\+\+|cuda)\b[^\n]*\n(?P<code>.{0,40000}?)^[ \t]*```",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
_MAX_CODE = 40_000


def scan_embedded(source: Source, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in the Python that a script runs or writes, and in code blocks of Markdown; nothing is edited."""
    text = source.text
    parts = (
        [(*found.span("code"), found["language"].lower()[0] == "c") for found in _BLOCK.finditer(text)]
        if source.path.suffix == ".md"
        else ((start, end, False) for start, end in _given_code(text))
    )
    for start, end, cpp in parts:
        code = text[start:end]
        head = "#include <NvInfer.h>\n" if cpp else "" if "import" in code else "import tensorrt as trt\n"
        head += "if 1:\n" if not cpp and code[:1] in " \t" else ""
        part = Source(source.path, head + code)
        with contextlib.suppress(SyntaxError, ValueError):
            hits = (
                scan_python(part, rules)
                if not cpp
                else cpp_source.scan_cpp(part, rules)
                if cpp_source.is_available()
                else []
            )
            for hit in hits:
                shift = start - len(head)
                yield Hit(hit.rule, hit.start + shift, hit.end + shift, (), hit.values)


def _given_code(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each here-document of a line that names Python or a file of it, and of each argument of `-c`."""
    lines: dict[str, list[int]] = {}
    for line in _WORD_LINE.finditer(text):
        lines.setdefault(line[1], []).append(line.start())
    at = 0
    for head in _HEREDOC.finditer(text):
        if head.start() < at:
            continue
        ends = (
            places[index]
            for _, word in reversed(_TERMINATOR.findall(head[0]))
            if (index := bisect.bisect_left(places := lines.get(word, []), head.end())) < len(places)
        )
        end = next((place for place in ends if place - head.end() <= _MAX_CODE), None)
        if end is not None:
            yield from (found.span("code") for found in _ARGUMENT.finditer(text, at, head.start()))
            yield head.end(), end
            at = end
    yield from (found.span("code") for found in _ARGUMENT.finditer(text, at))


def scan_commands(text: str, rules: RuleSet) -> list[Hit]:
    """What the rules find in the command lines of any tool."""
    found = (
        list(shell.scan_text(text, rules)),
        requirements.scan_installs(text, rules),
        python_values.scan_wrappers(text, rules),
    )
    return [hit for hits in found for hit in hits]


def _code_cells(document: object) -> Iterator[list[str]]:
    cells = document.get("cells", ()) if isinstance(document, dict) else ()
    for cell in cells:
        text = cell.get("source", "") if isinstance(cell, dict) and cell.get("cell_type") == "code" else ""
        joined = "".join(map(str, text)) if isinstance(text, list) else str(text)
        yield joined.split("\n")


def _commands(cell: list[str]) -> Iterator[str]:
    """The lines of a cell that a shell runs, the others empty."""
    whole, goes_on = _SHELL_CELL.match(cell[0]) is not None, False
    for line in cell:
        magic = re.match(r"\s*(?:\w+\s*=\s*)?(?:!|%(?:pip|conda|sx|system)\b)", line)
        if whole or goes_on or magic or shell.is_command(line):
            yield re.sub(r"^\s*(?:\w+\s*=\s*)?[!%]+", "", line) if magic else line
        else:
            yield line if _TEXT.match(line) else ""
        goes_on = (goes_on or magic is not None) and line.rstrip().endswith("\\")


def _as_python(cell: list[str]) -> str:
    """The cell with its magics as `pass`; empty lines for one of another language, or of IPython's own syntax."""
    text = "\n".join(cell)
    if text.lstrip().startswith("%%") and not re.match(r"\s*%%(?:time|capture|prun|writefile\s+\S*\.py\s)", text):
        return "\n" * (len(cell) - 1)
    code = _MAGIC.sub(lambda found: f"{found[1]}pass" + "\n" * found[0].count("\n"), text)
    try:
        ast.parse(code)
    except SyntaxError:
        return "\n" * (len(cell) - 1)
    return code


def _places(text: str, lines: list[str]) -> Iterator[int]:
    """The offset of each line of code in the file, in order."""
    at, missed = 0, 0
    for line in lines:
        if missed > 100:  # written in another form: each search goes to the end
            yield at
            continue
        forms = (json.dumps(line)[1:-1], json.dumps(line, ensure_ascii=False)[1:-1])
        places = [place for form in forms if line.strip() and (place := text.find(form, at)) >= 0]
        missed += bool(line.strip()) and not places
        found = min(places, default=at)
        yield found
        at = found + len(line)

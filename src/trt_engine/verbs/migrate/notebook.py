"""Code inside other files: notebooks' cells with their shell magics, Python in scripts, code blocks of Markdown."""

from __future__ import annotations

import ast
import bisect
import contextlib
import json
import re
from collections.abc import Iterator

from trt_engine.verbs.migrate import cpp_source, requirements, shell, wrappers
from trt_engine.verbs.migrate.python_source import scan_python
from trt_engine.verbs.migrate.rules import RuleSet
from trt_engine.verbs.migrate.source import Hit, Source

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
        wrappers.scan_wrappers(text, rules),
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

"""Releases and libraries of TensorRT by name: requirement files, pyproject.toml, base images, packages, CMake."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

from trt_engine.verbs.migrate.rules import RuleSet
from trt_engine.verbs.migrate.shell import is_said
from trt_engine.verbs.migrate.source import Edit, Hit, line_before

_PACKAGE_NAME = (
    r"(?P<name>(?i:(?:nvidia[-_.])?tensorrt(?:[-_.]cu1[123])?(?:[-_.](?:bindings|libs|lean|dispatch))?))"
    r"(?:\[[\w,-]*\])?"
)
_REQUIREMENT = re.compile(
    r"(?:^[ \t]*(?:-[ \t]+(?=[\w.\[\]-]+[ \t]*(?:[~!<>=]=|[<>]|$)))?|(?P<quote>[\"']))"
    rf"{_PACKAGE_NAME}[ \t]*"
    r"(?P<spec>(?:[~=!<>]=?=?[ \t]*[\w.*+]+[ \t]*,?[ \t]*)*)"
    r"[ \t]*(?:;[^\n]*?)?(?(quote)(?P=quote)|(?:#[^\n]*|--hash[^\n]*|\\)?\r?$)",
    re.MULTILINE,
)
_KEYWORDS = re.compile(r"(?:keywords|classifiers|known[\w-]*|ignore[\w-]*)\s*=\s*\[[^\]]*\Z")
_CLAUSE = re.compile(r"(~=|===?|!=|<=|>=|<|>)\s*(\d+)(?:\.(\d+|\*))?")


def scan_requirements(text: str, rules: RuleSet) -> Iterator[Hit]:
    """Requirements on `tensorrt` that leave out the target release, or do not bound it."""
    for found in _REQUIREMENT.finditer(text):
        is_item = re.fullmatch(r"[ \t]*-[ \t]+", line_before(text, found.start()))
        if found["quote"] and not is_item:
            is_last = re.compile(r"\s*[,\]]").match(text, found.end())
            if not is_last or _KEYWORDS.search(text, max(0, found.start() - 2000), found.start()):
                continue  # a string, but not in a list of requirements
        yield from _requirement(found, found["spec"].strip(), rules, fix=True)


def _requirement(found: re.Match[str], spec: str, rules: RuleSet, *, fix: bool = False) -> Iterator[Hit]:
    """What is wrong with a package of a name and a version specifier."""
    start, end = found.start("name"), found.end("spec")
    if re.fullmatch(r"nvidia[-_.]tensorrt", found["name"], re.IGNORECASE):
        edits = (Edit(start, start + len("nvidia-"), ""),) if fix and not spec else ()
        yield from _hits(rules, "requirement-name", (start, end), edits, found["name"])
    elif (kind := _judge(spec, rules)) is not None:
        yield from _hits(rules, kind, (start, end), (), found["name"])


def _hits(
    rules: RuleSet, rule: str, span: tuple[int, int], edits: tuple[Edit, ...] = (), name: str = ""
) -> Iterator[Hit]:
    """A finding of the rule, if it is among those looked for; `name` is what to write in its place."""
    if (known := rules.by_id.get(rule)) is not None:
        major = rules.target[0]
        yield Hit(known, *span, edits, {"name": name, "major": str(major), "next": str(major + 1)})


_INSTALL = re.compile(
    r"\b(?:pip[\d.]*|uv|conda|mamba|micromamba|poetry|pdm|pipenv|run_pip\([\"'])\s*(?:pip\s+)?(?:install|add)\b"
    r"(?P<words>(?:\\\r?\n|[^\n;&|])*)"
)
_INSTALLED = re.compile(
    rf"(?<![\w./=${{-]){_PACKAGE_NAME}"
    r"(?P<spec>(?:[~=!<>]=?=?[ \t]*[\w.*+]+,?)*)(?=[\s\"'\\]|$)"
)
_HELD_VERSION = re.compile(
    rf"(?<![\w./=$-]){_PACKAGE_NAME}"
    r"[=~]=\$(?:\{\{[ \t]*(?:\w+\.)?)?[{(]?(?P<held>\w+)"
)
_DEPENDENCY = re.compile(
    r"^(?P<name>tensorrt(?:[-_]cu1[123])?)[ \t]*=[ \t]*"
    r"(?:\{[^}\n]*\bversion[ \t]*=[ \t]*)?[\"'](?P<spec>[\^~=<>!]*\d[^\"'\n]*)",
    re.MULTILINE,
)
_SECTION = re.compile(r"^\[([^\]\n]+)\]", re.MULTILINE)
_CONDA = re.compile(
    r"^[ \t]*-[ \t]+[\"']?(?:[\w-]+::)?(?P<name>tensorrt)(?P<spec>[ \t]*=?=?[ \t]*\d[\d.*]*)[\"']?[ \t]*(?:#|$)",
    re.MULTILINE,
)


def scan_installs(text: str, rules: RuleSet) -> Iterator[Hit]:
    """The same of what pip, uv, conda, poetry and their like install."""
    versions: dict[str, re.Match[str]] | None = None
    for command in _INSTALL.finditer(text):
        if is_said(line_before(text, command.start())):
            continue
        for found in _INSTALLED.finditer(text, command.start("words"), command.end("words")):
            yield from _requirement(found, _as_specifier(found["spec"]), rules)
        for found in _HELD_VERSION.finditer(text, command.start("words"), command.end("words")):
            versions = _values(_VERSION, text) if versions is None else versions
            value = versions.get(found["held"])
            if value is not None and _judge(f"=={value[2]}", rules) == "requirement-release":
                yield from _hits(rules, "requirement-release", found.span(), (), found["name"])


def scan_dependencies(text: str, rules: RuleSet) -> Iterator[Hit]:
    """The same of the tables of Poetry and Pipenv, and of conda's environment files."""
    sections = [*_SECTION.finditer(text)]
    starts = [section.start() for section in sections]
    for found in _DEPENDENCY.finditer(text):
        at = bisect.bisect_left(starts, found.start()) - 1
        if at >= 0 and re.search("dependencies|packages", sections[at][1]):
            yield from _requirement(found, _as_specifier(found["spec"]), rules)
    for found in _CONDA.finditer(text):
        yield from _requirement(found, _as_specifier(found["spec"]), rules)


def _as_specifier(spec: str) -> str:
    """`~=10.2` of Poetry's `^10.2`, `==10.2` of conda's `=10.2`."""
    spec = re.sub(r"^(?:\^|=?(?=\d)|=(?![=]))", lambda sign: "~=" if sign[0] == "^" else "==", spec.strip())
    return re.sub(r"^~=(\d+)$", r"==\1", spec)


def _judge(spec: str, rules: RuleSet) -> str | None:
    """The id of the rule that a version specifier comes under."""
    clauses = [(sign, int(major), minor) for sign, major, minor in _CLAUSE.findall(spec)]
    target = rules.target[0]
    highest = None
    for sign, major, minor in clauses:
        exact = sign in ("==", "===") or (sign == "~=" and minor)
        top = major if exact or sign == "<=" else major - (minor in ("", "0")) if sign == "<" else None
        highest = top if highest is None else min(highest, top) if top is not None else highest
    if highest is not None:
        return "requirement-release" if highest < target else None
    lowest = max((major for sign, major, _ in clauses if sign in (">", ">=")), default=0)
    return "requirement-unpinned" if lowest < 11 else None


_REGISTRY = r"nvcr\.io/nvidia/(?:tensorrt|tritonserver|pytorch|tensorflow)"
_MONTHLY = {10: (24, 5), 11: (26, 6)}
"""TensorRT major -> the first monthly image that may have it: 10.0 came in May 2024, 11.0 in June 2026."""
_IMAGES = (
    (re.compile(rf"{_REGISTRY}:(\d\d)\.(\d\d)[\w.-]*"), _MONTHLY),
    (re.compile(rf"{_REGISTRY}[\"']?[ \t]*\n[ \t]*tag:[ \t]*[\"']?(\d\d)\.(\d\d)"), _MONTHLY),
    # DeepStream 7.1 has TensorRT 10.3, 8.0 has 10.9
    (re.compile(r"nvcr\.io/nvidia/deepstream(?:-l4t)?:(\d)\.(\d)[\w.-]*"), {10: (7, 1), 11: (8, 1)}),
    (re.compile(r"nvcr\.io/nvidia/l4t-tensorrt:r(\d+)\.(\d+)[\w.-]*"), {9: (9, 0), 10: (10, 0), 11: (11, 0)}),
)
"""Images with the two numbers of their release, and the first that may have each major release of TensorRT."""
_TAGGED_IMAGE = re.compile(rf"{_REGISTRY}:\$[{{(]?(\w+)(?::?-(\d\d\.\d\d))?")
_PACKAGE = re.compile(
    r"\b(?:lib(?:nvinfer|nvonnxparsers|nvinfer-(?:plugin|lean|dispatch|vc-plugin|bin))(?P<package>8|10)(?![\w.])"
    r"|libnv(?:infer(?:_plugin|_lean|_dispatch)?|onnxparser)\.so\.(?P<soname>8|10)(?![\w])"
    r"|nv(?:infer(?:_plugin|_lean|_dispatch)?|onnxparser)_(?P<windows>10)\b"
    r"|(?<=[ =/\"'])(?:python3-)?(?:lib)?(?:nv(?:infer|onnxparsers)|tensorrt)(?:-\w+)*=(?P<pin>8|10)\.(?:\d|\*)[\w.+:*-]*"
    r"|(?:TensorRT-|nv-tensorrt-(?:local-)?repo-[\w.]+?-|tensorrt-)(?P<archive>8|10)\.\d+(?:\.\d+)+[\w.+-]*)"
)
_HELD_PACKAGE = re.compile(
    r"(?<![\w./-])(?:python3-)?(?:(?:lib)?(?:nv(?:infer|onnxparsers)|tensorrt)(?:-\w+)*=|TensorRT-)\$[{(]?(?P<held>\w+)"
)
"""A package whose release is a variable's."""
_PARSER_LIBRARY = re.compile(
    r"(?P<gap>(?<![ \t])[ \t]+|(?<=\())"
    r"(?P<word>(?:-l)?(?:lib)?(?:nvparsers|nvcaffe_parser|nvcaffeparser|nvuffparser|uff-converter-tf|graphsurgeon-tf)\d*(?:-dev)?)(?![\w.])"
)


_SEARCHES = re.compile(r"\b(?:e?grep|rg|find|ls|test|dpkg -[ls]|ldconfig)\b")
_GIVEN = r"\b(\w+)[\"']?(?:[ \t]*[:?]?=[ \t]*|:[ \t]+|[ \t]+)[\"']?"
_VERSION = re.compile(rf"{_GIVEN}(\d[\w.]*)")
_PACKAGE_VERSION = re.compile(rf"{_GIVEN}(8|10)\.\d")
_TAG = re.compile(r"\b(\w+)[ \t]*[:?]?[=:][ \t]*[\"']?(\d\d\.\d\d)(?![\d.])")


def _values(pattern: re.Pattern[str], text: str) -> dict[str, re.Match[str]]:
    """The first value that each name is given in the text."""
    return {found[1]: found for found in reversed([*pattern.finditer(text)])}


def scan_releases(text: str, rules: RuleSet) -> Iterator[Hit]:
    """Images, packages and libraries of a former release, in Dockerfiles, shell, Makefiles and CMake."""
    target = rules.target[0]
    for pattern, first in _IMAGES:
        for found in pattern.finditer(text):
            if (int(found[1]), int(found[2])) < first.get(target, (0, 0)) and not _in_comment(text, found):
                yield from _hits(rules, "image-release", found.span())
    tags: dict[str, re.Match[str]] | None = None
    for found in _TAGGED_IMAGE.finditer(text):  # the tag is a variable's
        tags = _values(_TAG, text) if tags is None else tags
        tag = tags[found[1]][2] if found[1] in tags else found[2]
        if tag and tuple(map(int, tag.split("."))) < _MONTHLY.get(target, (0, 0)) and not _in_comment(text, found):
            yield from _hits(rules, "image-release", found.span())
    for found in _PACKAGE.finditer(text):
        old = next(value for value in found.groupdict().values() if value)
        line = line_before(text, found.start())
        if found["pin"] and re.search(r"\b(?:micro)?(?:conda|mamba)\b", line):
            continue  # `scan_installs` has it
        if int(old) < target and not _in_comment(text, found) and not _is_searched(line):
            numbered = not found["pin"] and not found["archive"]
            name = found[0].replace(old, str(target), 1) if numbered else f"that of TensorRT {target}"
            yield from _hits(rules, "library-release", found.span(), (), name)
    packages: dict[str, re.Match[str]] | None = None
    for found in _HELD_PACKAGE.finditer(text):
        packages = _values(_PACKAGE_VERSION, text) if packages is None else packages
        value = packages.get(found["held"])
        if value is not None and int(value[2]) < target and not _in_comment(text, found):
            yield from _hits(rules, "library-release", found.span(), (), f"the package of TensorRT {target}")
    lower = text.lower()
    for found in _PARSER_LIBRARY.finditer(text):
        before = text[max(0, found.start() - 4000) : found.start()].splitlines()[-2:-1]
        if (
            _in_comment(text, found)
            or _is_searched(line_before(text, found.start("word")))
            or (before and re.search(r"\bif.*nv(parsers|caffe|uff)", before[0]))
        ):
            continue
        call = lower.rfind("link_libraries", max(0, found.start() - 2000), found.start())
        link = found["word"].startswith("-l") or (call >= 0 and ")" not in text[call : found.start()])
        edits = (Edit(found.start(), found.end(), ""),) if link else ()
        yield from _hits(rules, "parser-libraries", found.span("word"), edits)


def _is_searched(before: str) -> bool:
    return _SEARCHES.search(re.split(r"[|&;\n]", before[-400:])[-1]) is not None  # of a long line the end


def _in_comment(text: str, found: re.Match[str]) -> bool:
    return "#" in line_before(text, found.start())

"""Releases and libraries of TensorRT by name: requirement files, pyproject.toml, base images, packages, CMake."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trt_engine.migration.rules import RuleSet
from trt_engine.migration.shell import is_said
from trt_engine.migration.source import Edit, Hit

_REQUIREMENT = re.compile(
    r"(?:^[ \t]*(?:-[ \t]+(?=[\w.\[\]-]+[ \t]*(?:[~!<>=]=|[<>]|$)))?|(?P<quote>[\"']))"
    r"(?P<name>(?i:(?:nvidia[-_.])?tensorrt(?:[-_.]cu1[123])?(?:[-_.](?:bindings|libs|lean|dispatch))?))"
    r"(?:\[[\w,-]*\])?[ \t]*(?P<spec>(?:[~=!<>]=?=?[ \t]*[\w.*+]+[ \t]*,?[ \t]*)*)"
    r"[ \t]*(?:;[^\n]*?)?(?(quote)(?P=quote)|(?:#[^\n]*|--hash[^\n]*|\\)?\r?$)",
    re.MULTILINE,
)
_KEYWORDS = re.compile(r"(?:keywords|classifiers|known[\w-]*|ignore[\w-]*)\s*=\s*\[[^\]]*\Z")
_CLAUSE = re.compile(r"(~=|===?|!=|<=|>=|<|>)\s*(\d+)(?:\.(\d+|\*))?")


def scan_requirements(text: str, rules: RuleSet) -> Iterator[Hit]:
    """Requirements on `tensorrt` that leave out the target release, or do not bound it."""
    for found in _REQUIREMENT.finditer(text):
        span = found.start("name"), found.end("spec")
        name, spec = found["name"], found["spec"].strip()
        item = re.match(r"[ \t]*-[ \t]+$", text[text.rfind("\n", 0, found.start()) + 1 : found.start()])
        if (
            found["quote"]
            and not item
            and (
                not re.compile(r"\s*[,\]]").match(text, found.end())
                or _KEYWORDS.search(text, max(0, found.start() - 2000), found.start())
            )
        ):
            continue  # a string, but not in a list of requirements
        if (
            re.fullmatch(r"nvidia[-_.]tensorrt", name, re.IGNORECASE)
            and (rule := rules.by_id.get("requirement-name")) is not None
        ):
            place = found.start("name"), found.start("name") + len("nvidia-")
            yield Hit(rule, *span, () if spec else (Edit(*place, ""),))
        elif (kind := _judge(spec, rules)) is not None and (rule := rules.by_id.get(kind)) is not None:
            major = rules.target[0]
            yield Hit(rule, *span, (), {"name": name, "major": str(major), "next": str(major + 1)})


_INSTALL = re.compile(
    r"\b(?:pip[\d.]*|uv|conda|mamba|micromamba|poetry|pdm|pipenv|run_pip\([\"'])\s*(?:pip\s+)?(?:install|add)\b"
    r"(?P<words>(?:\\\r?\n|[^\n;&|])*)"
)
_INSTALLED = re.compile(
    r"(?<![\w./=${-])(?P<name>(?i:(?:nvidia[-_.])?tensorrt(?:[-_.]cu1[123])?(?:[-_.](?:bindings|libs|lean|dispatch))?))"
    r"(?:\[[\w,-]*\])?(?P<spec>(?:[~=!<>]=?=?[ \t]*[\w.*+]+,?)*)(?=[\s\"'\\]|$)"
)
_HELD_VERSION = re.compile(
    r"(?<![\w./=$-])(?P<name>(?i:(?:nvidia[-_.])?tensorrt(?:[-_.]cu1[123])?(?:[-_.](?:bindings|libs|lean|dispatch))?))(?:\[[\w,-]*\])?"
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
    for command in _INSTALL.finditer(text):
        if is_said(text[text.rfind("\n", 0, command.start()) + 1 : command.start()]):
            continue
        for found in _INSTALLED.finditer(text, command.start("words"), command.end("words")):
            yield from _requirement(found, rules)
        for held in _HELD_VERSION.finditer(text, command.start("words"), command.end("words")):
            value = re.search(
                rf"\b{re.escape(held['held'])}[\"']?(?:[ \t]*[:?]?=[ \t]*|:[ \t]+|[ \t]+)[\"']?(?P<version>\d[\w.]*)",
                text,
            )
            rule = rules.by_id.get("requirement-release")
            if value is not None and rule is not None and _judge(f"=={value['version']}", rules) == rule.id:
                major = rules.target[0]
                yield Hit(rule, *held.span(), (), {"name": held["name"], "major": str(major), "next": str(major + 1)})


def scan_dependencies(text: str, rules: RuleSet) -> Iterator[Hit]:
    """The same of the tables of Poetry and Pipenv, and of conda's environment files."""
    for found in _DEPENDENCY.finditer(text):
        sections = _SECTION.findall(text, 0, found.start())
        if sections and re.search("dependencies|packages", sections[-1]):
            yield from _requirement(found, rules)
    for found in _CONDA.finditer(text):
        yield from _requirement(found, rules)


def _requirement(found: re.Match[str], rules: RuleSet) -> Iterator[Hit]:
    name, spec = found["name"], found["spec"].strip()
    spec = re.sub(r"^(?:\^|=?(?=\d)|=(?![=]))", lambda sign: "~=" if sign[0] == "^" else "==", spec) if spec else ""
    spec = re.sub(r"^~=(\d+)$", r"==\1", spec)
    if re.fullmatch(r"nvidia[-_.]tensorrt", name, re.IGNORECASE):
        kind: str | None = "requirement-name"
    else:
        kind = _judge(spec, rules)
    if kind is not None and (rule := rules.by_id.get(kind)) is not None:
        major = rules.target[0]
        values = {"name": name, "major": str(major), "next": str(major + 1)}
        yield Hit(rule, found.start("name"), found.end("spec"), (), values)


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


_IMAGE = re.compile(r"nvcr\.io/nvidia/(?:tensorrt|tritonserver|pytorch|tensorflow):(\d\d)\.(\d\d)[\w.-]*")
_TAGGED_IMAGE = re.compile(
    r"nvcr\.io/nvidia/(?:tensorrt|tritonserver|pytorch|tensorflow):\$[{(]?(\w+)(?::?-(\d\d\.\d\d))?"
)
_SPLIT_IMAGE = re.compile(
    r"nvcr\.io/nvidia/(?:tensorrt|tritonserver|pytorch|tensorflow)[\"']?[ \t]*\n[ \t]*tag:[ \t]*[\"']?(\d\d)\.(\d\d)"
)
_L4T_IMAGE = re.compile(r"nvcr\.io/nvidia/l4t-tensorrt:r(\d+)\.(\d+)[\w.-]*")
_DEEPSTREAM_IMAGE = re.compile(r"nvcr\.io/nvidia/deepstream(?:-l4t)?:(\d)\.(\d)[\w.-]*")
_FIRST_DEEPSTREAM = {10: (7, 1), 11: (8, 1)}
"""TensorRT major -> the first release of DeepStream that may have it: 7.1 has 10.3, 8.0 has 10.9."""
_FIRST_IMAGE = {10: (24, 5), 11: (26, 6)}
"""TensorRT major -> the first monthly image that may have it: 10.0 came in May 2024, 11.0 in June 2026."""
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
    r"(?P<gap>[ \t]+|(?<=\())"
    r"(?P<word>(?:-l)?(?:lib)?(?:nvparsers|nvcaffe_parser|nvcaffeparser|nvuffparser|uff-converter-tf|graphsurgeon-tf)\d*(?:-dev)?)(?![\w.])"
)


def scan_releases(text: str, rules: RuleSet) -> Iterator[Hit]:
    """Images, packages and libraries of a former release, in Dockerfiles, shell, Makefiles and CMake."""
    target = rules.target[0]
    values = {"major": str(target), "next": str(target + 1)}
    image = rules.by_id.get("image-release")
    first = _FIRST_IMAGE.get(target)
    for found in _IMAGE.finditer(text):
        if image is not None and first and (int(found[1]), int(found[2])) < first and not _in_comment(text, found):
            yield Hit(image, *found.span(), (), values)
    for found in _SPLIT_IMAGE.finditer(text):
        if image is not None and first and (int(found[1]), int(found[2])) < first and not _in_comment(text, found):
            yield Hit(image, *found.span(), (), values)
    for found in _TAGGED_IMAGE.finditer(text):  # the tag is a variable's
        tag = re.search(rf"\b{re.escape(found[1])}[ \t]*[:?]?[=:][ \t]*[\"']?(\d\d)\.(\d\d)(?![\d.])", text)
        tag = tag or re.match(r"(\d\d)\.(\d\d)", found[2] or "")
        if image is not None and first and tag and (int(tag[1]), int(tag[2])) < first and not _in_comment(text, found):
            yield Hit(image, *found.span(), (), values)
    for found in _DEEPSTREAM_IMAGE.finditer(text):
        needed = _FIRST_DEEPSTREAM.get(target)
        if image is not None and needed and (int(found[1]), int(found[2])) < needed and not _in_comment(text, found):
            yield Hit(image, *found.span(), (), values)
    for found in _L4T_IMAGE.finditer(text):
        if image is not None and int(found[1]) < target and not _in_comment(text, found):
            yield Hit(image, *found.span(), (), values)
    library = rules.by_id.get("library-release")
    for found in _PACKAGE.finditer(text):
        old = next(value for value in found.groupdict().values() if value)
        line = text[text.rfind("\n", max(0, found.start() - 4000), found.start()) + 1 : found.start()]
        if found["pin"] and re.search(r"\b(?:micro)?(?:conda|mamba)\b", line):
            continue  # `scan_installs` has it
        if library is not None and int(old) < target and not _in_comment(text, found) and not _is_searched(line):
            numbered = not found["pin"] and not found["archive"]
            name = found[0].replace(old, str(target), 1) if numbered else f"that of TensorRT {target}"
            yield Hit(library, *found.span(), (), {"name": name})
    for found in _HELD_PACKAGE.finditer(text):
        version = rf"\b{re.escape(found['held'])}[\"']?(?:[ \t]*[:?]?=[ \t]*|:[ \t]+|[ \t]+)[\"']?(8|10)\.\d"
        value = re.search(version, text)
        if library is not None and value is not None and int(value[1]) < target and not _in_comment(text, found):
            yield Hit(library, *found.span(), (), {"name": f"the package of TensorRT {target}"})
    parsers, lower = rules.by_id.get("parser-libraries"), text.lower()
    for found in _PARSER_LIBRARY.finditer(text):
        before = text[max(0, found.start() - 4000) : found.start()].splitlines()[-2:-1]
        if (
            parsers is None
            or _in_comment(text, found)
            or _is_searched(text[max(0, found.start() - 400) : found.start("word")])
            or (before and re.search(r"\bif.*nv(parsers|caffe|uff)", before[0]))
        ):
            continue
        call = lower.rfind("link_libraries", max(0, found.start() - 2000), found.start())
        link = found["word"].startswith("-l") or (call >= 0 and ")" not in text[call : found.start()])
        edits = (Edit(found.start(), found.end(), ""),) if link else ()
        yield Hit(parsers, found.start("word"), found.end("word"), edits)


def _is_searched(before: str) -> bool:
    return re.search(r"\b(?:e?grep|rg|find|ls|test|dpkg -[ls]|ldconfig)\b[^|&;\n]*\Z", before) is not None


def _in_comment(text: str, found: re.Match[str]) -> bool:
    return "#" in text[text.rfind("\n", max(0, found.start() - 4000), found.start()) + 1 : found.start()]

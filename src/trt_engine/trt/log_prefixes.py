"""A log in trtexec's own form, without what containers, schedulers and terminals put around its lines, and with the messages
of TensorRT that other programs print: the Python logger, nvinfer, Triton, ONNX Runtime, torch_tensorrt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from trt_engine.trt.failure_rules import RULES

_COLOUR = re.compile(
    r"(?:\x1b|\^\[|\\(?:u001b|x1b|033|e)|#033|\u241b)\[[0-?]{0,20}[ -/]{0,4}[@-~]"
    r"|\[\d{1,2}(?:;\d{1,3}){0,4}m|\x1b\][^\x07]{0,200}\x07"
)
"""Colours of a terminal, also where its escape character is printed or lost."""
STAMP = r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] "
_TIME = r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?"
_PREFIXES = tuple(
    re.compile(rf"^[ \t>]*{pattern}")
    for pattern in (
        rf"{_TIME}(?: (?:stdout|stderr) [FP]| \d\d[OE][+ ]?)?[ \t]{{1,4}}(?:[-|] )?",  # docker, Kubernetes, CI
        r"\[pod/[^\]\s]{1,200}\] ",
        r"[A-Za-z][\w.-]{0,80} {1,40}\| ",  # docker compose
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d ",  # syslog, ts
        r"[\w.-]{1,80} [\w./@-]{1,80}\[\d{1,9}\]: ",
        r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?[ \t]{1,4}",
        r"#\d{1,4} \d{1,6}\.\d{1,3} ",  # docker build
        r"\[(?:rank|default)\d{1,5}\]: ?",
        r"\[\d{1,5},\d{1,5}\]<std(?:out|err)>: ?",  # mpirun
        r"\[[A-Za-z_][\w.]{0,80}-\d{1,4}\] ",  # ROS
        r"[\w.]{1,80}:[\w<>.]{1,80}:\d{1,6} - ",  # loguru
        r"\d{1,7}[:|]? {1,4}",  # numbered lines
        r"[ \t>]+",
    )
)
_LEVELS = tuple(
    re.compile(rf"^[ \t>]*{pattern}")
    for pattern in (
        r"(?:[\w.]{1,80} - )?(?:INFO|DEBUG|WARNING|ERROR) {0,8}(?:-|\|) (?:[\w.:]{1,120} - )?",
        r"(?:INFO|DEBUG|WARNING|ERROR):[\w.]{1,80}:",
    )
)
"""Levels of a logger that passes trtexec's lines on; of TensorRT's own messages they are the severity."""
_SHARE = 0.5
"""The part of a log's lines from which a prefix is that of every line."""
_WORD = r"INTERNAL[_ ]ERROR|ERROR|WARNING|WARN|INFO|VERBOSE|DEBUG|TRACE|FATAL|CRITICAL"
_LETTERS = {
    "INTERNAL_ERROR": "F",
    "FATAL": "F",
    "CRITICAL": "F",
    "ERROR": "E",
    "WARN": "W",
    "WARNING": "W",
    "INFO": "I",
}
_LIBRARY = r"(?:TRT|TensorRT|TRT-LLM|TensorRT-LLM|Torch-TensorRT)"
_START = re.compile(
    rf"^(?:{STAMP})?(?:\[[FEWIV]\]|\[{_LIBRARY})|^&&&& "
    r"|^(?:\S{0,200}/)?trtexec: |^Cuda failure|^Cannot find (?:any|device)"
)
_OTHERS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"^(?P<stamp>{STAMP})?\[{_LIBRARY}\][ :]{{0,8}}\[?(?P<severity>{_WORD}|[FEWIV](?=\]))\]?:? {{0,8}}(?P<text>.*)$",
        rf"^\[?(?P<severity>{_WORD})\]?:? ?\[{_LIBRARY}[^\]]{{0,80}}\](?::| -)? {{0,8}}(?P<text>.*)$",
        rf"^(?P<severity>{_WORD}):[\w.]{{1,80}} \[[^\]]{{0,40}}TensorRT[^\]]{{0,40}}\]:(?P<text>.*)$",
        r"^\d:\d\d:\d\d\.\d{1,9} {1,8}\d{1,9} {1,8}0x[0-9a-f]{1,16} {1,8}"
        rf"(?P<severity>{_WORD}) {{1,24}}nvinfer\S{{0,40}} {{1,8}}[^\s<]{{1,200}}:(?:<[^>]{{0,80}}>)? ?"
        r"(?:NvDsInferContext\[UID \d{1,9}\]: ?)?(?:\w{1,20} (?:from|in) \S{1,200} <\S{1,200}> \[UID = \d{1,9}\]: )?"
        r"(?P<text>.*)$",
        r"^(?P<severity>[EWIF])\d{4} \d\d:\d\d:\d\d\.\d{1,9} {1,8}\d{1,9} [\w./-]{1,200}:\d{1,6}\] \"?(?P<text>.*?)\"?$",
        rf"^(?:{_TIME} )?\[(?P<severity>[EWIVF]):onnxruntime:[^\]]{{0,200}}\] (?:{_TIME[:-3]} {{1,8}}(?:{_WORD})\] )?"
        r"(?P<text>.*)$",
        rf"^.{{0,200}}?\bTRT (?P<severity>{_WORD}): (?P<text>.*)$",
    )
)
"""Messages of TensorRT as other programs print them."""
_ANY_LOGGER = re.compile(
    rf"^(?:{_TIME} {{1,4}}(?:- )?)?(?:\[[\w.-]{{1,40}}\] |[\w.-]{{1,40}} - )?\[?(?P<severity>{_WORD})\]?"
    r"(?: \[[^\]]{0,80}\])?(?::| -)? {1,8}(?:[A-Z]\w{1,20}: )?(?P<text>.*)$",
    re.IGNORECASE,
)
"""Messages of any program, which are TensorRT's where they are known failures."""
_SIGNS = re.compile(r"Error Code:? \d|\b\w{1,80}\.cpp:|\bTensorRT\b|\bCuda Runtime\b")
_PLAIN_LIBRARY = re.compile(r"^\[TRT\] {1,8}(?P<text>[^\[].*)$")
_JSON = ("log", "message", "msg", "textPayload")


def normalise(lines: Sequence[str]) -> tuple[list[str], bool]:
    """The lines as trtexec would write them, and whether messages of TensorRT were found that another program printed."""
    plain = [_COLOUR.sub("", line).lstrip("\ufeff").rstrip("\r") for line in _from_json(lines)]
    plain = [_recognised(line) for line in _unwrap(_without_prefixes(plain))]
    own = any(line.startswith("&&&& ") for line in plain)
    found, other = [], False
    for line in plain:
        made = _as_trtexec(line, known_only=own)
        other = other or made is not None
        found.append(line if made is None else made)
    return found, other and not own


def _from_json(lines: Sequence[str]) -> list[str]:
    """The lines within lines of JSON, as container runtimes and collectors store them."""
    if sum(line.lstrip().startswith("{") for line in lines) < _SHARE * len(lines):
        return list(lines)
    found: list[str] = []
    for line in lines:
        try:
            held = json.loads(line) if len(line) < 1 << 20 else None
        except (ValueError, RecursionError):
            held = None
        text = (
            next((held[name] for name in _JSON if isinstance(held.get(name), str)), None)
            if isinstance(held, dict)
            else None
        )
        found += [line] if text is None else text.splitlines() or [""]
    return found


def _without_prefixes(lines: list[str]) -> list[str]:
    """Without what stands before most lines, one prefix after the other."""
    count = sum(bool(line.strip()) for line in lines)
    for _ in range(4):
        for prefix in (*_PREFIXES, *_LEVELS):
            matched = sum(prefix.match(line) is not None and _START.match(line) is None for line in lines)
            if count < 2 or matched <= _SHARE * count:
                continue
            shorter = [line if _START.match(line) else prefix.sub("", line, count=1) for line in lines]
            if prefix not in _LEVELS or any(map(_START.match, shorter)):
                lines = shorter
                break
        else:
            break
    return lines


def _recognised(line: str) -> str:
    """The line without prefixes of its own, if a message stands behind them."""
    rest = line.lstrip(" \t>")
    for _ in range(4):
        if _START.match(rest):
            return rest
        every = (*_PREFIXES, *_LEVELS)
        shorter = next((prefix.sub("", rest, count=1) for prefix in every if prefix.match(rest)), None)
        if shorter is None:
            break
        rest = shorter.lstrip(" \t>")
    return rest if _START.match(rest) else line


def _unwrap(lines: list[str]) -> list[str]:
    """The lines of a terminal of fixed width, whole again."""
    width = max(map(len, lines), default=0)
    if width < 60 or sum(len(line) == width for line in lines) < 3:
        return lines
    whole: list[str] = []
    full = False
    for line in lines:
        if full and line and not _START.match(line):
            whole[-1] += line
        else:
            whole.append(line)
        full = len(line) == width
    return whole


def _as_trtexec(line: str, *, known_only: bool) -> str | None:
    """A message of TensorRT in trtexec's form; None for any other line."""
    for pattern in _OTHERS:
        if match := pattern.match(line):
            word = match["severity"].upper().replace(" ", "_")
            severity = word if len(word) == 1 else _LETTERS.get(word, "V")
            return f"{match.groupdict().get('stamp') or ''}[{severity}] [TRT] {match['text']}"
    if match := _PLAIN_LIBRARY.match(line):
        return f"[I] [TRT] {match['text']}"
    if not known_only and (match := _ANY_LOGGER.match(line)):
        severity = _LETTERS.get(match["severity"].upper().replace(" ", "_"), "V")
        if severity in "EF" and (
            _SIGNS.search(match["text"]) or any(rule.pattern.search(match["text"]) for rule in RULES)
        ):
            return f"[{severity}] [TRT] {match['text']}"
    return None

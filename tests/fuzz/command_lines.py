"""Command lines and environments made from the options that each verb declares, with wrong values and typing mistakes."""

from __future__ import annotations

import importlib
import random
from functools import cache

import click

from fuzz.mutate import hostile_text

_PLACES = {
    "lint": "m.onnx", "convert": "m.onnx", "build": "m.onnx", "cast": "m.onnx", "quantize": "m.onnx", "ranges": "m.onnx",
    "search": "m.onnx", "size": "m.onnx", "bundle": "model_meta.json", "bench": "m.engine.onnx", "profile": "m.engine.onnx",
    "loadtest": "m.engine.onnx",
    "compare": "m.engine.onnx m.onnx", "diff": "m.onnx m.engine.onnx", "infer": "m.engine.onnx", "evaluate": "m.engine.onnx",
    "inspect": "m.engine.onnx", "run": "plan.yaml", "report": "run", "pack": "run",
}  # fmt: skip
_VALUES = (
    "1", "8", "0", "-1", "1.5", "1e9", "1:2:4", "4:2:1", "x:1x4", "x:1x4,2x4,4x4", "x:0x4", "x:1x-1",
    "x:1x99999999999999999999", "m.onnx",
    "m.engine.onnx", "x.npz", "x.png", "run", "2s", "200ms", "1h", "32MiB", "10GiB", "cpu", "cuda:0", "cuda:x",
    "onnxruntime",
    "tensorrt", "trtexec", "fake", "fp16", "int8", "all", "slower:3%", "error:1e-3", "a=b", "intra_op_threads=2",
    "graph_optimization=all",
    "text", "html", "json", "cpu,cuda", "trtexec10", "yolo", "imagenet", "random", "@m.onnx", "none", "a:b:c", "out",
    "out.onnx",
)  # fmt: skip
_RESULTS = ("-o", "--out", "--outdir")
"""Options that name where results go, wherever the caller likes."""
_SLOW = {"doctor": "--help"}
"""What is asked for alone: it looks at the machine for seconds."""


@cache
def _commands() -> dict[str, list[click.Command]]:
    from trt_engine.cli.verbs_table import VERBS, command_module

    found: dict[str, list[click.Command]] = {}
    for verb in VERBS:
        command = importlib.import_module(command_module(verb)).command
        found[verb] = [command, *command.commands.values()] if isinstance(command, click.Group) else [command]
    return found


def command_line(rng: random.Random) -> list[str]:
    """A verb, its file and some of its options; nothing that measures, builds or writes: `--dry-run` where there is one."""
    verb = rng.choice(list(_commands()))
    command = rng.choice(_commands()[verb])
    words = [verb] if command is _commands()[verb][0] else [verb, command.name or ""]
    options = [param for param in command.params if isinstance(param, click.Option)]
    names = {name for param in options for name in param.opts}
    words += ["--dry-run"] if "--dry-run" in names else []
    words += [_SLOW[verb]] if verb in _SLOW else []
    words += ["--offline"] if "--offline" in names else []
    start = len(words)
    if verb in _PLACES and rng.random() < 0.85:
        words += _PLACES[verb].split()
    for param in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2, 3, 5)))):
        name = rng.choice([*param.opts, *param.secondary_opts])
        if name == "--dry-run":
            continue
        words.append(name)
        if not param.is_flag or rng.random() < 0.03:
            words.append(_value(rng, param))
    if rng.random() < 0.25:
        at = rng.randrange(start, len(words) + 1)
        act = rng.randrange(4)
        if act == 0 and at < len(words):
            words[at] = _mistyped(rng, words[at])
        elif act == 1 and at < len(words):
            del words[at]
        elif act == 2:
            words.insert(at, _typed(rng))
        else:
            words.insert(
                at, rng.choice(("-", "--", "--=", "-O", "--no-", "--x=1", "-qv", "-vv", "--json", "--help", "--batch="))
            )
    return [
        "out" if word.startswith(("../", "/")) and before in _RESULTS else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _value(rng: random.Random, param: click.Option) -> str:
    if isinstance(param.type, click.Choice) and rng.random() < 0.8:
        return str(rng.choice(list(param.type.choices)))
    return rng.choice(_VALUES) if rng.random() < 0.75 else _typed(rng)


def _mistyped(rng: random.Random, word: str) -> str:
    at = rng.randrange(len(word) + 1)
    return rng.choice(
        (word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word.upper(), word.replace("-", "_"), word + "=1")
    )


def _typed(rng: random.Random) -> str:
    """A text that a program can be given: no NUL, and what is no UTF-8 as Python spells it."""
    return hostile_text(rng).replace("\0", "").replace("\ud800", "\udcff")


_VARIABLES = ("TRT_ENGINE_TRTEXEC", "TRT_ENGINE_STORE", "TRT_ENGINE_NCU", "TRT_ENGINE_TF_PYTHON", "HOME",
"XDG_CACHE_HOME", "LANG",
              "LC_ALL", "COLUMNS", "LINES", "TERM", "NO_COLOR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # fmt: skip
_SETTINGS = ("1", "0", "-1", "2GiB", "1.5MiB", "60s", "1ms", "1e30", "1e999", "nan", "inf", "1" * 400, "x", "", " ",
"0x10", "1_000",
             "９", "1GiBx", "GiB", "-1s", "\x1b[31m", "a\nFORGED_LINE: 1", "\udcff", "99999999999999999999GiB")  # fmt: skip


def environment(rng: random.Random) -> dict[str, str]:
    """Some variables the package reads, with right and wrong values; folders stay inside the input's own."""
    from trt_engine.limits import LIMITS

    made = {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.7:
            made[rng.choice(LIMITS).variable] = rng.choice(_SETTINGS)
        else:
            value = rng.choice(_SETTINGS)
            name = rng.choice(_VARIABLES)
            made[name] = value if name not in ("TRT_ENGINE_STORE", "HOME", "XDG_CACHE_HOME") else f"own/{value or 'x'}"
    return made

"""Translate trtexec options in a command line to ours, by `trtexec_table`; the backend of a GPU build that names none."""

from __future__ import annotations

import functools
import logging
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from trt_engine.command_line.trtexec_table import (
    OPTIONS,
    BackendSetting,
    FileArgument,
    IgnoredOption,
    ProfileShapes,
    RejectedOption,
    RenamedOption,
    SameOption,
    Translation,
    TrtexecOption,
)
from trt_engine.command_line.verb_command import empty_value
from trt_engine.config.parse import parse_shapes
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.errors import TrtEngineError, UsageError

_SHAPES = ("--minShapes", "--optShapes", "--maxShapes")
_POOLS = {
    "tacticsharedmem": "tactic_shared_memory", "dlasram": "dla_sram", "dlalocaldram": "dla_local_dram",
    "dlaglobaldram": "dla_global_dram",
}  # fmt: skip


@dataclass
class TranslatedArgs:
    """Translated arguments, with notes for the log."""

    args: list[str] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Log level and text."""
    names: set[str] = field(default_factory=set)
    """Parameters set by trtexec options."""
    files: list[str] = field(default_factory=list)
    """Options that named the verb's file argument."""


def find_option(name: str) -> TrtexecOption | None:
    """The trtexec option in camel or kebab case: `--useCudaGraph`, `--use-cuda-graph`.

    Not `--warm-up`: only `--warmUp=N` is in milliseconds.
    """
    return OPTIONS.get(name) or _kebab_spellings().get(name)


@functools.cache
def _kebab_spellings() -> dict[str, TrtexecOption]:
    kebab = {re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).lower(): option for name, option in OPTIONS.items()}
    return {name: option for name, option in kebab.items() if name != "--warm-up" and name.startswith("--")}


def translate_args(verb: str, params: Sequence[click.Parameter], args: Sequence[str]) -> TranslatedArgs:
    """Translate trtexec options. Raises `UsageError` with a hint for those without equivalent."""
    own = {name: item for item in params for name in (*item.opts, *item.secondary_opts)}
    args, chosen = add_gpu(verb, own, args)
    made = _translate(verb, params, args, own)
    if chosen is not None:
        made.notes.insert(0, (logging.INFO, chosen))
        made.names |= {"backend", "device", "precision"}
    return made


def _translate(
    verb: str, params: Sequence[click.Parameter], args: Sequence[str], own: dict[str, click.Parameter]
) -> TranslatedArgs:
    if not any(_is_trtexec(arg, own) for arg in args):
        return TranslatedArgs(list(args))
    return _Translator(verb, params, list(args), own).run()


def _is_trtexec(arg: str, own: dict[str, click.Parameter]) -> bool:
    name = arg.partition("=")[0]
    return name.startswith("-") and (name not in own or name == "--profile") and find_option(name) is not None


class _Translator:
    def __init__(
        self, verb: str, params: Sequence[click.Parameter], args: list[str], own: dict[str, click.Parameter]
    ) -> None:
        self.verb, self.params, self.args, self.own = verb, params, args, own
        self.names = {item.name for item in params}
        self.result = TranslatedArgs()
        self.profiles: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {}
        """`--minShapes`, `--optShapes`, `--maxShapes` by `--profile=N`."""
        self.shapes_typed: list[str] = []
        self.group = "0"
        self.set_by: dict[str, tuple[str, str]] = {}
        """Parameter -> (trtexec option, our arguments)."""
        self.plugins: list[str] = []
        self.refused: dict[str, str] = {}
        """trtexec's option -> what there is instead."""

    def run(self) -> TranslatedArgs:
        rest = iter(self.args)
        typed = set()
        for arg in rest:
            if arg == "--":
                self.result.args += [arg, *rest]
                break
            name, equals, value = arg.partition("=")
            if self._is_profile_number(name, value if equals else None, rest):
                continue
            option = find_option(name) if name.startswith("-") else None
            if option is not None and name not in self.own:
                self._translate_option(option, value if equals else None, rest)
                continue
            self.result.args.append(f"{name}{equals}{value}")
            if (item := self.own.get(name)) is not None:
                typed.add(item.name)
            is_flag = any(getattr(item, name, False) for name in ("is_flag", "count"))
            if item is not None and not equals and not is_flag and (following := next(rest, None)) is not None:
                self.result.args.append(following)
        if self.refused:
            raise self._refusal()
        self._join_shapes()
        if self.plugins:
            self.result.args += ["-O", f"plugins={','.join(dict.fromkeys(self.plugins))}"]
        for name, (spelling, _) in self.set_by.items():
            if name in typed and spelling != "-O":
                raise UsageError(
                    f"`{self._flag(name)}` and `{spelling}` are the same option", hint=f"leave out `{spelling}`"
                )
        return self.result

    def _is_profile_number(self, name: str, value: str | None, rest: Iterator[str]) -> bool:
        """trtexec's `--profile=1`: the shapes after it belong to profile 1."""
        if name != "--profile" or value is None or not value.isdecimal() or "profiles" not in self.names:
            return False
        self.group = value
        return True

    def _flag(self, name: str) -> str:
        item = next(item for item in self.params if item.name == name)
        return next((flag for flag in item.opts if flag.startswith("--")), item.opts[0])

    def _translate_option(self, option: TrtexecOption, value: str | None, rest: Iterator[str]) -> None:
        meaning = option.for_verb(self.verb)
        if isinstance(meaning, RejectedOption) and not (option.measuring_only and self.verb == "build"):
            self.refused[option.spelling] = meaning.hint
            if option.takes_value and value is None:
                next(rest, None)
            return
        if option.takes_value and value is None:
            value = next(rest, None)
            if value is None:
                raise UsageError(
                    f"option `{option.spelling}` requires an argument",
                    hint=f"`{option.spelling}=VALUE`, as trtexec takes it",
                )
        if value == "":
            raise empty_value(option.spelling)
        if not option.takes_value and value is not None:
            raise UsageError(f"`{option.spelling}` takes no value, got `{value}`", hint=f"`{option.spelling}` alone")
        shown = option.spelling if value is None else f"{option.spelling}={value}"
        if option.measuring_only and self.verb == "build":
            self._note(
                logging.WARNING,
                f"`{shown}` is ignored: `build` does not measure; {_no_equivalent_hint(option, meaning, value)}",
            )
            return
        match meaning:
            case IgnoredOption(why):
                self._note(logging.WARNING if self.verb != "build" else logging.INFO, f"`{option.spelling}`: {why}")
            case FileArgument():
                self._name_file(option, value or "")
            case ProfileShapes() if "profiles" in self.names:
                self._add_shapes(option, value or "", shown)
            case BackendSetting() if "options" in self.names:
                self._set(meaning, option, value, shown)
            case RenamedOption() if (item := self.own.get(meaning.flag)) is not None:
                self._apply(meaning, item, option, value, shown)
            case _:
                self.refused[option.spelling] = _no_equivalent_hint(option, meaning, value)

    def _refusal(self) -> UsageError:
        """All options that are refused, each with what there is instead."""
        hints = self.refused if len(self.refused) > 1 else {"": next(iter(self.refused.values()))}
        return UsageError(
            f"`trt-engine {self.verb}` does not support trtexec's {', '.join(f'`{one}`' for one in self.refused)}",
            hint="; ".join(f"`{one}`: {hint}" if one else hint for one, hint in hints.items()),
        )

    def _note(self, level: int, text: str) -> None:
        if (level, text) not in self.result.notes:
            self.result.notes.append((level, text))

    def _log_replacement(self, shown: str, ours: str) -> None:
        self._note(logging.INFO, f"`{shown}` is translated from trtexec: `{ours}`")

    def _name_file(self, option: TrtexecOption, value: str) -> None:
        if not any(isinstance(item, click.Argument) for item in self.params):
            self.refused[option.spelling] = f"it takes no file: `trt-engine {self.verb} --help`"
            return
        self.result.args.append(value)
        self.result.files.append(option.spelling)

    def _apply(
        self, meaning: RenamedOption, item: click.Parameter, option: TrtexecOption, value: str | None, shown: str
    ) -> None:
        if meaning.parse == "pools":
            self._pools(value or "", item, shown)
            return
        ours = meaning.value if value is None else _VALUE_PARSERS[meaning.parse](value) if meaning.parse else value
        words = [meaning.flag] if ours is None else [meaning.flag, ours]
        self._add(item.name or "", option.spelling, words, shown)

    def _add(self, name: str, spelling: str, words: list[str], shown: str) -> None:
        self._claim(name, spelling, shlex.join(words))
        if name in self._ignored_settings():
            self._note(logging.WARNING, f"`{shown}` is ignored: {self._backend()} has no such setting")
            return
        self.result.names.add(name)
        self.result.args += words
        self._log_replacement(shown, shlex.join(words))

    def _claim(self, name: str, spelling: str, ours: str) -> None:
        """Note what sets a parameter. Raises `UsageError` when another option sets it differently."""
        if name in self.set_by and self.set_by[name][1] != ours:
            raise UsageError(
                f"`{self.set_by[name][0]}` and `{spelling}` contradict each other", hint="leave one of them out"
            )
        self.set_by[name] = (spelling, ours)

    def _set(self, meaning: BackendSetting, option: TrtexecOption, value: str | None, shown: str) -> None:
        ours = meaning.value if value is None else value
        assert ours is not None
        if meaning.values and (known := meaning.values.get(ours.lower())) is not None:
            ours = known
        elif meaning.values and not meaning.parse:
            raise UsageError(
                f"`{option.spelling}` cannot be `{ours}`",
                hint="expected one of " + ", ".join(f"`{one}`" for one in meaning.values),
            )
        elif meaning.parse:
            ours = _VALUE_PARSERS[meaning.parse](ours)
        if meaning.name not in self._settings():
            self._note(
                logging.WARNING,
                f"`{shown}` is ignored: {self._backend()} has no `-O {meaning.name}`; `--backend tensorrt` and `--backend "
                "trtexec` have it",
            )
            return
        words = [f"{meaning.name}={ours}", *([meaning.also] if meaning.also else [])]
        if meaning.name == "plugins":
            self.plugins.append(ours)
            words = words[1:]
        for word in words:
            name = f"-O {word.partition('=')[0]}"
            if name not in self.set_by:
                self.result.args += ["-O", word]
            self._claim(name, option.spelling, word)
        self._log_replacement(shown, f"-O {meaning.name}={ours}")

    def _pools(self, text: str, item: click.Parameter, shown: str) -> None:
        """Split `--memPoolSize=workspace:1024,dlaSRAM:1` into settings; sizes without unit are MiB."""
        for part in text.split(","):
            pool, colon, size = part.partition(":")
            if pool.lower() == "workspace" and colon:
                self._add(item.name or "", "--memPoolSize", ["--workspace", size], shown)
            elif pool.lower() in _POOLS and colon and "options" in self.names:
                self._set(BackendSetting(_POOLS[pool.lower()]), OPTIONS["--memPoolSize"], size, f"--memPoolSize={part}")
            else:
                raise UsageError(
                    f"the memory pool `{pool}` cannot be set here, expected `workspace` or one of "
                    "`tacticSharedMem`, `dlaSRAM`, `dlaLocalDRAM`, `dlaGlobalDRAM`",
                    hint="use `--workspace 32GiB`",
                )

    # ---------------------------------------------------------------------------- shapes

    def _add_shapes(self, option: TrtexecOption, value: str, shown: str) -> None:
        group = self.profiles.setdefault(self.group, {})
        group[option.spelling] = group.get(option.spelling, {}) | parse_shapes(value)
        self.shapes_typed.append(shown)

    def _join_shapes(self) -> None:
        for group in self.profiles.values():
            spelling = next(iter(group))
            self.set_by["profiles"] = (spelling, "")
            self.result.names.add("profiles")
            words = ["--profile", str(_join_profile(group))]
            self.result.args += words
            self._log_replacement(" ".join(self.shapes_typed), shlex.join(words))
            self.shapes_typed = []

    # ---------------------------------------------------------------------------- backends

    def _backend(self) -> str:
        """The backend on the command line, else that of the engine, else the default."""
        from trt_engine.config.build import BuildConfig
        from trt_engine.engine import Engine, is_onnx_model

        for index, arg in enumerate(self.args):
            name, equals, value = arg.partition("=")
            if name in ("-b", "--backend"):
                return value if equals else next(iter(self.args[index + 1 :]), "")
        path = first_file([*self.args, *self.result.args])
        if path is None or self.verb == "build" or is_onnx_model(path):
            return BuildConfig().backend
        try:
            return Engine.open(path).passport.backend
        except TrtEngineError:
            return "tensorrt"  # a bare plan; the verb reports errors

    def _settings(self) -> set[str]:
        """Valid `-O` names of this backend."""
        import importlib

        from trt_engine.backend import list_backends
        from trt_engine.config.settings import settings

        backend_spec = list_backends().get(self._backend())
        if backend_spec is None or backend_spec.options is None:
            return set()
        module, _, name = backend_spec.options.partition(":")
        return {item.name for item in settings(getattr(importlib.import_module(module), name))}

    def _ignored_settings(self) -> tuple[str, ...]:
        from trt_engine.backend import list_backends

        backend_spec = list_backends().get(self._backend())
        return () if backend_spec is None else backend_spec.ignored_settings


def first_file(args: Sequence[str]) -> Path | None:
    """The first argument that is a file, or names one as trtexec does."""
    texts = (arg.partition("=")[2] if arg.startswith(("--onnx=", "--loadEngine=")) else arg for arg in args)
    return next((Path(text) for text in texts if not text.startswith("-") and _is_file(text)), None)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _no_equivalent_hint(option: TrtexecOption, meaning: Translation, value: str | None) -> str:
    """Hint for a verb without an equivalent option."""
    home = "bench ENGINE" if option.measuring_only else "build MODEL"
    meaning = option.for_verb(home.split()[0]) if not isinstance(meaning, RejectedOption) else meaning
    match meaning:
        case RejectedOption(text) | IgnoredOption(text):
            return text
        case RenamedOption(flag, reader, ours):
            ours = ours if value is None else _VALUE_PARSERS[reader](value) if reader and reader != "pools" else value
            return f"`trt-engine {home} {flag}{f' {shlex.quote(ours)}' if ours else ''}`"
        case BackendSetting(name, ours):
            return f"`trt-engine {home} --backend tensorrt -O {name}={ours or value}`"
        case ProfileShapes():
            return "`trt-engine build MODEL --profile images:1x3x640x640,8x3x640x640,64x3x640x640`"
        case FileArgument() | SameOption():
            typed = f" {option.spelling} {shlex.quote(value)}" if isinstance(meaning, SameOption) and value else ""
            return f"`trt-engine {home}{typed}`"


def _join_profile(spelled: dict[str, dict[str, tuple[int, ...]]]) -> Profile:
    """The profile of `--minShapes`, `--optShapes`, `--maxShapes`: all three, or `--optShapes` alone; opt defaults to max."""
    low, best, high = (spelled.get(flag, {}) for flag in _SHAPES)
    ranges = {}
    for name in {**low, **best, **high}:
        lacking = [flag for flag in _SHAPES if name not in spelled.get(flag, {})]
        if lacking not in ([], ["--optShapes"], ["--minShapes", "--maxShapes"]):
            raise UsageError(
                f"input `{name}` has no {' and no '.join(f'`{flag}`' for flag in lacking)}",
                hint="give all three, or `--optShapes` alone",
            )
        middle = best[name] if name in best else high[name]
        ranges[name] = ShapeRange(low.get(name, middle), middle, high.get(name, middle))
    return Profile(ranges)


# ------------------------------------------------------------------------------------------------ values


def _milliseconds(text: str) -> str:
    """`--warmUp=200` and `--idleTime=5` are in ms."""
    try:
        return f"{float(text):g}ms"
    except ValueError:
        raise UsageError(
            f"cannot read `{text}`, expected trtexec's milliseconds", hint="use `--warmup 200ms`"
        ) from None


def _nbytes(text: str) -> str:
    return f"{text}B" if text.isdecimal() else text


def _previews(text: str) -> str:
    from trt_engine.backends.trtexec.command_line import PREVIEWS

    ours = {theirs: name for name, theirs in PREVIEWS.items()}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return ",".join(
        (part[0] if part[0] in "+-" else "+") + ours.get(part.lstrip("+-"), part.lstrip("+-")) for part in parts
    )


_VALUE_PARSERS: dict[str, Callable[[str], str]] = {
    "milliseconds": _milliseconds, "nbytes": _nbytes, "previews": _previews, "library": str,
}  # fmt: skip


_NAMED = ("--backend", "-b", "--providers", "--gpus", "--each-gpu", "--help", "-h")
_ON_CPU = ("fp32", "int8", "int4")
"""Precisions that a CPU computes in as well."""
_PLANS = (".engine", ".plan", ".trt")
_OUT = ("-o", "--out", "--saveEngine", "--save-engine")


def add_gpu(verb: str, own: Mapping[str, click.Parameter], args: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments with the flags of a GPU build, and a note; as they are where none is requested or possible.

    Requested is a build for a GPU by an option in trtexec's spelling, by a precision that a CPU has no kernels for, and by
    the name of a TensorRT plan for the engine. A backend, providers and `--device cpu` are choices of their own.
    """
    named = any(arg.partition("=")[0] in _NAMED or re.match("-b[^-]", arg) for arg in args)
    if named or not {"--backend", "--device"} <= own.keys():
        return list(args), None
    reason, precision = _request(verb, own, args)
    if reason is None or _opens_engine(verb, args):
        return list(args), None
    device = next(iter(_values(args, ("--device",))), None)
    if device is not None and (device.startswith("cpu") or reason.startswith(("--precision", "-o"))):
        return list(args), None
    from trt_engine.backend import gpu_backend, gpu_flags

    suffix = next((Path(value).suffix for value in _values(args, _OUT)), "")
    suffix = ".engine" if reason.startswith("-o") else suffix if suffix in (".onnx", ".pt2") else ""
    found = gpu_backend(precision, suffix=suffix)
    if found is None:
        return list(args), None
    flags = gpu_flags(found) if device is None else f"--backend {found.name}"
    what = "--device cpu" if device is None else "--backend"
    return [*flags.split(), *args], f"`{reason}` is for a GPU: `{flags}` is added; `{what}` chooses otherwise"


def _request(verb: str, own: Mapping[str, click.Parameter], args: Sequence[str]) -> tuple[str | None, str | None]:
    """What of the arguments requests a GPU, and the precision that is requested."""
    precision = next(iter(_values(args, ("--precision",))), None)
    reason = f"--precision {precision}" if precision not in (None, *_ON_CPU) else None
    for arg in args:
        name = arg.partition("=")[0]
        option = find_option(name) if name.startswith("-") and name not in own else None
        if option is None or option.measuring_only:
            continue
        meaning = option.for_verb(verb)
        reason = reason or name
        if getattr(meaning, "flag", None) == "--precision":
            reason, precision = name, getattr(meaning, "value", None)
    if reason is None and verb == "build":
        reason = next((f"-o {value}" for value in _values(args, ("-o", "--out")) if Path(value).suffix in _PLANS), None)
    return reason, precision


def _values(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """The values of these options: `--device=0`, `--device 0`."""
    found = []
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            found.append(value if equals else next(iter(args[index + 1 :]), ""))
    return found


def _opens_engine(verb: str, args: Sequence[str]) -> bool:
    """Whether the file of the command is an engine, which has a backend."""
    from trt_engine.engine import is_onnx_model

    path = first_file(args) if verb not in ("build", "bundle") else None
    return path is not None and not is_onnx_model(path)

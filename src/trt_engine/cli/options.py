"""Options from settings: what every verb has, and the flags of a config class, read from its `opt` lines.

The spellings of trtexec for the same settings (`--warmUp=200`, `--useCudaGraph`, `--minShapes`) come with them, hidden, and
what was understood is said.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from trt_engine.cli.output import Talk
from trt_engine.config import (
    PREPROCESS_PRESETS,
    BenchConfig,
    BuildConfig,
    Profile,
    RuntimeConfig,
    Setting,
    ShapeRange,
    from_values,
    parse_shapes,
    settings,
)
from trt_engine.errors import UsageError

__all__ = [
    "FILE",
    "common",
    "config_from",
    "dry_run_option",
    "engine_configs",
    "engine_options",
    "measuring",
    "of",
    "out_is_folder",
    "out_option",
    "preprocess_option",
    "spelled_command",
    "yes_option",
]

F = TypeVar("F", bound=Callable[..., Any])
_LONG_WARMUP_S = 30.0
"""Above this a number without a unit was more likely meant as trtexec's milliseconds."""


def spelled_command() -> str:
    """The command line as it was typed, to be repeated by paste."""
    return shlex.join(["trt-engine", *sys.argv[1:]])


def common(function: F) -> F:
    """`--json`, `-q`, `-v` on a verb; the verb gets them as its first argument, a `Talk`, already started."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="Only warnings on stderr.")
    @click.option("-v", "--verbose", count=True, help="More on stderr; -vv with stack traces.")
    @functools.wraps(function)
    def verb(*args: Any, as_json: bool, quiet: bool, verbose: int, **kwargs: Any) -> Any:
        talk = Talk(json=as_json, verbosity=-1 if quiet else verbose)
        talk.start()
        for said in click.get_current_context().meta.pop(_SAID, ()):
            _say(said)
        return function(talk, *args, **kwargs)

    return verb  # type: ignore[return-value]


def _say(text: str) -> None:
    import logging

    logging.getLogger(__name__).info("%s", text)


FILE = click.Path(path_type=Path, readable=False)
"""A file to read: whether it can be is said by whoever opens it, in our words."""

_OUTDIR = "trt_engine.outdir"
"""In the context: what `--outdir` named."""
_FOLDER = "trt_engine.out_is_folder"


def out_option(help: str, *, instead: str = "name a file or a folder, as `-o results`") -> Callable[[F], F]:
    """`-o/--out` (and its alias `--outdir`, always a folder): where the verb writes; `instead` answers `-o -`."""

    def as_folder(ctx: click.Context, _: click.Parameter, typed: str | None) -> None:
        if typed is not None:
            ctx.meta[_OUTDIR] = typed

    def read(ctx: click.Context, _: click.Parameter, typed: str | None) -> Path | None:
        folder = ctx.meta.pop(_OUTDIR, None)
        if typed is not None and folder is not None:
            raise UsageError("`--out` and `--outdir` say the same thing twice", hint="leave one of them out")
        named = typed if folder is None else folder
        if named is None:
            return None
        if named in ("", "-") or re.fullmatch(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+", named):
            raise UsageError(f"`-o {shlex.quote(named)}` names no file or folder", hint=instead)
        ctx.meta[_FOLDER] = folder is not None or named.endswith("/")
        return Path(named)

    def decorate(function: F) -> F:
        function = click.option("-o", "--out", "out", metavar="PATH", help=help, callback=read)(function)
        return click.option(
            "--outdir", "out_folder", metavar="DIR", help="As -o, and always a folder.", is_eager=True,
            expose_value=False, callback=as_folder,
        )(function)  # fmt: skip

    return decorate


def out_is_folder() -> bool:
    """Whether what was typed for the output can only be a folder: `--outdir`, or a slash at its end."""
    ctx = click.get_current_context(silent=True)
    return bool(ctx and ctx.meta.get(_FOLDER))


def preprocess_option(
    help: str = "How pictures become inputs, instead of what the model declares.",
) -> Callable[[F], F]:
    """`--preprocess`: a JSON file, or a preset by name."""
    return click.option("--preprocess", metavar="|".join(("FILE", *PREPROCESS_PRESETS)), help=help)


yes_option = click.option("--yes", is_flag=True, help="Overwrite what is there.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")


def of(
    config: type,
    *,
    leave_out: Sequence[str] = (),
    defaults: dict[str, Any] | None = None,
    helps: dict[str, str] | None = None,
) -> Callable[[F], F]:
    """The options of a config class; the verb gets their raw values by setting name, None where not given.

    `defaults` and `helps` are shown in the help instead of the class's own; the verb sees to it that they hold.
    """

    def decorate(function: F) -> F:
        for item in reversed(settings(config)):
            if item.name in leave_out or not item.flags:
                continue
            for also in _TRTEXEC.get(item.name, ()):
                function = also.option(item.name)(function)
            told = dataclasses.replace(item, help=(helps or {}).get(item.name, item.help))
            function = _option(told, (defaults or {}).get(item.name, item.default))(function)
        return function

    return decorate


def engine_options(*, leave_out: Sequence[str] = ()) -> Callable[[F], F]:
    """The options of running an ENGINE, and of building a MODEL's first; `leave_out` is of `BuildConfig`.

    What both have (the device, its providers) is typed once; `engine_configs` gives it to both.
    """

    def decorate(function: F) -> F:
        function = of(BuildConfig, leave_out=(*_names(RuntimeConfig), *leave_out))(function)
        return of(RuntimeConfig, leave_out=("contexts", "streams"))(function)

    return decorate


def measuring(*, leave_out: Sequence[str] = (), helps: dict[str, str] | None = None) -> Callable[[F], F]:
    """The options of measuring an ENGINE or a MODEL. `leave_out` and `helps` are of `BenchConfig`."""

    def decorate(function: F) -> F:
        function = engine_options(leave_out=(*_names(BenchConfig), "parity", "parity_rtol"))(function)
        return of(BenchConfig, leave_out=leave_out, helps=helps)(function)

    return decorate


def _names(config: type) -> list[str]:
    return [item.name for item in settings(config)]


def _option(item: Setting, default: Any) -> Callable[[F], F]:
    first_word = item.help.partition(" ")[0]
    text = item.help[:1].upper() + item.help[1:] if first_word.isalpha() else item.help
    shown = _shown(default, item.name)
    if shown and "(default" not in text:
        text += f" [{shown}]"
    if item.is_flag or "/" in item.flags[0]:
        first = item.flags[0]
        both = f"{first}/--no-{first[2:]}" if default is True and "/" not in first else first
        return click.option(both, *item.flags[1:], item.name, is_flag=True, default=None, help=f"{text}.")
    # a parser reads its own text, in `config_from`; click reads choices and plain numbers
    plain = {"int": click.INT, "float": click.FLOAT}
    kind = (
        click.Choice(item.choices)
        if item.choices
        else click.STRING
        if item.parse
        else plain.get(item.type, click.STRING)
    )
    metavar = item.metavar or {click.INT: "N", click.FLOAT: "X"}.get(kind) or (None if item.choices else "TEXT")
    flags = [*item.flags, item.name]
    names = item.multiple and item.parse is str
    if names:
        metavar = f"{metavar}|@FILE"
    return click.option(
        *flags, type=kind, default=None, multiple=item.multiple, metavar=metavar, help=f"{text}.",
        callback=_from_files if names else None,
    )  # fmt: skip


def _from_files(ctx: click.Context, param: click.Parameter, typed: tuple[str, ...]) -> tuple[str, ...]:
    """`@FILE` among names stands for the names in it, one a line."""
    names: list[str] = []
    for item in typed or ():
        if not item.startswith("@"):
            names.append(item)
            continue
        try:
            lines = Path(item[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read names from `{item[1:]}`: {error}", hint="one name a line") from error
        names += [line.strip() for line in lines if line.strip()]
    return tuple(names)


def _shown(default: Any, name: str) -> str:
    """A default as it would be typed, with the unit the setting's name carries."""
    if default is None or isinstance(default, bool) or default in ((), {}, ""):
        return ""
    if isinstance(default, tuple):
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
    unit = next((word for end, word in (("_ms", "ms"), ("_mib", "MiB"), ("_s", "s")) if name.endswith(end)), "")
    return f"{default:g}{unit}" if isinstance(default, float) else f"{default}{unit}"


def config_from(config: type[Any], values: dict[str, Any]) -> Any:
    """The config of what was typed; what was not typed keeps its default. Takes its settings out of `values`."""
    typed = {name: values.pop(name) for name in _names(config) if name in values}
    given = {name: value for name, value in typed.items() if value is not None and value != ()}
    ctx = click.get_current_context(silent=True)
    foreign: dict[str, tuple[str, Any]] = ctx.meta.get(_GIVEN, {}) if ctx else {}
    for name, (spelling, value) in foreign.items():
        if name not in typed:
            continue
        if name in given:
            flag = next(item.flags[0] for item in settings(config) if item.name == name)
            raise UsageError(f"`{flag}` and `{spelling}` say the same thing twice", hint=f"leave `{spelling}` out")
        given[name] = _joined(value) if name == "profiles" else value
    made = from_values(config, given)
    if (typed_s := str(given.get("warmup_s", ""))).replace(".", "", 1).isdecimal() and float(typed_s) > _LONG_WARMUP_S:
        import logging  # not where `--help` is printed

        logging.getLogger(__name__).warning(
            "`--warmup %s` is %s seconds; trtexec's `--warmUp=%s` is `--warmup %sms`", *(typed_s,) * 4
        )
    return made


def engine_configs(values: dict[str, Any]) -> tuple[RuntimeConfig, BuildConfig, dict[str, Any]]:
    """How to run an engine and how to build a model's, and by name what was typed that an engine has to fit: `backend`,
    `precision` (not in trtexec's spelling, which says so of engines too).

    What both have was typed once and goes to both. Takes the settings of running out of `values`.
    """
    of_both = dict(values)
    named = {name: values[name] for name in ("backend", "precision") if values.get(name) is not None}
    runtime: RuntimeConfig = config_from(RuntimeConfig, values)
    build: BuildConfig = config_from(BuildConfig, of_both)
    if build.calibrate is not None:
        from trt_engine.api.preparing import check_data

        check_data(build.calibrate, build.preprocess)  # here, so that every verb's `--dry-run` finds it too
    return runtime, build, named


# ------------------------------------------------------------------------------------------------ trtexec's spellings

_GIVEN = "trt_engine.given"
"""In the context: setting name -> (trtexec's spelling, value)."""
_SAID = "trt_engine.said"


class _Also:
    """One spelling of trtexec: an option with a value that `read` turns into ours, or a switch that means `value`."""

    def __init__(self, spelling: str, read: Callable[[str], Any] | None = None, value: Any = None) -> None:
        self.spelling, self.read, self.value = spelling, read, value

    def option(self, setting: str) -> Callable[[F], F]:
        def told(ctx: click.Context, _: click.Parameter, typed: Any) -> None:
            if typed is None or typed is False:
                return
            value = self.read(typed) if self.read else self.value
            given = ctx.meta.setdefault(_GIVEN, {})
            if setting == "profiles":
                value = given.get(setting, ("", {}))[1] | {self.spelling: value}
            elif setting in given:
                raise UsageError(
                    f"`{given[setting][0]}` and `{self.spelling}` contradict each other", hint="leave one of them out"
                )
            given[setting] = (self.spelling, value)
            shown = f"{self.spelling}={typed}" if self.read else self.spelling
            ctx.meta.setdefault(_SAID, []).append(f"`{shown}` is read as trtexec's: {setting} = {_told(value)}")

        # in kebab case too, but not `--warm-up`: exactly `--warmUp=N` counts milliseconds
        kebab = re.sub(r"([A-Z])", r"-\1", self.spelling).lower()
        spellings = {self.spelling: None, kebab: None} if self.spelling != "--warmUp" else {self.spelling: None}
        kind: dict[str, Any] = {"type": click.STRING} if self.read else {"is_flag": True}
        name = f"trtexec_{self.spelling.strip('-')}".lower()
        return click.option(*spellings, name, **kind, default=None, hidden=True, expose_value=False, callback=told)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{which[2:5]} {', '.join(map(str, shapes.items()))}" for which, shapes in value.items())
    return str(value)


def _milliseconds(text: str) -> str:
    """`--warmUp=200` and `--idleTime=5`: trtexec counts these in ms."""
    try:
        return f"{float(text):g}ms"
    except ValueError:
        raise UsageError(
            f"cannot read `{text}`, expected trtexec's milliseconds", hint="`--warmup 200ms` is ours"
        ) from None


def _workspace(text: str) -> str:
    """`--memPoolSize=workspace:32768`: the pool a builder's scratch memory comes from."""
    pool, colon, size = text.partition(":")
    if pool != "workspace" or not colon:
        raise UsageError(
            f"the memory pool `{pool}` cannot be set here, expected `workspace`", hint="`--workspace 32GiB` is ours"
        )
    return size


_SHAPES = ("--minShapes", "--optShapes", "--maxShapes")


def _joined(spelled: dict[str, dict[str, tuple[int, ...]]]) -> Profile:
    """The profile of `--minShapes`, `--optShapes`, `--maxShapes`: all three, or one size as `--optShapes` alone.

    Between min and max the usual size is max.
    """
    low, best, high = (spelled.get(flag, {}) for flag in _SHAPES)
    ranges = {}
    for name in {**low, **best, **high}:
        lacking = [flag for flag in _SHAPES if name not in spelled.get(flag, {})]
        if lacking not in ([], ["--optShapes"], ["--minShapes", "--maxShapes"]):
            raise UsageError(
                f"input `{name}` has no {' and no '.join(f'`{flag}`' for flag in lacking)}",
                hint="give all three; one size alone is `--optShapes`",
            )
        middle = best[name] if name in best else high[name]
        ranges[name] = ShapeRange(low.get(name, middle), middle, high.get(name, middle))
    return Profile(ranges)


_TRTEXEC: dict[str, tuple[_Also, ...]] = {
    "warmup_s": (_Also("--warmUp", read=_milliseconds),),
    "idle_s": (_Also("--idleTime", read=_milliseconds),),
    "transfers": (_Also("--noDataTransfers", value=False), _Also("--includeDataTransfers", value=True)),
    "graph": (_Also("--useCudaGraph", value=True), _Also("--noCudaGraph", value=False)),
    "spin": (_Also("--useSpinWait", value=True), _Also("--noSpinWait", value=False)),
    "profiles": tuple(_Also(flag, read=parse_shapes) for flag in _SHAPES),
    "workspace_mib": (_Also("--memPoolSize", read=_workspace),),
    "precision": tuple(_Also(f"--{name}", value=name) for name in ("fp16", "bf16", "int8", "fp8", "int4")),
}

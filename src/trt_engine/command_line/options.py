"""Click options: those of every verb, and those of config classes, from their `opt` fields."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from trt_engine.atomic_io import read_bounded
from trt_engine.command_line.output import OutputOptions, begin, print_result
from trt_engine.command_line.output import command_line as command_line
from trt_engine.command_line.verb_command import NOTES, SET_BY_TRTEXEC, Option, SuggestedValues, Verb
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import Setting, from_values, setting_names, settings, take_settings
from trt_engine.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
_LONG_WARMUP_S = 30.0
"""Above this a number without unit is probably in trtexec's milliseconds."""
_output = functools.partial(click.option, cls=Option, group="Output")


def verb(
    name: str | None = None, *, group: click.Group | None = None, dry_run: bool = False, **settings: Any
) -> Callable[[Callable[..., Any]], Verb]:
    """A verb, or one of a group, with `--json`, `-q`, `-v` and with `dry_run` `--dry-run`; it prints the record that the
    function returns, and an int is its exit code."""

    def decorate(function: Callable[..., Any]) -> Verb:
        @functools.wraps(function)
        def call(*args: Any, as_json: bool, quiet: bool, verbose: int, **kwargs: Any) -> Any:
            ctx = click.get_current_context()
            begin(OutputOptions(json=as_json, verbosity=-1 if quiet else verbose), ctx.command_path.split()[:2][-1])
            if notes := ctx.meta.pop(NOTES, ()):
                _log_notes(notes)
            result = function(*args, **kwargs)
            if result is None or isinstance(result, int):
                return result
            print_result(result)
            return 0

        made = click.command(name, cls=Verb, **settings)(call)
        if dry_run:
            made.params.append(_switch("--dry-run", help="Print the plan; write nothing."))
        made.params += [
            _switch("--json", "as_json", help="One JSON document on stdout."),
            _switch("-q", "--quiet", help="Only warnings on stderr."),
            Option(("-v", "--verbose"), count=True, help="More on stderr; -vv with stack traces.", group="Output"),
        ]
        if group is not None:
            group.add_command(made)
        return made

    return decorate


def _switch(*names: str, help: str) -> Option:
    return Option(names, is_flag=True, help=help, group="Output")


def _log_notes(notes: Sequence[tuple[int, str]]) -> None:
    import logging

    for level, text in notes:
        logging.getLogger(__name__).log(level, "%s", text)


FILE = click.Path(path_type=Path, readable=False)
"""An input file; the code that opens it reports errors."""
DEVICE = SuggestedValues("cpu|cuda:N")
_OUTDIR = "trt_engine.outdir"
"""Context key: the value of `--outdir`."""
_FOLDER = "trt_engine.out_is_folder"


def out_option(help: str, *, hint: str = "name a file or a folder, as `-o results`") -> Callable[[F], F]:
    """`-o/--out` and its alias `--outdir`, always a folder; `hint` is the one for `-o -`."""

    def as_folder(ctx: click.Context, _: click.Parameter, typed: str | None) -> None:
        if typed is not None:
            ctx.meta[_OUTDIR] = typed

    def read(ctx: click.Context, _: click.Parameter, typed: str | None) -> Path | None:
        folder = ctx.meta.pop(_OUTDIR, None)
        if typed is not None and folder is not None:
            raise UsageError("`--out` and `--outdir` are the same option", hint="leave out one of them")
        named = typed if folder is None else folder
        if named is None:
            return None
        if named == "-" or re.fullmatch(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+", named):
            raise UsageError(f"`-o {shlex.quote(named)}` is not a file or folder", hint=hint)
        ctx.meta[_FOLDER] = folder is not None or named.endswith("/")
        return Path(named)

    def decorate(function: F) -> F:
        function = _output(
            "--outdir", "out_folder", metavar="DIR", help="As -o, always a folder.", is_eager=True,
            expose_value=False, callback=as_folder,
        )(function)  # fmt: skip
        return _output("-o", "--out", "out", metavar="PATH", help=help, callback=read)(function)

    return decorate


def out_is_folder() -> bool:
    """Whether the output is explicitly a folder: `--outdir`, or a trailing slash."""
    ctx = click.get_current_context(silent=True)
    return bool(ctx and ctx.meta.get(_FOLDER))


overwrite_option = _output("--overwrite", is_flag=True, help="Overwrite existing files.")


def config_options(
    config: type,
    *,
    leave_out: Collection[str] = (),
    helps: dict[str, str] | None = None,
) -> Callable[[F], F]:
    """Add the options of a config class; the verb gets raw values by setting name, None where not given.

    `helps` replace those of the class.
    """

    def decorate(function: F) -> F:
        for item in reversed(settings(config)):
            if item.name in leave_out or not item.flags:
                continue
            shown = dataclasses.replace(item, help=(helps or {}).get(item.name, item.help))
            function = _option(shown)(function)
        return function

    return decorate


def engine_options(*, leave_out: Collection[str] = ()) -> Callable[[F], F]:
    """Add the options of running an ENGINE and building a MODEL, less `leave_out` of `BuildConfig`.

    Shared ones (device, providers) appear once; `engine_configs` passes them to both.
    """

    def decorate(function: F) -> F:
        function = config_options(BuildConfig, leave_out={*setting_names(RuntimeConfig), *leave_out})(function)
        return config_options(RuntimeConfig, leave_out=("contexts", "streams"))(function)

    return decorate


def bench_options(*, leave_out: Collection[str] = (), helps: dict[str, str] | None = None) -> Callable[[F], F]:
    """Add the options of measuring an ENGINE or MODEL; `leave_out` and `helps` are of `BenchConfig`."""

    def decorate(function: F) -> F:
        function = engine_options(leave_out={*setting_names(BenchConfig), "parity", "parity_rtol"})(function)
        return config_options(BenchConfig, leave_out=leave_out, helps=helps)(function)

    return decorate


def _option(item: Setting) -> Callable[[F], F]:
    first_word = item.help.partition(" ")[0]
    text = item.help[:1].upper() + item.help[1:] if first_word.isalpha() else item.help
    shown = _default_text(item.default, item.name)
    if shown and "[default" not in text:
        text += f" [default: {shown}]"
    if item.name == "out":
        return out_option(f"{text}.")
    option = functools.partial(click.option, cls=Option, group=item.group, help=f"{text}.", default=None)
    if item.is_flag or "/" in item.flags[0]:
        first = item.flags[0]
        both = f"{first}/--no-{first[2:]}" if item.default is True and "/" not in first else first
        return option(both, *item.flags[1:], item.name, is_flag=True)
    names = item.multiple and item.parse is str
    return option(
        *item.flags, item.name, type=_param_type(item), multiple=item.multiple,
        callback=_expand_name_files if names else None, metavar=f"{item.metavar}|@FILE" if names else _metavar(item),
    )  # fmt: skip


def _param_type(item: Setting) -> click.ParamType[Any, Any]:
    """The click type: `config_from` calls setting parsers, click parses choices and plain numbers."""
    if item.choices:
        return click.Choice(item.choices)
    if item.value_help or (item.metavar and "|" in item.metavar):
        return SuggestedValues(item.metavar or "", source=item.value_help)
    if item.parse is Path:
        return FILE
    plain: dict[str, click.ParamType[Any, Any]] = {"int": click.INT, "float": click.FLOAT}
    return click.STRING if item.parse else plain.get(item.type, click.STRING)


def _metavar(item: Setting) -> str | None:
    if item.choices or item.value_help:
        return None  # shown by the type
    return item.metavar or ({"int": "N", "float": "X"}.get(item.type) if item.parse is None else None) or "TEXT"


def _expand_name_files(ctx: click.Context, param: click.Parameter, typed: tuple[str, ...]) -> tuple[str, ...]:
    """Replace `@FILE` by the names in it, one per line."""
    names: list[str] = []
    for item in typed or ():
        if not item.startswith("@"):
            names.append(item)
            continue
        try:
            lines = read_bounded(Path(item[1:])).decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read names from `{item[1:]}`: {error}", hint="one name per line") from error
        names += [line.strip() for line in lines if line.strip()]
    return tuple(names)


def _default_text(default: Any, name: str) -> str:
    """A default as typed, with the unit from the setting's name."""
    if default is None or isinstance(default, bool) or default in ((), {}, ""):
        return ""
    if isinstance(default, tuple):
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
    unit = next((word for end, word in (("_ms", "ms"), ("_mib", "MiB"), ("_s", "s")) if name.endswith(end)), "")
    return f"{default:g}{unit}" if isinstance(default, float) else f"{default}{unit}"


def config_from(config: type[Any], values: dict[str, Any]) -> Any:
    """Build a config from the typed values and remove them from `values`."""
    typed = take_settings(values, config)
    given = {name: value for name, value in typed.items() if value is not None and value != ()}
    made = from_values(config, given)
    if (typed_s := str(given.get("warmup_s", ""))).replace(".", "", 1).isdecimal() and float(typed_s) > _LONG_WARMUP_S:
        import logging  # not imported for `--help`

        logging.getLogger(__name__).warning(
            "`--warmup %s` is %s seconds; trtexec's `--warmUp=%s` is `--warmup %sms`", *(typed_s,) * 4
        )
    return made


def engine_configs(values: dict[str, Any]) -> tuple[RuntimeConfig, BuildConfig, dict[str, Any]]:
    """The runtime and build configs, and the typed `backend` and `precision` that an engine must match.

    trtexec's spellings do not count for the latter. Removes the runtime settings from `values`.
    """
    of_both = dict(values)
    ctx = click.get_current_context(silent=True)
    spelled = ctx.meta.get(SET_BY_TRTEXEC, ()) if ctx else ()
    named = {
        name: values[name] for name in ("backend", "precision") if values.get(name) is not None and name not in spelled
    }
    runtime: RuntimeConfig = config_from(RuntimeConfig, values)
    build: BuildConfig = config_from(BuildConfig, of_both)
    if build.calib_data is not None or build.accuracy_data is not None:
        from trt_engine.vision.spec import check_data_exists

        check_data_exists(build)  # here, so that every `--dry-run` checks it too
    return runtime, build, named

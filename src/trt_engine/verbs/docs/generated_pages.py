"""The pages `reference/settings`, `reference/trtexec` and `reference/inductor`, written from the classes and tables that the
verbs and backends read.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import trt_engine.config
import trt_engine.verbs
from trt_engine.backend import list_backends
from trt_engine.command_line import trtexec_table
from trt_engine.config.settings import Config, Setting, settings

_INTRO = """# Settings

Every setting of every verb and backend. A Python call takes a name as a keyword argument, the command its flag, a
backend its `-O NAME=VALUE`. A dash means unset: the verb or library decides. `trt-engine VERB --help` prints the flags of
one verb, `trt-engine docs reference/settings` this page. A backend's settings of the build are in the engine's key;
those of the load may change each time. ONNX Runtime's threads, arena and determinism may be given at load too.
"""


def verb_settings() -> list[type[Config]]:
    """The settings classes of the verbs, by module."""
    found = []
    modules = {info.name: f"trt_engine.config.{info.name}" for info in pkgutil.iter_modules(trt_engine.config.__path__)}
    own = Path(trt_engine.verbs.__path__[0]).glob("*/config.py")
    modules |= {path.parent.name: f"trt_engine.verbs.{path.parent.name}.config" for path in own}
    for _, name in sorted(modules.items()):
        module = importlib.import_module(name)
        for item in vars(module).values():
            here = inspect.isclass(item) and item.__module__ == module.__name__ and not item.__name__.startswith("_")
            if here and hasattr(item, "__dataclass_fields__") and settings(item):
                found.append(item)
    return found


def backend_settings() -> dict[str, tuple[str, ...]]:
    """Dotted names of the settings classes of the backends that are listed, each with its backends."""
    found: dict[str, tuple[str, ...]] = {}
    for spec in list_backends().values():
        if spec.options is not None and not spec.hidden:
            found[spec.options] = (*found.get(spec.options, ()), spec.name)
    return found


def settings_page() -> str:
    """One table per settings class, in Markdown."""
    lines = [_INTRO]
    for kind in verb_settings():
        lines += [
            f"## {kind.__name__}",
            "",
            _summary(kind),
            "",
            "| name | flag | default | meaning |",
            "|---|---|---|---|",
        ]
        for item in settings(kind):
            flags = ", ".join(map(_code, item.flags)) or "–"
            lines.append(f"| {_code(item.name)} | {flags} | {_default(item)} | {_meaning(item)} |")
        lines.append("")
    for dotted, backends in backend_settings().items():
        module, _, name = dotted.partition(":")
        kind = getattr(importlib.import_module(module), name)
        lines += [f"## -O of {', '.join(backends)}", "", _summary(kind), ""]
        lines += ["| name | at | default | meaning |", "|---|---|---|---|"]
        for item in settings(kind):
            lines.append(
                f"| {_code(item.name)} | {'build' if item.in_key else 'load'} | {_default(item)} | {_meaning(item)} |"
            )
        lines.append("")
    return "\n".join(lines)


def _summary(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _code(text: object) -> str:
    return f"`{str(text).replace('|', chr(92) + '|')}`"


def _default(item: Setting) -> str:
    if item.default is None or item.default == () or item.default == {} or item.default == []:
        return "–"
    return _code("on" if item.default is True else "off" if item.default is False else item.default)


def _meaning(item: Setting) -> str:
    words = f"; one of {', '.join(map(_code, item.choices))}" if item.choices else ""
    return " ".join(item.help.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[") + words


def inductor_page() -> str:
    """The page in Markdown."""
    from trt_engine.backends.inductor.operators import OPERATORS, operators_text

    return f"""# Inductor operators

The {len(OPERATORS)} operators of ONNX's default domain that the importer computes, each with the attributes that it honours
with any value. Limits: [TorchInductor](../inductor.md#operators).

{operators_text()}
"""


VERBS = ("build", "bench", "profile")
ELSEWHERE = "; leave it out, or use trtexec itself and read its log with `trt-engine bench --parse-log FILE`"
"""The end of many hints, which the page has once."""


def meaning_text(option: trtexec_table.TrtexecOption, meaning: trtexec_table.Translation) -> str:
    """What a verb does with the option, in one cell."""
    match meaning:
        case trtexec_table.SameOption():
            return "taken"
        case trtexec_table.FileArgument():
            return "the file is the argument: `trt-engine build MODEL`, `trt-engine bench ENGINE`"
        case trtexec_table.ProfileShapes():
            return "`--profile`, of the three together"
        case trtexec_table.RenamedOption(flag, _, value):
            shown = value or ("VALUE" if option.takes_value else "")
            return f"`{flag} {shown}`".replace(" `", "`")
        case trtexec_table.BackendSetting(name, value, _, _, also):
            return f"`-O {name}={value or 'VALUE'}`" + (f", `-O {also}`" if also else "")
        case trtexec_table.IgnoredOption(why):
            return f"left out: {why}"
        case trtexec_table.RejectedOption(hint):
            return f"refused: {hint}"


def outcome(option: trtexec_table.TrtexecOption) -> str:
    """The last cell: what each verb does with the option; of an option that only measures, `build` is left out."""
    verbs = VERBS[1:] if option.measuring_only else VERBS
    groups: dict[str, list[str]] = {}
    for verb in verbs:
        text = meaning_text(option, option.for_verb(verb)).removesuffix(ELSEWHERE)
        groups.setdefault(text, []).append(f"`{verb}`")
    everywhere = len(groups) == 1 and not option.measuring_only
    return "; ".join(text if everywhere else f"{', '.join(named)}: {text}" for text, named in groups.items())


def table() -> str:
    """The table in Markdown; options with the same versions and outcome share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for option in trtexec_table.OPTIONS.values():
        name = f"{option.spelling}=VALUE" if option.takes_value else option.spelling
        rows.setdefault((option.versions, outcome(option)), []).append(f"`{name}`")
    lines = ["| options of trtexec | TensorRT | here |", "|---|---|---|"]
    for (versions, told), names in rows.items():
        lines.append(f"| {', '.join(names)} | {versions.replace(' to ', '–')} | {told.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def trtexec_page() -> str:
    """The page in Markdown."""
    return f"# Trtexec options\n\nHow they are read: [trtexec](../trtexec.md#every-option).\n\n{table()}\n"

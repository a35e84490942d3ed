"""The page `reference/settings`: every setting of the verbs and backends, from the classes that define them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import trt_engine.config
import trt_engine.verbs
from trt_engine.backend import list_backends
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

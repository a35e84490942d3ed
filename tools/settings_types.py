"""Write verbs/settings_types.pyi (the settings as typed keyword arguments, from the config classes) and __init__.pyi.

python tools/settings_types.py            write it
python tools/settings_types.py --check    exit 1 if it is not up to date

What a setting takes is what it `accepts`, or what its parser takes (the annotation of its first parameter), or its choices,
or its own type.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "trt_engine"
sys.path.insert(0, str(SOURCE.parent))  # this tree's settings, whatever is installed

import trt_engine  # noqa: E402
from trt_engine.config import bench, build, convert, evaluate, precision, profiles, runtime, settings, streams  # noqa: E402
from trt_engine.config.caller_language import in_python  # noqa: E402
from trt_engine.verbs.batch import config as batch  # noqa: E402
from trt_engine.verbs.deploy import config as deploy  # noqa: E402
from trt_engine.verbs.loadtest import config as loadtest  # noqa: E402
from trt_engine.verbs.migrate import config as migrate  # noqa: E402
from trt_engine.verbs.run import config as run  # noqa: E402
from trt_engine.verbs.serve import config as serve  # noqa: E402
from trt_engine.verbs.size import config as size  # noqa: E402
from trt_engine.verbs.upgrade_check import config as upgrade  # noqa: E402

_MODULES = (
    batch,
    bench,
    build,
    convert,
    deploy,
    evaluate,
    loadtest,
    migrate,
    precision,
    profiles,
    run,
    runtime,
    serve,
    settings,
    size,
    streams,
    upgrade,
)
_CONFIGS = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and value.__module__ == module.__name__
}
"""The classes of the settings: name -> class."""
STUB = SOURCE / "__init__.pyi"
TARGET = SOURCE / "verbs" / "settings_types.pyi"
HEAD = '''"""Settings by name, as keyword arguments. Made by tools/settings_types.py: not edited by hand."""

'''


@dataclass(frozen=True)
class Kind:
    """One TypedDict: the config classes it is made from, the first of them first, and the function beside them."""

    name: str
    text: str
    configs: tuple[type, ...]
    base: str = "TypedDict"


KINDS = (
    Kind("BatchingSettings", "Settings of `te.Batching`.", (runtime.Batching,)),
    Kind("RuntimeSettings", "Settings of running an engine.", (runtime.RuntimeConfig,)),
    Kind("LoadSettings", "Settings of `te.load`.", (runtime.RuntimeConfig,), base="RuntimeSettings"),
    Kind("EngineBuildSettings", "Settings of a build that are not those of running its engine.", (build.BuildConfig,)),
    Kind(
        "ComponentSettings", "Settings of building one of several models.", (build.BuildConfig,),
        base="EngineBuildSettings",
    ),
    Kind("BuildSettings", "Settings of `te.build`.", (build.BuildConfig,), base="ComponentSettings"),
    Kind("BundleSettings", "Settings of `te.bundle`.", (build.BundleConfig,), base="ComponentSettings"),
    Kind("SizeSettings", "Settings of `te.size`.", (size.SizeConfig,), base="BuildSettings"),
    Kind(
        "EngineSettings", "Settings of running an engine, and of building it for a model.", (build.BuildConfig,),
        base="RuntimeSettings, EngineBuildSettings",
    ),
    Kind(
        "BenchSettings", "Settings of a measurement; those of the build are for a model.",
        (bench.BenchConfig, build.BuildConfig), base="EngineSettings",
    ),
    Kind("BenchRunSettings", "Settings of `te.bench`.", (bench.BenchRunConfig,), base="BenchSettings"),
    Kind("ProfileSettings", "Settings of `te.profile`.", (bench.ProfileConfig,), base="BenchSettings"),
    Kind("CompareSettings", "Settings of `te.compare`.", (bench.CompareConfig,), base="BenchSettings"),
    Kind(
        "EvaluateSettings", "Settings of `te.evaluate`; those of the build are for a model.",
        (evaluate.EvaluateConfig, build.BuildConfig), base="EngineSettings",
    ),
    Kind(
        "InferSettings", "Settings of `te.infer`; those of the build are for a model.", (evaluate.InferConfig,),
        base="EngineSettings",
    ),
    Kind(
        "BatchSettings", "Settings of `te.batch`; those of the build are for a model.", (batch.BatchConfig,),
        base="EngineSettings",
    ),
    Kind(
        "ServeSettings", "Settings of `te.serve`; those of the build are for models.", (serve.ServeConfig,),
        base="EngineSettings",
    ),
    Kind(
        "LoadtestSettings", "Settings of `te.loadtest`; those of engines are not for a URL.",
        (loadtest.LoadtestConfig, build.BuildConfig), base="EngineSettings",
    ),
    Kind(
        "DeploySettings", "Settings of `te.deploy`, by target.",
        (deploy.TritonConfig, deploy.DeepstreamConfig, deploy.RayConfig),
    ),
    Kind("RunSettings", "Settings of `te.run`.", (run.RunConfig,)),
    Kind("ConvertSettings", "Settings of `te.convert`.", (convert.ConvertConfig,)),
    Kind("ExclusionSettings", "Settings of rewriting a graph on data.", (precision._Exclusions,)),
    Kind("CastSettings", "Settings of `te.cast`.", (precision.CastConfig,), base="ExclusionSettings"),
    Kind("QuantizeSettings", "Settings of `te.quantize`.", (precision.QuantizeConfig,), base="ExclusionSettings"),
    Kind("RangesSettings", "Settings of `te.ranges`.", (precision.RangesConfig,)),
    Kind("CalibrateSettings", "Settings of `te.calibrate`.", (precision.CalibrateConfig,)),
    Kind("MigrateSettings", "Settings of `te.migrate`.", (migrate.MigrateConfig,)),
    Kind("UpgradeSettings", "Settings of `te.upgrade_check`.", (upgrade.UpgradeConfig,)),
    Kind("SearchSettings", "Settings of `te.search`.", (precision.SearchConfig,)),
)  # fmt: skip
LEAVE_OUT = {
    "RuntimeSettings": ("batching",),
    "EngineBuildSettings": (
        "batch",
        "shapes",
        "inputs",
        "preprocess",
        "profiles",
        "device",
        "providers",
        "allow_fallback",
        "options",
    ),
    "EngineSettings": ("batch", "shapes", "inputs", "preprocess"),
    "ComponentSettings": ("profiles", "inputs"),
    "ExclusionSettings": ("calib_data",),
    "RangesSettings": ("calib_data",),
}
"""What the function has as an argument of its own, or a class made from this one adds."""
HOMES = {
    "Callable": "collections.abc", "Iterable": "collections.abc", "Mapping": "collections.abc",
    "Sequence": "collections.abc", "Path": "pathlib", "Any": "typing", "Literal": "typing", "TypedDict": "typing",
    "Engine": "trt_engine.engine", "RangesReport": "trt_engine.records.precision",
    "CalibrationResult": "trt_engine.precision.calibration", "Calibrator": "trt_engine.precision.calibrators",
    "PreprocessFunction": "trt_engine.precision.samples", "VisionSource": "trt_engine.verbs.calibration_images",
    "ProfilerName": "trt_engine.config.bench", "Tensors": "trt_engine.tensors",
}  # fmt: skip
"""The module of each name in the annotations, besides the classes of the settings."""


def taken_by(parse: Callable[[Any], Any]) -> str:
    """What a parser takes, as an annotation."""
    if parse is Path:
        return "Path | str"
    if isinstance(parse, type):
        return parse.__name__
    return str(next(iter(inspect.signature(parse).parameters.values())).annotation)


def annotation(owner: type, item: dataclasses.Field[Any]) -> str:
    """What a setting takes from Python."""
    known = {one.name: one for one in settings.settings(owner)}
    own = str(item.type)
    setting = known.get(item.name)
    if setting is None:  # no setting of the command line: another config
        return " | ".join(
            f"{part} | {part}Settings" if dataclasses.is_dataclass(_CONFIGS.get(part)) else part
            for part in own.split(" | ")
        )
    if own == "Any":
        return setting.accepts
    if setting.choices:
        taken = f"Literal[{', '.join(repr(choice) for choice in setting.choices)}]".replace("'", '"')
    elif setting.parse is not None:
        taken = taken_by(setting.parse)
        taken = f"{taken} | Sequence[{taken}]" if setting.multiple else taken
        taken += " | Tensors" if item.name in ("inputs", "calib_data") else ""  # of those that take a model
    elif setting.multiple:
        taken = "Mapping[str, object] | Iterable[str]"  # `-O`
    else:
        taken = own
    if own.endswith("| None") and not taken.endswith("None"):
        taken += " | None"
    return taken


def inherited(kind: Kind) -> set[str]:
    bases = [one for one in KINDS if one.name in kind.base.split(", ")]
    return {name for base in bases for name in (*inherited(base), *(name for name, _, _ in fields_of(base)))}


def fields_of(kind: Kind) -> Iterator[tuple[str, str, str]]:
    """Name, annotation and help of each setting: those of the first class that has it, or of each target's."""
    elsewhere = {*LEAVE_OUT.get(kind.name, ()), *inherited(kind)}
    found: dict[str, tuple[list[str], list[str]]] = {}
    for owner in kind.configs:
        helps = {one.name: one.help for one in settings.settings(owner)}
        for item in dataclasses.fields(owner):
            taken, texts = found.setdefault(item.name, ([], []))
            one = annotation(owner, item)
            if not taken or (kind.name == "DeploySettings" and one not in taken):
                taken.append(one)
                texts.append(helps.get(item.name, ""))
    for name, (taken, texts) in found.items():
        if name not in elsewhere:
            yield name, " | ".join(taken), "; ".join(filter(None, texts))


def imports(words: set[str]) -> str:
    """The import lines of what the annotations name."""
    homes = HOMES | {name: value.__module__ for name, value in _CONFIGS.items()}
    by_module: dict[str, set[str]] = {}
    for name in words & homes.keys():
        by_module.setdefault(homes[name], set()).add(name)
    by_module.setdefault("typing", set()).add("TypedDict")
    by_module = dict(sorted(by_module.items(), key=lambda item: (item[0].startswith("trt_engine"), item[0])))
    lines = [f"from {module} import {', '.join(sorted(names, key=in_order))}" for module, names in by_module.items()]
    ours = next(at for at, line in enumerate(lines) if line.startswith("from trt_engine"))
    return "\n".join([*lines[:ours], "", *lines[ours:]])


def in_order(name: str) -> tuple[int, str]:
    """As ruff sorts names: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def wrapped(name: str, text: str) -> str:
    line = f"    {name}: {text}"
    if len(line) <= 120:
        return line
    parts = re.findall(r"[^,\[\]]+|\[|\]|,", text) if text.startswith("Literal[") else []
    if not parts:
        raise ValueError(f"the annotation of {name} is too long: {text}")
    inner = text[len("Literal[") : text.index("]")]
    return f"    {name}: Literal[\n        {inner}\n    ]{text[text.index(']') + 1 :]}"


def text() -> str:
    """The module."""
    classes, words = [], set()
    for kind in KINDS:
        lines = [f"class {kind.name}({kind.base}, total=False):", f'    """{kind.text}"""', ""]
        for name, taken, help in fields_of(kind):
            words |= set(re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", taken)))
            lines.append(wrapped(name, taken))
            if help:
                lines += documented(help)
        classes.append("\n".join(lines))
    return f"{HEAD}{imports(words)}\n\n" + "\n\n".join(classes) + "\n"


def documented(help: str) -> list[str]:
    """The help of a setting under its line, where editors show it."""
    help = in_python(help)
    sentence = f"{help[:1].upper()}{help[1:]}".rstrip(".") + "."
    lines, line = [], '    """'
    for word in sentence.replace("\\", "\\\\").split():
        if len(line) + len(word) > 118:
            lines.append(line.rstrip())
            line = "    "
        line += f"{word} "
    return [*lines, line.rstrip() + '"""']


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, made in ((TARGET, text()), (STUB, stub())) if not path.exists() or path.read_text() != made]
    for path in stale:
        if not check:
            path.write_text(text() if path == TARGET else stub(), encoding="utf-8")
        sys.stderr.write(f"{'not up to date' if check else 'written'}: {path.name}\n")
    return int(check and bool(stale))


def stub() -> str:
    """The public names for type checkers, from the table in `__init__.py`."""
    lines = [
        f"from trt_engine.{module} import {name} as {name}"
        for module, names in sorted(trt_engine._NAMES.items())
        for name in names.split()
    ]
    return "\n".join(["# Made by tools/settings_types.py: not edited by hand.", *lines, "", "__version__: str", ""])


if __name__ == "__main__":
    sys.exit(main())

"""Each setting is said once: one line of a config class is the verb's flag with its help, the typed keyword argument, the
description in the schema of a plan, and a part of the engine's key."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import trt_engine as te
from programs import load_program
from trt_engine.cli.verbs_table import VERBS, command_module
from trt_engine.config.bench import BenchConfig, BenchRunConfig, CompareConfig, ProfileConfig
from trt_engine.config.build import BuildConfig, BundleConfig
from trt_engine.config.convert import ConvertConfig
from trt_engine.config.evaluate import EvaluateConfig, InferConfig
from trt_engine.config.precision import CalibrateConfig, CastConfig, QuantizeConfig, RangesConfig, SearchConfig
from trt_engine.config.settings import Setting, settings
from trt_engine.errors import UsageError
from trt_engine.verbs.batch.config import BatchConfig
from trt_engine.verbs.deploy.config import DeepstreamConfig, RayConfig, TritonConfig
from trt_engine.verbs.loadtest.config import LoadtestConfig
from trt_engine.verbs.migrate.config import MigrateConfig
from trt_engine.verbs.run.config import RunConfig
from trt_engine.verbs.serve.config import ServeConfig
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.upgrade_check.config import UpgradeConfig

ROOT = Path(__file__).parents[1]
OWN: dict[str, type] = {
    "batch": BatchConfig, "bench": BenchRunConfig, "build": BuildConfig, "bundle": BundleConfig,
    "calibrate": CalibrateConfig, "cast": CastConfig,
    "compare": CompareConfig, "convert": ConvertConfig, "deploy deepstream": DeepstreamConfig,
    "deploy ray": RayConfig, "deploy triton": TritonConfig, "evaluate": EvaluateConfig, "infer": InferConfig,
    "loadtest": LoadtestConfig, "migrate": MigrateConfig, "profile": ProfileConfig, "quantize": QuantizeConfig,
    "ranges": RangesConfig, "run": RunConfig, "search": SearchConfig, "serve": ServeConfig, "size": SizeConfig,
    "upgrade-check": UpgradeConfig,
}  # fmt: skip
"""The config class of each verb's own settings."""
NO_FLAG = {"quantize": {"preprocessing", "ranges"}, "cast": {"ranges"}, "bench": {"log"}}
"""Settings of Python alone."""


def generator() -> ModuleType:
    return load_program(ROOT / "tools" / "settings_types.py", "generator_of_types")


def sentence(item: Setting) -> str:
    return f"{item.help[:1].upper()}{item.help[1:]}".lower()


@pytest.mark.parametrize("name", OWN)
def test_a_line_is_a_flag_with_its_help(name: str) -> None:
    verb, _, action = name.partition(" ")
    if verb not in VERBS:
        assert verb == "calibrate" and not any(item.flags for item in settings(OWN[name]))
        return
    command: click.Command = importlib.import_module(command_module(verb)).command
    if isinstance(command, click.Group):
        command = command.commands[action]
    options = {item.name: item for item in command.params if isinstance(item, click.Option)}
    for item in settings(OWN[name]):
        if item.name in NO_FLAG.get(verb, ()):
            assert not item.flags
            continue
        option = options[item.name]
        assert set(item.flags) - {"--modes --mode"} <= {
            "/".join([*option.opts[:1], *option.secondary_opts]),
            *option.opts,
        }
        assert option.help is not None and option.help.lower().startswith(sentence(item))


@pytest.mark.parametrize("verb", OWN)
def test_a_line_is_a_keyword_argument_with_its_type_and_help(verb: str) -> None:
    made, own = generator(), settings(OWN[verb])
    verb = verb.partition(" ")[0]
    name = {"bench": "BenchRunSettings", "upgrade-check": "UpgradeSettings"}.get(verb, f"{verb.capitalize()}Settings")
    text = (ROOT / "src" / "trt_engine" / "verbs" / "settings_types.pyi").read_text()
    (kind,) = (one for one in made.KINDS if one.name == name)
    known = {*made.inherited(kind), *(field for field, _, _ in made.fields_of(kind))}
    positional = {"ranges": {"calib_data"}, "calibrate": set()}.get(verb, set())
    for item in own:
        assert item.name in known | positional
        assert f"\n    {item.name}: " in text
    call: Any = getattr(te, verb.replace("-", "_"))
    with pytest.raises(UsageError, match="has no argument `zzzzzz`"):
        call(**{item.name: None for item in own}, zzzzzz=1)


def test_a_line_is_in_the_schema_of_a_plan() -> None:
    schema = json.loads((ROOT / "docs" / "run.schema.json").read_text())["properties"]
    for key, config in (("bench", BenchConfig), ("build", BuildConfig), ("quantize", QuantizeConfig)):
        known = {item.name: item for item in settings(config)}
        found = schema[key]["properties"]
        assert found.keys() & known.keys()
        for name, item in known.items():
            if name in found:
                assert found[name] == {"description": item.help} | ({"enum": [*item.choices]} if item.choices else {})


def test_a_line_is_in_the_key_of_an_engine_unless_it_says_otherwise() -> None:
    assert set(BuildConfig().key()) == {item.name for item in settings(BuildConfig) if item.in_key}
    assert {item.name for item in settings(BuildConfig) if not item.in_key} == {
        "timing_cache", "retry", "parity", "parity_rtol", "accuracy_data", "inputs",
    }  # fmt: skip

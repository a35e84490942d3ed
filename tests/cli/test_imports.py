"""Light stays light: help and the light modules load no library that computes."""

from __future__ import annotations

import json

import pytest

from programs import run_python
from trt_engine.cli.verbs_table import VERBS, command_module

HEAVY = ["numpy", "onnx", "onnxruntime", "torch", "tensorrt", "ml_dtypes", "scipy", "psutil", "jinja2", "filelock"]
ONLY_WHEN_NEEDED = ["msgspec", "logging", "importlib.metadata", "difflib", "platformdirs", "traceback"]

_PROGRAM = """
import json, sys
before = set(sys.modules)
code = 0
try:
    {statement}
except SystemExit as error:
    code = error.code or 0
print()
print(json.dumps([code, sorted(set(sys.modules) - before)]))
"""


def loaded(statement: str, *args: str) -> set[str]:
    """The modules a statement loads in a fresh interpreter."""
    done = run_python("-c", _PROGRAM.format(statement=statement), *args, check=True)
    code, names = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(names)


@pytest.mark.parametrize(
    "module",
    ["trt_engine", "trt_engine.cli.main", "trt_engine.command_line.options", "trt_engine.config", "trt_engine.errors",
     "trt_engine.tensors"],
)  # fmt: skip
def test_light_modules_load_nothing_heavy(module: str) -> None:
    names = loaded(f"import {module}")
    assert not names & set(HEAVY + ONLY_WHEN_NEEDED)


def test_the_help_of_every_verb_loads_nothing_heavy() -> None:
    """In one process, verb after verb: the first that loads something heavy is named."""
    program = (
        "import sys; from trt_engine.cli.main import run\n"
        "for verb in sys.argv[1:]:\n"
        "    assert run([*verb.split(), '--help']) == 0, verb\n"
        f"    assert not (heavy := sys.modules.keys() & {set(HEAVY)}), f'`trt-engine {{verb}} --help` loads {{heavy}}'\n"
    )
    verbs = [*VERBS, "cache list", "cache prune"]
    done = run_python("-c", program, *verbs)
    assert done.returncode == 0, done.stderr


def test_pressing_tab_loads_no_verb() -> None:
    statement = (
        "import os; os.environ.update(COMP_WORDS='trt-engine ', COMP_CWORD='1', _TRT_ENGINE_COMPLETE='bash_complete'); "
        "from trt_engine.cli.main import main; main()"
    )
    names = loaded(statement)
    assert not names & set(map(command_module, VERBS))

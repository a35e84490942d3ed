"""Programs outside the package as modules and in processes, and the marks of tests that need large packages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_program(path: Path, name: str = "") -> ModuleType:
    """The program as a module called `name` (as its file), under which its dataclasses find it."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_python(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A finished process of this interpreter, with what it printed as text."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """For tests of `make test-full`: skipped, with the reason, where one of the packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return [
        pytest.mark.slow,
        pytest.mark.full,
        pytest.mark.skipif(
            bool(missing),
            reason=f"not installed here: {', '.join(packages)}; `make test-full` runs this where they are",
        ),
        pytest.mark.filterwarnings("ignore:::(torch|onnx|onnxscript|onnx_ir|transformers|copyreg)"),
    ]

"""Public docstrings name errors, axes, dtypes and units: `tools/docstrings.py` over the package, and over its failures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "tools" / "docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_public_docstrings_name_errors_axes_dtypes_and_units(checker: ModuleType) -> None:
    source = checker.Source(ROOT / "src" / "trt_engine")
    names = list(checker.public_names(source))
    assert list(checker.findings(source, names)) == []
    for rule, least in (("errors", 120), ("arrays", 65), ("units", 20)):  # what the rules apply to did not vanish
        assert sum(name.applies(rule) for name in names) >= least
    assert checker._NEVER.keys() <= {name.title for name in names}


HELPERS = '''
from trt_engine.errors import FeedError, UsageError

def refuse() -> None:
    """Raises `UsageError`."""
    raise UsageError("no")

def make_error() -> FeedError:
    return FeedError("no")

class Config:
    def __post_init__(self) -> None:
        raise UsageError("no")
'''


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ('def f(): \n """Text."""\n raise UsageError("no")', "errors: UsageError"),
        ('def f(): \n """Raises `UsageError`."""\n raise UsageError("no")', ""),
        ('def f(): \n """Raises `UsageError`."""\n raise FeedError("no")', ""),  # a FeedError is one
        ('def f(): \n """Raises `FeedError`."""\n raise UsageError("no")', "errors: UsageError"),
        ('def f(): \n """Raises UsageError without backticks."""\n raise UsageError("no")', "errors: UsageError"),
        ('def f(): \n """Text."""\n raise make_error()', "errors: FeedError"),
        ('def f(): \n """Text."""\n refuse()', "errors: UsageError"),
        ('def f(): \n """Text."""\n helpers.refuse()', "errors: UsageError"),
        ('def f(): \n """Text."""\n try: refuse()\n except UsageError: pass', ""),
        ('def f(): \n """Text."""\n try: refuse()\n except UsageError: raise', "errors: UsageError"),
        ('def f(): \n """Text."""\n try: refuse()\n except FeedError: pass', "errors: UsageError"),
        ('def f(): \n """Text."""\n with suppress(UsageError): refuse()', ""),
        ('def f(): \n """Text."""\n def later(): refuse()', ""),
        ('def f(): \n """Text."""\n Config()', ""),
        ('def f(): \n """Text."""\n Config(a=1)', "errors: UsageError"),
        ('class A:\n def f(self): \n  """Text."""\n  self._g()\n def _g(self): refuse()', ""),  # two levels down
        ('class A:\n def f(self): \n  """Text."""\n  self._g()\n def _g(self): raise FeedError("")', "errors: FeedError"),
        ('class A:\n def __init__(self): raise UsageError("no")', "errors: UsageError"),
        ('class A:\n """`UsageError` always."""\n def __init__(self): raise UsageError("no")', ""),
        ('def f(x: np.ndarray): \n """The sum."""', "arrays: axes or shape, dtype"),
        ('def f(x: np.ndarray): \n """The sum of float32 `[N, C]`."""', ""),
        ('def f(x: Tensors): \n """The sum."""', "arrays: axes or shape, dtype"),
        ('def f() -> Array: \n """One row for each image."""', "arrays: dtype"),
        ('def f(wait: float): \n """Wait."""', "units: unit"),
        ('def f(wait_ms: float): \n """Wait."""', ""),
        ('def f() -> dict[str, float]: \n """Waits by name."""', "units: unit"),
        ('def f() -> float: \n """The wait in ms."""', ""),
        ('def _f(x: np.ndarray): raise UsageError("no")', ""),
    ],
)  # fmt: skip
def test_a_docstring_that_says_too_little_is_found(
    checker: ModuleType, tmp_path: Path, code: str, missing: str
) -> None:
    package = tmp_path / "trt_engine"
    (package / "runtime").mkdir(parents=True)
    (package / "__init__.py").write_text("_NAMES = {}\n")
    (package / "errors.py").write_text((ROOT / "src" / "trt_engine" / "errors.py").read_text())
    (package / "runtime" / "__init__.py").touch()
    (package / "helpers.py").write_text(HELPERS)
    head = "from trt_engine import helpers\nfrom trt_engine.helpers import Config, make_error, refuse\n"
    (package / "runtime" / "one.py").write_text(f"{head}from trt_engine.errors import FeedError, UsageError\n{code}\n")
    source = checker.Source(package)
    found = list(checker.findings(source, list(checker.public_names(source))))
    assert [line.split(": ", 2)[2] for line in found] == [missing] * bool(missing)

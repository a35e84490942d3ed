"""Public docstrings name errors, axes, dtypes and units: `tools/docstrings.py` over the package, and over its failures."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from programs import load_program

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return load_program(ROOT / "tools" / "docstrings.py", "docstrings")


@pytest.mark.slow
def test_public_docstrings_name_errors_axes_dtypes_and_units(checker: ModuleType) -> None:
    source = checker.Source(ROOT / "src" / "trt_engine")
    names = list(checker.public_names(source))
    assert list(checker.findings(source, names)) == []
    for rule, least in (("errors", 120), ("arrays", 65), ("units", 20)):  # what the rules apply to did not vanish
        assert sum(name.applies(rule) for name in names) >= least
    assert checker._NEVER.keys() <= {name.title for name in names}


def test_a_docstring_that_names_what_is_gone_or_begins_in_mid_sentence_is_found(
    checker: ModuleType, tmp_path: Path
) -> None:
    package = tmp_path / "trt_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text('def f(size: int) -> None:\n """Of `size`, by `boards`."""\n')
    found = [line.rpartition(": ")[2] for line in checker.docstring_findings(checker.Source(package))]
    assert found == ["boards", "Of `size`, by `boards`."]

"""README and the package that carries it: typed as written, built, and installed elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import trt_engine as te
from trt_engine.cli.main import run
from trt_engine.cli.verbs_table import VERBS
from trt_engine.doc_pages import find_page

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
(PYTHON,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(SHELL,) = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
_FIRST_MEASURED = "record"
_HINT = re.compile(r"trt-engine docs ([a-z][\w./-]*\w)")


def test_the_python_example_runs_as_written_as_far_as_it_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ast.parse(PYTHON).body
    names = [ast.unparse(line.targets[0]) if isinstance(line, ast.Assign) else "" for line in lines]
    first = names.index(_FIRST_MEASURED)
    place: dict[str, object] = {}
    exec(compile(ast.Module(lines[:first], []), "README.md", "exec"), place)
    assert isinstance(place["engine"], te.Engine) and isinstance(place["report"], te.EngineReport)
    for line in lines[first:]:  # the rest takes half a minute: its arguments are those of the functions
        (call,) = [node for node in ast.walk(line) if isinstance(node, ast.Call)]
        with pytest.raises(te.TrtEngineError, match="has no argument `zzzzzz`"):  # and no other that it lacks
            getattr(te, ast.unparse(call.func).removeprefix("te."))(
                **{str(item.arg): None for item in call.keywords}, zzzzzz=None
            )


def test_the_shell_example_names_verbs_and_pages_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in SHELL.splitlines()]
    assert len(lines) > 4
    for program, verb, *rest in lines:
        assert program == "trt-engine" and (verb in VERBS or verb == "--version")
        if verb == "docs":
            assert run([verb, *rest]) == 0


def _run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist; skipped where no package index can be reached."""
    folder = tmp_path_factory.mktemp("built")
    venv.create(folder / "tools", with_pip=True)
    python = str(folder / "tools" / "bin" / "python")
    got = subprocess.run([python, "-m", "pip", "install", "-q", "build"], capture_output=True, text=True)
    if got.returncode:
        pytest.skip("no package index: " + (got.stderr.strip().splitlines() or ["pip failed"])[-1])
    _run([python, "-m", "build", "-o", str(folder), str(ROOT)], folder, PYTHONPATH="")
    return folder


@pytest.mark.slow
def test_the_wheel_carries_licence_notice_types_and_pages_and_its_description_no_dead_link(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE", "trt_engine/py.typed"} <= names
    pages = [
        path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".json")
    ]
    assert {f"trt_engine/{page}" for page in pages} <= names
    hints = [name for path in (ROOT / "src").rglob("*.py") for name in _HINT.findall(path.read_text(encoding="utf-8"))]
    assert len(hints) > 5
    for name in hints:
        files = {f"trt_engine/docs/{name}", f"trt_engine/docs/{name}.md"}
        assert files & names or find_page(name).path is None, f"`trt-engine docs {name}`"
    assert not [name for name in names if not name.startswith(("trt_engine/", info))]
    description = metadata.get_payload()
    assert "## In Python" in str(description) and not re.search(r"\]\((?!https?://)", str(description))
    assert metadata.get_all("Project-URL") is None and metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.slow
def test_readme_runs_to_the_letter_from_the_wheel_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "clean", with_pip=True)
    binaries = tmp_path / "clean" / "bin"
    _run(
        [str(binaries / "python"), "-m", "pip", "install", "-q", str(next(built.glob("*.whl")))],
        tmp_path,
        PYTHONPATH="",
    )
    here = {"PYTHONPATH": "", "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    folder = tmp_path / "work"
    folder.mkdir()
    out = _run(["sh", "-e", "-c", SHELL], folder, **here)
    assert f"trt-engine {te.__version__}" in out and "PEAK_GPU_STREAMS" in out and "# `size`: " in out
    out = _run([str(binaries / "python"), "-W", "error", "-c", PYTHON], folder, **here)
    assert out == "(1, 7, 400)\n"
    assert str(tmp_path / "clean") in _run(["trt-engine", "docs", "vision", "--json"], folder, **here)


@pytest.mark.slow
def test_the_sdist_carries_what_its_tests_need(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    missing = [name for name in tracked.stdout.splitlines() if not (tree / name).exists() and not name.startswith(".")]
    assert missing == []
    tests = [
        "tests/test_package.py",
        "tests/test_doc_pages.py",
        "tests/test_environments.py",
        "tests/cli/test_schemas.py",
    ]
    _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], tree, PYTHONPATH=str(tree / "src"))

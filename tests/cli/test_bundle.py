"""`trt-engine bundle` as a person and a script meet it, and docs/bundle.md run as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from documents import document

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bundle.md").read_text()
MAIN = "from trt_engine.cli.main import main; main()"
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's three models and their meta file."""
    folder = tmp_path_factory.mktemp("rnnt") / "export"
    subprocess.run([sys.executable, str(ROOT / "examples" / "rnnt" / "export.py"), str(folder)], check=True)
    return folder


@pytest.fixture
def typed(tmp_path: Path, export: Path, monkeypatch: pytest.MonkeyPatch, call: Typed) -> Typed:
    """A verb in a folder that has `export`."""
    (tmp_path / "export").mkdir()
    for path in export.iterdir():
        (tmp_path / "export" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return call


def test_the_spellings_of_the_source_builder_are_taken(typed: Typed) -> None:
    code, out, err = typed(
        "bundle", "--meta", "export/model_meta.json", "--outdir", "engines", "--encoder-max-T", "512", "--joint-opt-U", "2",
        "--joint-max-U", "4", "--workspace-mb", "512", "--json",
    )  # fmt: skip
    assert code == 0, err
    spans = {item["name"]: item["profiles"][0]["ranges"] for item in document(out)["components"]}
    assert spans["encoder"]["audio_signal"]["max"] == [1, 128, 512] and spans["encoder"]["audio_signal"]["opt"] == [
        1,
        128,
        64,
    ]
    assert [spans["joint"]["decoder_outputs"][which] for which in ("min", "opt", "max")] == [
        [1, 32, 1],
        [1, 32, 2],
        [1, 32, 4],
    ]
    assert spans["predictor"]["y"]["max"] == [1, 8]


def test_a_dry_run_says_it_all_and_writes_nothing(typed: Typed, tmp_path: Path, own_store: Path) -> None:
    code, out, _ = typed("bundle", "export/model_meta.json", "-o", "engines", "--dry-run", "--json")
    told = document(out)
    assert code == 0 and told["dry_run"] and not told["complete"]
    assert [item["status"] for item in told["components"]] == ["planned"] * 3
    assert not (tmp_path / "engines").exists() and not own_store.exists()
    typed("bundle", "export/model_meta.json", "-o", "engines")
    assert "there already" in typed("bundle", "export/model_meta.json", "-o", "engines", "--dry-run")[1]
    assert "from the store" in typed("bundle", "export/model_meta.json", "-o", "others", "--dry-run")[1]


def _no_side_file(folder: Path) -> None:
    (folder / "joint.onnx.data").unlink()


def _another_export(folder: Path) -> None:
    meta = json.loads((folder / "model_meta.json").read_text())
    (folder / "model_meta.json").write_text(json.dumps(meta | {"features": {"n_mels": 80}}))


def _wrong_dimension(folder: Path) -> None:
    components: dict[str, Any] = {"encoder": {}, "predictor": {"inputs": {"h": [1, "B", 64]}}, "joint": {}}
    (folder / "model_meta.json").write_text(json.dumps({"components": components}))


def _contract(folder: Path) -> None:
    (folder / "model_meta.json").write_text(json.dumps({"connections": ["encoder.outputs -> joint.decoder_outputs"]}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_no_side_file, "joint.onnx.data"),
        (_another_export, "`features.n_mels`"),
        (_wrong_dimension, "dimension 2 is fixed at 32"),
        (_contract, "`encoder.outputs -> joint.decoder_outputs` does not match"),
    ],
)
def test_what_does_not_fit_stops_with_4_and_a_hint_before_anything_is_built(
    typed: Typed, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(tmp_path / "export")
    code, out, err = typed("bundle", "export/model_meta.json", "-o", "engines", "--json")
    error = document(out)["error"]
    assert code == 4 and error["exit_code"] == 4 and said in error["message"] and error["hint"]
    assert f"error: {error['message']}\nhint: {error['hint']}\n" in err and "Traceback" not in err
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ((), "model_meta.json"),
        (("export/model_meta.json",), "-o engines"),
        (("export", "-o", "engines"), "export/model_meta.json"),
        (("export/model_meta.json", "--meta", "other.json", "-o", "engines"), "leave `--meta` out"),
        (
            ("export/model_meta.json", "-o", "engines", "--workspace-mb", "3", "--workspace", "3G"),
            "leave `--workspace-mb`",
        ),
        (("export/model_meta.json", "-o", "engines", "--dim", "time=3"), "`T`"),
    ],
)
def test_a_wrong_call_says_what_to_type(typed: Typed, tmp_path: Path, args: tuple[str, ...], hint: str) -> None:
    code, out, err = typed("bundle", *args)
    assert code in (2, 4) and out == "" and hint in err.partition("hint: ")[2]
    assert not (tmp_path / "engines").exists()


def test_inspect_says_of_a_folder_that_was_moved_whether_it_is_whole(typed: Typed, tmp_path: Path) -> None:
    typed("bundle", "export/model_meta.json", "-o", "engines")
    (tmp_path / "engines").rename(tmp_path / "moved")
    code, out, _ = typed("inspect", "moved", "--run", "--json")
    told = document(out)
    assert code == 0 and told["kind"] == "bundle" and told["complete"] and told["warnings"] == []
    assert len(told["chain"]) == 4 and all(engine["smoke_run"] for engine in told["engines"].values())
    (tmp_path / "moved" / "joint.engine.onnx.json").unlink()
    code, out, _ = typed("inspect", "moved", "--json")
    told = document(out)
    assert code == 0 and not told["complete"] and any("`joint`" in text for text in told["warnings"])
    assert typed("inspect", "moved", "--run")[0] == 10
    assert typed("inspect", "moved", "--shapes", "y:1x2")[0] == 2


# ------------------------------------------------------------------------------------------------ the page


@pytest.fixture
def repository(tmp_path: Path, own_store: Path) -> Iterator[Path]:
    """A folder with the examples, as a checkout has them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield tmp_path


@pytest.mark.slow
def test_the_commands_and_the_program_of_the_page_do_what_it_shows(repository: Path) -> None:
    console = next(iter(re.findall(r"```console\n(.*?)```", PAGE, re.S)))
    program = next(iter(re.findall(r"```python\n(.*?)```", PAGE, re.S)))
    shown, output = 0, ""
    for line in console.splitlines():
        if line.startswith("$ "):
            words = shlex.split(line[2:])
            start = [sys.executable] if words[0] == "python" else [sys.executable, "-c", MAIN]
            done = subprocess.run([*start, *words[1:]], cwd=repository, env=os.environ, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            output = done.stdout
        elif line != "...":
            assert line in output.splitlines()
            shown += 1
    assert shown >= 4
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "joint.engine.onnx" in done.stdout and "encoder_outputs" in done.stdout


def test_the_meta_file_of_the_page_is_one(tmp_path: Path) -> None:
    from trt_engine.verbs.bundle.model_meta import read_meta

    text = next(iter(re.findall(r"```json\n(.*?)```", PAGE, re.S)))
    jsonschema.validate(json.loads(text), json.loads((ROOT / "docs" / "model_meta.schema.json").read_text()))
    (tmp_path / "m.json").write_text(text)
    found = read_meta(tmp_path / "m.json")
    assert [item.name for item in found.components] == ["tower", "head"] and len(found.links) == 2

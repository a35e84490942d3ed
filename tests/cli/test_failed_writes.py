"""A verb that fails while it writes, or right after, leaves the files that were there and none of its own."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnx_models import FLOAT, node, save
from trt_engine.cli.main import run
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

VERBS: dict[str, tuple[str, ...]] = {
    "build": ("net.onnx", "-o", "OUT.engine.onnx"),
    "cast": ("net.onnx", "--to", "fp16", "-o", "OUT.onnx"),
    "compare": ("e.onnx", "e.onnx", "--duration", "200ms", "-o", "OUT", "--save-baseline", "OUT/base.json"),
    "deploy triton": ("e.onnx", "-o", "OUT"),
    "convert": ("net.onnx", "--opset", "18", "-o", "OUT.onnx"),
    "evaluate": ("e.onnx", "--dataset", "val.npz", "-o", "OUT"),
    "example": ("-o", "OUT"),
    "infer": ("e.onnx", "--random", "-o", "OUT.npz"),
    "migrate": ("OUT", "--fix"),
    "pack": ("run", "-o", "OUT.tar.gz"),
    "profile": ("e.onnx", "--duration", "50ms", "--warmup", "0", "-o", "OUT"),
    "quantize": ("net.onnx", "--to", "int8", "--calib-data", "cal.npz", "-o", "OUT.onnx"),
    "ranges": ("net.onnx", "-o", "OUT.json"),
    "report": ("run", "-o", "OUT.html"),
    "upgrade-check": ("run", "run", "-o", "OUT"),
}
"""The verbs whose files are one result. Those that measure or build one thing after another keep what is finished."""
KEPT = ("records.jsonl", "bench.log", "onnxruntime.json")
"""Raw data that `profile` keeps whatever becomes of its report."""
NOTHING_AFTER = ("ranges", "report")
SLOW = ("compare", "profile")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, its engine, data, and the folder of a run."""
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    save(
        folder / "net.onnx",
        [
            node("Conv", "images k", "c", pads=[1, 1, 1, 1]),
            node("GlobalAveragePool", "c", "mean"),
            node("Flatten", "mean", "flat"),
            node("MatMul", "flat w", "scores"),
        ],
        {"images": (FLOAT, ["batch", 3, 4, 4])},
        {"scores": (FLOAT, ["batch", 3])},
        {"k": rng.normal(size=(8, 3, 3, 3)).astype(np.float32), "w": rng.normal(size=(8, 3)).astype(np.float32)},
    )
    classes = Postprocess("classify", classes=("red", "green", "blue"), activation="softmax")
    declare(folder / "net.onnx", Vision(Preprocess((4, 4)), classes), folder / "net.onnx")
    images = rng.uniform(0, 1, (8, 3, 4, 4)).astype(np.float32)
    np.savez(folder / "cal.npz", images=images)
    np.savez(folder / "val.npz", images=images, labels=np.arange(8) % 3)
    (folder / "run.yaml").write_text("models: [net.onnx]\nwarmup: 2\niterations: 3\nmodes: bench\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TRT_ENGINE_STORE", str(folder / "store"))
        assert run(["build", "net.onnx", "-o", "e.onnx", "-q"]) == 0
        assert run(["run", "run.yaml", "-o", "run", "-q"]) == 0
    return folder


class Renames:
    """Renames to visible names in a folder: counted, and one of them fails, before it is done or after."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.after, self.count = 0, False, 0
        rename: Callable[..., Path] = Path.replace

        def replace(path: Path, target: Path) -> Path:
            shown = os.path.relpath(target, folder)
            if shown.startswith("..") or "/." in f"/{shown}":
                return rename(path, target)
            self.count += 1
            if self.count == self.at and not self.after:
                raise OSError(errno.ENOSPC, "No space left on device", str(target))
            done = rename(path, target)
            if self.count == self.at:
                raise RuntimeError("planted")
            return done

        monkeypatch.setattr(Path, "replace", replace)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.slow) if verb in SLOW else verb for verb in VERBS]
)
def test_a_verb_that_fails_as_it_writes_leaves_what_was_there_and_nothing_of_its_own(
    verb: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.setenv("TRT_ENGINE_STORE", str(made / "store"))
    renames = Renames(tmp_path, monkeypatch)

    def call(*more: str, at: int = 0, after: bool = False) -> int:
        renames.at, renames.after, renames.count = at, after, 0
        words = [word.replace("OUT", str(tmp_path / "out")) if word.startswith("OUT") else word for word in VERBS[verb]]
        return run([*verb.split(), *words, *more, "-q"])

    scripts = [tmp_path / "out" / f"{name}.sh" for name in "ab"] if verb == "migrate" else []
    for script in scripts:
        script.parent.mkdir(exist_ok=True)
        script.write_text("trtexec --onnx=a.onnx --buildOnly --saveEngine=a.plan\n")
    before = files(tmp_path)
    assert call(at=1) == 3 and "the disk is full" in capsys.readouterr().err
    assert {name: raw for name, raw in files(tmp_path).items() if Path(name).name not in KEPT} == before
    if not scripts:
        assert call() == 0, capsys.readouterr().err
        for name in (there := files(tmp_path)):
            (tmp_path / name).write_bytes(there[name] if Path(name).name in KEPT else b"old")
    whole, last = files(tmp_path), renames.count
    again = () if scripts else ("--overwrite",)
    for after in (False, True) if verb not in NOTHING_AFTER else (False,):
        at = random.Random(verb).randint(1, last)
        assert call(*again, at=at, after=after) == (1 if after else 3), capsys.readouterr().err
        found = files(tmp_path)
        assert set(found) == set(whole)
        assert not [name for name in whole if found[name] != whole[name] and Path(name).name not in KEPT]

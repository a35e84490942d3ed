"""Every recipe of examples/recipes from its architecture to a stream count, and what its pages say of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import trt_engine as te
from programs import load_program, needs, run_python

pytestmark = [
    *needs("torch", "onnxscript", "transformers"),
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
README = (RECIPES / "README.md").read_text()
SINGLE = {
    "yolo": ("images", ["output0"]),
    "rtdetr": ("pixel_values", ["logits", "pred_boxes"]),
    "detr": ("pixel_values", ["logits", "pred_boxes"]),
    "vit": ("pixel_values", ["logits"]),
    "bert": ("input_ids", ["last_hidden_state", "pooled"]),
}


def made(name: str, folder: Path) -> str:
    """A recipe run as its README says, in small; gives what it printed."""
    environment = os.environ | {"TRT_ENGINE_STORE": str(folder / "store")}
    done = run_python(f"examples/recipes/{name}.py", "-o", str(folder), "--small", cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def agrees(path: Path) -> dict[str, Any]:
    """The report of `convert` beside a model: equal to its source at every set of sizes, each symbol at two or more."""
    report: dict[str, Any] = json.loads(path.with_suffix(".convert.json").read_text())
    assert report["exporter"] == "dynamo" and report["max_rel"] <= 1e-4
    assert len({str(item["shapes"]) for item in report["verification"]}) == len(report["verification"]) >= 3
    for symbol in report["dynamic"]:
        assert len({item["sizes"][symbol["symbol"]] for item in report["verification"]}) >= 2
    return report


def said(name: str) -> set[str]:
    """The findings that the README's table tells of a recipe."""
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{name}.py`")]
    return set(re.findall(r"`([a-z0-9-]+)`", row.rsplit("|", 2)[1]))


def codes(path: Path) -> set[str]:
    return {item.code for item in te.lint(path).findings}


def recipe(name: str) -> Any:
    """A recipe's own module."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    return load_program(RECIPES / f"{name}.py", f"recipe_{name}")


def arguments(options: tuple[str, ...]) -> dict[str, int]:
    return {name: int(value) for name, _, value in (item.partition("=") for item in options)}


@pytest.mark.parametrize("name", SINGLE)
def test_a_recipe_goes_from_its_architecture_to_a_stream_count(name: str, tmp_path: Path) -> None:
    printed = made(name, tmp_path)
    verbs = [line.split()[2] for line in printed.splitlines() if line.startswith("$ trt-engine")]
    assert verbs == ["convert", "lint", "build", "size"]
    report = agrees(tmp_path / f"{name}.onnx")
    first, outputs = SINGLE[name]
    inputs = report["signature"]["inputs"]
    assert inputs[0]["name"] == first and [item["name"] for item in report["signature"]["outputs"]] == outputs
    signature = report["signature"]
    assert all(item["symbols"][0] == "batch" for side in ("inputs", "outputs") for item in signature[side])
    if name == "bert":
        assert {item["name"]: (item["dtype"], item["symbols"]) for item in inputs} == dict.fromkeys(
            ("input_ids", "attention_mask"), ("int64", ["batch", "sequence"])
        )
    assert codes(tmp_path / f"{name}.onnx") == said(name)
    size = json.loads((tmp_path / "size" / "size.json").read_text())
    assert size["complete"] and size["peak_streams"] >= 0 and [item["batch"] for item in size["batches"]] == [1, 4]
    with te.load(tmp_path / f"{name}.engine.onnx") as engine:
        assert [spec.name for spec in engine.outputs] == outputs


def test_an_rnnt_recipe_has_the_signatures_of_the_example_and_is_bundled(tmp_path: Path) -> None:
    printed = made("rnnt", tmp_path / "made")
    verbs = [line.split()[2] for line in printed.splitlines() if line.startswith("$ trt-engine")]
    assert verbs == [*("convert", "lint") * 3, "bundle", "size"]
    subprocess.run([sys.executable, ROOT / "examples/rnnt/export.py", tmp_path / "example"], check=True)
    found: set[str] = set()
    for name in ("encoder", "predictor", "joint"):
        agrees(tmp_path / "made" / f"{name}.onnx")
        found |= codes(tmp_path / "made" / f"{name}.onnx")
        assert _signature(tmp_path / "made" / f"{name}.onnx") == _signature(tmp_path / "example" / f"{name}.onnx")
    assert found == said("rnnt")
    report = json.loads((tmp_path / "made" / "engines" / "build_report.json").read_text())
    assert report["complete"] and len(report["components"]) == 3 and report["chain"]
    assert all(item["matches"] for item in report["connections"])
    assert json.loads((tmp_path / "made" / "size" / "size.json").read_text())["complete"]
    meta = json.loads((tmp_path / "made" / "model_meta.json").read_text())
    assert meta.keys() == json.loads((tmp_path / "example" / "model_meta.json").read_text()).keys()


def _signature(path: Path) -> list[tuple[str, int, list[str]]]:
    """Names, types, and which axes are open by which name; fixed sizes and the encoder's frames are a model's own."""
    graph = onnx.load(path, load_external_data=False).graph
    return [
        (
            value.name,
            value.type.tensor_type.elem_type,
            [dim.dim_param if dim.dim_param in ("B", "T", "U") else "" for dim in value.type.tensor_type.shape.dim],
        )
        for value in (*graph.input, *graph.output)
    ]


def test_the_detector_follows_every_size_and_its_scores_are_right_by_themselves(tmp_path: Path) -> None:
    """Boxes in pixels drown the scores in the comparison of the whole output."""
    import torch

    report = te.convert(
        f"{RECIPES / 'yolo.py'}:yolo", out=tmp_path / "o.onnx", options={"classes": 4}, inputs="images:2x3x64x96",
        dynamic="images:0=batch@1..64,2=height@64..640/32,3=width@64..640/32",
    )  # fmt: skip
    assert {item.symbol for item in report.dynamic} == {"batch", "height", "width"} and report.max_rel <= 1e-4
    images = np.random.default_rng(1).random((3, 3, 160, 128), dtype=np.float32)
    session = ort.InferenceSession(tmp_path / "o.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"images": images})
    with torch.no_grad():
        wanted = recipe("yolo").yolo(classes=4).eval()(torch.from_numpy(images))["output0"].numpy()
    assert got.shape == (3, 8, 20 * 16 + 10 * 8 + 5 * 4)
    assert wanted[:, 4:].std() > 1e-3, "scores that are all alike would show nothing"
    np.testing.assert_allclose(got[:, 4:], wanted[:, 4:], atol=1e-4)
    assert (wanted[:, 2:4] > 0).all()


def test_detr_without_its_mask_path_is_detr_with_a_mask_of_ones(tmp_path: Path) -> None:
    import torch

    module = recipe("detr")
    small = arguments(module.SMALL.options)
    bare, masked = module.detr(**small).eval(), module.detr(mask=True, **small).eval()
    images = torch.randn(2, 3, 64, 96)
    ones, half = torch.ones(2, 64, 96, dtype=torch.int64), torch.ones(2, 64, 96, dtype=torch.int64)
    half[:, :, 48:] = 0
    with torch.no_grad():
        got, wanted, other = bare(images), masked(images, ones), masked(images, half)
    for name in ("logits", "pred_boxes"):
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5)
    assert (other["logits"] - wanted["logits"]).abs().max() > 1e-3, "the mask makes a difference"

    report = te.convert(
        f"{RECIPES / 'detr.py'}:detr", out=tmp_path / "o.onnx", options={"mask": True, **small},
        inputs=["pixel_values:2x3x64x96", "pixel_mask:2x64x96:int64"], dynamic="*:0=batch@1..16",
    )  # fmt: skip
    assert report.max_rel is not None and report.max_rel <= 1e-4
    assert {item.code for item in report.findings} == said("detr") | {"detr-mask-path", "int64"}


def test_rt_detr_never_reads_its_mask() -> None:
    import torch

    module = recipe("rtdetr")
    network = module.rtdetr(**arguments(module.SMALL.options)).eval().network
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        plain, masked = network(images), network(images, pixel_mask=torch.zeros(2, 96, 96, dtype=torch.int64))
    assert torch.equal(plain.logits, masked.logits) and torch.equal(plain.pred_boxes, masked.pred_boxes)


def test_the_readme_has_the_commands_that_the_recipes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    networks = [(name, recipe(name).USUAL) for name in SINGLE]
    networks += [("rnnt", item) for item in recipe("rnnt").recipes(small=False).values()]
    steps = sys.modules["steps"]
    for name, network in networks:
        words = steps.conversion(str(RECIPES / f"{name}.py"), network)
        assert f"\ntrt-engine {shlex.join(words)}\n" in README

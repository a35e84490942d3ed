"""What `inspect`, `lint`, `build` and `size` say of graphs that ONNX Runtime's own tool quantised, and ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import onnx_models as models
from documents import document
from trt_engine.precision.quantize_model import quantize

ROOT = Path(__file__).parents[2]
RESNET = ROOT / "examples" / "classifiers" / "resnet.onnx"


@pytest.fixture(scope="module")
def for_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cpu") / "cpu.onnx"
    models.quantize_statically(RESNET, path)
    return path


@pytest.fixture(scope="module")
def for_tensorrt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tensorrt") / "tensorrt.onnx"
    quantize(RESNET, "int8", out=path, calib_data="random", parity=False)
    return path


Call = Callable[..., tuple[int, str, str]]


def findings(call: Call, *words: object) -> dict[str, str]:
    code, out, err = call("lint", *words, "--json")
    assert code == 0, err
    return {item["code"]: item["severity"] for item in document(out)["findings"]}


def test_inspect_says_for_whom_the_pairs_are_placed(call: Call, for_the_cpu: Path, for_tensorrt: Path) -> None:
    _, cpu, _ = call("inspect", for_the_cpu)
    _, tensorrt, _ = call("inspect", for_tensorrt)
    _, plain, _ = call("inspect", RESNET)

    assert (
        "Q/DQ placed for: onnxruntime-cpu (U8, results quantised)\n  tensorrt takes 0 of 16 layers: UINT8 pairs (16)"
        in cpu
    )
    assert "asymmetric-zero-point" not in cpu and "findings: none" in cpu
    assert (
        "Q/DQ placed for: tensorrt, tensorrt-rtx, onnxruntime-tensorrt (S8 symmetric, results in float; "
        "the file states tensorrt)\n  onnxruntime-cpu takes 0 of 15 convolutions: "
    ) in tensorrt
    assert "placed for" not in plain


def test_the_document_has_every_target_with_its_reasons(call: Call, for_tensorrt: Path) -> None:
    _, out, _ = call("inspect", for_tensorrt, "--json")
    support = {item["target"]: item for item in document(out)["placement"]["support"]}

    assert support["tensorrt"]["supported_layers"] == support["tensorrt"]["layers"] == 15
    assert sum(support["onnxruntime-cpu"]["reasons"].values()) == 15
    assert support["onnxruntime-cuda"]["reasons"] == {"no CUDA kernels that take quantised layers": 15}


def test_lint_judges_the_pairs_by_the_target(call: Call, for_the_cpu: Path, for_tensorrt: Path) -> None:
    typed = {"asymmetric-zero-point", "quantized-type", "limited-in-tensorrt"}

    assert findings(call, for_the_cpu) == {"quant-placement": "info"}
    assert findings(call, for_the_cpu, "--target", "onnxruntime") == {}
    assert findings(call, for_the_cpu, "--target", "onnxruntime-cpu") == {}
    strict = findings(call, for_the_cpu, "--target", "tensorrt", "--support-from", "static")
    assert strict["quant-placement"] == "error" and typed <= set(strict)

    assert findings(call, for_tensorrt) == {"quant-placement": "info"}
    assert findings(call, for_tensorrt, "--target", "tensorrt", "--support-from", "static") == {}
    assert findings(call, for_tensorrt, "--target", "onnxruntime") == {"quant-placement": "warning"}
    assert findings(call, for_tensorrt, "--target", "onnxruntime-cuda") == {"quant-placement": "warning"}


def test_a_dry_build_shows_the_target_and_refuses_a_graph_placed_elsewhere(
    call: Call, for_the_cpu: Path, for_tensorrt: Path
) -> None:
    _, out, err = call("build", for_the_cpu, "--precision", "int8", "--dry-run")
    assert (
        "target:    ONNX Runtime's CPU provider (onnxruntime-cpu)" in out
        and "zero-point" not in err
        and "Q/DQ" not in err
    )
    _, out, _ = call("build", for_the_cpu, "--dry-run", "--json")
    assert json.loads(out)["quant_target"] == "onnxruntime-cpu"
    _, out, _ = call("build", RESNET, "--dry-run", "--json")
    assert json.loads(out)["quant_target"] is None

    code, _, err = call("build", for_tensorrt, "--precision", "int8", "--dry-run")
    assert code == 6 and "fuses 0 of 15 convolutions" in err

"""Five architectures of transformers, and two defects, through the program of the sweep: ONNX Runtime against PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from programs import needs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = needs("torch", "onnxscript", "transformers")


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize(
    "name",
    ["hf_gpt2", "hf_llama", "hf_t5_encoder", "hf_whisper_encoder", "hf_segformer"],  # BERT, ViT, DETR: test_recipes.py
)
def test_an_architecture_converts_at_the_first_call_and_is_right_at_batches_nobody_compared(
    name: str, tmp_path: Path
) -> None:
    import convert_sweep

    found = convert_sweep.one(name, tmp_path)
    assert found["outcome"] == "right", found
    assert sorted(found["errors"]) == [1, 3, 7] and max(found["errors"].values()) <= 1e-4


@pytest.mark.parametrize("name", ["planted_branch", "planted_batch_norm"])
def test_a_defect_is_refused_with_its_line_and_an_option_or_what_to_write(name: str, tmp_path: Path) -> None:
    import convert_sweep

    found = convert_sweep.one(name, tmp_path)
    assert found["outcome"] == "refused" and found["line"], found
    assert "sweep_networks.py:" in found["message"]


def test_untrained_scores_that_tie_are_refused_with_the_recipe(tmp_path: Path) -> None:
    import convert_sweep

    found = convert_sweep.one("hf_rtdetr", tmp_path)
    assert found["outcome"] == "right" or "`examples/recipes/rtdetr.py`" in found["hint"], found

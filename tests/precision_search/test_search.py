"""`search` on real models: a layer planted to suffer in INT8 is found, and the list it ends with makes that very model."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_models import FLOAT, node, save
from trt_engine.cli.main import run as run_cli
from trt_engine.config.precision import QuantizeConfig, SearchConfig
from trt_engine.config.settings import from_values
from trt_engine.errors import Interrupted, ModelError, UsageError
from trt_engine.records.search import SearchTrial
from trt_engine.verbs.evaluate.run import evaluate
from trt_engine.verbs.search import run as search_module
from trt_engine.verbs.search.run import SearchJob, _search_points, run, search
from trt_engine.verbs.search.trial import MixedPrecision

pytest.importorskip("PIL", reason="pillow reads the pictures")

from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Tells pictures by their two means. Between `first` and `last`, `fragile` reads a tensor with one channel of 1000
    beside the two small ones that carry the answer: in INT8 they all but vanish."""
    eye = np.eye(3, dtype=np.float32)
    plain = save(
        tmp_path / "net.onnx",
        [
            node("GlobalAveragePool", "images", "mean"),
            node("Flatten", "mean", "flat"),
            node("MatMul", "flat w1", "m1", name="first"),
            node("Mul", "m1 spread", "wide"),
            node("MatMul", "wide w2", "m2", name="fragile"),
            node("Mul", "m2 narrow", "even"),
            node("MatMul", "even w3", "m3", name="third"),
            node("MatMul", "m3 w4", "scores", name="last"),
        ],
        {"images": (FLOAT, ["batch", 3, 4, 4])},
        {"scores": (FLOAT, ["batch", 3])},
        {
            "w1": eye,
            "spread": np.float32([1, 1, 1000]),
            "w2": eye,
            "narrow": np.float32([1, 1, 0.001]),
            "w3": eye,
            "w4": np.float32([[1, 0, 0], [0, 1, 0], [0, 0, 0]]),
        },
    )
    vision = Vision(Preprocess((4, 4)), Postprocess("classify", classes=("red", "green", "blue"), activation="softmax"))
    return declare(plain, vision, plain)


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    """A dataset of 40 pictures, redder or greener by 60 of 255, all blue; and calibration inputs like them."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    images = np.full((40, 3, 4, 4), 1.0, np.float32)
    images[:, :2] = rng.uniform(0.3, 0.5, (40, 2, 1, 1))
    images[np.arange(40), labels] += 0.3
    np.savez(tmp_path / "val.npz", images=images, labels=labels)
    np.savez(tmp_path / "cal.npz", images=images[::2] * 0.99)
    return tmp_path / "val.npz", tmp_path / "cal.npz"


def plan(model: Path, dataset: Path, *, config: QuantizeConfig | None = None, **settings: Any) -> SearchJob:
    return search_module.plan(model, dataset, from_values(SearchConfig, settings), config)


@pytest.mark.slow
def test_the_layer_that_suffers_is_left_in_float_and_the_command_makes_the_model_that_was_verified(
    tmp_path: Path, net: Path, data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    val, cal = data
    monkeypatch.setattr(search_module, "slowdown", lambda *_: 0.5)
    report = search(
        net,
        val,
        calib_data=cal,
        budget=0.0,
        out=tmp_path / "found",
        subset=20,
        target="tensorrt",
        config=QuantizeConfig(quantize_outputs=True),
    )
    assert report.baseline == report.metric_value == 1.0
    assert set(report.quantized) == {"first", "third", "last"} and report.excluded == ("fragile",)
    worst = report.groups[0]
    assert worst.nodes == ("fragile",) and worst.drop is not None and worst.drop > 0.3 and not worst.quantized
    assert (tmp_path / "found" / "exclude.txt").read_text() == "fragile\n"
    assert report.macs == pytest.approx(0.75)
    assert {item.stage for item in report.points if item.images == 40} >= {"baseline", "all", "verified"}
    verified = next(item for item in report.points if item.stage == "verified")
    assert verified.measured_on == "kernels" and verified.latency_ms is not None and verified.pareto
    everything = next(item for item in report.points if item.stage == "all")
    assert everything.drop > 0.3

    assert report.next_command is not None
    typed = shlex.split(report.next_command)
    monkeypatch.setattr(sys, "argv", typed)
    assert run_cli(typed[1:]) == 0
    made = net.with_suffix(".int8.onnx")
    assert made.stat().st_size == verified.nbytes
    assert evaluate(made, val).metrics["top1"] == 1.0


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on_and_a_finished_one_measures_nothing(
    tmp_path: Path, net: Path, data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    val, cal = data
    settings: dict[str, Any] = {"calib_data": cal, "budget": 0.0, "out": tmp_path / "found", "subset": 20}
    judged: list[int] = []
    real = MixedPrecision.__call__

    def stopped(self: MixedPrecision, *given: Any) -> Any:
        if len(judged) == 3:
            raise KeyboardInterrupt
        judged.append(1)
        return real(self, *given)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="after 3 measurements"):
        patch.setattr(MixedPrecision, "__call__", stopped)
        search(net, val, **settings)
    assert not (tmp_path / "found" / "search.json").exists()
    first = search(net, val, **settings)
    assert first.new_trials == first.trials - 3
    again = search(net, val, **settings)
    assert again.new_trials == 0 and again.quantized == first.quantized and again.points == first.points


def test_a_huge_budget_takes_everything_and_asks_nothing_of_single_layers(
    tmp_path: Path, net: Path, data: tuple[Path, Path]
) -> None:
    report = search(net, data[0], calib_data=data[1], budget=1.0, out=tmp_path / "found")
    assert len(report.quantized) == 3 and report.trials == 2
    assert report.excluded == ("last",)  # as `quantize` does by itself: the layer before the output
    assert all(group.drop is None and group.quantized for group in report.groups)


@pytest.mark.parametrize("times, verdict", [(1.5, "slower"), (0.99, "no faster"), (0.5, "")])
def test_a_result_that_is_no_faster_ends_with_the_original(
    tmp_path: Path, net: Path, data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, times: float, verdict: str
) -> None:
    monkeypatch.setattr(search_module, "slowdown", lambda *_: times)
    report = search(net, data[0], calib_data=data[1], budget=1.0, out=tmp_path / "found")
    assert str(report.next_command).startswith(f"trt-engine {'build' if verdict else 'quantize'} {net}")
    assert [f"is {verdict} than the original here" in text for text in report.warnings] == [True] * bool(verdict)


def test_fp8_is_measured_by_its_emulation_and_claims_no_latency(
    tmp_path: Path, net: Path, data: tuple[Path, Path]
) -> None:
    report = search(net, data[0], calib_data=data[1], to="fp8", budget=1.0, out=tmp_path / "found")
    everything = next(item for item in report.points if item.stage == "all")
    assert everything.measured_on == "emulation" and everything.latency_ms is None
    assert next(item for item in report.points if item.stage == "baseline").latency_ms is not None


def test_a_dry_run_names_the_layers_and_writes_nothing(
    tmp_path: Path, net: Path, data: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["search", str(net), "--dataset", str(data[0]), "--calib-data", str(data[1]), "-o", str(tmp_path / "found")]
    assert run_cli([*typed, "--max-groups", "2", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [name for group in told["settings"]["groups"] for name in group] == ["first", "fragile", "third"]
    assert len(told["settings"]["groups"]) == 2 and told["dry_run"] is True
    assert not (tmp_path / "found").exists()


def test_a_model_with_nothing_to_quantise_is_refused_before_anything_is_measured(
    tmp_path: Path, data: tuple[Path, Path]
) -> None:
    plain = save(
        tmp_path / "plain.onnx",
        [node("GlobalAveragePool", "images", "mean"), node("Flatten", "mean", "scores")],
        {"images": (FLOAT, ["batch", 3, 4, 4])},
        {"scores": (FLOAT, ["batch", 3])},
        {},
    )
    declare(plain, Vision(Preprocess((4, 4)), Postprocess("classify", activation="softmax")), plain)
    with pytest.raises(ModelError, match="no layer with weights"):
        search(plain, data[0], calib_data=data[1], out=tmp_path / "found")
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"budget": -0.1}, "`--budget` is -0.1, expected 0 or more"),
        ({"budget": float("nan")}, "`--budget` is nan, expected 0 or more"),
        ({"subset": 0}, "`--subset` is 0, expected 1 or more"),
        ({"max_groups": 0}, "`--max-groups` is 0, expected 1 or more"),
        ({"to": "nvfp4"}, "`to` cannot be `nvfp4`"),
        ({"calib_data": None}, "no calibration data is given"),
        ({"config": QuantizeConfig(exclude_nodes=("frist",))}, "no node `frist`"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(
    tmp_path: Path, net: Path, data: tuple[Path, Path], settings: dict[str, Any], found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        plan(net, data[0], **({"calib_data": data[1], "out": tmp_path / "found"} | settings))
    assert not (tmp_path / "found").exists()


def test_calibration_takes_what_quantize_takes_a_dataset_with_labels_among_it(
    tmp_path: Path, net: Path, data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.setattr(search_module, "slowdown", lambda *_: 0.5)
    pictures = np.load(data[0])["images"][:8]
    for at, picture in enumerate(pictures):
        place = tmp_path / "folders" / ("red", "green")[at % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((picture.transpose(1, 2, 0) * 255).astype(np.uint8)).save(place / f"{at}.png")
    for given in (data[0], tmp_path / "folders"):
        report = search(net, data[0], calib_data=given, budget=1.0, out=tmp_path / f"found-{given.name}")
        assert len(report.quantized) == 3
        typed = shlex.split(str(report.next_command))
        assert typed[typed.index("--calib-data") + 1] == str(given)
        monkeypatch.setattr(sys, "argv", typed)
        assert run_cli([*typed[1:], "--overwrite"]) == 0, "the command takes the data and the ranges kept of it"


def test_the_folder_of_another_search_is_kept_without_overwrite(
    tmp_path: Path, net: Path, data: tuple[Path, Path]
) -> None:
    out = tmp_path / "found"
    search(net, data[0], calib_data=data[1], budget=1.0, out=out)
    with pytest.raises(UsageError, match="is of another search"):
        plan(net, data[0], calib_data=data[1], budget=1.0, out=out, to="fp8")
    with pytest.raises(UsageError, match=r"is of the budget 1, now it is 0\.5"):
        plan(net, data[0], calib_data=data[1], budget=0.5, out=out)
    plan(net, data[0], calib_data=data[1], budget=1.0, out=out)
    planned = plan(net, data[0], calib_data=data[1], budget=1.0, out=out, to="fp8", overwrite=True)
    assert planned.digest != json.loads((out / search_module.REPORT_FILE).read_text())["digest"]


def test_a_model_that_scores_nothing_has_nothing_to_keep(tmp_path: Path, net: Path, data: tuple[Path, Path]) -> None:
    archive = np.load(data[0])
    np.savez(tmp_path / "wrong.npz", images=archive["images"], labels=np.full(40, 2))
    with pytest.raises(UsageError, match="expected above 0"):
        run(plan(net, tmp_path / "wrong.npz", calib_data=data[1], out=tmp_path / "found"))


def test_names_to_exclude_may_come_from_a_file_and_one_that_is_not_there_is_said(
    tmp_path: Path, net: Path, data: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "names.txt").write_text("first\n\n  fragile\n")
    typed = [
        "quantize",
        str(net),
        "--to",
        "int8",
        "--calib-data",
        str(data[1]),
        "--dry-run",
        "--json",
        "--quantize-outputs",
    ]
    assert run_cli([*typed, "--exclude-node", f"@{tmp_path / 'names.txt'}", "--exclude-node", "third"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [item["node"] for item in told["quantized"]] == ["last"]
    assert run_cli([*typed, "--exclude-node", f"@{tmp_path / 'none.txt'}"]) == 2
    assert "cannot read names" in capsys.readouterr().err


def test_layers_are_quantised_for_the_library_that_measures_unless_another_is_named(
    tmp_path: Path, net: Path, data: tuple[Path, Path]
) -> None:
    def target(**given: Any) -> str:
        return plan(net, data[0], calib_data=data[1], out=tmp_path / "found", **given).mixed_precision.config.target

    assert target() == "onnxruntime-cpu"
    assert target(target="tensorrt") == "tensorrt"
    assert target(to="fp8") == "tensorrt"  # emulated, placed as for TensorRT
    assert target(config=QuantizeConfig(target="onnxruntime-tensorrt")) == "onnxruntime-tensorrt"


def test_a_mixture_that_is_slower_does_not_beat_the_original() -> None:
    def trial(nodes: tuple[str, ...], macs: float, ms: float) -> SearchTrial:
        figures = {"metric": 1.0, "images": 10, "nbytes": 100, "batch": 1, "measured_on": "kernels"}
        own = {"key": "", "search": "", "stage": "all", "nodes": nodes, "macs": macs, "seconds": 1.0}
        return SearchTrial(samples_ms=(ms,) * 9, **figures, **own)

    for ms, front in ((30.0, [True, True]), (10.0, [True, False])):
        points = _search_points([trial((), 0.0, 20.0), trial(("conv",), 0.5, ms)])
        assert [point.pareto for point in points] == front

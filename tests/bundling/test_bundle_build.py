"""`bundle`: three networks with side files become one folder of engines, logs and a report; and what goes wrong is told."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import rnnt_models as rnnt

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine import errors
from trt_engine.config.build import BuildConfig, BundleConfig
from trt_engine.engine import Engine
from trt_engine.records.bundle import BundleReport
from trt_engine.records.passport import NOT_VALIDATED
from trt_engine.verbs.bundle.bundle_plan import plan
from trt_engine.verbs.bundle.run import execute
from trt_engine.verbs.bundle_folder import inspect_bundle, is_bundle
from trt_engine.verbs.doctor.machine import requirement_holds
from trt_engine.verbs.inspect.run import inspect

pytestmark = pytest.mark.usefixtures("kept_engines")

NAMES = ("encoder", "predictor", "joint")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The meta file of a small RNNT-TDT."""
    return rnnt.export(tmp_path / "export")


def on_disk(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "build_report.json").read_text())
    return document


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def states(report: BundleReport) -> dict[str, str]:
    return {item.name: item.status for item in report.components}


# ------------------------------------------------------------------------------------------------ all of it


def test_three_models_with_side_files_become_one_folder(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    report = te.bundle(exported, out, run=True)
    assert report.complete and states(report) == dict.fromkeys(NAMES, "built")
    engines = {f"{name}.engine.onnx{end}" for name in NAMES for end in ("", ".json")}
    weights = {file for file in files_in(out) if file.endswith(".weights")}
    assert files_in(out) == engines | weights | {f"build_logs/{name}.log" for name in NAMES} | {"build_report.json"}
    assert weights and not list(tmp_path.glob("**/*.tmp"))
    for name in NAMES:
        engine = Engine.open(out / f"{name}.engine.onnx")
        engine.verify()
        assert engine.passport.parity is not None and engine.passport.parity.passed
        assert engine.passport.model.file == str(exported.parent / f"{name}.onnx")
    document = on_disk(out)
    assert document["schema"] == "trt-engine/bundle" and document["complete"] is True
    assert [item["engine"] for item in document["components"]] == [f"{name}.engine.onnx" for name in NAMES]
    assert [item["external"] for item in document["components"]] == [
        ["encoder.onnx.data"], ["predictor.weights"], ["data/joint.bin"],
    ]  # fmt: skip
    for item in document["components"]:
        engine = Engine.open(out / item["engine"])
        assert item["digest"] == engine.passport.payload[0].digest
        assert item["payload_bytes"] == sum(path.stat().st_size for path in engine.files)
        assert item["library"] == f"onnxruntime {ort.__version__}" and item["build_seconds"] > 0
    assert {"gpu", "cpu", "libraries"} <= set(document["environment"])


def test_engines_for_another_gpu_carry_their_references(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    report = te.bundle(exported, out, backend="fake", gpus="sm89")
    for name in NAMES:
        engine = Engine.open(out / f"{name}.engine.fake")
        assert (
            engine.validation == NOT_VALIDATED
            and str(engine.verify_reference()) == report.artifacts[f"{name}_reference"]
        )
    assert te.validate(out / "joint.engine.fake").state == "passed"
    (out / "encoder.engine.fake.reference.npz").unlink()
    again = te.bundle(exported, out, backend="fake", gpus="8.9")
    assert states(again) == {"encoder": "stored", "predictor": "kept", "joint": "kept"}
    assert Engine.open(out / "encoder.engine.fake").verify_reference()


def test_the_engines_of_a_bundle_answer_as_their_models_do(exported: Path, tmp_path: Path) -> None:
    te.bundle(exported, tmp_path / "engines")
    rng = np.random.default_rng(3)
    feeds: dict[str, dict[str, Any]] = {
        "encoder": {
            "audio_signal": rng.standard_normal((1, 128, 48), np.float32), "length": np.array([48], np.int64),
        },
        "predictor": {
            "y": np.array([[3, 7, 1]], np.int64),
            "h": rng.standard_normal((2, 1, 16), np.float32),
            "c": rng.standard_normal((2, 1, 16), np.float32),
        },
        "joint": {
            "encoder_output": rng.standard_normal((1, 32, 20), np.float32),
            "predictor_output": rng.standard_normal((1, 16, 2), np.float32),
        },
    }  # fmt: skip
    for name, feed in feeds.items():
        model = ort.InferenceSession(exported.parent / f"{name}.onnx", providers=["CPUExecutionProvider"])
        with te.load(tmp_path / "engines" / f"{name}.engine.onnx") as runner:
            got = runner.infer(feed)
        for spec, want in zip(model.get_outputs(), model.run(None, feed), strict=True):
            np.testing.assert_allclose(got[spec.name], want, rtol=1e-5, atol=1e-6)


def test_a_range_meant_for_one_component_wins_over_that_of_all_in_any_order(exported: Path, tmp_path: Path) -> None:
    for dims in (["joint.T=2:8:64", "T=16:64:512"], ["T=16:64:512", "joint.T=2:8:64"]):
        planned = plan(exported, tmp_path / "engines", BundleConfig(dims=dims), BuildConfig())
        ranges = {item.name: item.resolved.profile.ranges for item in planned.components}
        assert ranges["joint"]["encoder_output"].max == (1, rnnt.HEARD, 64)
        assert ranges["encoder"]["audio_signal"].max == (1, rnnt.MELS, 512)


@pytest.mark.usefixtures("empty_store")
def test_a_log_begins_with_the_command_that_builds_this_engine_alone(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    with _InfoLog():
        report = te.bundle(exported, out)
    for item in report.components:
        text = (out / "build_logs" / f"{item.name}.log").read_text()
        assert text.startswith(f"# {item.command}\n")
        assert f"building `{item.name}.onnx` with onnxruntime" in text and "staged" in text
        assert item.identity in text and str(item.digest) in text and "parity" in text
        assert "joint" not in text or item.name == "joint"


class _InfoLog:
    """The package's log on, as the command line has it."""

    def __enter__(self) -> None:
        self.before = logging.getLogger("trt_engine").level
        logging.getLogger("trt_engine").setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("trt_engine").setLevel(self.before)


def test_the_command_of_a_component_builds_the_same_engine(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex

    from trt_engine.cli.main import run

    monkeypatch.chdir(tmp_path)
    report = te.bundle(Path("export/model_meta.json"), "engines")
    for item in report.components:
        words = shlex.split(item.command)
        for end in ("", ".json"):
            (tmp_path / "engines" / f"{item.engine}{end}").unlink()
        assert run([*words[1:], "-q"]) == 0
        assert Engine.open(tmp_path / "engines" / str(item.engine)).passport.key == item.key


# ------------------------------------------------------------------------------------------------ again


def test_a_second_run_builds_only_what_changed(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    first = te.bundle(exported, out)
    before = {file: (out / file).stat().st_mtime_ns for file in files_in(out) if file != "build_report.json"}
    again = te.bundle(exported, out)
    assert again.complete and states(again) == dict.fromkeys(NAMES, "kept") and again.version == first.version
    assert {file: (out / file).stat().st_mtime_ns for file in before} == before

    rnnt.joint(exported.parent / "joint.onnx", location=None)
    changed = te.bundle(exported, out)
    assert states(changed) == {"encoder": "kept", "predictor": "kept", "joint": "built"}
    assert changed.version != first.version
    old = {file for file in before if file.startswith("joint.") and file.endswith(".weights")}
    assert old and not old & files_in(out), "weights no engine of the folder needs any more"

    assert states(te.bundle(exported, out, dims={"T": (16, 64, 512)})) == {
        "encoder": "built", "predictor": "kept", "joint": "built",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what goes wrong


def refused(
    exported: Path, out: Path, kind: type[errors.TrtEngineError] = errors.ModelError, **arguments: Any
) -> errors.TrtEngineError:
    """The error of a bundle that must not begin."""
    with pytest.raises(kind) as told:
        te.bundle(exported, out, **arguments)
    assert told.value.hint and not out.exists()
    return told.value


@pytest.mark.parametrize("file", ["encoder.onnx.data", "data/joint.bin"])
def test_a_missing_side_file_is_named_before_anything_is_built(exported: Path, tmp_path: Path, file: str) -> None:
    (exported.parent / file).unlink()
    error = refused(exported, tmp_path / "engines")
    assert error.exit_code == 4 and f"`{file}`" in error.message and file in str(error.hint)


def test_a_side_file_that_leads_out_of_the_folder_is_refused(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes((exported.parent / "predictor.weights").read_bytes())
    (exported.parent / "predictor.weights").unlink()
    (exported.parent / "predictor.weights").symlink_to(tmp_path / "secret")
    assert "leads outside" in refused(exported, tmp_path / "engines").message


def test_a_meta_file_of_another_export_is_refused(exported: Path, tmp_path: Path) -> None:
    rnnt.meta(exported.parent, features={"n_mels": 80})
    error = refused(exported, tmp_path / "engines")
    assert error.exit_code == 4
    assert "`features.n_mels`" in error.message and "80" in error.message and "batchx128xtime" in error.message


@pytest.mark.parametrize(
    ("dims", "said"),
    [(["B", 80, "T"], "fixed at 128"), (["B", "T"], "has 2 dimensions"), (["B", "F", "T"], "fixed at 128")],
)
def test_a_wrong_dimension_in_the_meta_file_is_refused(
    exported: Path, tmp_path: Path, dims: list[Any], said: str
) -> None:
    components: dict[str, Any] = {name: {} for name in NAMES}
    components["encoder"] = {"inputs": {"audio_signal": dims}}
    rnnt.meta(exported.parent, components=components, dimensions={"F": [64, 80, 96]})
    error = refused(exported, tmp_path / "engines")
    assert error.exit_code == 4 and said in error.message and "components.encoder.inputs.audio_signal" in error.message


def test_components_that_do_not_fit_are_refused_before_anything_is_built(exported: Path, tmp_path: Path) -> None:
    rnnt.joint(exported.parent / "joint.onnx", heard=40)
    error = refused(exported, tmp_path / "engines")
    assert error.exit_code == 4
    assert "`encoder.encoder_output -> joint.encoder_output`" in error.message
    assert "dimension 1 is 32 in the output and 40 in the input" in error.message
    assert "model_meta.json" in str(error.hint)


def test_a_declared_connection_that_does_not_hold_is_refused_with_its_line(exported: Path, tmp_path: Path) -> None:
    rnnt.meta(exported.parent, connections=["encoder.encoder_output -> joint.encoder_output",
                                            "encoder.encoder_output -> joint.predictor_output"])  # fmt: skip
    error = refused(exported, tmp_path / "engines")
    line = next(at for at, text in enumerate(exported.read_text().splitlines(), 1) if "joint.predictor_output" in text)
    assert "`connections[1]`" in error.message and f"(line {line})" in error.message
    rnnt.meta(exported.parent, connections=["encoder.encoder_outputs -> joint.encoder_output"])
    assert "`encoder_output`" in str(refused(exported, tmp_path / "engines").hint)
    rnnt.meta(exported.parent, connections=["encoder.encoder_output -> joint.encoder_output"] * 2)
    assert "already connected by" in refused(exported, tmp_path / "engines").message


def test_an_encoder_the_other_way_round_is_turned_or_the_remedy_is_said(exported: Path, tmp_path: Path) -> None:
    nodes = [node("Conv", "audio_signal w", "c", strides=[8]), node("Transpose", "c", "out", perm=[0, 2, 1])]
    save(
        exported.parent / "encoder.onnx", nodes, {"audio_signal": (FLOAT, ["batch", 128, "time"])},
        {"out": (FLOAT, ["batch", "frames", 32])}, {"w": np.ones((32, 128, 8), np.float32) / 1024},
    )  # fmt: skip
    report = te.bundle(exported, tmp_path / "engines", run=True)
    assert report.connections[0].transpose == (0, 2, 1) and report.connections[0].matches
    joined = next(step for step in report.chain if step.component == "joint")
    assert joined.inputs["encoder_output"]["shape"] == [1, 32, 32]
    rnnt.meta(exported.parent, connections=["encoder.out -> joint.encoder_output"])
    assert '"transpose": [0, 2, 1]' in str(refused(exported, tmp_path / "other").hint)
    for axes in ([0, 2, 1], [0, 1, 2]):  # who writes it down is believed
        told = {"from": "encoder.out", "to": "joint.encoder_output", "transpose": axes}
        rnnt.meta(exported.parent, connections=[told])
        assert te.bundle(exported, tmp_path / "engines").connections[0].transpose == tuple(axes)


def test_sizes_that_can_never_meet_are_found_by_the_chain(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    with pytest.raises(errors.ModelError) as told:
        te.bundle(exported, out, run=True, dims={"joint.T": (40, 64, 256)})
    assert "`joint.encoder_output` gets 1x32x32" in told.value.message and "--dim" in str(told.value.hint)
    document = on_disk(out)
    assert document["complete"] is False and document["error"]["exit_code"] == 4
    assert te.bundle(exported, out, run=True, dims={"joint.T": "2:8:32"}).complete


@pytest.mark.usefixtures("empty_store")
def test_a_component_that_fails_leaves_the_others_and_the_report_says_which(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    te.bundle(exported, out)
    components: dict[str, Any] = {name: {} for name in NAMES} | {"predictor": {"build": {"precision": "fp16"}}}
    rnnt.meta(exported.parent, components=components)
    rnnt.joint(exported.parent / "joint.onnx", location=None)  # comes after, and is built all the same
    with pytest.raises(errors.PrecisionError, match="component `predictor`"):
        te.bundle(exported, out)
    document = on_disk(out)
    assert {item["name"]: item["status"] for item in document["components"]} == {
        "encoder": "kept", "predictor": "failed", "joint": "built",
    }  # fmt: skip
    failed = document["components"][1]
    assert failed["error"]["exit_code"] == 6 and failed["engine"] is None and document["complete"] is False
    assert ".staged" not in failed["error"]["message"] and failed["error"]["hint"]
    assert any("earlier build" in text for text in document["warnings"])
    log_text = (out / "build_logs" / "predictor.log").read_text()
    assert log_text.startswith("# trt-engine build") and "# failed:" in log_text
    Engine.open(out / "joint.engine.onnx").verify()
    assert not list(out.glob(".*"))


class _Interrupting(logging.Handler):
    """Presses Ctrl-C when a build says something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            raise KeyboardInterrupt


@pytest.mark.usefixtures("empty_store")
def test_an_interrupted_bundle_leaves_a_true_report_and_goes_on_where_it_was(exported: Path, tmp_path: Path) -> None:
    out, hand = tmp_path / "engines", _Interrupting("optimising `predictor.onnx`")
    logger = logging.getLogger("trt_engine")
    with _InfoLog():
        logger.addHandler(hand)
        with pytest.raises(KeyboardInterrupt):
            te.bundle(exported, out)
        logger.removeHandler(hand)
    document = on_disk(out)
    assert [item["status"] for item in document["components"]] == ["built", "interrupted", "pending"]
    assert document["complete"] is False and document["components"][1]["error"]["exit_code"] == 130
    assert not list(out.glob(".*")) and "predictor.engine.onnx" not in files_in(out)
    assert "# failed" in (out / "build_logs" / "predictor.log").read_text()
    assert states(te.bundle(exported, out)) == {"encoder": "kept", "predictor": "built", "joint": "built"}


@pytest.mark.usefixtures("empty_store")
def test_a_model_that_changes_while_it_is_staged_is_not_built(exported: Path, tmp_path: Path) -> None:
    planned = plan(exported, tmp_path / "engines", BundleConfig(), BuildConfig())
    data = bytearray((exported.parent / "encoder.onnx.data").read_bytes())
    data[100] ^= 1
    (exported.parent / "encoder.onnx.data").write_bytes(data)
    made = execute(planned)
    assert isinstance(made.error, errors.ModelError) and "changed while" in made.error.message
    assert states(made.report) == {"encoder": "failed", "predictor": "built", "joint": "built"}


def test_files_that_are_not_ours_are_left_alone_without_a_yes(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    out.mkdir()
    (out / "joint.engine.onnx").write_text("mine")
    with pytest.raises(errors.UsageError, match="--overwrite"):
        te.bundle(exported, out)
    (out / "build_report.json").write_text('{"tests": "mine"}')
    with pytest.raises(errors.UsageError, match="not a report of `bundle`"):
        te.bundle(exported, out)
    assert files_in(out) == {"joint.engine.onnx", "build_report.json"}
    assert te.bundle(exported, out, overwrite=True).complete
    with pytest.raises(errors.UsageError, match="is a file"):
        te.bundle(exported, exported)


# ------------------------------------------------------------------------------------------------ sizes


def spans(report: BundleReport) -> dict[str, str]:
    return {f"{c.name}.{name}": str(span) for c in report.components for name, span in c.profiles[0].ranges.items()}


def test_sizes_come_from_the_command_line_before_the_component_before_the_file(exported: Path, tmp_path: Path) -> None:
    components: dict[str, Any] = {name: {} for name in NAMES} | {
        "joint": {"dimensions": {"U": [1, 2, 4], "T": [2, 8, 40]}}
    }
    rnnt.meta(exported.parent, components=components, dimensions={"U": [1, 1, 6], "time": [16, 32, 320]})
    found = spans(te.bundle(exported, tmp_path / "a"))
    assert found["predictor.y"] == "1x1,1x1,1x6" and found["joint.predictor_output"] == "1x16x1,1x16x2,1x16x4"
    assert found["encoder.audio_signal"] == "1x128x16,1x128x32,1x128x320", "by the name the model has for it"
    assert found["joint.encoder_output"] == "1x32x2,1x32x8,1x32x40"
    found = spans(te.bundle(exported, tmp_path / "b", dims=["T=::512", "joint.T=:9:", "B=2", "U=3"]))
    assert found["encoder.audio_signal"] == "2x128x16,2x128x32,2x128x512"
    assert found["joint.encoder_output"] == "2x32x2,2x32x9,2x32x512"
    assert found["predictor.y"] == "2x3,2x3,2x3" and found["predictor.h"] == "2x2x16,2x2x16,2x2x16"
    whole = ["encoder:audio_signal:1x128x8,1x128x80,1x128x88"]
    assert spans(te.bundle(exported, tmp_path / "c", profiles=whole))["encoder.audio_signal"] == whole[0][21:]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"dims": ["Q=3"]}, errors.UsageError, "no model has a dynamic dimension `Q`"),
        ({"dims": ["decoder.T=3"]}, errors.UsageError, "`decoder.T`"),
        ({"dims": ["T"]}, errors.UsageError, "cannot read the dimension"),
        ({"dims": ["T=a:b:c"]}, errors.UsageError, "cannot read the range"),
        ({"dims": {"T": (1, 2)}}, errors.UsageError, "cannot read the range"),
        ({"dims": ["T=::"]}, errors.UsageError, "cannot read the range"),
        ({"dims": ["T=64:32:256"]}, errors.ProfileError, "not min <= opt <= max"),
        ({"dims": ["T=::32"]}, errors.ProfileError, "16:64:32"),
        ({"profiles": ["audio_signal:1x128x16"]}, errors.UsageError, "cannot read the profile"),
        ({"profiles": ["decoder:x:1"]}, errors.UsageError, "no component `decoder`"),
        ({"profiles": ["encoder:x:1"]}, errors.UsageError, "unknown input `x`"),
        ({"profiles": ["encoder:audio_signal:1x80x16"]}, errors.ShapeError, "does not match input"),
        ({"profiles": ["joint:encoder_output:1x32x16"] * 2}, errors.UsageError, "two profiles"),
        ({"batch": "1:2:4"}, errors.UsageError, "named dimensions"),
        ({"presicion": "fp16"}, errors.UsageError, "presicion"),
    ],
)
def test_wrong_sizes_are_the_callers_mistake(
    exported: Path, tmp_path: Path, arguments: dict[str, Any], kind: type[errors.TrtEngineError], said: str
) -> None:
    assert said in refused(exported, tmp_path / "engines", kind, **arguments).message


# ------------------------------------------------------------------------------------------------ any model


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A tower and a head, with dimensions named in the models or in the meta file."""
    folder = tmp_path / "pair"
    folder.mkdir()
    ones = np.ones((4, 6), np.float32)
    save(
        folder / "t.onnx", [node("MatMul", "x w", "y")], {"x": (FLOAT, ["rows", None, 4])},
        {"y": (FLOAT, ["rows", None, 6])}, {"w": ones}, location="t.bin",
    )  # fmt: skip
    save(
        folder / "h.onnx", [node("Add", "z bias", "s")],
        {"z": (FLOAT, ["rows", "items", 6]), "bias": (FLOAT, ["rows", "items", 6])}, {"s": (FLOAT, ["rows", "items", 6])},
    )  # fmt: skip
    (folder / "m.json").write_text(
        json.dumps(
            {
                "components": {"head": "h.onnx", "tower": {"file": "t.onnx", "inputs": {"x": ["rows", "items", 4]}}},
                "dimensions": {"items": [1, 5, 9]},
                "connections": ["tower.y -> head.z"],
            }
        )
    )
    return folder / "m.json"


def test_any_model_of_several_components_is_built_and_run_in_its_order(pair: Path, tmp_path: Path) -> None:
    report = te.bundle(pair, tmp_path / "engines", dims={"rows": (1, 2, 3)}, run=True)
    assert report.complete and report.name == "pair"
    assert spans(report) == {
        "head.z": "1x1x6,2x5x6,3x9x6", "head.bias": "1x1x6,2x5x6,3x9x6", "tower.x": "1x1x4,2x5x4,3x9x4",
    }  # fmt: skip
    tower, head = report.chain  # the head stands first in the file, and is fed by the tower
    assert head.inputs["z"] == tower.outputs["y"] and head.inputs["bias"]["shape"] == [2, 5, 6]


# ------------------------------------------------------------------------------------------------ other backends


@pytest.mark.skipif(
    requirement_holds(onnx.__version__, "<1.23"), reason="onnx's reference before 1.23 has no cell state of LSTM"
)
def test_a_backend_with_devices_of_its_own_builds_and_runs_the_same_bundle(exported: Path, tmp_path: Path) -> None:
    report = te.bundle(exported, tmp_path / "engines", backend="fake", run=True)
    assert report.complete and report.device == "fake:0"
    assert [item.engine for item in report.components] == [f"{name}.engine.fake" for name in NAMES]
    host = te.bundle(exported, tmp_path / "host", run=True)
    for mine, theirs in zip(report.chain, host.chain, strict=True):
        for name, told in mine.outputs.items():
            assert told["shape"] == theirs.outputs[name]["shape"]
            assert told["mean"] == pytest.approx(theirs.outputs[name]["mean"], rel=1e-4, abs=1e-5)


# ------------------------------------------------------------------------------------------------ inspected


def look(folder: Path, **arguments: Any) -> Any:
    return inspect_bundle(folder, inspect, **arguments)  # type: ignore[arg-type]


def test_a_bundle_that_was_moved_is_whole_and_runs(exported: Path, tmp_path: Path) -> None:
    te.bundle(exported, tmp_path / "engines")
    shutil.move(tmp_path / "engines", tmp_path / "moved")
    assert is_bundle(tmp_path / "moved") and not is_bundle(exported.parent) and not is_bundle(tmp_path / "none")
    state = look(tmp_path / "moved", run=True)
    assert state.complete and state.problems == () and set(state.engines) == set(NAMES)
    assert all(link.matches for link in state.connections) and len(state.chain) == 4
    assert all(engine.smoke_run["outputs"] for engine in state.engines.values())
    assert state.nbytes == sum(path.stat().st_size for path in (tmp_path / "moved").rglob("*") if path.is_file())


def test_what_is_wrong_with_a_bundle_is_said(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    te.bundle(exported, out)
    te.build(exported.parent / "joint.onnx", out=out / "joint.engine.onnx", overwrite=True, parity=False,
             profiles=["encoder_output:1x32x2,1x32x4,1x32x8 predictor_output:1x16x1"],
             options={"graph_optimization": "none"})  # fmt: skip
    (out / "encoder.engine.onnx").unlink()
    state = look(out)
    assert not state.complete
    text = "\n".join(state.problems)
    assert "`joint.engine.onnx` is not the engine of the report" in text and "component `encoder`" in text
    assert {link.matches for link in state.connections if link.producer == "encoder"} == {None}
    with pytest.raises(errors.EngineError, match="cannot be run as a whole"):
        look(out, run=True)


# ------------------------------------------------------------------------------------------------ what is left, what is said


def test_an_input_that_is_filled_must_be_there_and_hold_the_number(exported: Path, tmp_path: Path) -> None:
    for inputs, said in (
        ({"lengths": {"fill": 3}}, "`encoder.onnx` has no input `lengths`"),
        ({"length": {"fill": 1 << 63}}, "not a valid int64"),
        ({"length": {"fill": "Q"}}, "no dimension `Q`"),
    ):
        rnnt.meta(exported.parent, components={"encoder": {"inputs": inputs}, "predictor": {}, "joint": {}})
        error = refused(exported, tmp_path / "engines")
        assert error.exit_code == 4 and said in error.message and "components.encoder.inputs" in error.message
    rnnt.meta(
        exported.parent,
        components={
            "encoder": {"inputs": {"length": {"fill": 24}}},
            "predictor": {"inputs": {"y": {"fill": 7}}},
            "joint": {},
        },
    )
    report = te.bundle(exported, tmp_path / "engines", run=True)
    smokes = {item.name: item.smoke_run for item in report.components}
    assert smokes["encoder"] and smokes["encoder"]["inputs"]["length"]["max"] == 24
    assert smokes["predictor"] and smokes["predictor"]["inputs"]["y"]["min"] == 7


def test_settings_of_a_component_are_its_own_and_options_are_added(exported: Path, tmp_path: Path) -> None:
    components: dict[str, Any] = {name: {} for name in NAMES}
    components["joint"] = {"build": {"options": {"graph_optimization": "none"}, "parity_rtol": 0.5}}
    rnnt.meta(exported.parent, components=components)
    te.bundle(exported, tmp_path / "engines", options={"intra_op_threads": 2})
    found = {name: Engine.open(tmp_path / "engines" / f"{name}.engine.onnx").passport.build for name in NAMES}
    assert found["encoder"].config["options"] == {"intra_op_threads": "2"}
    assert found["joint"].config["options"] == {"intra_op_threads": "2", "graph_optimization": "none"}
    assert "--parity-rtol 0.5" in found["joint"].command and "parity" not in found["encoder"].command


@pytest.mark.usefixtures("empty_store")
def test_a_stricter_parity_than_was_proved_is_proved_again(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    te.bundle(exported, out, parity=False)
    assert Engine.open(out / "joint.engine.onnx").passport.parity is None
    again = te.bundle(exported, out)
    assert states(again) == dict.fromkeys(NAMES, "built")
    assert all(item.parity is not None for item in again.components)
    assert states(te.bundle(exported, out, parity=False)) == dict.fromkeys(NAMES, "kept")


def test_the_command_in_the_report_repeats_a_call_from_python(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex

    from trt_engine.cli.main import run

    shutil.copytree(exported.parent, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "model_meta.json").unlink()
    meta = tmp_path / "m.json"
    shutil.copy(exported, meta)
    first = te.bundle(
        meta, tmp_path / "engines", dims={"T": (16, 32, 512), "joint.T": [None, 16, None]}, parity=False,
        profiles=["predictor:y:1x1,1x2,1x3"], onnx_dir=tmp_path / "elsewhere",
    )  # fmt: skip
    command = on_disk(tmp_path / "engines")["command"]
    words = shlex.split(command)
    assert words[:2] == ["trt-engine", "bundle"] and "joint.T=:16:" in words
    shutil.rmtree(tmp_path / "engines")
    assert run([*words[1:], "-q"]) == 0
    again = on_disk(tmp_path / "engines")
    assert again["version"] == first.version
    assert [item["key"] for item in again["components"]] == [item.key for item in first.components]


def test_what_was_never_renamed_and_weights_of_no_engine_are_swept(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    te.bundle(exported, out)
    whole = files_in(out)
    ours = [".build_report.json.00000000-12-3.tmp", "build_logs/.joint.log.00000000-12-3.tmp",
            "joint.engine.00000000.weights"]  # fmt: skip
    theirs = [".notes.12.34.tmp", "joint.weights", "jointed.engine.00000000.weights"]
    for name in (*ours, *theirs):
        (out / name).write_bytes(b"half")
        os.utime(out / name, (0, 0))
    te.bundle(exported, out)
    assert files_in(out) == whole | set(theirs)


def test_what_a_library_says_of_the_staged_copy_is_said_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    save(
        folder / "a.onnx", [node("MatMul", "x w", "y")], {"x": (FLOAT, [1, 4])}, {"y": (FLOAT, [1, 6])},
        {"w": np.ones((5, 6), np.float32)}, location="a.bin",
    )  # fmt: skip
    (folder / "m.json").write_text('{"components": {"a": "a.onnx"}}')
    with pytest.raises(errors.TrtEngineError) as told:
        te.bundle(folder / "m.json", tmp_path / "engines")
    assert told.value.exit_code in (4, 5) and str(folder / "a.onnx") in str(told.value)
    assert ".staged" not in str(told.value) + (tmp_path / "engines" / "build_report.json").read_text()
    assert ".staged" not in (tmp_path / "engines" / "build_logs" / "a.log").read_text()


def test_a_dimension_without_a_name_or_a_range_says_how_to_give_one(pair: Path, tmp_path: Path) -> None:
    document = json.loads(pair.read_text())
    del document["dimensions"]
    pair.write_text(json.dumps(document))
    error = refused(pair, tmp_path / "engines", errors.ShapeError)
    assert "`items`" in error.message and "--dim items=" in str(error.hint)
    document["components"]["tower"] = "t.onnx"
    document["dimensions"] = {"items": 3}
    pair.write_text(json.dumps(document))
    error = refused(pair, tmp_path / "engines", errors.ShapeError)
    assert "dimension 1 has no range" in error.message and "--profile tower:x:" in str(error.hint)


def test_a_fixed_output_outside_the_range_it_feeds_is_refused(exported: Path, tmp_path: Path) -> None:
    rnnt.encoder(exported.parent / "encoder.onnx")
    whole = ["joint:predictor_output:1x16x1,1x16x1,1x16x8", "joint:encoder_output:1x32x8,1x32x8,1x32x8"]
    assert te.bundle(exported, tmp_path / "engines", profiles=whole).complete
    save(
        exported.parent / "encoder.onnx", [node("Conv", "audio_signal w", "out", strides=[8])],
        {"audio_signal": (FLOAT, [1, 128, 80])}, {"out": (FLOAT, [1, 32, 10])},
        {"w": np.ones((32, 128, 8), np.float32) / 1024},
    )  # fmt: skip
    error = refused(exported, tmp_path / "other")
    assert "1x32x10" in error.message and "spans 16 to 256" in error.message

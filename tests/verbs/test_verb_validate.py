"""An engine for a GPU that is not here: its reference file, and `te.validate` on the machine that has one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_models as models
import trt_engine as te
from trt_engine.backend import list_backends
from trt_engine.backends.fake.build import MAGIC
from trt_engine.backends.fake.run import FakeContext
from trt_engine.engine import Engine, passport_path, payload_files, reference_path
from trt_engine.errors import AccuracyError, EngineError, PrecisionError, SetupError, UsageError
from trt_engine.records.passport import NOT_VALIDATED
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.store import Store
from trt_engine.trt.layers import LayerInfo, LayerTensor
from trt_engine.verbs import load
from trt_engine.verbs.build import parity as build_parity
from trt_engine.verbs.build.run import execute, plan

Change = Callable[[np.ndarray], np.ndarray]
FAKE = {"backend": "fake", "gpus": "sm89"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_warned_engines", set())


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.conv_net(tmp_path / "net.onnx")


@pytest.fixture
def deferred(net: Path, tmp_path: Path) -> Engine:
    """An engine in a folder of its own, whose model is gone."""
    engine = te.build(net, out=tmp_path / "there" / "net.fake", batch=(1, 2, 4), **FAKE)
    net.unlink()
    return engine


def wrong(engine: Engine, change: Change) -> Engine:
    """The engine of other weights, sealed as if it had been built so."""
    proto = onnx.load_from_string(engine.path.read_bytes()[len(MAGIC) :])
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
    engine.path.write_bytes(MAGIC + proto.SerializeToString())
    return Engine.seal(engine.path, replace(engine.passport, payload=payload_files(engine.path)))


# ------------------------------------------------------------------------------------------------ deferred


def test_an_engine_for_a_gpu_that_is_not_here_keeps_its_reference_and_says_so(deferred: Engine, own_store: Path):
    passport = deferred.passport
    assert passport.parity is None and passport.validation is not None
    assert passport.validation.state == "deferred" and "8.9" in passport.validation.deferred_reason
    assert passport.validation.tolerance is not None and passport.validation.tolerance.rounding == "fp32"
    assert passport.requirements.compute_capabilities == ("8.9",)
    assert deferred.validation == NOT_VALIDATED and any(NOT_VALIDATED in text for text in passport.build.warnings)
    assert deferred.reference == reference_path(deferred.path) == deferred.verify_reference()
    (stored,) = Store(own_store).entries()
    assert Engine.open(stored.path).verify_reference().parent == stored.path.parent
    assert stored.nbytes == deferred.path.stat().st_size + deferred.verify_reference().stat().st_size
    with np.load(deferred.verify_reference()) as file:
        assert sorted(file) == ["input/images", "output/scores"] and file["input/images"].shape == (2, 3, 8, 8)


def sorting(path: Path) -> Path:
    """The best 3 of 8 scores, with their places."""
    row, best = (models.FLOAT, ["batch", 8]), ["batch", 3]
    nodes = [models.node("Relu", "x", "r"), models.node("TopK", "r k", "values places")]
    outputs = {"values": (models.FLOAT, best), "places": (models.INT64, best)}
    return models.save(path, nodes, {"x": row}, outputs, {"k": np.array([3], np.int64)})


@pytest.mark.parametrize("make", [models.conv_net, models.two_inputs, models.measured, sorting])
def test_the_later_check_is_the_check_of_a_build_that_can_load_its_engine(make: Any, tmp_path: Path):
    settings: dict[str, Any] = {} if make is models.measured else {"batch": (1, 2, 4)}
    net = make(tmp_path / "net.onnx")
    before = te.build(net, **FAKE, **settings, out=tmp_path / "late.fake")
    assert before.passport.parity is None and before.passport.validation is not None
    assert before.passport.validation.sorted_outputs == (("values", "places") if make is sorting else ())
    report = te.validate(before)
    here = te.build(net, **FAKE, **settings, options={"compute_capability": "8.9"}, rebuild=True)
    assert here.passport.validation is None
    assert_same_but_for_wider_inputs(here.passport.parity, report.parity)


def assert_same_but_for_wider_inputs(here: Any, later: Any):
    """The reference beside an engine has the first inputs alone."""
    assert here.inputs.startswith(later.inputs) and here == replace(later, inputs=here.inputs)


def test_a_quantised_copy_is_judged_as_its_build_would_and_measured_against_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((32, 32)).astype(np.float32) for name in ("w0", "w1", "w2")}
    row = (models.FLOAT, ["batch", 32])
    nodes = [models.node("MatMul", *side) for side in (("x w0", "t0"), ("t0 w1", "t1"), ("t1 w2", "y"))]
    net = models.save(tmp_path / "rows.onnx", nodes, {"x": row}, {"y": row}, weights)
    here = te.build(net, precision="int4")
    away = replace(list_backends()["onnxruntime"], parity_options=f"{__name__}:not_here")
    monkeypatch.setitem(list_backends(), "onnxruntime", away)
    engine = te.build(net, precision="int4", out=tmp_path / "rows.engine.onnx", rebuild=True)
    limits = engine.passport.validation and engine.passport.validation.tolerance
    assert limits is not None and (limits.metric, limits.rounding) == ("rms_rel", "quantized")
    report = te.validate(engine)
    assert report.parity is not None and report.parity.source_errors
    assert_same_but_for_wider_inputs(here.passport.parity, report.parity)


def not_here(model: Path, config: Any) -> str:
    return "it is for another machine"


def test_a_model_that_plain_onnxruntime_does_not_run_is_deferred_without_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, net: Path
):
    def broken(*_: Any, **__: Any) -> None:
        raise te.TrtEngineError(f"no such operator in `{net}`")

    monkeypatch.setattr(build_parity, "reference_session", broken)
    engine = te.build(net, out=tmp_path / "net.fake", **FAKE)
    assert (
        engine.validation == NOT_VALIDATED
        and engine.reference is None
        and "net.onnx" in str(engine.passport.validation)
    )
    assert str(tmp_path) not in str(engine.passport.validation)
    assert "no such operator" in str(engine.passport.validation)
    with pytest.raises(EngineError, match=r"no reference outputs.*no such operator") as refused:
        te.validate(engine)
    assert refused.value.hint


def test_a_large_reference_has_fewer_rows_or_is_left_out(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one_row = (3 * 8 * 8 + 16) * 4
    for most, rows in ((2 * one_row, 2), (one_row, 1), (one_row - 1, None)):
        monkeypatch.setattr(build_parity, "MAX_REFERENCE_BYTES", most)
        engine = te.build(net, out=tmp_path / "net.fake", batch=(1, 2, 4), rebuild=True, **FAKE)
        if rows is None:
            assert engine.reference is None and "more than" in engine.passport.build.notes["parity"]
            assert not reference_path(engine.path).exists()
        else:
            with np.load(engine.verify_reference()) as file:
                assert len(file["input/images"]) == len(file["output/scores"]) == rows


def test_without_a_comparison_nothing_is_deferred(net: Path):
    engine = te.build(net, parity=False, **FAKE)
    assert engine.passport.validation is None and engine.validation is None
    with pytest.raises(UsageError, match="--no-parity"):
        te.validate(engine)
    assert te.build(net, **FAKE).validation == NOT_VALIDATED


def test_a_deferred_check_is_made_at_once_where_it_can_be(net: Path):
    assert not execute(plan(net, **FAKE)).cached
    assert execute(plan(net, **FAKE)).cached
    here = execute(plan(net, **FAKE, options={"compute_capability": "8.9"}))
    assert not here.cached and here.engine.passport.parity is not None and here.engine.validation is None


def test_a_limit_that_is_chosen_later_is_the_deferred_checks_limit(net: Path, tmp_path: Path):
    te.build(net, **FAKE)
    for limit in (0.25, None):
        planned = plan(net, parity_rtol=limit, out=tmp_path / "net.fake", **FAKE)
        built = execute(planned)
        limits = Engine.open(built.engine.path).passport.validation.tolerance  # type: ignore[union-attr]
        assert built.cached and limits is not None
        assert (limits.limit, limits.explicit, limits.noise is None) == (limit or 1e-3, bool(limit), bool(limit))


# ------------------------------------------------------------------------------------------------ validated


def test_a_passed_check_stands_in_the_passport_in_place_of_the_warning(deferred: Engine):
    report = te.validate(deferred.path)
    engine = Engine.open(deferred.path)
    passport = engine.passport
    assert report.state == "passed" and report.parity == passport.parity and passport.parity is not None
    assert passport.parity.passed and passport.validation is not None and passport.validation.state == "passed"
    assert passport.validation.validated_at and passport.validation.environment is not None
    assert passport.build.warnings == () and "parity" not in passport.build.notes
    assert passport.key == deferred.passport.key and engine.validation == "passed on fake:0"
    assert te.validate(deferred.path).state == "passed"  # as often as wanted


def test_a_model_that_moves_by_itself_is_allowed_as_much_by_the_later_check(deferred: Engine):
    validation = deferred.passport.validation
    assert validation is not None and validation.tolerance is not None and validation.sensitivity.keys() == {"scores"}
    strict = replace(validation, tolerance=replace(validation.tolerance, limit=1e-12))
    engine = Engine.seal(deferred.path, replace(deferred.passport, validation=strict))
    report = te.validate(engine)
    assert report.parity is not None and report.parity.sensitivity == validation.sensitivity
    assert report.parity.outputs["scores"].max_rel > 1e-12
    Engine.seal(engine.path, replace(engine.passport, validation=replace(strict, sensitivity={})))
    with pytest.raises(AccuracyError):
        te.validate(engine.path)


@pytest.mark.parametrize("factor", [1.05, np.nan, 1e30, 0.0])
def test_a_wrong_engine_fails_and_its_passport_says_so(deferred: Engine, factor: float):
    engine = wrong(deferred, lambda weights: (weights * np.float32(factor)).astype(weights.dtype))
    with pytest.raises(AccuracyError, match="`scores` of the engine differs") as failed:
        te.validate(engine)
    assert failed.value.exit_code == 7 and failed.value.hint
    found = Engine.open(engine.path)
    assert found.passport.parity is not None and not found.passport.parity.passed
    assert found.validation is not None and found.validation.startswith("failed on fake:0: output `scores`")
    assert te.inspect(engine.path).passport == found.passport


def test_an_engine_that_failed_is_built_again(net: Path):
    stored = wrong(te.build(net, **FAKE), lambda weights: weights * np.float32(1.05))
    with pytest.raises(AccuracyError):
        te.validate(stored)
    again = execute(plan(net, **FAKE))
    assert not again.cached and again.engine.validation == NOT_VALIDATED


def layers_of(kind: str) -> Callable[..., tuple[LayerInfo, ...]]:
    tensor = LayerTensor("t", dtype=kind, dims=(1, 3))
    return lambda engine, config=None: (LayerInfo("conv", "CaskConvolution", (tensor,), (tensor,), weights=kind),)


float_layers, half_layers = layers_of("float32"), layers_of("float16")


def test_a_precision_that_could_not_be_counted_is_part_of_the_check(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backend_spec = replace(list_backends()["fake"], layers=f"{__name__}:float_layers")
    monkeypatch.setitem(list_backends(), "fake", backend_spec)
    engine = te.build(net, precision="fp32", out=tmp_path / "net.fake", **FAKE)
    assert engine.passport.validation is not None
    assert engine.passport.validation.checks == ("precision", "parity")
    with np.load(engine.verify_reference()) as file:
        assert file["macs/counts"].sum() > 0 and len(file["macs/nodes"]) == len(file["macs/counts"])
    assert te.validate(engine).precision.main_dtype == "fp32"
    monkeypatch.setitem(list_backends(), "fake", replace(backend_spec, layers=f"{__name__}:half_layers"))
    with pytest.raises(PrecisionError, match="requested fp32, found fp16 100 %") as failed:
        te.validate(engine)
    found = Engine.open(engine.path).passport
    assert failed.value.exit_code == 6 and found.validation is not None and found.validation.state == "failed"
    assert found.parity is not None and found.parity.passed and found.precision.main_dtype == "fp16"


# ------------------------------------------------------------------------------------------------ refused


def damaged(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def resealed(engine: Engine, path: Path) -> None:
    """The passport of a file with other contents."""
    assert engine.passport.validation is not None
    validation = replace(engine.passport.validation, reference=payload_files(path)[0])
    Engine.seal(engine.path, replace(engine.passport, validation=validation))


def garbage(engine: Engine, path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 and nothing else")
    resealed(engine, path)


def other_tensors(engine: Engine, path: Path) -> None:
    np.savez(path, **{"input/pictures": np.zeros(1), "output/scores": np.zeros(1)})
    resealed(engine, path)


def unknown_part(engine: Engine, path: Path) -> None:
    np.savez(path, **{"weights/w": np.zeros(1)})
    resealed(engine, path)


def with_part(name: str, array: np.ndarray) -> Callable[[Engine, Path], None]:
    def change(engine: Engine, path: Path) -> None:
        with np.load(path) as file:
            parts = dict(file) | {name: array}
        np.savez(path, **parts)
        resealed(engine, path)

    return change


def other_outputs(make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Engine, Path], None]:
    def change(engine: Engine, path: Path) -> None:
        with np.load(path) as file:
            name = next(name for name in file if name.startswith("output/"))
            array = make(file[name])
        with_part(name, array)(engine, path)

    return change


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (with_part("macs/counts", np.array(["x"])), "`macs` is not what"),
        (with_part("macs/counts", np.array([float("nan")])), "`macs` is not what"),
        (with_part("macs/nodes", np.array(["a", "b", "c"] * 99)), "`macs` is not what"),
        (other_outputs(lambda array: np.full(array.shape, "a")), "is not what the engine's passport records"),
        (other_outputs(lambda array: array[:, 1:]), "is not what the engine's passport records"),
        (lambda engine, path: path.unlink(), "is missing"),
        (lambda engine, path: damaged(path), "digest differs"),
        (lambda engine, path: damaged(engine.path), "digest differs"),
        (garbage, "cannot be read"),
        (other_tensors, "other inputs or outputs"),
        (unknown_part, "cannot be read: it holds `weights/w`"),
    ],
)
def test_what_is_missing_or_damaged_is_an_engine_error_and_changes_nothing(deferred: Engine, harm: Any, says: str):
    harm(deferred, reference_path(deferred.path))
    before = passport_path(deferred.path).read_bytes()
    with pytest.raises(EngineError, match=says) as refused:
        te.validate(deferred.path)
    assert refused.value.exit_code == 10 and refused.value.hint
    assert passport_path(deferred.path).read_bytes() == before


def test_an_engine_for_another_gpu_is_refused_and_stays_unvalidated(deferred: Engine):
    before = passport_path(deferred.path).read_bytes()
    with pytest.raises(EngineError, match=r"compute capability 8.9, the device here has 12.0"):
        te.validate(deferred, options={"compute_capability": "12.0"})
    assert passport_path(deferred.path).read_bytes() == before


def test_an_engine_that_loads_and_does_not_run_is_an_engine_error(deferred: Engine, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise te.TrtEngineError("a kernel is missing", hint="another driver")

    monkeypatch.setattr(FakeContext, "_compute", broken)
    with pytest.raises(EngineError, match="was loaded and does not run: a kernel is missing") as refused:
        te.validate(deferred)
    assert refused.value.hint == "another driver" and Engine.open(deferred.path).validation == NOT_VALIDATED


@pytest.mark.parametrize("fault", ["does not run at", "is 1x"])
def test_an_engine_runs_at_the_ends_of_its_profile_before_it_is_valid(
    deferred: Engine, monkeypatch: pytest.MonkeyPatch, fault: str
):
    infer = InferenceEngine.infer

    def at_four(runner: InferenceEngine, feeds: Any) -> Any:
        found = infer(runner, feeds)
        if next(iter(feeds.values())).shape[0] < 4:
            return found
        if fault.startswith("does"):
            raise te.TrtEngineError("no kernel")
        return {name: value[:1] for name, value in found.items()}

    monkeypatch.setattr(InferenceEngine, "infer", at_four)
    with pytest.raises(EngineError, match=fault):
        te.validate(deferred)
    assert Engine.open(deferred.path).validation == NOT_VALIDATED


def test_a_passport_that_cannot_be_rewritten_is_found_before_anything_is_loaded(
    deferred: Engine, monkeypatch: pytest.MonkeyPatch
):
    def denied(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    with pytest.raises(SetupError, match=r"cannot be rewritten: .*permission denied") as refused:
        te.validate(deferred)
    assert "copy the engine" in str(refused.value.hint) and Engine.open(deferred.path).validation == NOT_VALIDATED


def test_an_engine_that_was_compared_when_it_was_built_has_nothing_deferred(net: Path):
    with pytest.raises(UsageError, match="was compared with plain ONNX Runtime when it was built") as refused:
        te.validate(te.build(net))
    assert refused.value.hint


# ------------------------------------------------------------------------------------------------ copies


def test_a_copy_carries_the_reference_under_its_own_name(deferred: Engine, tmp_path: Path):
    copy = deferred.copy_to(tmp_path / "other.fake")
    assert copy.reference == tmp_path / "other.fake.reference.npz"
    assert copy.verify_reference().read_bytes() == deferred.verify_reference().read_bytes()
    assert Engine.open(copy.path) == copy and te.validate(copy).state == "passed"
    assert deferred.validation == NOT_VALIDATED
    copy.verify_reference().unlink()
    later = Engine.open(copy.path).copy_to(tmp_path / "later.fake")  # what was validated needs no reference
    assert later.reference is None and later.validation == "passed on fake:0"


@pytest.mark.parametrize("harm", [Path.unlink, damaged])
def test_a_copy_without_a_whole_reference_is_refused_and_leaves_the_target(
    deferred: Engine, harm: Callable[[Path], None], tmp_path: Path
):
    target = deferred.copy_to(tmp_path / "other.fake")
    harm(deferred.verify_reference())
    with pytest.raises(EngineError, match=r"reference.npz"):
        deferred.copy_to(target.path)
    target.verify()
    assert Engine.open(target.path).verify_reference()


def test_an_engine_without_a_reference_takes_the_old_ones_away(net: Path, tmp_path: Path):
    out = tmp_path / "net.fake"
    assert te.build(net, out=out, **FAKE).reference is not None
    engine = te.build(net, out=out, backend="fake")
    assert engine.reference is None and not reference_path(out).exists()


@pytest.mark.parametrize("harm", [Path.unlink, damaged])
def test_a_stored_engine_without_a_whole_reference_is_built_again(net: Path, harm: Callable[[Path], None]):
    harm(te.build(net, **FAKE).verify_reference())
    again = execute(plan(net, **FAKE))
    assert not again.cached and again.engine.verify_reference()


@pytest.mark.parametrize("name", ["../net.npz", "/etc/passwd", "", ".."])
def test_a_passport_names_no_reference_elsewhere(deferred: Engine, name: str):
    beside = passport_path(deferred.path)
    beside.write_text(beside.read_text().replace(reference_path(deferred.path).name, name))
    with pytest.raises(EngineError, match="not a list of files beside it"):
        Engine.open(deferred.path)


# ------------------------------------------------------------------------------------------------ said


def test_loading_warns_once_until_it_is_validated(deferred: Engine, caplog: pytest.LogCaptureFixture):
    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if NOT_VALIDATED in record.getMessage()]

    with caplog.at_level(logging.WARNING, "trt_engine"):
        for _ in range(2):
            te.load(deferred).close()
    assert len(warned()) == 1 and "trt-engine validate" in warned()[0]
    caplog.clear()
    load._warned_engines.clear()
    te.validate(deferred)
    te.load(deferred.path).close()
    assert warned() == []


# ------------------------------------------------------------------------------------------------ the GPUs of a build


@pytest.mark.parametrize("nothing", ["", ",", [], iter(())])
def test_gpus_that_name_none_are_not_all_of_them(net: Path, nothing: Any):
    with pytest.raises(UsageError, match="names no GPU"):
        plan(net, backend="fake", gpus=nothing)


def test_gpus_from_a_generator_are_those_it_gives(net: Path):
    assert plan(net, backend="fake", gpus=(gpu for gpu in ["sm89"])).config.gpus == ("8.9",)


def test_a_build_over_an_engine_takes_away_its_own_reference_alone(net: Path, tmp_path: Path):
    first = te.build(net, out=tmp_path / "first.fake", **FAKE)
    copy = tmp_path / "copy.fake"  # by hand: its passport names the reference of the first
    copy.write_bytes(first.path.read_bytes())
    passport_path(copy).write_bytes(passport_path(first.path).read_bytes())
    te.build(net, out=copy, backend="fake", gpus="sm86", parity=False)
    assert first.verify_reference()


def test_a_pass_without_its_time_and_device_is_no_pass(deferred: Engine):
    place = passport_path(deferred.path)
    told = json.loads(place.read_text())
    told["validation"]["state"] = "passed"
    place.write_text(json.dumps(told))
    assert te.inspect(deferred.path).passport.validation.state == "deferred"
    assert Engine.open(deferred.path).validation == NOT_VALIDATED


def test_gpus_are_refused_where_a_backend_builds_for_its_own_device(net: Path):
    with pytest.raises(UsageError, match="`onnxruntime` builds for the device it runs on") as refused:
        te.build(net, gpus="sm89")
    assert "`--backend tensorrt-rtx`" in str(refused.value.hint)
    with pytest.raises(UsageError, match="unknown GPU `sm88`"):
        te.build(net, backend="fake", gpus="sm88")

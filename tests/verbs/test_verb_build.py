"""`te.build`: planned, built, proved, sealed, kept, delivered."""

from __future__ import annotations

import logging
import shlex
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnx_models as models
import trt_engine as te
from patience import HANG_S
from trt_engine import errors
from trt_engine.atomic_io import file_digest
from trt_engine.backend import BackendSpec, list_backends
from trt_engine.backends.onnxruntime.build import OnnxRuntimeBuilder
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.config.settings import settings
from trt_engine.device import info
from trt_engine.engine import Engine, passport_path
from trt_engine.graph.load import open_model, read_proto
from trt_engine.precision import cpu_qdq
from trt_engine.store import Store
from trt_engine.verbs.bench.run import is_onnx_model
from trt_engine.verbs.build import parity as build_parity
from trt_engine.verbs.build import request as build_request
from trt_engine.verbs.build import run as build_module
from trt_engine.verbs.build.command import command as build_verb
from trt_engine.verbs.build.precision import prepare
from trt_engine.verbs.build.run import execute, plan
from trt_engine.verbs.quantize.run import quantize


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    return Store()


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.conv_net(tmp_path / "net.onnx")


def test_an_engine_is_proved_sealed_and_delivered_whole(net: Path, tmp_path: Path):
    engine = te.build(net, batch=(1, 2, 4), out=tmp_path / "out" / "net.engine.onnx")
    assert engine == Engine.open(tmp_path / "out" / "net.engine.onnx")  # as sealed, as read
    engine.verify()
    passport = engine.passport
    assert passport.parity is not None and passport.parity.passed
    assert passport.model.digest == file_digest(net)
    assert passport.profiles == (Profile({"images": ShapeRange((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))}),)
    assert passport.precision.main_dtype == "fp32" and passport.device == "cpu"


def test_the_second_build_comes_from_the_store_and_says_so(net: Path, caplog: pytest.LogCaptureFixture):
    first = execute(plan(net))
    with caplog.at_level(logging.INFO, "trt_engine"):
        second = execute(plan(net))
    assert (first.cached, second.cached) == (False, True) and first.engine == second.engine
    assert any("the store has this engine" in record.getMessage() for record in caplog.records)
    assert not execute(plan(net), rebuild=True).cached


def test_a_build_and_a_quantisation_leave_the_opened_graph_as_it_was_read(net: Path, tmp_path: Path):
    proto = onnx.load(net)  # its weights are listed as inputs too, which the engine's graph leaves out
    kinds = {item.name: (item.data_type, item.dims) for item in proto.graph.initializer}
    proto.graph.input.extend(onnx.helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items())
    onnx.save(proto, net)
    model = open_model(net)
    engine = execute(plan(model)).engine
    assert len(onnx.load(engine.path).graph.input) == 1
    quantize(model, "int8", out=tmp_path / "int8.onnx", calib_data="random", parity=False)
    assert model.proto == read_proto(net) == proto


@pytest.mark.parametrize("zero", [5, 0])
def test_pairs_that_strong_typing_refuses_are_warned_of(tmp_path: Path, zero: int, caplog: pytest.LogCaptureFixture):
    source = models.int8_qdq(tmp_path / "quantised.onnx")
    proto = onnx.load(source)
    stored = next(item for item in proto.graph.initializer if item.name == "z")
    stored.CopyFrom(onnx.numpy_helper.from_array(np.int8(zero), "z"))
    onnx.save(proto, source)
    with caplog.at_level(logging.WARNING, "trt_engine"):
        prepare(open_model(source), BuildConfig(backend="tensorrt"), tmp_path / "made")
    said = [record.getMessage() for record in caplog.records]
    assert any("asymmetric-zero-point" in item for item in said) is bool(zero)


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 2},
        {"options": {"graph_optimization": "basic"}},
        {"precision": "fp32"},
        {"backend": "fake", "device": "fake"},
    ],
)
def test_other_settings_are_another_engine(other: dict[str, Any], net: Path):
    assert plan(net).key != plan(net, **other).key


def test_a_setting_the_backend_ignores_makes_no_other_engine(net: Path):
    assert plan(net, workspace_mib=1024).key == plan(net).key
    te.build(net)
    assert execute(plan(net, workspace_mib=1024)).cached
    known = {item.name for item in settings(BuildConfig) if item.in_key or item.name == "timing_cache"}
    assert all(set(backend_spec.ignored_settings) <= known for backend_spec in list_backends().values())
    assert {spec.ignored_settings for spec in list_backends().values() if spec.writes_log} == {("fuse",)}


def test_settings_that_mean_the_same_are_one_engine(net: Path):
    spelled = [
        {"batch": (1, 2, 4)}, {"batch": "1:2:4"}, {"profiles": "images:1x3x8x8,2x3x8x8,4x3x8x8"},
        {"profiles": {"images": [(1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8)]}},
        {"config": BuildConfig(batch=(1, 2, 4))}, {"config": BuildConfig(batch=(9, 9, 9)), "batch": (1, 2, 4)},
    ]  # fmt: skip
    assert len({plan(net, **settings).key for settings in spelled}) == 1
    options = [{"intra_op_threads": 1, "arena": False}, {"arena": "false", "intra-op-threads": "1"}]
    assert len({plan(net, options=given).key for given in options}) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"batch": (1, 2, 4)},
        {"profiles": "images:1x3x8x8,2x3x8x8,4x3x8x8"},
        {"options": {"graph_optimization": "basic", "arena": "off"}, "parity_rtol": 0.5},
        {"shapes": {"images": (2, 3, 8, 8)}, "precision": "fp32"},
        {"providers": ("cuda", "cpu"), "allow_fallback": True, "workspace_mib": "2GiB"},
    ],
)
def test_the_command_in_the_passport_makes_the_same_engine(settings: dict[str, Any], net: Path):
    engine = te.build(net, **settings)
    words = shlex.split(engine.passport.build.command)
    assert words[:3] == ["trt-engine", "build", str(net)]
    result = CliRunner().invoke(build_verb, [*words[2:], "--dry-run", "--json", "-q"], catch_exceptions=False)
    assert engine.passport.key is not None and f'"key": "{engine.passport.key}"' in result.output
    assert '"cached": true' in result.output


# ------------------------------------------------------------------------------------------------ where it goes


def test_a_folder_gets_a_file_that_is_not_taken_for_the_model(net: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert te.build(net, out=tmp_path / "out").path == tmp_path / "out" / "net.engine.onnx"
    assert te.build(net, out=net.parent).path == net.parent / "net.engine.onnx"


def test_the_model_is_never_overwritten(net: Path, tmp_path: Path):
    raw = net.read_bytes()
    with pytest.raises(errors.UsageError, match="the model itself"):
        te.build(net, out=net, overwrite=True)
    outside = models.conv_net(tmp_path / "big.onnx", location="big.bin")
    with pytest.raises(errors.UsageError, match="the model itself"):
        te.build(outside, out=tmp_path / "big.bin", overwrite=True)
    assert net.read_bytes() == raw


def test_an_engine_is_not_built_from_an_engine(net: Path):
    engine = te.build(net)
    with pytest.raises(errors.UsageError, match="an engine already"):
        te.build(engine.path)


def test_an_engine_is_found_through_a_link(net: Path, tmp_path: Path):
    engine = te.build(net, out=tmp_path / "net.engine.onnx")
    link = tmp_path / "elsewhere" / "link.onnx"
    link.parent.mkdir()
    link.symlink_to(engine.path)
    assert Engine.open(link).passport == engine.passport
    assert not is_onnx_model(link)
    with te.load(link) as loaded:
        assert loaded.signature == engine.signature
    with pytest.raises(errors.UsageError, match="an engine already"):
        te.build(link)


@pytest.mark.parametrize("level", ["basic", "all"])
@pytest.mark.parametrize("beside", [None, b"", b'{"schema": "trt-eng'])
def test_an_engine_that_lost_its_passport_is_never_taken_for_a_model(
    net: Path, tmp_path: Path, store: Store, level: str, beside: bytes | None
):
    te.build(net, out=tmp_path / "net.engine.onnx", options={"graph_optimization": level})
    kept = store.entries()
    alone = (tmp_path / "net.engine.onnx").rename(tmp_path / "renamed.onnx")
    if beside is not None:
        passport_path(alone).write_bytes(beside)
    with pytest.raises(errors.EngineError, match="passport") as refused:
        te.build(alone)
    assert refused.value.exit_code == 10 and refused.value.hint
    with pytest.raises(errors.EngineError, match="passport"):
        te.bench(alone)
    if beside is None:
        found = te.inspect(alone)
        assert "optimised-graph" in [item.code for item in found.findings]
    else:
        with pytest.raises(errors.EngineError, match="passport"):
            te.inspect(alone)
    assert store.entries() == kept


@pytest.mark.parametrize(
    ("was", "now"),
    [('"name": "images"', '"name": "pictures"'), ('"dtype": "float32"', '"dtype": "int32"')],
)
def test_an_edited_passport_is_an_error_of_the_engine(net: Path, tmp_path: Path, was: str, now: str):
    engine = te.build(net, batch=(1, 2, 4), out=tmp_path / "net.engine.onnx")
    beside = passport_path(engine.path)
    beside.write_text(beside.read_text().replace(was, now, 1))
    with pytest.raises(errors.EngineError, match="passport"):
        te.load(engine.path)


def test_a_model_of_an_opset_too_old_to_run_is_told_so(tmp_path: Path):
    path = models.save(
        tmp_path / "old.onnx",
        [models.node("Relu", "x", "y", consumed_inputs=[0])],
        {"x": (1, [1, 4])},
        {"y": (1, [1, 4])},
        opset=1,
    )
    with pytest.raises(errors.ModelError, match="opset 1") as refused:
        te.build(path)
    assert "FP32" not in str(refused.value.hint) and "opset_version" in str(refused.value.hint)


def test_a_backend_that_only_builds_builds_and_says_that_nothing_was_proved(
    net: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    backend_spec = BackendSpec(
        "halved", "builds for another machine", ".onnx", (), "",
        builder="trt_engine.backends.onnxruntime.build:OnnxRuntimeBuilder", runtime=None,
    )  # fmt: skip
    monkeypatch.setitem(list_backends(), "halved", backend_spec)
    with caplog.at_level(logging.WARNING, "trt_engine"):
        engine = te.build(net, backend="halved")
    assert engine.passport.parity is None and engine.path.is_file()
    assert any("only builds" in record.getMessage() for record in caplog.records)
    with pytest.raises(errors.UsageError, match="has no runtime"):
        te.load(engine)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"backend": "onnxruntimes"}, errors.UsageError),
        ({"device": "fake"}, errors.UsageError),
        ({"device": "tpu"}, errors.UsageError),
        ({"providers": ("cuda",)}, errors.SetupError),
        ({"batch": (4, 2, 1)}, errors.UsageError),
        ({"profiles": "pictures:1x3x8x8"}, errors.UsageError),
        ({"profiles": "images:1x3x9x9"}, errors.ShapeError),
        ({"profiles": "images:2x3x8x8,1x3x8x8,4x3x8x8"}, errors.UsageError),
        ({"shapes": {"images": (1, 3, 8)}}, errors.ShapeError),
        ({"batch": 2, "profiles": "images:1x3x8x8"}, errors.UsageError),
        ({"precision": "fp12"}, errors.UsageError),
        ({"bach": 2}, errors.UsageError),
        ({"parity_rtol": -1.0}, errors.UsageError),
    ],
)
def test_wrong_arguments_are_found_before_anything_is_written(settings: dict, error: type, net: Path, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error) as caught:
        te.build(net, **settings)
    assert caught.value.hint
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------------------------------------ proof


@dataclass(frozen=True)
class Rounding(OnnxRuntimeBuilder):
    """Builds another model than it was given: each weight a little larger."""

    by: float = 1.05

    def build(self, model, config, places):
        import onnx
        from onnx import numpy_helper

        from trt_engine.graph.load import open_model

        proto = onnx.load(model.path)
        for tensor in proto.graph.initializer:
            stored = numpy_helper.to_array(tensor)
            larger = (stored * np.float32(self.by)).astype(stored.dtype)
            tensor.CopyFrom(numpy_helper.from_array(larger, tensor.name))
        other = places.payload.parent / "other.onnx"
        onnx.save(proto, other)
        return super().build(open_model(other), config, places)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend `rounding` whose engines are wrong by some per cent."""
    module = f"{__name__}:Rounding"
    runtime = "trt_engine.backends.onnxruntime.run:OnnxRuntime"
    backend_spec = BackendSpec("rounding", "wrong on purpose", ".onnx", ("onnx",), "", builder=module, runtime=runtime)
    monkeypatch.setitem(list_backends(), "rounding", backend_spec)


@pytest.mark.usefixtures("rounding")
def test_an_engine_that_computes_something_else_is_not_kept(net: Path, store: Store, tmp_path: Path):
    with pytest.raises(errors.AccuracyError, match="`scores` of the engine differs") as caught:
        te.build(net, backend="rounding", out=tmp_path / "out" / "wrong.onnx")
    assert caught.value.exit_code == 7 and caught.value.hint
    assert store.entries() == [] and list((tmp_path / "out").iterdir()) == []
    assert list((store.folder / "engines").iterdir()) == []


def amplifier(path: Path) -> Path:
    """`c + sin(1e9 * relu(|c| - 0.2))` of a convolution that a build folds its BatchNorm into: it amplifies rounding where
    its inputs are not near 0.5."""
    proto = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        amplifier (float[2,3,8,8] x) => (float[2,3,8,8] y) <float edge = {0.2}, float much = {1e9}> {
            conv = Conv (x, w)
            c = BatchNormalization (conv, scale, bias, mean, var)
            size = Abs (c)
            beyond = Sub (size, edge)
            far = Relu (beyond)
            angle = Mul (far, much)
            noise = Sin (angle)
            y = Add (c, noise)
        }""")
    rng = np.random.default_rng(0)
    w = np.eye(3) + rng.uniform(-0.2, 0.2, (3, 3))
    scale, var = rng.uniform(1, 2, (2, 3))
    values = {"w": w[..., None, None], "scale": scale, "bias": np.zeros(3), "mean": w.sum(1) / 2, "var": var}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()
    )
    onnx.save(proto, path)
    return path


def test_a_model_that_amplifies_rounding_is_judged_where_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = amplifier(tmp_path / "amplifier.onnx")
    found = te.build(path).passport.parity
    assert found is not None and found.passed and not found.limits and "of 0.45 to 0.55" in found.inputs
    backend_spec = replace(list_backends()["onnxruntime"], builder=f"{__name__}:Rounding")
    monkeypatch.setitem(list_backends(), "onnxruntime", backend_spec)
    with pytest.raises(errors.AccuracyError, match="`y` of the engine differs"):
        te.build(path, store=te.Store(tmp_path / "wrong"))


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ({}, "`-O graph_optimization=basic` rewrites less"),
        ({"graph_optimization": "basic"}, "`-O graph_optimization=none` rewrites less"),
        ({"graph_optimization": "none"}, None),
    ],
)
def test_a_wrong_engine_is_never_told_to_be_built_as_it_was(
    net: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], offered: str | None
):
    backend_spec = replace(list_backends()["onnxruntime"], builder=f"{__name__}:Rounding")
    monkeypatch.setitem(list_backends(), "onnxruntime", backend_spec)
    with pytest.raises(errors.AccuracyError) as caught:
        te.build(net, options=options)
    hint = caught.value.hint or ""
    assert "--parity-rtol" in hint
    assert offered in hint if offered else "graph_optimization" not in hint


@pytest.mark.usefixtures("rounding")
def test_an_engine_kept_without_proof_is_built_again_when_proof_is_asked_for(net: Path):
    assert te.build(net, backend="rounding", parity=False).passport.parity is None
    with pytest.raises(errors.AccuracyError):
        te.build(net, backend="rounding")


@pytest.mark.usefixtures("rounding")
def test_an_engine_from_the_store_is_judged_by_the_limit_of_who_asks_now(net: Path, caplog: pytest.LogCaptureFixture):
    te.build(net, backend="rounding", parity_rtol=0.9)
    with caplog.at_level(logging.INFO, "trt_engine"), pytest.raises(errors.AccuracyError, match=r"allowed is 0\.001"):
        te.build(net, backend="rounding")  # nobody chose a limit: the model's own
    assert any("is built again: it differs" in record.getMessage() for record in caplog.records)
    assert plan(net, backend="rounding").find_in_store() is None
    assert execute(plan(net, backend="rounding", parity_rtol=0.9)).cached


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("typed", [0.001, 0.01])
def test_a_limit_that_equals_a_default_is_a_limit_all_the_same(typed: float, tmp_path: Path):
    coarse = models.conv_net(tmp_path / "half.onnx", half=True)  # 0.01 is its default
    with pytest.raises(errors.AccuracyError, match=f"allowed is {typed:g}"):
        te.build(coarse, backend="rounding", parity_rtol=typed)


def test_the_passport_says_the_limit_of_the_build_that_wrote_it(net: Path, tmp_path: Path):
    first = te.build(net, parity_rtol=0.5)
    assert first.passport.parity is not None
    for given, limit in (({}, 0.001), ({"parity_rtol": 0.25}, 0.25)):
        there = execute(plan(net, out=tmp_path / "copy.onnx", **given))
        sealed = Engine.open(tmp_path / "copy.onnx").passport.parity
        assert there.cached and sealed == replace(first.passport.parity, tolerance=limit)
        assert plan(net, **given).find_in_store().passport.parity == sealed  # type: ignore[union-attr]
    assert Engine.open(first.path).passport.parity == first.passport.parity


def row_net(path: Path) -> Path:
    """Three matrix products, which the CPU has INT8 kernels for; the last one stays as it is."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 8)).astype(np.float32) for name in ("w0", "w1", "w2")}
    row = (models.FLOAT, ["batch", 8])
    sides = [("x w0", "t0"), ("t0 w1", "t1"), ("t1 w2", "y")]
    nodes = [models.node("MatMul", *side) for side in sides]
    return models.save(path, nodes, {"x": row}, {"y": row}, weights)


def row_data(folder: Path, seed: int = 0) -> str:
    np.savez(folder / "data.npz", x=np.random.default_rng(seed).standard_normal((16, 8)).astype(np.float32))
    return str(folder / "data.npz")


def test_an_engine_of_a_quantised_copy_is_compared_with_the_model_that_was_given_too(tmp_path: Path):
    net = row_net(tmp_path / "net.onnx")
    parity = te.build(net, precision="int8", calib_data=row_data(tmp_path)).passport.parity
    assert parity is not None and parity.reference.endswith(
        "of the model quantised to int8 for ONNX Runtime's CPU provider"
    )
    assert 0 < parity.source_errors["y"].max_rel < 0.2  # eight bits
    assert parity.outputs["y"].max_rel < parity.source_errors["y"].max_rel / 2
    plain = te.build(net).passport.parity
    assert plain is not None and plain.source_errors == {} and "quantised" not in plain.reference


@pytest.mark.parametrize("settings", [{}, {"precision": "fp32"}, {"precision": "int8"}])
def test_calibration_data_that_is_not_there_is_refused_whether_it_is_used_or_not(net: Path, settings: dict[str, Any]):
    with pytest.raises(errors.FeedError, match=r"no such file or folder `nothing\.npz`"):
        plan(net, calib_data="nothing.npz", **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({}, "nothing is quantised without"), ({"precision": "fp32"}, "`--precision fp32` quantises")],
)
def test_calibration_data_nothing_is_done_with_is_said_and_makes_no_other_engine(
    tmp_path: Path, settings: dict[str, Any], says: str
):
    net = row_net(tmp_path / "net.onnx")
    unused = plan(net, calib_data=row_data(tmp_path), **settings)
    assert len(unused.warnings) == 1 and "is not used" in unused.warnings[0] and says in unused.warnings[0]
    assert unused.key == plan(net, **settings).key
    used = plan(net, calib_data=row_data(tmp_path), precision="int8")
    assert not used.warnings and used.config.calib_data == row_data(tmp_path)


def test_other_calibration_data_makes_another_engine_and_the_same_elsewhere_the_same(tmp_path: Path):
    net = row_net(tmp_path / "net.onnx")
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()

    def key(data: str) -> str:
        return plan(net, calib_data=data, precision="int8").key

    first = key(row_data(tmp_path))
    assert key(row_data(elsewhere)) == first
    assert key(row_data(tmp_path, seed=1)) != first
    row_data(folder)
    alone = key(str(folder))
    (folder / "data.npz").rename(folder / "other.npz")
    assert alone not in (first, key(str(folder)))


def test_weights_that_overflow_on_this_processor_are_named_where_int8_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    full, reduced = models.int8_qdq(tmp_path / "q8.onnx", limit=127), models.int8_qdq(tmp_path / "q7.onnx")
    store, net = Store(tmp_path / "store"), models.conv_net(tmp_path / "net.onnx")

    def hint(path: Path, device: str = "cpu") -> str:
        built = te.build(path, store=store, parity=False)
        return build_parity._overflow_hint(built, device, open_model(path).graph)

    monkeypatch.setattr(cpu_qdq, "_kernels_saturate", lambda: False)
    for features, overflows in ((("avx2",), True), (("avx2", "avx_vnni"), False), (("asimd",), False)):
        monkeypatch.setattr(info, "cpu", lambda features=features: info.Cpu(name="test", cores=1, features=features))
        assert ("--reduce-range on" in hint(full)) == overflows
        assert not hint(reduced) and not hint(full, "cuda:0") and not hint(net)


def test_a_model_the_reference_cannot_run_is_built_and_says_that_it_was_not_judged(tmp_path: Path):
    row = (models.BF16, ["n", 3])
    path = models.save(tmp_path / "net.onnx", [models.node("Relu", "x", "y")], {"x": row}, {"y": row})
    built = execute(plan(path, backend="fake", device="fake"))
    assert built.engine.passport.parity is None
    assert any("parity was not judged" in warning for warning in built.warnings)
    assert execute(plan(path, backend="fake", device="fake")).cached


def test_an_engine_whose_outputs_are_not_finite_is_refused_without_a_reference(tmp_path: Path):
    row = (models.BF16, ["n", 3])
    nodes = [models.node("Neg", "x", "a"), models.node("Sqrt", "a", "y")]  # NaN below zero
    path = models.save(tmp_path / "net.onnx", nodes, {"x": row}, {"y": row})
    with pytest.raises(errors.AccuracyError, match="3 of 3 values of the engine's output `y` are not finite") as caught:
        te.build(path, backend="fake", device="fake", store=Store(tmp_path / "store"))
    assert "plain ONNX Runtime does not run this model" in caught.value.message
    assert "--no-parity" in (caught.value.hint or "")
    built = te.build(path, backend="fake", device="fake", store=Store(tmp_path / "store"), parity=False)
    assert built.passport.parity is None


# ------------------------------------------------------------------------------------------------ a silent builder


def test_a_silent_builder_is_shown_as_alive(caplog: pytest.LogCaptureFixture):
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "still building" in record.getMessage():
                said.set()

    listener = Listener()
    build_module.log.addHandler(listener)
    try:
        with caplog.at_level(logging.INFO, "trt_engine"), build_module._log_heartbeat(0.01):
            assert said.wait(HANG_S)
    finally:
        build_module.log.removeHandler(listener)
    assert not any(thread.name == "build-heartbeat" for thread in threading.enumerate())


def profile(low: int, best: int, high: int) -> Profile:
    return Profile({"x": ShapeRange((low, 3), (best, 3), (high, 3))})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (profile(1, 64, 64), None),
        (profile(1, 512, 512), "is wide"),
        (profile(1, 2, 64), "tuned for its optimum"),
        (profile(8, 8, 8), None),
    ],
)
def test_a_wide_profile_and_a_far_optimum_are_warned_of(given: Profile, text: str | None):
    warnings = list(build_request.profile_warnings((given,)))
    assert (not warnings) if text is None else (len(warnings) == 1 and text in warnings[0])


def test_a_backend_that_writes_nothing_is_a_build_error(net: Path, monkeypatch: pytest.MonkeyPatch, store: Store):
    backend_spec = BackendSpec(
        "absent", "writes nothing", ".onnx", (), "", builder=f"{__name__}:Absent",
        runtime="trt_engine.backends.onnxruntime.run:OnnxRuntime",
    )  # fmt: skip
    monkeypatch.setitem(list_backends(), "absent", backend_spec)
    with pytest.raises(errors.BuildError, match="wrote no payload"):
        te.build(net, backend="absent")
    assert store.entries() == []


class Absent(OnnxRuntimeBuilder):
    def build(self, model, config, places):
        outcome = super().build(model, config, places)
        places.payload.unlink()
        return outcome


@pytest.mark.parametrize("backend", ["tensorrt", "trtexec"])
def test_a_setting_of_a_provider_is_refused_where_there_are_no_providers(backend: str) -> None:
    backend_spec = list_backends()[backend]
    config = BuildConfig(backend=backend, options={"cuda.gpu_mem_limit": "1"})
    if backend_spec.missing_modules():
        backend_spec = replace(backend_spec, modules=())
    with pytest.raises(errors.UsageError, match=r"unknown setting `cuda\.gpu_mem_limit`"):
        build_request.check_options(backend_spec, config)
    build_request.check_options(list_backends()["onnxruntime"], replace(config, backend="onnxruntime"))

"""`te.load`: what it takes, and what it refuses before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save
from patience import HANG_S
from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.engine import Engine, passport_path
from trt_engine.errors import EngineError, UsageError
from trt_engine.store import Store

pytestmark = pytest.mark.usefixtures("kept_engines")

X = np.array([[1, -2, 3]], np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("model") / "relu.onnx",
        [node("Relu", "x", "y")],
        {"x": (FLOAT, ["batch", 3])},
        {"y": (FLOAT, ["batch", 3])},
    )


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Engine:
    return te.build(model, batch=(1, 2, 4), out=tmp_path / "relu.engine.onnx", store=Store(tmp_path / "store"))


def answers(loaded: te.InferenceEngine) -> bool:
    with loaded as runner:
        return runner.infer(X)["y"].tolist() == [[1, 0, 3]]


def change(engine: Engine, **parts: object) -> Engine:
    """The same payload under another passport."""
    return Engine.seal(engine.path, dataclasses.replace(engine.passport, **parts))


def test_an_engine_its_payload_or_its_passport_is_enough(engine: Engine) -> None:
    for source in (engine, engine.path, str(engine.path), passport_path(engine.path)):
        assert answers(te.load(source))


def test_bytes_and_a_passport_are_enough(engine: Engine) -> None:
    payload = engine.path.read_bytes()
    raw = passport_path(engine.path).read_bytes()
    for passport in (engine.passport, json.loads(raw), raw, raw.decode()):
        assert answers(te.load(payload, passport=passport))


def test_bytes_leave_nothing_behind(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    payload = engine.path.read_bytes()
    loaded = te.load(payload, passport=engine.passport)
    assert len(list(folder.iterdir())) == 1
    loaded.close()
    with pytest.raises(EngineError, match="changed after it was sealed"):
        te.load(payload + b"\0", passport=engine.passport)
    with pytest.raises(EngineError, match="not a passport"):
        te.load(payload, passport={"schema": "something else"})
    assert not list(folder.iterdir())


@pytest.mark.parametrize("passport", [b"{", b"[]", {}, {"schema": "trt-engine/passport"}, "no json"])
def test_a_passport_that_is_none_is_refused(engine: Engine, passport: object) -> None:
    with pytest.raises(EngineError, match="`passport=` is not a passport"):
        te.load(engine.path.read_bytes(), passport=passport)


def test_a_passport_from_a_stranger_cannot_choose_where_the_payload_is_written(engine: Engine, tmp_path: Path) -> None:
    outside = tmp_path / "outside.onnx"
    first = dataclasses.replace(engine.passport.payload[0], file=str(outside))
    assert answers(te.load(engine.path.read_bytes(), passport=dataclasses.replace(engine.passport, payload=(first,))))
    assert not outside.exists()


def test_an_engine_of_several_files_is_not_loaded_from_bytes(engine: Engine) -> None:
    two = (engine.passport.payload[0], dataclasses.replace(engine.passport.payload[0], file="weights.bin"))
    with pytest.raises(EngineError, match=r"side files \(`weights.bin`\)"):
        te.load(engine.path.read_bytes(), passport=dataclasses.replace(engine.passport, payload=two))


# ------------------------------------------------------------------------------------------------ refusals


def test_a_bare_model_is_refused_with_what_to_type(model: Path) -> None:
    with pytest.raises(
        EngineError, match=rf"is a model, expected an engine\n.*trt-engine build {model} --batch"
    ) as told:
        te.load(model)
    assert told.value.exit_code == 10


def test_a_changed_engine_is_refused_unless_nobody_looks(model: Path, tmp_path: Path) -> None:
    engine = te.build(model, backend="fake", device="fake", batch=(1, 2, 4), store=Store(tmp_path / "store"))
    engine.path.write_bytes(engine.path.read_bytes().replace(b"Relu", b"Selu"))
    with pytest.raises(EngineError, match="changed after it was sealed"):
        te.load(engine)
    with te.load(engine, verify=False) as runner:
        assert runner.infer(X)["y"][0, 1] < 0


def test_an_engine_of_an_unknown_backend_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="backend `abacus`, which is not here"):
        te.load(change(engine, backend="abacus"))


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:x", ""])
def test_a_device_nobody_knows_is_refused(engine: Engine, device: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        te.load(engine, device=device)


def test_a_device_the_backend_does_not_have_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="cannot run on `fake:0`"):
        te.load(engine, device="fake")


def test_a_number_is_a_cuda_device(model: Path, tmp_path: Path) -> None:
    fake = te.build(model, backend="fake", device="fake", batch=(1, 2, 4), store=Store(tmp_path / "store"))
    with pytest.raises(UsageError, match="cannot run on `cuda:1`"):
        te.load(fake, device=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"batching": Batching(max_batch=4)},
        {"batching": {"max_batch": 4}},
        {"config": RuntimeConfig(batching=Batching(max_batch=4))},
    ],
)
def test_batching_joins_requests(engine: Engine, settings: dict) -> None:
    with te.load(engine, **settings) as runner:
        futures = [runner.infer_async(X + number) for number in range(9)]
        for number, future in enumerate(futures):
            assert np.array_equal(future.result(HANG_S)["y"], np.maximum(X + number, 0))
        assert runner.stats().batching.answered == 9
        assert "up to 4 rows" in runner.runtime_info["batching"]


@pytest.mark.parametrize(
    ("batching", "says"),
    [
        (Batching(max_batch=8), "`max_batch` is 8, the engine takes 4 rows at once"),
        (True, "`batching` is a bool"),
        ({"max_batsch": 8}, "did you mean `max_batch`"),
    ],
)
def test_batching_the_engine_cannot_do_is_refused_and_nothing_stays_open(
    engine: Engine, batching: object, says: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(UsageError, match=says):
        te.load(engine, batching=batching)
    assert set(threading.enumerate()) <= before


def test_several_devices_answer_as_one(model: Path, tmp_path: Path) -> None:
    fake = te.build(model, backend="fake", device="fake", batch=(1, 2, 4), store=Store(tmp_path / "store"))
    for named in ({"devices": ["fake:0", "fake:1"]}, {"device": "fake:0,1"}, {"devices": "fake:0,fake:1"}):
        with te.load(fake, **named, balance="round robin") as runner:
            assert all(runner.infer(X)["y"].tolist() == [[1, 0, 3]] for _ in range(4))
            assert [(one.device, one.requests) for one in runner.stats().replicas] == [("fake:0", 2), ("fake:1", 2)]
            assert runner.runtime_info["device"] == "fake:0,fake:1"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"devices": ["fake:0", "fake:0"]}, "`fake:0` is named twice"),
        ({"devices": []}, "`devices` is empty"),
        ({"devices": 2}, "`devices` is 2, expected a list"),
        ({"devices": ["fake:0", 1.5]}, "unknown device 1.5"),
        ({"devices": [None]}, "unknown device None"),
        ({"config": {"contexts": 2}}, "`config` is a dict"),
        ({"devices": ["fake:0", "tpu"]}, "unknown device"),
        ({"devices": ["fake:0", "cpu"]}, "cannot run on `cpu`"),
        ({"devices": ["fake:0"], "device": "fake:1"}, "both `device` and `devices`"),
        ({"devices": ["fake:0", "fake:1"], "balance": "lottery"}, "unknown load balancing strategy `lottery`"),
        ({"devices": ["fake:0", "fake:1"], "balance": 3}, "`balance` is a int"),
    ],
)
def test_devices_are_checked_before_anything_is_loaded(model: Path, tmp_path: Path, given: dict, says: str) -> None:
    fake = te.build(model, backend="fake", device="fake", batch=(1, 2, 4), store=Store(tmp_path / "store"))
    with pytest.raises(UsageError, match=says):
        te.load(fake, **given)


def test_a_gpu_that_is_not_there_is_refused_with_how_many_are(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_engine.verbs import load

    monkeypatch.setattr(load.info, "gpus", lambda: (object(), object()))
    with pytest.raises(UsageError, match="no device `cuda:2` here: 2 GPUs can be seen"):
        te.load(engine, devices=["cuda:0", 2])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"context": 2}, "did you mean `contexts`"),
        ({"contexts": 0}, "expected 1 or more"),
        ({"streams": -1}, "expected 1 or more"),
    ],
)
def test_settings_are_checked(engine: Engine, settings: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        te.load(engine, **settings)


# ------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize("word", ["rebuild", "refuse"])
def test_a_verdict_against_it_stops_the_load(engine: Engine, word: str) -> None:
    built = engine.passport.requirements
    requirements = dataclasses.replace(built, cpu_features=("feature_of_tomorrow",), providers=("cpu",))
    if word == "refuse":
        requirements = dataclasses.replace(engine.passport.requirements, providers=("cuda",))
    with pytest.raises(EngineError) as told:
        te.load(change(engine, requirements=requirements))
    assert told.value.hint


def test_a_penalty_is_said_and_it_loads(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = te.build(model, backend="fake", device="fake", batch=(1, 2, 4), store=Store(tmp_path / "store"))
    old = change(fake, requirements=dataclasses.replace(fake.passport.requirements, version="1.0"))
    monkeypatch.setattr(logging.getLogger("trt_engine"), "propagate", True)
    with caplog.at_level(logging.WARNING, "trt_engine"):
        assert answers(te.load(old))
    assert "loads with a penalty: built with onnx 1.0" in caplog.text


def test_a_session_that_cannot_be_used_is_closed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that do not fit: the session that was loaded for them does not stay open."""
    from trt_engine.backends.fake.run import FakeSession

    fake = te.build(model, backend="fake", device="fake", batch=(1, 2, 4), store=Store(tmp_path / "store"))
    sessions: list[FakeSession] = []
    context = FakeSession.create_context

    def one_only(self: FakeSession, profile: int = 0) -> object:
        sessions.append(self)
        if len(sessions) > 1:
            raise UsageError("one context is all there is")
        return context(self, profile)

    monkeypatch.setattr(FakeSession, "create_context", one_only)
    with pytest.raises(UsageError, match="one context is all there is"):
        te.load(fake, contexts=2)
    assert sessions[0]._closed


@pytest.mark.parametrize("value", [None, 5, 1.5, ["a"]])
def test_what_is_no_path_is_a_usage_error(value: object) -> None:
    for call in (te.load, te.build, te.inspect):
        with pytest.raises(UsageError, match=r"expected an? (path|engine|model)"):
            call(value)  # type: ignore[operator]

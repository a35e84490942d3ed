"""What every backend promises, whatever is under it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort
import pytest

from trt_engine.backend import BackendSpec
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine, passport_path
from trt_engine.errors import EngineError, FeedError, ProfileError, TrtEngineError, UsageError
from trt_engine.protocols import Context, Session
from trt_engine.runtime.inference_engine import InferenceEngine

Built = Callable[[str], Engine]
Loaded = Callable[..., InferenceEngine]


def images(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, 3, 8, 8), np.float32)


def reference(model: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def close_to(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return list(found) == list(wanted) and all(
        found[name].dtype == wanted[name].dtype and np.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-5)
        for name in wanted
    )


# ------------------------------------------------------------------------------------------------ building


def test_an_engine_is_whole_and_its_passport_tells_what_it_is(built: Built, backend_spec: BackendSpec) -> None:
    engine = built("net")
    assert engine.path.name.endswith(backend_spec.payload_suffix)
    engine.verify()
    passport = json.loads(passport_path(engine.path).read_bytes())
    assert passport["backend"] == backend_spec.name
    assert passport["requirements"]["library"]
    assert passport["requirements"]["version"]
    assert [spec["name"] for spec in passport["signature"]["inputs"]] == ["images"]
    assert passport["profiles"][0]["ranges"]["images"]["max"] == [4, 3, 8, 8]
    assert passport["model"]["digest"].startswith("sha256:")
    assert msgspec.json.encode(Engine.open(engine.path).passport) == msgspec.json.encode(engine.passport)


def test_an_engine_just_built_loads_here(built: Built, backend_spec: BackendSpec) -> None:
    assert backend_spec.load_function("compatibility")(built("net"), RuntimeConfig()).status == "loads"


def test_the_builder_says_who_builds(backend_spec: BackendSpec) -> None:
    from trt_engine.config.build import BuildConfig

    config = BuildConfig(backend=backend_spec.name, device=backend_spec.devices[0])
    builder = backend_spec.load_component("builder")
    assert builder().identity(config) == builder().identity(config)
    assert backend_spec.name in builder().identity(config)


# ------------------------------------------------------------------------------------------------ answering


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_answers_are_those_of_plain_onnx_runtime(loaded: Loaded, models: dict[str, Path], rows: int) -> None:
    feeds = {"images": images(rows)}
    assert close_to(loaded("net").infer(feeds), reference(models["net"], feeds))


def test_several_inputs_and_outputs_go_by_name(loaded: Loaded, models: dict[str, Path]) -> None:
    feeds = {"b": np.array([[1, 2]], np.float32), "a": np.array([[3, 4]], np.float32)}
    assert close_to(loaded("pair").infer(feeds), reference(models["pair"], feeds))


def test_outputs_sized_by_the_data_are_right_every_time(loaded: Loaded, models: dict[str, Path]) -> None:
    engine = loaded("open")
    for x in ([[1, 0, 2]], [[0, 0, 0]], [[1, 1, 1]]):
        feeds = {"x": np.array(x, np.float32)}
        assert close_to(engine.infer(feeds), reference(models["open"], feeds))


@pytest.mark.parametrize("order", ["fortran", "strided", "reversed", "read-only"])
def test_how_a_feed_lies_in_memory_does_not_matter(loaded: Loaded, models: dict[str, Path], order: str) -> None:
    whole = images(4)
    x = {
        "fortran": np.asfortranarray(whole),
        "strided": whole[::2],
        "reversed": whole[:, ::-1],
        "read-only": np.frombuffer(whole.tobytes(), np.float32).reshape(whole.shape),
    }[order]
    found = loaded("net").infer({"images": x})
    assert close_to(found, reference(models["net"], {"images": np.ascontiguousarray(x)}))


def test_outputs_belong_to_the_caller(loaded: Loaded) -> None:
    engine = loaded("net")
    first = engine.infer({"images": images(2)})["scores"]
    kept = first.copy()
    engine.infer({"images": images(2, seed=1)})
    assert np.array_equal(first, kept)
    first[:] = -7
    assert np.array_equal(engine.infer({"images": images(2)})["scores"], kept)


def test_feeds_stay_as_they_are(loaded: Loaded) -> None:
    x = images(2)
    kept = x.copy()
    loaded("net").infer({"images": x})
    assert np.array_equal(x, kept)


def test_shapes_may_change_from_call_to_call(loaded: Loaded, models: dict[str, Path]) -> None:
    engine = loaded("net")
    for rows in (4, 1, 3, 1, 4):
        feeds = {"images": images(rows, seed=rows)}
        assert close_to(engine.infer(feeds), reference(models["net"], feeds))


@pytest.mark.parametrize("contexts", [1, 3])
def test_many_threads_get_their_own_rows(loaded: Loaded, models: dict[str, Path], contexts: int) -> None:
    engine = loaded("pair", contexts=contexts, streams=min(contexts, 2))

    def ask(number: int) -> bool:
        a = np.full((1 + number % 4, 2), number, np.float32)
        outputs = engine.infer({"a": a, "b": a + 1})
        return np.array_equal(outputs["product"], a * (a + 1)) and bool((outputs["difference"] == -1).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(200)))


def test_futures_are_answered_in_full_when_the_engine_closes(loaded: Loaded) -> None:
    engine = loaded("pair")
    a = np.ones((1, 2), np.float32)
    futures = [engine.infer_async({"a": a * number, "b": a}) for number in range(20)]
    engine.close()
    assert [future.result(0)["product"][0, 0] for future in futures] == list(range(20))


def test_facts_tell_what_runs(loaded: Loaded, backend_spec: BackendSpec) -> None:
    facts = loaded("net").runtime_info
    assert facts["backend"] == backend_spec.name
    assert facts["device"].startswith(backend_spec.devices[0])
    assert all(isinstance(value, str) for value in facts.values())


# ------------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({"image": images(1)}, "did you mean `images`"),
        ({}, "is not fed"),
        ({"images": images(1), "more": images(1)}, "unknown input `more`"),
        ({"images": images(1).astype(np.float64)}, "expected float32"),
        ({"images": images(1)[0]}, "3 dimensions"),
        ({"images": images(1)[:, :2]}, "fixed at 3"),
        ({"images": images(1).tolist()}, "is a list"),
    ],
)
def test_wrong_feeds_are_refused_and_change_nothing(loaded: Loaded, feeds: dict, says: str) -> None:
    engine = loaded("net")
    before = engine.infer({"images": images(1)})["scores"]
    with pytest.raises(FeedError, match=says) as told:
        engine.infer(feeds)
    assert told.value.exit_code == 2
    assert told.value.hint
    assert np.array_equal(engine.infer({"images": images(1)})["scores"], before)


def test_a_feed_outside_the_profile_is_refused_with_the_profile_to_build(loaded: Loaded) -> None:
    with pytest.raises(ProfileError, match=r"1x3x8x8 to 4x3x8x8\nhint: .*5x3x8x8") as told:
        loaded("net").infer({"images": images(5)})
    assert told.value.exit_code == 2


def test_a_changed_payload_is_refused(built: Built, tmp_path: Path) -> None:
    from trt_engine.verbs.load import load

    engine = built("net").copy_to(tmp_path / built("net").path.name)
    raw = bytearray(engine.path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    engine.path.write_bytes(raw)
    with pytest.raises(EngineError, match="changed after it was sealed"):
        load(engine.path)


def test_an_unknown_option_names_the_right_ones(built: Built, backend_spec: BackendSpec) -> None:
    from trt_engine.verbs.load import load

    if backend_spec.options is None:
        pytest.skip(f"the backend `{backend_spec.name}` has no options")
    with pytest.raises(UsageError, match="unknown setting `nonsense`"):
        load(built("net"), options={"nonsense": "1"})


# ------------------------------------------------------------------------------------------------ closing


def test_close_twice_is_close_once(loaded: Loaded) -> None:
    engine = loaded("net", contexts=2)
    engine.infer({"images": images(1)})
    engine.close()
    engine.close()


def test_use_after_close_is_refused(loaded: Loaded) -> None:
    engine = loaded("net")
    engine.close()
    for use in (engine.infer, engine.run, engine.infer_async):
        with pytest.raises(UsageError, match="the engine is closed"):
            use({"images": images(1)})


@pytest.fixture
def session(built: Built, backend_spec: BackendSpec) -> Iterator[Session]:
    made = backend_spec.load_component("runtime")().load(built("net"), RuntimeConfig())
    yield made
    made.close()


def test_a_session_refuses_to_close_under_a_context(session: Session) -> None:
    context = session.create_context()
    with pytest.raises(UsageError, match="open context"):
        session.close()
    context.close()
    context.close()
    session.close()
    session.close()
    with pytest.raises(TrtEngineError):
        session.create_context()


# ------------------------------------------------------------------------------------------------ contexts


class Lane:
    """A context with buffers large enough for four rows."""

    def __init__(self, session: Session) -> None:
        self.session, self.device = session, session.device
        self.stream = self.device.stream()
        self.buffers = {"images": self.device.allocate(4 * 768), "scores": self.device.allocate(4 * 16)}
        self.context: Context = session.create_context()

    def prepare(self, rows: int) -> None:
        assert dict(self.context.prepare({"images": (rows, 3, 8, 8)})) == {"scores": (rows, 4)}
        self.context.bind(self.buffers)

    def ask(self, x: np.ndarray, work: Callable[[], None] | None = None) -> np.ndarray:
        y = np.empty((len(x), 4), np.float32)
        self.device.upload(x, self.buffers["images"], self.stream)
        (work or (lambda: self.context.enqueue(self.stream)))()
        self.device.download(self.buffers["scores"], y, self.stream)
        self.stream.synchronize()
        return y

    def close(self) -> None:
        self.context.close()
        for buffer in self.buffers.values():
            buffer.close()
        self.stream.close()


@pytest.fixture
def lane(session: Session) -> Iterator[Lane]:
    made = Lane(session)
    yield made
    made.close()


def test_a_context_prepares_binds_and_enqueues(lane: Lane, models: dict[str, Path]) -> None:
    for rows in (2, 4, 1):  # preparing again, and binding again
        lane.prepare(rows)
        for seed in (0, 1):
            x = images(rows, seed)
            assert np.allclose(lane.ask(x), reference(models["net"], {"images": x})["scores"], atol=1e-5)


def test_a_context_refuses_steps_out_of_order(lane: Lane) -> None:
    with pytest.raises(UsageError):
        lane.context.bind(lane.buffers)
    with pytest.raises(UsageError):
        lane.context.enqueue(lane.stream)
    lane.prepare(2)
    lane.context.prepare({"images": (1, 3, 8, 8)})
    with pytest.raises(UsageError):
        lane.context.enqueue(lane.stream)


@pytest.mark.parametrize("shape", [(5, 3, 8, 8), (1, 4, 8, 8), (1, 3, 8)])
def test_a_context_refuses_shapes_it_was_not_built_for(lane: Lane, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        lane.context.prepare({"images": shape})


def test_a_context_refuses_a_buffer_that_is_missing_or_small(lane: Lane) -> None:
    lane.context.prepare({"images": (4, 3, 8, 8)})
    with pytest.raises(UsageError, match="no buffer is bound to `scores`"):
        lane.context.bind({"images": lane.buffers["images"]})
    small = lane.device.allocate(4)
    with pytest.raises(UsageError, match="`scores` needs 64 bytes"):
        lane.context.bind(lane.buffers | {"scores": small})
    small.close()


def test_a_closed_context_refuses(session: Session) -> None:
    context = session.create_context()
    context.close()
    with pytest.raises(UsageError, match="closed"):
        context.prepare({"images": (1, 3, 8, 8)})


def test_a_graph_replays_what_was_captured_and_refuses_after_a_new_prepare(lane: Lane, models: dict[str, Path]) -> None:
    lane.prepare(2)
    lane.context.enqueue(lane.stream)
    lane.stream.synchronize()
    graph = lane.stream.capture(lane.context.enqueue)
    for seed in (0, 1):
        x = images(2, seed)
        found = lane.ask(x, lambda: graph.replay(lane.stream))
        assert np.allclose(found, reference(models["net"], {"images": x})["scores"], atol=1e-5)
    lane.prepare(2)
    with pytest.raises(UsageError, match="out of date"):
        graph.replay(lane.stream)
        lane.stream.synchronize()
    graph.close()


def test_two_contexts_do_not_disturb_each_other(session: Session, models: dict[str, Path]) -> None:
    lanes = [Lane(session), Lane(session)]
    try:
        for lane, rows in zip(lanes, (1, 4), strict=True):
            lane.prepare(rows)
        for lane, rows in zip(lanes, (1, 4), strict=True):
            x = images(rows, seed=rows)
            assert np.allclose(lane.ask(x), reference(models["net"], {"images": x})["scores"], atol=1e-5)
    finally:
        for lane in lanes:
            lane.close()

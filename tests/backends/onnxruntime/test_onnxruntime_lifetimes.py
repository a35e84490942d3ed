"""An engine's sessions go when they are not used any more: on a GPU each has weights and an arena of its own."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import onnx_models as models
import trt_engine as te
from trt_engine.backends.onnxruntime.run import _StreamSessionFactory, session_settings
from trt_engine.backends.onnxruntime.stream_session import OnnxRuntimeMultiStreamSession
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import open_device
from trt_engine.errors import UsageError


def loaded(engine: te.Engine) -> tuple[OnnxRuntimeMultiStreamSession, weakref.ref[ort.InferenceSession]]:
    """As on a GPU, over the host's memory; and the session that was there first."""
    options, level, choice = session_settings(engine, RuntimeConfig())
    streams = _StreamSessionFactory(engine.path, options, level, choice, open_device("cpu"), graphs=False)
    first = weakref.ref(streams.first.loaded)
    return streams.session(engine, {}, lambda: streams.open_session(open_device("cpu").stream()).loaded), first


def test_the_first_streams_session_goes_before_the_one_that_runs_host_arrays_comes(tmp_path: Path) -> None:
    engine = te.build(models.two_inputs(tmp_path / "net.onnx"), batch=(1, 2, 8), store=te.Store(tmp_path / "store"))
    session, first = loaded(engine)
    gone = []
    make = session._create_host_session

    def made() -> ort.InferenceSession:
        gc.collect()
        gone.append(first() is None and session._run.__func__ is OnnxRuntimeMultiStreamSession._run_ort_values)  # type: ignore[attr-defined]
        return make()

    session._create_host_session = made  # type: ignore[method-assign]
    feeds = {name: np.ones((2, 4), np.float32) for name in ("a", "b")}
    assert (session.run(feeds)["total"] == 2).all()
    assert gone == [True]
    session.close()


def test_a_closed_session_keeps_nothing_of_onnx_runtimes(tmp_path: Path) -> None:
    engine = te.build(models.two_inputs(tmp_path / "net.onnx"), batch=(1, 2, 8), store=te.Store(tmp_path / "store"))
    session, first = loaded(engine)
    session.close()
    gc.collect()
    assert first() is None
    with pytest.raises(UsageError, match="closed"):
        session.run({name: np.ones((2, 4), np.float32) for name in ("a", "b")})


def test_an_engine_of_a_type_that_numpy_lacks_runs_on_host_arrays_and_on_feeds_that_stay_on_the_device(
    tmp_path: Path,
) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx"
    )
    session, _ = loaded(te.build(tmp_path / "net.onnx", batch=(1, 2, 8), store=te.Store(tmp_path / "store")))
    values = np.arange(8).reshape(2, 4).astype(ml_dtypes.bfloat16)
    assert np.array_equal(session.run({"x": values})["y"], values)
    session.bind_resident({"x": values})()
    session.close()

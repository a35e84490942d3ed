"""The ladder: a builder with TensorRT's known failures over ONNX Runtime, which builds what is left."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx
import pytest

import onnx_models as models
import trt_engine as te
from brittle import brittle, foreign, wants
from trt_engine.backend import get_backend
from trt_engine.config.build import BuildConfig
from trt_engine.conversion.axes import parse_dynamic
from trt_engine.device import info
from trt_engine.errors import BuildError
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.static_shapes import set_static_shapes
from trt_engine.verbs.build import retry as rungs


@pytest.fixture
def failing(monkeypatch):
    return brittle(monkeypatch)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.conv_net(tmp_path / "net.onnx")


def level(config: BuildConfig) -> str | None:
    return config.options.get("optimization_level")


def test_too_little_workspace_is_raised_and_the_level_is_never_lowered_before_that(failing, net):
    tried = failing(wants(32768))
    engine = te.build(net, backend="brittle", workspace_mib="8GiB", batch=(1, 2, 4))
    assert tried.seen == [(8192, None, False), (32768, None, False)]
    first, second = engine.passport.build.retries
    assert "insufficient workspace" in first
    assert second.startswith("workspace 32768 MiB (was 8192 MiB): built (")
    assert engine.passport.build.config["workspace_mib"] == 32768
    assert engine.passport.parity is not None and engine.passport.parity.passed


def test_the_workspace_is_doubled_up_to_the_memory_of_the_gpu(monkeypatch):
    board = info.Gpu(0, "a card", "GPU-1", 80 << 10, "9.0", "580")
    monkeypatch.setattr(info, "gpus", lambda: (board,))
    config = BuildConfig(device="cuda:0", workspace_mib=8192)
    assert list(rungs._larger_workspaces(config, causes=True)) == [32768, 65536]
    assert list(rungs._larger_workspaces(config, causes=False)) == [32768]
    small = replace(board, memory_mib=16 << 10)
    monkeypatch.setattr(info, "gpus", lambda: (small,))
    assert list(rungs._larger_workspaces(config, causes=True)) == [16384]


def test_a_mask_that_has_no_kernel_is_folded_at_fixed_shapes(failing, net):
    tried = failing(foreign(lambda model, config: not any(spec.dynamic for spec in model.signature.inputs)))
    engine = te.build(net, backend="brittle", batch=(1, 4, 4))
    assert [fixed for _, _, fixed in tried.seen] == [False, True]
    assert engine.signature.inputs[0].shape == (4, 3, 8, 8)
    span = engine.passport.profiles[0].ranges["images"]
    assert span.min == span.max == (4, 3, 8, 8)
    assert any("takes images:4x3x8x8" in warning for warning in engine.passport.build.warnings)
    assert any("dynamo exporter: not done" in step for step in engine.passport.build.retries)
    assert engine.passport.parity is not None and engine.passport.parity.passed


def test_level_2_comes_after_the_folded_graph_and_keeps_the_batch_dynamic(failing, net):
    tried = failing(foreign(lambda model, config: level(config) == "2"))
    engine = te.build(net, backend="brittle", batch=(1, 2, 4))
    assert tried.seen == [(32768, None, False), (32768, None, True), (32768, "2", False)]
    assert engine.passport.profiles[0].ranges["images"].max == (4, 3, 8, 8)
    assert engine.passport.build.notes["retry"] == "optimisation level 2 (was the default)"


def test_a_ladder_that_ends_raises_the_first_failure_with_the_command_that_helps(failing, net):
    tried = failing(foreign(lambda model, config: False))
    with pytest.raises(BuildError, match="ForeignNode") as caught:
        te.build(net, backend="brittle", batch=(1, 2, 4), workspace_mib="8GiB")
    assert [seen[:2] for seen in tried.seen] == [(8192, None), (32768, None), (32768, None), (32768, "2"), (32768, "2")]
    assert caught.value.exit_code == 5
    hint = caught.value.hint or ""
    assert "words are in" in hint
    assert "--workspace" not in hint and "optimization_level" not in hint, "what was tried is not advised again"
    words = shlex.split(re.findall(r"`(trt-engine convert [^`]+)`", hint)[0])
    assert words[2:4] == ["SOURCE", "-o"] and words[5:7] == ["--exporter", "dynamo"]
    assert parse_dynamic(words[words.index("--dynamic") + 1]) == parse_dynamic({"images": {0: "batch@1..4"}})


def test_the_advice_after_all_workspaces_is_not_a_larger_one(failing, net, monkeypatch):
    def starved(model, config):
        hint = "allow the builder more scratch memory: a larger `--workspace`, up to the GPU's memory"
        return replace_hint(wants(1 << 30)(model, config), hint)

    failing(starved)
    with pytest.raises(BuildError) as caught:
        te.build(net, backend="brittle", workspace_mib="8GiB")
    hint = caught.value.hint or ""
    assert hint.startswith("every retry failed: a GPU with more memory") and "--workspace" not in hint
    assert "the builder's own words are in `" in hint
    with pytest.raises(BuildError) as caught:
        te.build(net, backend="brittle", workspace_mib="8GiB", retry=False)
    assert "a larger `--workspace`" in (caught.value.hint or ""), "nothing was tried"


def replace_hint(error: BuildError | None, hint: str) -> BuildError | None:
    if error is not None:
        error.hint = hint
    return error


def test_what_comes_to_light_with_workspace_enough_has_its_own_steps(failing, net):
    starved, no_kernel = wants(32768), foreign(lambda model, config: not model.signature.inputs[0].dynamic)
    tried = failing(lambda model, config: starved(model, config) or no_kernel(model, config))
    engine = te.build(net, backend="brittle", workspace_mib="8GiB", batch=(1, 4, 4))
    assert tried.seen[:2] == [(8192, None, False), (32768, None, False)] and tried.seen[-1][2], "the graph was fixed"
    assert any("dynamo exporter: not done" in step for step in engine.passport.build.retries)


def test_without_the_ladder_the_first_failure_is_the_last(failing, net):
    tried = failing(wants(65536))
    with pytest.raises(BuildError, match="insufficient workspace") as caught:
        te.build(net, backend="brittle", retry=False)
    assert len(tried.seen) == 1
    assert "--no-retry" in (caught.value.hint or "")


def test_an_engine_of_the_ladder_is_not_given_to_whoever_refuses_it(failing, net):
    tried = failing(foreign(lambda model, config: level(config) == "2"))
    te.build(net, backend="brittle")
    tries = len(tried.seen)
    te.build(net, backend="brittle")
    assert len(tried.seen) == tries  # from the store
    with pytest.raises(BuildError):
        te.build(net, backend="brittle", retry=False)


def test_the_only_sizes_that_an_engine_takes_are_written_into_a_graph_that_does_not_build_without(failing, net):
    needed = "a Squeeze without axes needs its sizes"
    tried = failing(lambda model, config: BuildError(needed) if model.signature.inputs[0].dynamic else None)
    engine = te.build(net, backend="brittle", batch=2)
    assert [fixed for *_, fixed in tried.seen] == [False, True]
    assert needed in engine.passport.build.retries[0]
    failing(lambda model, config: BuildError(needed if model.signature.inputs[0].dynamic else "a node, named"))
    with pytest.raises(BuildError, match=needed) as caught:
        te.build(net, backend="brittle", batch=3)
    assert "a node, named" in str(caught.value.hint)


def test_the_log_of_a_failed_build_is_kept_and_named(failing, net, own_store):
    failing(lambda model, config: BuildError("the network is cursed", hint="pray"))
    with pytest.raises(BuildError) as caught:
        te.build(net, backend="brittle")
    (log,) = (own_store / "logs").glob("*.log")
    assert log.read_text() == "[E] the network is cursed\n"
    assert caught.value.hint == f"pray; the builder's own words are in `{log}`"


def test_fixed_shapes_fold_what_follows_from_them_and_change_nothing_else(tmp_path):
    path = models.save(
        tmp_path / "mask.onnx",
        [
            models.node("Shape", "x", "size", start=0, end=1),
            models.node("ConstantOfShape", "size", "ones", value=onnx.numpy_helper.from_array(np.ones(1, np.float32))),
            models.node("Unsqueeze", "ones axis", "column"),
            models.node("Mul", "x column", "y"),
        ],
        {"x": (models.FLOAT, ["batch", 4])},
        {"y": (models.FLOAT, ["batch", 4])},
        {"axis": np.array([1])},
    )
    (tmp_path / "made").mkdir()
    made = set_static_shapes(open_model(path), {"x": (3, 4)}, tmp_path / "made" / "mask.onnx")
    assert [node.op_type for node in read_proto(made.path).graph.node] == ["Mul"]
    assert made.signature.inputs[0].shape == (3, 4)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    import onnxruntime as ort

    (y,) = ort.InferenceSession(str(made.path), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize(
    ("cause", "workspace", "expected"),
    [("insufficient_workspace", 1, [1, 32768, 65536, 131072]), ("no_implementation", 32768, [32768])],
)
def test_a_builder_without_levels_is_given_more_workspace_and_its_own_hint_is_kept(
    net, tmp_path, monkeypatch, cause, workspace, expected
):
    monkeypatch.setattr(info, "gpus", lambda: ())
    backend_spec, opened = (
        replace(get_backend("tensorrt-rtx"), modules=()),
        open_model(net),
    )  # its library is not needed
    tried: list[int] = []

    def build(attempt: rungs.Attempt) -> NoReturn:
        tried.append(attempt.config.workspace_mib)
        raise BuildError("no kernel", hint="the kernel's own hint", cause=cause)

    first = rungs.Attempt(opened, BuildConfig(device="cuda", workspace_mib=workspace))
    with pytest.raises(BuildError, match="no kernel") as caught:
        rungs.build_with_retries(first, backend_spec, tmp_path, build, path=net)
    assert tried == expected
    assert ("the kernel's own hint" in caught.value.hint) == (len(expected) == 1)

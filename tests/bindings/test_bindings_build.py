"""Builds over the real bindings, end to end: what reaches TensorRT, what comes of it, and every way it can fail."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_models import reference_outputs

BOTH = pytest.mark.releases("10.16.1", "11.4.0")
ALL = pytest.mark.releases("10.0.1", "10.16.1", "11.0.0", "11.4.0")


def build(folder: Path, model: Path | None = None, out: str = "net.engine", **settings: Any) -> Any:
    import onnx_models
    import trt_engine as te

    given: dict[str, Any] = {"backend": "tensorrt", "device": "fake:0", "parity": False, "out": folder / out}
    if model is None:
        model = onnx_models.conv_net(folder / "net.onnx")
        given["batch"] = (1, 2, 4)
    return te.build(model, **(given | settings))


def fails(kind: str, words: str, folder: Path, **settings: Any) -> Any:
    """The error of a build that must fail, and leave nothing that looks like an engine."""
    from trt_engine import errors

    with pytest.raises(errors.TrtEngineError, match=words) as caught:
        build(folder, **settings)
    assert type(caught.value).__name__ == kind
    assert caught.value.hint, "an error says what to do next"
    assert nothing_left(folder)
    return caught.value


def nothing_left(folder: Path) -> bool:
    return not [path for path in folder.rglob("*.engine*") if path.is_file() and "logs" not in path.parts]


def cli(*words: object) -> tuple[int, str, str]:
    from trt_engine.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def timings(folder: Path) -> Path:
    (cache,) = folder.glob("store/timing/*.cache")
    return cache


# ------------------------------------------------------------------------------------------------ what is built


@ALL
def test_a_build_is_strongly_typed_proved_and_sealed(world: Any, tmp_path: Path) -> None:
    import trt_engine as te

    engine = build(tmp_path, parity=True)
    (built,) = world.built
    assert built["strongly_typed"] is True
    assert built["flags"] == [], "no precision flag, on either major"
    assert built["profiles"] == [{"images": [(1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8)]}]
    assert built["verbosity"] == "DETAILED", "the contract needs the layers' types"
    passport = engine.passport
    assert passport.requirements.library == "tensorrt" and passport.requirements.version.startswith(world.version_text)
    assert passport.build.identity == f"tensorrt {world.version_text} fake"
    assert passport.build.notes["typing"] == "strong" and passport.build.notes["network_layers"] == "6"
    assert passport.build.notes["allocations"].startswith("peak 1 MiB")
    assert passport.precision.main_dtype == "fp32" and passport.precision.shares["fp32"].macs == 1.0
    assert passport.parity is not None and passport.parity.passed
    (log,) = (tmp_path / "store/logs").iterdir()
    assert "engine generation completed" in log.read_text(), "what TensorRT said is kept as it was said"
    seen = te.inspect(engine.path)
    assert seen.compatibility is not None and seen.compatibility.status == "loads"
    with te.load(engine) as runner:
        for rows in (1, 3):
            feeds = {"images": np.random.default_rng(rows).random((rows, 3, 8, 8), np.float32)}
            wanted = reference_outputs(tmp_path / "net.onnx", feeds)
            np.testing.assert_allclose(runner.infer(feeds)["scores"], wanted["scores"], rtol=1e-5)
    assert len(world.enqueued_on) >= 2


@BOTH
def test_every_setting_reaches_the_builder(world: Any, tmp_path: Path) -> None:
    options = {
        "optimization_level": "4", "max_aux_streams": "3", "avg_timing_iterations": "5", "max_tactics": "77",
        "tiling_optimization": "fast", "l2_limit_for_tiling": "2MiB", "profiling_verbosity": "layer_names_only",
        "sparsity": "on", "strict_nans": "on", "distributive_independence": "on", "compilation_cache": "off",
        "editable_timing_cache": "on", "hardware_compatibility": "ampere_plus", "tactic_dram": "1GiB",
        "tactic_shared_memory": "64K", "max_threads": "2", "preview_features": "+aliased_plugin_io_10_03",
        "tactic_sources": "-edge_mask_convolutions,+jit_convolutions",
    }  # fmt: skip
    if world.version >= (11, 1):
        options["build_route"] = "-fusion=off"
    engine = build(tmp_path, options=options, workspace_mib=512)
    built = world.built[-1]
    kinds, settings = world.trt.TilingOptimizationLevel, built["settings"]
    assert settings["builder_optimization_level"] == 4 and settings["max_aux_streams"] == 3
    assert settings["avg_timing_iterations"] == 5 and settings["max_num_tactics"] == 77
    assert settings["tiling_optimization_level"] == int(kinds.FAST) and settings["l2_limit_for_tiling"] == 2 << 20
    assert set(built["flags"]) == {
        "SPARSE_WEIGHTS", "STRICT_NANS", "DISTRIBUTIVE_INDEPENDENCE", "DISABLE_COMPILATION_CACHE",
        "EDITABLE_TIMING_CACHE",
    }  # fmt: skip
    assert engine.passport.requirements.hardware_compatibility == "ampere_plus", "whoever inspects it is told"
    assert built["hardware_compatibility"] == "AMPERE_PLUS" and built["verbosity"] == "LAYER_NAMES_ONLY"
    pools = built["pools"]
    assert (pools["WORKSPACE"], pools["TACTIC_DRAM"], pools["TACTIC_SHARED_MEMORY"]) == (512 << 20, 1 << 30, 64 << 10)
    config = next(item for item in world.objects.values() if item.kind == "IBuilderConfig")
    sources = {name: config.sources >> int(one) & 1 for name, one in world.trt.TacticSource.__members__.items()}
    assert sources["EDGE_MASK_CONVOLUTIONS"] == 0 and sources["JIT_CONVOLUTIONS"] == 1
    assert config.previews == {int(world.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03): True}
    if "build_route" in options:
        assert settings["build_route"] == "-fusion=off"


def test_tf32_is_on_only_where_it_is_asked_for(world: Any, tmp_path: Path) -> None:
    build(tmp_path, precision="fp32")
    build(tmp_path, precision="tf32", out="tf32.engine")
    assert [item["flags"] for item in world.built] == [[], ["TF32"]]


@BOTH
def test_several_profiles_arrive_in_order_and_with_their_values(world: Any, tmp_path: Path) -> None:
    import onnx_models

    spans = ("images:1x3x8x8,1x3x8x8,2x3x8x8", "images:3x3x8x8,4x3x8x8,4x3x8x8")
    model = onnx_models.conv_net(tmp_path / "net.onnx")
    world.shape_tensors.add("images")
    error = fails("ProfileError", "holds sizes", tmp_path, model=model, profiles=spans)
    assert "shape_values=images" in error.hint
    build(tmp_path, model, profiles=spans, options={"shape_values": "images:1x2,3x4,5x70000"})
    assert [item["images"] for item in world.built[-1]["shape_values"]] == [[[1, 2], [3, 4], [5, 70_000]]] * 2
    world.shape_tensors.clear()
    build(tmp_path, model, profiles=spans, out="two.engine")
    assert [item["images"][2] for item in world.built[-1]["profiles"]] == [(2, 3, 8, 8), (4, 3, 8, 8)]


def test_a_plan_can_go_to_its_file_piece_by_piece(world: Any, tmp_path: Path) -> None:
    from trt_engine.backends.tensorrt import build as building
    from trt_engine.backends.tensorrt import deserialize

    whole = build(tmp_path).path.read_bytes()
    building.STREAM_MIN_BYTES, deserialize._LARGE_BYTES = 0, 0
    engine = build(tmp_path, out="streamed.engine", rebuild=True)
    assert engine.path.read_bytes() == whole
    called = {world.names.get(key) for key, _ in world.puppet.calls}
    assert "Builder.build_serialized_network_to_stream" in called


@pytest.mark.releases("10.0.1")
def test_settings_a_release_lacks_are_refused_with_the_release_that_has_them(world: Any, tmp_path: Path) -> None:
    for name, value, since in (
        ("max_tactics", "9", "10.4"), ("tiling_optimization", "fast", "10.8"), ("build_route", "-a=b", "11.1"),
        ("strict_nans", "on", "10.6"), ("distributive_independence", "on", "10.12"),
        ("editable_timing_cache", "on", "10.8"), ("hardware_compatibility", "same_compute_capability", "10.9"),
        ("runtime_platform", "windows_amd64", "10.2"), ("preview_features", "+aliased_plugin_io_10_03", "10.3"),
    ):  # fmt: skip
        fails("UsageError", rf"needs TensorRT {re.escape(since)}", tmp_path, options={name: value})
    assert not world.built and not [item for item in world.objects.values() if item.kind == "Builder"]


# ------------------------------------------------------------------------------------------------ kinds of plans


def test_stripped_and_refittable_plans_say_what_they_need(world: Any, tmp_path: Path) -> None:
    engine = build(tmp_path, options={"strip_weights": "on"}, parity=True)
    assert set(world.built[-1]["flags"]) - {"WEIGHTLESS"} == {"STRIP_PLAN", "REFIT_IDENTICAL"}
    assert engine.passport.requirements.stripped and engine.passport.build.notes["refittable"] == "yes"
    assert engine.passport.parity is not None and engine.passport.parity.passed, "it was given its weights to be proved"
    build(tmp_path, out="all.engine", options={"refit": "all"})
    assert "REFIT" in world.built[-1]["flags"]
    options = {"refit": "individual", "refit_weights": "w0"}
    build(tmp_path, out="one.engine", options=options)
    assert "REFIT_INDIVIDUAL" in world.built[-1]["flags"]
    assert any(item.kind == "INetworkDefinition" and item.refittable == {"w0"} for item in world.objects.values())
    (tmp_path / "none").mkdir()
    fails("UsageError", "`nobody` does not name", tmp_path / "none", options=options | {"refit_weights": "nobody"})


def test_portable_plans_hold_host_code_and_say_so(world: Any, tmp_path: Path) -> None:
    engine = build(tmp_path, options={"version_compatible": "on"})
    assert "VERSION_COMPATIBLE" in world.built[-1]["flags"]
    assert engine.passport.requirements.version_compatible and not engine.passport.requirements.lean_runtime
    assert any("host" in text for text in engine.passport.build.warnings)
    options = {"version_compatible": "on", "exclude_lean_runtime": "on"}
    lean = build(tmp_path, out="lean.engine", options=options)
    assert lean.passport.requirements.lean_runtime and "EXCLUDE_LEAN_RUNTIME" in world.built[-1]["flags"]
    assert any("was not counted" in text for text in lean.passport.build.warnings)
    elsewhere = build(tmp_path, out="windows.engine", options={"runtime_platform": "windows_amd64"})
    assert world.built[-1]["windows"] and any("another platform" in text for text in elsewhere.passport.build.warnings)


def test_plugin_libraries_are_loaded_carried_and_needed(world: Any, tmp_path: Path) -> None:
    import subprocess

    import onnx_models
    import trt_engine as te
    from trt_engine.errors import SetupError

    library = tmp_path / "libscale.so"
    source = "void *getCreators(int *n) { *n = 0; return 0; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True)
    library.with_suffix(".ops").write_text("Scale")
    model = onnx_models.conv_net(tmp_path / "net.onnx")
    batch = (1, 2, 4)
    outside = build(tmp_path, model, batch=batch, options={"plugins": str(library)})
    assert outside.passport.requirements.plugins == ("libscale.so",)
    options = {"plugins": str(library), "serialize_plugins": "on"}
    inside = build(tmp_path, model, batch=batch, out="carried.engine", options=options)
    assert inside.passport.requirements.plugins == () and world.built[-1]["plugins"] == [str(library)]
    with pytest.raises(SetupError, match=r"needs the plugin libraries `libscale\.so`") as caught:
        te.load(outside)
    assert "-O plugins=/path/to/libscale.so" in (caught.value.hint or "")
    (tmp_path / "mine.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.seen').touch()\n")
    options = {"plugins": str(library), "python_plugins": str(tmp_path / "mine.py")}
    te.load(outside, options=options).close()
    assert (tmp_path / "mine.seen").exists(), "what runs a plan has its plugins too"


def test_a_dla_build_needs_a_core_and_lets_the_parser_look(world: Any, tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()
    fails("SetupError", "DLA core 0 does not exist: this device has 0", tmp_path, options={"dla_core": "0"})
    key = next(key for key, name in world.names.items() if name == "Builder.num_DLA_cores")
    world.puppet.rules[key] = lambda call: 2
    build(tmp_path, options={"dla_core": "1", "dla_sram": "1MiB", "dla_local_dram": "512MiB"})
    built = world.built[-1]
    assert built["settings"]["DLA_core"] == 1 and built["settings"]["default_device_type"] == int(
        world.trt.DeviceType.DLA
    )
    assert "GPU_FALLBACK" in built["flags"] and built["pools"]["DLA_MANAGED_SRAM"] == 1 << 20
    parser = [item for item in world.objects.values() if item.kind == "OnnxParser"][-1]
    assert parser.config, "the parser was given the settings"
    world.faults.refused.add("OnnxParser.set_builder_config")
    fails("BuildError", "giving TensorRT's ONNX parser the settings failed", tmp_path / "refused",
          options={"dla_core": "1"})  # fmt: skip


# ------------------------------------------------------------------------------------------------ timing cache


@ALL
def test_a_second_build_times_nothing_that_the_first_one_timed(world: Any, tmp_path: Path) -> None:
    first = build(tmp_path)
    timed = world.tactics_timed
    assert timed == 6 and first.passport.build.notes["timing_cache"].startswith("new, kept")
    second = build(tmp_path, out="second.engine", rebuild=True)
    assert world.tactics_timed == timed and world.cache_hits == 6
    assert "nothing had to be timed" in second.passport.build.notes["timing_cache"]
    build(tmp_path, out="third.engine", rebuild=True, options={"error_on_timing_cache_miss": "on"})
    assert world.tactics_timed == timed


@BOTH
def test_what_another_process_timed_meanwhile_is_kept(world: Any, tmp_path: Path) -> None:
    build(tmp_path)
    cache = timings(tmp_path)
    known = json.loads(cache.read_text())

    def other_writes(step: int) -> None:
        cache.write_text(json.dumps(known | {"entries": {"theirs": 0.5}}))

    world.faults.before_step = other_writes
    build(tmp_path, out="second.engine", rebuild=True)
    entries = json.loads(cache.read_text())["entries"]
    assert "theirs" in entries and set(known["entries"]) < set(entries)


def test_the_file_is_written_by_one_process_at_a_time(world: Any, tmp_path: Path) -> None:
    """Somebody holds the lock and writes until the build is over: what both know is there in the end."""
    from filelock import FileLock

    build(tmp_path)
    cache, done = timings(tmp_path), threading.Event()
    known = json.loads(cache.read_text())
    lock, held = FileLock(f"{cache}.lock", thread_local=False), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(30)
            cache.write_text(json.dumps(known | {"entries": {"theirs": 0.5}}))

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    releasing = threading.Timer(0.5, done.set)
    releasing.start()
    build(tmp_path, out="second.engine", rebuild=True)
    holder.join()
    assert "theirs" in json.loads(cache.read_text())["entries"], "the build waited, then merged"


@pytest.mark.parametrize("wrong", ["version", "device", "damaged"])
def test_a_cache_of_another_identity_is_refused_said_and_replaced(world: Any, tmp_path: Path, wrong: str) -> None:
    build(tmp_path)
    cache = timings(tmp_path)
    document = json.loads(cache.read_text())
    content = "no cache" if wrong == "damaged" else json.dumps(document | {wrong: "another"})
    cache.write_text(content)
    timed = world.tactics_timed
    engine = build(tmp_path, out="second.engine", rebuild=True)
    assert world.tactics_timed == 2 * timed, "nothing of it was used"
    assert any("timing cache" in text and "another TensorRT or GPU" in text for text in engine.passport.build.warnings)
    assert json.loads(cache.read_text()) == document, "and it was replaced by one that is right"


@BOTH
def test_a_cache_that_is_refused_in_the_log_alone_is_not_taken_for_a_used_one(world: Any, tmp_path: Path) -> None:
    """An object comes back, and `set_timing_cache` and `combine` are True."""
    build(tmp_path)
    timed = world.tactics_timed
    world.faults.says["IBuilderConfig.create_timing_cache"] = [("WARNING", "The timing cache will not be used!")]
    engine = build(tmp_path, out="second.engine", rebuild=True)
    assert world.tactics_timed == 2 * timed, "nothing of it was used"
    assert engine.passport.build.notes["timing_cache"].startswith("new, kept")
    assert ["timing cache" in text for text in engine.passport.build.warnings] == [True], "and it is reported once"


def test_a_cache_that_cannot_be_kept_costs_a_warning_and_no_engine(world: Any, tmp_path: Path) -> None:
    from filelock import FileLock

    from trt_engine.backends.tensorrt import build as build_module

    build(tmp_path)
    cache = timings(tmp_path)
    before = cache.read_bytes()
    build_module._LOCK_S = 0.05
    with FileLock(f"{cache}.lock"):
        engine = build(tmp_path, out="held.engine", workspace_mib=99)
    assert any("another process held its lock" in text for text in engine.passport.build.warnings)
    world.faults.nothing_from.add("ITimingCache.serialize")
    engine = build(tmp_path, out="silent.engine", workspace_mib=98)
    assert any("returned no timing cache" in text for text in engine.passport.build.warnings)
    world.faults.nothing_from.clear()

    def full(path: Path, raw: bytes) -> None:
        raise OSError(28, "No space left on device")

    build_module.write_atomic = full
    cache.write_bytes(b"")
    engine = build(tmp_path, out="full.engine", workspace_mib=97)
    assert any("was not saved" in text and "the disk is full" in text for text in engine.passport.build.warnings)
    assert before and not cache.read_bytes()


# ------------------------------------------------------------------------------------------------ stopping


def until_stopped() -> None:
    """Send ourselves Ctrl-C, and come back once the build under way has heard of it."""
    os.kill(os.getpid(), signal.SIGINT)
    until_cancelled()


def until_cancelled() -> None:
    from trt_engine.backends.tensorrt.build_progress import BuildProgress

    builds = [item for item in gc.get_objects() if isinstance(item, BuildProgress)]
    for _ in range(6000):
        if any(build.cancelled for build in builds):
            return
        threading.Event().wait(0.01)


@ALL
@BOTH
def test_ctrl_c_ends_a_build_at_its_next_step_and_leaves_nothing(world: Any, tmp_path: Path) -> None:
    steps: list[int] = []

    def interrupt(step: int) -> None:
        steps.append(step)
        if step == 2:
            until_stopped()

    world.faults.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path)
    assert steps == [0, 1, 2], "the monitor said no to the step that was going on"
    assert nothing_left(tmp_path) and not world.built
    world.faults.before_step = None
    build(tmp_path)


def test_ctrl_c_while_the_thread_of_a_build_starts_stops_the_build(world: Any, tmp_path: Path) -> None:
    """There it met the caller outside of what waits: the build went on behind his back and left its plan."""
    world.faults.before_step = lambda step: until_cancelled()
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started(thread)
        if thread.name == "tensorrt-build":
            raise KeyboardInterrupt

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path)
    finally:
        threading.Thread.start = started  # type: ignore[method-assign]
    assert nothing_left(tmp_path) and not world.built


@BOTH
def test_the_phases_are_told_as_they_come_and_a_listener_that_breaks_stops_the_build(
    world: Any, tmp_path: Path
) -> None:
    from trt_engine.protocols import BuildPaths

    heard: list[str] = []
    direct(tmp_path, BuildPaths(tmp_path / "a.engine", on_status=heard.append))
    assert any(
        re.fullmatch(r"Building engine\S* from subgraph 0/1, Computing profile costs 3/6", text) for text in heard
    )

    def broken(text: str) -> None:
        if "3/6" in text:
            raise ZeroDivisionError("the listener broke")

    with pytest.raises(ZeroDivisionError, match="the listener broke"):
        direct(tmp_path, BuildPaths(tmp_path / "b.engine", on_status=broken))
    assert not (tmp_path / "b.engine").exists()


def direct(folder: Path, places: Any) -> Any:
    """The builder alone, without the store and what is done around it."""
    import onnx_models
    from trt_engine.backends.tensorrt.build import TensorRtBuilder
    from trt_engine.config.build import BuildConfig
    from trt_engine.graph.load import open_model

    model = open_model(onnx_models.conv_net(folder / "net.onnx"))
    profiles = BuildConfig(batch=(1, 2, 4)).resolve(model.signature)
    config = BuildConfig(backend="tensorrt", device="fake:0", profiles=profiles)
    return TensorRtBuilder().build(model, config, places)


# ------------------------------------------------------------------------------------------------ failures


@ALL
def test_parser_errors_name_node_operator_and_reason(world: Any, tmp_path: Path) -> None:
    import onnx

    import onnx_models

    model = onnx_models.conv_net(tmp_path / "net.onnx")
    proto = onnx.load(model)
    proto.graph.node[2].name = "second"
    proto.graph.node[2].op_type = "Celu"
    onnx.save(proto, model)
    world.faults.unsupported.add("Celu")
    error = fails("ModelError", r"node 2 `second` \(Celu\): No importer registered for op: Celu", tmp_path,
                  model=model, batch=(1, 2, 4))  # fmt: skip
    assert error.exit_code == 4 and world.version_text.split(".")[0] in error.message
    code, _, err = cli("build", model, "--backend", "tensorrt", "--device", "fake:0", "--batch", "1:2:4",
                       "-o", tmp_path / "net.engine")  # fmt: skip
    assert code == 4 and err.count("No importer registered") == 1 and "hint:" in err
    (log, *_) = (tmp_path / "store/logs").iterdir()
    assert "[E] [TRT] No importer registered" in log.read_text(), "the log has it as it was said"


def test_a_missing_plugin_is_said_with_the_remedy(world: Any, tmp_path: Path) -> None:
    import onnx

    import onnx_models

    model = onnx_models.conv_net(tmp_path / "net.onnx")
    proto = onnx.load(model)
    proto.graph.node[1].op_type, proto.graph.node[1].domain = "TRT_MXFP8DequantizeLinear", "trt"
    proto.opset_import.append(onnx.helper.make_opsetid("trt", 1))
    onnx.save(proto, model)
    error = fails("ModelError", "TRT_MXFP8DequantizeLinear|Plugin not found", tmp_path, model=model, batch=(1, 2, 4))
    assert "plugin" in error.hint


GIVES_NOTHING = {
    "Builder.__init__": "creating TensorRT's builder",
    "Builder.create_network": "creating a strongly typed network",
    "Builder.create_builder_config": "creating the builder's settings",
    "Builder.create_optimization_profile": "creating an optimization profile",
    "OnnxParser.__init__": "creating TensorRT's ONNX parser",
    "Builder.build_serialized_network": "the build of `net.onnx`",
    "Runtime.__init__": "creating TensorRT's runtime",
    "Runtime.deserialize_cuda_engine": "loading the plan that was just built",
    "ICudaEngine.create_engine_inspector": "no inspector",
}


@pytest.mark.parametrize("member", GIVES_NOTHING)
def test_nothing_where_an_object_was_expected_is_an_error_in_words(world: Any, tmp_path: Path, member: str) -> None:
    from trt_engine.errors import TrtEngineError

    world.faults.nothing_from.add(member)
    with pytest.raises(TrtEngineError, match=re.escape(GIVES_NOTHING[member])) as caught:
        build(tmp_path)
    assert caught.value.hint and caught.value.exit_code in (3, 5, 10)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("member", ["Builder.build_serialized_network", "Builder.create_network"])
def test_the_reason_is_taken_from_what_tensorrt_said(world: Any, tmp_path: Path, member: str) -> None:
    world.faults.nothing_from.add(member)
    world.faults.says[member] = [("ERROR", "Error Code 9: the moon is full")]
    error = fails("BuildError", "the moon is full", tmp_path)
    (log,) = (tmp_path / "store/logs").iterdir()
    assert "the moon is full" in log.read_text() and str(log) in error.hint


def test_what_a_build_complained_of_is_not_why_its_plan_does_not_load(world: Any, tmp_path: Path) -> None:
    world.faults.says["build"] = [
        ("WARNING", "Requested amount of GPU memory (99 bytes) could not be allocated. Trying other tactics.")
    ]
    world.faults.nothing_from.add("Runtime.deserialize_cuda_engine")
    fails("BuildError", "loading the plan that was just built failed: TensorRT gave no reason", tmp_path)


def test_a_global_message_reaches_the_build_that_goes_on(world: Any, tmp_path: Path) -> None:
    """TensorRT tells what belongs to no builder to the first logger of the process, whoever made it."""
    from trt_engine.backends.tensorrt.logger import TensorRtLogger

    first, second = TensorRtLogger(), TensorRtLogger(tmp_path / "second.log")
    severity = world.trt.ILogger.Severity.ERROR
    first.close()
    first.log(severity, "a plugin broke")
    assert second.errors() == ["a plugin broke"] and "a plugin broke" in (tmp_path / "second.log").read_text()
    second.close()
    second.log(severity, "nobody listens")
    assert not first.errors() and not second.errors()


SILENT = {
    "IBuilderConfig.max_aux_streams=": ("max_aux_streams", "3"),
    "IBuilderConfig.builder_optimization_level=": ("optimization_level", "5"),
    "IBuilderConfig.tiling_optimization_level=": ("tiling_optimization", "full"),
    "IBuilderConfig.l2_limit_for_tiling=": ("l2_limit_for_tiling", "1MiB"),
    "IBuilderConfig.max_num_tactics=": ("max_tactics", "7"),
    "Builder.max_threads=": ("max_threads", "4"),
    "IBuilderConfig.hardware_compatibility_level=": ("hardware_compatibility", "ampere_plus"),
    "IBuilderConfig.runtime_platform=": ("runtime_platform", "windows_amd64"),
    "IBuilderConfig.set_flag": ("weight_streaming", "on"),
    "IBuilderConfig.set_memory_pool_limit": ("tactic_dram", "1GiB"),
    "IBuilderConfig.set_preview_feature": ("preview_features", "+aliased_plugin_io_10_03"),
    "IBuilderConfig.set_tactic_sources": ("tactic_sources", "-jit_convolutions"),
}


@pytest.mark.parametrize("member", SILENT)
def test_a_setter_that_does_nothing_is_found_by_reading_back(world: Any, tmp_path: Path, member: str) -> None:
    name, value = SILENT[member]
    world.faults.stubborn.add(member)
    error = fails("UsageError", "TensorRT (set|does not take)", tmp_path, options={name: value})
    assert name in error.message and not world.built


def test_a_network_that_came_out_weakly_typed_is_refused(world: Any, tmp_path: Path) -> None:
    world.faults.refused.add("INetworkDefinition.get_flag")
    fails("BuildError", "not strongly typed", tmp_path)


def test_a_profile_tensorrt_does_not_keep_is_refused(world: Any, tmp_path: Path) -> None:
    world.faults.refused.add("IOptimizationProfile.set_shape")
    fails("ProfileError", "input `images`", tmp_path)
    world.faults.refused.clear()
    key = next(key for key, name in world.names.items() if name == "IBuilderConfig.add_optimization_profile")
    world.puppet.rules[key] = lambda call: -1
    fails("ProfileError", "does not take profile 0", tmp_path)


@BOTH
def test_too_little_workspace_and_no_memory_are_told_apart(world: Any, tmp_path: Path) -> None:
    world.scratch_bytes = 64 << 20
    error = fails("BuildError", "insufficient workspace|scratch", tmp_path, workspace_mib=1, retry=False)
    assert error.exit_code == 5 and "workspace" in error.hint
    world.scratch_bytes = 2 << 30  # more than the fake device has
    error = fails("MemoryExhausted", "could not be allocated|memory", tmp_path, retry=False)
    assert error.exit_code == 11


def test_a_workspace_beyond_the_memory_is_cut_with_a_warning(world: Any, tmp_path: Path) -> None:
    engine = build(tmp_path, workspace_mib=1 << 24)
    whole = engine.passport.build.notes["workspace"]
    assert any(
        text.startswith("`--workspace` is 16777216 MiB and TensorRT has ") for text in engine.passport.build.warnings
    )
    usual = build(tmp_path, out="usual.engine")
    assert usual.passport.build.notes["workspace"] == whole and not any(
        "--workspace" in text for text in usual.passport.build.warnings
    )


@BOTH
def test_an_engine_of_another_precision_breaks_the_contract(world: Any, tmp_path: Path) -> None:
    import onnx_models
    from trt_engine.errors import PrecisionError

    good = build(tmp_path, precision="fp16")
    assert good.passport.precision.main_dtype == "fp16" and not set(world.built[-1]["flags"]) & {"FP16", "INT8"}, (
        world.built[-1]["flags"]
    )
    quantized = onnx_models.int8_qdq(tmp_path / "q.onnx")
    assert build(tmp_path, quantized, precision="int8").passport.precision.main_dtype == "int8"
    world.faults.computes_in = {"*": "Float"}
    for given in ({"precision": "fp16", "batch": (1, 2, 3), "model": tmp_path / "net.onnx"},
                  {"precision": "int8", "workspace_mib": 99, "model": quantized}):  # fmt: skip
        wrong = tmp_path / str(given["precision"])
        wrong.mkdir()
        with pytest.raises(PrecisionError, match=f"requested {given['precision']}, found fp32") as caught:
            build(wrong, **given)
        assert caught.value.exit_code == 6 and nothing_left(wrong)
    code, _, err = cli("build", tmp_path / "net.onnx", "--backend", "tensorrt", "--device", "fake:0", "--batch", "1:2:5",
                       "--precision", "fp16", "-o", tmp_path / "x.engine")  # fmt: skip
    assert code == 6 and "found fp32" in err


def test_a_plan_of_another_library_than_the_bindings_is_found(world: Any, tmp_path: Path) -> None:
    world.version = (*world.version[:2], world.version[2] + 1, *world.version[3:])
    fails("BuildError", "two TensorRTs|the bindings that built it", tmp_path)


def test_warnings_of_tensorrt_stand_in_the_passport(world: Any, tmp_path: Path) -> None:
    world.faults.says["build"] = [
        ("WARNING", "Detected layernorm nodes in FP16"), ("INFO", "nothing to see"),
        ("WARNING", "ModelImporter.cpp:1071: Make sure input ids has Int64 binding."),
    ]  # fmt: skip
    engine = build(tmp_path)
    said = [text for text in engine.passport.build.warnings if text.startswith("TensorRT: ")]
    assert said == ["TensorRT: Detected layernorm nodes in FP16"]

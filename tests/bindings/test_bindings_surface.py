"""Every name and parameter of TensorRT our backend uses, against the real bindings of both ends of both majors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bindings.harness import RELEASES, SOURCE, Bindings
from trt_engine.backends.tensorrt.api_table import API_TABLE

BACKEND = SOURCE / "trt_engine/backends/tensorrt"
LOOK = """
import json, sys
from pathlib import Path
from bindings import uses
folders = [Path(word) for word in sys.argv[1:]]
print(json.dumps({
    "version": uses.VERSION, "table": uses.surface_problems(), "found": uses.problems(*folders),
    "followed": uses.followed(*folders), "present": [use.name for use in uses.TABLE if uses.present(use)],
    "size": len(uses.TABLE),
}))
"""
REACHED = {
    "Builder.__init__", "Builder.create_network", "Builder.gpu_allocator", "Builder.build_serialized_network",
    "INetworkDefinition.get_input", "INetworkDefinition.num_inputs", "ITensor.is_shape_tensor", "ITensor.shape",
    "OnnxParser.__init__", "OnnxParser.parse", "OnnxParser.get_error", "ParserError.node_name", "ParserError.desc",
    "IOptimizationProfile.set_shape", "IOptimizationProfile.get_shape", "IBuilderConfig.add_optimization_profile",
    "IBuilderConfig.set_flag", "IBuilderConfig.get_memory_pool_limit", "IBuilderConfig.create_timing_cache",
    "IBuilderConfig.set_timing_cache", "ITimingCache.combine", "ITimingCache.serialize", "IBuilderConfig.max_aux_streams",
    "IBuilderConfig.progress_monitor", "Runtime.__init__", "Runtime.deserialize_cuda_engine", "Runtime.load_runtime",
    "ICudaEngine.create_execution_context", "ICudaEngine.get_tensor_name", "ICudaEngine.get_tensor_profile_shape",
    "ICudaEngine.create_engine_inspector", "EngineInspector.get_engine_information", "EngineInspector.execution_context",
    "IExecutionContext.set_input_shape", "IExecutionContext.set_tensor_address", "IExecutionContext.execute_async_v3",
    "IExecutionContext.infer_shapes", "IExecutionContext.set_optimization_profile_async", "Refitter.__init__",
    "Refitter.refit_cuda_engine", "OnnxParserRefitter.refit_from_bytes", "IPluginRegistry.load_library",
    "IProgressMonitor.step_complete", "IGpuAsyncAllocator.allocate_async", "IGpuAllocator.reallocate", "ILogger.log",
    "IProfiler.report_layer_time",
}  # fmt: skip
"""Uses that must have been seen, most of them on objects that other objects made: else nothing was looked at."""

RTX_REACHED = {
    "ICudaEngine.create_runtime_config", "ICudaEngine.load_weights", "ICudaEngine.weights_loaded",
    "IRuntimeConfig.create_runtime_cache", "IRuntimeConfig.set_runtime_cache", "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize", "IRuntimeConfig.set_execution_context_allocation_strategy",
    "IExecutionContext.is_stream_capturable", "IBuilderConfig.set_compute_capability",
}  # fmt: skip
"""Those of TensorRT-RTX beside them."""

WHOLE = ("10.16.1", "11.4.0")
LOOKED_AT = [item if item in WHOLE else pytest.param(item, marks=pytest.mark.slow) for item in RELEASES]
"""The oldest of each major is looked at with what is slow: it adds the ends of the table's ranges."""

Look = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def look(bindings: Callable[[str], Bindings]) -> Look:
    """What a release says of the backend as it is."""
    seen: dict[str, dict[str, Any]] = {}

    def at(version: str) -> dict[str, Any]:
        if version not in seen:
            seen[version] = looked(bindings(version), BACKEND)
        return seen[version]

    return at


def looked(bindings: Bindings, folder: Path) -> dict[str, Any]:
    rtx = [str(SOURCE / "trt_engine/backends/tensorrt_rtx")] if bindings.module == "tensorrt_rtx" else []
    done = bindings.run(LOOK, str(folder), *rtx)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("version", LOOKED_AT)
@pytest.mark.slow
def test_the_table_says_which_names_and_parameters_each_release_has(look: Look, version: str) -> None:
    seen = look(version)
    assert ".".join(map(str, seen["version"][:3])) == version.removeprefix("rtx-"), (
        "the release that was asked for answers"
    )
    assert seen["table"] == []
    assert seen["size"] > 200
    assert len(seen["present"]) > 170


@pytest.mark.parametrize("version", LOOKED_AT)
def test_every_use_in_our_sources_exists_where_it_is_used(look: Look, version: str) -> None:
    seen = look(version)
    assert seen["found"] == []
    assert set(seen["followed"]) >= (REACHED | RTX_REACHED if version.startswith("rtx-") else REACHED)
    assert len(seen["followed"]) > 130


def test_the_table_holds_no_name_that_nobody_reaches() -> None:
    """By its word in the sources: what is an enum's is asked for by users too, all of those `Binding.choices` lists."""
    sources = {path.stem: path.read_text() for path in BACKEND.glob("*.py") if path.stem != "surface"}
    words = set(re.findall(r"\w+", "\n".join(sources.values())))
    listed = set(
        re.findall(r'(?:choices|member|_signed)\((?:[\w.]+, text, )?"(\w+)"', sources["configure"] + sources["binding"])
    )
    listed |= {"TacticSource", "PreviewFeature", "ExecutionContextAllocationStrategy"}
    dead = []
    for use in API_TABLE:
        owner, _, short = use.name.rpartition(".")
        if owner not in listed and (owner.rpartition(".")[2] if short == "__init__" else short) not in words:
            dead.append(use.name)
    assert dead == []


@pytest.mark.slow
def test_younger_names_are_followed_where_they_are_and_gated_where_they_are_not(look: Look) -> None:
    younger = {
        "Builder.build_serialized_network_to_stream": "10.16.1",
        "ICudaEngine.weight_streaming_budget_v2": "10.16.1",
        "IExecutionContext.set_device_memory": "10.16.1",
        "OnnxParser.set_builder_config": "10.16.1",
        "IBuilderConfig.build_route": "11.4.0",
        "Refitter.release_refit_resources": "11.4.0",
    }
    for name, version in younger.items():
        assert name in look(version)["followed"], f"{name} is followed on {version}"
        assert name not in look("10.0.1")["followed"]
        assert name not in look("10.0.1")["present"]


@pytest.mark.slow
def test_a_wrong_use_anywhere_in_a_module_is_found(bindings: Callable[[str], Bindings], tmp_path: Path) -> None:
    """The check itself, on a module that holds one mistake of each kind."""
    folder = tmp_path / "backend"
    shutil.copytree(BACKEND, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "wrong.py").write_text(
        "def build(binding, logger):\n"
        "    trt = binding.trt\n"
        "    builder = trt.Builder(logger)\n"
        "    network = builder.create_network(1)\n"
        "    config = builder.create_builder_config()\n"
        "    config.set_flag(trt.BuilderFlag.FP16)\n"
        "    config.max_axu_streams = 2\n"
        "    made = [builder.create_optimization_profile() for _ in range(2)]\n"
        "    made[0].set_shape('x', (1,), (1,))\n"
        "    config.set_timing_cache(cache=None, ignore=True)\n"
        "    return network.get_inptu(0), binding.has('Builder.create_netwrok')\n"
        "class Monitor:\n"
        "    native_base = 'IProgressMonitor'\n"
        "    def phase_start(self, name, parent):\n"
        "        pass\n"
    )
    found = [line for line in looked(bindings(WHOLE[-1]), folder)["found"] if line.startswith("wrong.py")]
    for words in (
        "`Builder.create_network` is given a number", "BuilderFlag.FP16", "max_axu_streams",
        "`IOptimizationProfile.set_shape` is called with 3 parameters", "`IBuilderConfig.set_timing_cache` is called",
        "get_inptu", "Builder.create_netwrok", "`Monitor.phase_start` does not take", "has no `step_complete`",
    ):  # fmt: skip
        assert any(words in line for line in found), f"{words}: not found in {found}"

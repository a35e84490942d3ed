"""The TensorRT-RTX provider, a plugin of ONNX Runtime: registered once, never replaced in silence, kept apart by version."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

import onnx_models as models
import trt_engine as te
from trt_engine.backends.onnxruntime import plugin_providers, session
from trt_engine.backends.onnxruntime.compatibility import check_compatibility
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.providers import ProviderSelection, select_providers, verify_active
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import SetupError, UsageError

NAME, PROVIDER = "tensorrt-rtx", "NvTensorRTRTXExecutionProvider"
BUILD = (PROVIDER, "CUDAExecutionProvider", "CPUExecutionProvider")
"""What is installed where the package is, beside a build of ONNX Runtime for CUDA."""


def chosen(*names: str, **more: Any) -> ProviderSelection:
    return select_providers(names or (NAME,), more.pop("device", "cuda:0"), available=BUILD, gpus=(), **more)


@dataclass
class Script:
    """ONNX Runtime and the package as this test wants them: which devices are offered, how registration ends."""

    numbers: list[int] = field(default_factory=list)
    """The GPUs that are offered once the library is registered."""
    refusal: str | None = None
    registered: list[tuple[str, str]] = field(default_factory=list)

    def register(self, name: str, path: str) -> None:
        self.registered.append((name, path))
        if self.refusal is not None:
            raise state.Fail(self.refusal)

    def devices(self) -> list[Any]:
        return [
            SimpleNamespace(ep_name=PROVIDER, memory_info=lambda kind, n=number: SimpleNamespace(device_id=n))
            for number in (self.numbers if self.registered else ())
        ]


PACKAGE = """
import os
os.environ["LD_LIBRARY_PATH"] = "/site:" + os.environ.get("LD_LIBRARY_PATH", "")  # as NVIDIA's package does
def get_library_path():
    return "/site/libonnxruntime_providers_nv_tensorrt_rtx.so"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of that name, and no library in it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / f"{plugin_providers.PLUGINS[NAME].module}.py").write_text(PACKAGE)
    return folder


@pytest.fixture
def script(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    made, module = Script(), plugin_providers.PLUGINS[NAME].module
    before = sys.modules.pop(module, None)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(ort, "register_execution_provider_library", made.register)
    monkeypatch.setattr(ort, "get_ep_devices", made.devices)
    monkeypatch.setattr(plugin_providers, "_registration_errors", {})
    monkeypatch.setattr(plugin_providers, "versions", lambda name: "0.5.0, TensorRT-RTX 1.7.1")
    yield made
    sys.modules.pop(module, None)
    if before is not None:
        sys.modules[module] = before


# ------------------------------------------------------------------------------------------------ names and settings


@pytest.mark.parametrize(
    ("setting", "value", "text", "hint"),
    [
        ("nv_runtime_cache_file", "x", "has no setting `nv_runtime_cache_file`", "nv_runtime_cache_path"),
        ("enable_cuda_graph", "1", "not offered", "--no-graph"),
        ("device_id", "1", "not offered", "--device cuda:1"),
        ("nv_target_sm", "sm89", "not offered", "--backend tensorrt-rtx"),
        ("nv_enable_profiling", "maybe", "as on or off", "=on"),
        ("nv_max_workspace_size", "1GiB", "expected a whole number", "TensorRT-RTX"),
    ],
)
def test_a_setting_it_would_ignore_or_misread_is_an_error(setting: str, value: str, text: str, hint: str):
    with pytest.raises(UsageError, match=text) as caught:
        chosen(options={f"{NAME}.{setting}": value})
    assert hint in (caught.value.hint or "")


def test_its_switches_are_zero_and_one_and_a_capturing_session_sets_its_own():
    given = {"rtx.nv_persistent_context_memory": "on", f"{PROVIDER}.nv_max_workspace_size": "1073741824"}
    choice = chosen(options=given)
    wanted = {"nv_persistent_context_memory": "1", "nv_max_workspace_size": "1073741824"}
    assert choice.to_ort_providers() == [(PROVIDER, wanted)]
    assert choice.with_cuda_graphs().to_ort_providers() == [(PROVIDER, wanted | {"enable_cuda_graph": "1"})]


def test_it_may_compute_fp32_in_tf32_unless_nvidias_variable_forbids_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert chosen(precision="fp32").tf32
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert not chosen().tf32


# ------------------------------------------------------------------------------------------------ what it compiled


def test_compiled_kernels_are_kept_for_one_engine_version_and_gpu(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    kept = chosen().with_cache("sha256:a")
    assert kept.cache is not None and kept.cache.parent == tmp_path / "store" / "tensorrt-rtx-provider"
    assert dict(kept.to_ort_providers())[PROVIDER] == {"nv_runtime_cache_path": str(kept.cache)}
    assert kept.options == ({},), "a default is not a fact of the measurement"
    monkeypatch.setattr(plugin_providers, "versions", lambda name: "0.6.0, TensorRT-RTX 1.8.0")
    assert len({kept.cache, chosen().with_cache("sha256:a").cache, chosen().with_cache("sha256:b").cache}) == 3


@pytest.mark.parametrize("path", ["", "/mine"])
def test_a_cache_folder_of_the_users_wins_and_an_empty_one_keeps_nothing(script: Script, path: str):
    choice = chosen(options={f"{NAME}.nv_runtime_cache_path": path}).with_cache("sha256:a")
    assert choice.cache is None and dict(choice.to_ort_providers())[PROVIDER] == {"nv_runtime_cache_path": path}


# ------------------------------------------------------------------------------------------------ package, driver, GPU


def test_without_its_package_the_error_names_the_pip_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin_providers, "installed", lambda name: False)
    with pytest.raises(SetupError, match="its package is not installed") as caught:
        select_providers((NAME,), "cuda:0")
    hint = caught.value.hint or ""
    assert "trt-engine[ort-rtx]" in hint and "onnxruntime-ep-nv-tensorrt-rtx-cu13" in hint and "-cu12" in hint
    assert caught.value.exit_code == 3 and "--allow-fallback" in hint
    assert select_providers((NAME,), "cuda:0", allow_fallback=True).names == ("cpu",)


def test_the_library_is_registered_once_from_whichever_thread(script: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    script.numbers = [0]
    threads = [threading.Thread(target=plugin_providers.unusable_reason, args=(NAME,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plugin_providers.unusable_reason(NAME) is None
    assert script.registered == [(PROVIDER, "/site/libonnxruntime_providers_nv_tensorrt_rtx.so")]
    assert os.environ["LD_LIBRARY_PATH"] == "/mine", "children take their own libraries"
    assert select_providers((NAME,), "cuda:0").names == (NAME,)


def test_a_program_that_registered_it_already_is_no_failure(script: Script, monkeypatch: pytest.MonkeyPatch):
    script.numbers, script.registered = [0], [(PROVIDER, "theirs")]
    assert plugin_providers.unusable_reason(NAME) is None and script.registered == [(PROVIDER, "theirs")]
    monkeypatch.setattr(plugin_providers, "_registration_errors", {})
    script.numbers, script.refusal = [], f"EP library is already registered under {PROVIDER}"
    assert "compute capability" in (plugin_providers.unusable_reason(NAME) or ""), "registered, and without a device"


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "NVIDIA driver"),
        ("libnvidia-ml.so.1: cannot open shared object file: No such file or directory", "NVIDIA driver"),
        ("/x.so: undefined symbol: nvmlSystemGetDriverVersion", "older than the package"),
    ],
)
def test_a_library_that_does_not_load_is_named_with_its_fix(script: Script, why: str, fix: str):
    script.refusal = f"[ONNXRuntimeError] : 1 : FAIL : Failed to load library /x.so with error: {why}"
    with pytest.raises(SetupError) as caught:
        select_providers((NAME,), "cuda:0")
    assert caught.value.message == f"the provider `{NAME}` was asked for and does not run: {why}"
    assert fix in (caught.value.hint or "")
    allowed = select_providers((NAME, "cpu"), "cuda:0", allow_fallback=True)
    assert allowed.names == ("cpu",) and why in (allowed.fallback or "")


def test_an_old_onnxruntime_is_named_with_its_fix(script: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ort, "__version__", "1.24.2")
    with pytest.raises(SetupError, match=r"needs onnxruntime 1\.25 or later, here is 1\.24\.2") as caught:
        select_providers((NAME,), "cuda:0")
    assert "pip install -U onnxruntime" in (caught.value.hint or "") and not script.registered


def gpu(vendor: int = 0x10DE) -> Any:
    return SimpleNamespace(vendor_id=vendor, type=state.OrtHardwareDeviceType.GPU)


NOTES = (
    "NvTensorRTRTX EP does not support GPU with Compute Capability 9.0. Supported compute capabilities are 8.6, 8.9, "
    "and 12.0 or newer."
)


@pytest.mark.parametrize(
    ("boards", "text"),
    [([], "finds no NVIDIA GPU"), ([gpu(0x8086)], "finds no NVIDIA GPU"), ([gpu(), gpu()], "Compute Capability 9.0")],
)
def test_a_machine_without_an_rtx_gpu_gets_what_the_provider_takes(
    script: Script, monkeypatch: pytest.MonkeyPatch, boards: list[Any], text: str
):
    monkeypatch.setattr(state, "get_hardware_devices", lambda: boards, raising=False)
    details = {"reasons_bitmask": 2, "notes": NOTES, "error_code": 0}
    monkeypatch.setattr(
        state, "get_hardware_device_ep_incompatibility_details", lambda name, board: details, raising=False
    )
    with pytest.raises(SetupError, match=text) as caught:
        select_providers((NAME,), "cuda:0")
    assert "nvidia-smi -L" in (caught.value.hint or "") and caught.value.message.count("12.0") == 1
    monkeypatch.delattr(state, "get_hardware_devices")  # before ONNX Runtime 1.26
    with pytest.raises(SetupError, match=r"offers no device here, .* 8\.6, 8\.9, and from 12\.0 on"):
        select_providers((NAME,), "cuda:0")


def test_the_gpu_is_the_one_of_that_number_and_another_is_an_error(script: Script):
    script.numbers = [2, 0]
    assert select_providers((NAME,), "cuda:2").device == "cuda:2"
    found = plugin_providers.ep_device(NAME, 2).memory_info(None)
    assert found.device_id == 2
    with pytest.raises(SetupError, match=r"does not run on `cuda:1`, it offers `cuda:2`, `cuda:0`") as caught:
        select_providers((NAME,), "cuda:1")
    assert "8.6, 8.9" in (caught.value.hint or "") and "--allow-fallback" in (caught.value.hint or "")


# ------------------------------------------------------------------------------------------------ sessions, for real


class Renamed(ort.InferenceSession):
    """ONNX Runtime's own session on the CPU's device, which reports the plugin's name for it."""

    def get_providers(self) -> list[str]:
        return [PROVIDER, *super().get_providers()]


@pytest.fixture
def offered(script: Script, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """ONNX Runtime's real device of the CPU in the plugin's place; gives the settings that sessions were made with."""
    devices, given = state.get_ep_devices(), list[dict[str, str]]()
    add = state.SessionOptions.add_provider_for_devices

    class Options(ort.SessionOptions):
        def add_provider_for_devices(self, devices: Any, settings: Any) -> None:
            given.append(dict(settings))
            add(self, devices, settings)

    monkeypatch.setattr(ort, "SessionOptions", Options)
    monkeypatch.setattr(
        plugin_providers,
        "PLUGINS",
        {NAME: dataclasses.replace(plugin_providers.PLUGINS[NAME], provider="CPUExecutionProvider")},
    )
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(BUILD[1:]))
    monkeypatch.setattr(plugin_providers, "installed", lambda name: True)
    return given


def test_a_session_is_made_on_the_plugins_device_with_its_settings(offered: list[dict[str, str]], tmp_path: Path):
    model = models.two_inputs(tmp_path / "net.onnx")
    choice = select_providers((NAME, "cpu"), "cuda:0", options={f"{NAME}.nv_use_sync_gpu_allocator": "yes"})
    made = session.session_options(OnnxRuntimeOptions(), level="none")
    loaded = session.create_session(model, made, choice)
    assert made.has_providers() and offered == [{"nv_use_sync_gpu_allocator": "1"}]
    with pytest.raises(SetupError, match=f"`{NAME}` was asked for and does not run"):
        verify_active(loaded, choice, allow_fallback=False)


def test_an_engine_of_the_plugin_names_its_version_in_key_passport_and_facts(
    offered: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(ort, "InferenceSession", Renamed)
    engine = te.build(models.two_inputs(tmp_path / "net.onnx"), providers=(NAME, "cpu"), device="cuda:0")
    build, needs = engine.passport.build, engine.passport.requirements
    assert build.notes["provider_version"] == "0.5.0, TensorRT-RTX 1.7.1" and needs.providers == (NAME, "cpu")
    assert f"{PROVIDER}" in build.identity and "(0.5.0, TensorRT-RTX 1.7.1)" in build.identity
    assert all("tensorrt-rtx-provider" in item["nv_runtime_cache_path"] for item in offered)
    with te.load(engine) as runner:
        facts = runner.runtime_info
    assert facts["provider_version"] == "0.5.0, TensorRT-RTX 1.7.1" and facts["providers"].startswith(NAME)
    assert check_compatibility(engine, RuntimeConfig()).status == "loads"
    monkeypatch.setattr(plugin_providers, "versions", lambda name: "0.6.0, TensorRT-RTX 1.8.0")
    later = check_compatibility(engine, RuntimeConfig())
    assert later.status == "penalty" and "0.5.0, TensorRT-RTX 1.7.1, installed is 0.6.0" in later.reason
    gone = check_compatibility(engine, RuntimeConfig(), available=("CPUExecutionProvider",))
    assert gone.status == "refuse" and "onnxruntime-ep-nv-tensorrt-rtx-cu13" in gone.reason


# ------------------------------------------------------------------------------------------------ the package itself

CALLS = """
cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxGetCurrent cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxSetCurrent
cuDestroyExternalMemory cuDestroyExternalSemaphore cuExternalMemoryGetMappedBuffer cuGetErrorString cuImportExternalMemory
cuImportExternalSemaphore cuInit cuSignalExternalSemaphoresAsync cuStreamGetCtx cuWaitExternalSemaphoresAsync
""".split()
"""What release 0.5.0 takes of libcuda; the stand-in answers each with CUDA_ERROR_NO_DEVICE."""
ASK = """
from trt_engine.backends.onnxruntime import plugin_providers as plugin
print(plugin.unusable_reason("tensorrt-rtx"))
print(plugin.versions("tensorrt-rtx"))
"""


@pytest.mark.slow
def test_the_real_package_registers_with_a_driver_that_has_no_gpu_and_offers_no_device(tmp_path: Path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not plugin_providers.installed(NAME) or compiler is None:
        pytest.skip("NOT RUN: needs a C compiler and `pip install 'trt-engine[ort-rtx]'` (315 MB)")
    environment = os.environ | {"LD_LIBRARY_PATH": ""}

    def answer() -> list[str]:
        done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    if not Path("/dev/nvidiactl").exists():
        assert answer()[0].startswith(("libcuda.so.1: cannot open", "libnvidia-ml.so.1: cannot open"))
    functions = "".join(f"int {name}(void){{return 100;}}" for name in CALLS)
    nvml = "char*nvmlErrorString(int c){return 0;}int nvmlInit_v2(void){return 9;}int nvmlShutdown(void){return 9;}"
    nvml += "int nvmlSystemGetDriverVersion(char*t,unsigned n){return 9;}"
    for name, text in (("libcuda.so.1", functions), ("libnvidia-ml.so.1", nvml)):
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tmp_path / name), str(source)], check=True)
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    reason, versions = answer()
    assert "compute capability 8.6, 8.9, and from 12.0 on" in reason and ", TensorRT-RTX 1." in versions

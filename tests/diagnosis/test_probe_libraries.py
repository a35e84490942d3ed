"""What the probe says of a provider is what a user will see: with CUDA's libraries where pip puts them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from patience import HANG_S
from programs import run_python
from trt_engine.verbs.doctor import import_probe

PACKAGE = """
loaded = False
__version__ = "1.31.1"


def get_available_providers():
    return ["CUDAExecutionProvider"]


def preload_dlls():
    global loaded
    loaded = True
    print("what it says is nobody's answer")


class InferenceSession:
    def __init__(self, model, providers):
        self.providers = providers if loaded else ["CPUExecutionProvider"]

    def get_providers(self):
        return self.providers
"""


def test_a_provider_runs_whose_libraries_are_found_by_onnx_runtimes_own_search(tmp_path: Path) -> None:
    library = next(Path("/lib").glob("*/libm.so.6"), None) or next(Path("/usr/lib").glob("**/libm.so.6"))
    capi = tmp_path / "onnxruntime" / "capi"
    capi.mkdir(parents=True)
    (capi.parent / "__init__.py").write_text(PACKAGE)
    shutil.copy(library, capi / "libonnxruntime_providers_cuda.so")
    done = run_python(
        "-P", str(import_probe.__file__), "onnxruntime", env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=HANG_S
    )
    told = json.loads(done.stdout.strip().removeprefix(import_probe.RESULT_MARK))
    assert told["providers"] == {"CUDAExecutionProvider": {"runs": True, "reason": None}}


def test_a_plugin_provider_is_asked_in_its_package_for_what_it_lacks(tmp_path: Path, monkeypatch) -> None:
    name, module = next(iter(import_probe.PLUGINS.items()))
    (tmp_path / f"{module}.py").write_text("def get_library_path():\n    return '/x.so'\n")
    monkeypatch.syspath_prepend(tmp_path)
    refusals = ["Failed to load library /x.so with error: libcuda.so.1: cannot open shared object file", ""]

    def register(provider: str, path: str) -> None:
        if text := refusals.pop(0):
            raise RuntimeError(text)

    ort = SimpleNamespace(register_execution_provider_library=register, get_ep_devices=list)
    reason = "libcuda.so.1: cannot open shared object file"
    assert import_probe.plugin_status(ort, name, module) == {"runs": False, "reason": reason}
    assert "needs an RTX GPU" in import_probe.plugin_status(ort, name, module)["reason"]
    del sys.modules[module]

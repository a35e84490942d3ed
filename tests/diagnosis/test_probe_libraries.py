"""What the probe says of a provider is what a user will see: with CUDA's libraries where pip puts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from patience import HANG_S
from trt_engine.diagnosis import probe

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
    done = subprocess.run(
        [sys.executable, "-P", str(probe.__file__), "onnxruntime"], env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    told = json.loads(done.stdout.strip().removeprefix(probe.MARK))
    assert told["providers"] == {"CUDAExecutionProvider": {"runs": True, "reason": None}}

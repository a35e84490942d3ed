"""What the probe says of a provider is what a user will see: with CUDA's libraries where pip puts them;
what a library links is read from its file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patience import HANG_S
from programs import run_python
from tensorrt_machines import elf_bytes, write
from trt_engine.verbs.doctor import import_probe
from trt_engine.verbs.doctor.tensorrt_checks import needed_libraries

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


NAMES = ("libnvinfer.so.10", "libcudart.so.12", "libc.so.6")


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_names_come_in_the_files_order(tmp_path: Path, order: str) -> None:
    assert needed_libraries(write(tmp_path, "some.so", elf_bytes(*NAMES, order=order))) == NAMES
    assert needed_libraries(write(tmp_path, "none.so", elf_bytes(order=order))) == ()


def test_a_real_library_is_read_as_readelf_reads_it(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed here")

    def linked(name: str, *more: str) -> Path:
        command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-x", "c", "-", "-o", str(tmp_path / name), *more]
        subprocess.run([*command, f"-Wl,-soname,{name}"], input="int answer;", text=True, check=True)
        return tmp_path / name

    first, second = linked("libnvinfer.so.10"), linked("libcudart.so.12")
    provider = linked("provider.so", "-Wl,--no-as-needed", "-x", "none", str(first), str(second))
    assert needed_libraries(provider) == ("libnvinfer.so.10", "libcudart.so.12")


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x01" + bytes(200), b"MZ" + bytes(200), bytes(4096)])
def test_what_is_no_64_bit_library_links_nothing(tmp_path: Path, content: bytes) -> None:
    assert needed_libraries(write(tmp_path, "some.so", content)) == ()
    assert needed_libraries(tmp_path / "missing.so") == needed_libraries(tmp_path) == ()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 400), raw=st.binary(min_size=1, max_size=16))
def test_a_damaged_library_breaks_nothing(tmp_path: Path, at: int, raw: bytes) -> None:
    whole = bytearray(elf_bytes(*NAMES))
    whole[at : at + len(raw)] = raw
    assert isinstance(needed_libraries(write(tmp_path, "some.so", bytes(whole))), tuple)

"""What a library links is read from its file, and a damaged file links nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorrt_machines import elf_bytes, write
from trt_engine.verbs.doctor.tensorrt_checks import needed_libraries

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

"""What TensorRT a machine has is found by its files, in the order a process would meet them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from programs import run_python
from tensorrt_machines import H100, debian, library, loader_cache, package, trtexec, wheels, write
from trt_engine.trt.installation import cached_libraries, detect_installation
from trt_engine.trt.versions import Version


def test_an_empty_machine_has_nothing(tmp_path: Path) -> None:
    found = detect_installation(tmp_path, environ={}, known_gpus=())
    assert (
        not found.is_present
        and found.python_version is None
        and found.conflicting_libraries == ()
        and found.driver is None
    )


def test_pips_wheels_are_found_with_all_four_parts(tmp_path: Path) -> None:
    site = wheels(tmp_path / "site", "10.16.1.11")
    for name in ("tensorrt-llm", "torch-tensorrt", "tensorrt-model-optimizer"):
        package(site, name, "1.2.3")
    found = detect_installation(tmp_path, packages=[site], environ={}, known_gpus=(H100,))
    assert [item.name for item in found.packages] == ["tensorrt-cu13-bindings", "tensorrt-cu13-libs"]
    assert str(found.python_version) == "10.16.1.11" and found.cuda_major == 13
    below = found.library()
    assert below is not None and str(below.version) == "10.16.1.11" and below.origin == "pip"
    assert found.driver == H100.driver


def test_the_version_is_that_of_the_library_under_the_bindings(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package(site, "tensorrt-cu12-bindings", "10.3.0")
    library(tmp_path, "opt/other/lib", "10.16.1")
    found = detect_installation(tmp_path, packages=[site], environ={"LD_LIBRARY_PATH": "/opt/other/lib"}, known_gpus=())
    assert found.bindings is not None and str(found.bindings.version) == "10.3.0"
    assert str(found.python_version) == "10.16.1"
    assert found.cuda_major == 12


def test_debians_packages_say_the_build_number_and_bring_trtexec(tmp_path: Path) -> None:
    library(tmp_path, "usr/lib/x86_64-linux-gnu", "10.16.1")
    debian(tmp_path, "10.16.1.11-1+cuda13.0", "libnvinfer10", "libnvinfer-bin", "bash")
    program = trtexec(tmp_path, "101601", 11)
    found = detect_installation(tmp_path, environ={"PATH": ""}, known_gpus=())
    assert [item.name for item in found.debian] == ["libnvinfer10", "libnvinfer-bin"]
    assert [str(item.version) for item in found.libraries] == ["10.16.1.11"]
    assert found.package_bin is not None and str(found.package_bin.version) == "10.16.1.11"
    assert (found.trtexec, str(found.trtexec_version)) == (program, "10.16.1.11")


def test_trtexec_on_the_path_wins_and_one_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    trtexec(tmp_path, "101601")
    first = trtexec(tmp_path, "trtexec: error while loading shared libraries: libnvinfer.so.11", folder="own")
    found = detect_installation(tmp_path, environ={"PATH": str(first.parent)}, known_gpus=())
    assert found.trtexec == first and found.trtexec_version is None
    assert found.trtexec_message is not None and "libnvinfer.so.11" in found.trtexec_message
    unasked = detect_installation(tmp_path, environ={"PATH": ""}, known_gpus=(), probe_trtexec=False)
    assert unasked.trtexec is not None and unasked.trtexec_version is None


def test_two_tensorrts_of_one_major_on_one_loader_path_are_seen_and_the_winner_comes_first(tmp_path: Path) -> None:
    library(tmp_path, "usr/lib/x86_64-linux-gnu", "10.3.0")
    library(tmp_path, "opt/tensorrt/lib", "10.16.1")
    library(tmp_path, "opt/old/lib", "8.6.1")
    both = detect_installation(tmp_path, environ={"LD_LIBRARY_PATH": "/opt/old/lib:/opt/tensorrt/lib"}, known_gpus=())
    assert [str(item.version) for item in both.conflicting_libraries] == ["10.16.1", "10.3.0"]
    one = detect_installation(tmp_path, environ={"LD_LIBRARY_PATH": "/opt/old/lib"}, known_gpus=())
    assert one.conflicting_libraries == ()  # 8 and 10 have different sonames


def test_the_loaders_cache_and_its_configuration_are_read(tmp_path: Path) -> None:
    library(tmp_path, "opt/cached", "10.16.1")
    library(tmp_path, "opt/listed", "10.13.2")
    loader_cache(tmp_path, "/opt/cached/libnvinfer.so.10", "/opt/gone/libnvinfer.so.8", "/usr/lib/libc.so.6")
    write(tmp_path, "etc/ld.so.conf", "include /\ninclude a**b\ninclude\ninclude /etc/ld.so.conf.d/*.conf\n")
    write(tmp_path, "etc/ld.so.conf.d/a.conf", "# TensorRT\n/opt/listed\n")
    found = detect_installation(tmp_path, environ={}, known_gpus=())
    assert [(str(item.version), item.origin) for item in found.libraries] == [
        ("10.16.1", "ld.so.cache"),
        ("10.13.2", "ld.so.cache"),
    ]


@given(st.binary(max_size=200))
def test_a_broken_loader_cache_lists_nothing_and_breaks_nothing(raw: bytes) -> None:
    mark = b"glibc-ld.so.cache1.1"
    assert mark in raw or cached_libraries(raw) == []
    # what names a path lists nothing but what lies in the bytes, and no more entries than they have room for
    found = cached_libraries(mark + raw)
    assert len(found) <= len(raw) // 24
    assert all(path.encode(errors="replace") in mark + raw for path in found if "\ufffd" not in path)


def test_lean_runtimes_are_listed_by_version(tmp_path: Path) -> None:
    library(tmp_path, "opt/lean", "10.3.0", "nvinfer_lean")
    found = detect_installation(tmp_path, environ={"LD_LIBRARY_PATH": "/opt/lean"}, known_gpus=())
    assert [str(item.version) for item in found.lean] == ["10.3.0"]
    assert found.python_version is None


def test_a_container_with_many_things_of_its_own_is_not_confused(tmp_path: Path) -> None:
    write(tmp_path, "var/lib/dpkg/status", b"\xff\xfe Package: libnvinfer10\n\n:::\n")
    write(tmp_path, "usr/lib/x86_64-linux-gnu/libnvinfer.so", "no version")
    write(tmp_path, "usr/lib/x86_64-linux-gnu/libnvinferx.so.10", "not ours")
    (tmp_path / "usr/lib/x86_64-linux-gnu/libnvinfer.so.9").symlink_to("gone")
    found = detect_installation(tmp_path, environ={"LD_LIBRARY_PATH": "::/none:"}, known_gpus=())
    assert found.libraries == () and found.debian == ()


def test_looking_imports_nothing_of_tensorrt() -> None:
    script = (
        "import sys; from trt_engine.trt.installation import detect_installation; detect_installation();"
        "import trt_engine.trt.compatibility, trt_engine.trt.versions;"
        "print(sorted({'tensorrt', 'onnx', 'onnxruntime', 'torch'} & set(sys.modules)))"
    )
    done = run_python("-c", script, check=True)
    assert done.stdout.strip() == "[]"


def test_the_line_for_pip_keeps_the_cuda_that_is_here_and_never_leaves_two(tmp_path: Path) -> None:
    wanted = Version((10, 16, 1, 11))
    site = wheels(tmp_path / "site", "10.3.0.26", 12)
    package(site, "tensorrt-lean-cu12-bindings", "10.3.0.26")
    here = detect_installation(tmp_path, packages=[site], environ={}, known_gpus=(H100,))
    assert here.pip_command(wanted) == 'pip install "tensorrt-cu12==10.16.1.*"'
    assert here.pip_command(wanted, "--force-reinstall") == 'pip install --force-reinstall "tensorrt-cu12==10.16.1.*"'
    swap = "pip uninstall -y tensorrt-cu12-bindings tensorrt-cu12-libs && pip install"
    assert here.pip_install_command('"tensorrt-cu13>=10.13.2"') == f'{swap} "tensorrt-cu13>=10.13.2"'
    assert here.pip_command(Version((8, 6, 1))) == f'{swap} "tensorrt==8.6.1"'
    old = replace(H100, driver="550.54.15")
    other = detect_installation(
        tmp_path, packages=[wheels(tmp_path / "new", "10.16.1.11", 13)], environ={}, known_gpus=(old,)
    )
    assert other.pip_command(wanted).endswith('&& pip install "tensorrt-cu12==10.16.1.*"')
    assert (
        detect_installation(tmp_path, environ={}, known_gpus=(H100,)).pip_command(wanted)
        == 'pip install "tensorrt-cu13==10.16.1.*"'
    )

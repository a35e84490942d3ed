"""The environments and the pages about them name what exists: versions, extras, files, verbs and options."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from patience import HANG_S
from tensorrt_machines import write
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.cli.verbs_table import VERBS, command_module
from trt_engine.trt.rtx_settings import RtxSettings
from trt_engine.trt.settings import PlanSettings
from trt_engine.trt.versions import Version, cuda_majors, min_driver_branch, supports

ROOT = Path(__file__).parents[1]
HERE = ROOT / "environments"
PIXI = tomllib.loads((HERE / "pixi.toml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
DOCKERFILES = sorted(HERE.glob("Dockerfile.*"))
PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("backends", "deployment", "doctor", "inspect", "troubleshooting")),
    HERE / "README.md",
]
GPUS = {"h100": (9, 0), "h200": (9, 0), "rtx5090": (12, 0), "l4": (8, 9), "a10": (8, 6), "v100": (7, 0)}
PIN = re.compile(r"tensorrt-cu(\d+)==([\d.]+)")


def pinned(text: str) -> tuple[int, Version]:
    """The one CUDA major and TensorRT that a file or task pins."""
    ((cuda, version),) = set(PIN.findall(text))
    parsed = Version.parse(version)
    assert parsed is not None
    return int(cuda), parsed


# ------------------------------------------------------------------------------------------------ pixi


def test_every_environment_has_a_feature_of_its_gpu_with_a_task_that_sets_tensorrt_up() -> None:
    assert set(PIXI["environments"]) == set(PIXI["feature"]) == {*GPUS, "rtx"}
    assert all(features == [name] for name, features in PIXI["environments"].items())
    assert all(set(PIXI["feature"][name]["tasks"]) == {"setup-tensorrt"} for name in GPUS)


def test_tensorrt_rtx_of_pixi_is_that_of_the_image_and_of_the_extra() -> None:
    ((name, pin),) = PIXI["feature"]["rtx"]["pypi-dependencies"].items()
    assert f'"{name}{pin}"' in (HERE / "Dockerfile.tensorrt-rtx").read_text()
    (allowed,) = map(Requirement, PROJECT["optional-dependencies"]["rtx"])
    assert allowed.name == name and allowed.specifier.contains(pin.removeprefix("=="))


@pytest.mark.parametrize("name", GPUS)
def test_the_pinned_tensorrt_runs_on_that_gpu_with_that_cuda(name: str) -> None:
    feature = PIXI["feature"][name]
    cuda, version = pinned(feature["tasks"]["setup-tensorrt"])
    assert supports(version, GPUS[name]) is True
    assert cuda in cuda_majors(version) and min_driver_branch(version, cuda)
    assert int(feature["system-requirements"]["cuda"].split(".")[0]) == cuda


def test_pixi_names_files_extras_and_a_python_that_exist() -> None:
    own = PIXI["pypi-dependencies"]["trt-engine"]
    assert (HERE / own["path"] / "pyproject.toml").is_file() and set(own["extras"]) <= EXTRAS
    assert PIXI["dependencies"]["python"] == f"{PROJECT['requires-python'].removeprefix('>=')}.*"
    for script in PIXI["activation"]["scripts"]:
        assert (HERE / script).is_file()
    tasks = [*PIXI["tasks"].values(), *(task for item in PIXI["feature"].values() for task in item["tasks"].values())]
    for words in map(shlex.split, tasks):
        assert (words[0] == "trt-engine" and words[1] in VERBS) or (words[0] == "sh" and (HERE / words[1]).is_file())


# ------------------------------------------------------------------------------------------------ the scripts


def programs(folder: Path, installed: str = "", after_pip: str = "", site: str = "/none") -> Path:
    """A `python` that says which TensorRT it has, and has another once pip was run; nothing else on the path."""
    write(folder, "version", installed)
    script = f"""#!/bin/sh
case "$*" in
    "-m pip install "*) echo "$4" >> {folder}/installed; printf '%s' '{after_pip}' > {folder}/version ;;
    *sysconfig*) echo '{site}' ;;
    *) [ -s {folder}/version ] && cat {folder}/version || exit 1 ;;
esac
"""
    write(folder, "bin/python", script, 0o755)
    for name in ("sed", "cat"):
        (folder / "bin" / name).symlink_to(
            next(Path(place, name) for place in ("/usr/bin", "/bin") if Path(place, name).exists())
        )
    return folder / "bin"


def run_setup(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": str(folder / "bin"), "TENSORRT_HOME": str(folder / "tensorrt")}
    command = ["/bin/sh", str(HERE / "setup-tensorrt.sh"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S)


WANTED = "tensorrt-cu13==11.4.0.106"


def test_setup_installs_the_pin_and_proves_it_by_importing_it(tmp_path: Path) -> None:
    programs(tmp_path, after_pip="11.4.0.106")
    done = run_setup(tmp_path, WANTED)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "installed").read_text().split() == [WANTED]
    assert "bindings: none" in done.stdout and "TensorRT 11.4.0.106 is installed" in done.stdout


@pytest.mark.parametrize("version", ["11.4.0.106", "11.4.0"])
def test_setup_leaves_a_tensorrt_of_that_release_alone(tmp_path: Path, version: str) -> None:
    programs(tmp_path, installed=version)
    done = run_setup(tmp_path, WANTED)
    assert done.returncode == 0 and f"bindings: {version}" in done.stdout and "is here already" in done.stdout
    assert not (tmp_path / "installed").exists()


@pytest.mark.parametrize("after", ["", "10.11.0.33", "11.4.0.10"])
def test_setup_ends_with_three_where_another_tensorrt_or_none_is_imported(tmp_path: Path, after: str) -> None:
    programs(tmp_path, after_pip=after)
    done = run_setup(tmp_path, WANTED)
    assert done.returncode == 3
    assert (
        f"finds {after or 'nothing'}, expected 11.4.0.106" in done.stderr and "hint: `trt-engine doctor`" in done.stderr
    )


def test_the_inventory_names_trtexec_by_its_absolute_path_and_changes_nothing(tmp_path: Path) -> None:
    programs(tmp_path, installed="10.11.0.33")
    assert "trtexec: none" in run_setup(tmp_path, "--list").stdout
    program = write(tmp_path, "tensorrt/bin/trtexec", "#!/bin/sh\n", 0o755)
    done = run_setup(tmp_path, "--list")
    assert done.returncode == 0 and f"trtexec: {program}" in done.stdout and "bindings: 10.11.0.33" in done.stdout
    assert not (tmp_path / "installed").exists()
    assert run_setup(tmp_path).returncode == 2


def test_activation_puts_the_wheels_libraries_first_and_trtexec_on_the_path(tmp_path: Path) -> None:
    write(tmp_path, "site/tensorrt_libs/libnvinfer.so.11", "")
    write(tmp_path, "tensorrt/bin/trtexec", "#!/bin/sh\n", 0o755)
    folder = programs(tmp_path, site=str(tmp_path / "site"))

    def activated(library_path: str) -> list[str]:
        script = f'set -eu; . "{HERE}/activate-tensorrt.sh"; echo "$LD_LIBRARY_PATH"; echo "$PATH"'
        environ = {"PATH": str(folder), "TENSORRT_HOME": str(tmp_path / "tensorrt"), "LD_LIBRARY_PATH": library_path}
        done = subprocess.run(["/bin/sh", "-c", script], env=environ, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert activated("/opt/old") == [f"{tmp_path}/site/tensorrt_libs:/opt/old", f"{folder}:{tmp_path}/tensorrt/bin"]
    assert activated("")[0] == f"{tmp_path}/site/tensorrt_libs"


# ------------------------------------------------------------------------------------------------ containers


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_pinned_copies_what_is_there_and_proves_what_it_made(path: Path) -> None:
    text = path.read_text()
    base = re.search(r"^ARG BASE=(\S+)$", text, re.M)
    assert base and re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base[1]), "an image with a tag"
    for line in re.findall(r"^COPY (.+)$", text, re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)
    for extras in re.findall(r'"\.\[([\w,]+)\]"', text):
        assert set(extras.split(",")) <= EXTRAS
    assert re.search(r"import (tensorrt|grpc)", text)
    assert 'ENTRYPOINT ["trt-engine"]' in text
    assert re.search(r'^CMD \["(\w+)"', text, re.M)[1] in VERBS  # type: ignore[index]


@pytest.mark.parametrize("major", [10, 11])
def test_there_is_a_container_of_each_tensorrt_major(major: int) -> None:
    text = (HERE / f"Dockerfile.tensorrt{major}").read_text()
    cuda, version = pinned(text)
    assert version.major == major and cuda in cuda_majors(version)
    assert re.search(rf"/cuda:{cuda}\.", text), "the image's CUDA is the wheel's"
    assert f"driver {min_driver_branch(version, cuda)} or newer" in text


# ------------------------------------------------------------------------------------------------ documents


def spelled(page: Path) -> list[str]:
    """The command lines of trt-engine on a page: those of its blocks, and those in backquotes."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    found = [re.sub(r"^(docker|pixi) run .*?\btrt-engine(:\S+)? ", "trt-engine ", line) for line in [*lines, *spans]]
    return [line for line in found if re.match(r"trt-engine [a-z]", line)]


def options_of(verb: str) -> set[str]:
    command = import_module(command_module(verb)).command
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    params = [item for one in commands for item in one.params if isinstance(item, click.Option)]
    return {name for item in params for name in (*item.opts, *item.secondary_opts)} | {"--help", "-h"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_a_verb_with_options_it_has(page: Path) -> None:
    lines = spelled(page)
    assert lines
    for line in lines:
        words = re.split(r"[\s\[\]=|]+", line.split(" # ")[0].split("&&")[0])
        assert words[1] in VERBS, line
        known = options_of(words[1])
        for word in words[2:]:
            if re.match(r"--?[a-zA-Z]", word):
                assert word.rstrip(",;.") in known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_on_a_page_is_one_of_a_backend(page: Path) -> None:
    known = {item.name for kind in (PlanSettings, RtxSettings, OnnxRuntimeOptions) for item in fields(kind)}
    for name in re.findall(r"-O ([a-z_]+)=", page.read_text()):
        assert name in known or name == "name", name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_extra_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
        assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:docs|environments|examples|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / target).exists(), target
    for extras in re.findall(r"trt-engine\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= EXTRAS


def test_every_setting_of_a_plan_is_on_the_page_of_trtexec() -> None:
    page = (ROOT / "docs" / "trtexec.md").read_text()
    table = page.partition("## Settings")[2].partition("\n## ")[0]
    for item in fields(PlanSettings):
        assert re.search(rf"`{item.name}[`=]", table), item.name


@pytest.mark.slow
def test_every_command_in_a_hint_is_a_verb_with_options_it_has() -> None:
    """Of every text in the package's code: what an error tells to type can be typed."""
    found = 0
    for path in sorted((ROOT / "src").rglob("*.py")):
        for text in literals(path):
            spans = re.findall(r"`(trt-engine [a-z][^`\n]*)`", text)
            assert all(re.split(r"[^a-z-]", line.removeprefix("trt-engine "))[0] in VERBS for line in spans), spans
            bare = re.findall(r"^ *(trt-engine [a-z][^`\n]*)", text, re.MULTILINE)
            for line in [*spans, *bare]:
                words = re.split(r"[\s\[\]=|]+", line)
                if words[1] not in VERBS:  # a sentence
                    continue
                known = options_of(words[1])
                for word in words[2:]:
                    if re.match(r"--?[a-zA-Z]", word):
                        found += 1
                        assert word.rstrip(",;.") in known, f"{path.name}: {line}"
    assert found > 20


def literals(path: Path) -> list[str]:
    """The texts of a module, with `{}` where an f-string has a value."""
    tree, inner = ast.parse(path.read_text()), set[int]()
    texts: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            texts.append(node.value)
    return texts


def test_every_line_doctor_can_print_of_tensorrt_is_in_its_page() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    for source in ("run.py", "tensorrt_checks.py"):
        text = (ROOT / "src/trt_engine/verbs/doctor" / source).read_text()
        for name in re.findall(r'Diagnosis\(\s*f?"([a-z0-9-]+)', text):
            assert f"`{name.rstrip('-')}" in page, name


def test_no_file_here_names_an_address() -> None:
    for path in filter(Path.is_file, HERE.iterdir()):
        assert "://" not in path.read_text(), path
        assert os.access(path, os.R_OK)

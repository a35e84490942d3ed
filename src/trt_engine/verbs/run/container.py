"""Runs a plan in a container: builds the command line, records image digest and library versions.

Nothing is pulled or installed: a missing image, or one without trt-engine, is an error with a hint. Paths are the same
inside, so a run started outside can be resumed inside.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import ensure_folder, replace_surrogates
from trt_engine.backend import get_backend
from trt_engine.config.settings import to_argv
from trt_engine.errors import Interrupted, SetupError, UsageError
from trt_engine.format import library_reason
from trt_engine.records.sweep import CellSpec, RunSummary
from trt_engine.store import Store
from trt_engine.verbs.run.cells import PATH_SETTINGS, is_path
from trt_engine.verbs.run.config import RunConfig
from trt_engine.verbs.run.plan_file import PROFILE_MODES, ContainerEntry, ParsedPlan
from trt_engine.verbs.run.sweep_folder import SweepFolder
from trt_engine.workers.process import extend_shutdown

log = logging.getLogger(__name__)

ENGINES = ("docker", "podman")
_COMMAND_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S, _CLIENT_TIMEOUT_S = 60.0, 10.0
"""Seconds for the run to end after Ctrl-C, and for the client to exit after its container."""
_EXECUTABLE = "trt-engine"


@dataclass(frozen=True, slots=True)
class ContainerRun:
    """A run to start in a container."""

    command: tuple[str, ...]
    """The complete command line."""
    facts: dict[str, str]
    """Image, digest, container engine and library versions."""


def prepare(
    plan: ParsedPlan, specs: Sequence[CellSpec], folder: Path, image: str, config: RunConfig, *, dry_run: bool = False
) -> ContainerRun:
    """Find the container engine and the image, query the versions in the image, and build the command line.

    `SetupError` if the engine, its permission, the image, the GPU toolkit or trt-engine in the image is missing. A dry run
    starts no process.
    """
    entry = plan.container if plan.container is not None else ContainerEntry(image=image)
    if entry.image != image:
        entry = replace(entry, image=image)
    if image.startswith("-") or re.search(r"\s", image) or not image:
        raise UsageError(
            f"`{replace_surrogates(image)}` is not an image name",
            hint="as `--container nvcr.io/nvidia/pytorch:25.06-py3`",
        )
    program = _find_engine(entry.engine)
    gpus = entry.gpus or ("all" if any(map(_uses_gpu, specs)) else "none")
    facts = {"engine": Path(program).name, "image": image}
    if not dry_run:
        facts |= _image_facts(program, image)
        facts |= _installed_versions(program, image, gpus)
    words = ["run", str(plan.path.absolute()), "-o", str(folder.absolute()), "--container-facts", json.dumps(facts)]
    words += to_argv(replace(config, in_container=None))
    words += ["-q"] if log.getEffectiveLevel() > logging.INFO else []
    profiled = gpus != "none" and any(PROFILE_MODES & set(spec.modes) for spec in specs)
    made = command_line(
        program,
        entry,
        gpus=gpus,
        profiled=profiled,
        read=_read_folders(plan, specs),
        write=[Path(os.path.normpath(path.absolute())) for path in (folder, Store().folder)],
        argv=words,
    )
    return ContainerRun(tuple(made), facts)


def command_line(
    program: str,
    entry: ContainerEntry,
    *,
    gpus: str,
    profiled: bool,
    read: Sequence[Path],
    write: Sequence[Path],
    argv: Sequence[str],
) -> list[str]:
    """`docker run ...` followed by the arguments of `trt-engine`."""
    podman = Path(program).name.startswith("podman")
    made = [program, "run", "--rm", "--init", f"--network={entry.network}"]
    made += _gpu_arguments(program, gpus)
    if profiled:  # the driver may restrict GPU performance counters to administrators
        made += ["--cap-add=SYS_ADMIN"]
    made += ["--userns=keep-id"] if podman else []
    made += ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp"]
    made += ["--env", f"TRT_ENGINE_STORE={Store().folder.absolute()}"]
    for path in read:
        made += ["--mount", _mount(path, readonly=True)]
    for path in write:  # after read-only mounts, which may contain them
        made += ["--mount", _mount(path, readonly=False)]
    made += ["--workdir", str(write[0]), "--entrypoint", _EXECUTABLE, *entry.arguments, entry.image, *argv]
    return made


def _gpu_arguments(program: str, gpus: str) -> list[str]:
    if gpus == "none":
        return []
    return ["--device", f"nvidia.com/gpu={gpus}"] if Path(program).name.startswith("podman") else ["--gpus", gpus]


def _mount(path: Path, *, readonly: bool) -> str:
    """A bind mount at the same path; paths with commas or quotes are quoted as CSV."""
    line = io.StringIO()
    fields = ["type=bind", f"source={path}", f"target={path}", *(["readonly"] if readonly else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _read_folders(plan: ParsedPlan, specs: Sequence[CellSpec]) -> list[Path]:
    """Folders of all files named in the plan and of their link targets, without nested folders."""
    base = plan.folder.absolute()
    named = [plan.path.absolute(), *(base / spec.source for spec in specs)]
    for spec in specs:
        named += [base / str(value) for one in PATH_SETTINGS if is_path(value := spec.settings.get(one))]
    folders = set()
    for path in named:
        for place in (path, Path(os.path.realpath(path))):
            folder = place if place.is_dir() else place.parent
            if folder.is_dir():
                folders.add(Path(os.path.normpath(folder)))
    return sorted(folder for folder in folders if not any(other in folder.parents for other in folders))


# ------------------------------------------------------------------------------------------------ container engine


def _uses_gpu(spec: CellSpec) -> bool:
    """Whether the cell needs a GPU in the container; cross-building for another GPU does not."""
    builds_elsewhere = get_backend(spec.backend).provides("resolve_gpus") and {*spec.modes} <= {"build"}
    return spec.device.startswith("cuda") and not builds_elsewhere


def _find_engine(engine: str | None) -> str:
    for name in (engine,) if engine else ENGINES:
        if found := shutil.which(name):
            return found
    raise SetupError(
        f"no container engine found: {' and '.join(f'`{name}`' for name in ((engine,) if engine else ENGINES))} "
        f"{'is' if engine else 'are'} not on PATH",
        hint="install Docker with the NVIDIA Container Toolkit, or run without `--container`",
    )


def _run_command(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [program, *words], capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"`{shlex.join([Path(program).name, *words[:2]])}` did not answer within {_COMMAND_TIMEOUT_S:g} s",
            hint=f"check its service with `{Path(program).name} info`",
        ) from error
    except OSError as error:
        raise SetupError(f"`{program}` cannot be started: {error}", hint="`docker info` must work first") from error


def _image_facts(program: str, image: str) -> dict[str, str]:
    """Version of the container engine and digest of the image."""
    version = _run_command(program, "version", "--format", "{{.Client.Version}}")
    if version.returncode:
        raise _translate_error(version.stderr, program, image)
    found = _run_command(program, "image", "inspect", image)
    if found.returncode:
        raise _translate_error(found.stderr, program, image)
    try:
        stated: dict[str, Any] = json.loads(found.stdout)[0]
        digests = stated.get("RepoDigests") or []
        facts = {
            "image_id": str(stated["Id"]),
            "digest": str(digests[0]).rpartition("@")[2] if digests else str(stated["Id"]),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(
            f"cannot parse the output of `{Path(program).name} image inspect {image}`",
            hint=f"check the output of `{Path(program).name} image inspect {shlex.quote(image)}`",
        ) from error
    return {"engine": f"{Path(program).name} {version.stdout.strip()}", **facts}


def _installed_versions(program: str, image: str, gpus: str) -> dict[str, str]:
    """Library versions in the image, from its `doctor`."""
    words = ["run", "--rm", f"--network={ContainerEntry(image=image).network}", *_gpu_arguments(program, gpus)]
    asked = _run_command(program, *words, "--entrypoint", _EXECUTABLE, image, "doctor", "--json", "-q")
    try:
        stated = json.loads(asked.stdout)
        environment = stated["environment"]
        facts = {"trt-engine": str(stated["tool"]["version"]), "python": str(environment["python"])}
        facts |= {str(name): str(version) for name, version in environment.get("libraries", {}).items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _translate_error(asked.stderr, program, image) from None
    facts |= {one: str(environment[one]) for one in ("driver", "gpu") if environment.get(one)}
    return facts


def _translate_error(stderr: str, program: str, image: str) -> SetupError:
    """The error for the stderr of a container engine."""
    name = Path(program).name
    known: tuple[tuple[str, str, str], ...] = (
        (
            r"permission denied.*(docker|podman).*sock|permission denied while trying to connect",
            f"permission denied on the socket of `{name}`",
            "`sudo usermod -aG docker $USER`, then log in again (`newgrp docker` for this shell)",
        ),
        (
            r"cannot connect to the docker daemon|is the docker daemon running|unable to connect to podman",
            f"the service of `{name}` is not running",
            "`sudo systemctl start docker`",
        ),
        (
            r"could not select device driver|unknown or invalid runtime name: nvidia|nvidia-container-cli|"
            r"unresolvable CDI devices|nvidia\.com/gpu",
            "the container engine has no access to GPUs: the NVIDIA Container Toolkit is missing or cannot reach the driver",
            "`sudo apt install nvidia-container-toolkit`, `sudo nvidia-ctk runtime configure --runtime=docker`, "
            "`sudo systemctl restart docker` (podman: `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`)",
        ),
        (
            r"no such image|no such object|image not known|unable to find image|manifest unknown|pull access denied",
            f"the image `{image}` is not available locally",
            f"`{name} pull {shlex.quote(image)}`",
        ),
        (
            r"executable file .*not found|exec: \"?trt-engine|no such file or directory.*trt-engine|"
            r"trt-engine.*no such file",
            f"the image `{image}` has no `{_EXECUTABLE}`",
            f"build one that has it: `printf 'FROM {image}\\nRUN pip install trt-engine\\n' | "
            f"{name} build -t with-trt-engine -`, then `--container with-trt-engine`",
        ),
    )  # fmt: skip
    for pattern, found, hint in known:
        if re.search(pattern, stderr, re.IGNORECASE | re.DOTALL):
            return SetupError(found, hint=hint)
    last = next((line for line in reversed(stderr.strip().splitlines()) if line.strip()), "no output")
    return SetupError(
        f"cannot run `doctor` in the image `{image}`: {replace_surrogates(library_reason(last))}",
        hint=f"`{name} run --rm --entrypoint {_EXECUTABLE} {shlex.quote(image)} doctor` shows more",
    )


# ------------------------------------------------------------------------------------------------ the run


def run_container(container_run: ContainerRun, specs: Sequence[CellSpec], run_folder: SweepFolder) -> RunSummary:
    """Start the container, wait for it, and summarize the run folder.

    Its output goes to stderr. Ctrl-C is forwarded, and finished cells are kept.
    """
    ensure_folder(run_folder.folder)
    ensure_folder(Store().folder, by="TRT_ENGINE_STORE")
    log.info("%s", shlex.join(container_run.command))
    before = {label: result.started for label, result in run_folder.read_results().items() if result.state == "done"}
    with tempfile.TemporaryDirectory(prefix="trt-engine-") as place:
        program, verb, *words = container_run.command
        named = Path(place) / "id"
        # in a new session, so that Ctrl-C is forwarded once
        process = subprocess.Popen(
            [program, verb, f"--cidfile={named}", *words], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _stop(process, program, named)
            code = Interrupted.exit_code
    results = run_folder.read_results()
    manifest = run_folder.read_manifest()
    if manifest is None or manifest.container != container_run.facts:
        if code == Interrupted.exit_code:
            raise Interrupted("interrupted before the run started", hint="run the same command again")
        raise SetupError(
            f"the container exited with code {code} and wrote no run",
            hint=f"see its output above; the command was `{shlex.join(container_run.command)}`",
        )
    reused = sum(before.get(label) == one.started for label, one in results.items() if one.state == "done")
    summary = run_folder.summarize(manifest, specs, results, reused=reused)
    if code == Interrupted.exit_code:
        raise Interrupted("interrupted", hint="the same command resumes the run", partial=summary)
    return summary


def _stop(process: subprocess.Popen[bytes], program: str, id_file: Path) -> None:
    """Forward the interrupt and wait; a second one kills the container."""
    extend_shutdown(_STOP_TIMEOUT_S + _CLIENT_TIMEOUT_S)
    try:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=_STOP_TIMEOUT_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        container = id_file.read_text().strip() if id_file.exists() else ""
        if container:
            try:
                answer = _run_command(program, "kill", container)
                why = answer.stderr.strip() if answer.returncode else ""
            except SetupError as error:
                why = error.message
            if why:
                log.warning("the container `%s` may still be running: %s", container, replace_surrogates(why))
        try:
            process.wait(timeout=_CLIENT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

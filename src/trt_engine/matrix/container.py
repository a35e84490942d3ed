"""The same run inside a container image, started from outside: its command line, its image by digest, its tools' versions.

Nothing is pulled and nothing is installed: an image that is not there, or has no trt-engine in it, is an error that says
what to type. Every path keeps its name inside, so that a run may be begun outside and gone on with inside.
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

from trt_engine.cells import CellSpec, RunSummary
from trt_engine.errors import Interrupted, SetupError, UsageError
from trt_engine.files import ensure_folder, printable
from trt_engine.matrix.cells import PLACES, is_place
from trt_engine.matrix.plan import PROFILED, ContainerEntry, Plan
from trt_engine.matrix.tree import Tree
from trt_engine.store import Store

__all__ = ["ENGINES", "Inside", "carry_out", "command_line", "prepare"]

log = logging.getLogger(__name__)

ENGINES = ("docker", "podman")
_ASK_S = 120.0
_LEAVES_S, _FOLLOWS_S = 60.0, 10.0
"""For the run inside to end after Ctrl-C, and for the client after its container."""
_TOOL = "trt-engine"


@dataclass(frozen=True, slots=True)
class Inside:
    """A run that is to be started in a container."""

    command: tuple[str, ...]
    """The whole command line."""
    facts: dict[str, str]
    """Image, digest, engine and the versions inside, for the record."""


def prepare(
    plan: Plan,
    specs: Sequence[CellSpec],
    folder: Path,
    image: str,
    *,
    only: Sequence[str] = (),
    modes: Sequence[str] = (),
    fail_fast: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> Inside:
    """Find the container engine and the image, ask the image for its tools, and put the command line together.

    `SetupError` with what to type when the engine, its permission, the image, the GPU toolkit or trt-engine inside is
    missing. A dry run asks nobody and starts nothing.
    """
    entry = plan.container if plan.container is not None else ContainerEntry(image=image)
    if entry.image != image:
        entry = replace(entry, image=image)
    if image.startswith("-") or re.search(r"\s", image) or not image:
        raise UsageError(
            f"`{printable(image)}` is no name of an image", hint="as `--container nvcr.io/nvidia/pytorch:25.06-py3`"
        )
    program = _program(entry.engine)
    gpus = entry.gpus or ("all" if any(spec.device.startswith("cuda") for spec in specs) else "none")
    facts = {"engine": Path(program).name, "image": image}
    if not dry_run:
        facts |= _asked(program, image)
        facts |= _inside(program, image, gpus)
    words = ["run", str(plan.path.absolute()), "-o", str(folder.absolute()), "--container-facts", json.dumps(facts)]
    words += [word for glob in only for word in ("--only", glob)]
    words += ["--modes", ",".join(modes)] if modes else []
    words += ["--fail-fast"] if fail_fast else []
    words += ["--force"] if force else []
    words += ["-q"] if log.getEffectiveLevel() > logging.INFO else []
    profiled = gpus != "none" and any(PROFILED & set(spec.modes) for spec in specs)
    made = command_line(
        program,
        entry,
        gpus=gpus,
        profiled=profiled,
        read=_read_folders(plan, specs),
        write=_written(folder),
        words=words,
    )
    return Inside(tuple(made), facts)


def command_line(
    program: str,
    entry: ContainerEntry,
    *,
    gpus: str,
    profiled: bool,
    read: Sequence[Path],
    write: Sequence[Path],
    words: Sequence[str],
) -> list[str]:
    """`docker run ...` with the words of `trt-engine` at its end."""
    podman = Path(program).name.startswith("podman")
    made = [program, "run", "--rm", "--init", f"--network={entry.network}"]
    if gpus != "none":
        made += ["--device", f"nvidia.com/gpu={gpus}"] if podman else ["--gpus", gpus]
    if profiled:  # GPU performance counters are for administrators where the driver says so
        made += ["--cap-add=SYS_ADMIN"]
    made += ["--userns=keep-id"] if podman else []
    made += ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp"]
    made += ["--env", f"TRT_ENGINE_STORE={Store().folder.absolute()}"]
    for path in read:
        made += ["--mount", _mount(path, readonly=True)]
    for path in write:  # after those that are read: one of these may lie in one of them
        made += ["--mount", _mount(path, readonly=False)]
    made += ["--workdir", str(write[0]), "--entrypoint", _TOOL, *entry.arguments, entry.image, *words]
    return made


def _mount(path: Path, *, readonly: bool) -> str:
    """A bind mount under its own name; names with commas or quotes are quoted as CSV is."""
    line = io.StringIO()
    fields = ["type=bind", f"source={path}", f"target={path}", *(["readonly"] if readonly else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _read_folders(plan: Plan, specs: Sequence[CellSpec]) -> list[Path]:
    """The folders everything lies in that the plan names, none inside another; where links lead, too."""
    base = plan.folder.absolute()
    named = [plan.path.absolute(), *(base / spec.source for spec in specs)]
    for spec in specs:
        named += [base / str(value) for one in PLACES if is_place(value := spec.settings.get(one))]
    folders = set()
    for path in named:
        for place in (path, Path(os.path.realpath(path))):
            folder = place if place.is_dir() else place.parent
            if folder.is_dir():
                folders.add(Path(os.path.normpath(folder)))
    return sorted(folder for folder in folders if not any(other in folder.parents for other in folders))


def _written(folder: Path) -> list[Path]:
    return [Path(os.path.normpath(folder.absolute())), Path(os.path.normpath(Store().folder.absolute()))]


# ------------------------------------------------------------------------------------------------ who is there


def _program(asked: str | None) -> str:
    for name in (asked,) if asked else ENGINES:
        if found := shutil.which(name):
            return found
    raise SetupError(
        f"no container engine is here: {' and '.join(f'`{name}`' for name in ((asked,) if asked else ENGINES))} "
        f"{'is' if asked else 'are'} not on PATH",
        hint="install Docker with the NVIDIA Container Toolkit, or run without `--container`",
    )


def _ask(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [program, *words], capture_output=True, text=True, errors="replace", timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"`{shlex.join([Path(program).name, *words[:2]])}` did not answer within {_ASK_S:g} s",
            hint=f"is its service well? `{Path(program).name} info`",
        ) from error
    except OSError as error:
        raise SetupError(f"`{program}` cannot be started: {error}", hint="`docker info` must work first") from error


def _asked(program: str, image: str) -> dict[str, str]:
    """The engine's version and the image's digest."""
    version = _ask(program, "version", "--format", "{{.Client.Version}}")
    if version.returncode:
        raise _explained(version.stderr, program, image)
    found = _ask(program, "image", "inspect", image)
    if found.returncode:
        raise _explained(found.stderr, program, image)
    try:
        told: dict[str, Any] = json.loads(found.stdout)[0]
        digests = told.get("RepoDigests") or []
        facts = {
            "image_id": str(told["Id"]),
            "digest": str(digests[0]).rpartition("@")[2] if digests else str(told["Id"]),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(
            f"`{Path(program).name} image inspect {image}` said what is no description of an image",
            hint=f"type it, and see what it says: `{Path(program).name} image inspect {shlex.quote(image)}`",
        ) from error
    return {"engine": f"{Path(program).name} {version.stdout.strip()}", **facts}


def _inside(program: str, image: str, gpus: str) -> dict[str, str]:
    """What the image's own `doctor` says of the versions in it."""
    entry = ContainerEntry(image=image)
    words = ["run", "--rm", f"--network={entry.network}"]
    if gpus != "none":
        podman = Path(program).name.startswith("podman")
        words += ["--device", f"nvidia.com/gpu={gpus}"] if podman else ["--gpus", gpus]
    asked = _ask(program, *words, "--entrypoint", _TOOL, image, "doctor", "--json", "-q")
    try:
        told = json.loads(asked.stdout)
        environment = told["environment"]
        facts = {"trt-engine": str(told["tool"]["version"]), "python": str(environment["python"])}
        facts |= {str(name): str(version) for name, version in environment.get("libraries", {}).items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _explained(asked.stderr, program, image) from None
    facts |= {one: str(environment[one]) for one in ("driver", "gpu") if environment.get(one)}
    return facts


def _explained(said: str, program: str, image: str) -> SetupError:
    """The error behind what a container engine printed."""
    name = Path(program).name
    known: tuple[tuple[str, str, str], ...] = (
        (
            r"permission denied.*(docker|podman).*sock|permission denied while trying to connect",
            f"`{name}` may not be used: permission denied on its socket",
            "`sudo usermod -aG docker $USER`, then log in again (`newgrp docker` for this shell)",
        ),
        (
            r"cannot connect to the docker daemon|is the docker daemon running|unable to connect to podman",
            f"the service of `{name}` does not run",
            "`sudo systemctl start docker`",
        ),
        (
            r"could not select device driver|unknown or invalid runtime name: nvidia|nvidia-container-cli|"
            r"unresolvable CDI devices|nvidia\.com/gpu",
            "the container engine cannot give GPUs to a container: the NVIDIA Container Toolkit is missing, or cannot reach "
            "the driver",
            "`sudo apt install nvidia-container-toolkit`, `sudo nvidia-ctk runtime configure --runtime=docker`, "
            "`sudo systemctl restart docker` (podman: `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`)",
        ),
        (
            r"no such image|no such object|image not known|unable to find image|manifest unknown|pull access denied",
            f"the image `{image}` is not here",
            f"`{name} pull {shlex.quote(image)}`",
        ),
        (
            r"executable file .*not found|exec: \"?trt-engine|no such file or directory.*trt-engine|"
            r"trt-engine.*no such file",
            f"there is no `{_TOOL}` in the image `{image}`",
            f"build one that has it: `printf 'FROM {image}\\nRUN pip install trt-engine\\n' | "
            f"{name} build -t with-trt-engine -`, then `--container with-trt-engine`",
        ),
    )  # fmt: skip
    for pattern, found, hint in known:
        if re.search(pattern, said, re.IGNORECASE | re.DOTALL):
            return SetupError(found, hint=hint)
    last = next((line for line in reversed(said.strip().splitlines()) if line.strip()), "it said nothing")
    return SetupError(
        f"the image `{image}` could not be asked: {printable(last.strip()[:300])}",
        hint=f"`{name} run --rm --entrypoint {_TOOL} {shlex.quote(image)} doctor` shows more",
    )


# ------------------------------------------------------------------------------------------------ the run


def carry_out(inside: Inside, specs: Sequence[CellSpec], tree: Tree) -> RunSummary:
    """Start the container and wait for it; the summary of what it left in the folder.

    Its words go to our stderr. Ctrl-C goes on to it, and it ends as a run does: what is done is kept.
    """
    ensure_folder(tree.folder)
    ensure_folder(Store().folder, by="TRT_ENGINE_STORE")
    log.info("%s", shlex.join(inside.command))
    before = {label: result.started for label, result in tree.results().items() if result.state == "done"}
    with tempfile.TemporaryDirectory(prefix="trt-engine-") as place:
        program, verb, *words = inside.command
        named = Path(place) / "id"
        # a session of its own: Ctrl-C in a terminal comes here, and goes on once
        process = subprocess.Popen(
            [program, verb, f"--cidfile={named}", *words], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _end(process, program, named)
            code = Interrupted.exit_code
    results = tree.results()
    manifest = tree.manifest()
    if manifest is None or manifest.container != inside.facts:
        if code == Interrupted.exit_code:
            raise Interrupted("interrupted before the container had begun", hint="the same command begins again")
        raise SetupError(
            f"the container ended with exit code {code} and left no run",
            hint=f"what it said stands above; the command was `{shlex.join(inside.command)}`",
        )
    reused = sum(before.get(label) == one.started for label, one in results.items() if one.state == "done")
    summary = tree.summary(manifest, specs, results, reused=reused)
    if code == Interrupted.exit_code:
        raise Interrupted("interrupted", hint="the same command goes on", partial=summary)
    return summary


def _end(process: subprocess.Popen[bytes], program: str, named: Path) -> None:
    """Pass the interruption on, and wait: a second one ends the container at once, and not its client alone."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=_LEAVES_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        container = named.read_text().strip() if named.exists() else ""
        if container:
            try:
                answer = _ask(program, "kill", container)
                why = answer.stderr.strip() if answer.returncode else ""
            except SetupError as error:
                why = error.message
            if why:
                log.warning("the container `%s` may go on: %s", container, printable(why))
        try:
            process.wait(timeout=_FOLLOWS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

"""`te.deploy`: the configuration of a serving system for engines, as one folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.atomic_io import all_or_nothing, as_list, as_path, move_into_place, os_errors, staging_folder
from trt_engine.config.settings import from_values, replace_values
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.errors import UsageError
from trt_engine.public_function import public_function
from trt_engine.records.deploy import DeployReport, DeployTarget
from trt_engine.tensors import suggest
from trt_engine.verbs.deploy.config import DeepstreamConfig, RayConfig, TritonConfig
from trt_engine.verbs.deploy.job import DeployJob
from trt_engine.verbs.deploy.targets import TARGETS, Target
from trt_engine.verbs.load import open_engine
from trt_engine.verbs.serve.run import name_engines

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import DeploySettings


@public_function
def deploy(
    target: DeployTarget,
    engines: Engine | Path | str | Sequence[Engine | Path | str],
    out: Path | str,
    *,
    config: TritonConfig | DeepstreamConfig | RayConfig | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    **settings: Unpack[DeploySettings],
) -> DeployReport:
    """Write what `target` needs to run these engines into the folder `out`; the files and the decisions in them.

    An engine is named after its file (`digits.engine.onnx` is `digits`), or `NAME=PATH`. `settings` are those of the
    target's class. The folder appears when it is complete; in a folder that exists, each of its new entries does. Raises
    `UsageError` for an unknown target or setting, and where an entry exists and `overwrite` is not given; `EngineError` for
    a file that is not an engine or was changed.
    """
    if not isinstance(target, str) or target not in TARGETS:
        raise UsageError(f"unknown target `{target}`", hint=suggest(str(target), [*TARGETS]))
    chosen = TARGETS[target]
    made = _settings(target, chosen, config, settings)
    given = as_list(engines, "`engines`")
    sources = name_engines(given)
    if not sources:
        raise UsageError("no engine is given", hint=f"`trt-engine deploy {target} model.engine -o DIR`")
    if chosen.max_sources is not None and len(sources) > chosen.max_sources:
        raise UsageError(f"{len(sources)} engines are given, `{target}` takes {chosen.max_sources}", hint="one by one")
    opened = {}
    for name, path in sources.items():
        if not (chosen.takes_models and is_onnx_model(path)):
            opened[name] = open_engine(path)
            opened[name].verify()
    goal = as_path(out, "`out`")
    if os.path.lexists(goal) and not goal.is_dir():
        raise UsageError(f"`{goal}` is not a folder", hint="name another one, as `-o models`")
    with contextlib.nullcontext() if dry_run else _staging(goal) as staging:
        job = DeployJob(sources, opened, made, goal, staging)
        written = chosen.load_writer()(job)
        for entry in sorted({name.partition("/")[0] for name in job.files}):
            if not overwrite and os.path.lexists(goal / entry):
                raise UsageError(f"`{goal / entry}` exists", hint="`--overwrite` replaces it, or name another folder")
        if staging is not None:
            _install(staging, goal)
    return DeployReport(
        target=target,
        folder=str(goal),
        models=written.models,
        files=dict(sorted(job.files.items())),
        next_command=written.next_command,
        notes=written.notes,
        preprocessing=written.preprocessing,
        dry_run=dry_run,
    )


def _settings(target: str, chosen: Target, config: Any, settings: Any) -> Any:
    if config is None:
        return from_values(chosen.config, settings)
    if not isinstance(config, chosen.config):
        raise UsageError(
            f"`config` is a {type(config).__name__}, `{target}` takes {chosen.config.__name__}",
            hint=f"`config=te.{chosen.config.__name__}(...)`",
        )
    return replace_values(config, settings)


@contextlib.contextmanager
def _staging(goal: Path) -> Iterator[Path]:
    """A hidden folder on the disk of the goal: inside it where it exists, which may be a mount, else beside it."""
    with staging_folder(goal / "deploy" if goal.is_dir() else goal.absolute()) as folder:
        content = folder / "content"
        content.mkdir()
        yield content


@all_or_nothing()
def _install(staging: Path, goal: Path) -> None:
    """Move what is staged to the goal, at once where the goal is new, else entry by entry."""
    with os_errors(goal):
        if not os.path.lexists(goal):
            staging.chmod(0o755)
            move_into_place(staging, goal)
            return
        for entry in sorted(staging.iterdir()):
            move_into_place(entry, goal / entry.name)

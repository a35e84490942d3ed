"""`trt-engine deploy TARGET ENGINE... -o DIR`: one command for each target of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.errors import UsageError
from trt_engine.verbs.deploy.targets import TARGETS, Target


@click.group(short_help="Configurations of Triton, DeepStream and other systems for engines.")
def command() -> None:
    """Configurations of serving systems for engines: checked, and sized by what was measured."""


def _add_command(name: str, target: Target) -> None:
    what = "ENGINE|MODEL" if target.takes_models else "ENGINE"
    metavar = f"[NAME=]{what}" + ("" if target.max_sources == 1 else "...")

    @options.verb(name, group=command, dry_run=True, short_help=target.short_help, help=target.help)
    @click.argument("sources", metavar=metavar, nargs=-1, required=True)
    @options.config_options(target.config)
    @options.out_option("The folder to write.", hint="name a folder, as `-o models`")
    @options.overwrite_option
    def run(sources: tuple[str, ...], out: Path | None, overwrite: bool, dry_run: bool, **values: Any) -> Any:
        if out is None:
            raise UsageError("no output folder is given", hint=f"`trt-engine deploy {name} {sources[0]} -o DIR`")
        config = options.config_from(target.config, values)

        from trt_engine.verbs.deploy.run import deploy

        return deploy(name, sources, out, config=config, overwrite=overwrite, dry_run=dry_run)  # type: ignore[arg-type]


for _name, _target in TARGETS.items():
    _add_command(_name, _target)

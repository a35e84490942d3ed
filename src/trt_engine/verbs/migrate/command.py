"""`trt-engine migrate PATH...`: what TensorRT 10 and 11 removed, in scripts, sources and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.errors import ModelError
from trt_engine.verbs.migrate.config import MigrateConfig

if TYPE_CHECKING:
    from trt_engine.records.migrate import MigrateReport


@options.verb()
@click.argument("paths", metavar="PATH...", type=options.FILE, nargs=-1, required=True)
@options.config_options(MigrateConfig)
@click.option(
    "--fail-on",
    type=click.Choice(("error", "warning")),
    help="Exit with 4 for findings of this severity or worse [default: never].",
)
def command(paths: tuple[Path, ...], fail_on: str | None, **values: Any) -> None:
    """Find what the target release of TensorRT removed, renamed or gave another meaning in files and folders.

    Python, notebooks, C++ and CUDA (extra `migrate`); trtexec and polygraphy in shell, Dockerfiles, Makefiles and YAML;
    DeepStream and Triton configurations; requirements, images and CMake. A comment `trt-engine: ignore[RULE]` turns a
    finding off. Findings fail only with --fail-on.

    \b
      trt-engine migrate .
      trt-engine migrate deploy/ --from 10.3 --to 11.4 --diff
      trt-engine migrate deploy/ --fix --fail-on error --sarif migrate.sarif
    """
    config: MigrateConfig = options.config_from(MigrateConfig, values)

    from trt_engine.verbs.migrate.run import migrate

    report = migrate(paths, config=config)
    warnings = [f"`{item.file}` was not checked: {item.reason}" for item in report.files_skipped]
    print_result(report, warnings=warnings)
    _gate(report, fail_on)


def _gate(report: MigrateReport, fail_on: str | None) -> None:
    bad = [item for item in report.findings if item.severity == "error" or fail_on == "warning"]
    if fail_on is not None and bad:
        first = bad[0]
        raise ModelError(
            f"{len(bad)} {'finding' if len(bad) == 1 else 'findings'} of `--fail-on {fail_on}` in "
            f"{len({item.file for item in bad})} files, the first in `{first.file}` line {first.line}: `{first.text}`",
            hint="`--diff` shows what `--fix` changes" if any(item.fixable for item in bad) else first.replacement,
        )

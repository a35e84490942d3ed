"""`trt-engine pack`: one archive of a run, readable with the core package alone."""

from __future__ import annotations

from pathlib import Path

import click

from trt_engine.command_line import options, output


@options.verb(dry_run=True)
@click.argument("folder", metavar="RUN", type=options.FILE)
@options.out_option(
    "The archive: .tar.gz, .tgz or .zip; or a folder for it [default: beside RUN].",
    hint="name a file, as `-o run.tar.gz`",
)
@click.option("--no-raw", is_flag=True, help="Omit raw profiles and timelines.")
@click.option("--engines", is_flag=True, help="Include engines and models.")
@options.overwrite_option
def command(folder: Path, out: Path | None, no_raw: bool, engines: bool, dry_run: bool, overwrite: bool) -> None:
    """Pack a run into one archive: records, reports, raw profiles, digests.

    RUN is a run folder. `report` and `inspect` read the archive like the folder, without any backend.
    """
    from trt_engine.reporting.pack import default_archive, is_own_archive, pack_run
    from trt_engine.reporting.report import check_own_file

    usual = default_archive(folder)
    target = usual if out is None else out / usual.name if out.is_dir() or options.out_is_folder() else out
    check_own_file(target, is_own_archive, overwrite=overwrite)
    made = pack_run(folder, target, raw=not no_raw, engines=engines, dry_run=dry_run)
    doc = output.document("pack", made, warnings=made.warnings)
    output.emit(doc | {"dry_run": dry_run}, output.result_text(made))

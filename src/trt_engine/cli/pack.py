"""`trt-engine pack`: one archive of a run that a colleague reads with the core package alone."""

from __future__ import annotations

from pathlib import Path

import click

from trt_engine.cli import options, output
from trt_engine.cli.output import Talk
from trt_engine.errors import UsageError
from trt_engine.figures import size

__all__ = ["command"]

_SHOWN = 6


@click.command("pack")
@options.common
@click.argument("folder", metavar="RUN", type=options.FILE)
@options.out_option(
    "The archive: .tar.gz, .tgz or .zip; or a folder for it [beside RUN].", instead="name a file, as `-o run.tar.gz`"
)
@click.option("--no-raw", is_flag=True, help="Leave raw profiles and timelines out.")
@click.option("--engines", is_flag=True, help="Add the engines and models.")
@options.dry_run_option
@options.yes_option
def command(talk: Talk, folder: Path, out: Path | None, no_raw: bool, engines: bool, dry_run: bool, yes: bool) -> None:
    """One archive of a run: records, reports, raw profiles, digests.

    RUN is a run's folder. `report` and `inspect` read the archive as they read the folder, without any backend.
    """
    from trt_engine.reporting.pack import default_target, is_ours, pack_run

    usual = default_target(folder)
    target = usual if out is None else out / usual.name if out.is_dir() or options.out_is_folder() else out
    if target.exists() and not yes and not is_ours(target):
        raise UsageError(
            f"`{target}` is there and is no archive of ours", hint="another name with `-o`, or `--yes` to overwrite it"
        )
    made = pack_run(folder, target, raw=not no_raw, engines=engines, dry_run=dry_run)
    total = sum(item.nbytes for item in made.files)
    lines = [
        f"{'would pack' if dry_run else 'packed'} {len(made.files)} files ({size(total)}) of {folder} into {target}"
        + (f" ({size(made.nbytes)})" if made.nbytes is not None else "")
    ]
    reasons: dict[str, list[str]] = {}
    for item in made.left_out:
        reasons.setdefault(item.reason, []).append(item.path)
    for reason, paths in reasons.items():
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        lines.append(f"left out, {reason}: {', '.join(paths[:_SHOWN])}{more}")
    if made.redacted:
        lines.append(f"names of home folders became `~` in {len(made.redacted)} files")
    if not dry_run:
        lines += [f"digest: {made.digest}", f"read it with `trt-engine report {target}`"]
    doc = output.document("pack", made, command=options.spelled_command(), warnings=made.warnings)
    output.emit(talk, doc | {"dry_run": dry_run}, "\n".join(lines))

"""`trt-engine report`: text, markdown or HTML from the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, output
from trt_engine.cli.output import Talk
from trt_engine.errors import UsageError
from trt_engine.figures import size

if TYPE_CHECKING:
    from trt_engine.reporting.run import Run

__all__ = ["command"]

_SUFFIXES = {".txt": "text", ".log": "text", ".md": "md", ".html": "html", ".htm": "html", ".json": "json"}
_NAMES = {"text": "report.txt", "md": "report.md", "html": "report.html", "json": "report.json"}


@click.command("report")
@options.common
@click.argument("folder", metavar="RUN", type=options.FILE)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "md", "html", "json"]),
    help="What to write [by the suffix of -o, else text].",
)
@options.out_option(
    "Write to this file, or into this folder, instead of stdout.", instead="leave `-o` out: it goes to stdout"
)
@options.dry_run_option
@options.yes_option
def command(talk: Talk, folder: Path, form: str | None, out: Path | None, dry_run: bool, yes: bool) -> None:
    """Text, markdown or one HTML page from the records of a run.

    RUN is the folder that `size`, `bench`, `run`, `profile` or `compare` wrote with `-o`, or an archive of it that `pack`
    made. The page needs no network and can be sent on as it is.
    """
    from trt_engine.files import end_of_links, write_whole
    from trt_engine.reporting.run import Run
    from trt_engine.reporting.write import is_ours

    run = Run.open(folder)
    form = form or (_SUFFIXES.get(out.suffix.lower()) if out else None) or ("json" if talk.json and not out else "text")
    if out is None:
        if form == "json":
            output.emit(Talk(json=True), _document(run, {}), "")
        elif talk.json:
            raise UsageError(f"`--json` and `--format {form}` both want stdout", hint=f"add `-o {_NAMES[form]}`")
        else:
            output.emit(talk, {}, _made(run, form, run.folder, {}).rstrip("\n"))
        return
    target = end_of_links(out / _NAMES[form] if out.is_dir() or options.out_is_folder() else out)
    if target.exists() and not yes and not is_ours(target):
        raise UsageError(
            f"`{target}` is there and is no report of ours", hint="another name with `-o`, or `--yes` to overwrite it"
        )
    artifacts = {"report": str(target)}
    made = _made(run, form, target.parent, artifacts)  # a dry run meets every error but those of the disk
    if not dry_run:
        write_whole(target, made)
    verb = "would write" if dry_run else "wrote"
    output.emit(talk, _document(run, artifacts) | {"dry_run": dry_run}, f"{verb} {target} ({size(len(made.encode()))})")


def _made(run: Run, form: str, base: Path, artifacts: dict[str, str]) -> str:
    from trt_engine.reporting.write import render

    if form == "json":
        import msgspec

        return msgspec.json.format(msgspec.json.encode(_document(run, artifacts)), indent=2).decode() + "\n"
    return render(run, form, base)  # type: ignore[arg-type]


def _document(run: Run, artifacts: dict[str, str]) -> dict[str, Any]:
    from trt_engine.reporting.write import summary

    body = {"run": str(run.files.place if run.files else run.folder), "summary": summary(run), "artifacts": artifacts}
    return output.document("report", body, command=options.spelled_command(), warnings=[*run.skipped, *run.warnings])

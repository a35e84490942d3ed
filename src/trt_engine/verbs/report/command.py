"""`trt-engine report`: text, markdown or HTML from the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options, output
from trt_engine.command_line.output import as_json
from trt_engine.errors import UsageError
from trt_engine.escapes import join_lines
from trt_engine.format import format_bytes

if TYPE_CHECKING:
    from trt_engine.reporting.run_records import RunRecords

_SUFFIXES = {".txt": "text", ".log": "text", ".md": "md", ".html": "html", ".htm": "html", ".json": "json"}
_NAMES = {"text": "report.txt", "md": "report.md", "html": "report.html", "json": "report.json"}


@options.verb(dry_run=True)
@click.argument("folder", metavar="RUN", type=options.FILE)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["text", "md", "html", "json"]),
    help="What to write [default: by the suffix of -o, else text].",
)
@options.out_option(
    "Write to this file, or into this folder, instead of stdout.", hint="leave out `-o` to print to stdout"
)
@options.overwrite_option
def command(folder: Path, format_name: str | None, out: Path | None, dry_run: bool, overwrite: bool) -> None:
    """Render the records of a run as text, markdown or one HTML page.

    RUN is the output folder of `size`, `bench`, `run`, `profile` or `compare`, or its archive by `pack`. The page is
    self-contained.
    """
    from trt_engine.atomic_io import resolve_link, write_atomic
    from trt_engine.reporting.report import check_own_file, is_own_report
    from trt_engine.reporting.run_records import RunRecords

    run = RunRecords.open(folder)
    format_name = (
        format_name
        or (_SUFFIXES.get(out.suffix.lower()) if out else None)
        or ("json" if as_json() and not out else "text")
    )
    if out is None:
        if format_name == "json":
            output.emit(_document(run, {}), "", json=True)
        elif as_json():
            raise UsageError(
                f"`--json` and `--format {format_name}` both use stdout", hint=f"add `-o {_NAMES[format_name]}`"
            )
        else:
            output.emit({}, _render(run, format_name, run.folder, {}).rstrip("\n"))
        return
    target = resolve_link(out / _NAMES[format_name] if out.is_dir() or options.out_is_folder() else out)
    check_own_file(target, is_own_report, overwrite=overwrite)
    artifacts = {"report": str(target)}
    made = _render(run, format_name, target.parent, artifacts)  # a dry run finds all errors but those of the disk
    if not dry_run:
        write_atomic(target, made)
    verb = "would write" if dry_run else "wrote"
    output.emit(
        _document(run, artifacts) | {"dry_run": dry_run},
        join_lines([f"{verb} {target} ({format_bytes(len(made.encode()))})"]),
    )


def _render(run: RunRecords, form: str, base: Path, artifacts: dict[str, str]) -> str:
    from trt_engine.reporting.report import render

    if form == "json":
        import msgspec

        return msgspec.json.format(msgspec.json.encode(_document(run, artifacts)), indent=2).decode() + "\n"
    return render(run, form, base)  # type: ignore[arg-type]


def _document(run: RunRecords, artifacts: dict[str, str]) -> dict[str, Any]:
    from trt_engine.reporting.page import page_warnings
    from trt_engine.reporting.report import summarize_run

    body = {
        "run": str(run.files.path if run.files else run.folder),
        "summary": summarize_run(run),
        "artifacts": artifacts,
    }
    return output.document("report", body, warnings=page_warnings(run))

"""`trt-engine docs [NAME]`: the documentation pages in the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from trt_engine.command_line import options
from trt_engine.command_line.output import document, emit

if TYPE_CHECKING:
    from trt_engine.doc_pages import DocPage

_NEXT = "`trt-engine docs NAME` prints one"


def _complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from trt_engine.doc_pages import list_pages

    return [CompletionItem(item.name, help=item.title) for item in list_pages() if item.name.startswith(incomplete)]


@options.verb()
@click.argument("name", required=False, metavar="[NAME]", shell_complete=_complete_names)
def command(name: str | None) -> None:
    """Print the page NAME (markdown, or a JSON schema), or list the pages.

    \b
      trt-engine docs
      trt-engine docs vision
      trt-engine docs schemas/size.json
    """
    from trt_engine.verbs.docs.run import docs

    shown = docs(name)
    text = shown[0].text.rstrip("\n") if name is not None else _list_text(shown)
    body = {
        "pages": [{"name": item.name, "title": item.title, "path": item.path and str(item.path)} for item in shown],
        "text": None if name is None else text,
    }
    emit(document("docs", body), text)


def _list_text(shown: Sequence[DocPage]) -> str:
    rows = [item for item in shown if not item.name.startswith("schemas/")]
    widest = max(len(item.name) for item in rows)
    lines = [f"{item.name:<{widest}}  {item.title}" for item in rows]
    return "\n".join([*lines, "schemas/VERB.json: the JSON Schema of what a verb prints with --json", "", _NEXT])

"""Render a report in GitHub markdown, readable as text too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trt_engine.reporting import document

MARK = "<!-- made by trt-engine report -->"


def render(contents: document.ReportDocument) -> str:
    """Render the report as markdown; text from records is escaped."""
    lines = [
        MARK,
        "",
        f"# {_escape_text(contents.title)}",
        "",
        f"**{_escape_text(contents.device)}**  ",
        _escape_text(contents.subtitle),
        "",
    ]
    lines += [
        f"- **{_escape_text(f.label)}: {_escape_text(f.value)}** ({_escape_text(f.note)})" for f in contents.figures
    ]
    lines.append("")
    for notice in contents.notices:
        lines += [_render_notice(notice), ""]
    if contents.claim:
        lines += [_escape_text(contents.claim), ""]
    for section in contents.sections:
        lines += [f"## {_escape_text(section.title)}", ""]
        for block in section.blocks:
            lines += _render_block(block)
    return "\n".join([*lines, "---", "", _escape_text(contents.footer)]) + "\n"


def _render_block(block: document.Block) -> Iterator[str]:
    if isinstance(block, document.Paragraph):
        yield from (_escape_text(block.text), "")
    elif isinstance(block, document.Notice):
        yield from (_render_notice(block), "")
    elif isinstance(block, document.Facts):
        yield from ("| | |", "|---|---|")
        yield from (f"| {_escape_text(name)} | {_escape_text(value)} |" for name, value in block.rows)
        yield ""
    elif isinstance(block, document.Links):
        for name, path, link in block.rows:
            yield f"- {_escape_text(name)}: " + (f"[{_escape_text(path)}](<{link}>)" if link else _escape_text(path))
        yield ""
    elif isinstance(block, document.Commands):
        longest = max((len(run) for line in block.lines for run in re.findall("`+", line)), default=0)
        fence = "`" * max(3, longest + 1)
        yield from (f"{fence}console", *block.lines, fence, "")
    elif isinstance(block, document.Table):
        yield from (_escape_text(block.caption) + ":", "")
        yield "| " + " | ".join(_escape_text(title) for title in block.columns) + " |"
        yield "|" + "|".join(":--" if index in block.left else "--:" for index in range(len(block.columns))) + "|"
        for number, row in enumerate(block.rows):
            cells = [_escape_text(cell) for cell in row]
            if number in block.marked:
                cells = [f"**{cell}**" if cell else "" for cell in cells]
            yield "| " + " | ".join(cells) + " |"
        yield ""


def _render_notice(notice: document.Notice) -> str:
    return f"> {'**Note:** ' if notice.kind == 'warning' else ''}{_escape_text(notice.text)}"


# `_`, `.` and `-` inside a word mean nothing to GitHub's markdown and stay readable
_SPECIAL_CHARACTERS = re.compile(r"([\\`*\[\]|#~]|(?<!\w)_|_(?!\w)|^[-+>](?=\s)|^\d+(?=[.)]\s))")


def _escape_text(text: str) -> str:
    """Escape markup and HTML, keeping backtick spans."""
    parts = _CODE_SPAN.split(text)
    return "".join(f"`{part}`" if index % 2 else _escape_markup(part) for index, part in enumerate(parts))


_CODE_SPAN = re.compile(r"`([^`<>&|\\]+)`")
"""Code spans that are valid anywhere, including table cells."""


def _escape_markup(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL_CHARACTERS.sub(lambda found: "\\" + found[0], text)

"""A report in GitHub's markdown, which reads as text too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trt_engine.reporting.contents import (
    Block,
    Commands,
    Contents,
    Facts,
    Links,
    Notice,
    Paragraph,
    Table,
)

__all__ = ["MARK", "render"]

MARK = "<!-- made by trt-engine report -->"


def render(contents: Contents) -> str:
    """The report as markdown; what comes from records cannot turn into markup."""
    lines = [
        MARK,
        "",
        f"# {_plain(contents.title)}",
        "",
        f"**{_plain(contents.device)}**  ",
        _plain(contents.subtitle),
        "",
    ]
    lines += [f"- **{_plain(f.label)}: {_plain(f.value)}** ({_plain(f.note)})" for f in contents.figures]
    lines.append("")
    for notice in contents.notices:
        lines += [_notice(notice), ""]
    if contents.claim:
        lines += [_plain(contents.claim), ""]
    for section in contents.sections:
        lines += [f"## {_plain(section.title)}", ""]
        for block in section.blocks:
            lines += _block(block)
    return "\n".join([*lines, "---", "", _plain(contents.footer)]) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield from (_plain(block.text), "")
    elif isinstance(block, Notice):
        yield from (_notice(block), "")
    elif isinstance(block, Facts):
        yield from ("| | |", "|---|---|")
        yield from (f"| {_plain(name)} | {_plain(value)} |" for name, value in block.rows)
        yield ""
    elif isinstance(block, Links):
        for name, path, link in block.rows:
            yield f"- {_plain(name)}: " + (f"[{_plain(path)}](<{link}>)" if link else _plain(path))
        yield ""
    elif isinstance(block, Commands):
        longest = max((len(run) for line in block.lines for run in re.findall("`+", line)), default=0)
        fence = "`" * max(3, longest + 1)
        yield from (f"{fence}console", *block.lines, fence, "")
    elif isinstance(block, Table):
        yield from (_plain(block.caption) + ":", "")
        yield "| " + " | ".join(_plain(title) for title in block.columns) + " |"
        yield "|" + "|".join(":--" if index in block.left else "--:" for index in range(len(block.columns))) + "|"
        for number, row in enumerate(block.rows):
            cells = [_plain(cell) for cell in row]
            if number in block.marked:
                cells = [f"**{cell}**" if cell else "" for cell in cells]
            yield "| " + " | ".join(cells) + " |"
        yield ""


def _notice(notice: Notice) -> str:
    return f"> {'**Note:** ' if notice.kind == 'warning' else ''}{_plain(notice.text)}"


# `_`, `.` and `-` inside a word mean nothing to GitHub's markdown and stay readable
_SPECIAL = re.compile(r"([\\`*\[\]|#~]|(?<!\w)_|_(?!\w)|^[-+>](?=\s)|^\d+(?=[.)]\s))")


def _plain(text: str) -> str:
    """Text that stays text: markup characters escaped, HTML as entities, code kept where we wrote it."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda found: "\\" + found[0], text)

"""Words that this project does not use: `tools/words.txt` against docstrings, comments, messages and docs.

    python tools/words.py [--limit N]

lists every use with its place and the word to use instead; the exit code is 1 when there are more than N (default: 0).
Text in backticks, code blocks of pages and string constants without a blank (names, keys) do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", type=int, default=0)
    limit = parser.parse_args().limit
    found = list(findings(HERE.parents[1]))
    if len(found) > limit:
        lines = [*found, f"{len(found)} words of tools/words.txt, {limit} allowed"]
        sys.stdout.write("\n".join(lines) + "\n")
    return int(len(found) > limit)


def findings(root: Path) -> Iterator[str]:
    """`path:line: word (use ...)` for each use in the checkout at `root`."""
    rows = [
        line.split("\t") for line in HERE.with_name("words.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    better = dict(rows)
    pattern = re.compile(rf"\b({'|'.join(sorted(better, key=len, reverse=True))})\b", re.IGNORECASE)
    for path in sorted([*(root / "src").rglob("*.py"), *root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        text = path.read_text()
        for line, prose in _python(text) if path.suffix == ".py" else _markdown(text):
            for match in pattern.finditer(re.sub(r"`[^`\n]*`", "``", prose)):
                number = line + prose.count("\n", 0, match.start())
                word = next(word for word in better if re.fullmatch(word, match[0], re.IGNORECASE))
                yield f"{path.relative_to(root)}:{number}: `{match[0]}` ({better[word]})"


def _python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


if __name__ == "__main__":
    sys.exit(main())

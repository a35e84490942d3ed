"""What the tree weighs: lines, statements, long functions and modules, repeated blocks, probed members.

    python tools/counts.py [TREE ...]

prints one column for each tree (a checkout of this repository; default: this one).

- Source lines are all lines of `src/**/*.py`; statements are `ast.stmt` nodes.
- Parameters are counted without `self` and `cls`; the length of a function is from its `def` to its last line.
- A repeated block is six or more consecutive lines that stand in two places, compared without indentation; blank lines,
  comments, imports and lines of brackets alone do not count, and a longer run is one pair.
- Probed members are `getattr` and `hasattr` calls with a literal name in `runtime/`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import words

__all__ = ["counts", "main"]

_BLOCK = 6


def main(trees: list[str]) -> int:
    roots = [Path(tree) for tree in trees] or [Path(__file__).resolve().parents[1]]
    columns = [counts(root) for root in roots]
    for name in columns[0]:
        sys.stdout.write(f"{name:48}" + "".join(f"{column[name]:>10,}" for column in columns) + "\n")
    return 0


def counts(root: Path) -> dict[str, int]:
    """Measure -> number, for the checkout at `root`."""
    files = sorted((root / "src").rglob("*.py"))
    texts = {path: path.read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    runtime = [tree for path, tree in trees.items() if "runtime" in path.parent.parts[-1:]]
    return {
        "source lines": sum(text.count("\n") for text in texts.values()),
        "statements": sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree)),
        "files": len(files),
        "functions with more than 8 parameters": sum(_parameters(one) > 8 for one in functions),
        "functions over 60 lines": sum((one.end_lineno or 0) - one.lineno + 1 > 60 for one in functions),
        "modules over 600 lines": sum(text.count("\n") > 600 for text in texts.values()),
        f"pairs of identical blocks of {_BLOCK} lines": _repeats(trees, texts),
        "members probed in runtime/": sum(_is_probe(node) for tree in runtime for node in ast.walk(tree)),
        "words of tools/words.txt": sum(1 for _ in words.findings(root)),
    }


def _parameters(function: ast.FunctionDef) -> int:
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)


def _is_probe(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    )


def _repeats(trees: dict[Path, ast.Module], texts: dict[Path, str]) -> int:
    lines = [
        (path, index, line)
        for path, tree in trees.items()
        for index, line in enumerate(_code(tree, texts[path].split("\n")))
    ]
    places: dict[tuple[str, ...], list[int]] = {}
    for at in range(len(lines) - _BLOCK + 1):
        block = lines[at : at + _BLOCK]
        if block[0][0] == block[-1][0]:
            places.setdefault(tuple(line for _, _, line in block), []).append(at)
    pairs = {(one, two) for found in places.values() for k, one in enumerate(found) for two in found[k + 1 :]}
    return sum((one - 1, two - 1) not in pairs for one, two in pairs if two - one >= _BLOCK)


def _code(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if number not in skipped and text.strip("()[]{},:") and not text.startswith("#"):
            yield text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

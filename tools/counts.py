"""What the tree weighs: lines, statements, long functions and modules, repeated blocks, probed members.

    python tools/counts.py [--check] [TREE ...]

prints one column for each tree (a checkout of this repository; default: this one). With `--check` the exit code is 1 where
this tree exceeds the budget, the table of docs/adr/0008-budget.md: a measure rises by a line there that says what for.

- Source lines are all lines of `src/**/*.py`; statements are `ast.stmt` nodes.
- Parameters are counted without `self` and `cls`; the length of a function is from its `def` to its last line.
- A repeated block is six or more consecutive lines that stand in two places, compared without indentation; blank lines,
  comments, imports and lines of brackets alone do not count, and a longer run is one pair.
- Probed members are `getattr` and `hasattr` calls with a literal name in `runtime/`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import words

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = 6


def main(trees: list[str]) -> int:
    if trees == ["--check"]:
        return check(ROOT)
    roots = [Path(tree) for tree in trees] or [ROOT]
    columns = [counts(root) for root in roots]
    for name in columns[0]:
        sys.stdout.write(f"{name:48}" + "".join(f"{column[name]:>10,}" for column in columns) + "\n")
    return 0


def check(root: Path) -> int:
    """1, with the measures on stderr, where the tree at `root` exceeds its budget."""
    page = root / "docs" / "adr" / "0008-budget.md"
    rows = re.findall(r"^\| ([a-z ]+) \| ([\d,]+) \|", page.read_text(), re.MULTILINE)
    budget = {name: int(most.replace(",", "")) for name, most in rows}
    found = budgeted(root)
    if budget.keys() != found.keys():
        sys.stderr.write(f"{page.name} has {sorted(budget)}, measured are {sorted(found)}\n")
        return 1
    over = [f"{name}: {found[name]:,}, at most {most:,}\n" for name, most in budget.items() if found[name] > most]
    if over:
        sys.stderr.write("".join([*over, f"hint: take something out, or state in {page.name} what the rise is for\n"]))
    return int(bool(over))


def budgeted(root: Path) -> dict[str, int]:
    """Measure -> number, for what has a budget."""
    source, trees = root / "src" / "trt_engine", {}
    for folder in ("records", "config", "backends", "verbs"):
        kept = "config.py" if folder == "verbs" else "*.py"
        trees[folder] = [ast.parse(path.read_text()) for path in (source / folder).rglob(kept)]
    records = [node for tree in trees["records"] for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    verbs = re.findall(r'^        "[a-z-]+": "', (source / "cli" / "verbs_table.py").read_text(), re.MULTILINE)
    return {
        "source lines": sum(path.read_text().count("\n") for path in source.rglob("*.py")),
        "test lines": sum(path.read_text().count("\n") for path in (root / "tests").rglob("*.py")),
        "verbs": len(verbs),
        "settings": sum(
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("opt", "settings.opt")
            for folder in ("config", "backends", "verbs")
            for tree in trees[folder]
            for node in ast.walk(tree)
        ),
        "record types": len(records),
        "record fields": sum(isinstance(item, ast.AnnAssign) for record in records for item in record.body),
        "words of docs": sum(len(path.read_text().split()) for path in (root / "docs").rglob("*.md")),
        "words of the changelog": len((root / "CHANGELOG.md").read_text().split()),
    }


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

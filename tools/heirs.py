"""Each test that tests/heirs.txt names as an heir is there, and what it says has gone is gone.

python tools/heirs.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def tests_in(file: str) -> set[str]:
    path = TESTS / file
    found = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
    return {node.name for node in found if isinstance(node, ast.FunctionDef)}


def main() -> int:
    bad = []
    for line in (TESTS / "heirs.txt").read_text().splitlines():
        old, _, heir = line.partition(" -> ")
        for file, name in re.findall(r"([\w/]+\.py)::(test_\w+)", heir):
            if name not in tests_in(file):
                bad.append(f"the heir {file}::{name} is not there, it is that of {old}")
        file, _, name = old.partition("::")
        if name in tests_in(file):
            bad.append(f"{old} is still there")
    sys.stderr.write("".join(f"{item}\n" for item in sorted(bad)))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

"""Write src/trt_engine/verbs/migrate/removed_names.json: the names that a major release of TensorRT removed.

    python tools/removed_names.py --headers 8.6.1=DIR[:DIR] --headers 10.0.1=DIR --headers 10.16.1=DIR --headers 11.1.0=DIR

Python names come from the published bindings, imported on stand-in libraries (tests/bindings), C++ names from
checkouts of the public headers, parsed by tree-sitter (extra `migrate`). Members of a class that went as a whole are
left out, and so are those a layer class inherits from `ILayer`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from bindings import harness  # noqa: E402

TARGET = ROOT / "src" / "trt_engine" / "verbs" / "migrate" / "removed_names.json"
STEPS = {"10.0": (("8.6.1", "10.0.1"), ("8.6.1", "10.0.1")), "11.0": (("10.16.1", "11.0.0"), ("10.16.1", "11.1.0"))}
"""Release -> the pair of bindings and the pair of headers that show what it removed."""
OLD = "8.6.1"
PARSERS = (
    "_ZN11nvuffparser15createUffParserEv", "_ZN11nvuffparser8FieldMapC1EPKcPKvNS_9FieldTypeEi",
    "_ZN14nvcaffeparser117createCaffeParserEv", "_ZN14nvcaffeparser123shutdownProtobufLibraryEv",
)  # fmt: skip
"""What the bindings of 8.6.1 link against besides the entry points of later releases."""
NOT_PUBLIC = re.compile(
    r"EnumMaxImpl|_INTERNAL|getInterfaceVersion|ErrorInformation|^\W|^$|operator|^(\w+)::\1$|_v?1_0"
    r"|IOutputAllocator\.|tensorrt_version|getTensorRTVersion|IAlgorithm\w*(?:\.|::)"
)
"""Not called by users, or overridden by them under the same name."""
LIST = r"""
import json, tensorrt as trt
names = []
for name, value in vars(trt).items():
    if name.startswith("_"):
        continue
    names.append(name)
    if isinstance(value, type):
        names += [f"{name}.{member}" for member in dir(value) if not member.startswith("_")]
print(json.dumps(names))
"""


def python_names(release: str) -> set[str]:
    """Public names and members of the bindings."""
    harness.RELEASES.setdefault(release, f"tensorrt-bindings=={release}")
    harness.ENTRY_POINTS |= set(PARSERS)
    bindings = harness.prepare(release)
    if release == OLD:
        stub = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in PARSERS)
        place = str(bindings.folder / "libnvparsers.so.8")
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", place, "-Wl,-soname,libnvparsers.so.8"]
        subprocess.run(command, input=stub, text=True, check=True)
    done = bindings.run(LIST)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {name for name in json.loads(done.stdout) if not NOT_PUBLIC.search(name)}


def cpp_names(folders: str) -> set[str]:
    """Classes, enumerators and methods of the headers, as `IBuilder::setMaxBatchSize`."""
    import tree_sitter
    import tree_sitter_cpp

    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))
    found: set[str] = set()
    for path in (path for folder in folders.split(":") for path in sorted(Path(folder).glob("Nv*.h"))):
        if "Impl" not in path.name and "Safe" not in path.name and "Consistency" not in path.name:
            source = re.sub(rb"\b(TRT_DEPRECATED\w*|TENSORRTAPI|TRT_NODISCARD|TRTNOEXCEPT)\b", b"", path.read_bytes())
            found |= set(_declared(parser.parse(source).root_node, ""))
    return {name for name in found if not NOT_PUBLIC.search(name)}


def _declared(node: object, owner: str) -> Iterator[str]:
    def name_of(child: object) -> str:
        return child.text.decode() if child is not None else ""  # type: ignore[attr-defined]

    body = node.child_by_field_name("body")  # type: ignore[attr-defined]
    kind = node.type  # type: ignore[attr-defined]
    if kind in ("class_specifier", "struct_specifier", "enum_specifier") and body is not None:
        owner = name_of(node.child_by_field_name("name")) or owner  # type: ignore[attr-defined]
        yield owner
    elif kind == "enumerator":
        yield f"{owner}::{name_of(node.child_by_field_name('name'))}"  # type: ignore[attr-defined]
    elif kind == "alias_declaration":
        yield name_of(node.child_by_field_name("name"))  # type: ignore[attr-defined]
    elif kind == "function_declarator":
        declared = node.child_by_field_name("declarator")  # type: ignore[attr-defined]
        if declared is not None and declared.type in ("identifier", "field_identifier"):
            yield f"{owner}::{name_of(declared)}" if owner else name_of(declared)
    for child in node.children:  # type: ignore[attr-defined]
        yield from _declared(child, owner)


def removed(old: set[str], *newer: set[str], sign: str) -> list[str]:
    """What is in `old` and in none of the newer ones, without what follows from another entry."""
    gone = old.difference(*newer)
    layer = {name.partition(sign)[2] for name in gone if name.startswith(f"ILayer{sign}")}
    kept = []
    for name in sorted(gone):
        owner, _, member = name.partition(sign)
        inherited = owner != "ILayer" and owner.endswith("Layer") and member in layer
        if not member or not (owner in gone or inherited):
            kept.append(name)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headers", action="append", required=True, metavar="RELEASE=DIR[:DIR]")
    headers = dict(item.split("=", 1) for item in parser.parse_args().headers)
    last_python, last_cpp = python_names(STEPS["11.0"][0][1]), cpp_names(headers[STEPS["11.0"][1][1]])
    table = {
        "python": {
            since: removed(python_names(a), python_names(b), last_python, sign=".")
            for since, ((a, b), _) in STEPS.items()
        },
        "cpp": {
            since: removed(cpp_names(headers[a]), cpp_names(headers[b]), last_cpp, sign="::")
            for since, (_, (a, b)) in STEPS.items()
        },
    }
    TARGET.write_text(json.dumps(table, indent=1) + "\n")
    counts = {(language, since): len(names) for language, steps in table.items() for since, names in steps.items()}
    sys.stdout.write(f"{counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

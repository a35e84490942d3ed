"""Write `src/trt_engine/graph/onnxruntime_cpu_kernels.json` anew: the kernels of ONNX Runtime's CPU provider by release.

    python tools/onnxruntime_kernels.py RELEASE.json...   # the oldest first
    python tools/onnxruntime_kernels.py --list > RELEASE.json   # in an environment of each release

The list is a private function of ONNX Runtime that kills the process in builds for GPUs whose libraries are missing. It
is called here alone, in the `onnxruntime` package without GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "src/trt_engine/graph/onnxruntime_cpu_kernels.json"
LAST = 1 << 31  # ONNX Runtime's "and later" is the largest int32


def list_kernels() -> dict[str, Any]:
    """The kernels of the installed release."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    rows = [
        (
            "" if item.domain in ("", "ai.onnx") else item.domain,
            item.op_name,
            *(int(version) for version in item.version_range),
            " ".join(
                f"{name}={','.join(sorted(kinds))}" for name, kinds in sorted(dict(item.type_constraints).items())
            ),
        )
        for item in state.get_all_opkernel_def()
        if item.provider == "CPUExecutionProvider"
    ]
    return {"release": ".".join(onnxruntime.__version__.split(".")[:2]), "kernels": sorted(set(rows))}


def merge(releases: list[dict[str, Any]]) -> dict[str, Any]:
    """One table of all releases: a kernel that not all have carries its first and last one."""
    names = [item["release"] for item in releases]
    held: dict[tuple[str, str, int, int, str], list[str]] = {}
    for release in releases:
        for row in release["kernels"]:
            held.setdefault(tuple(row), []).append(release["release"])
    types = sorted({row[4] for row in held})
    number = {text: at for at, text in enumerate(types)}
    kernels: dict[str, dict[str, list[Any]]] = {}
    for (domain, op, low, high, text), found in sorted(held.items()):
        row: list[Any] = [low, high if high < LAST - 1 else None, number[text]]
        if found != names:
            row += [found[0] if found[0] != names[0] else None, found[-1] if found[-1] != names[-1] else None]
        kernels.setdefault(domain, {}).setdefault(op, []).append(row)
    return {
        "source": {
            "name": "onnxruntime: the kernels that its releases list, CPUExecutionProvider; tools/onnxruntime_kernels.py",
            "releases": names,
            "license": "MIT; names alone",
        },
        "legend": "kernels: domain, operator, then [first opset, last opset, index of types, first release, last release]",
        "types": types,
        "kernels": kernels,
    }


def write(table: dict[str, Any]) -> str:
    """One line per operator."""
    dump = json.dumps
    head = ",\n".join(f"  {dump(key)}: {dump(table[key])}" for key in ("source", "legend"))
    types = ",\n".join(f"    {dump(text)}" for text in table["types"])
    domains = ",\n".join(
        f"    {dump(domain)}: {{\n"
        + ",\n".join(f"      {dump(op)}: {dump(rows, separators=(',', ':'))}" for op, rows in ops.items())
        + "\n    }"
        for domain, ops in table["kernels"].items()
    )
    return f'{{\n{head},\n  "types": [\n{types}\n  ],\n  "kernels": {{\n{domains}\n  }}\n}}\n'


def main() -> None:
    if sys.argv[1:] == ["--list"]:
        sys.stdout.write(json.dumps(list_kernels()))
    else:
        TABLE.write_text(write(merge([json.loads(Path(name).read_text()) for name in sys.argv[1:]])), encoding="utf-8")


if __name__ == "__main__":
    main()

"""`convert` over architectures of torchvision, timm, transformers and ultralytics, checked by ONNX Runtime against PyTorch.

    python benchmarks/convert_sweep.py -o benchmarks/results/convert-sweep.jsonl    all, resumed where it stopped
    python benchmarks/convert_sweep.py --only hf_bert,resnet18                      some, on stdout

Each architecture has random weights from a seed and is converted in a process of its own. What was written is then run at
batches of 1, 3 and 7 on inputs that `convert` never saw, without any code of trt-engine's comparison.

right     the graph has the source's numbers at every batch the report claims
refused   an error; whether it names a line of the source and an option or a recipe
WRONG     numbers differ, or a batch is claimed that the source does not take, or a planted defect was converted

It wants an environment with all four libraries: `pip install torch torchvision timm transformers ultralytics onnxscript`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BATCHES = (1, 3, 7)
LIMIT_S = 600.0
TOLERANCE = 1e-3
"""Of the largest value of the output; ten times what `convert` allows, since inputs are others."""
_LINE = re.compile(r"[\w.-]+\.py:\d+")
_OPTION = re.compile(r"--[a-z][\w-]+|-O \w+|\w+_implementation=|examples/recipes/\w+\.py")


# ------------------------------------------------------------------------------------------------ one architecture


def one(name: str, folder: Path) -> dict[str, Any]:
    """Converted and checked, in this process."""
    sys.path.insert(0, str(HERE))
    import sweep_networks

    import trt_engine as te
    from trt_engine.errors import TrtEngineError

    network = sweep_networks.NETWORKS[name]
    factory = folder / "source.py"
    factory.write_text(f"import sweep_networks\n\n\ndef build():\n    return sweep_networks.make({name!r})\n")
    out = folder / "out.onnx"
    started = time.monotonic()
    try:
        report = te.convert(f"{factory}:build", out=out, inputs=list(network.inputs))
    except TrtEngineError as error:
        text = f"{error.message} {error.hint or ''}"
        return {
            "outcome": "refused",
            "exit_code": error.exit_code,
            "message": _here(error.message),
            "hint": _here(error.hint or ""),
            "line": bool(_LINE.search(text)),
            "option": bool(_OPTION.search(text)),
            "convert_s": time.monotonic() - started,
        }
    found: dict[str, Any] = {
        "convert_s": time.monotonic() - started,
        "exporter": report.exporter,
        "worst": report.max_rel,
        "dynamic": [[item.symbol, item.low, item.high, list(item.tested_sizes)] for item in report.dynamic],
        "outputs": [str(spec) for spec in report.signature.outputs],
        "warnings": list(report.warnings),
        "notes": list(report.notes),
    }
    low = next((item.low for item in report.dynamic if item.symbol == "batch"), None)
    wrong, errors = _checked(sweep_networks.make(name), network.inputs, out, low)
    if network.wrong:
        wrong.append("a planted defect was converted")
    return found | {"outcome": "WRONG" if wrong else "right", "wrong": wrong, "errors": errors}


def _here(text: str) -> str:
    """Without the folders of this machine."""
    return re.sub(r"(?<![\w.])/(?:[\w.-]+/)+(?=[\w-]+\.py\b)", "", text)


def _checked(module: Any, inputs: tuple[str, ...], out: Path, low: int | None) -> tuple[list[str], dict[int, float]]:
    """What is wrong at each batch, and the largest difference over the largest value."""
    import numpy as np
    import onnxruntime as ort
    import torch

    session = ort.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    takes = [item.name for item in session.get_inputs()]
    wrong: list[str] = []
    errors: dict[int, float] = {}
    for batch in BATCHES if low is not None else (int(inputs[0].split(":")[1].split("x")[0]),):
        feeds = _feeds(inputs, batch)
        try:
            with torch.no_grad():
                tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}
                named = set(tensors) <= set(inspect.signature(module.forward).parameters)
                made = module(**tensors) if named else module(*tensors.values())
        except Exception as error:
            if low is not None and batch >= low:
                wrong.append(f"batch {batch} is claimed and the source fails there: {str(error)[:200]}")
            continue
        wanted = [item.detach().numpy() for item in _tensors(made)]
        got = session.run(None, {name: feeds[name] for name in takes})
        worst = 0.0
        for item, value in zip(session.get_outputs(), got, strict=True):
            candidates = [_apart(value, want, np) for want in wanted if want.shape == value.shape]
            apart = min(candidates, default=float("inf"))
            worst = max(worst, apart)
            if not apart <= TOLERANCE:
                wrong.append(f"output `{item.name}` {value.shape} at batch {batch} is off by {apart:.2g}")
        errors[batch] = worst
    return wrong, errors


def _apart(got: Any, want: Any, np: Any) -> float:
    """Of the largest value; where rows are sorted by score, the same rows in any order."""
    one, two = got.astype(np.float64), want.astype(np.float64)
    scale = max(float(np.abs(two).max(initial=0.0)), 1e-12)
    apart = float(np.abs(one - two).max(initial=0.0)) / scale
    if apart > TOLERANCE and one.ndim == 3:
        apart = min(apart, float(np.abs(np.sort(one, axis=1) - np.sort(two, axis=1)).max()) / scale)
    return apart


def _feeds(inputs: tuple[str, ...], batch: int) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(1000 + batch)
    feeds = {}
    for text in inputs:
        name, sizes, *kind = text.split(":")
        shape = (batch, *(int(size) for size in sizes.split("x")[1:]))
        if not kind:
            feeds[name] = rng.standard_normal(shape).astype(np.float32)
        elif "mask" in name:
            feeds[name] = (np.arange(shape[1]) < rng.integers(shape[1] // 2, shape[1] + 1, (batch, 1))).astype(np.int64)
        else:
            low, high = map(int, kind[0].partition("@")[2].split(".."))
            feeds[name] = rng.integers(low, high + 1, shape)
    return feeds


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [item for part in value for item in _tensors(part)] if isinstance(value, list | tuple) else []


# ------------------------------------------------------------------------------------------------ all of them


def record(name: str, limit_s: float) -> dict[str, Any]:
    """One architecture in a process of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--folder", folder]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"name": name, "outcome": "timeout", "seconds": limit_s}
        if not result.exists():
            return {"name": name, "outcome": "crash", "code": done.returncode, "stderr": done.stderr[-1500:]}
        found: dict[str, Any] = json.loads(result.read_text())
    return {"name": name, **found, "seconds": time.monotonic() - started}


def table(records: list[dict[str, Any]]) -> str:
    lines = ["| architecture | of | result | batches | largest difference |", "|---|---|---|---|---|"]
    for item in records:
        claim = next((f"from {low}, tried {', '.join(map(str, tried))}" for symbol, low, _, tried in item.get("dynamic", [])
                      if symbol == "batch"), "")  # fmt: skip
        errors = item.get("errors") or {}
        said = item.get("message", "").partition("\n")[0][:160] or "; ".join(item.get("wrong", []))[:200]
        worst = f"{max(errors.values()):.1e}" if errors else said.replace("|", "/")
        lines.append(f"| {item['name']} | {item.get('family', '')} | {item['outcome']} | {claim} | {worst} |")
    counts = Counter(item["outcome"] for item in records)
    bare = [item["name"] for item in records if item["outcome"] == "refused" and not (item["line"] and item["option"])]
    lines += ["", ", ".join(f"{count} {name}" for name, count in counts.items())]
    if bare:
        lines.append(f"refused without a line or without an option: {', '.join(bare)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="some architectures, by comma")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="records, one JSON object a line; those there are kept"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for each")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        (given.folder / "result.json").write_text(json.dumps(one(given.child, given.folder)))
        return 0
    sys.path.insert(0, str(HERE))
    import sweep_networks

    kept = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out and given.out.exists() else []
    names = given.only.split(",") if given.only else list(sweep_networks.NETWORKS)
    for name in names:
        if any(item["name"] == name for item in kept):
            continue
        item = {"family": sweep_networks.NETWORKS[name].family} | record(name, given.limit)
        kept.append(item)
        print(f"{name}: {item['outcome']}, {item.get('seconds', 0):.0f} s", file=sys.stderr, flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(item) + "\n")
    print(table(kept))
    planted = {name for name, network in sweep_networks.NETWORKS.items() if network.wrong}
    bad = [item for item in kept if item["outcome"] in ("WRONG", "crash", "timeout")]
    return 1 if bad or any(item["outcome"] == "right" for item in kept if item["name"] in planted) else 0


if __name__ == "__main__":
    sys.exit(main())

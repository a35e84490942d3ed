"""The careful path of `cast`: ModelOpt's AutoCast, in a process of its own.

AutoCast runs the network on data and decides node by node which may be cast. It takes seconds to import and changes ONNX
Runtime for the process it is in, so it gets its own, which may be another interpreter (`TRT_ENGINE_MODELOPT_PYTHON`).
What it writes goes through the same checks as our own rewrite.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from trt_engine import files
from trt_engine.errors import ModelError, SetupError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.census import layers_of
from trt_engine.graph.load import check, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, carry, names_of, with_modules
from trt_engine.precision import elements, stored
from trt_engine.precision.cast import refuse_target
from trt_engine.precision.rules import check_strong_typing
from trt_engine.records import CastReport, KeptNode

__all__ = ["PYTHON", "autocast", "interpreter"]

log = logging.getLogger(__name__)

PYTHON = "TRT_ENGINE_MODELOPT_PYTHON"
"""The environment variable that names an interpreter with ModelOpt in it."""
_INSTALL = "`pip install 'trt-engine[quant]'`, or name an interpreter that has it with `TRT_ENGINE_MODELOPT_PYTHON`"

_PROGRAM = """
import json, sys
given = json.load(sys.stdin)
try:
    import modelopt
    from modelopt.onnx.autocast import convert_to_mixed_precision
    import onnx
except ImportError as error:
    print(json.dumps({"missing": str(error)}))
    sys.exit(3)
options = {name: value for name, value in given["options"].items() if value is not None}
model = convert_to_mixed_precision(onnx_path=given["source"], **options)
large = model.ByteSize() > 1_500_000_000 or given["external"]
onnx.save(model, given["target"], save_as_external_data=large, location=given["side"] if large else None)
print(json.dumps({"version": modelopt.__version__}))
"""


def interpreter() -> str:
    """The Python that runs AutoCast: the one the environment names, else this one."""
    return os.environ.get(PYTHON) or sys.executable


def autocast(
    model: Path | str,
    to: str,
    *,
    out: Path | str,
    keep_io: bool = True,
    exclude_nodes: Sequence[str] = (),
    exclude_types: Sequence[str] = (),
    exclude_patterns: Sequence[str] = (),
    feeds: dict[str, Any] | None = None,
    init_max: float | None = None,
    data_max: float | None = None,
    python: str | None = None,
    yes: bool = False,
    timeout_s: float | None = None,
) -> CastReport:
    """The model cast by ModelOpt's AutoCast, checked as our own cast is. `feeds` are inputs for it to run on.

    Raises `SetupError` naming the extra where ModelOpt is not installed, `ModelError` with its last words where it fails.
    """
    started = time.monotonic()
    if to not in ("fp16", "bf16"):
        raise UsageError(f"cannot cast to `{to}`", hint="`--to fp16` or `--to bf16`")
    opened = open_model(model)
    target = Path(out)
    refuse_target(target, opened, yes=yes)
    before = read_proto(opened.path)
    check(opened, before)
    inside = [
        walk.label(place.node)
        for place in walk.nodes(before)
        if not {*exclude_nodes}.isdisjoint(names := names_of(place.node))
        or any(fnmatchcase(name, pattern) for name in names for pattern in exclude_patterns)
    ]
    with files.staging_folder(target) as staging:
        data = None
        if feeds is not None:
            data = staging / "data.npz"
            arrays: dict[str, Any] = {name: np.asarray(value) for name, value in feeds.items()}
            np.savez(data, **arrays)
        draft, beside = staging / target.name, stored.side_file(target)
        version = _run(
            python or interpreter(),
            {
                "source": str(opened.path.resolve()),
                "target": str(draft),
                "side": beside.name,
                "external": bool(opened.external),
                "options": {
                    "low_precision_type": to,
                    "keep_io_types": keep_io,
                    "nodes_to_exclude": [re.escape(name) for name in dict.fromkeys((*exclude_nodes, *inside))] or None,
                    "op_types_to_exclude": list(exclude_types) or None,
                    "calibration_data": str(data) if data is not None else None,
                    "init_max": init_max,
                    "data_max": data_max,
                },
            },
            timeout_s,
        )
        if not draft.is_file():
            raise ModelError("ModelOpt's AutoCast wrote no model", hint="`-v` shows its log; or leave `--careful` out")
        _must_be_valid(draft, opened.path)
        after = read_proto(draft)
        if carry(after, before):
            draft.write_bytes(after.SerializeToString())
        report = _report(opened, before, draft, to, keep_io, version)
        try:
            weights = staging / beside.name
            nbytes = draft.stat().st_size + (weights.stat().st_size if weights.exists() else 0)
            if weights.exists():
                weights.replace(beside)
            draft.replace(target)
        except OSError as error:
            raise files.explain(error, target) from error
    return replace(
        report,
        out=str(target),
        nbytes_after=nbytes,
        artifacts={"model": str(target)} | ({"weights": str(beside)} if beside.exists() else {}),
        seconds=time.monotonic() - started,
    )


def _run(python: str, given: dict[str, Any], timeout_s: float | None) -> str:
    """Run the program in its own process; ModelOpt's version."""
    log.info("running ModelOpt's AutoCast with `%s`", python)
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise SetupError(f"cannot run `{python}`: {os.strerror(error.errno or 0).lower()}", hint=_INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"ModelOpt's AutoCast was not done after {timeout_s:g} s",
            hint="leave `--careful` out, or give it less data",
        ) from error
    for line in done.stderr.splitlines():
        log.debug("modelopt: %s", line)
    said = _last_document(done.stdout)
    if done.returncode == 3 and "missing" in said:
        raise SetupError(
            f"`--careful` needs NVIDIA ModelOpt, which `{python}` does not have ({said['missing']})", hint=_INSTALL
        )
    if done.returncode or "version" not in said:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word")
        raise ModelError(
            f"ModelOpt's AutoCast failed (exit code {done.returncode}): {last[:300]}",
            hint="leave `--careful` out for our own cast; `-v` shows its whole log",
        )
    return str(said["version"])


def _last_document(text: str) -> dict[str, Any]:
    """The JSON object on the last line that is one: libraries print lines of their own."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _must_be_valid(path: Path, source: Path) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker and the inference raise whatever their C++ side throws
        raise ModelError(
            f"what ModelOpt's AutoCast made of `{source}` is not valid ONNX: {' '.join(str(error).split())[:300]}",
            hint="leave `--careful` out for our own cast",
        ) from error


def _report(opened: Any, before: onnx.ModelProto, draft: Path, to: str, keep_io: bool, version: str) -> CastReport:
    """The report, from what stands in the two graphs."""
    after = read_proto(draft)
    paths = ModulePaths(after)
    layers = list(layers_of(after))
    kept = [layer for layer in layers if layer.kind == "fp32"]
    operators = Counter(layer.step.node.op_type for layer in layers if layer.kind == to)
    casts = [sum(place.node.op_type == "Cast" for place in walk.nodes(proto)) for proto in (before, after)]
    low = elements.HALF if to == "fp16" else elements.BRAIN
    stored_low = [
        tensor
        for scope in elements.read(elements.inlined(after)).all_scopes()
        for tensor in scope.tensors.values()
        if tensor.stored is not None and tensor.kind == low
    ]
    return CastReport(
        model=str(opened.path),
        out=None,
        to=to,
        path="careful",
        keep_io=keep_io,
        opset=(opened.opsets.get("", 1), walk.opsets_of(after).get("", 1)),
        nodes=len(layers),
        nodes_cast=sum(operators.values()),
        operators_cast=dict(operators.most_common()),
        kept=with_modules(
            [
                KeptNode(walk.label(layer.step.node), layer.step.node.op_type, "careful", "AutoCast left it in FP32")
                for layer in kept
            ],
            paths,
        ),
        casts_added=max(casts[1] - casts[0], 0),
        casts_removed=max(casts[0] - casts[1], 0),
        constants_converted=len(stored_low),
        constants_in_both_types=(),
        constants_clamped=(),
        nbytes_before=opened.nbytes,
        nbytes_after=None,
        findings=with_modules(check_strong_typing(after), paths, "where"),
        notes=(f"by NVIDIA ModelOpt {version}, AutoCast",),
    )

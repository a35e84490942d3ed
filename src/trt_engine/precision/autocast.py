"""`cast --autocast`: ModelOpt's AutoCast in a subprocess.

AutoCast runs the network on data and selects the nodes to cast. It takes seconds to import and patches ONNX Runtime, so it
runs in a separate interpreter (`TRT_ENGINE_MODELOPT_PYTHON`). Its output passes the same checks as the built-in cast.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from trt_engine import atomic_io
from trt_engine.arrayfiles import npz_bytes
from trt_engine.config.precision import CastConfig
from trt_engine.errors import ModelError, SetupError, UsageError
from trt_engine.format import library_reason
from trt_engine.graph import edit_graph, stored_tensors, typed_graph, walk
from trt_engine.graph.dtype_breakdown import compute_layers
from trt_engine.graph.load import check_operators, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, carry_module_paths
from trt_engine.graph.operators import checker_error
from trt_engine.graph.typing_rules import check_strong_typing
from trt_engine.precision.cast_model import check_target
from trt_engine.precision.cast_rules import CastChanges
from trt_engine.precision.layer_selection import Exclusions
from trt_engine.records.precision import CastReport, Fp32Node

log = logging.getLogger(__name__)

PYTHON_VARIABLE = "TRT_ENGINE_MODELOPT_PYTHON"
"""Environment variable with the interpreter that has ModelOpt."""
_INSTALL = "`pip install 'trt-engine[quant]'`, or name an interpreter that has it with `TRT_ENGINE_MODELOPT_PYTHON`"
_SCRIPT = """
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


def autocast_python() -> str:
    """The Python that runs AutoCast: from the environment, else the current one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def autocast(
    model: Path | str,
    to: str,
    *,
    out: Path | str,
    config: CastConfig | None = None,
    feeds: dict[str, Any] | None = None,
    python: str | None = None,
    overwrite: bool = False,
    timeout_s: float | None = None,
    check: Callable[[Path], None] | None = None,
) -> CastReport:
    """Cast the model with ModelOpt's AutoCast, run on `feeds`, and validate the result.

    Nothing is written if `check` raises for the finished file.

    Raises `SetupError` if ModelOpt is not installed, `ModelError` with its last error line if it fails. `UsageError` for
    another type than `fp16` and `bf16`.
    """
    started, config = time.monotonic(), config or CastConfig()
    if to not in ("fp16", "bf16"):
        raise UsageError(f"cannot cast to `{to}`", hint="`--to fp16` or `--to bf16`")
    opened = open_model(model)
    target = Path(out)
    check_target(target, opened, overwrite=overwrite)
    before = opened.proto
    check_operators(opened.graph, opened.path)
    with atomic_io.staging_folder(target) as staging:
        data = None
        if feeds is not None:
            data = staging / "data.npz"
            arrays = {name: np.asarray(value) for name, value in feeds.items()}
            texts = {name: value.astype(np.str_) for name, value in arrays.items() if value.dtype.kind == "O"}
            data.write_bytes(npz_bytes(arrays | texts))
        draft = staging / target.name
        version = _run_script(
            python or autocast_python(),
            {
                "source": str(opened.path.resolve()),
                "target": str(draft),
                "side": stored_tensors.external_data_path(target).name,
                "external": bool(opened.external),
                "options": _script_options(before, to, config, data),
            },
            timeout_s,
        )
        if not draft.is_file():
            raise ModelError("ModelOpt's AutoCast wrote no model", hint="`-v` shows its log; or leave `--autocast` out")
        if (rejected := checker_error(draft)) is not None:
            raise ModelError(
                f"ModelOpt's AutoCast output for `{opened.path}` is not valid ONNX: {library_reason(rejected, whole=True)}",
                hint="leave `--autocast` out to use the built-in cast",
            ) from rejected
        after = read_proto(draft)
        if carry_module_paths(after, before):
            draft.write_bytes(after.SerializeToString())
        report = _make_report(opened, before, draft, to, config.keep_io, version)
        if check is not None:
            check(draft)
        with atomic_io.os_errors(target):
            nbytes = stored_tensors.publish(draft, target)
    files = {name: str(path) for name, path in stored_tensors.written_files(target).items()}
    return replace(report, out=str(target), nbytes_after=nbytes, artifacts=files, seconds=time.monotonic() - started)


def _script_options(model: onnx.ModelProto, to: str, config: CastConfig, data: Path | None) -> dict[str, Any]:
    """The arguments of `convert_to_mixed_precision`; None is its default."""
    exclude = Exclusions(config.exclude_nodes, (), config.exclude_patterns)
    inside = [walk.label(place.node) for place in walk.nodes(model) if exclude.reason(place.node) is not None]
    return {
        "low_precision_type": to,
        "keep_io_types": config.keep_io,
        "nodes_to_exclude": [re.escape(name) for name in dict.fromkeys((*config.exclude_nodes, *inside))] or None,
        "op_types_to_exclude": list(config.exclude_types) or None,
        "calibration_data": str(data) if data is not None else None,
        "init_max": config.max_constant,
    }


def _run_script(python: str, request: dict[str, Any], timeout_s: float | None) -> str:
    """Run the script in a subprocess; return ModelOpt's version."""
    log.info("running ModelOpt's AutoCast with `%s`", python)
    try:
        done = subprocess.run(
            [python, "-c", _SCRIPT],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise SetupError(f"cannot run `{python}`: {os.strerror(error.errno or 0).lower()}", hint=_INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"ModelOpt's AutoCast did not finish within {timeout_s:g} s",
            hint="leave `--autocast` out, or give it less data",
        ) from error
    for line in done.stderr.splitlines():
        log.debug("modelopt: %s", line)
    said = _last_json_object(done.stdout)
    if done.returncode == 3 and "missing" in said:
        raise SetupError(
            f"`--autocast` needs NVIDIA ModelOpt, which `{python}` does not have ({said['missing']})", hint=_INSTALL
        )
    if done.returncode or "version" not in said:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        raise ModelError(
            f"ModelOpt's AutoCast failed (exit code {done.returncode}): {library_reason(last)}",
            hint="leave `--autocast` out to use the built-in cast; `-v` shows its whole log",
        )
    return str(said["version"])


def _last_json_object(text: str) -> dict[str, Any]:
    """The last line that is a JSON object; libraries print other lines."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _make_report(opened: Any, before: onnx.ModelProto, draft: Path, to: str, keep_io: bool, version: str) -> CastReport:
    """Build the report from the two graphs."""
    after = read_proto(draft)
    layers = list(compute_layers(after))
    kept = [layer.step for layer in layers if layer.dtype == "fp32"]
    operators = Counter(layer.step.node.op_type for layer in layers if layer.dtype == to)
    casts = [sum(place.node.op_type == "Cast" for place in walk.nodes(proto)) for proto in (before, after)]
    low = typed_graph.FLOAT16 if to == "fp16" else typed_graph.BFLOAT16
    stored_low = [
        tensor
        for scope in typed_graph.build_typed_graph(edit_graph.inline_functions(after)).all_scopes()
        for tensor in scope.tensors.values()
        if tensor.value is not None and tensor.type_str == low
    ]
    reason = "AutoCast left it in FP32"
    changes = CastChanges(
        opset=(opened.opsets.get("", 1), walk.opsets_of(after).get("", 1)),
        nodes=len(layers),
        nodes_cast=sum(operators.values()),
        operators=operators,
        kept=[Fp32Node(walk.label(step.node), step.node.op_type, "autocast", reason) for step in kept],
        casts_added=max(casts[1] - casts[0], 0),
        casts_removed=max(casts[0] - casts[1], 0),
        converted=len(stored_low),
        notes=[f"by NVIDIA ModelOpt {version}, AutoCast"],
    )
    report = changes.to_report(opened, to, keep_io, check_strong_typing(after), ModulePaths(after))
    return replace(report, method="autocast")

"""`deploy triton`: a model repository, `NAME/1/model.plan|model.onnx` and `NAME/config.pbtxt`.

Keys: `model_config.proto` of Triton's `common` repository; their meaning: "Model Configuration" of Triton's user guide.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from trt_engine.config.deploy import TritonConfig
from trt_engine.deployment.job import DeployJob, Written
from trt_engine.deployment.pbtxt import Name, format_message
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.records.deploy import DeployedModel, DeployedSetting
from trt_engine.runtime.batch_rows import BatchLayout
from trt_engine.serving.wire_tensors import protocol_dtype
from trt_engine.tensors import TensorSpec

CONFIG_FILE = "config.pbtxt"
_FILES = {"tensorrt": "model.plan", "trtexec": "model.plan", "onnxruntime": "model.onnx"}
"""File of a version, by backend of the engine; Triton's backend is `tensorrt` for a plan, else `onnxruntime`."""
_UNLIMITED_BATCH = 32
"""`max_batch_size` of an engine that takes any batch, as in `serve`."""


def write(job: DeployJob) -> Written:
    """Stage the repository of all engines."""
    models = tuple(_write_model(job, name, engine) for name, engine in job.engines.items())
    command = shlex.join(["trt-engine", "serve", "--model-repository", str(job.out)])
    return Written(models, command)


def _write_model(job: DeployJob, name: str, engine: Engine) -> DeployedModel:
    backend = engine.passport.backend
    if backend not in _FILES:
        raise UsageError(
            f"Triton has no backend for `{name}`, an engine of {backend}",
            hint="build it with `--backend tensorrt`, `trtexec` or `onnxruntime`",
        )
    config: TritonConfig = job.config
    settings: list[DeployedSetting] = []
    fields = _model_config(engine, name, config, settings)
    job.copy_engine(engine, f"{name}/1/{_FILES[backend]}")
    job.write(f"{name}/{CONFIG_FILE}", format_message(fields))
    return DeployedModel(name, str(engine.path), job.digest(name), backend, tuple(settings))


def _model_config(engine: Engine, name: str, config: TritonConfig, settings: list[DeployedSetting]) -> dict[str, Any]:
    largest = _max_batch(engine)
    is_plan = _FILES[engine.passport.backend] == "model.plan"
    fields: dict[str, Any] = {
        "name": name,
        "backend": "tensorrt" if is_plan else "onnxruntime",
        "max_batch_size": largest,
        "input": [_tensor(spec, bool(largest)) for spec in engine.signature.inputs],
        "output": [_tensor(spec, bool(largest)) for spec in engine.signature.outputs],
        "instance_group": [
            {"count": config.instances or 1, "kind": Name("KIND_GPU" if _on_gpu(engine) else "KIND_CPU")}
        ],
    }
    if largest:
        fields["dynamic_batching"] = {"max_queue_delay_microseconds": round((config.max_wait_ms or 0) * 1e3)}
    return fields


def _max_batch(engine: Engine) -> int:
    """Triton's `max_batch_size`; 0 where the first dimension is not an open batch."""
    if not engine.signature.batch_axis:
        return 0
    try:
        layout = BatchLayout.from_signature(engine.signature, engine.passport.profiles)
    except UsageError:
        return 0
    return layout.max_rows or _UNLIMITED_BATCH


def _on_gpu(engine: Engine) -> bool:
    return not re.match(r"cpu\b", engine.passport.device)


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    dtype = protocol_dtype(spec)
    dims = list(spec.shape[1:] if batched else spec.shape)
    fields: dict[str, Any] = {"name": spec.name, "data_type": Name(f"TYPE_{dtype.replace('BYTES', 'STRING')}")}
    if dims:
        return fields | {"dims": dims}
    return fields | {"dims": [1], "reshape": {}}  # a shape without dimensions cannot be written otherwise

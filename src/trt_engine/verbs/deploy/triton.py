"""`deploy triton`: a model repository, `NAME/1/model.plan|model.onnx|model.py` and `NAME/config.pbtxt`.

Keys: `model_config.proto` of Triton's `common` repository; their meaning: "Model Configuration" of Triton's user guide.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import trt_engine
from trt_engine.config.profiles import Profile
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.open_inference.messages import message
from trt_engine.open_inference.wire_tensors import protocol_dtype
from trt_engine.records.deploy import DeployedModel, DeployedSetting
from trt_engine.runtime.batch_rows import BatchLayout
from trt_engine.tensors import TensorSpec
from trt_engine.verbs.deploy.config import TritonConfig
from trt_engine.verbs.deploy.job import DeployJob, Written
from trt_engine.verbs.deploy.measured import MeasuredRun, match_runs

CONFIG_FILE = "config.pbtxt"
_NATIVE = {
    "tensorrt": ("tensorrt", "model.plan"),
    "trtexec": ("tensorrt", "model.plan"),
    "onnxruntime": ("onnxruntime", "model.onnx"),
}
"""Triton's backend, and its name for the file of a version, by backend of the engine."""
_PYTHON_MODEL = '''"""`{name}` in Triton's Python backend; the Python that Triton starts has trt-engine {version}+."""

from trt_engine.verbs.deploy.triton_model import TritonPythonModel
'''
_UNLIMITED_BATCH = 32
"""`max_batch_size` of an engine that takes any batch, as in `serve`."""
_WARMUP_RUNS = 2
_NOT_MEASURED = "not measured: `trt-engine size MODEL --deadline-ms MS -o DIR`, then `--sized DIR`"


def write(job: DeployJob) -> Written:
    """Stage the repository of all engines."""
    runs = match_runs(job.config.sized, job.engines)
    models = tuple(_write_model(job, name, engine, runs.get(name)) for name, engine in job.engines.items())
    command = shlex.join(["trt-engine", "serve", "--model-repository", str(job.out)])
    return Written(models, command)


def _write_model(job: DeployJob, name: str, engine: Engine, run: MeasuredRun | None) -> DeployedModel:
    backend = engine.passport.backend
    if job.config.backend == "python":
        triton_backend, file, note = "python", engine.path.name, _python_note(engine)
        if odd := [spec for spec in engine.signature if spec.dtype == "bfloat16"]:
            raise UsageError(
                f"`{odd[0].name}` of `{name}` is bfloat16, which Triton's Python backend does not give to numpy",
                hint="an engine with FP32 inputs and outputs: `trt-engine cast` without `--no-keep-io`",
            )
        job.write(f"{name}/1/model.py", _PYTHON_MODEL.format(name=name, version=trt_engine.__version__))
    elif backend in _NATIVE:
        (triton_backend, file), note = _NATIVE[backend], _version_note(engine)
    else:
        raise UsageError(
            f"Triton has no backend for `{name}`, an engine of {backend}",
            hint="`--backend python`, or build it with `--backend tensorrt`, `trtexec` or `onnxruntime`",
        )
    made = ModelConfig(name, engine, job.config, run, triton_backend)
    made.make()
    if triton_backend == "python":
        made.fields["parameters"] = {"engine": {"string_value": file}}
    job.copy_engine(engine, f"{name}/1/{file}")
    job.write(f"{name}/{CONFIG_FILE}", made.text())
    notes = (*made.notes, note)
    return DeployedModel(name, str(engine.path), job.digest(name), backend, tuple(made.settings), notes)


def _python_note(engine: Engine) -> str:
    needs = engine.passport.requirements
    return (
        f"needs `pip install trt-engine` and {engine.passport.backend} {needs.version} in the Python that Triton starts: "
        "that of its image, or one packed as an execution environment"
    )


def _version_note(engine: Engine) -> str:
    needs = engine.passport.requirements
    if _NATIVE[engine.passport.backend][0] == "tensorrt":
        later = " or later" if needs.version_compatible else ", the same version"
        gpu = needs.gpu or needs.compute_capability
        return f"a Triton image with TensorRT {needs.version}{later}" + (f"; the GPU: {gpu}" if gpu else "")
    return (
        f"a Triton image with ONNX Runtime {needs.version} or later; the graph is optimized for the building machine, and "
        "another CPU may lack what it uses: `trt-engine inspect` on the target"
    )


@dataclass(slots=True)
class ModelConfig:
    """One `config.pbtxt` in the making: its fields, the decisions in them, and notes."""

    name: str
    engine: Engine
    config: TritonConfig
    run: MeasuredRun | None
    triton_backend: str
    fields: dict[str, Any] = field(default_factory=dict)
    settings: list[DeployedSetting] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def make(self) -> None:
        """Fill in the fields."""
        signature = self.engine.signature
        largest, reason = _max_batch(self.engine)
        self._decide("max_batch_size", largest, reason)
        batched = bool(largest)
        self.fields = {
            "name": self.name,
            "backend": self.triton_backend,
            "max_batch_size": largest,
            "input": [_tensor(spec, batched) for spec in signature.inputs],
            "output": [_tensor(spec, batched) for spec in signature.outputs],
            "instance_group": [self._instance_group()],
        }
        if batched:
            self.fields["dynamic_batching"] = self._dynamic_batching(largest)
        if scalars := [f"`{spec.name}`" for spec in signature if not spec.shape]:
            self.notes.append(f"{', '.join(scalars)}: a scalar needs `reshape`, which `trt-engine serve` does not read")
        if self.config.warmup:
            self.fields["model_warmup"] = self._warmup(largest)
        ranges = [span for profile in self.engine.passport.profiles[:1] for span in profile.ranges.values()]
        smallest = max((span.min[0] for span in ranges), default=1) if batched else 1
        if smallest > 1 and self.triton_backend != "python":
            self.notes.append(
                f"Triton does not pad: a batch of fewer than {smallest} rows fails; build with a smallest batch of 1"
            )

    def text(self) -> str:
        """The fields in protobuf's text format."""
        from google.protobuf import json_format, text_format

        return str(text_format.MessageToString(json_format.ParseDict(self.fields, message("ModelConfig")())))

    def _decide(self, name: str, value: object, reason: str) -> None:
        self.settings.append(DeployedSetting(name, str(value), reason))

    def _instance_group(self) -> dict[str, Any]:
        capacity = self.run.capacity if self.run is not None else None
        count, reason = self.config.instances, "as requested"
        if count is None and capacity is not None:
            count, reason = capacity.policy.contexts, self._measured_reason()
        elif count is None:
            count, reason = 1, _NOT_MEASURED
        self._decide("instance_group.count", count, reason)
        on_gpu = re.match(r"cpu\b", self.engine.passport.device) is None
        return {"count": count, "kind": "KIND_GPU" if on_gpu else "KIND_CPU"}

    def _measured_reason(self) -> str:
        assert self.run is not None
        capacity = self.run.capacity
        if capacity is None:
            return f"most images/s in `{self.run.folder}`"
        return f"{capacity.streams} streams within {capacity.deadline_ms:g} ms in `{self.run.folder}`"

    def _dynamic_batching(self, largest: int) -> dict[str, Any]:
        run = self.run
        capacity = run.capacity if run is not None else None
        fields: dict[str, Any] = {}
        if run is not None:
            preferred = min(capacity.policy.max_batch if capacity is not None else run.best_batch, largest)
            fields["preferred_batch_size"] = [preferred]
            self._decide("dynamic_batching.preferred_batch_size", preferred, self._measured_reason())
        wait_ms, reason = self.config.max_wait_ms, "as requested"
        if wait_ms is None and capacity is not None:
            wait_ms, reason = capacity.policy.max_wait_ms, self._measured_reason()
        elif wait_ms is None:
            wait_ms = 0.0
            reason = (
                "requests do not wait for others: no deadline was sized (`size --deadline-ms`)"
                if run
                else _NOT_MEASURED
            )
        fields["max_queue_delay_microseconds"] = round(wait_ms * 1e3)
        self._decide("dynamic_batching.max_queue_delay_microseconds", round(wait_ms * 1e3), reason)
        return fields

    def _warmup(self, largest: int) -> list[dict[str, Any]]:
        """Samples of the smallest, usual and largest shapes."""
        samples: list[dict[str, Any]] = []
        for label, shapes in _warmup_shapes(self.engine, largest):
            if any(size < 0 for shape in shapes.values() for size in shape):
                self.notes.append("no warm-up: the engine has open sizes without a profile")
                return []
            sample: dict[str, Any] = {"name": label, "batch_size": next(iter(shapes.values()))[0] if largest else 1}
            sample["inputs"] = {
                spec.name: _warmup_input(spec, shapes[spec.name][1 if largest else 0 :])
                for spec in self.engine.signature.inputs
            }
            if all(sample["inputs"] != one["inputs"] or sample["batch_size"] != one["batch_size"] for one in samples):
                samples.append(sample | {"count": _WARMUP_RUNS})
        self._decide("model_warmup", ", ".join(item["name"] for item in samples), "shapes of the engine's profile")
        return samples


def _warmup_shapes(engine: Engine, largest: int) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    profiles: tuple[Profile, ...] = engine.passport.profiles
    inputs = engine.signature.inputs
    if profiles and profiles[0].ranges:
        for index, label in enumerate(("smallest", "usual", "largest")):
            ranges = profiles[0].ranges
            yield (
                label,
                {spec.name: ranges[spec.name].shapes[index] if spec.name in ranges else spec.shape for spec in inputs},
            )
        return
    for label, batch in (("smallest", 1), ("largest", largest)) if largest else (("usual", 1),):
        yield label, {spec.name: (batch, *spec.shape[1:]) if largest else spec.shape for spec in inputs}


def _warmup_input(spec: TensorSpec, dims: tuple[int, ...]) -> dict[str, Any]:
    """Random numbers for floating point; zeros else, since a random index or length may not be valid."""
    kind = "random_data" if spec.dtype.startswith(("float", "bfloat")) else "zero_data"
    return {"data_type": _data_type(spec), "dims": list(dims) or [1], kind: True}


def _max_batch(engine: Engine) -> tuple[int, str]:
    """Triton's `max_batch_size` and why; 0 where the first dimension is not an open batch that Triton can split off."""
    signature = engine.signature
    if signature.row_dependence is None and not signature.batch_axis:
        return 0, "the batch is fixed, or is not the first dimension of every input"
    try:
        layout = BatchLayout.from_signature(signature, engine.passport.profiles)
    except UsageError as error:
        return 0, error.message
    if flat := [spec.name for spec in signature if len(spec.shape) == 1]:
        return 0, f"`{flat[0]}` has no dimension besides the batch, which Triton's `dims` cannot express"
    if layout.max_rows is None:
        return _UNLIMITED_BATCH, "the engine takes any batch; this is a limit for requests"
    return layout.max_rows, "the engine's largest batch"


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    dims = list(spec.shape[1:] if batched else spec.shape)
    fields: dict[str, Any] = {"name": spec.name, "data_type": _data_type(spec)}
    return fields | ({"dims": dims} if dims else {"dims": [1], "reshape": {}})  # `dims` must not be empty


def _data_type(spec: TensorSpec) -> str:
    return f"TYPE_{protocol_dtype(spec).replace('BYTES', 'STRING')}"

"""The model of Triton's Python backend that `deploy triton --backend python` names in model.py.

Interface: "Python Backend" of Triton's documentation (`TritonPythonModel`, `triton_python_backend_utils`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # Triton has it on the path of the processes it starts

import trt_engine as te
from trt_engine.errors import TrtEngineError
from trt_engine.open_inference.wire_tensors import decode_text, encode_text
from trt_engine.runtime.batch_rows import BatchLayout, concat, row_count, split
from trt_engine.tensors import Tensors

_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 503: "UNAVAILABLE", 504: "UNAVAILABLE"}
"""Triton's code by an error's HTTP status; any other is INTERNAL."""


class TritonPythonModel:
    """One instance of a model: the engine beside model.py, checked by its passport, on the instance's device.

    `execute` takes the requests that Triton's scheduler formed to a batch: those of the same shapes are joined, padded to
    a batch of the engine's profile, and each gets its rows. A batch that fails is run request by request, so that only
    those fail that are at fault. It does not wait for requests and does not choose sizes: `dynamic_batching` of
    config.pbtxt does.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine; raises `EngineError`, which Triton logs as the reason, where it cannot run here."""
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        self._runner = te.load(folder / config["parameters"]["engine"]["string_value"], device=device)
        signature, profiles = self._runner.signature, self._runner.profiles
        self._layout = BatchLayout.from_signature(signature, profiles) if config["max_batch_size"] else None
        self._inputs = [spec.name for spec in signature.inputs]
        self._outputs = [spec.name for spec in signature.outputs]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response a request, in their order: outputs as the request names them, or the error."""
        feeds: dict[int, dict[str, Any]] = {}
        groups: dict[Any, list[int]] = {}
        found: dict[int, Tensors | TrtEngineError] = {}
        for index, request in enumerate(requests):
            try:
                feeds[index] = {name: _array(request, name) for name in self._inputs}
            except TrtEngineError as error:
                found[index] = error
                continue
            key = index if self._layout is None else tuple(array.shape[1:] for array in feeds[index].values())
            groups.setdefault(key, []).append(index)
        for members in groups.values():
            found.update(zip(members, self._run([feeds[index] for index in members]), strict=True))
        return [self._response(request, found[index]) for index, request in enumerate(requests)]

    def _run(self, parts: list[dict[str, Any]]) -> list[Tensors | TrtEngineError]:
        try:
            if self._layout is None:
                return [self._runner.infer(parts[0])]
            counts = [row_count(part) for part in parts]
            padded = self._layout.bucket_for(sum(counts))
            return [*split(self._runner.infer(concat(parts, sum(counts), padded)), counts, padded)]
        except TrtEngineError as error:
            return [error] if len(parts) == 1 else [result for part in parts for result in self._run([part])]

    def _response(self, request: Any, result: Tensors | TrtEngineError) -> Any:
        if isinstance(result, TrtEngineError):
            code = getattr(triton.TritonError, _CODES.get(result.http_status, "INTERNAL"))
            return triton.InferenceResponse(error=triton.TritonError(result.message, code))
        wanted = request.requested_output_names()
        return triton.InferenceResponse([_tensor(name, result[name]) for name in self._outputs if name in wanted])

    def finalize(self) -> None:
        """Unload the engine."""
        self._runner.close()


def _array(request: Any, name: str) -> Any:
    array = triton.get_input_tensor_by_name(request, name).as_numpy()
    if array.dtype != object:
        return array
    return np.array([decode_text(name, item) for item in array.ravel()], object).reshape(array.shape)


def _tensor(name: str, array: Any) -> Any:
    if array.dtype == object:
        array = np.array([encode_text(item) for item in array.ravel()], object).reshape(array.shape)
    return triton.Tensor(name, np.ascontiguousarray(array))

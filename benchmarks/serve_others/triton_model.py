"""Triton: a model of its Python backend, batchable; `MODEL` is the file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = onnxruntime.InferenceSession(os.environ["MODEL"], providers=["CPUExecutionProvider"])
        self.input, self.output = self.session.get_inputs()[0].name, self.session.get_outputs()[0].name

    def execute(self, requests: list[Any]) -> list[Any]:
        parts = [triton.get_input_tensor_by_name(request, self.input).as_numpy() for request in requests]
        (rows,) = self.session.run(None, {self.input: np.concatenate(parts)})
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return [triton.InferenceResponse([triton.Tensor(self.output, part)]) for part in np.split(rows, ends)]

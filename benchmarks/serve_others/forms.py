"""What the servers of others have in common: one session, and the form of a request.

`MODEL` is the file, `FORM` is `json` (numbers) or `base64` (the bytes of float32), `BATCHING` is 1 or 0.
"""

from __future__ import annotations

import base64
import os
from typing import Any

import numpy as np
import onnxruntime

BATCHING = os.environ.get("BATCHING") == "1"
BASE64 = os.environ.get("FORM") == "base64"
MAX_BATCH, WAIT_S = 16, 0.005


class Model:
    """An ONNX Runtime session as its documentation makes one, with one input and one output."""

    def __init__(self) -> None:
        self.session = onnxruntime.InferenceSession(os.environ["MODEL"], providers=["CPUExecutionProvider"])
        (given,) = self.session.get_inputs()
        self.name, self.shape = given.name, tuple(given.shape[1:])

    def run(self, x: Any) -> Any:
        return self.session.run(None, {self.name: x})[0]

    def row(self, sent: Any) -> Any:
        """One row, from what a request has."""
        if BASE64:
            return np.frombuffer(base64.b64decode(sent), np.float32).reshape(self.shape)
        return np.asarray(sent, np.float32).reshape(self.shape)


def encoded(row: Any) -> Any:
    """One row, as an answer has it."""
    return base64.b64encode(row.tobytes()).decode() if BASE64 else row.tolist()

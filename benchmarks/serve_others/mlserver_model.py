"""MLServer: a custom runtime, with its adaptive batching (in `model-settings.json`)."""

from __future__ import annotations

import numpy as np
from forms import BASE64, Model
from mlserver import MLModel
from mlserver.codecs import Base64Codec, NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Runtime(MLModel):
    async def load(self) -> bool:
        self.runner = Model()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        if BASE64:
            rows = Base64Codec.decode_input(payload.inputs[0])
            x = np.stack([np.frombuffer(row, np.float32).reshape(self.runner.shape) for row in rows])
            output = Base64Codec.encode_output("y", [row.tobytes() for row in self.runner.run(x)])
        else:
            x = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32, copy=False)
            output = NumpyCodec.encode_output("y", self.runner.run(x))
        return InferenceResponse(model_name=self.name, outputs=[output])

"""LitServe: a `LitAPI`, with its own batching."""

from __future__ import annotations

import sys
from typing import Any

import litserve
from forms import BATCHING, MAX_BATCH, WAIT_S, Model, encoded


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.runner = Model()

    def decode_request(self, request):  # LitServe reads the annotation: none means JSON
        return self.runner.row(request["input"])

    def predict(self, x: Any) -> Any:
        return self.runner.run(x) if BATCHING else self.runner.run(x[None])[0]

    def encode_response(self, output: Any) -> Any:
        return {"output": encoded(output)}


if __name__ == "__main__":
    api = Api(max_batch_size=MAX_BATCH, batch_timeout=WAIT_S) if BATCHING else Api()
    litserve.LitServer(api, accelerator="cpu").run(
        host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error"
    )

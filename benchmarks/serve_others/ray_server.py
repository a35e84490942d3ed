"""Ray Serve: a deployment with one replica; the body is bytes for a large input, which Starlette's request allows."""

from __future__ import annotations

import signal
import sys
from typing import Any

import numpy as np
import ray
from forms import BASE64, BATCHING, MAX_BATCH, WAIT_S, Model
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response


@serve.deployment(max_ongoing_requests=100)
class Served:
    def __init__(self) -> None:
        self.runner = Model()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_S)
    async def infer(self, rows: list[Any]) -> list[Any]:
        return [*self.runner.run(np.stack(rows))]

    async def __call__(self, request: Request) -> Any:
        if BASE64:
            row = np.frombuffer(await request.body(), np.float32).reshape(self.runner.shape)
        else:
            row = self.runner.row((await request.json())["input"])
        output = await self.infer(row) if BATCHING else self.runner.run(row[None])[0]
        return Response(output.tobytes()) if BASE64 else JSONResponse({"output": output.tolist()})


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Served.bind())
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()

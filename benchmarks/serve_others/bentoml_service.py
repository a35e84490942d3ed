"""BentoML: a service with one API, batchable or not."""

import bentoml
import numpy as np
from forms import BASE64, BATCHING, MAX_BATCH, Model, encoded

options = {"batchable": True, "max_batch_size": MAX_BATCH} if BATCHING else {}


@bentoml.service(traffic={"timeout": 60})
class Served:
    def __init__(self) -> None:
        self.runner = Model()

    if BASE64:

        @bentoml.api(**options)
        def predict(self, x: list[str]) -> list[str]:
            return [encoded(row) for row in self.runner.run(np.stack([self.runner.row(one) for one in x]))]

    else:

        @bentoml.api(**options)
        def predict(self, x: np.ndarray) -> np.ndarray:
            return self.runner.run(x.astype(np.float32, copy=False))

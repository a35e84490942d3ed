"""The application of Ray Serve that `deploy ray` names in app.yaml: replicas with the application of `serve`."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info
from trt_engine.engine import Engine
from trt_engine.verbs.build.run import build
from trt_engine.verbs.serve.config import ServeConfig
from trt_engine.verbs.serve.http_app import HttpApp
from trt_engine.verbs.serve.inference import Admission, Service
from trt_engine.verbs.serve.metrics import make_exposition
from trt_engine.verbs.serve.model_config import server_settings
from trt_engine.verbs.serve.repository import Repository
from trt_engine.verbs.serve.served_model import Mailbox
from trt_engine.verbs.serve.shared_memory import CudaMemory, SharedMemory


def choose_backend(wanted: str) -> str:
    """The backend that builds on this node: as wanted, TensorRT where it and a GPU are, else ONNX Runtime."""
    if wanted:
        return wanted
    return "tensorrt" if info.gpus() and importlib.util.find_spec("tensorrt") is not None else "onnxruntime"


def build_here(path: Path, backend: str) -> Engine:
    """The engine of a model for this node's device, from the store where it was built before."""
    return build(path, config=BuildConfig(backend=choose_backend(backend)))


class Engines:
    """One replica: every model of the application, behind the protocol of `serve`."""

    async def __init__(self, folder: str, models: dict[str, str], backend: str) -> None:  # type: ignore[misc]
        config = ServeConfig(host="0.0.0.0", shared_memory=False)  # names of the host are the proxy's
        repository = Repository(
            None,
            {name: Path(folder) / file for name, file in models.items()},
            server_settings(config, RuntimeConfig()),
            build=lambda path, settings: build_here(path, backend),
        )
        self._service = Service(
            repository=repository,
            memory=SharedMemory(False),
            cuda_memory=CudaMemory(False),
            admission=Admission(config.max_in_flight, config.max_in_flight_size),
            mailbox=Mailbox(asyncio.get_running_loop()),
            explicit=False,
            strict=True,
        )
        await repository.load_all()
        reasons = [f"{name}: {reason}" for name, model in repository.models.items() for reason in model.reasons()]
        if reasons:
            raise RuntimeError("; ".join(reasons))  # Serve shows it, and tries again
        self._service.admission.started = True
        self._app = HttpApp(self._service, config, None, make_exposition(self._service))

    async def __call__(self, request: Request) -> Response:
        scope = request.scope
        status, headers, parts = await self._app.respond(
            scope["method"], quote(scope["path"]).encode(), scope["headers"], request.receive
        )
        body = b"".join(parts)
        answer = Response(body, status_code=status)
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        answer.raw_headers = [(name, value) for name, value in headers]
        return answer

    async def check_health(self) -> None:
        """Raise where a model cannot answer any more: Serve starts another replica."""
        for name, model in self._service.repository.models.items():
            for reason in model.reasons():
                raise RuntimeError(f"{name}: {reason}")

    async def __del__(self) -> None:
        await self._service.repository.close()


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application of `app.yaml`: `args` are its folder, its models and the backend that builds them."""
    deployment = serve.deployment(name="Engines")(Engines)
    return deployment.bind(args["folder"], args["models"], args.get("backend", ""))

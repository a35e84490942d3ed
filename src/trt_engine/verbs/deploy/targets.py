"""Targets of `deploy`: their settings class, their writer and their help, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trt_engine.verbs.deploy.config import DeepstreamConfig, RayConfig, TritonConfig

if TYPE_CHECKING:
    from trt_engine.verbs.deploy.job import DeployJob, Written


@dataclass(frozen=True, slots=True)
class Target:
    """A system that runs engines, and what `deploy` writes for it."""

    config: type
    """Class of its settings: a `Config` of `config/deploy.py`."""
    writer: str
    """`module:function` under `deployment`, imported when needed: `(DeployJob) -> Written`."""
    short_help: str
    help: str
    """Text of `--help`; a paragraph that starts with `\\b` is not wrapped."""
    takes_models: bool = False
    """Whether a source may be an ONNX model, built where it runs; else every source is an engine."""
    max_sources: int | None = None

    def load_writer(self) -> Callable[[DeployJob], Written]:
        module, _, function = self.writer.partition(":")
        writer: Callable[[DeployJob], Written] = getattr(
            importlib.import_module(f"trt_engine.verbs.deploy.{module}"), function
        )
        return writer


TARGETS: dict[str, Target] = {
    "triton": Target(
        TritonConfig,
        "triton:write",
        "A model repository with config.pbtxt.",
        """Write a Triton model repository: NAME/1/model.plan|model.onnx with its passport, and NAME/config.pbtxt.

        Batching, instances and wait come from the `size` run that measured the engine (--sized). `trt-engine serve
        --model-repository DIR` opens the same folder.

        \b
          trt-engine deploy triton detector.engine -o models
          trt-engine deploy triton detector=a.engine ranker=b.engine.onnx -o models --sized runs/detector
        """,
    ),
    "deepstream": Target(
        DeepstreamConfig,
        "deepstream:write",
        "Configurations of nvinfer and deepstream-app.",
        """Write nvinfer's configuration (key file and YAML), labels and a deepstream-app pipeline for a TensorRT engine.

        A MODEL is built by nvinfer at its first start. What nvinfer makes of an image by these keys is compared with the
        pre-processing that the model declares; --check compares a configuration of yours.

        \b
          trt-engine deploy deepstream detector.engine -o pipeline --sized runs/detector
          trt-engine deploy deepstream detector.onnx -o pipeline --source rtsp://camera/1 --check config_infer.txt
        """,
        takes_models=True,
        max_sources=1,
    ),
    "ray": Target(
        RayConfig,
        "ray:write",
        "An application of Ray Serve, scaled by its queue.",
        """Write an application of Ray Serve: app.yaml, with the engines and models beside it.

        Replicas answer the protocol of `trt-engine serve`, and their number follows the requests that wait. A MODEL is built
        on the node where a replica starts, once for each kind of GPU, into the node's store.

        \b
          trt-engine deploy ray detector.onnx -o app --gpus 1 --max-replicas 8
          trt-engine deploy ray ranker.engine.onnx -o app
        """,
        takes_models=True,
    ),
}

"""Settings of `deploy`, one class for each target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import as_path
from trt_engine.config.precision import PREPROCESS_METAVAR
from trt_engine.config.settings import Config, check_limits, opt
from trt_engine.errors import UsageError
from trt_engine.units import parse_milliseconds


def parse_folder(value: Path | str) -> Path:
    """One folder of several."""
    return as_path(value, "`sized`")


def parse_uri(value: str) -> str:
    """The address of a source: `rtsp://...`, `file:///...`."""
    if "://" not in value or any(letter.isspace() for letter in value):
        raise UsageError(f"`{value}` is not a URI", hint="`rtsp://camera/stream`, `file:///videos/a.mp4`")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig(Config):
    """Settings of `deploy triton`: how the models of the repository are scheduled."""

    sized: tuple[Path, ...] = opt(
        (), "folder of a `size` run: the engine it measured is batched as measured (repeatable)", parse=parse_folder,
        metavar="DIR", multiple=True,
    )  # fmt: skip
    backend: str = opt(
        "native", "what runs the engines: Triton's backend for them, or its Python backend with trt-engine",
        choices=("native", "python"),
    )  # fmt: skip
    instances: int | None = opt(None, "execution instances of each model on a device [default: measured, else 1]", ge=1)
    max_wait_ms: float | None = opt(
        None, "longest wait of a request for others of its batch [default: measured, else 0]",
        parse=parse_milliseconds, metavar="MS", ge=0,
    )  # fmt: skip
    warmup: bool = opt(True, "have Triton run the smallest, usual and largest batch before a model is ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepstreamConfig(Config):
    """Settings of `deploy deepstream`: the sources, and what the pipeline is sized by."""

    sized: tuple[Path, ...] = opt(
        (), "folder of a `size` run: streams, batch, timeout and interval as measured", parse=parse_folder, metavar="DIR",
        multiple=True,
    )  # fmt: skip
    streams: int | None = opt(None, "number of sources [default: measured, else the given ones]", ge=1)
    source: tuple[str, ...] = opt(
        (), "address of a source, rtsp or file (repeatable) [default: DeepStream's sample video]", parse=parse_uri,
        metavar="URI", multiple=True,
    )  # fmt: skip
    precision: str = opt("fp16", "precision nvinfer builds a MODEL in", choices=("fp32", "fp16"))
    secondary: tuple[Path, ...] = opt(
        (), "engine or model of a second network, which gets the objects of the first (repeatable)", parse=parse_folder,
        metavar="ENGINE|MODEL", multiple=True,
    )  # fmt: skip
    preprocess: Any = opt(
        None, "the model's pre-processing, instead of what it declares", metavar=PREPROCESS_METAVAR, group="Input",
        accepts="str | None",
    )  # fmt: skip
    image: Path | None = opt(
        None, "image to compare pre-processing on [default: a synthetic one]", parse=Path, metavar="FILE", group="Input"
    )
    check: Path | None = opt(
        None, "your nvinfer configuration to compare: pre-processing, batch, classes, labels", parse=Path, metavar="FILE",
        group="Input",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig(Config):
    """Settings of `deploy ray`: what a replica takes, and how many there are."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_replicas < self.min_replicas:
            raise UsageError(
                f"at most {self.max_replicas} replicas and at least {self.min_replicas}", hint="`--max-replicas N`"
            )

    min_replicas: int = opt(1, "replicas without load", ge=1)
    max_replicas: int = opt(4, "replicas under load", ge=1)
    target_requests: float = opt(8.0, "requests running and waiting for each replica that autoscaling aims at", gt=0)
    gpus: float = opt(0.0, "GPUs of a replica: 1, or a fraction where replicas share one", ge=0)
    backend: str = opt(
        "", "what builds MODELs on a node [default: tensorrt with a GPU where it is installed, else onnxruntime]"
    )
    port: int = opt(8000, "port of HTTP on every node", ge=1)
    host: str = opt("127.0.0.1", "address to listen at; the default is reached from the node itself alone")

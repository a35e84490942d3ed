"""An image file through a model that declares how images become inputs, as the page's form sends it. Needs pillow."""

from __future__ import annotations

import asyncio
from typing import Any

from trt_engine.errors import UsageError
from trt_engine.verbs.serve.inference import InferRequest, Service
from trt_engine.verbs.serve.served_model import ServedVersion
from trt_engine.verbs.serve.statistics import Timing

_MIN_SCORE, _TOP = 0.25, 5


async def infer_image(service: Service, served: ServedVersion, raw: bytes, timing: Timing) -> dict[str, Any]:
    """Detections in pixels of the image, or the best classes; `UsageError` for what is not an image, or without pillow."""
    from trt_engine.vision.image_inference import ImageRunner

    if served.vision is None:
        raise UsageError(
            f"`{served.name}` does not declare how an image becomes its input", hint="tensors, at `/infer`"
        )
    nbytes = await asyncio.to_thread(ImageRunner.decoded_nbytes, raw)
    if nbytes > service.admission.max_bytes:
        raise UsageError(
            f"the image takes {nbytes} bytes decoded, {service.admission.max_bytes} are allowed",
            hint="a smaller one, or `--max-in-flight-size` of `trt-engine serve`",
        )
    service.take(nbytes)
    try:
        image = await asyncio.to_thread(ImageRunner.parse, raw, served.vision, served.signature)
        outputs = await service.run(served, InferRequest(feeds=image.feeds), timing)
        return (await asyncio.to_thread(image.decode, outputs, _MIN_SCORE, _TOP)).fields
    finally:
        service.admission.forget(nbytes)

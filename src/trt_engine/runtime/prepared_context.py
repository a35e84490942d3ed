"""`PreparedContext`: an execution context with its shapes, bound buffers and captured graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from trt_engine.config.profiles import Profile
from trt_engine.device import Buffer, Graph, Stream
from trt_engine.errors import TrtEngineError
from trt_engine.protocols import Context
from trt_engine.tensors import Shape

Key = tuple[Any, ...]
"""Input shapes in signature order, then the values of shape inputs."""


class PreparedContext:
    """A context with its prepared shapes, bound buffers and captured graph, if any."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.key: Key | None = None
        """The prepared shapes; None before `prepare` and after a failure."""
        self.shapes: dict[str, Shape] = {}
        self.sized_outputs: list[tuple[str, Shape, np.dtype[Any]]] = []
        self.nbytes: dict[str, int] = {}
        self.dynamic_outputs: list[str] = []
        """Outputs whose sizes depend on the data."""
        self.bound_buffers: dict[str, Buffer] = {}
        self.graph: Graph | None = None

    def bind(self, buffers: dict[str, Buffer]) -> None:
        if len(buffers) != len(self.bound_buffers) or any(
            self.bound_buffers[name] is not buffer for name, buffer in buffers.items()
        ):
            self.context.bind(buffers)
            self.bound_buffers = buffers

    def enqueue(self, stream: Stream) -> None:
        if self.graph is not None:
            self.graph.replay(stream)
        else:
            self.context.enqueue(stream)

    def capture(self, stream: Stream) -> Graph:
        """Capture the inference that ran last as a graph; `TrtEngineError` with the reason where it cannot be captured."""
        if self.dynamic_outputs:
            raise TrtEngineError("the sizes of its outputs depend on the data")
        if reason := self.context.no_graph:
            raise TrtEngineError(reason)
        self.graph = stream.capture(self.context.enqueue)
        return self.graph

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
            self.graph = None
        self.bound_buffers = {}
        self.context.close()


def select_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape], host_inputs: Collection[str]) -> int:
    """The number of the first profile that contains these shapes; 0 if none does."""
    fits = (
        number
        for number, profile in enumerate(profiles)
        if all(span.contains(shapes[name]) for name, span in profile.ranges.items() if name not in host_inputs)
    )
    return next(fits, 0)

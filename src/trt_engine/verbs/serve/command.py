"""`trt-engine serve`: engines behind the Open Inference Protocol v2."""

from __future__ import annotations

import gc
import sys
from typing import Any

import click

from trt_engine.command_line import options, output, signals
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import setting_names
from trt_engine.verbs.serve.config import ServeConfig

_CLOSING_S = 5.0
"""Time to close engines and ports, after the time for requests."""
_SWITCH_S, _COLLECT = 1e-3, (10_000, 20, 20)
"""A thread's longest wait for the interpreter, and when it looks for garbage: a fifth of the throughput of images."""


@options.verb()
@click.argument("engines", metavar="[ENGINE|NAME=ENGINE]...", nargs=-1)
@options.config_options(ServeConfig)
@options.config_options(RuntimeConfig, leave_out=setting_names(RuntimeConfig) - {"contexts"})
@options.engine_options(leave_out=("batch", "shapes", "parity", "parity_rtol", "preprocess"))
def command(engines: tuple[str, ...], **values: Any) -> None:
    """Serve ENGINEs, or the models of a repository, over HTTP and gRPC until a signal.

    \b
      trt-engine serve digits.engine.onnx
      trt-engine serve --model-repository models --model-control-mode explicit --load-model digits
      trt-engine serve first=a.engine.onnx second=b.engine.onnx --contexts 2 --http-port 8080

    The result is printed when every model is ready or has a reason why not. The first signal ends the server after every
    accepted request was answered, a second one at once.
    """
    config: ServeConfig = options.config_from(ServeConfig, values)
    runtime, build, _ = options.engine_configs(values)

    from trt_engine.verbs.serve.run import serve

    server = serve(engines, config=config, runtime=runtime, build=build)
    signals.hand_over(server.drain, within_s=config.drain_delay_s + 2 * config.drain_timeout_s + _CLOSING_S)
    try:
        output.print_result(server.report)
        tune_interpreter()
        server.wait()
    finally:
        server.close()


def tune_interpreter() -> None:
    """Let this process serve: what there is by now stays, and threads take turns often."""
    gc.freeze()
    gc.set_threshold(*_COLLECT)
    sys.setswitchinterval(_SWITCH_S)

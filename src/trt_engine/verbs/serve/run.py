"""`serve`: engines behind the Open Inference Protocol v2, over HTTP and gRPC."""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.atomic_io import as_list, as_path, read_bounded
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import SetupError, UsageError
from trt_engine.public_function import public_function
from trt_engine.verbs.build.run import build as build_engine
from trt_engine.verbs.load import build_for_runtime, merge_run_settings
from trt_engine.verbs.serve.config import ServeConfig

if TYPE_CHECKING:
    from trt_engine.verbs.serve.model_config import ModelSettings
    from trt_engine.verbs.serve.server import Server
    from trt_engine.verbs.serve.tracing import Tracing
    from trt_engine.verbs.settings_types import ServeSettings

log = logging.getLogger(__name__)

_SUFFIX = re.compile(r"(\.engine)?(\.onnx|\.plan|\.engine|\.trt)?$")


@public_function
def serve(
    engines: Engine | Path | str | Sequence[Engine | Path | str] = (),
    *,
    config: ServeConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    **values: Unpack[ServeSettings],
) -> Server:
    """A running server of these engines and of `model_repository`, back when each model is ready or has a reason why not.

    An engine is named after its file (`digits.engine.onnx` is `digits`), or `NAME=PATH`. `values` are settings of
    `ServeConfig`, `RuntimeConfig` and (with `build_models`) `BuildConfig`. Use it in `with`, or call `close`, which answers
    every accepted request. Raises `UsageError` without a model, `SetupError` for an address that is not free or a missing
    package. An engine that cannot run does not raise: its model is not ready, with the reason.
    """
    chosen, run, made = merge_run_settings(values, runtime, build, config or ServeConfig())
    given = as_list(engines, "`engines`")
    named = name_engines(given)
    if not named and chosen.model_repository is None:
        raise UsageError(
            "there is nothing to serve", hint="`trt-engine serve model.engine.onnx`, or `--model-repository DIR`"
        )
    if chosen.model_repository is not None and not chosen.model_repository.is_dir():
        raise UsageError(f"`{chosen.model_repository}` is not a folder", hint="`NAME/VERSION/model.onnx` below it")
    token = _read_token(chosen)
    for path, flag in ((chosen.tls_cert, "--tls-cert"), (chosen.tls_key, "--tls-key")):
        if path is not None:
            _read_file(path, flag)
    try:
        from trt_engine.verbs.serve.repository import Repository
        from trt_engine.verbs.serve.server import Server
    except ImportError as error:
        raise SetupError(
            f"serving needs `{error.name}`, which is not installed", hint="`pip install 'trt-engine[serve]'`"
        ) from error
    from trt_engine.verbs.serve.config import is_loopback
    from trt_engine.verbs.serve.model_config import build_config, server_settings

    if token is None and not is_loopback(chosen.host):
        log.warning("anyone who reaches %s can use this server: `--token-file`, and `--tls-cert`", chosen.host)

    def build_served(path: Path, settings: ModelSettings) -> Engine:
        return build_engine(path, config=build_for_runtime(build_config(settings, path, made), run))

    def make_repository() -> Repository:
        return Repository(
            chosen.model_repository,
            named,
            server_settings(chosen, run),
            verify=not chosen.allow_changed,
            build=build_served if chosen.build_models else None,
        )

    return Server(make_repository, chosen, token, _make_tracing(chosen)).start()


def _make_tracing(config: ServeConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    try:
        from trt_engine.verbs.serve.tracing import Tracing
    except ImportError as error:
        raise SetupError(
            f"`--otlp-endpoint` needs `{error.name}`, which is not installed", hint="`pip install 'trt-engine[otel]'`"
        ) from error
    return Tracing(config.otlp_endpoint)


def name_engines(given: Sequence[Engine | Path | str]) -> dict[str, Path]:
    """Paths of engines by model name; `UsageError` for a name that comes twice or that no URL can hold."""
    named: dict[str, Path] = {}
    for item in given:
        name, path = "", item.path if isinstance(item, Engine) else as_path(item, "`engines`")
        if not isinstance(item, Engine) and not path.exists() and (parts := str(item).partition("="))[1]:
            name, path = parts[0], Path(parts[2])
        name = name or _SUFFIX.sub("", path.name.removesuffix(".json"))
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name):
            raise UsageError(f"`{name}` cannot be the name of a model", hint="`NAME=PATH` gives another one")
        if name in named:
            raise UsageError(f"two engines are named `{name}`", hint="`NAME=PATH` gives another name")
        if not path.exists():
            raise UsageError(f"no such file `{path}`", hint="the path of an engine")
        named[name] = path
    return named


def _read_token(config: ServeConfig) -> bytes | None:
    if config.token_file is None:
        return None
    token = _read_file(config.token_file, "--token-file").strip()
    if not token or not re.fullmatch(rb"[!-~]{1,4096}", token):
        raise UsageError(f"`{config.token_file}` has no token", hint="one word of printable ASCII")
    if config.token_file.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        log.warning("every user of this machine may read or write `%s`: `chmod 600`", config.token_file)
    return token


def _read_file(path: Path, flag: str) -> bytes:
    try:
        return read_bounded(path)
    except OSError as error:
        raise UsageError(
            f"cannot read `{path}`: {(error.strerror or str(error)).lower()}", hint=f"`{flag}` is the path of a file"
        ) from error

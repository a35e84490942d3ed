"""Inputs in system shared memory of this host, registered at a server for the time of a load test."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from trt_engine.errors import SetupError, TrtEngineError
from trt_engine.open_inference.wire_tensors import encode_tensor, protocol_dtype
from trt_engine.tensors import Signature, Tensors
from trt_engine.verbs.loadtest.clients import METADATA_TIMEOUT_S
from trt_engine.verbs.loadtest.http_metadata import HttpMetadata
from trt_engine.verbs.loadtest.inference_request import InputRegion
from trt_engine.verbs.loadtest.target import Target, tls_context

_FOLDER = Path("/dev/shm")


@contextlib.contextmanager
def register_inputs(
    target: Target, token: str | None, ca_file: Path | None, signature: Signature, feeds: Tensors
) -> Iterator[InputRegion]:
    """A region with these inputs, unregistered and removed afterwards.

    Raises `SetupError` without shared memory, `UsageError` for a server that does not take it.
    """
    client = HttpMetadata(target, tls_context(target, ca_file), token, METADATA_TIMEOUT_S)
    raw = {spec.name: encode_tensor(feeds[spec.name], protocol_dtype(spec)) for spec in signature.inputs}
    spans, end = dict[str, tuple[int, int]](), 0
    for name, data in raw.items():
        spans[name] = (end, len(data))
        end += len(data)
    name = f"trt-engine-load-{os.getpid()}-{secrets.token_hex(4)}"
    path = _FOLDER / name
    try:
        with path.open("xb") as file:
            path.chmod(0o600)
            file.write(b"".join(raw.values()))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SetupError(
            f"cannot write shared memory `{path}`: {error.strerror}", hint="leave `--shared-memory` out"
        ) from error
    try:
        client.register_region(name, f"/{name}", end)
        try:
            yield InputRegion(name, spans)
        finally:
            with contextlib.suppress(TrtEngineError):  # the server may have ended
                client.unregister_region(name)
    finally:
        path.unlink(missing_ok=True)

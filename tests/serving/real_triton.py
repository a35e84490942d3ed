"""A real Triton Inference Server with our engines in its Python backend, where its environment is installed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from patience import HANG_S, until

VARIABLE = "TRT_ENGINE_TEST_TRITON_PYTHON"


@dataclass(frozen=True)
class RealTriton:
    """Addresses of a running server; named as those of our `Server`."""

    http_address: str
    grpc_address: str


@contextlib.contextmanager
def real_triton(repository: Path, log: Path, *options: str) -> Iterator[RealTriton]:
    """Triton on the repository until the end of the block; a skip where it is not installed (`tools/triton-venv.sh`)."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"a real Triton is not installed (tools/triton-venv.sh, and {VARIABLE})")
    (packages,) = Path(python).parent.parent.glob("lib/python*/site-packages")
    server = packages / "pytriton/tritonserver"
    http, grpc, metrics = _free_ports(3)
    command = [
        str(server / "bin/tritonserver"), f"--model-repository={repository}", f"--backend-directory={server / 'backends'}",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", f"--http-port={http}", f"--grpc-port={grpc}",
        f"--metrics-port={metrics}", *options,
    ]  # fmt: skip
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"), "PATH": path}
    with log.open("wb") as lines, subprocess.Popen(command, stdout=lines, stderr=lines, env=environment) as process:
        try:
            until(lambda: process.poll() is not None or _answers(http), "Triton answers")
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            yield RealTriton(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()  # where a stub has crashed, it waits for it without end


def _answers(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=HANG_S),
    ):
        return True
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]

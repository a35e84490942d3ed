"""Engines, repositories and servers that the tests of `serve` share."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")

from onnx import TensorProto, helper

import trt_engine as te
from onnx_models import FLOAT, INT64, node, save
from trt_engine.verbs.serve.server import Server

ONNX_TYPES = {
    "BOOL": TensorProto.BOOL, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16, "BYTES": TensorProto.STRING,
}  # fmt: skip
"""The protocol's datatypes."""
ECHO = {
    "types": [name for name in ONNX_TYPES if name not in ("FP16", "BF16", "BYTES")],
    "halves": ["FP16", "BF16"],
    "words": ["BYTES"],
    "mixed": ["BF16", "BYTES"],
}
"""Datatypes by model that returns them."""


def double_model(path: Path, factor: float = 2.0) -> Path:
    """`x` (batch x 4) times a factor."""
    return save(
        path, [node("Mul", "x factor", "y")], {"x": (FLOAT, ["batch", 4])}, {"y": (FLOAT, ["batch", 4])},
        {"factor": np.float32(factor)},
    )  # fmt: skip


def echo_model(path: Path, datatypes: Sequence[str]) -> Path:
    """An input of each datatype (batch x 3), returned as it is."""
    inputs: dict[str, tuple[int, list[Any]]] = {f"in_{name}": (ONNX_TYPES[name], ["batch", 3]) for name in datatypes}
    outputs = {name.replace("in_", "out_"): spec for name, spec in inputs.items()}
    return save(path, [node("Identity", name, name.replace("in_", "out_")) for name in inputs], inputs, outputs)


def slow_model(path: Path) -> Path:
    """As many products of matrices as the input (one number) says: a request of chosen length."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("MatMul", ["matrix", "weight"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("index", INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("matrix", FLOAT, [128, 128]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, [128, 128]),
        ],
    )
    nodes = [
        helper.make_node("Squeeze", ["count"], ["times"]),
        helper.make_node("Loop", ["times", "", "start"], ["end"], body=body),
        helper.make_node("ReduceMax", ["end"], ["top"], keepdims=0),
        helper.make_node("Unsqueeze", ["top", "axis"], ["y"]),
    ]
    weights = {
        "weight": np.eye(128, dtype=np.float32), "start": np.ones((128, 128), np.float32), "axis": np.array([0], np.int64)
    }  # fmt: skip
    return save(path, nodes, {"count": (INT64, [1])}, {"y": (FLOAT, [1])}, weights)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines by name: `double`, `triple`, `slow`, and those of `ECHO`."""
    folder = tmp_path_factory.mktemp("engines")
    store = te.Store(folder / "store")
    models = {
        "double": double_model(folder / "double.onnx"),
        "triple": double_model(folder / "triple.onnx", 3.0),
        **{name: echo_model(folder / f"{name}.onnx", datatypes) for name, datatypes in ECHO.items()},
        "slow": slow_model(folder / "slow.onnx"),
    }
    made = {}
    for name, model in models.items():
        batch = None if name == "slow" else (1, 2, 8)
        target = folder / f"{name}.engine.onnx"
        made[name] = te.build(model, out=target, batch=batch, parity=False, store=store).path
    return made


def place(engine: Path, repository: Path, name: str, version: int = 1, config: str | None = None) -> Path:
    """An engine as a version of a model in a repository."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    te.Engine.open(engine).copy_to(folder / "model.onnx")
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config)
    return folder


def start(*engines: Path | str, **settings: Any) -> Server:
    """A server on free ports."""
    usual: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "drain_delay_s": 0.0}
    return te.serve(engines, **(usual | settings))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed")
    import ipaddress

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1)).add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tls")
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert, private


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the module."""
    running: list[Server] = []

    def run(*engines: Path | str, **settings: Any) -> Server:
        running.append(start(*engines, **settings))
        return running[-1]

    yield run
    for server in running:
        server.close()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "models"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)

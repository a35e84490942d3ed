"""Where requests go: a server's address with a model, read from a URL; and the request as bytes."""

from __future__ import annotations

import itertools
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec

from trt_engine.atomic_io import read_bounded
from trt_engine.errors import EngineError, UsageError
from trt_engine.format import format_address
from trt_engine.open_inference.wire_tensors import encode_tensor, protocol_dtype
from trt_engine.tensors import DTYPES, Signature, Tensors, TensorSpec

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}
_PATH = re.compile(
    r"(?P<base>(?:/[^/]+)*?)(?:/v2(?:/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/infer|/ready)?)?)?/?"
)
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}(/.*)?")
_EXAMPLE = "as `http://localhost:8000/v2/models/NAME` or `grpc://localhost:8001/v2/models/NAME`"


@dataclass(frozen=True, slots=True)
class Target:
    """A server that speaks the Open Inference Protocol v2, and the model on it."""

    interface: Literal["http", "grpc"]
    tls: bool
    host: str
    port: int
    base: str
    """Path before `/v2`: empty, or with its slash in front."""
    model: str | None
    version: str | None

    @property
    def address(self) -> str:
        return format_address(self.host, self.port)

    def __str__(self) -> str:
        scheme = self.interface + "s" * self.tls
        path = f"/v2/models/{quote(self.model, safe='')}" if self.model else ""
        version = f"/versions/{quote(self.version, safe='')}" if self.version else ""
        return f"{scheme}://{self.address}{self.base}{path}{version}"

    def model_path(self) -> str:
        """Path of the model's metadata over HTTP."""
        version = "" if self.version is None else f"/versions/{quote(self.version, safe='')}"
        return f"{self.base}/v2/models/{quote(self.model or '', safe='')}{version}"


def is_url(text: object) -> bool:
    """Whether this names a server; `UsageError` for `HOST:PORT` alone, which no file has as its name."""
    if not isinstance(text, str):
        return False
    if _ADDRESS.fullmatch(text) and not Path(text).exists():
        raise UsageError(
            f"`{text}` has no scheme, so it is neither a URL nor a file that is there",
            hint=f"`http://{text}`, or `grpc://{text}`",
        )
    return "://" in text


def parse_target(url: str, model: str | None, version: str | None) -> Target:
    """The server and model of a URL; `model` and `version` complete it. Raises `UsageError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"cannot read the URL `{url}`: {error}", hint=_EXAMPLE) from error
    if parts.scheme not in _PORTS:
        raise UsageError(f"`{url}` is {parts.scheme}, expected http, https, grpc or grpcs", hint=_EXAMPLE)
    if not parts.hostname or parts.query or parts.fragment or re.search(r"[\s\x00-\x1f]", url):
        raise UsageError(f"`{url}` is not the address of a server", hint=_EXAMPLE)
    if parts.username is not None:
        raise UsageError(
            "the URL has a user name or password", hint="`--token-file FILE` keeps a token out of the record"
        )
    found = _PATH.fullmatch(parts.path)
    if found is None:
        raise UsageError(f"cannot read the path `{parts.path}`", hint=_EXAMPLE)
    for name, given, own in (("model", model, found["model"]), ("version", version, found["version"])):
        if given is not None and own is not None and given != unquote(own):
            raise UsageError(
                f"the URL names the {name} `{unquote(own)}`, the option `{given}`", hint="leave one of them out"
            )
    own_model, own_version = (None if part is None else unquote(part) for part in (found["model"], found["version"]))
    return Target(
        "grpc" if parts.scheme.startswith("grpc") else "http", parts.scheme.endswith("s"), parts.hostname,
        port or _PORTS[parts.scheme], found["base"], model or own_model, version or own_version,
    )  # fmt: skip


def read_token(path: Path | None) -> str | None:
    """The bearer token in a file. Raises `UsageError`."""
    if path is None:
        return None
    try:
        token = read_bounded(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read a token from `{path}`: {error}", hint="one line of printable ASCII") from error
    if not token.isprintable() or not token or " " in token:
        raise UsageError(f"`{path}` does not hold a token", hint="one line of printable ASCII without blanks")
    return token


def tls_context(target: Target, ca_file: Path | None) -> ssl.SSLContext | None:
    """TLS settings of an https target; None for plain http. Raises `UsageError` for certificates that cannot be read."""
    if not target.tls:
        if ca_file is not None:
            raise UsageError("`--ca-file` is for https and grpcs", hint=f"leave it out for `{target}`")
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:
        raise UsageError(f"cannot read certificates from `{ca_file}`: {error}", hint="a PEM file") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


BINARY_EXTENSION = "binary_tensor_data"
_JSON_LESS = ("float16", "bfloat16")
MAX_TEXT, _MAX_RANK, _MAX_TENSORS = 300, 64, 1 << 12
"""Characters of a text from a server, dimensions of a tensor, and tensors of a model."""
Tensor = tuple[str, str, Sequence[int]]
_NAMES = {item.kserve_name: item.name for item in DTYPES.values() if item.kserve_name is not None}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The metadata of a server and of one of its models."""

    server: str
    extensions: tuple[str, ...]
    versions: tuple[str, ...]
    signature: Signature
    info: dict[str, str] = field(default_factory=dict)
    """Platform and parameters of the metadata."""


def served_signature(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Signature:
    """The inputs and outputs by their names, types and shapes in the protocol.

    `EngineError` for an unknown type, and for a number, name or shape that is not one of tensors.
    """
    count = len(inputs) + len(outputs)
    for name, datatype, shape in itertools.chain(inputs, outputs):
        if datatype not in _NAMES:
            raise EngineError(
                f"the tensor `{name[:MAX_TEXT]}` has the unknown type `{datatype[:MAX_TEXT]}`",
                hint=f"expected {', '.join(_NAMES)}",
            )
        if len(name) > MAX_TEXT or len(shape) > _MAX_RANK or count > _MAX_TENSORS:
            raise EngineError(
                f"the tensor `{name[:80]}` is one of {count} and has {len(shape)} dimensions",
                hint=f"at most {_MAX_TENSORS} tensors of {_MAX_RANK} dimensions, with names of {MAX_TEXT} characters",
            )

    def spec(name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
        return TensorSpec(name, _NAMES[datatype], tuple(max(int(size), -1) for size in shape))

    return Signature(tuple(itertools.starmap(spec, inputs)), tuple(itertools.starmap(spec, outputs)))


@dataclass(frozen=True, slots=True)
class InputRegion:
    """A registered region of shared memory with the raw tensors of all inputs, one after another."""

    name: str
    spans: dict[str, tuple[int, int]]
    """Offset and size in bytes by input."""

    def parameters(self, name: str) -> dict[str, Any]:
        """The metadata of this input in a request."""
        offset, nbytes = self.spans[name]
        return {"shared_memory_region": self.name, "shared_memory_offset": offset, "shared_memory_byte_size": nbytes}


def http_request(
    target: Target,
    signature: Signature,
    feeds: Tensors,
    *,
    binary: bool,
    timeout_us: int | None,
    token: str | None,
    region: InputRegion | None = None,
) -> bytes:
    """One whole POST request, head and body; without the tensors where they are in a region.

    Raises `UsageError` for types that JSON does not have.
    """
    inputs: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    for spec in signature.inputs:
        array, datatype = feeds[spec.name], protocol_dtype(spec)
        item: dict[str, Any] = {"name": spec.name, "shape": list(array.shape), "datatype": datatype}
        if region is not None:
            item["parameters"] = region.parameters(spec.name)
        elif binary:
            parts.append(encode_tensor(array, datatype))
            item["parameters"] = {"binary_data_size": len(parts[-1])}
        elif spec.dtype in _JSON_LESS:
            raise UsageError(
                f"input `{spec.name}` is {spec.dtype}, which JSON does not have", hint="`--binary` sends it as bytes"
            )
        else:
            item["data"] = [
                one.decode(errors="replace") if isinstance(one, bytes) else one for one in array.ravel().tolist()
            ]
        inputs.append(item)
    document: dict[str, Any] = {"inputs": inputs}
    parameters: dict[str, Any] = {"binary_data_output": True} if binary else {}
    if timeout_us is not None:
        parameters["timeout"] = timeout_us
    head = msgspec.json.encode(document | ({"parameters": parameters} if parameters else {}))
    nbytes = len(head) + sum(map(len, parts))
    fields = [
        f"POST {target.model_path()}/infer HTTP/1.1", f"Host: {target.address}",
        f"Content-Type: application/{'octet-stream' if binary else 'json'}", f"Content-Length: {nbytes}",
    ]  # fmt: skip
    fields += [f"Inference-Header-Content-Length: {len(head)}"] if binary else []
    fields += [f"Authorization: Bearer {token}"] if token is not None else []
    return b"".join(["\r\n".join([*fields, "", ""]).encode(), head, *parts])  # in memory once more, and not thrice


def tensor_triples(items: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The tensors of a metadata document. Raises `KeyError` or `TypeError` for what is not one."""
    for item in items:
        texts = isinstance(item["name"], str) and isinstance(item["datatype"], str)
        if not texts or not all(isinstance(size, int) for size in item["shape"]):
            raise TypeError("expected a name, a type, and whole numbers as the shape")
    return [(item["name"], item["datatype"], item["shape"]) for item in items]

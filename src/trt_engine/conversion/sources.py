"""Detects what a text names: a model file or folder (by content), a Python factory, or a name on a hub."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, Literal

from trt_engine.atomic_io import as_path, open_regular, os_errors, read_bounded
from trt_engine.conversion.torch.archive_check import code_in_archive, open_checked_archive
from trt_engine.conversion.torch.pickle_check import code_in_pickles
from trt_engine.errors import ModelError, UsageError
from trt_engine.format import library_reason
from trt_engine.plan_header import NATIVE_PACKAGE, NATIVE_PACKAGE_HINT, detect_plan, has_native_code

Kind = Literal[
    "onnx", "torch-module", "torchscript", "exported-program", "state-dict", "huggingface", "timm",
    "saved-model", "frozen-graph", "keras", "tflite", "tensorrt-plan",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """A source, its kind, and the evidence."""

    text: str
    """As given by the user."""
    kind: Kind
    evidence: str
    """Evidence for the kind: `its bytes 4 to 8 are TFL3`."""
    path: Path | None = None
    """The file or folder; for a module, its `.py` file."""
    name: str | None = None
    """The name on a hub, or the dotted name of a Python module."""
    factory: str | None = None
    """Callable of a Python module."""
    value: Any = None
    """A module or a program of PyTorch that is in memory."""
    code: tuple[str, ...] = ()
    """Executable content beyond data and operators; requires `trust_source`."""


IN_TORCH = ("torch-module", "torchscript", "exported-program")


def model_kind(value: object) -> Kind | None:
    """The kind of a model in memory: ONNX, Keras or PyTorch; None for none. Imports no library: one that is not imported
    has made no object."""
    known: tuple[tuple[Kind, str, str], ...] = (
        ("onnx", "onnx", "ModelProto"),
        ("torchscript", "torch.jit", "ScriptModule"),
        ("exported-program", "torch.export", "ExportedProgram"),
        ("torch-module", "torch.nn", "Module"),
        ("keras", "keras", "Model"),
    )
    for kind, module, name in known:
        made = getattr(sys.modules.get(module), name, None)
        if isinstance(made, type) and isinstance(value, made):
            return kind
    return None


def detect_source(text: Any, *, trust_source: bool = False) -> Source:
    """The source that `text` names, or that it is; `ModelError` or `UsageError` otherwise.

    Files are detected by content, never by suffix, without executing or unpickling anything. A file that would run its
    own code when opened is rejected unless `trust_source` is set.
    """
    kind = model_kind(text)
    if kind in IN_TORCH:
        name = type(text).__name__ if kind == "torch-module" else kind
        return Source(name, kind, "it is in memory", name=name.replace("-", "_"), value=text)
    source = _source(text)
    if source.code and not trust_source:
        _reject_code(source)
    return source


def _source(text: str | Path) -> Source:
    given = text if isinstance(text, str) else str(as_path(text, "`source`"))
    if not given.strip() or "\0" in given:
        raise UsageError(
            f"{given!r} names no source", hint="a model's file or folder, `file.py:factory`, or a name on a hub"
        )
    path = Path(given)
    with os_errors(path, "read"):
        if path.is_dir():
            return _folder(given, path)
        if path.is_file():
            return _file(given, path)
        if path.exists():
            raise ModelError(f"`{given}` is not a regular file", hint="copy the model to a file first")
    return _name(given)


# ------------------------------------------------------------------------------------------------ names

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SUFFIXES = frozenset(
    ".onnx .pt .pth .pt2 .pb .h5 .hdf5 .keras .tflite .engine .plan .trt .ts .bin .ckpt .safetensors .py".split()
)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def _name(given: str) -> Source:
    if _ADDRESS.match(given):
        raise UsageError(f"`{given}` is an address, expected a file or a name", hint="download it, and name the file")
    place, colon, factory = given.rpartition(":")
    if colon and place in ("timm", "hf", "huggingface"):
        kind: Kind = "timm" if place == "timm" else "huggingface"
        return Source(given, kind, f"it begins with `{place}:`", name=factory)
    if colon and place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"no such file `{place}`", hint="write it as `file.py:factory`")
        _check_callable_name(factory, given)
        return Source(given, "torch-module", "it names a function of a Python file", Path(place), factory=factory)
    if colon and _DOTTED.fullmatch(place):
        _check_callable_name(factory, given)
        return Source(given, "torch-module", "it names a function of a Python module", name=place, factory=factory)
    if given.startswith("timm/") and _HUB.fullmatch(given):
        return Source(given, "timm", "it begins with `timm/`", name=given.removeprefix("timm/"))
    known_suffix = Path(given).suffix.lower() in _SUFFIXES
    folder = Path(given).parent
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    near = [item.name for item in there if item.suffix in _SUFFIXES]
    alike = get_close_matches(
        Path(given).name, [*near, *(item.name for item in there if item.is_dir())], n=1, cutoff=0.8
    )
    if _HUB.fullmatch(given) and not known_suffix and not alike and given.count("/") <= 1:
        return Source(given, "huggingface", "no such file, and it has the form of a hub name", name=given)
    raise ModelError(
        f"no such file or folder `{given}`",
        hint=f"did you mean `{folder / alike[0]}`? (a name on a hub is written `hf:{given}`)"
        if alike and not known_suffix
        else f"did you mean `{folder / alike[0]}`?"
        if alike
        else f"in that folder: {', '.join(near[:3])}"
        if near
        else "a Python factory is written `package.module:factory`",
    )


def _check_callable_name(factory: str, given: str) -> None:
    if not _DOTTED.fullmatch(factory):
        raise UsageError(
            f"`{given}` names no function after the colon",
            hint="write it as `package.module:factory` or `file.py:factory`",
        )


# ------------------------------------------------------------------------------------------------ folders


_SAVED_MODELS = ("saved_model.pb", "saved_model.pbtxt")


def _folder(given: str, path: Path) -> Source:
    graph = next((item for name in _SAVED_MODELS if (item := path / name).is_file()), None)
    if graph is not None:
        for item in (graph, *path.glob("variables/*")):
            open_regular(item, error=ModelError).close()
        return Source(given, "saved-model", "it is a folder with saved_model.pb", path)
    if (path / "config.json").is_file():
        code = _code_in_folder(path)
        return Source(given, "huggingface", "it is a folder with config.json", path, name=str(path), code=code)
    inside = sorted(item.name for item in path.iterdir() if item.suffix.lower() in _SUFFIXES)
    if not inside:
        raise ModelError(
            f"`{given}` is a folder without saved_model.pb or config.json",
            hint="name the model's file, a SavedModel folder, or a Hugging Face folder",
        )
    raise ModelError(f"`{given}` is a folder", hint=f"name the file: `{path / inside[0]}`")


_WEIGHTS = re.compile(r"(pytorch_model|adapter_model|model|diffusion_pytorch_model).*\.(bin|pt|pth|ckpt)")


def _code_in_folder(folder: Path) -> tuple[str, ...]:
    """Executable content of a Hugging Face folder: Python files, kernels from a hub, weights that are not tensors
    only."""
    found: list[str] = []
    config = _read_mapping(folder / "config.json", "is not JSON")
    if config.get("auto_map"):
        found.append("its config.json names custom Python code (`auto_map`)")
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        if "/" in str(config.get(name, "")):
            found.append(f"its config.json names a kernel on a hub (`{str(config[name])[:80]}`)")
    named = _weight_map(folder)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix == ".safetensors":
            open_regular(path, error=ModelError).close()
        if path.is_file() and (path.name in named or _WEIGHTS.fullmatch(path.name)):
            found += _code_in_weights(path)
    return tuple(dict.fromkeys(found))


def _read_mapping(path: Path, problem: str, key: str | None = None) -> dict[str, Any]:
    """The mapping in a JSON file, or the one at its key; `ModelError` with the problem for any other file."""
    try:
        root = json.loads(read_bounded(path, error=ModelError))
        root = root if key is None else root[key]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise ModelError(f"`{path}` {problem}: {library_reason(error)}", hint="copy the folder again") from error
    if not isinstance(root, dict):
        raise ModelError(f"`{path}` {problem if key else 'is not a mapping'}", hint="copy the folder again")
    return root


def _weight_map(folder: Path) -> set[str]:
    """Files named by the index of sharded weights."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.index.json")):
        names |= {str(name) for name in _read_mapping(path, "is not an index of weights", "weight_map").values()}
    for name in names:
        if "/" in name or "\\" in name or name.startswith("."):
            raise ModelError(f"`{folder}` names weights outside of it: `{name[:80]}`", hint="copy the folder again")
    return names


def _code_in_weights(path: Path) -> list[str]:
    with open_regular(path, error=ModelError) as file:
        head = file.read(64)
        file.seek(0)
        if head[:4] == b"PK\x03\x04":
            with open_checked_archive(file, f"`{path}`") as archive:
                found = code_in_archive(archive, f"`{path}`", kind="nested")
        else:
            found = [] if _safetensors(head) else code_in_pickles(file, f"`{path}`", strict=True)
    return [f"`{path.name}`: {item}" for item in found]


# ------------------------------------------------------------------------------------------------ files


def _file(given: str, path: Path) -> Source:
    with open_regular(path, error=ModelError) as file:
        head = file.read(64)
        if not head:
            raise ModelError(f"`{given}` is empty", hint="copy or download the file again")
        if product := detect_plan(path):
            return Source(given, "tensorrt-plan", f"it is a plan of {product}", path)
        if head[4:8] == b"TFL3":
            return Source(given, "tflite", "its bytes 4 to 8 are `TFL3`", path)
        if head[:4] == b"\x89HDF":
            return Source(given, "keras", "it begins as an HDF5 file", path)
        if head[:4] == b"PK\x03\x04":
            return _archive(given, path, file)
        if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
            return _pickle(given, path, file)
        if _safetensors(head):
            return Source(given, "state-dict", "it begins as a safetensors file", path)
        if path.suffix == ".py":
            raise UsageError(f"`{given}` is a Python file without a function to call", hint=f"`{given}:factory`")
        file.seek(0)
        return _protobuf(given, path, file)


def _safetensors(head: bytes) -> bool:
    """A length, and JSON after it."""
    return len(head) > 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < 1 << 31


def _archive(given: str, path: Path, file: BinaryIO) -> Source:
    """A model in a ZIP archive, with all members checked; see `archive_check`."""
    what = f"`{given}`"
    with open_checked_archive(file, what) as archive:
        names = archive.namelist()
        inner = [name.split("/", 1)[-1] for name in names]
        pickled = any(name.endswith("data.pkl") for name in names)
        if has_native_code(names):
            raise ModelError(f"`{given}` is {NATIVE_PACKAGE}", hint=NATIVE_PACKAGE_HINT)
        if "metadata.json" in names and "config.json" in names:
            return Source(given, "keras", "it is a ZIP archive with config.json and metadata.json", path)
        if "archive_format" in inner or any(name.startswith("serialized_exported_program") for name in inner):
            source = Source(given, "exported-program", "it is a ZIP archive of a torch.export program", path)
        elif "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
            source = Source(given, "torchscript", "it is a ZIP archive with TorchScript code", path)
        elif pickled:
            source = Source(given, "state-dict", "it is a ZIP archive with data.pkl and no code", path)
        else:
            raise ModelError(
                f"`{given}` is a ZIP archive of no known model ({', '.join(names[:3])})",
                hint="unpack it, and name the model's file",
            )
        return replace(source, code=tuple(dict.fromkeys(code_in_archive(archive, what, kind=source.kind))))


def _pickle(given: str, path: Path, file: BinaryIO) -> Source:
    """Legacy PyTorch weights, or any other pickle."""
    file.seek(0)
    return Source(
        given, "state-dict", "it is a pickle", path, code=tuple(code_in_pickles(file, f"`{given}`", strict=True))
    )


def _reject_code(source: Source) -> None:
    """`ModelError` for a file that would run its own code."""
    first = source.code[0]
    if source.kind == "huggingface":
        raise ModelError(
            f"`{source.text}` contains Python code: {first}",
            hint="read it, then `--trust-source`: it runs with your rights",
        )
    trust = "if you trust it, `--trust-source`: its code then runs with your rights"
    if source.kind == "state-dict":
        raise ModelError(
            f"`{source.text}` is a whole pickled object ({first}), and opening it runs code",
            hint="save its weights, `torch.save(module.state_dict(), 'weights.pt')`, and add `--factory file.py:build`; "
            f"or, {trust}",
        )
    what = {"torchscript": "TorchScript code", "exported-program": "a torch.export program"}.get(source.kind, "a model")
    raise ModelError(f"`{source.text}` is {what} that does more than compute: {first}", hint=trust)


def _protobuf(given: str, path: Path, file: BinaryIO) -> Source:
    """ONNX, a SavedModel or a frozen graph, by field numbers; see the three .proto files."""
    from trt_engine.graph.load import open_model, protobuf_fields

    met = protobuf_fields(file, path.stat().st_size) or set()
    if (7, 2) in met and met <= _ONNX_FIELDS:
        return Source(given, "onnx", "it is a protobuf with ONNX's graph", path)
    if met == {(1, 0), (2, 2)}:
        return Source(given, "saved-model", "it is the protobuf of a SavedModel", path.parent)
    if (1, 2) in met and met <= {(1, 2), (2, 2), (3, 0), (4, 2), (5, 2)}:
        return Source(given, "frozen-graph", "it is a protobuf with TensorFlow's nodes", path)
    open_model(path)  # its error identifies the format
    return Source(given, "onnx", "it is a protobuf with ONNX's graph", path)


_ONNX_FIELDS = {(1, 0), (2, 2), (3, 2), (4, 2), (5, 0), (6, 2), (7, 2), (8, 2), (14, 2), (20, 2), (25, 2), (26, 2)}

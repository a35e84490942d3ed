"""What a text names: a model file or folder told by its content, a Python factory, or a name on a hub."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from trt_engine.errors import ModelError, UsageError
from trt_engine.files import explain

__all__ = ["KINDS", "Kind", "Source", "detect"]

Kind = Literal[
    "onnx",
    "torch-module",
    "torchscript",
    "exported-program",
    "state-dict",
    "huggingface",
    "timm",
    "saved-model",
    "frozen-graph",
    "keras",
    "tflite",
    "tensorrt-plan",
]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Source:
    """One source: its kind, and what told so."""

    text: str
    """As it was given."""
    kind: Kind
    seen: str
    """How one sees it: `its bytes 4 to 8 are TFL3`."""
    path: Path | None = None
    """The file or folder; of a module the `.py` file."""
    name: str | None = None
    """The name on a hub, or the dotted name of a Python module."""
    factory: str | None = None
    """Of a module: what to call in it."""


def detect(text: str | Path) -> Source:
    """The source that `text` names; `ModelError` or `UsageError` for what is none.

    Files are told by their content, never by their suffix, and nothing in them is executed or unpickled.
    """
    given = str(text)
    if not given.strip() or "\0" in given:
        raise UsageError(
            f"{given!r} names no source", hint="a model's file or folder, `file.py:factory`, or a name on a hub"
        )
    path = Path(given)
    try:
        if path.is_dir():
            return _folder(given, path)
        if path.is_file():
            return _file(given, path)
        if path.exists():
            raise ModelError(f"`{given}` is no ordinary file", hint="copy the model to a file first")
    except OSError as error:
        raise explain(error, path, "read") from error
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
        _must_be_callable_name(factory, given)
        return Source(given, "torch-module", "it names a function of a Python file", Path(place), factory=factory)
    if colon and _DOTTED.fullmatch(place):
        _must_be_callable_name(factory, given)
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
        return Source(given, "huggingface", "there is no such file, and it is written as a name on a hub", name=given)
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


def _must_be_callable_name(factory: str, given: str) -> None:
    if not _DOTTED.fullmatch(factory):
        raise UsageError(
            f"`{given}` names no function after the colon",
            hint="write it as `package.module:factory` or `file.py:factory`",
        )


# ------------------------------------------------------------------------------------------------ folders


def _folder(given: str, path: Path) -> Source:
    if (path / "saved_model.pb").is_file() or (path / "saved_model.pbtxt").is_file():
        return Source(given, "saved-model", "it is a folder with saved_model.pb", path)
    if (path / "config.json").is_file():
        return Source(given, "huggingface", "it is a folder with config.json", path, name=str(path))
    inside = sorted(item.name for item in path.iterdir() if item.suffix.lower() in _SUFFIXES)
    if not inside:
        raise ModelError(
            f"`{given}` is a folder without saved_model.pb or config.json",
            hint="name the model's file, a SavedModel folder, or a Hugging Face folder",
        )
    raise ModelError(f"`{given}` is a folder", hint=f"name the file: `{path / inside[0]}`")


# ------------------------------------------------------------------------------------------------ files


def _file(given: str, path: Path) -> Source:
    with path.open("rb") as file:
        head = file.read(64)
        if not head:
            raise ModelError(f"`{given}` is empty", hint="copy or download the file again")
        if head[:4] == b"ftrt":
            return Source(given, "tensorrt-plan", "it begins with `ftrt`", path)
        if head[4:8] == b"TFL3":
            return Source(given, "tflite", "its bytes 4 to 8 are `TFL3`", path)
        if head[:4] == b"\x89HDF":
            return Source(given, "keras", "it begins as an HDF5 file", path)
        if head[:4] == b"PK\x03\x04":
            return _archive(given, path)
        if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
            return _pickle(given, path, _legacy(file), "it is a pickle")
        if _safetensors(head):
            return Source(given, "state-dict", "it begins as a safetensors file", path)
        if path.suffix == ".py":
            raise UsageError(f"`{given}` is Python, and nothing says what to call in it", hint=f"`{given}:factory`")
        file.seek(0)
        return _protobuf(given, path, file)


def _safetensors(head: bytes) -> bool:
    """A length, and JSON after it."""
    return len(head) > 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < 1 << 31


def _archive(given: str, path: Path) -> Source:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            inner = [name.split("/", 1)[-1] for name in names]
            if "metadata.json" in names and "config.json" in names:
                return Source(given, "keras", "it is a ZIP archive with config.json and metadata.json", path)
            if "archive_format" in inner or any(name.startswith("serialized_exported_program") for name in inner):
                return Source(given, "exported-program", "it is a ZIP archive of a torch.export program", path)
            if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
                return Source(given, "torchscript", "it is a ZIP archive with TorchScript code", path)
            pickled = [name for name in names if name.endswith("data.pkl")]
            if pickled:
                raw = archive.open(pickled[0]).read(_MOST_PICKLE)
                return _pickle(given, path, raw, "it is a ZIP archive with data.pkl and no code")
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"`{given}` is a damaged ZIP archive: {error}", hint="copy or download the file again"
        ) from error
    shown = ", ".join(names[:3])
    raise ModelError(
        f"`{given}` is a ZIP archive of no known model ({shown})", hint="unpack it, and name the model's file"
    )


_MOST_PICKLE = 1 << 26
_OF_TENSORS = ("collections OrderedDict", "torch ", "torch._utils ", "torch.storage ", "torch.serialization ", "numpy ",
               "numpy.core.multiarray ", "numpy._core.multiarray ", "_codecs encode", "torch._tensor ",
               "torch.nn.parameter Parameter", "argparse Namespace", "__builtin__ ", "builtins ", "pathlib ")  # fmt: skip


def _legacy(file: BinaryIO) -> bytes:
    """The pickle of an old checkpoint: behind a magic number, a protocol number and facts of the system."""
    file.seek(0)
    raw = file.read(_MOST_PICKLE)
    stream = BytesIO(raw)
    try:
        for _ in range(3):
            for _op in pickletools.genops(stream):
                pass
    except Exception:  # not written by torch.save: the pickle is the whole of it
        return raw
    return raw[stream.tell() :]


def _pickle(given: str, path: Path, raw: bytes, seen: str) -> Source:
    """A state dict, unless the pickle asks for classes that no tensor needs: then it is somebody's whole module."""
    for name in _globals_of(raw, given):
        if not name.startswith(_OF_TENSORS):
            raise ModelError(
                f"`{given}` is a whole pickled object (it asks for `{name.replace(' ', '.')}`), and unpickling runs code",
                hint="save its weights, `torch.save(module.state_dict(), 'weights.pt')`, and add `--factory file.py:build`",
            )
    return Source(given, "state-dict", seen, path)


def _globals_of(raw: bytes, given: str) -> Iterator[str]:
    """What a pickle would import, read from its opcodes alone."""
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name == "GLOBAL":
                yield str(argument)
            elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
                yield f"{strings[-2]} {strings[-1]}"
            elif isinstance(argument, str) and "UNICODE" in opcode.name:
                strings.append(argument)
    except Exception as error:
        if not strings:
            raise ModelError(
                f"the pickle in `{given}` cannot be read", hint="copy or download the file again"
            ) from error


def _protobuf(given: str, path: Path, file: BinaryIO) -> Source:
    """ONNX, a SavedModel's file or a frozen graph, by the numbers of their fields; see the three .proto files."""
    met = _fields(file, path.stat().st_size)
    if met is not None:
        if (7, 2) in met and met <= _ONNX_FIELDS:
            return Source(given, "onnx", "it is a protobuf with ONNX's graph", path)
        if met == {(1, 0), (2, 2)}:
            return Source(given, "saved-model", "it is the protobuf of a SavedModel", path.parent)
        if (1, 2) in met and met <= {(1, 2), (2, 2), (3, 0), (4, 2), (5, 2)}:
            return Source(given, "frozen-graph", "it is a protobuf with TensorFlow's nodes", path)
    from trt_engine.graph.load import open_model  # it says in words what the file is instead

    open_model(path)
    return Source(given, "onnx", "it is a protobuf with ONNX's graph", path)


_ONNX_FIELDS = {(1, 0), (2, 2), (3, 2), (4, 2), (5, 0), (6, 2), (7, 2), (8, 2), (14, 2), (20, 2), (25, 2), (26, 2)}


def _fields(file: BinaryIO, size: int) -> set[tuple[int, int]] | None:
    """Numbers and wire types of the top-level fields, contents skipped; None for what is no protobuf."""
    met: set[tuple[int, int]] = set()
    while file.tell() < size:
        key = _varint(file)
        if key is None or not key >> 3 or len(met) > 32:
            return None
        wire = key & 7
        met.add((key >> 3, wire))
        if wire == 0:
            if _varint(file) is None:
                return None
        elif wire in (1, 5):
            file.seek(8 if wire == 1 else 4, 1)
        elif wire == 2:
            length = _varint(file)
            if length is None or file.tell() + length > size:
                return None
            file.seek(length, 1)
        else:
            return None
    return met


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None

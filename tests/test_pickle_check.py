"""A pickle is read and never run: what it would import and call is found however it is written."""

from __future__ import annotations

import collections
import io
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_engine.conversion.torch.pickle_check import TENSOR_GLOBALS, PickleError, code_in_pickles, read_pickle
from trt_engine.errors import ModelError


def text(value: str) -> bytes:
    """A short text, as protocol 4 writes it."""
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def a_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


TOUCH = text("touch ran")
OPEN = text("open('ran','w')")
CALL = TOUCH + b"\x85R"
SYSTEM = a_global("os", "system")
P2, P4 = b"\x80\x02", b"\x80\x04"

ATTACKS: dict[str, bytes] = {
    "reduce": P2 + SYSTEM + CALL + b".",
    "protocol 0": b"cos\nsystem\n(S'touch ran'\ntR.",
    "inst": b"(S'touch ran'\nios\nsystem\n.",
    "obj": P2 + b"(" + SYSTEM + TOUCH + b"o.",
    "newobj": P2 + SYSTEM + TOUCH + b"\x85\x81.",
    "newobj_ex": P4 + SYSTEM + TOUCH + b"\x85}\x92.",
    "stack global": P4 + text("os") + text("system") + b"\x93" + CALL + b".",
    "stack global from the memo": P4 + text("os") + b"\x94" + text("system") + b"\x9400h\x00h\x01\x93" + CALL + b".",
    "stack global under other texts": P4 + text("os") + text("system") + text("x") + text("len") + b"00\x93" + CALL + b".",
    "stack global of duplicates": P4 + text("exec") + b"\x940" + text("builtins") + b"h\x00\x93" + OPEN + b"\x85R.",
    "memo written over": P4 + text("collections") + b"q\x00" + text("OrderedDict") + b"q\x0100" + text("os") + b"q\x00"
    + text("system") + b"q\x0100h\x00h\x01\x93" + CALL + b".",
    "put and get of a global": P2 + SYSTEM + b"p7\n0g7\n" + CALL + b".",
    "python 2 names": P2 + a_global("__builtin__", "execfile") + CALL + b".",
    "python 2 exec": P2 + a_global("__builtin__", "eval") + OPEN + b"\x85R.",
    "builtins exec": P2 + a_global("builtins", "exec") + OPEN + b"\x85R.",
    "builtins getattr": P2 + a_global("builtins", "getattr") + b".",
    "torch.load": P2 + a_global("torch", "load") + CALL + b".",
    "torch.hub": P2 + a_global("torch.hub", "load") + CALL + b".",
    "a dotted name": P4 + text("torch") + text("os.system") + b"\x93" + CALL + b".",
    "numpy.load": P2 + a_global("numpy", "load") + CALL + b".",
    "numpy's runstring": P2 + a_global("numpy.testing._private.utils", "runstring") + b".",
    "extension": P2 + b"\x82\x01.",
    "buffer": b"\x80\x05\x97.",
    "an encoding is a module": P2 + a_global("_codecs", "encode") + text("x") + text("evil_module") + b"\x86R.",
    "build on a class": P2 + a_global("torch", "Tensor") + b"}" + text("x") + b"K\x01sb.",
    "append to a class": P2 + a_global("collections", "OrderedDict") + b"K\x01a.",
    "call of a result": P2 + a_global("collections", "OrderedDict") + b")R)R.",
    "a global computed": P4 + a_global("collections", "OrderedDict") + b")R" + text("system") + b"\x93.",
    "code after a container": P2 + b"](" + SYSTEM + CALL + b"e.",
    "code in a memoised mark": P2 + b"((" + SYSTEM + CALL + b"1" + b"t.",
    "persistent id of a call": P2 + SYSTEM + CALL + b"Q.",
    "run before it breaks": P2 + SYSTEM + CALL + b"\xff",
    "run before it ends": P2 + SYSTEM + CALL + b"",
    "a long frame": P4 + b"\x95" + struct.pack("<Q", 1 << 40) + SYSTEM + CALL + b".",
}  # fmt: skip


def code_in(raw: bytes) -> str:
    """Why `convert` refuses a file that is this pickle; empty for one it opens."""
    try:
        return " ".join(code_in_pickles(io.BytesIO(raw), "the file", strict=True))
    except ModelError as error:
        return error.message


@pytest.mark.parametrize("name", ATTACKS)
def test_no_way_of_writing_code_into_a_pickle_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_in(ATTACKS[name])
    assert not list(tmp_path.iterdir()), "it was read, not run"


@pytest.mark.parametrize(
    "name", ["reduce", "protocol 0", "inst", "obj", "stack global from the memo", "memo written over"]
)
def test_the_refusal_names_what_the_pickle_imports(name: str) -> None:
    assert re.search(r"imports `(os|posix)\.system`", code_in(ATTACKS[name]))


@pytest.mark.parametrize("protocol", range(6))
def test_what_python_itself_writes_is_understood_in_every_protocol(protocol: int) -> None:
    value: dict[str, Any] = {
        "weights": collections.OrderedDict(a=[1, 2.5, None, True], b=(1, (2, 3), "text\nü")),
        "set": {1, 2},
        "counter": collections.Counter("abca"),
        "large": 1 << 300,
        "bytes": b"\x00" * 300,
        "long": "x" * 7_000,
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.float64(0.5),
        "shared": [[]] * 3,
    }
    if protocol < 2:  # Python writes a set of old as the call of a function that copies any object
        del value["set"], value["counter"], value["weights"], value["array"], value["scalar"]
    if protocol == 5:  # arrays are written out of band, by a function that torch.save never uses
        del value["array"]
    raw = pickle.dumps(value, protocol=protocol)
    assert code_in(raw + b"tail") == ""
    assert read_pickle(io.BytesIO(raw + b"tail")).opcodes > 10


def test_the_position_after_a_pickle_is_that_of_the_next() -> None:
    file = io.BytesIO(pickle.dumps(7, protocol=2) + pickle.dumps({"a": b"x" * 500}, protocol=4) + b"storage")
    assert read_pickle(file).value == 7
    read_pickle(file)
    assert file.read() == b"storage"


@pytest.mark.parametrize(
    "raw", [b"", b"\x80", b"\x80\x09.", b".", P2 + b"R.", P2 + b"h\x05.", P2 + b"1.", P4 + b"X\xff\xff\xff\xffabc"]
)  # fmt: skip
def test_what_breaks_the_format_is_refused(raw: bytes) -> None:
    assert "cannot be read" in code_in(raw) or "does not show" in code_in(raw)


def test_a_pickle_without_end_is_bounded_by_a_limit_that_the_message_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRT_ENGINE_MAX_PICKLE_OPCODES", "1000")
    with pytest.raises(PickleError, match="TRT_ENGINE_MAX_PICKLE_OPCODES"):
        read_pickle(io.BytesIO(P2 + b"N0" * 2000 + b"."))


def test_the_list_is_part_of_what_pytorch_itself_allows() -> None:
    unpickler = pytest.importorskip("torch._weights_only_unpickler")
    theirs = set(unpickler._get_allowed_globals())
    assert {f"{module}.{name}" for module, name in TENSOR_GLOBALS} <= theirs


SIZES: dict[str, bytes] = {
    "bytes": P2 + a_global("builtins", "bytearray") + b"\x8a\x05\x00\x00\x00\x00\x01\x85R.",
    "an array": P2 + a_global("numpy", "ndarray") + b"(\x8a\x05\x00\x00\x00\x00\x01t\x85R.",
    "an array of NumPy's pickles": P2
    + a_global("numpy._core.multiarray", "_reconstruct")
    + a_global("numpy", "ndarray")
    + b"\x8a\x05\x00\x00\x00\x00\x01\x85X\x01\x00\x00\x00b\x87R.",
    "a tensor": P2 + a_global("torch", "FloatTensor") + b"(\x8a\x05\x00\x00\x00\x00\x01tR.",
}


@pytest.mark.parametrize("name", SIZES)
def test_a_pickle_cannot_ask_for_memory_by_a_number(name: str) -> None:
    assert "of a size that the file does not hold" in code_in(SIZES[name])
    for honest in (np.arange(3.0), np.float32(2), bytearray(b"abc"), np.array(["a"])):
        for protocol in (2, 3, 4):
            assert code_in(pickle.dumps(honest, protocol)) == ""

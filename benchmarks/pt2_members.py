"""Archives of PyTorch (`.pt2`) whose directory is right and whose members are not: for the fuzzer, where it has PyTorch.

An exported program, and a package of compiled code with its passport. What is changed: the JSON of a program and of its
weights, names and copies of members, tensors, pickles, sizes, methods of compression.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trt_engine as te
from fuzz.mutate import evil_pickle, hostile_text, mutate_bytes, mutate_tree
from fuzz.readers import READERS
from fuzz.seeds import Files, Seeds

CODES = (2, 3, 4, 5, 6, 10, 11)
CALLS = {
    "net.pt2": (
        "inspect net.pt2", "convert net.pt2 -o out.onnx", "convert net.pt2 -o out.onnx", "build net.pt2 --no-parity",
        "infer net.pt2 --random", "lint net.pt2", "convert net.pt2 --dry-run -o out.onnx", "@serve net.pt2",
    ),
    "net.engine.pt2": (
        "inspect net.engine.pt2", "infer net.engine.pt2 --random", "bench net.engine.pt2 --dry-run",
        "convert net.engine.pt2 -o out.onnx", "build net.engine.pt2 --no-parity", "diff net.engine.pt2 net.engine.pt2",
        "@serve net.engine.pt2",
    ),
}  # fmt: skip
Members = list[tuple[str, bytes]]


def _serve(path: Path) -> None:
    te.serve(path, http_port=0, grpc_port=-1, metrics_port=-1, drain_delay_s=0.0).close()


READERS["@serve"] = _serve


def seeds(made: Seeds) -> list[Files]:
    """An exported program with an open batch, and a package with its passport."""
    if not _cache:
        _cache.extend([_program(), _package(made)])
    return _cache


_cache: list[Files] = []


def _program() -> Files:
    class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.relu(self.linear(x)) * self.scale + x.shape[0]

    file, sizes = io.BytesIO(), {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    torch.export.save(torch.export.export(Net().eval(), (torch.zeros(3, 4),), dynamic_shapes=sizes), file)
    return {"net.pt2": file.getvalue()}


def _package(made: Seeds) -> Files:
    """What the backend `inductor` writes, with four kilobytes of nothing in place of the compiled code."""
    members = [
        ("net/archive_format", b"pt2"), ("net/version", b"0"), ("net/.data/version", b"1"),
        ("net/data/aotinductor/model/model.wrapper.so", b"\x7fELF" + bytes(4000)),
        ("net/data/aotinductor/model/model_metadata.json", b'{"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX2"}'),
        ("net/data/weights/w.blob", bytes(64)), ("net/byteorder", b"little"),
    ]  # fmt: skip
    raw = _zip(members)
    passport = json.loads(made.engine["m.engine.onnx.json"])
    passport |= {"backend": "inductor", "payload": [_described(raw)]}
    passport["requirements"] |= {"library": "torch", "version": str(torch.__version__)}
    return {"net.engine.pt2": raw, "net.engine.pt2.json": json.dumps(passport).encode()}


def _described(raw: bytes) -> dict[str, Any]:
    return {"file": "net.engine.pt2", "nbytes": len(raw), "digest": f"sha256:{hashlib.sha256(raw).hexdigest()}"}


def draw(rng: random.Random, made_once: Seeds) -> tuple[Files, str]:
    """A file with members of its archive changed, the passport of a package, and a call that reads them."""
    made = dict(rng.choice(seeds(made_once)))
    name = next(iter(made))
    with zipfile.ZipFile(io.BytesIO(made[name])) as archive:
        members = [(item, archive.read(item)) for item in archive.namelist()]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):  # damaged before
            members = rng.choice(_CHANGES)(rng, members) or members
    made[name] = _zip(members, rng)
    if len(made) > 1 and rng.random() < 0.5:  # a passport that fits, or is damaged itself
        passport = json.loads(made[f"{name}.json"])
        passport["payload"] = [_described(made[name])]
        passport = passport if rng.random() < 0.5 else mutate_tree(rng, passport)
        made[f"{name}.json"] = json.dumps(passport).encode()
    return made, rng.choice(CALLS[name])


def _zip(members: Members, rng: random.Random | None = None) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # names that come twice
        for name, raw in members:
            info = zipfile.ZipInfo(name.encode(errors="replace").decode() or "x")
            if rng is not None and (len(raw) > 1 << 20 or rng.random() < 0.1):
                info.compress_type = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
            archive.writestr(info, raw)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------ changes of members


def _pick(rng: random.Random, members: Members, *endings: str) -> int | None:
    found = [at for at, (name, _) in enumerate(members) if not endings or name.endswith(endings)]
    return rng.choice(found) if found else None


def _with(members: Members, at: int, name: str, raw: bytes) -> Members:
    return [*members[:at], (name, raw), *members[at + 1 :]]


def _tree(rng: random.Random, members: Members) -> Members | None:
    """A value, key or branch of a JSON document."""
    at = _pick(rng, members, ".json")
    if at is None:
        return None
    name, raw = members[at]
    return _with(members, at, name, json.dumps(mutate_tree(rng, json.loads(raw))).encode())


def _leaf(rng: random.Random, members: Members) -> Members | None:
    """A text or number of the program itself: names, operators, expressions of sizes, shapes, types, arguments."""
    at = _pick(rng, members, "model.json", "config.json")
    if at is None:
        return None
    name, raw = members[at]
    root = json.loads(raw)
    places: list[tuple[Any, Any]] = []
    left = [root]
    while left:
        holder = left.pop()
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(value, dict | list):
                left.append(value)
            else:
                places.append((holder, key))
    if not places:  # an empty list
        return None
    key = rng.choice(_KEYS)
    wanted = [place for place in places if place[1] == key] or places
    holder, key = rng.choice(wanted)
    holder[key] = _other(rng, holder[key])
    return _with(members, at, name, json.dumps(root).encode())


_KEYS = (
    "target",
    "expr_str",
    "as_int",
    "dtype",
    "hint",
    "storage_offset",
    "in_spec",
    "name",
    "path_name",
    "layout",
    "major",
)
_NUMBERS = (0, -1, 1, 2, 3, 7, 1 << 31, 1 << 40, 1 << 62, -(1 << 62), 10**30)
_TARGETS = (
    "torch.ops.aten.zeros.default", "torch.ops.aten.arange.default", "torch.ops.aten.repeat.default", "torch.ops.aten.eye.m",
    "torch.ops.aten.as_strided.default", "torch.ops.aten._assert_async.msg", "torch.ops.aten.set_.source_Storage",
    "torch.ops.aten.resize_.default", "torch.ops.higher_order.while_loop", "_operator.pow", "_operator.lshift", "math.exp",
    "torch.sym_float", "torch.load", "os.system", "builtins.eval", "torch.ops.aten.from_file.default",
)  # fmt: skip
_EXPRESSIONS = (
    "2**64", "Symbol('s77')**64", "Pow(Symbol('s77'), 64)", "s77 << 60", "9**9**9", "__import__('os')", "1/0", "oo", "-oo",
    "Mod(Symbol('s77'), 0)", "FloorDiv(1, 0)", "Max(" + "1," * 3000 + "2)", "(" * 300 + "1" + ")" * 300, "nan", "",
)  # fmt: skip


def _other(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None, 1, "x", []))
    if isinstance(value, int | float):
        return rng.choice(_NUMBERS)
    return rng.choice((*_TARGETS, *_EXPRESSIONS, hostile_text(rng), hostile_text(rng), value + "x", value[:-1]))


def _renamed(rng: random.Random, members: Members) -> Members:
    """A name with folders above the archive, another case, a suffix of something else."""
    at = rng.randrange(len(members))
    name, raw = members[at]
    folder, _, last = name.rpartition("/")
    names = (
        f"../{name}", f"{folder}/../../../tmp/{last}", f"/{name}", name.upper(), f"{name}.so", f"{name}.pkl", f"{name}/",
        name.replace("/", "\\"), f"{folder}//{last}", f"{folder}/./{last}", last, hostile_text(rng)[:200], f"x/{last}",
        f"{folder}/custom_obj_0", f"{folder}/model.json", "\u202e" + name, name + "\0x",
    )  # fmt: skip
    return _with(members, at, rng.choice(names), raw)


def _repeated(rng: random.Random, members: Members) -> Members:
    """A member twice, with other bytes or in another case the second time; or left out."""
    at = rng.randrange(len(members))
    name, raw = members[at]
    again = rng.choice(((name, mutate_bytes(rng, raw)), (name.title(), raw), (name, evil_pickle(rng)), None))
    if again is None:
        return [*members[:at], *members[at + 1 :]]
    place = rng.randrange(len(members) + 1)
    return [*members[:place], again, *members[place:]]


def _bytes(rng: random.Random, members: Members) -> Members:
    at = rng.randrange(len(members))
    name, raw = members[at]
    return _with(members, at, name, mutate_bytes(rng, raw))


def _sized(rng: random.Random, members: Members) -> Members:
    """A member cut, empty, doubled, or of many zeros that compress to little."""
    at = rng.randrange(len(members))
    name, raw = members[at]
    zeros = bytes(rng.choice((1 << 16, 1 << 22, 1 << 26)))
    return _with(members, at, name, rng.choice((raw[: len(raw) // 2], b"", raw * 2, zeros, raw + zeros)))


def _pickled(rng: random.Random, members: Members) -> Members:
    """A pickle, honest or not, in place of weights, constants or sample inputs, or beside them."""
    raw = rng.choice((
        evil_pickle(rng), _zip([("archive/data.pkl", evil_pickle(rng)), ("archive/version", b"3\n")]), pickle.dumps({}),
        pickle.dumps([1] * 1000), b"\x80\x02}q\x00.", evil_pickle(rng)[:-3],
        _zip([("a/data.pkl", b"\x80\x02}q\x00."), ("a/x", _zip([("b/data.pkl", evil_pickle(rng))]))]),
    ))  # fmt: skip
    if rng.random() < 0.6:
        at = rng.randrange(len(members))
        return _with(members, at, members[at][0], raw)
    folder = members[0][0].split("/")[0]
    names = (
        "data/weights/model.pt", "data/constants/model.pt", "data/sample_inputs/model.pt", "data/weights/weight_0",
        "data/constants/custom_obj_0", "data/constants/opaque_obj_0", "data/constants/tensor_0", "extra/x", "data.pkl",
        "serialized_state_dict.pt", "data/aotinductor/model/a.so", "models/other.json", "constants.pkl",
    )  # fmt: skip
    return [*members, (f"{folder}/{rng.choice(names)}", raw)]


def _listed(rng: random.Random, members: Members) -> Members | None:
    """Entries of the list of weights or constants: other files, kinds, shapes, sizes, strides."""
    at = _pick(rng, members, "weights_config.json", "constants_config.json")
    if at is None:
        return None
    name, raw = members[at]
    root = json.loads(raw)
    shape = {
        "dtype": rng.choice((7, 0, 99, -1)), "device": {"type": "cpu", "index": None}, "layout": 7, "requires_grad": False,
        "sizes": [{"as_int": rng.choice(_NUMBERS)}] * rng.choice((0, 1, 2, 70)),
        "strides": [{"as_int": rng.choice(_NUMBERS)}] * rng.choice((0, 1, 2)),
        "storage_offset": {"as_int": rng.choice(_NUMBERS)},
    }  # fmt: skip
    files = ("weight_0", "tensor_0", "../models/model.json", "../../x", "/etc/hostname", "custom_obj_0", "opaque_obj_0")
    entry: dict[str, Any] = {
        "path_name": rng.choice(files), "is_param": rng.random() < 0.5, "use_pickle": rng.random() < 0.5,
        "tensor_meta": rng.choice((None, {}, shape)),
    }  # fmt: skip
    config = root.get("config")
    if isinstance(config, dict):
        config[rng.choice([*config, "c"])] = entry
    return _with(members, at, name, json.dumps(root).encode())


_CHANGES: tuple[Callable[[random.Random, Members], Members | None], ...] = (
    _tree, _leaf, _leaf, _leaf, _leaf, _renamed, _repeated, _bytes, _sized, _pickled, _listed,
)  # fmt: skip

"""Hostile models: every verb that opens one refuses it with exit code 4, writes nothing, and opens nothing outside the
model's folder. That is watched by the kernel (inotify), native libraries included."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trt_engine.cli.main import run
from trt_engine.errors import ModelError

from . import models
from .models import graph, model, node, value, weight

VERBS: dict[str, Callable[[str, str], list[str]]] = {
    "inspect": lambda source, out: ["inspect", source],
    "lint": lambda source, out: ["lint", source],
    "build": lambda source, out: ["build", source, "--backend", "onnxruntime", "-o", f"{out}/engine.onnx"],
    "size": lambda source, out: ["size", source, "--backend", "onnxruntime", "-o", f"{out}/size"],
    "cast": lambda source, out: ["cast", source, "--to", "fp16", "-o", f"{out}/half.onnx"],
    "quantize": lambda source, out: ["quantize", source, "--to", "int4", "-o", f"{out}/four.onnx"],
    "infer": lambda source, out: ["infer", source, "--random", "-o", f"{out}/y.npz"],
}
verbs = pytest.mark.parametrize("verb", VERBS)


def in_turn(*cases: Any) -> list[tuple[Any, ...]]:
    """Each case with one of the verbs, as all of them open a model by one function; the first case with every verb."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    names = list(VERBS)
    return [(verb, *rows[0]) for verb in names] + [(names[at % len(names)], *row) for at, row in enumerate(rows) if at]


NBYTES = 8 * 3 * 3 * 3 * 4


# ------------------------------------------------------------------------------------------------ the watch

_OPEN, _ACCESS, _CREATE = 0x20, 0x1, 0x100
_NONBLOCK = os.O_NONBLOCK


class Watch:
    """What happens in folders: every opening, reading and creating by anyone."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(_NONBLOCK)
        if self._fd < 0:
            pytest.skip("this kernel has no inotify")
        self._names: dict[int, Path] = {}

    def add(self, folder: Path, mask: int = _OPEN | _ACCESS) -> None:
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)
        assert number >= 0, os.strerror(ctypes.get_errno())
        self._names[number] = folder

    def seen(self) -> list[str]:
        """The names since the last call."""
        found = []
        try:
            raw = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return []
        while raw:
            number, mask, _, length = struct.unpack_from("iIII", raw)
            name = raw[16 : 16 + length].rstrip(b"\0").decode()
            if not mask & 0x40000000 and name:  # a folder that is listed is not a file that is read
                found.append(f"{self._names[number].name}/{name}")
            raw = raw[16 + length :]
        return found

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.close()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The model's folder, one beside it with weights that would fit, and one for results."""
    folder, outside, out = (tmp_path / name for name in ("model", "outside", "out"))
    for item in (folder, outside, out):
        item.mkdir()
    (outside / "w.bin").write_bytes(np.full(NBYTES // 4, 7, np.float32).tobytes())
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(outside)  # so that what is looked up from here is found
    return folder, outside, out


def refuse(verb: str, source: Path, out: Path, capsys: pytest.CaptureFixture[str], *, expected: int = 4) -> str:
    """The error of the verb, found to be exit code 4 with a hint, nothing written."""
    capsys.readouterr()
    code = run(VERBS[verb](str(source), str(out)))
    said = capsys.readouterr().err
    assert code == expected, said
    assert "hint:" in said
    assert "Traceback" not in said
    assert list(out.rglob("*.onnx")) == []
    return said


def test_the_watch_sees_what_is_opened(places: tuple[Path, Path, Path], watch: Watch) -> None:
    watch.add(places[1])
    (places[1] / "w.bin").read_bytes()
    assert "outside/w.bin" in watch.seen()
    assert watch.seen() == []


# ------------------------------------------------------------------------------------------------ external data


def _link_to_file(folder: Path, outside: Path) -> str:
    (folder / "w.bin").symlink_to(outside / "w.bin")
    return "w.bin"


def _link_to_folder(folder: Path, outside: Path) -> str:
    (folder / "sub").symlink_to(outside)
    return "sub/w.bin"


def _chain(folder: Path, outside: Path) -> str:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to(outside / "w.bin")
    return "a"


def _fifo(folder: Path, _: Path) -> str:
    os.mkfifo(folder / "w.bin")
    return "w.bin"


def _folder(folder: Path, _: Path) -> str:
    (folder / "w.bin").mkdir()
    return "w.bin"


def _device(folder: Path, _: Path) -> str:
    (folder / "w.bin").symlink_to("/dev/zero")
    return "w.bin"


def _loop(folder: Path, _: Path) -> str:
    (folder / "w.bin").symlink_to("w.bin")
    return "w.bin"


def _up_and_back(folder: Path, _: Path) -> str:
    (folder / "sub").mkdir()
    return "sub/../../outside/w.bin"


LOCATIONS: dict[str, Callable[[Path, Path], str]] = {
    "up": lambda folder, outside: "../outside/w.bin",
    "up from a folder": _up_and_back,
    "up, Windows": lambda folder, outside: "..\\outside\\w.bin",
    "absolute": lambda folder, outside: str(outside / "w.bin"),
    "absolute, doubled": lambda folder, outside: "/" + str(outside / "w.bin"),
    "a URL": lambda folder, outside: (outside / "w.bin").as_uri(),
    "of this process": lambda folder, outside: "/proc/self/environ",
    "home": lambda folder, outside: "~/w.bin",
    "beside the shell, not the model": lambda folder, outside: "w.bin",
    "link": _link_to_file,
    "linked folder": _link_to_folder,
    "chain of links": _chain,
    "link to itself": _loop,
    "pipe": _fifo,
    "folder": _folder,
    "device": _device,
}


@pytest.mark.parametrize(("verb", "place"), in_turn(*LOCATIONS))
def test_external_data_is_never_read_from_outside_the_models_folder(
    places: tuple[Path, Path, Path], watch: Watch, capsys: pytest.CaptureFixture[str], verb: str, place: str
) -> None:
    folder, outside, out = places
    location = LOCATIONS[place](folder, outside)
    path = models.save(
        models.external(models.detector(), "w", location=location, offset="0", length=str(NBYTES)), folder
    )
    watch.add(outside)
    refuse(verb, path, out, capsys)
    assert watch.seen() == []


def hidden(kind: str, location: str) -> onnx.ModelProto:
    """The same reference where a reader may forget to look."""
    stored = weight("secret", 8, 3, 3, 3)
    stored.ClearField("raw_data")
    stored.data_location = TensorProto.EXTERNAL
    stored.external_data.add(key="location", value=location)
    proto = models.detector()
    if kind == "attribute":
        proto.graph.node.insert(0, node("Constant", [], ["unused"], value=stored))
    elif kind == "body":
        then = graph([node("Constant", [], ["a"], value=stored)], [], [value("a", [8, 3, 3, 3])])
        other = graph([node("Identity", ["w"], ["b"])], [], [value("b", [8, 3, 3, 3])])
        proto.graph.input.append(value("pick", [], TensorProto.BOOL))
        proto.graph.node.insert(0, node("If", ["pick"], ["unused"], then_branch=then, else_branch=other))
    elif kind == "function":
        inner = [node("Constant", [], ["k"], value=stored), node("Identity", ["x"], ["y"])]
        proto.functions.append(
            helper.make_function("my.company", "Hide", ["x"], ["y"], inner, [helper.make_opsetid("", 20)])
        )
        proto.opset_import.append(helper.make_opsetid("my.company", 1))
    elif kind == "default of a function":
        proto.functions.append(
            helper.make_function(
                "my.company", "Hide", ["x"], ["y"], [node("Identity", ["x"], ["y"])], [helper.make_opsetid("", 20)],
                attribute_protos=[helper.make_attribute("k", stored)],
            )
        )  # fmt: skip
        proto.opset_import.append(helper.make_opsetid("my.company", 1))
    elif kind in ("attribute of type INT", "attribute without a type"):
        made = node("Constant", [], ["unused"], value=stored)
        made.attribute[0].type = onnx.AttributeProto.INT if "INT" in kind else onnx.AttributeProto.UNDEFINED
        proto.graph.node.insert(0, made)
    elif kind == "sparse":
        sparse = proto.graph.sparse_initializer.add(dims=[8, 3, 3, 3])
        sparse.values.CopyFrom(stored)
        sparse.indices.CopyFrom(models.ints("at", 0))
    else:
        proto.training_info.add().initialization.initializer.append(stored)
    return proto


@pytest.mark.parametrize(
    ("verb", "kind"),
    in_turn("attribute", "body", "function", "sparse", "training", "default of a function", "attribute of type INT",
            "attribute without a type"),
)  # fmt: skip
def test_external_data_is_found_wherever_it_hides(
    places: tuple[Path, Path, Path], watch: Watch, capsys: pytest.CaptureFixture[str], verb: str, kind: str
) -> None:
    folder, outside, out = places
    path = models.save(hidden(kind, "../outside/w.bin"), folder)
    watch.add(outside)
    reason = "stated as INT" if "INT" in kind else "leaves the model's folder"
    assert reason in refuse(verb, path, out, capsys)
    assert watch.seen() == []


@verbs
def test_a_tensor_with_two_places_is_refused(
    places: tuple[Path, Path, Path], watch: Watch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """One reader takes the first, another the last."""
    folder, outside, out = places
    (folder / "w.bin").write_bytes(bytes(NBYTES))
    proto = models.external(models.detector(), "w", location="../outside/w.bin")
    proto.graph.initializer[0].external_data.add(key="location", value="w.bin")
    watch.add(outside)
    assert "twice" in refuse(verb, models.save(proto, folder), out, capsys)
    assert watch.seen() == []


def mistyped(kind: str) -> onnx.ModelProto:
    proto = models.detector()
    if kind == "tensor":
        proto.graph.initializer[0].data_type = 1 << 24
        return proto
    filled = node(
        "ConstantOfShape", ["unused_n"], ["unused"], value=helper.make_tensor("", TensorProto.FLOAT, [1], [0])
    )
    held = filled.attribute[0]
    if kind == "tensor in an attribute":
        held.t.data_type = 99
    elif kind == "attribute":
        held.CopyFrom(helper.make_attribute("value", "text"))
    elif kind == "value":
        held.i = 3
    else:
        held.t.CopyFrom(helper.make_tensor("", TensorProto.FLOAT, [4], [0, 1, 2, 3]))
    proto.graph.initializer.append(models.ints("unused_n", 2))
    proto.graph.node.insert(0, filled)
    return proto


@pytest.mark.parametrize(
    ("verb", "kind", "reason"),
    in_turn(("tensor", "of the unknown element type 16777216"), ("tensor in an attribute", "of the unknown element type 99"),
     ("attribute", "as STRING, and the operator `ConstantOfShape` (opset 20) takes TENSOR"),
     ("value", "stated as TENSOR and has a value of another type (`i`)"),
     ("filling", "with 4 values (node `ConstantOfShape_unused`)")),
)  # fmt: skip
def test_an_element_or_attribute_of_a_wrong_type_is_one_error_of_every_verb(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], verb: str, kind: str, reason: str
) -> None:
    folder, _, out = places
    assert reason in refuse(verb, models.save(mistyped(kind), folder), out, capsys)


# ------------------------------------------------------------------------------------------------ broken graphs


def circle() -> onnx.ModelProto:
    return model(
        [node("Add", ["x", "c"], ["a"]), node("Relu", ["a"], ["b"]), node("Neg", ["b"], ["c"])],
        [value("x", ["batch", 4])],
        [value("c", ["batch", 4])],
    )


def circle_through_a_body() -> onnx.ModelProto:
    then = graph([node("Relu", ["late"], ["t"])], [], [value("t", ["batch", 4])])
    other = graph([node("Relu", ["x"], ["e"])], [], [value("e", ["batch", 4])])
    return model(
        [node("If", ["c"], ["early"], then_branch=then, else_branch=other), node("Neg", ["early"], ["late"])],
        [value("c", [], TensorProto.BOOL), value("x", ["batch", 4])],
        [value("late", ["batch", 4])],
    )


def to_itself() -> onnx.ModelProto:
    return model([node("Add", ["x", "y"], ["y"])], [value("x", ["batch", 4])], [value("y", ["batch", 4])])


def made_twice() -> onnx.ModelProto:
    nodes = [node("Relu", ["x"], ["y"], name="first"), node("Neg", ["x"], ["y"], name="second")]
    return model(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])])


def over_an_input() -> onnx.ModelProto:
    nodes = [node("Relu", ["x"], ["x"]), node("Relu", ["x"], ["y"])]
    return model(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])])


def calling(*pairs: tuple[str, list[str]]) -> onnx.ModelProto:
    """Local functions, each calling the named ones one after the other; the first is called by the graph."""
    functions = []
    for name, called in pairs:
        inner, last = [], "x"
        for at, other in enumerate(called):
            inner.append(helper.make_node(other, [last], [f"h{at}"], domain="f", name=f"{name}{at}"))
            last = f"h{at}"
        inner.append(helper.make_node("Identity", [last], ["y"]))
        functions.append(
            helper.make_function("f", name, ["x"], ["y"], inner,
                                 [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)])
        )  # fmt: skip
    return model(
        [helper.make_node(pairs[0][0], ["x"], ["y"], domain="f", name="call")],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4])],
        domains={"f": 1},
        functions=functions,
    )


def bomb() -> onnx.ModelProto:
    """Forty functions, each calling the next one ten times."""
    return calling(*[(f"L{at}", [f"L{at + 1}"] * 10 if at < 39 else []) for at in range(40)])


def endless_chain() -> onnx.ModelProto:
    return calling(*[(f"L{at}", [f"L{at + 1}"] if at < 999 else []) for at in range(1000)])


def negative_size() -> onnx.ModelProto:
    proto = models.external(models.detector(), "w", location="w.bin")
    proto.graph.initializer[0].dims[0] = -8
    return proto


def dots(equation: str) -> onnx.ModelProto:
    return model([node("Einsum", ["x"], ["y"], equation=equation)], [value("x", [2, 3])], [value("y", None)])


@pytest.mark.parametrize("equation", ["......->", "...a...->a", "....->", "ij,.->ij", "ij->.."])
def test_an_equation_that_shape_inference_reads_forever_is_refused(equation: str) -> None:
    from trt_engine.graph.structure_check import check_structure
    from trt_engine.graph.walk import index_of

    with pytest.raises(ModelError, match="at most one"):
        check_structure(index_of(dots(equation)))
    for honest in ("...ij,...jk->...ik", "ij -> ji", "b...d, d...e", "ii", "...", ""):
        check_structure(index_of(dots(honest)))


BROKEN: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "circle": (circle, "cycle"),
    "circle through a body": (circle_through_a_body, "cycle"),
    "a node that waits for itself": (to_itself, "cycle"),
    "produced twice": (made_twice, "`y` is produced twice, by node `second` (Neg) and by node `first`"),
    "over an input": (over_an_input, "produced twice"),
    "function that calls itself": (lambda: calling(("A", ["A"])), "call each other in a cycle"),
    "functions that call each other": (lambda: calling(("A", ["B"]), ("B", ["A"])), "`A` -> `B` -> `A`"),
    "functions that explode": (bomb, "once its local functions are inlined"),
    "functions nested without end": (endless_chain, "200 deep"),
    "no nodes": (lambda: model([], [], []), "empty graph"),
    "no output": (lambda: model([node("Relu", ["x"], ["y"])], [value("x", [1])], []), "no outputs"),
    "negative size": (negative_size, ""),
}


@pytest.mark.parametrize(("verb", "case"), in_turn(*BROKEN))
def test_a_graph_that_cannot_be_gone_through_is_refused(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], verb: str, case: str
) -> None:
    folder, _, out = places
    made, words = BROKEN[case]
    assert words in refuse(verb, models.save(made(), folder), out, capsys)


def test_functions_that_end_and_nodes_out_of_order_are_let_in(tmp_path: Path) -> None:
    from trt_engine.graph.load import open_model

    assert open_model(models.save(calling(("A", ["B", "B"]), ("B", [])), tmp_path)).signature.outputs
    proto = made_twice()
    proto.graph.node[1].input[0], proto.graph.node[1].output[0] = "y", "z"
    proto.graph.output[0].name = "z"
    turned = [onnx.NodeProto.FromString(item.SerializeToString()) for item in reversed(proto.graph.node)]
    del proto.graph.node[:]
    proto.graph.node.extend(turned)
    assert [spec.name for spec in open_model(models.save(proto, tmp_path)).signature.outputs] == ["z"]


def nested(depth: int) -> bytes:
    """An If in an If in an If, so deep that a reader that calls itself runs out of stack; written by hand."""

    def field(number: int, payload: bytes) -> bytes:
        size, length = len(payload), b""
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + payload

    inner = b""
    for _ in range(depth):
        attribute = field(1, b"then_branch") + b"\xa0\x01\x05" + field(6, inner)
        inner = field(1, field(4, b"If") + field(5, attribute))
    return b"\x08\x0a" + field(7, inner) + field(8, b"\x10\x14")


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("verb", "name"), in_turn("../../evil", "/tmp/evil", "a/b", "..", "evil\n", "a\\..\\b", "C:evil")
)
def test_names_never_become_places(
    places: tuple[Path, Path, Path], watch: Watch, capsys: pytest.CaptureFixture[str], verb: str, name: str
) -> None:
    """Inputs, outputs, weights, nodes and graphs by such names: whatever the answer, no file is made of them."""
    folder, outside, out = places
    proto = model(
        [node("MatMul", [f"{name}in", f"{name}w"], [f"{name}out"], name=name)],
        [value(f"{name}in", ["batch", 4])],
        [value(f"{name}out", ["batch", 4])],
        [weight(f"{name}w", 4, 4)],
    )
    proto.graph.name = name
    path = models.save(proto, folder)
    before = {item for item in folder.parent.rglob("*") if "store" not in item.parts and out not in item.parents}
    watch.add(folder.parent, _CREATE)
    watch.add(outside, _CREATE)
    watch.add(folder, _CREATE)
    told = VERBS[verb](str(path), str(out))
    if verb == "size":
        told += ["--dry-run"]
    code = run(told)
    assert code in (0, 2, 4, 5), capsys.readouterr().err
    made = [item for item in watch.seen() if not item.endswith("/store")]
    assert made == []
    after = {item for item in folder.parent.rglob("*") if "store" not in item.parts and out not in item.parents}
    assert after == before
    assert all(item.resolve().is_relative_to(out) for item in out.rglob("*"))
    assert not Path("/tmp/evil").exists()

"""Models with fields changed at random: every one is taken, or refused with a sentence; none is met with a trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_engine.errors import TrtEngineError
from trt_engine.precision.cast_model import cast
from trt_engine.verbs.inspect import inspect
from trt_engine.verbs.lint import lint

from . import models
from .models import graph, ints, model, node, value, weight

_NUMBERS = (0, 1, -1, 2, 7, 64, 1000, (1 << 31) - 1, 1 << 31, 1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63))
_TEXTS = ("", "x", "w", "images", "Relu", "Conv", "Loop", "\n", "\x1b[31m")


def _branches() -> ModelProto:
    then = graph([node("Relu", ["x"], ["t"])], [], [value("t", [None, 4])])
    other = graph([node("Neg", ["x"], ["e"])], [], [value("e", [None, 4])])
    made = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    return model([made], [value("c", [], TensorProto.BOOL), value("x", ["n", 4])], [value("y", ["n", 4])])


def _quantized() -> ModelProto:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"]),
             node("MatMul", ["d", "w"], ["y"])]  # fmt: skip
    stored = [
        numpy_helper.from_array(np.float32(0.1), "s"),
        numpy_helper.from_array(np.int8(0), "z"),
        weight("w", 4, 4),
    ]
    return model(nodes, [value("x", ["n", 4])], [value("y", ["n", 4])], stored)


def _shapes() -> ModelProto:
    nodes = [node("Shape", ["x"], ["s"]), node("Gather", ["s", "i"], ["b"]), node("Concat", ["b", "m"], ["t"], axis=0),
             node("Reshape", ["x", "t"], ["y"])]  # fmt: skip
    return model(nodes, [value("x", ["n", 2, 3])], [value("y", ["n", 6])], [ints("i", 0), ints("m", -1)])


def _constants() -> ModelProto:
    nodes = [node("LayerNormalization", ["x", "g", "b"], ["l"], axis=-1), node("Constant", [], ["k"], value=weight("k", 4)),
             node("Constant", [], ["text"], value=helper.make_tensor("text", TensorProto.STRING, [1], [b"a"])),
             node("Add", ["l", "k"], ["y"])]  # fmt: skip
    return model(nodes, [value("x", ["n", 4])], [value("y", ["n", 4])], [weight("g", 4), weight("b", 4)])


SEEDS: tuple[Callable[[], ModelProto], ...] = (models.detector, _branches, _quantized, _shapes, _constants)


def _messages(message: Any) -> list[Any]:
    found = [message]
    for _, held in message.ListFields():
        for item in held if hasattr(held, "add") else [held]:
            if hasattr(item, "ListFields"):
                found.extend(_messages(item))
    return found


def mutate(proto: ModelProto, drawn: random.Random) -> None:
    """One field of one message of the model removed, doubled, or set to another value of its type."""
    message = drawn.choice(_messages(proto))
    stated = [field for field, _ in message.ListFields()]
    field = drawn.choice(stated if stated and drawn.random() < 0.8 else list(message.DESCRIPTOR.fields))
    held = getattr(message, field.name)
    if hasattr(held, "ListFields"):
        if message.HasField(field.name):
            message.ClearField(field.name)
        else:
            held.SetInParent()
        return
    repeated = hasattr(held, "extend")
    if repeated and len(held) and drawn.random() < 0.4:
        del held[drawn.randrange(len(held))]
    elif repeated and hasattr(held, "add"):
        copied = drawn.choice(held) if len(held) else None
        added = held.add()
        if copied is not None:
            added.CopyFrom(copied)
    else:
        kind = {field.TYPE_STRING: _TEXTS, field.TYPE_BYTES: (b"", b"\xff" * 7, b"\x00" * 16)}.get(field.type)
        numbers = (0.0, -1.0, float("nan"), float("inf"))
        choices = kind or (numbers if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE) else (*_NUMBERS, *range(26)))
        new = drawn.choice(choices)
        try:
            if not repeated:
                setattr(message, field.name, new)
            elif len(held):
                held[drawn.randrange(len(held))] = new
            else:
                held.append(new)
        except ValueError:  # a number beyond what the field holds
            pass


def _cast(path: Path, out: Path) -> None:
    cast(path, "fp16", out=out, overwrite=True)


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda path, out: inspect(path),
    "lint": lambda path, out: lint(path),
    "cast": _cast,
}


def _try(verb: str, seed: int, count: int, folder: Path) -> tuple[int, int]:
    drawn, taken, refused = random.Random(seed), 0, 0
    for at in range(count):
        proto = drawn.choice(SEEDS)()
        for _ in range(drawn.choice((1, 1, 2, 3))):
            mutate(proto, drawn)
        path = models.save(proto, folder, f"{at}.onnx")
        try:
            VERBS[verb](path, folder / "out.onnx")
        except TrtEngineError as error:
            assert error.exit_code != 1, f"{verb}, seed {seed}, model {at}: {error}"
            assert error.hint
            refused += 1
        else:
            taken += 1
        path.unlink()
    return taken, refused


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_with_changed_fields_is_taken_or_refused_with_a_sentence(verb: str, tmp_path: Path) -> None:
    taken, refused = _try(verb, 14, 40, tmp_path)
    assert taken > 4, "the changes leave too few whole models"
    assert refused > 4, "the changes break too few models"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("verb", VERBS)
def test_thousands_of_models_with_changed_fields(verb: str, seed: int, tmp_path: Path) -> None:
    _try(verb, 100 + seed, 1000, tmp_path)


# ------------------------------------------------------------------------------------------------ found by mutating


def _detector(change: Callable[[ModelProto], object]) -> ModelProto:
    proto = models.detector()
    change(proto)
    return proto


def _opset(proto: ModelProto) -> None:
    proto.opset_import[0].version = 1 << 62


def _data(dims: list[int], raw: bytes) -> Callable[[ModelProto], None]:
    def change(proto: ModelProto) -> None:
        proto.graph.initializer[0].dims[:] = dims
        proto.graph.initializer[0].raw_data = raw

    return change


def _text_without_data(proto: ModelProto) -> None:
    proto.graph.node.append(node("Constant", [], ["k"], value=TensorProto(data_type=TensorProto.STRING, dims=[1])))


def _rank(proto: ModelProto) -> None:
    for _ in range(1000):
        proto.graph.input[0].type.tensor_type.shape.dim.add().dim_value = 1


def _sizes(proto: ModelProto) -> None:
    for dim in proto.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_value = 1 << 62


def _segment(proto: ModelProto) -> None:
    proto.graph.initializer[0].segment.SetInParent()


def _same_function(proto: ModelProto) -> None:
    for _ in range(2):
        proto.functions.append(helper.make_function("f", "F", ["a"], ["b"], [node("Neg", ["a"], ["b"])],
                                                    [helper.make_opsetid("", 20)]))  # fmt: skip


DAMAGED: dict[str, Callable[[ModelProto], object]] = {
    "an operator set of version 2^62": _opset,
    "data shorter than its shape": _data([8, 3, 3, 3], b"\x00" * 8),
    "data longer than its shape": _data([1], b"\x00" * 8),
    "no data": _data([8, 3, 3, 3], b""),
    "a size of -1": _data([-1, 3, 3, 3], b""),
    "a size of 2^62": _data([1 << 62, 4], b"\x00" * 16),
    "a tensor of 1000 dimensions": _data([1] * 1000, b"\x00" * 4),
    "a part of a tensor": _segment,
    "a text without data": _text_without_data,
    "an input of 1000 dimensions": _rank,
    "inputs of 2^248 elements": _sizes,
    "two functions of one name": _same_function,
}


@pytest.mark.parametrize("verb", [*(pytest.param(name, marks=pytest.mark.slow) for name in VERBS), "open"])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_model_is_a_model_error(case: str, verb: str, tmp_path: Path) -> None:
    from trt_engine.errors import ModelError
    from trt_engine.graph.load import open_model

    path = models.save(_detector(DAMAGED[case]), tmp_path)
    with pytest.raises(ModelError):
        open_model(path) if verb == "open" else VERBS[verb](path, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_an_empty_tensor_needs_no_data(tmp_path: Path) -> None:
    from trt_engine.graph.load import open_model

    empty = TensorProto(name="roi", data_type=TensorProto.FLOAT, dims=[0])
    proto = models.detector()
    proto.graph.initializer.append(empty)
    assert open_model(models.save(proto, tmp_path))


def test_data_by_numbers_is_counted_as_its_type_packs_it(tmp_path: Path) -> None:
    from trt_engine.graph.load import open_model

    proto = models.detector()
    for kind, dims, numbers in ((TensorProto.INT4, [3], [1, 2, 3]), (TensorProto.FLOAT16, [2], [1.0, 2.0]),
                                (TensorProto.COMPLEX64, [2], [1 + 2j, 3j]), (TensorProto.BOOL, [2], [True, False]),
                                (TensorProto.UINT64, [2], [1, 2]), (TensorProto.STRING, [2], [b"a", b"b"])):  # fmt: skip
        proto.graph.initializer.append(helper.make_tensor(f"w{kind}", kind, dims, numbers))
    assert open_model(models.save(proto, tmp_path))
    onnx.checker.check_model(proto)

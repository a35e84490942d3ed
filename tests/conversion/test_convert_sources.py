"""What a source is, told by its content; its axes and examples, told by what was typed. No PyTorch, no TensorFlow."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import trt_engine as te
from programs import run_python
from trt_engine.conversion.axes import Axis, alternate_size, axes_for, parse_dynamic, size_variants, sizes_of
from trt_engine.conversion.examples import Example, array_of, parse_inputs, with_batch_2
from trt_engine.conversion.sources import detect_source
from trt_engine.errors import AccuracyError, FeedError, MemoryExhausted, ModelError, SetupError, UsageError


def relu(path: Path, *, opset: int = 17, batch: int | str = "batch") -> Path:
    """A model of one node."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], name="relu")], "g", values[:1], values[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(made, path)
    return path


def field(number: int, wire: int, content: bytes) -> bytes:
    """One field of a protobuf, as its bytes."""
    return bytes([number << 3 | wire]) + (bytes([len(content)]) if wire == 2 else b"") + content


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, raw in members.items():
            made.writestr(name, raw)
    return path


# ------------------------------------------------------------------------------------------------ sources


def test_files_are_told_by_their_content_and_not_by_their_suffix(tmp_path: Path) -> None:
    odd = tmp_path / "odd.bin"
    node = field(1, 2, field(1, 2, b"x") + field(2, 2, b"Placeholder"))
    tensors = pickle.dumps({"weight": [1.0]}, protocol=2)
    cases = {
        "onnx": relu(tmp_path / "model.pb").read_bytes(),
        "saved-model": field(1, 0, b"\x01") + field(2, 2, b"meta"),
        "frozen-graph": node + field(4, 2, field(1, 0, b"\x16")),
        "tflite": b"\x1c\x00\x00\x00TFL3" + bytes(64),
        "tensorrt-plan": b"ftrt" + bytes(64),
        "torchscript": archive(
            tmp_path / "a", {"m/data.pkl": tensors, "m/constants.pkl": b"", "m/code/m.py": b""}
        ).read_bytes(),
        "exported-program": archive(
            tmp_path / "b", {"m/archive_format": b"pt2", "m/models/model.json": b"{}"}
        ).read_bytes(),
        "state-dict": archive(tmp_path / "c", {"m/data.pkl": tensors, "m/data/0": bytes(4)}).read_bytes(),
        "keras": archive(tmp_path / "d", {"metadata.json": b"{}", "config.json": b"{}"}).read_bytes(),
    }
    for kind, raw in (*cases.items(), ("tensorrt-plan", b"vtrt" + bytes(64))):
        odd.write_bytes(raw)
        assert detect_source(odd).kind == kind


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "names no source", "file.py:factory"),
        (" ", "names no source", "file.py:factory"),
        ("net\0.onnx", "names no source", "file.py:factory"),
        ("https://example.com/net.onnx", "is an address", "download"),
        ("net.py", "without a function to call", "`net.py:factory`"),
        ("saved_modle", "no such file", "did you mean `saved_model`? (a name on a hub is written `hf:saved_modle`)"),
        ("nett.onnx", "no such file", "did you mean `net.onnx`?"),
        ("zzz_weights.pt", "no such file", "in that folder: "),
        ("cut.pt", "the pickle in `cut.pt` cannot be read", "again"),
    ],
)
def test_what_names_nothing_says_what_would(
    text: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relu(tmp_path / "net.onnx")
    (tmp_path / "net.py").write_text("def factory(): ...\n")
    (tmp_path / "saved_model").mkdir()
    (tmp_path / "cut.pt").write_bytes(b"\x80\x02garbage")
    with pytest.raises((ModelError, UsageError), match=message) as refused:
        detect_source(text)
    assert hint in str(refused.value.hint)


def test_a_pickled_module_is_refused_without_being_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (open, (str(tmp_path / "ran"), "w"))

    path = archive(tmp_path / "whole.pt", {"m/data.pkl": pickle.dumps(Bomb(), protocol=2)})
    with pytest.raises(ModelError, match="whole pickled object") as refused:
        detect_source(path)
    assert "--factory" in str(refused.value.hint)
    legacy = tmp_path / "legacy.pt"
    parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, Bomb())
    legacy.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
    with pytest.raises(ModelError, match="whole pickled object"):
        detect_source(legacy)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("package.module:build", "torch-module", "package.module"),
        ("timm/resnet18", "timm", "resnet18"),
        ("timm:vit_tiny", "timm", "vit_tiny"),
        ("org/some-model", "huggingface", "org/some-model"),
        ("hf:bert", "huggingface", "bert"),
        ("bert-base-uncased", "huggingface", "bert-base-uncased"),
    ],
)
def test_names_are_told_by_how_they_are_written(text: str, kind: str, name: str) -> None:
    found = detect_source(text)
    assert (found.kind, found.name) == (kind, name)


def test_folders_are_told_by_what_lies_in_them(tmp_path: Path) -> None:
    for name, inside, kind in (("a", "saved_model.pb", "saved-model"), ("b", "config.json", "huggingface")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_text("{}")
        assert detect_source(tmp_path / name).kind == kind
    (tmp_path / "c").mkdir()
    relu(tmp_path / "c" / "net.onnx")
    with pytest.raises(ModelError, match="is a folder") as refused:
        detect_source(tmp_path / "c")
    assert "net.onnx" in str(refused.value.hint)


@pytest.mark.parametrize(
    "text", ["missing.onnx", "missing.pt", "no/such/deep/file.engine", "net.py:build", "net.py:1x"]
)
def test_a_file_that_is_not_there_is_never_looked_up_on_a_hub(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ModelError, UsageError), match=r"no such file|names no function"):
        detect_source(text)


# ------------------------------------------------------------------------------------------------ axes


def test_axes_are_read_with_names_ranges_and_steps() -> None:
    found = parse_dynamic(["images:0=batch@1..64,2=height@64..640/32", "ids:0=batch"])
    assert found["images"] == {0: Axis("batch", 1, 64), 2: Axis("height", 64, 640, 32)}
    assert found["ids"] == {0: Axis("batch", 1, 64)}, "one symbol has one range wherever it stands"
    assert parse_dynamic({"x": {0: "batch@..8"}}) == {"x": {0: Axis("batch", 1, 8)}}
    assert axes_for(parse_dynamic(iter(["0=batch"])), {"a": (2, 3), "b": ()}) == {"a": {0: Axis("batch")}}


@pytest.mark.parametrize(
    "text",
    ["x:batch", "x:0=", "x:0=1a", "x:0=b@9..2", "x:0=b@0..4", "x:0=b@1..9/4", "x:0=a,0=b", "x:0=b@1..4 y:0=b@1..8"],
)
def test_axes_that_cannot_be_read_or_contradict_each_other_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_dynamic(text)


def test_one_symbol_of_two_sizes_or_outside_its_range_is_refused() -> None:
    axes = parse_dynamic("a:0=batch@1..4 b:0=batch")
    with pytest.raises(UsageError, match="`batch` is 2 in input `a` and 3 in input `b`"):
        sizes_of(axes, {"a": (2,), "b": (3,)})
    with pytest.raises(UsageError, match="outside"):
        sizes_of(axes, {"a": (5,), "b": (5,)})


def test_every_symbol_moves_alone_and_then_all_together() -> None:
    axes = parse_dynamic("x:0=batch,2=height@64..640/32,3=fixed@5..5")
    found = size_variants(axes, {"batch": 2, "height": 96, "fixed": 5})
    assert [moved for _, moved in found] == [(), ("batch",), ("height",), ("batch", "height")]
    assert found[1][0]["batch"] != 2 and found[1][0]["height"] == 96
    assert found[2][0]["height"] % 32 == 0 and found[2][0]["height"] != 96
    assert found[3][0]["batch"] == 1, "a batch of one is what most engines are built for"
    assert alternate_size(Axis("side"), 96) == 128, "a second size divides as the first does"
    assert alternate_size(Axis("side", 5, 5), 5) is None


# ------------------------------------------------------------------------------------------------ examples


def test_examples_are_read_from_text_arrays_and_files(tmp_path: Path) -> None:
    given = parse_inputs(["images:2x3x8x8", "ids:2x4:int64@5..9", "mask:2x4:bool"])
    assert [(item.name, item.shape, item.dtype) for item in given] == [
        ("images", (2, 3, 8, 8), "float32"), ("ids", (2, 4), "int64"), ("mask", (2, 4), "bool"),
    ]  # fmt: skip
    numbers = array_of("ids", given[1], (2, 4))
    assert numbers.dtype == np.int64 and numbers.min() >= 5 and numbers.max() <= 9
    assert parse_inputs("2x3")[0] == Example(None, (2, 3))
    np.savez(tmp_path / "x.npz", a=np.zeros((2, 3), np.float16), b=np.ones(4, np.int32))
    assert [(item.name, item.dtype) for item in parse_inputs([str(tmp_path / "x.npz")])] == [
        ("a", "float16"),
        ("b", "int32"),
    ]
    assert [item.shape for item in parse_inputs({"a": (2, 3), "b": np.zeros(5), "c": "2x2:int32"})] == [
        (2, 3),
        (5,),
        (2, 2),
    ]


@pytest.mark.parametrize("text", ["x:2xb", "x:2x3:int65", "x:2:int64@5..1", "x:-1x3", "a:2 a:3"])
def test_examples_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_inputs(text)


def test_a_mask_marks_the_beginning_of_every_row_and_never_nothing() -> None:
    mask = array_of("attention_mask", Example("attention_mask", (64, 9), "int64"), (64, 9))
    assert set(np.unique(mask)) == {0, 1}
    assert mask[:, 0].all() and (np.diff(mask, axis=1) <= 0).all()


def test_a_batch_of_one_is_raised_and_that_is_said() -> None:
    given = {"x": Example("x", (1, 3), array=np.ones((1, 3), np.float32))}
    found, said = with_batch_2(given, parse_dynamic("x:0=batch"))
    assert found["x"].shape == (2, 3) and found["x"].array is not None and found["x"].array.shape == (2, 3)
    assert said == ["`batch` of the example `x` was raised from 1 to 2"]
    assert with_batch_2(given, parse_dynamic("x:0=batch@1..1"))[1] == []


# ------------------------------------------------------------------------------------------------ ONNX in


def test_onnx_is_simplified_compared_and_moved_to_the_opset_asked_for(tmp_path: Path) -> None:
    report = te.convert(relu(tmp_path / "a.onnx"), out=tmp_path / "b.onnx", opset=20)
    assert (report.kind, report.exporter, report.opset) == ("onnx", "onnx", 20)
    assert report.max_rel == 0 and [item.sizes["batch"] for item in report.verification] == [2, 4, 1]
    assert te.inspect(tmp_path / "b.onnx").opsets[""] == 20
    kept = te.convert(relu(tmp_path / "a.onnx"), out=tmp_path / "c.onnx")
    assert kept.opset == 17, "an opset nobody asked for is left as it is"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dynamic": {"x": {0: "batch"}}}, "--dynamic"),
        ({"options": {"depth": 3}}, "-O"),
        ({"factory": "a:b"}, "--factory"),
        ({"python": "python3"}, "--python"),
        ({"opset": 3}, "opset"),
        ({"exporter": "other"}, "exporter"),
        ({"target": "tpu"}, "target"),
        ({"tolerance": 0}, "tolerance"),
        ({"tolerance": float("inf")}, "tolerance"),
        ({"dynamic": {}}, "`--static` closes axes"),
        ({"inputs": {"x": (2, 5)}}, "is 2x5, and the model takes batchx4"),
        ({"inputs": {"x": (2, 4, 1)}}, "is 2x4x1, and the model takes batchx4"),
    ],
)
def test_what_does_not_belong_to_a_source_is_refused(more: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        te.convert(relu(tmp_path / "a.onnx"), out=tmp_path / "b.onnx", **more)  # type: ignore[arg-type]
    assert not (tmp_path / "b.onnx").exists()


@pytest.mark.parametrize("given", ["x:2x4:int64", {"x": np.ones((2, 4), np.float64)}])
def test_an_example_of_another_type_than_the_models_is_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="the model takes float32"):
        te.convert(relu(tmp_path / "a.onnx"), out=tmp_path / "b.onnx", inputs=given)


def test_an_example_larger_than_the_memory_names_the_option_that_asked_for_it(tmp_path: Path) -> None:
    for size in (10**11, 10**19):
        with pytest.raises(MemoryExhausted, match="an example of `x`") as refused:
            te.convert(relu(tmp_path / "a.onnx"), out=tmp_path / "b.onnx", inputs=f"x:{size}x4")
        assert "--input" in str(refused.value.hint)
    with pytest.raises(UsageError, match=r"300 in .* is not a valid uint8"):
        parse_inputs("x:2:uint8@0..300")


def test_an_onnx_file_that_does_not_follow_its_own_batch_is_refused(tmp_path: Path) -> None:
    """A Reshape to a constant [2, 4]: it says `batch` and runs at two alone."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    target = helper.make_tensor("target", TensorProto.INT64, [2], [2, 4])
    node = helper.make_node("Reshape", ["x", "target"], ["y"], name="frozen")
    graph = helper.make_graph([node], "g", values[:1], values[1:], [target])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "a.onnx")
    with pytest.raises((ModelError, AccuracyError), match="`batch`"):
        te.convert(tmp_path / "a.onnx", out=tmp_path / "b.onnx")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.onnx"]


@pytest.mark.parametrize("joined", [True, False], ids=["one batch", "two sizes"])
def test_first_axes_without_a_name_move_together_where_the_model_needs_it(tmp_path: Path, joined: bool) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 4]) for name in ("a", "b", "y")]
    node = helper.make_node("Concat", ["a", "b"], ["y"], axis=1 if joined else 0)
    graph = helper.make_graph([node], "g", ends[:2], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    report = te.convert(tmp_path / "m.onnx", out=tmp_path / "out.onnx")
    assert {symbol for item in report.verification for symbol in item.sizes} == ({"a_0"} if joined else {"a_0", "b_0"})


# ------------------------------------------------------------------------------------------------ without the extras


def test_a_torch_source_without_torch_names_the_extra(tmp_path: Path) -> None:
    """In an interpreter that finds no torch, whatever is installed in this one."""
    (tmp_path / "net.py").write_text("def build(): ...\n")
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == lacking else (find(name, *a) or True)\n"
        "from trt_engine.cli.main import run\n"
        "for word in sys.argv[1:]:\n"
        "    source, lacking = word.split('=')\n"
        "    assert run(['convert', source, '-o', 'o.onnx']) == 3, word\n"
    )
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    words = ["net.py:build=torch", "hub=transformers", "timm/resnet18=timm"]
    done = run_python("-c", program, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"pip install '\S+\[(\w+)\]'", done.stderr) == ["torch", "hub", "hub"]
    assert not (tmp_path / "o.onnx").exists()


def test_reading_an_onnx_source_loads_none_of_the_heavy_libraries(tmp_path: Path) -> None:
    relu(tmp_path / "a.onnx")
    program = (
        "import sys, json\n"
        "import trt_engine.conversion.convert, trt_engine.conversion.sources\n"
        "from trt_engine.conversion.sources import detect_source\n"
        "detect_source(sys.argv[1])\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = run_python("-c", program, str(tmp_path / "a.onnx"), check=True)
    heavy = {"torch", "tensorflow", "tf2onnx", "onnxscript", "onnxslim", "transformers", "timm", "sympy"}
    assert not heavy & set(json.loads(done.stdout))


TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.skipif(TORCH, reason="PyTorch is installed here: its absence cannot be shown for real")
def test_here_without_torch_the_error_is_one_of_setup(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("raise SystemExit('it must not run')\n")
    with pytest.raises(SetupError, match="PyTorch is not installed"):
        te.convert(f"{tmp_path / 'net.py'}:build", out=tmp_path / "o.onnx")

"""What examples/classifiers promises: a small ViT and a small ResNet, digits they never saw, and their quality on them."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

from programs import load_program
from trt_engine.arrayfiles import Array
from trt_engine.vision.spec import vision_of

CLASSIFIERS = Path(__file__).parents[2] / "examples" / "classifiers"
NAMES = ("vit", "resnet")
PLAIN_OPERATORS = {
    "vit": {
        "Add", "Conv", "Div", "Erf", "Gemm", "LayerNormalization", "MatMul", "Mul", "ReduceMean", "Reshape", "Softmax",
        "Split", "Transpose",
    },
    "resnet": {"Add", "Conv", "Gemm", "ReduceMean", "Relu"},
}  # fmt: skip


def model_of(name: str) -> Path:
    return CLASSIFIERS / f"{name}.onnx"


def logits_of(name: str, images: Array) -> Array:
    session = onnxruntime.InferenceSession(model_of(name), providers=["CPUExecutionProvider"])
    logits: Array = session.run(None, {"images": images})[0]
    return logits


@pytest.fixture(scope="module")
def held_out() -> tuple[Array, Array]:
    """The network's inputs and the labels, as the README says they come out of val.npz."""
    with np.load(CLASSIFIERS / "val.npz", allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    return (images[:, None] / 255).astype(np.float32), labels


@pytest.fixture(scope="module")
def data() -> ModuleType:
    pytest.importorskip("sklearn", reason="scikit-learn holds the digits")
    pytest.importorskip("PIL", reason="pillow enlarges the digits")
    return load_program(CLASSIFIERS / "data.py", "classifiers_data")


@pytest.mark.parametrize("name", NAMES)
def test_each_model_is_one_file_of_less_than_a_megabyte(name: str) -> None:
    assert model_of(name).stat().st_size < 1_000_000
    assert [path.name for path in CLASSIFIERS.glob(f"{name}.onnx*")] == [f"{name}.onnx"]


@pytest.mark.parametrize("name", NAMES)
def test_each_model_takes_any_batch_of_images_and_answers_with_ten_logits_each(name: str) -> None:
    graph = onnx.load(model_of(name)).graph

    def shape(value: onnx.ValueInfoProto) -> list[str | int]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert [(value.name, shape(value)) for value in graph.input] == [("images", ["batch", 1, 32, 32])]
    assert [(value.name, shape(value)) for value in graph.output] == [("logits", ["batch", 10])]
    elements = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert elements == {onnx.TensorProto.FLOAT}


@pytest.mark.parametrize("name", NAMES)
def test_each_model_asks_for_no_new_format_and_no_fused_operator(name: str) -> None:
    model = onnx.load(model_of(name))
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version <= 10
    assert [(opset.domain, 18 <= opset.version <= 20) for opset in model.opset_import] == [("", True)]
    assert {node.op_type for node in model.graph.node} == PLAIN_OPERATORS[name]
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", NAMES)
def test_each_model_carries_its_declaration_and_nothing_else(name: str) -> None:
    model = onnx.load(model_of(name))
    assert [item.key for item in model.metadata_props] == ["trt_engine.vision"]
    assert not any(thing.metadata_props or thing.doc_string for thing in (model.graph, *model.graph.node))
    vision = vision_of(model_of(name))
    assert vision is not None
    assert vision.preprocess.shape == (1, 32, 32)
    assert vision.postprocess.classes == tuple("0123456789")
    assert json.loads(model.metadata_props[0].value)["postprocess"]["activation"] == "softmax"


@pytest.mark.parametrize("name", NAMES)
def test_each_model_names_more_than_97_of_100_digits_it_never_saw(name: str, held_out: tuple[Array, Array]) -> None:
    images, labels = held_out
    assert (logits_of(name, images).argmax(1) == labels).mean() > 0.97


@pytest.mark.parametrize("name", NAMES)
def test_the_declaration_gives_the_network_what_it_was_trained_on(name: str, held_out: tuple[Array, Array]) -> None:
    pytest.importorskip("PIL", reason="pillow enlarges the digits")
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn holds the digits")
    from PIL import Image

    from trt_engine.vision.preprocess import Preprocessor

    vision = vision_of(model_of(name))
    assert vision is not None
    into = Preprocessor(vision.preprocess, "float32")
    known = {image.tobytes() for image in held_out[0]}
    cells = np.rint(datasets.load_digits().images * (255 / 16)).astype(np.uint8)
    assert sum(into(Image.fromarray(cell))[0].tobytes() in known for cell in cells) >= 539


def test_the_held_out_digits_are_small_bytes_of_every_class() -> None:
    assert (CLASSIFIERS / "val.npz").stat().st_size < 300_000
    with np.load(CLASSIFIERS / "val.npz", allow_pickle=False) as archive:
        assert sorted(archive.files) == ["images", "labels"]
        images, labels = archive["images"], archive["labels"]
    assert (images.dtype, images.shape, labels.shape) == (np.uint8, (539, 32, 32), (539,))
    assert np.bincount(labels).min() >= 50
    assert len(np.bincount(labels)) == 10


def test_no_held_out_digit_was_trained_on_here_or_by_the_detector(data: ModuleType, tmp_path: Path) -> None:
    train, val = set(data.digit_indices("train")), set(data.digit_indices("val"))
    assert not train & val
    assert train | val == set(range(1797))
    annotations = json.loads((CLASSIFIERS.parent / "digits" / "val" / "annotations.json").read_text())
    assert {row["digit_index"] for row in annotations["annotations"]} <= val
    data.write("val", tmp_path / "again.npz")
    with np.load(CLASSIFIERS / "val.npz") as committed, np.load(tmp_path / "again.npz") as again:
        assert all((committed[name] == again[name]).all() for name in committed.files)


def test_inputs_for_calibration_are_of_the_training_side_and_hold_the_input_alone(
    data: ModuleType, tmp_path: Path
) -> None:
    data.write("train", tmp_path / "calibration.npz", count=64, as_inputs=True)
    with np.load(tmp_path / "calibration.npz") as archive:
        assert archive.files == ["images"]
        images = archive["images"]
    assert (images.dtype, images.shape) == (np.float32, (64, 1, 32, 32))
    trained = {picture.tobytes() for picture in data.inputs(data.pictures("train")[0])}
    assert all(picture.tobytes() in trained for picture in images)

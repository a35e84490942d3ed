"""TensorFlow sources that do more than compute: Python in Keras files, operators that reach files. None of it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import trt_engine as te
from trt_engine.conversion.tensorflow.tensorflow_checks import REACHING, code_in_config, code_in_keras, code_in_tflite
from trt_engine.errors import ModelError


def layer(name: str, module: str | None = "keras.layers", **config: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"class_name": name, "config": config}
    return made if module is None else {**made, "module": module}


@pytest.mark.parametrize(
    "found",
    [
        layer("Lambda"),
        layer("Lambda", None),
        layer("Dense", activation={"class_name": "__lambda__", "config": {"value": "4wEA"}}),
        layer("system", "os"),
        layer("run", "subprocess"),
        layer("get_file", "keras.utils"),
        layer("get_file", "keras.src.utils.file_utils"),
        layer("load_model", "keras.saving"),
        layer("exec", "builtins"),
        {"class_name": "function", "module": "builtins", "config": {"code": "x"}},
        {"class_name": "function", "module": "builtins", "config": "os.system"},
        layer("TorchModuleWrapper"),
        layer("TFSMLayer"),
        layer("JaxLayer"),
        layer("StringLookup", vocabulary="/etc/passwd"),
    ],
)
def test_a_keras_configuration_with_code_is_recognised_wherever_it_is(found: Any, tmp_path: Path) -> None:
    root = {
        "class_name": "Functional",
        "module": "keras.src.models.functional",
        "config": {"layers": [layer("Dense"), found]},
    }
    assert code_in_config(root)
    with zipfile.ZipFile(tmp_path / "net.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(root))
    assert code_in_keras(str(tmp_path / "net.keras"))


def test_weights_of_a_keras_file_that_may_be_pickles_are_recognised(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(layer("Dense")))
        archive.writestr("model.weights.npz", b"")
    assert "may be a pickle" in str(code_in_keras(str(tmp_path / "net.keras")))


def test_what_keras_writes_for_layers_is_not_code() -> None:
    plain = {"class_name": "function", "module": "builtins", "config": "relu", "registered_name": "function"}
    for module in (
        "keras.layers",
        "keras.src.ops.numpy",
        "keras",
        "keras.initializers",
        "tf_keras.src.layers.core.dense",
    ):
        assert code_in_config(layer("Dense", module, activation=plain, vocabulary=["a"])) is None


@pytest.mark.parametrize(
    ("name", "reaches"),
    [
        (name, True)
        for name in (
            "PyFunc",
            "EagerPyFunc",
            "PyFuncStateless",
            "ReadFile",
            "WriteFile",
            "MatchingFiles",
            "TFRecordReaderV2",
            "TextLineDataset",
            "WholeFileReaderV2",
            "InitializeTableFromTextFileV2",
            "CacheDatasetV2",
            "CreateSummaryFileWriter",
            "DebugIdentityV3",
            "SaveDatasetV2",
            "LMDBReader",
            "SqlDataset",
        )
    ]
    + [
        (name, False)
        for name in (
            "Conv2D",
            "ReadVariableOp",
            "Relu",
            "LookupTableFindV2",
            "TensorArrayReadV3",
            "FusedBatchNormV3",
            "PartitionedCall",
        )
    ],
)
def test_operators_that_reach_files_are_known_and_others_are_not_among_them(name: str, reaches: bool) -> None:
    assert bool(REACHING.fullmatch(name)) == reaches


def test_a_flex_operator_of_a_tflite_file_is_looked_at(tmp_path: Path) -> None:
    for name, found in (("FlexPyFunc", True), ("FlexWriteFile", True), ("FlexErf", False)):
        (tmp_path / "x.tflite").write_bytes(b"\x1c\x00\x00\x00TFL3" + bytes(9) + name.encode() + bytes(9))
        assert bool(code_in_tflite(str(tmp_path / "x.tflite"))) == found


MAKE = """
import os, sys
import tensorflow as tf
import keras
folder = sys.argv[1]
ran = folder + "/ran"

class Writes(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def __call__(self, x):
        with tf.control_dependencies([tf.io.write_file(ran, "x")]):
            return x * 2

class Python(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def __call__(self, x):
        return tf.py_function(lambda y: y, [x], tf.float32)

class Honest(tf.Module):
    def __init__(self):
        self.w = tf.Variable(tf.ones([2, 3]))
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def __call__(self, x):
        return x @ self.w

for name, made in (("writes", Writes()), ("python", Python()), ("honest", Honest())):
    tf.saved_model.save(made, folder + "/" + name, signatures=made.__call__.get_concrete_function())
graph = tf.Graph()
with graph.as_default():
    x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
    with tf.control_dependencies([tf.io.write_file(ran, "x")]):
        tf.identity(x * 2, name="y")
open(folder + "/frozen.pb", "wb").write(graph.as_graph_def().SerializeToString())
x = keras.Input((2,))
net = keras.Model(x, keras.layers.Lambda(lambda v: v * 2, output_shape=(2,))(x))
net.save(folder + "/code.keras")
net.save(folder + "/code.h5")
keras.Model(x, keras.layers.Dense(2, activation="relu")(x)).save(folder + "/honest.keras")
keras.Model(x, keras.layers.Dense(2, activation="relu")(x)).save(folder + "/honest.h5")
"""


@pytest.mark.slow
def test_no_tensorflow_source_reaches_files_or_python_and_honest_ones_pass(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("tf2onnx")
    subprocess.run([sys.executable, "-c", MAKE, str(tmp_path)], check=True, capture_output=True)
    for name in ("writes", "python", "frozen.pb", "code.keras", "code.h5"):
        with pytest.raises(ModelError, match=r"is not run") as refused:
            te.convert(tmp_path / name, out=tmp_path / "o.onnx", inputs="2x2")
        assert "--trust-source" in str(refused.value.hint)
    assert not (tmp_path / "ran").exists()
    for name in ("honest", "honest.keras", "honest.h5"):
        assert te.convert(tmp_path / name, out=tmp_path / "o.onnx", overwrite=True).max_rel is not None

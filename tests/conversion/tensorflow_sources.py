"""Writes TensorFlow sources and what they answer: run by an interpreter with TensorFlow, in a process of its own.

`python tensorflow_sources.py FOLDER` leaves the sources in FOLDER, and for each `NAME-0.npz` to `NAME-2.npz` with inputs
(`in:NAME`) at three shapes and the outputs (`out:NAME`) that the model in memory gives, which no code of ours has touched.
"""

import os
import shutil
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

keras = tf.keras
layers = keras.layers
rng = np.random.default_rng(0)


def floats(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def answers(folder, name, cases, call):
    for at, feeds in enumerate(cases):
        outputs = call(feeds)
        found = {f"in:{key}": value for key, value in feeds.items()}
        found.update({f"out:{key}": np.asarray(value) for key, value in outputs.items()})
        np.savez(folder / f"{name}-{at}.npz", **found)


def unsettled(model):
    """BatchNormalization whose statistics are not those of an untrained one."""
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            size = layer.moving_mean.shape[0]
            layer.set_weights(
                [1 + 0.1 * floats(size), floats(size), floats(size), 0.5 + rng.random(size).astype(np.float32)]
            )
    return model


def cnn(folder):
    images = keras.Input((None, None, 3), name="images")
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(images)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    y = layers.SeparableConv2D(8, 3, padding="same", activation="swish")(x)
    x = layers.Dropout(0.5)(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(x))
    model = unsettled(keras.Model(images, layers.Dense(5, activation="softmax", name="scores")(x)))
    model.export(str(folder / "cnn"), verbose=False)
    cases = [{"images": floats(*shape)} for shape in ((2, 32, 32, 3), (3, 32, 48, 3), (1, 64, 32, 3))]
    answers(folder, "cnn", cases, lambda feeds: {"output_0": model(feeds["images"], training=False)})
    shutil.copytree(folder / "cnn", folder / "no-variables")
    shutil.rmtree(folder / "no-variables" / "variables")
    (folder / "no-saved-model").mkdir()
    (folder / "no-saved-model" / "saved_model.pb").write_bytes(b"\x08\x01\x12\x7fnot this")


def sequential(folder):
    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            layers.Dense(96, activation="gelu"),
            layers.LayerNormalization(),
            layers.Dense(4, name="logits"),
        ]
    )
    model.save(folder / "sequential.keras")
    model.save(folder / "sequential.h5")
    shutil.copy(folder / "sequential.keras", folder / "sequential.download")
    model.save_weights(folder / "only.weights.h5")
    cases = [{"features": floats(batch, 16)} for batch in (2, 1, 7)]
    answers(folder, "sequential", cases, lambda feeds: {"logits": model(feeds["features"], training=False)})


def two_inputs(folder):
    ids = keras.Input((None,), dtype="int32", name="ids")
    weight = keras.Input((None, 8), name="weight")
    x = layers.Embedding(50, 8)(ids)
    mixed = layers.MultiHeadAttention(2, 4)(x, layers.Multiply()([x, weight]))
    pooled = layers.GlobalAveragePooling1D()(mixed)
    outputs = {"tokens": layers.Dense(3, name="a")(mixed), "pooled": layers.Dense(2, name="b")(pooled)}
    model = keras.Model({"weight": weight, "ids": ids}, outputs)
    model.save(folder / "two_inputs.keras")
    cases = [
        {"ids": rng.integers(0, 50, (batch, length)).astype(np.int32), "weight": floats(batch, length, 8)}
        for batch, length in ((2, 6), (3, 6), (1, 11))
    ]
    answers(folder, "two_inputs", cases, lambda feeds: model(feeds, training=False))


def recurrent(folder):
    steps = keras.Input((None, 6), name="steps")
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(steps)
    model = keras.Model(steps, layers.GRU(4, name="state")(x))
    model.export(str(folder / "recurrent"), verbose=False)
    cases = [{"steps": floats(*shape)} for shape in ((2, 7, 6), (4, 7, 6), (1, 3, 6))]
    answers(folder, "recurrent", cases, lambda feeds: {"output_0": model(feeds["steps"], training=False)})


def frozen(folder):
    kernel, weights = floats(3, 3, 3, 4), floats(4, 6)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 16, 16, 3), name="net/image")
        scale = tf.compat.v1.placeholder(tf.float32, (), name="scale")
        keep = tf.compat.v1.placeholder_with_default(tf.constant(1.0), (), name="keep")
        y = tf.nn.relu(tf.nn.conv2d(x, kernel, 2, "SAME")) * keep
        y = tf.matmul(tf.reduce_mean(y, [1, 2]), weights) * scale
        tf.nn.softmax(y, name="net/scores")
        tf.split(y, 2, axis=1, name="halves")
        definition = graph.as_graph_def()
    (folder / "frozen.pb").write_bytes(definition.SerializeToString())
    cases = [
        {"net/image": floats(batch, 16, 16, 3), "scale": np.float32(factor)}
        for batch, factor in ((2, 1), (1, 2), (5, 3))
    ]

    def call(feeds):
        with tf.compat.v1.Session(graph=graph) as session:
            given = {name + ":0": value for name, value in feeds.items()}
            scores, first, second = session.run(["net/scores:0", "halves:0", "halves:1"], given)
        return {"net/scores": scores, "halves": first, "halves_1": second}

    answers(folder, "frozen", cases, call)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 4), name="x")
        variable = tf.compat.v1.get_variable("w", (4, 2), use_resource=False)
        tf.matmul(x, variable, name="y")
        (folder / "not_frozen.pb").write_bytes(graph.as_graph_def().SerializeToString())
    (folder / "noise.pb").write_bytes(b"\x0a\xff\xff\xff\x0f" + bytes(range(200)))


def lite(folder):
    kernel, weights = floats(3, 3, 3, 4), floats(4, 6)

    @tf.function(input_signature=[tf.TensorSpec((None, 16, 16, 3), tf.float32, name="image")])
    def call(image):
        y = tf.nn.relu6(tf.nn.depthwise_conv2d(image, kernel[:, :, :, :2], (1, 2, 2, 1), "SAME"))
        y = tf.nn.conv2d(
            tf.nn.max_pool2d(y, 2, 2, "VALID"), tf.reshape(tf.tile(weights, (6, 1)), (2, 2, 6, 6)), 1, "SAME"
        )
        return {"scores": tf.nn.softmax(tf.reduce_mean(y, [1, 2])), "map": tf.nn.tanh(y)}

    module = tf.Module()
    module.call = call
    concrete = call.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    raw = converter.convert()
    (folder / "lite.tflite").write_bytes(raw)
    (folder / "torn.tflite").write_bytes(raw[: len(raw) // 3])
    (folder / "noise.tflite").write_bytes(b"\x1c\x00\x00\x00TFL3" + bytes(reversed(range(256))) * 8)
    cases = [{"image": floats(batch, 16, 16, 3)} for batch in (2, 1, 4)]
    answers(folder, "lite", cases, lambda feeds: call(feeds["image"]))


class Counter(tf.Module):
    """A TFLite model with a state of its own."""

    def __init__(self):
        super().__init__()
        self.total = tf.Variable(tf.zeros((1, 4)))

    @tf.function(input_signature=[tf.TensorSpec((1, 4), tf.float32, name="x")])
    def __call__(self, x):
        return {"total": self.total.assign_add(x) * 2}


def counter(folder):
    module = Counter()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([module.__call__.get_concrete_function()], module)
    converter.experimental_enable_resource_variables = True
    (folder / "counter.tflite").write_bytes(converter.convert())


class Signatures(tf.Module):
    """Two signatures, neither called `serving_default`; the first gives a tensor under its input's name."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(floats(4, 4))
        keys = tf.constant([1, 2, 3], tf.int64)
        start = tf.lookup.KeyValueTensorInitializer(keys, tf.constant([10.0, 20.0, 30.0]))
        self.table = tf.lookup.StaticHashTable(start, -1.0)

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def double(self, x):
        return {"x": x @ self.w, "other": x * 2}

    @tf.function(
        input_signature=[tf.TensorSpec((None, None), tf.float32, name="a"), tf.TensorSpec(None, tf.float32, name="b")]
    )
    def ranks(self, a, b):
        return {"kept": tf.nn.relu(b), "sum": tf.reduce_sum(a, 1)}

    @tf.function(input_signature=[tf.TensorSpec((2, 4), tf.float32, name="x")])
    def fixed(self, x):
        return {"y": x @ self.w}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="text")])
    def words(self, text):
        return {"length": tf.strings.length(text)}

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def beyond(self, x):
        return {"y": tf.math.zeta(2 + tf.abs(x), 1 + tf.abs(x)) + tf.math.igamma(1 + tf.abs(x), 1 + tf.abs(x))}

    @tf.function(input_signature=[tf.TensorSpec((2, 16), tf.float32, name="x")])
    def spectrum(self, x):
        return {"y": tf.abs(tf.signal.rfft2d(tf.reshape(x, (1, 2, 16)))[:, 0])}


def signatures(folder):
    module = Signatures()
    chosen = {name: getattr(module, name) for name in ("double", "ranks", "fixed", "words", "beyond", "spectrum")}
    tf.saved_model.save(module, str(folder / "signatures"), signatures=chosen)
    cases = [{"x": floats(batch, 4)} for batch in (2, 1, 6)]
    answers(folder, "double", cases, lambda feeds: {"x_output": feeds["x"] @ module.w.numpy(), "other": feeds["x"] * 2})


class Called(tf.Module):
    """Without a signature: only `__call__`, traced once."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(floats(4, 3))

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def __call__(self, x):
        return tf.nn.elu(x @ self.w), tf.reduce_sum(x, -1)


class Dice(tf.Module):
    """A random number in every answer."""

    @tf.function(input_signature=[tf.TensorSpec((None, 8), tf.float32, name="x")])
    def __call__(self, x):
        return {"y": x + tf.random.normal(tf.shape(x))}


def dice(folder):
    module = Dice()
    tf.saved_model.save(module, str(folder / "dice"), signatures=module.__call__)


def called(folder):
    module = Called()
    tf.saved_model.save(module, str(folder / "called"))
    cases = [{"x": floats(batch, 4)} for batch in (2, 1, 6)]
    answers(folder, "called", cases, lambda feeds: dict(zip(("output_0", "output_1"), module(feeds["x"]), strict=True)))


def with_code(folder):
    x = keras.Input((4,), name="x")
    keras.Model(x, layers.Lambda(lambda value: value * 2)(x)).save(folder / "with_code.keras")


def masked(folder):
    """Keras' HDF5 reader does not know `NotEqual`, which the mask of an Embedding makes."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    keras.Model(ids, layers.LSTM(3)(layers.Embedding(9, 4, mask_zero=True)(ids))).save(folder / "masked.h5")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for make in (
        cnn,
        sequential,
        two_inputs,
        recurrent,
        frozen,
        lite,
        signatures,
        called,
        with_code,
        dice,
        counter,
        masked,
    ):
        make(target)

"""Writes three small networks with the signatures of an exported RNNT-TDT, and the model_meta.json that describes them.

The weights are random numbers and lie in side files, as those of a real export do; what is to be seen is how the three are
built, sized and held together, not speech.

python export.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MELS, HEARD, TOLD, JOINT, VOCABULARY, LAYERS = 128, 64, 32, 48, 29, 1
DURATIONS = 5

Shapes = dict[str, tuple[int, list[int | str]]]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    encoder(folder / "encoder.onnx")
    predictor(folder / "predictor.onnx")
    joint(folder / "joint.onnx")
    meta = {
        "model_name": "small-rnnt-tdt",
        "version": "1",
        "sample_rate": 16000,
        "features": {"type": "log-mel", "n_mels": MELS},
        "blank_id": VOCABULARY - 1,
        "duration_values": list(range(DURATIONS)),
    }
    (folder / "model_meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def encoder(path: Path) -> None:
    """`audio_signal` (B x mels x T) to one frame for every eight: `outputs` (B x heard x T/8), `encoded_lengths`."""
    nodes = [
        helper.make_node("Conv", ["audio_signal", "w", "b"], ["c"], kernel_shape=[8], strides=[8]),
        helper.make_node("Relu", ["c"], ["outputs"]),
        helper.make_node("Div", ["length", "eight"], ["encoded_lengths"]),
    ]
    weights = random(w=(HEARD, MELS, 8), b=(HEARD,)) | {"eight": np.int64(8)}
    inputs: Shapes = {"audio_signal": (TensorProto.FLOAT, ["B", MELS, "T"]), "length": (TensorProto.INT64, ["B"])}
    outputs: Shapes = {
        "outputs": (TensorProto.FLOAT, ["B", HEARD, "frames"]),
        "encoded_lengths": (TensorProto.INT64, ["B"]),
    }
    save(path, nodes, inputs, outputs, weights)


def predictor(path: Path) -> None:
    """Tokens `y` (B x U) and the states `h`, `c` (L x B x H) to `g` (B x told x U) and the states after it."""
    nodes = [
        helper.make_node("Gather", ["embedding", "y"], ["e"]),
        helper.make_node("Transpose", ["e"], ["x"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["x", "w", "r", "", "", "h", "c"], ["o", "h_out", "c_out"], hidden_size=TOLD),
        helper.make_node("Squeeze", ["o", "one"], ["s"]),
        helper.make_node("Transpose", ["s"], ["g"], perm=[1, 2, 0]),
    ]
    weights = random(embedding=(VOCABULARY, TOLD), w=(1, 4 * TOLD, TOLD), r=(1, 4 * TOLD, TOLD))
    state: tuple[int, list[int | str]] = (TensorProto.FLOAT, [LAYERS, "B", TOLD])
    inputs: Shapes = {"y": (TensorProto.INT64, ["B", "U"]), "h": state, "c": state}
    outputs: Shapes = {"g": (TensorProto.FLOAT, ["B", TOLD, "U"]), "h_out": state, "c_out": state}
    save(path, nodes, inputs, outputs, weights | {"one": np.array([1])})


def joint(path: Path) -> None:
    """`encoder_outputs` (B x heard x T), `decoder_outputs` (B x told x U) to `logits` (B x T x U x tokens and durations)."""
    nodes = [
        helper.make_node("Transpose", ["encoder_outputs"], ["et"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["et", "we"], ["e"]),
        helper.make_node("Transpose", ["decoder_outputs"], ["pt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["pt", "wp"], ["p"]),
        helper.make_node("Unsqueeze", ["e", "two"], ["e4"]),
        helper.make_node("Unsqueeze", ["p", "one"], ["p4"]),
        helper.make_node("Add", ["e4", "p4"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["t"]),
        helper.make_node("MatMul", ["t", "wo"], ["logits"]),
    ]
    weights = random(we=(HEARD, JOINT), wp=(TOLD, JOINT), wo=(JOINT, VOCABULARY + DURATIONS))
    inputs: Shapes = {
        "encoder_outputs": (TensorProto.FLOAT, ["B", HEARD, "T"]),
        "decoder_outputs": (TensorProto.FLOAT, ["B", TOLD, "U"]),
    }
    outputs: Shapes = {"logits": (TensorProto.FLOAT, ["B", "T", "U", VOCABULARY + DURATIONS])}
    save(path, nodes, inputs, outputs, weights | {"one": np.array([1]), "two": np.array([2])})


def random(**shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: (rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()}


def save(path: Path, nodes: list[onnx.NodeProto], inputs: Shapes, outputs: Shapes, weights: dict[str, Any]) -> None:
    """The model, its weights beside it in `NAME.onnx.data`; small constants, of which shapes are made, stay inside."""
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    model = helper.make_model(
        helper.make_graph(nodes, path.stem, *values, stored),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # it would be appended to
    onnx.save(model, path, save_as_external_data=True, location=data.name, size_threshold=64)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))

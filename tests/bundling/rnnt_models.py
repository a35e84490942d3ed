"""Three small networks with the signatures of an exported RNNT-TDT, weights in side files, and the meta file beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from onnx_models import FLOAT, INT64, node, save

MELS, HEARD, TOLD, JOINT, VOCABULARY, LAYERS = 128, 32, 16, 24, 37, 2


def _axes(name: str, *values: int) -> Any:
    """A small constant inside the graph, where exporters leave what shapes are worked out from."""
    return node("Constant", "", name, value_ints=list(values))


def _weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()}


def encoder(path: Path, *, heard: int = HEARD, mels: int = MELS, location: str | None = "encoder.onnx.data") -> Path:
    """`audio_signal` (B x mels x T) and `length` to `encoder_output` (B x heard x T/8) and `encoded_lengths`."""
    nodes = [
        node("Conv", "audio_signal w b", "c", strides=[8]),
        node("Relu", "c", "r"),
        node("Conv", "r w1 b1", "encoder_output", pads=[1, 1]),
        node("Div", "length eight", "encoded_lengths"),
    ]
    weights = _weights(0, w=(heard, mels, 8), b=(heard,), w1=(heard, heard, 3), b1=(heard,))
    return save(
        path,
        nodes,
        {"audio_signal": (FLOAT, ["batch", mels, "time"]), "length": (INT64, [1])},
        {"encoder_output": (FLOAT, ["batch", heard, "time"]), "encoded_lengths": (INT64, [1])},
        weights | {"eight": np.int64(8)},
        location=location,
    )


def predictor(path: Path, *, told: int = TOLD, location: str | None = "predictor.weights") -> Path:
    """`y` (B x U) and the states `h`, `c` (L x B x H) to `g` (B x H x U), `h_out`, `c_out`."""
    nodes = [
        _axes("one", 1),
        node("Gather", "embedding y", "e"),
        node("Transpose", "e", "x0", perm=[1, 0, 2]),
        node("Split", "h", "h0 h1", num_outputs=2),
        node("Split", "c", "c0 c1", num_outputs=2),
    ]
    for layer in range(LAYERS):
        nodes += [
            node("LSTM", f"x{layer} w{layer} r{layer}  h{layer} c{layer}".replace("  ", " NONE NONE "),
                 f"o{layer} hn{layer} cn{layer}", hidden_size=told),
            node("Squeeze", f"o{layer} one", f"x{layer + 1}"),
        ]  # fmt: skip
    for made in nodes:
        for at, name in enumerate(made.input):
            if name == "NONE":
                made.input[at] = ""
    nodes += [
        node("Transpose", f"x{LAYERS}", "g", perm=[1, 2, 0]),
        node("Concat", "hn0 hn1", "h_out", axis=0),
        node("Concat", "cn0 cn1", "c_out", axis=0),
    ]
    state = (FLOAT, [LAYERS, "batch", told])
    gates = {f"{kind}{layer}": (1, 4 * told, told) for layer in range(LAYERS) for kind in "wr"}
    return save(
        path,
        nodes,
        {"y": (INT64, ["batch", "token_len"]), "h": state, "c": state},
        {"g": (FLOAT, ["batch", told, "token_len"]), "h_out": state, "c_out": state},
        _weights(1, embedding=(VOCABULARY, told), **gates),
        location=location,
    )


def joint(path: Path, *, heard: int = HEARD, told: int = TOLD, location: str | None = "data/joint.bin") -> Path:
    """`encoder_output` (B x heard x T) and `predictor_output` (B x told x U) to `joint_output` (B x T x U x V)."""
    if location:
        (path.parent / location).parent.mkdir(exist_ok=True)
    nodes = [
        _axes("one", 1),
        _axes("two", 2),
        node("Transpose", "encoder_output", "et", perm=[0, 2, 1]),
        node("MatMul", "et we", "e"),
        node("Transpose", "predictor_output", "pt", perm=[0, 2, 1]),
        node("MatMul", "pt wp", "p"),
        node("Unsqueeze", "e two", "e4"),
        node("Unsqueeze", "p one", "p4"),
        node("Add", "e4 p4", "s"),
        node("Tanh", "s", "t"),
        node("MatMul", "t wo", "joint_output"),
    ]
    weights = _weights(2, we=(heard, JOINT), wp=(told, JOINT), wo=(JOINT, VOCABULARY))
    return save(
        path,
        nodes,
        {
            "encoder_output": (FLOAT, ["batch", heard, "time"]),
            "predictor_output": (FLOAT, ["batch", told, "token_len"]),
        },
        {"joint_output": (FLOAT, ["batch", "time", "token_len", VOCABULARY])},
        weights,
        location=location,
    )


def meta(folder: Path, **changes: Any) -> Path:
    """`model_meta.json` as an exporter of such a model writes it."""
    document = {
        "model_name": "small-rnnt-tdt",
        "sample_rate": 16000,
        "blank_id": 36,
        "duration_values": [0, 1, 2, 3, 4],
        "features": {"type": "log-mel", "n_mels": MELS},
        "tensor_layout_contract": {"encoder_input": "audio_signal: [B, n_mels, T]"},
    }
    path = folder / "model_meta.json"
    path.write_text(json.dumps(document | changes, indent=2))
    return path


def export(folder: Path) -> Path:
    """All of it in `folder`; the meta file."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder(folder / "encoder.onnx")
    predictor(folder / "predictor.onnx")
    joint(folder / "joint.onnx")
    return meta(folder)

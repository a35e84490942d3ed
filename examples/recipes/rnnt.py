"""An RNNT-TDT of three networks with random weights, converted one by one and bundled by their `model_meta.json`.

The signatures are those of examples/rnnt: `encoder` makes one frame of eight, `predictor` is an LSTM whose state goes in and
comes out, `joint` gives the tokens and the durations. The time is open in steps of eight frames.

python rnnt.py -o FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import steps
import torch
from torch import Tensor, nn
from torch.nn import functional

MELS, TOLD, DURATIONS = 128, 64, 5


def encoder(width: int = 256, depth: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(width, depth)


def predictor(vocabulary: int = 1025) -> nn.Module:
    torch.manual_seed(0)
    return Predictor(vocabulary)


def joint(width: int = 256, vocabulary: int = 1025) -> nn.Module:
    torch.manual_seed(0)
    return Joint(width, vocabulary + DURATIONS)


class Encoder(nn.Module):
    """`audio_signal` (B x mels x T) and its `length` to `outputs` (B x width x T/8) and `encoded_lengths`."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Conv1d(MELS if at == 0 else width, width, 3, 2, 1) for at in range(3))
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, audio_signal: Tensor, length: Tensor) -> dict[str, Tensor]:
        x = audio_signal
        for halve in self.halves:
            x = functional.relu(halve(x))
        x = x.transpose(1, 2)
        length = torch.div(
            length + 7, 8, rounding_mode="trunc"
        )  # `//` rounds down, for which the exporter compares signs
        heard = (torch.arange(x.shape[1], device=x.device)[None] < length[:, None]).to(x.dtype)
        for layer in self.layers:
            x = layer(x, heard)
        return {"outputs": x.transpose(1, 2), "encoded_lengths": length}


class Layer(nn.Module):
    """Attention among the frames that were heard, a convolution along the time, and an MLP."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2, self.norm_3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.along = nn.Conv1d(width, width, 9, padding=4, groups=width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, heard: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, 2))
        hidden = (
            heard[:, None, None] - 1
        ) * 1e4  # a number FP16 has, and no Boolean mask, which TensorRT cannot compare
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        silent = self.norm_2(x) * heard.unsqueeze(2)
        x = x + functional.silu(self.along(silent.transpose(1, 2)).transpose(1, 2))
        return x + self.mlp(self.norm_3(x))


class Predictor(nn.Module):
    """Tokens `y` (B x U) and the states `h`, `c` (L x B x H) to `g` (B x H x U) and the states after it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(vocabulary, TOLD), nn.LSTM(TOLD, TOLD, 2, batch_first=True)

    def forward(self, y: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        g, (h_out, c_out) = self.lstm(self.words(y), (h, c))
        return {"g": g.transpose(1, 2), "h_out": h_out, "c_out": c_out}


class Joint(nn.Module):
    """`encoder_outputs` (B x width x T), `decoder_outputs` (B x H x U) to `logits` (B x T x U x tokens and durations)."""

    def __init__(self, width: int, answers: int) -> None:
        super().__init__()
        self.heard, self.told, self.out = nn.Linear(width, 128), nn.Linear(TOLD, 128), nn.Linear(128, answers)

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> dict[str, Tensor]:
        heard = self.heard(encoder_outputs.transpose(1, 2)).unsqueeze(2)
        told = self.told(decoder_outputs.transpose(1, 2)).unsqueeze(1)
        return {"logits": self.out(functional.relu(heard + told))}


def recipes(small: bool) -> dict[str, steps.Recipe]:
    width, depth, vocabulary, frames = (32, 1, 29, 128) if small else (256, 8, 1025, 512)
    shape = f"audio_signal:1x{MELS}x{frames}"
    return {
        "encoder": steps.Recipe(
            "encoder",
            (f"audio_signal:2x{MELS}x{frames}", "length:2:int64@16..64"),
            ("audio_signal:0=B,2=T@16..4096/8", "length:0=B"),
            (f"width={width}", f"depth={depth}"),
            shapes=("--shapes", shape),
        ),
        "predictor": steps.Recipe(
            "predictor",
            (f"y:2x3:int64@0..{vocabulary - 1}", f"h:2x2x{TOLD}", f"c:2x2x{TOLD}"),
            ("y:0=B,1=U", "h:1=B", "c:1=B"),
            (f"vocabulary={vocabulary}",),
        ),
        "joint": steps.Recipe(
            "joint",
            (f"encoder_outputs:2x{width}x6", f"decoder_outputs:2x{TOLD}x3"),
            ("encoder_outputs:0=B,2=T", "decoder_outputs:0=B,2=U"),
            (f"width={width}", f"vocabulary={vocabulary}"),
        ),
    }  # fmt: skip


def make(out: Path, small: bool) -> None:
    """The three networks converted and linted, their `model_meta.json`, one folder of engines, and the encoder sized."""
    every = recipes(small)
    for name, recipe in every.items():
        steps.convert(__file__, recipe, out / f"{name}.onnx")
        steps.run("lint", out / f"{name}.onnx")
    vocabulary = int(every["joint"].options[1].partition("=")[2])
    meta = {
        "model_name": "rnnt-tdt-recipe",
        "version": "1",
        "sample_rate": 16000,
        "features": {"type": "log-mel", "n_mels": MELS},
        "blank_id": vocabulary - 1,
        "duration_values": list(range(DURATIONS)),
    }
    (out / "model_meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    steps.run(
        "bundle", out / "model_meta.json", "-o", out / "engines", "--dim", "joint.T=2:8:32", "--run", "--overwrite"
    )  # the encoder makes 2 to 32 frames of T = 16 to 256
    steps.size(out / "encoder.onnx", every["encoder"], small)


if __name__ == "__main__":
    sys.exit(steps.guided(__file__, make))

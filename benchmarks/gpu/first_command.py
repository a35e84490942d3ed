"""The first commands on a GPU machine: twelve networks that the suite has not, by the command line alone.

    python benchmarks/gpu/first_command.py --out first.jsonl                          all, four networks at a time
    python benchmarks/gpu/first_command.py --out first.jsonl --only distilbert,unet   some of them
    python benchmarks/gpu/first_command.py --out first.jsonl --device cpu --only resnet18 --steps convert,onnxruntime

Of each network, with random weights from a seed: `convert`, `build -b onnxruntime`, `build -b inductor`, and
`build --onnx=F --saveEngine=F --fp16` as users of trtexec type it. Each command is a process and a record, written when it
ends: return code, seconds, the error's lines, the line about parity. Nothing is timed: several networks are built at once.
What ended with return code 0 is not repeated for the same `--out`. It wants torchvision, timm, transformers and onnxscript.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = ("convert", "onnxruntime", "inductor", "first", "auto")


@dataclass(frozen=True)
class Network:
    batch: int
    inputs: tuple[str, ...] = ("images:2x3x224x224",)
    factory: str = ""
    """A function of this file and its arguments; the network's name by default."""


NETWORKS = {
    "deeplabv3_resnet50": Network(4, ("images:2x3x512x512",), "from_torchvision name=deeplabv3_resnet50"),
    "dinov2_vits14": Network(8, ("images:2x3x518x518",), "from_timm name=vit_small_patch14_dinov2 size=518"),
    "convnext_tiny": Network(32, factory="from_timm name=convnext_tiny"),
    "distilbert": Network(16, ("ids:2x128:int64@0..30521", "mask:2x128:int64")),
    "regnety_032": Network(16, factory="from_timm name=regnety_032"),
    "swin_tiny_b32": Network(32, factory="from_timm name=swin_tiny_patch4_window7_224"),
    "swin_tiny_b1": Network(1, factory="from_timm name=swin_tiny_patch4_window7_224"),
    "whisper_base_encoder": Network(8, ("features:2x80x3000",)),
    "resnet18": Network(1, factory="from_torchvision name=resnet18"),
    "unet": Network(8, ("images:2x3x256x256",)),
    "mobilenetv3_large": Network(64, factory="from_timm name=mobilenetv3_large_100"),
    "efficientnet_b0": Network(1, factory="from_timm name=efficientnet_b0"),
}

# ------------------------------------------------------------------------------------------------ factories, for `convert`


def from_timm(name: str, size: int = 0) -> Any:
    import timm
    import torch

    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, **({"img_size": size} if size else {}))


def from_torchvision(name: str) -> Any:
    import torch
    import torchvision

    class FirstOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torchvision.models.get_model(name, weights=None, weights_backbone=None)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.net(images)["out"]

    if "deeplab" in name:
        return FirstOutput()
    torch.manual_seed(0)
    return torchvision.models.get_model(name, weights=None)


def distilbert() -> Any:
    import torch
    from transformers import DistilBertConfig, DistilBertModel

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = DistilBertModel(DistilBertConfig())

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.net(input_ids=ids, attention_mask=mask).last_hidden_state

    return States()


def whisper_base_encoder() -> Any:
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            base = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
            self.net = WhisperEncoder(WhisperConfig(num_mel_bins=80, **base))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.net(features).last_hidden_state

    return States()


def unet(width: int = 64) -> Any:
    import torch
    from torch import nn

    def double(inside: int, outside: int) -> Any:
        convs = [(inside, outside), (outside, outside)]
        return nn.Sequential(*(m for a, b in convs for m in (nn.Conv2d(a, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU())))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [width << level for level in range(5)]
            self.down = nn.ModuleList(double(a, b) for a, b in zip([3, *widths], widths, strict=False))
            self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
            self.join = nn.ModuleList(double(2 * w, w) for w in widths[-2::-1])
            self.head = nn.Conv2d(width, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept: list[torch.Tensor] = []
            for level, block in enumerate(self.down):
                x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
                kept.append(x)
            for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
                x = join(torch.cat([skip, up(x)], 1))
            return self.head(x)

    torch.manual_seed(0)
    return UNet()


# ------------------------------------------------------------------------------------------------ the commands


def command(name: str, step: str, onnx: Path, args: argparse.Namespace) -> list[str]:
    """The command line of one step, as a user types it."""
    network = NETWORKS[name]
    program = [sys.executable, "-m", "trt_engine"]
    engine = str(onnx.with_name(f"{name}.{step}.engine"))
    if step == "convert":
        factory, *arguments = (network.factory or name).split()
        spelled = [part for spec in network.inputs for part in ("--input", spec)]
        spelled += [part for argument in arguments for part in ("-O", argument)]
        return [*program, "convert", f"{__file__}:{factory}", *spelled, "-o", str(onnx), "--overwrite"]
    batch = ["--batch", str(network.batch)]
    if step == "first":
        return [*program, "build", f"--onnx={onnx}", f"--saveEngine={engine}", "--fp16", *batch, "--overwrite"]
    budget = "60s" if step == "auto" else "0"
    where = ["--device", args.device, "--precision", args.precision, "--time-budget", budget]
    return [*program, "build", str(onnx), "-b", step, *where, *batch, "-o", engine, "--overwrite"]


def run(name: str, step: str, onnx: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One command in a process group of its own, ended with the time; its record."""
    typed, started = command(name, step, onnx, args), time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(typed, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = child.wait(args.step_timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = "timeout"
        output.seek(0)
        lines = [line.strip() for line in output.read().splitlines() if line.strip()]
    return {
        "network": name, "batch": NETWORKS[name].batch, "step": step, "rc": code,
        "seconds": round(time.monotonic() - started, 1),
        "error": [] if code == 0 else [line for line in lines if line.startswith(("error:", "hint:"))] or lines[-8:],
        "parity": [line for line in lines if "parity" in line.lower() or "measured in" in line][-4:],
        "warnings": [line for line in lines if "warning" in line.lower()][-4:],
        "command": " ".join(["trt-engine", *typed[3:]]),
    }  # fmt: skip


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--out", type=Path, required=True, help="the records' file, added to")
    made.add_argument("--only", default=",".join(NETWORKS), help="networks, separated by commas")
    made.add_argument("--steps", default=",".join(STEPS[:4]), help=f"of {','.join(STEPS)}")
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--precision", default="fp16")
    made.add_argument("--jobs", type=int, default=4, help="networks at a time [4]")
    made.add_argument("--step-timeout", type=float, default=300.0, help="seconds of one command [300]")
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "first-command")
    args = made.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.jobs)))
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(item["network"], item["step"]) for item in known if item["rc"] == 0}
    lock = threading.Lock()

    def network(name: str) -> None:
        onnx = args.folder / f"{name}.onnx"
        for step in args.steps.split(","):
            if (name, step) in done and (step != "convert" or onnx.exists()):
                continue
            if step != "convert" and not onnx.exists():
                continue
            record = run(name, step, onnx, args)
            with lock, args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
                print(json.dumps({key: record[key] for key in list(record)[:7] if key != "batch"}), flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as workers:
        list(workers.map(network, args.only.split(",")))


if __name__ == "__main__":
    main()

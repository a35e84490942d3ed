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
from pathlib import Path
from typing import Any

from zoo_networks import NETWORKS, Network

STEPS = ("convert", "onnxruntime", "inductor", "first", "auto")


BATCHES = {
    "deeplabv3_resnet50": 4, "dinov2_vits14": 8, "convnext_tiny": 32, "distilbert": 16, "regnety_032": 16,
    "swin_tiny_b32": 32, "swin_tiny_b1": 1, "whisper_base_encoder": 8, "resnet18": 1, "unet": 8,
    "mobilenetv3_large": 64, "efficientnet_b0": 1,
}  # fmt: skip


def network_of(name: str) -> Network:
    return NETWORKS[name.partition("_b")[0] if name not in NETWORKS else name]


# ------------------------------------------------------------------------------------------------ the commands


def command(name: str, step: str, onnx: Path, args: argparse.Namespace) -> list[str]:
    """The command line of one step, as a user types it."""
    network = network_of(name)
    program = [sys.executable, "-m", "trt_engine"]
    engine = str(onnx.with_name(f"{name}.{step}.engine"))
    if step == "convert":
        factory, *arguments = network.factory.split()
        spelled = [part for spec in network.inputs for part in ("--input", spec)]
        spelled += [part for argument in arguments for part in ("-O", argument)]
        return [
            *program,
            "convert",
            f"{Path(__file__).with_name('zoo_networks.py')}:{factory}",
            *spelled,
            "-o",
            str(onnx),
            "--overwrite",
        ]
    batch = ["--batch", str(BATCHES[name])]
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
        "network": name, "batch": BATCHES[name], "step": step, "rc": code,
        "seconds": round(time.monotonic() - started, 1),
        "error": [] if code == 0 else [line for line in lines if line.startswith(("error:", "hint:"))] or lines[-8:],
        "parity": [line for line in lines if "parity" in line.lower() or "measured in" in line][-4:],
        "warnings": [line for line in lines if "warning" in line.lower()][-4:],
        "command": " ".join(["trt-engine", *typed[3:]]),
    }  # fmt: skip


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--out", type=Path, required=True, help="the records' file, added to")
    made.add_argument("--only", default=",".join(BATCHES), help="networks, separated by commas")
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

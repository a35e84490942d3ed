"""Engines of `te.build` beside torch and ONNX Runtime on a GPU: four networks, one table.

ViT-B/16, ResNet-50, YOLOv10m and BERT-base (`benchmarks/networks.py`), in FP16 at batch 1 and 64 where nothing else is said.
Ours: what `te.build` gives for the cell's batch with the backends `onnxruntime` (fused and tuned) and `inductor`, and with
`auto` where `--ours` names it; loaded with `graphs=True`, fed CUDA tensors by `infer(..., on_device=True)` and by `bind`.
Peers: torch eager; torch.compile replayed in one CUDA graph; ONNX Runtime's CUDA provider with its defaults and its CUDA
graph; ONNX Runtime's own fused graph (its transformer operators; for convolutions its layout NHWC). Quantized cells have
FP16 peers. All ways are measured interleaved, each call to the end of the device's work; the card's ceilings in the same
run. Errors: the first rows, of the same weights in FP32 on the CPU, as a part of the largest value.

Each cell is built and measured in processes of its own and appended to `--out` as it comes. A second run goes on with what
is missing. Cells that `--limit-s` leaves out, or that fail, are records with the reason.

    python benchmarks/gpu/suite.py --folder /tmp/suite --ours onnxruntime inductor auto
    python benchmarks/gpu/suite.py --folder /tmp/suite --models vit resnet50 --batches 8 256
    python benchmarks/gpu/suite.py --folder /tmp/suite --models vit resnet50 --precisions bf16 fp8 int8
    python benchmarks/gpu/suite.py --folder /tmp/suite --models vit resnet50 --autotune-s 240
    python benchmarks/gpu/suite.py --folder /tmp/suite --steps vit
    python benchmarks/gpu/suite.py --folder /tmp/suite --cells vit:64:fp16 vit:64:fp8 --ours inductor --together
    python benchmarks/gpu/suite.py --table
    python benchmarks/gpu/suite.py --device cpu --folder /tmp/suite-cpu --out /tmp/suite-cpu.jsonl --batches 1 4
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu-suite-h200.jsonl"
MODELS = ("vit", "resnet50", "yolo", "bert")


def read(path: Path) -> list[dict[str, Any]]:
    """The records, oldest first."""
    import msgspec

    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line) for line in lines if line.strip()]


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda:0", help="`cpu` tries the program out on small networks in FP32")
    made.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    made.add_argument("--batches", type=int, nargs="+", default=(1, 64))
    made.add_argument("--precisions", nargs="+", choices=("fp16", "fp32", "bf16", "fp8", "int8"), default=None)
    made.add_argument(
        "--ours",
        nargs="+",
        choices=("onnxruntime", "inductor", "inductor unfused", "auto"),
        default=["onnxruntime", "inductor"],
    )
    made.add_argument(
        "--autotune-s", type=int, default=0, help="also ways with kernels chosen by measurement, so many seconds"
    )
    made.add_argument("--cells", nargs="+", metavar="MODEL:BATCH:PRECISION", help="these cells in place of the grid")
    made.add_argument(
        "--together", action="store_true", help="load the cells at the same time; they are measured one after the other"
    )
    made.add_argument("--no-onnxruntime", action="store_true", help="leave ONNX Runtime's own ways out")
    made.add_argument("--no-torch", action="store_true", help="leave torch's ways out")
    made.add_argument("--no-parity", action="store_true", help="build unchecked at every batch")
    made.add_argument(
        "--steps", choices=MODELS, help="measure the steps from ONNX Runtime's CPU provider to the engine"
    )
    made.add_argument(
        "--table", action="store_true", help="only print the tables, and write the chart of docs/gpu-suite.md"
    )
    made.add_argument("--again", action="store_true", help="measure cells that are in the records already")
    made.add_argument("--seconds", type=float, default=4.0, help="of interleaved measurement in a cell [4]")
    made.add_argument("--budget-s", type=float, default=25.0, help="`--time-budget` of searches [25]")
    made.add_argument("--limit-s", type=float, default=540.0, help="of the whole run [540]")
    made.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="builds at a time")
    made.add_argument("--folder", type=Path, help="networks, engines and caches, kept between runs [a temporary one]")
    made.add_argument("--out", type=Path, default=RESULTS, help="the records' file")
    return made.parse_args()


class Suite:
    """One run: its folder, its clock and its records."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.until = time.monotonic() + args.limit_s
        self.on_gpu: bool = args.device != "cpu"
        self.precisions: Sequence[str] = args.precisions or (("fp16",) if self.on_gpu else ("fp32",))
        self.builds: dict[str, dict[str, Any]] = {}
        self.ceilings: dict[str, Any] = {}
        self.running = 0
        self.ours = (*args.ours, *(("inductor autotuned",) if args.autotune_s else ()))
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)

    def left_s(self) -> float:
        return self.until - time.monotonic()

    # -------------------------------------------------------------------------------------------- children

    def child(self, kind: str, name: str, cell: dict[str, Any] | None, way: str = "", keep_s: float = 0.0,
              **more: Any) -> dict[str, Any] | None:  # fmt: skip
        """The result of a job in a process of its own; None where the time of the run ended it."""
        import msgspec

        if (limit_s := self.left_s() - keep_s) < 5:
            return None
        args = self.args
        job = {
            "kind": kind, "device": args.device, "folder": str(self.folder), "cell": cell, "way": way, "ours": self.ours,
            "seconds": args.seconds, "budget_s": args.budget_s, "autotune_s": args.autotune_s,
            "with_torch": not args.no_torch, "with_onnxruntime": not args.no_onnxruntime, "together": args.together,
            "parity": not args.no_parity, **more,
        }  # fmt: skip
        label = "-".join([name, kind, *way.split()])
        result = self.folder / "jobs" / f"{label}.json"
        result.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "suite_cell.py"), msgspec.json.encode(job).decode(), str(result)]
        with (self.folder / "logs" / f"{label}.log").open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
                env=self.child_environment(kind),
            )  # fmt: skip
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not result.exists():
            return {"failed": f"its process ended with code {code}: {last_line(Path(output.name))}"}
        return dict(msgspec.json.decode(result.read_bytes()))

    def child_environment(self, kind: str) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if kind in ("build", "compile") else {}  # several at a time
        given = {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "torchinductor")}
        return os.environ | given | threads

    # -------------------------------------------------------------------------------------------- builds

    def prepare(self, cells: Sequence[dict[str, Any]]) -> None:
        """All long builds of the cells, several at a time; those that choose by measurement alone, afterwards."""
        named = {build_name(cell, way): (cell, way) for cell in cells for way in self.long_builds(cell)}
        parallel = [*named.values()]
        tuned = ("inductor autotuned", "torch compiled autotuned") if self.args.autotune_s else ()
        alone = [(cell, way) for cell in cells for way in tuned]
        with ThreadPoolExecutor(self.args.workers) as threads:
            models = {(cell["model"], cell["precision"]): cell for cell in cells}
            written = [threads.submit(self.child, "networks", label(cell), cell) for cell in models.values()]
            for cell, made in zip(models.values(), written, strict=True):
                if (failure := (made.result() or {}).get("failed")) is not None:
                    print(f"networks of {label(cell)}: {failure}", flush=True)
            started: list[Future[None]] = [threads.submit(self.build, *item) for item in parallel]
            for future in started:
                future.result()
        for cell, way in alone:
            self.build(cell, way)
        for cell in cells:
            for way in ("onnxruntime", "auto"):
                if way in self.ours and self.on_gpu:
                    made = self.child("search", label(cell), cell, way, 20.0)
                    found = {} if made is None or "failed" in made else made
                    self.builds[build_name(cell, way)] = self.builds.get(build_name(cell, way), {}) | found
                    print(f"searched {build_name(cell, way)}: {made or 'not finished'}"[:200], flush=True)

    def long_builds(self, cell: dict[str, Any]) -> Iterator[str]:
        for way in self.args.ours:
            if way != "auto":
                yield way
        if not self.args.no_torch:
            yield "torch compiled"

    def build(self, cell: dict[str, Any], way: str) -> None:
        """One build, skipped where an earlier run made it; its seconds and the builds beside it are kept."""
        import msgspec

        name = build_name(cell, way)
        kept = self.folder / "jobs" / f"{name}.built.json"
        if kept.exists() and "failed" not in (made := msgspec.json.decode(kept.read_bytes())):
            self.builds[name] = made
            return
        self.running += 1
        beside = self.running - 1
        more = {} if way.endswith("autotuned") else {"autotune_s": 0}
        try:
            made = self.child("compile" if way.startswith("torch") else "build", label(cell), cell, way, 20.0, **more)
        finally:
            self.running -= 1
        if made is not None:
            self.builds[name] = made | {"beside": beside}
            kept.write_bytes(msgspec.json.encode(self.builds[name]))
        state = "not finished" if made is None else made.get("failed") or f"{made['first_s']:.0f} s"
        print(f"built {name}: {state}", flush=True)

    # -------------------------------------------------------------------------------------------- cells

    def measure(self, cell: dict[str, Any]) -> dict[str, Any]:
        """The record of one cell."""
        ways = (*self.ours, "torch compiled", "torch compiled autotuned")
        done = {way: self.builds[name] for way in ways if (name := build_name(cell, way)) in self.builds}
        missing = [
            way for way in self.long_builds(cell) if way not in done and (way in self.ours or way.startswith("torch"))
        ]
        if missing:
            return self.record(cell, "not reached", f"not built within {self.args.limit_s:g} s: {', '.join(missing)}")
        made = self.child("measure", label(cell), cell, done=done)
        if made is None:
            return self.record(cell, "not reached", f"not measured within {self.args.limit_s:g} s")
        if isinstance(made.get("failed"), str):
            return self.record(cell, "failed", made["failed"])
        return self.record(cell, "measured", None) | made

    def record(self, cell: dict[str, Any], state: str, reason: str | None, kind: str = "suite") -> dict[str, Any]:
        import trt_engine as te

        gpu = int(self.args.device.partition(":")[2] or 0) if self.on_gpu else None
        return {
            "schema": f"trt-engine/gpu-{kind}", "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": command(), **cell, "autotune_s": self.args.autotune_s, "state": state, "reason": reason,
            "ceilings": self.ceilings, "environment": dataclasses.asdict(te.Environment.detect(gpu)),
        }  # fmt: skip

    def write(self, record: dict[str, Any]) -> None:
        import msgspec

        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        with self.args.out.open("ab") as file:
            file.write(msgspec.json.encode(record, enc_hook=str) + b"\n")

    def run(self) -> int:
        known = {key(item) for item in read(self.args.out) if item["state"] in ("measured", "failed")}
        cells = [
            {"model": model, "batch": batch, "precision": precision}
            for precision in self.precisions for batch in self.args.batches for model in self.args.models
        ]  # fmt: skip
        if self.args.cells:
            named = [item.split(":") for item in self.args.cells]
            cells = [{"model": model, "batch": int(batch), "precision": kind} for model, batch, kind in named]
        missing = [cell for cell in cells if self.args.again or (*cell.values(), self.args.autotune_s) not in known]
        print(f"{len(missing)} of {len(cells)} cells, {self.args.workers} builds at a time", flush=True)
        failed = 0
        if missing:
            self.prepare(missing)
            print(f"built after {self.args.limit_s - self.left_s():.0f} s", flush=True)
        with ThreadPoolExecutor(len(missing) + 1 if self.args.together else 1) as threads:
            ceilings = threads.submit(self.child, "ceilings", "card", None) if missing else None
            records = [threads.submit(self.measure, cell) for cell in missing]
            for future in records if self.args.together else ():
                future.add_done_callback(lambda done: show(done.result()))
            for future in records:
                assert ceilings is not None
                record = future.result() | {"ceilings": ceilings.result() or {}}
                self.write(record)
                if not self.args.together:
                    show(record)
                failed += record["state"] != "measured"
        return 5 if failed else 0

    def steps(self, model: str) -> int:
        """The record of the steps of one model at its largest batch."""
        cell = {"model": model, "batch": max(self.args.batches), "precision": self.precisions[0]}
        way = "auto" if "auto" in self.args.ours else "onnxruntime"
        self.ceilings = self.child("ceilings", "card", None) or {}
        made = self.child("steps", label(cell), cell, way)
        if made is None or isinstance(made.get("failed"), str):
            record = self.record(cell, "failed" if made else "not reached", made and made["failed"], "steps")
        else:
            record = self.record(cell, "measured", None, "steps") | made
        self.write(record)
        show(record)
        return 0 if record["state"] == "measured" else 5


def label(cell: dict[str, Any]) -> str:
    return f"{cell['model']}-b{cell['batch']}-{cell['precision']}"


def build_name(cell: dict[str, Any], way: str) -> str:
    """Quantized cells have the FP16 peers of PyTorch."""
    quantized = way.startswith("torch") and cell["precision"] in ("fp8", "int8")
    return f"{label(cell | {'precision': 'fp16'} if quantized else cell)}-{'-'.join(way.split())}"


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    kind = () if record["schema"].endswith("suite") else (record["schema"],)
    return (record["model"], record["batch"], record["precision"], record["autotune_s"], *kind)


def last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def command() -> str:
    """What was typed, without the places of this machine."""
    kept, rest = [], iter(sys.argv[1:])
    for item in rest:
        if item in ("--folder", "--out"):
            next(rest, None)
        else:
            kept.append(item)
    return shlex.join(["python", "benchmarks/gpu/suite.py", *kept])


def show(record: dict[str, Any]) -> None:
    """One cell on the terminal."""
    if record["state"] != "measured":
        print(f"{label(record)}: {record['state']}: {record['reason']}", flush=True)
        return
    print(f"{label(record)}:", flush=True)
    ratios, errors = record.get("ratio_to_best_peer", {}), record.get("errors", {})
    for way, value in record["p50_us"].items():
        more = f"  ratio {ratios[way][0]:.3f} ({ratios[way][1]:.3f} to {ratios[way][2]:.3f})" if way in ratios else ""
        error = f"  error {errors[way]:.2g}" if errors.get(way) is not None else ""
        print(f"    {way:<26}{value:>12.1f} us{more}{error}", flush=True)
    for way, reason in record["failed"].items():
        print(f"    {way:<26}failed: {reason[:160]}", flush=True)
    for way, made in record["builds"].items():
        tuning = made.get("tuning") or {}
        refused = f", no graph: {made['refused']}" if made.get("refused") else ""
        print(
            f"    {way}: built in {made.get('first_s')} s, best in {made.get('search_s')} s, "
            f"again {made.get('again_s')} s{refused}",
            flush=True,
        )
        for item in tuning.get("candidates", ()):
            words = [item["backend"], *(f"{name}={value}" for name, value in item["options"].items())]
            print(f"      {' '.join(words)}: {item['median_ms']} ms, {item['note'] or ''}"[:150], flush=True)


def main() -> int:
    args = arguments()
    if args.table:
        import suite_table

        return int(suite_table.write(args.out))
    os.environ.setdefault("CXX", "/usr/bin/g++")
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-suite-")))
        suite = Suite(args, folder.resolve())
        return suite.steps(args.steps) if args.steps else suite.run()


if __name__ == "__main__":
    sys.exit(main())

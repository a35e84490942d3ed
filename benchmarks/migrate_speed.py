"""How long `te.migrate` takes for a tree of many files, as multiples of reading them.

    python benchmarks/migrate_speed.py [FILES]

Writes a tree of 10,000 files by default: one in five uses TensorRT, in Python, C++, shell, YAML and requirements;
prints files, seconds, findings, and the time of reading every file alone.
"""

# ruff: noqa: E501
from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import trt_engine as te

PLAIN = "import numpy as np\n\n\n" + "def f{n}(x):\n    return [np.sum(i) for i in range(x)]\n\n\n" * 40
USES = (
    PLAIN
    + "import tensorrt as trt\n\n\ndef build(config, engine):\n    config.set_flag(trt.BuilderFlag.FP16)\n    return engine.num_bindings\n"
)
CPP = (
    "#include <NvInfer.h>\nint count(nvinfer1::ICudaEngine* engine) { return engine->getNbBindings(); }\n"
    + "int g{n}(int x) { return x; }\n" * 200
)
SHELL = "#!/bin/sh\n" + "echo step {n}\n" * 50 + "trtexec --onnx=m.onnx --int8 --saveEngine=m.plan\n"
KINDS = (
    ("a{n}.py", USES),
    ("a{n}.cpp", CPP),
    ("a{n}.sh", SHELL),
    ("a{n}.yml", "run: trtexec --onnx=m.onnx --best\n"),
    ("requirements{n}.txt", "tensorrt\n"),
)


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for n in range(count):
            folder = root / f"d{n // 100}"
            folder.mkdir(exist_ok=True)
            file, text = KINDS[n // 5 % 5] if n % 5 == 0 else ("b{n}.py", PLAIN)
            (folder / file.replace("{n}", str(n))).write_text(text.replace("{n}", str(n)))
        began = time.perf_counter()
        read = sum(len(path.read_bytes()) for path in root.rglob("*") if path.is_file())
        reading = time.perf_counter() - began
        began, cpu = time.perf_counter(), time.process_time()
        report = te.migrate(root)
        took, used = time.perf_counter() - began, time.process_time() - cpu
    print(f"files: {report.files_checked} ({read / 1e6:.1f} MB), skipped: {len(report.files_skipped)}")
    print(f"findings: {len(report.findings)}")
    print(f"wall: {took:.1f} s, CPU: {used:.1f} s, {took / reading:.1f} x reading alone")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)

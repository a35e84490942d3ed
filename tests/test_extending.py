"""The example of docs/extending.md, run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from onnx_models import FLOAT, node, save

ROOT = Path(__file__).parents[1]


def test_a_backend_of_another_package_builds_measures_and_infers(tmp_path: Path) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "my_backend.py" in block)
    entry = re.search(r"(reference = \"my_backend:spec\")", page)
    assert entry is not None
    (tmp_path / "my_backend.py").write_text(code)
    dist = tmp_path / "my_backend-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: my-backend\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[trt_engine.backends]\n" + entry[1].replace('"', "") + "\n")

    save(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["batch", 3])})
    program = """
import numpy as np, trt_engine as te
engine = te.build("m.onnx", backend="reference", batch=(1, 2, 4), out="m.ref.onnx")
with te.load(engine) as runner:
    np.save("y.npy", runner.infer({"x": np.array([[-1, 0, 2]], np.float32)})["y"])
record = te.bench(engine, duration_s=0.05, warmup_s=0.0, batch=2)
assert record.backend == "reference" and record.queries > 0
"""
    env = {
        "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}",
        "TRT_ENGINE_STORE": str(tmp_path / "store"),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "y.npy").tolist() == [[0, 0, 2]]

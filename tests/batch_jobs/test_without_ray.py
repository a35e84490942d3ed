"""Without Ray: exit 3 with the pip line, nothing written; and nothing of Ray is imported before it is needed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from programs import run_python

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from trt_engine.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
IMPORTS = """
import sys
import trt_engine as te
from trt_engine.verbs.batch import command
from trt_engine.verbs.deploy import command, ray
te.batch, te.deploy, te.BatchConfig
found = sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "pyarrow", "starlette"})
sys.exit(" ".join(found) or 0)
"""


def test_a_missing_extra_is_exit_3_with_the_pip_line(engine: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((2, 3), np.float32))
    done = run_python("-c", BLOCKED, "batch", engine, tmp_path / "rows.npy", "-o", tmp_path / "out")
    assert done.returncode == 3, done.stderr
    assert re.search(r"hint: `pip install '.*\[ray\]'`", done.stderr)  # an editable install names its folder
    assert not (tmp_path / "out").exists()


def test_nothing_of_ray_is_imported_before_it_is_needed() -> None:
    done = run_python("-c", IMPORTS)
    assert done.returncode == 0, done.stderr

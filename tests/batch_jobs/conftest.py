"""An engine and input files that the tests of `batch` share."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save

ROWS = np.arange(60, dtype=np.float32).reshape(20, 3)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`y` is twice `x` [batch, 3], batches of 1 to 8."""
    folder = tmp_path_factory.mktemp("batch")
    model = save(
        folder / "m.onnx", [node("Mul", "x two", "y")], {"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["batch", 3])},
        {"two": np.float32(2)},
    )  # fmt: skip
    store = te.Store(folder / "store")
    return te.build(model, out=folder / "m.engine.onnx", parity=False, batch=(1, 4, 8), store=store).path


def shard(path: Path, samples: dict[str, bytes]) -> Path:
    """A WebDataset shard with one file a sample."""
    with tarfile.open(path, "w") as archive:
        for name, raw in samples.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


def npy(value: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """40 rows in six files of every kind; five of the rows cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "in"
    folder.mkdir()
    np.save(folder / "a.npy", ROWS)
    np.savez(folder / "b.npz", x=ROWS[:5])
    (folder / "c.npy").write_bytes(b"\x93NUMPYbroken")
    column = [*(row.tolist() for row in ROWS[:6]), None, [1.0, 2.0]]
    pq.write_table(pa.table({"x": column}), folder / "d.parquet", row_group_size=3)
    samples = {f"s{index}.x.npy": npy(ROWS[index]) for index in range(4)} | {"s2.x.npy": b"junk"}
    whole = shard(folder / "e.tar", samples).read_bytes()
    (folder / "f.tar").write_bytes(whole[: 1024 + 512 + 60])
    return folder

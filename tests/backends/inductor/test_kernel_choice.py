"""Which kernels are measured, and what is kept of measurements; the kernel itself in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from programs import run_python

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trt_engine.backends.inductor.kernel_choice import Product, _library_ways, _read, candidates  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:::(torch|triton|copyreg)")]


def product(
    kind: str, rows: int = 4096, columns: int = 256, depth: int = 768, out: str = "", **more: object
) -> Product:
    return Product(rows, columns, depth, kind, out or kind, 0, True, False, **more)  # type: ignore[arg-type]


def test_an_fp32_product_is_not_computed_in_tf32_unasked() -> None:
    assert not list(candidates(product("float32"), (9, 0)))
    assert not list(candidates(product("float64"), (9, 0)))
    assert list(candidates(product("float32", tf32=True), (9, 0)))


@pytest.mark.parametrize("rows", [1, 64, 4096])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("depth", [32, 64, 96, 768])
def test_a_quantized_layer_of_any_depth_is_computed_in_its_type(rows: int, kind: str, depth: int) -> None:
    made = product(kind, rows, depth=depth, out="float16")
    assert list(candidates(made, (9, 0)))
    assert "cublas" not in _library_ways(made)


def test_the_copy_engine_writes_rows_of_whole_16_bytes() -> None:
    assert any(tiles.tma for tiles in candidates(product("float16", columns=1000), (9, 0)))
    assert not any(tiles.tma for tiles in candidates(product("float16", columns=150), (9, 0)))


def test_measurements_of_other_releases_are_left_out(tmp_path: Path) -> None:
    kept = tmp_path / "kernels.json"
    kept.write_text(
        '{"a kernels 2 x": {"way": "cublas", "tiles": null, "measured_us": {"cublas": 1}},'
        '"b kernels 2 x": {"way": "gone", "tiles": null, "measured_us": {"gone": 1}},'
        '"c kernels 2 x": {"way": "x", "tiles": [1, 2], "measured_us": {"x": 1}},'
        '"d kernels 2 x": {"way": "cublas", "tiles": null, "measured_us": {}},'
        '"e kernels 1 x": {"way": "cublas", "tiles": null, "measured_us": {"cublas": 1}},'
        '"f": {"way": "cublas", "tiles": null, "measured_us": {"cublas": 1}}}'
    )
    assert list(_read(kept)) == ["a kernels 2 x"]
    kept.write_text("{")
    assert _read(kept) == {}


_STRIDED = """
import torch
from trt_engine.backends.inductor.fused_rules import plain_linear
from trt_engine.backends.inductor.linear import ACTIVATIONS
from trt_engine.backends.inductor.triton_linear import Tiles, run_linear
torch.manual_seed(0)
x, weight, rest = torch.randn(37, 128)[:, :64], torch.randn(40, 64), torch.randn(37, 80)[:, 40:]
tiles = Tiles(16, 32, 32, 4, 3).numbers
x[3] = float("nan")
for activation in range(len(ACTIVATIONS)):
    more = None, None, rest, activation, 0.0, torch.float32
    found, wanted = run_linear(x, weight, *more, tiles), plain_linear(x, weight.t(), *more)
    torch.testing.assert_close(found, wanted, equal_nan=True, atol=1e-4, rtol=1e-4)
more = None, None, None, ACTIVATIONS.index("gelu"), 0.0, torch.float16
x[4], x[5] = float("inf"), -1e4
found = run_linear(x.half(), weight.abs().half(), *more, tiles).float()
wanted = torch.nn.functional.gelu(x.half().double() @ weight.abs().half().double().t()).float()
wanted[4], wanted[5] = float("inf"), 0.0
torch.testing.assert_close(found, wanted, equal_nan=True, atol=1e-4, rtol=1e-3)
x, weight = torch.randint(-127, 128, (37, 64)).to(torch.int8), torch.randint(-127, 128, (40, 64)).to(torch.int8)
more = None, torch.full((40,), 1e-4), None, 0, 0.001, torch.float32
found, wanted = run_linear(x, weight, *more, tiles), plain_linear(x, weight.t(), *more)
assert int(wanted.min()) == -128
assert int((found.int() - wanted.int()).abs().max()) <= 1 and int(found.min()) == -128
"""


def test_views_nan_and_saturation_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = run_python("-c", _STRIDED, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]

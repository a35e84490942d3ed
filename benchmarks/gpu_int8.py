"""What ONNX Runtime's CUDA provider makes of INT8: graphs quantised for TensorRT, and 8-bit weights, beside FP32 and FP16.

Each network is cast and quantised from one FP32 file and built for the GPU; calls are `infer` on a torch CUDA tensor with
outputs that stay on the device, interleaved. `fused` counts the nodes of the optimised graph that compute in integers.

    python benchmarks/gpu_int8.py
    python benchmarks/gpu_int8.py --models vit --batches 1 64 --seconds 4
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import networks
import onnx
from gpu_common import Bench, interleaved, parser

import trt_engine as te
from trt_engine.precision.cast_model import cast
from trt_engine.precision.quantize_model import quantize
from trt_engine.store import Store

_SMALL = {"vit": {"width": 64, "depth": 2, "heads": 4, "size": 32}, "resnet50": {"size": 32}}
_INTEGER = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "MatMulNBits")


def variants(folder: Path, model: str, on_gpu: bool) -> dict[str, Path]:
    """The network in FP32, FP16, with Q/DQ for TensorRT, and (where it has MatMuls) with weights of 8 bits."""
    source = folder / f"{model}-fp32.onnx"
    networks.NETWORKS[model](source, half=False, **({} if on_gpu else _SMALL[model]))
    made = {"fp32": source, "fp16": folder / f"{model}-fp16.onnx", "int8 Q/DQ": folder / f"{model}-int8.onnx"}
    cast(source, "fp16", out=made["fp16"])
    quantize(source, "int8", out=made["int8 Q/DQ"], calib_data="random", target="tensorrt", calib_batch=1, parity=False)
    if model == "vit":
        from onnxruntime.quantization.matmul_nbits_quantizer import (  # needs onnx_ir, which onnxscript brings
            DefaultWeightOnlyQuantConfig,
            MatMulNBitsQuantizer,
        )

        made["int8 weights"] = folder / f"{model}-nbits.onnx"
        config = DefaultWeightOnlyQuantConfig(block_size=128, is_symmetric=True, bits=8)
        packed = MatMulNBitsQuantizer(onnx.load(made["fp16"]), bits=8, algo_config=config)
        packed.process()
        onnx.save(packed.model.model, made["int8 weights"])
    return made


def integer_nodes(path: Path) -> int:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return sum(node.op_type.startswith(_INTEGER) for node in nodes)


def call(runner: te.InferenceEngine, feeds: dict[str, Any], on_gpu: bool) -> Callable[[], object]:
    """One inference as a user of torch writes it, ended when the device is done."""
    if not on_gpu:
        return lambda: runner.infer(feeds)
    import torch

    resident = {name: torch.from_numpy(array).cuda() for name, array in feeds.items()}

    def run() -> object:
        outputs = runner.infer(resident, on_device=True)
        torch.cuda.synchronize()
        return outputs

    return run


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    args = options.parse_args()
    bench = Bench(args, "gpu_int8")
    print(f"{'model':<10}{'batch':>6}  {'variant':<14}{'p50 us':>10}{'of fp32':>9}  fused")
    for model in args.models:
        engines = {
            name: te.build(
                path, device=args.device, batch=(1, 1, max(args.batches)), options=bench.options, parity=False,
                allow_fallback=name == "int8 Q/DQ",  # ONNX Runtime gives fused products (QGemm) to the CPU
                store=Store(bench.folder / "store"),
            )
            for name, path in variants(bench.folder, model, bench.on_gpu).items()
        }  # fmt: skip
        fused = {name: integer_nodes(engine.path) for name, engine in engines.items()}
        for batch in args.batches:
            with bench.measuring() as (before, started), ExitStack() as stack:
                runners = {
                    name: stack.enter_context(te.load(engine, allow_fallback=True)) for name, engine in engines.items()
                }
                calls = {
                    name: call(runner, bench.feeds(engines[name], batch), bench.on_gpu)
                    for name, runner in runners.items()
                }
                samples = interleaved(calls, args.seconds)
                facts = runners["fp32"].runtime_info
            p50 = {name: median(values) for name, values in samples.items()}
            results = {"batch": batch, "p50_us": p50, "fused": fused}
            bench.write(model, engines["fp32"], before, started, facts, {"batch": batch, "options": bench.options},
                        {f"{name}_us": values[:400] for name, values in samples.items()}, results, None)  # fmt: skip
            for name, value in p50.items():
                print(
                    f"{model:<10}{batch:>6}  {name:<14}{value:>10.0f}{value / p50['fp32']:>9.2f}  {fused[name]}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

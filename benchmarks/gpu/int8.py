"""What ONNX Runtime's CUDA provider makes of INT8: graphs quantised for TensorRT, and 8-bit weights, beside FP32 and FP16.

Each network is cast and quantised from one FP32 file; calls are `infer` on torch tensors with outputs that stay on the
device, in turns. `fused` counts the nodes of the optimised graph that compute in integers.

    python benchmarks/gpu/int8.py --seconds 3
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import onnx
from common import Bench, each_model, interleaved, parser, rounded

import trt_engine as te

INTEGER = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "MatMulNBits")


def variants(bench: Bench, model: str) -> dict[str, Path]:
    """The network in FP32, FP16, with Q/DQ for TensorRT, and (where it has MatMuls) with weights of 8 bits."""
    source = bench.network(model, half=False)
    names = ("fp16", "int8 Q/DQ", "int8 weights")
    made = {name: source.with_name(f"{source.stem}-{name.replace('/', '').replace(' ', '-')}.onnx") for name in names}
    te.cast(source, "fp16", out=made["fp16"], parity=False, overwrite=True)
    te.quantize(source, "int8", out=made["int8 Q/DQ"], calib_data="random", calib_batch=1, parity=False, overwrite=True)
    if not (model == "vit" and pack_weights(made["fp16"], made["int8 weights"])):
        del made["int8 weights"]
    return {"fp32": source} | made


def pack_weights(source: Path, out: Path) -> bool:
    """Weights of MatMuls in 8 bits, by ONNX Runtime's own tool; False where onnx_ir is missing, which it needs."""
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
    except ImportError as error:
        print(f"without 8-bit weights: {error}", file=sys.stderr)
        return False
    config = DefaultWeightOnlyQuantConfig(block_size=128, is_symmetric=True, bits=8)
    packed = MatMulNBitsQuantizer(onnx.load(source), bits=8, algo_config=config)
    packed.process()
    onnx.save(packed.model.model, out)
    return True


def integer_nodes(path: Path) -> int:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return sum(node.op_type.startswith(INTEGER) for node in nodes)


def measure(bench: Bench, model: str) -> bool:
    args = bench.args
    engines = {
        # ONNX Runtime gives fused products (QGemm) to the CPU
        name: bench.engine(path, max(args.batches), parity=False, allow_fallback=name == "int8 Q/DQ", time_budget_s=0.0)
        for name, path in variants(bench, model).items()
    }
    fused = {name: integer_nodes(engine.path) for name, engine in engines.items()}
    for batch in args.batches:
        bench.begin()
        with ExitStack() as stack:
            runners = {
                name: stack.enter_context(te.load(engine, allow_fallback=True)) for name, engine in engines.items()
            }
            calls = {name: bench.ours(runner, bench.feeds(engines[name], batch)) for name, runner in runners.items()}
            samples = interleaved(calls, args.seconds)
            facts = {name: runner.runtime_info for name, runner in runners.items()}
        p50 = {name: median(values) for name, values in samples.items()}
        bench.write(
            model=model, facts=facts, settings={"batch": batch}, met=None, results={"p50_us": p50, "fused": fused},
            samples={f"{name}_us": rounded(values, 400) for name, values in samples.items()},
        )  # fmt: skip
        for name, value in p50.items():
            ratio = value / p50["fp32"]
            print(
                f"{model:<10}{batch:>4}  {name:<14}{value:>10.0f} us {ratio:>6.2f} of FP32, {fused[name]} integer nodes"
            )
    return True


def main() -> int:
    options = parser(__doc__, "vit", "resnet50")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    return each_model(options.parse_args(), "gpu-int8", measure)


if __name__ == "__main__":
    sys.exit(main())

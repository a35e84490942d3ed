"""The child process that imports, exports and compiles one graph: PyTorch's state, caches and crashes stay in it."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trt_engine.errors import BuildError, SetupError, TrtEngineError
from trt_engine.format import library_reason, shorten_middle
from trt_engine.workers.messages import error_message, receive_request

if TYPE_CHECKING:
    import torch

    from trt_engine.backends.inductor.onnx_module import OnnxModule

log = logging.getLogger(__name__)


class InputRange(msgspec.Struct):
    """An input of the graph, in its order: dtype, and the shapes of the profiles together."""

    name: str
    dtype: str
    symbols: tuple[str | None, ...]
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def key(self, axis: int) -> str:
        """The dimension's name: axes of one symbol are one dimension."""
        symbol = self.symbols[axis] if axis < len(self.symbols) else None
        return symbol or f"{self.name}[{axis}]"

    @property
    def dynamic(self) -> list[int]:
        return [axis for axis, (low, high) in enumerate(zip(self.min, self.max, strict=True)) if low != high]


class CompileRequest(msgspec.Struct):
    """What to compile, where to, and how."""

    model: str
    package: str
    device: str
    inputs: tuple[InputRange, ...]
    configs: dict[str, Any]
    tf32: bool
    fused: bool = False
    """For a GPU: what the importer puts together, and kernels by measurement."""
    quantized_types: tuple[str, ...] = ()
    """Types that linear layers compute in where the graph quantizes them: `int8`, `fp8`."""
    quantizes: bool = False
    """Whether layers of this graph compute in those."""
    measure_s: float = 40.0
    """Seconds to choose the kernels of linear layers in, on a GPU."""


class CompileResult(msgspec.Struct, tag="result"):
    """The package is written."""

    torch: str
    isa: str
    attentions: int
    kernels: str = ""
    """What computes the linear layers, and how many each."""


def compile_graph(request: CompileRequest) -> CompileResult:
    """Write the package of the request's model."""
    import torch
    from torch._inductor import cpu_vec_isa

    from trt_engine.backends.inductor.onnx_module import OnnxModule, load_graph
    from trt_engine.backends.inductor.tensor_rules import RULES
    from trt_engine.graph.load import read_proto

    device = torch.device(request.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SetupError(f"PyTorch {torch.__version__} finds no GPU", hint="`trt-engine doctor`")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high" if request.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = request.tf32
        _describe_no_cpu()
    kernels = ""
    if request.fused:
        try:
            if (made := _compile_fused(request, device)) is not None:
                return made
            kernels = "of PyTorch: no layer is fused"
        except Exception as error:
            of_the_model = isinstance(error, TrtEngineError) and not isinstance(error, BuildError)
            # PyTorch's kernels compute quantized layers in FP32: the passport has another type
            if of_the_model or request.quantizes:
                raise
            kernels = f"of PyTorch: fused ones cannot be compiled: {_first_line(error)}"
            log.warning("%s", kernels)
    graph = load_graph(read_proto(Path(request.model), weights=True))
    _write_package(OnnxModule(graph.proto, device, RULES).eval(), request)
    return CompileResult(
        torch=str(torch.__version__),
        isa=str(cpu_vec_isa.pick_vec_isa()) if device.type == "cpu" else "",
        attentions=graph.attentions,
        kernels=kernels,
    )


def _compile_fused(request: CompileRequest, device: torch.device) -> CompileResult | None:
    """Write the package with what the importer fuses for a GPU and kernels chosen by measurement; None for a graph with
    no such layer."""
    import torch

    from trt_engine.backends.inductor.convolution import CONVOLUTION
    from trt_engine.backends.inductor.fused_rules import register_shapes
    from trt_engine.backends.inductor.kernel_choice import choose_kernels
    from trt_engine.backends.inductor.onnx_module import OnnxModule, load_graph
    from trt_engine.backends.inductor.tensor_rules import RULES
    from trt_engine.graph.load import read_proto

    proto = read_proto(Path(request.model), weights=True)
    graph = load_graph(proto, on_gpu=True, quantized_types=request.quantized_types)
    module = OnnxModule(graph.proto, device, RULES, fused=True).eval()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "linear-kernels.json")
    module.kernels = chosen = choose_kernels(module, optimum(request), kept, request.measure_s)
    if not chosen.summary and not any(node.op_type == CONVOLUTION for node in graph.proto.graph.node):
        return None
    register_shapes()
    _allocate_scratch_of_all_programs()
    # a sum that several kernels read, as of residuals, is stored: PyTorch adds up to four tensors again in each of them
    with _fastest_attention():
        _write_package(module, request, realize_reads_threshold=1)
    return CompileResult(
        torch=str(torch.__version__), isa="", attentions=graph.attentions, kernels=chosen.summary or "of cuDNN"
    )


def _write_package(module: OnnxModule, request: CompileRequest, **configs: Any) -> None:
    import torch

    with torch.no_grad():
        program = export(module, request)
        torch._inductor.aoti_compile_and_package(
            program, package_path=request.package, inductor_configs=request.configs | configs
        )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {library_reason(error) if str(error).strip() else ''}"


def _describe_no_cpu() -> None:
    """Code for a GPU has no vector instructions: without this PyTorch compiles and runs programs to find the CPU's."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list = list  # an empty one


def _fastest_attention() -> Any:
    """PyTorch takes the first kernel of attention that computes the case: on an H100 cuDNN's took 47 us where FlashAttention
    took 66 (64 x 12 x 197 x 64, FP16)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
    ]  # fmt: skip
    return sdpa_kernel(order, set_priority=True)


def _allocate_scratch_of_all_programs() -> None:
    """PyTorch before 2.13 writes code that allocates, for the tensor descriptors of a kernel, the memory of one of its
    programs: the others write beyond it."""
    try:
        from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

        original = CUDADeviceOpOverrides.cpp_scratch
    except (ImportError, AttributeError):  # of a later release
        return

    def cpp_scratch(self: Any, at: int, workspace: Any, prefix: str | None = None) -> Any:
        made = original(self, at, workspace, prefix)
        if made is None or not workspace.size:
            return made
        all_of_them = f"{{static_cast<int64_t>({workspace.size}) * grid_0 * grid_1 * grid_2}};"
        return [line.replace(f"{{{workspace.size}}};", all_of_them) for line in made[0]], made[1]

    CUDADeviceOpOverrides.cpp_scratch = cpp_scratch


def optimum(request: CompileRequest) -> list[Any]:
    """Zeros of the shapes that the first profile is optimized for."""
    import torch

    return [torch.zeros(item.opt, dtype=getattr(torch, item.dtype), device=request.device) for item in request.inputs]


def export(module: Any, request: CompileRequest) -> Any:
    """The exported program, dynamic over the whole range of each dimension; `BuildError` where it would be narrower."""
    import torch
    from torch.export import Dim

    dims: dict[str, Any] = {}
    examples, dynamic = [], []
    for item in request.inputs:
        for axis in item.dynamic:
            dims.setdefault(item.key(axis), Dim(f"d{len(dims)}", min=item.min[axis], max=item.max[axis]))
        # an example of size 1 would make the dimension a constant
        shape = [
            min(max(size, 2), item.max[axis]) if axis in item.dynamic else size for axis, size in enumerate(item.opt)
        ]
        examples.append(torch.zeros(shape, dtype=getattr(torch, item.dtype), device=request.device))
        dynamic.append({axis: dims[item.key(axis)] for axis in item.dynamic})
    try:
        program = torch.export.export(
            module, tuple(examples), dynamic_shapes=(tuple(dynamic),) if dims else None, strict=False
        )
    except TrtEngineError:
        raise
    except Exception as error:  # torch.export's own classes have no public base
        raise BuildError(
            f"PyTorch cannot export the graph: {_reason(error, list(dims))}",
            hint="fix a size with `--shapes`, or `-b onnxruntime`",
        ) from error
    check_ranges(program, request.inputs)
    return program


def _reason(error: Exception, names: list[str]) -> str:
    """The constraint that is violated, else the first line; our dimensions by their names."""
    found = [text for text in map(str.strip, str(error).splitlines()) if text]
    text = next((text.removeprefix("- ") for text in found if text.startswith("- ")), library_reason(error))
    text = re.sub(
        r"\bd(\d+)\b", lambda number: f"`{names[int(number[1])]}`" if int(number[1]) < len(names) else number[0], text
    )
    return shorten_middle(text, 400)


def check_ranges(program: Any, inputs: tuple[InputRange, ...]) -> None:
    """`BuildError` for a dimension that the exported program narrowed or made constant, which it does without a word."""
    import torch

    given = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for item, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
        if name not in given:  # unused
            continue
        for axis in item.dynamic:
            size = given[name].shape[axis]
            wanted = f"{item.min[axis]} to {item.max[axis]}"
            if not isinstance(size, torch.SymInt):
                raise _narrowed(item, axis, wanted, str(size))
            span = program.range_constraints.get(size.node.expr)
            # PyTorch treats sizes 0 and 1 as any other size of a dynamic dimension, and states 2 as their bound
            if span is not None and (int(span.lower) > max(item.min[axis], 2) or int(span.upper) < item.max[axis]):
                raise _narrowed(item, axis, wanted, f"{span.lower} to {span.upper}")


def _narrowed(item: InputRange, axis: int, wanted: str, found: str) -> BuildError:
    return BuildError(
        f"dimension {axis} of `{item.name}` is to be {wanted}, and the exported program takes {found}",
        hint="give that range with `--profile`, or `-b onnxruntime`",
    )


def main() -> None:
    pipe, raw = receive_request()
    warnings.simplefilter("ignore")  # PyTorch's own deprecations
    try:
        pipe.send(compile_graph(msgspec.json.decode(raw, type=CompileRequest)))
    except BaseException as error:
        traceback.print_exc()  # before the answer, after which the parent may end this process
        sys.stderr.flush()
        log_hint = "`-v` shows its log"
        found = error_message(error, "while compiling", interrupted=("interrupted", ""), log_hint=log_hint)
        if found.kind == "TrtEngineError":
            found = type(found)("BuildError", f"TorchInductor failed: {_first_line(error)}", log_hint)
        pipe.send(found)
    finally:
        os._exit(0)  # without waiting for the compiler's idle processes


if __name__ == "__main__":
    main()

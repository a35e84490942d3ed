"""Builds `.pt2` packages: checks the C++ compiler, compiles in a child process, states what the package needs."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import msgspec

from trt_engine.backends.inductor.compatibility import required_features, torch_version
from trt_engine.backends.inductor.compile_worker import CompileRequest, CompileResult, InputRange
from trt_engine.backends.inductor.linear import quantized_layers
from trt_engine.backends.inductor.operators import check_model
from trt_engine.backends.inductor.options import InductorOptions
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile
from trt_engine.config.settings import from_values
from trt_engine.device import info, parse_device
from trt_engine.errors import BuildError, PrecisionError, SetupError
from trt_engine.format import library_reason
from trt_engine.graph.dtype_breakdown import compute_layers, count_parameters, main_precision, shares_by_dtype
from trt_engine.graph.load import read_proto
from trt_engine.model import Model
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.records.passport import GRAPH_DTYPE, NOT_FUSED, DtypeShare, Precision, Requirements
from trt_engine.workers.crash import exit_name, ran_out_of_memory, restore_error
from trt_engine.workers.messages import ErrorMessage, LogMessage
from trt_engine.workers.process import spawn_worker

log = logging.getLogger(__name__)

_COMPILE_LIMIT_S = 6 * 3600.0
_QUANTISED = ("int8", "fp8", "int4", "nvfp4", "mxfp8", "int16", "int2")


class InductorBuilder:
    """Builds for the CPU and for CUDA."""

    def identity(self, config: BuildConfig) -> str:
        kind, number = parse_device(config.device or "cpu")
        features = ",".join(info.cpu().features)
        machine = _gpu(number).compute_capability if kind == "cuda" else features
        return f"inductor torch {torch_version()} {machine}"

    def build(self, model: Model, config: BuildConfig, paths: BuildPaths) -> BuildOutcome:
        options: InductorOptions = from_values(InductorOptions, config.options)
        check_model(model)
        compiler = find_compiler()
        kind, number = parse_device(config.device)
        board = _gpu(number) if kind == "cuda" else None
        tf32 = board is not None and config.precision == "tf32"
        fused = board is not None and options.fuse_kernels
        types = quantized_types(board) if fused else ()
        precision = Precision(requested=config.precision, shares=shares(model, types, tf32=tf32))
        _check_precision(precision, config, main_precision(model.graph))
        inputs = _input_ranges(model, config.profiles)
        if board is None:
            check_half(precision.main_dtype, varies=any(item.min != item.max for item in inputs))
        request = CompileRequest(
            model=str(model.path),
            package=str(paths.payload),
            device=f"cuda:{number}" if board is not None else "cpu",
            inputs=inputs,
            configs={"freezing": options.freezing, "conv_1x1_as_mm": options.conv_1x1_as_mm}
            | ({"compile_threads": 1} if board is None else {"layout_optimization": options.channels_last}),
            tf32=tf32,
            fused=fused,
            quantized_types=types,
            quantizes=not precision.shares.keys().isdisjoint(types),
        )
        kept = paths.cache or paths.payload.parent / ".prepared" / "cache"  # removed after the build
        notes = {"compiler": compiler, "freezing": "on" if options.freezing else "off"}
        result = None
        if options.autotune_s:
            tuned = msgspec.structs.replace(request, configs=request.configs | {"max_autotune": True})
            result = _compile(tuned, compiler, kept, paths, limit_s=float(options.autotune_s))
            notes["autotune"] = f"within {options.autotune_s} s" if result else f"stopped after {options.autotune_s} s"
        if result is None:
            result = _compile(request, compiler, kept, paths)
        assert result is not None
        graph_dtype = main_precision(model.graph)
        if graph_dtype in _QUANTISED and precision.main_dtype != graph_dtype:
            notes[GRAPH_DTYPE] = graph_dtype
            notes[NOT_FUSED] = f"the {graph_dtype} layers run in {precision.main_dtype}, on dequantised values"
        if result.kernels:
            notes |= {"kernels": result.kernels, "fuse_kernels": "on"}
        if board is not None and any(node.op_type == "Conv" for node in model.proto.graph.node):
            notes["channels_last"] = "on" if options.channels_last else "off"
        if result.attentions:
            notes["attention"] = f"{result.attentions} fused"
        notes["tf32"] = "on" if tf32 else "off"
        return BuildOutcome(
            signature=model.signature,
            precision=precision,
            requirements=Requirements(
                library="torch",
                version=result.torch,
                cpu_features=required_features(result.isa),
                compute_capability=board.compute_capability if board else None,
                gpu=board.name if board else None,
            ),
            notes=notes,
        )


def _gpu(number: int) -> info.Gpu:
    found = next((gpu for gpu in info.gpus() if gpu.index == number), None)
    if found is None:
        raise SetupError(f"there is no `cuda:{number}` here", hint="`trt-engine doctor` lists the GPUs")
    return found


def quantized_types(board: info.Gpu | None) -> tuple[str, ...]:
    """What tensor cores of the GPU multiply beside floating point, of the types the backend has a kernel for."""
    capability = float(board.compute_capability) if board is not None and board.compute_capability else 0.0
    return tuple(name for name, least in (("int8", 8.0), ("fp8", 8.9)) if capability >= least)


def shares(model: Model, quantized_types: tuple[str, ...], *, tf32: bool) -> dict[str, DtypeShare]:
    """Q/DQ pairs are computed as written, products in the dtype that DequantizeLinear gives, but for the linear layers that
    are computed in a quantized type."""
    written = model.graph.proto
    taken: set[str] = set()
    if quantized_types and any(node.op_type == "DequantizeLinear" for node in written.graph.node):
        taken = quantized_layers(read_proto(model.path, weights=True), quantized_types)
    literal = compute_layers(written, tf32=tf32, literal=True)
    if not taken:
        return shares_by_dtype(literal, count_parameters(model.graph))
    fused = compute_layers(written, tf32=tf32)
    layers = [b if b.step.node.output[0] in taken else a for a, b in zip(literal, fused, strict=True)]
    return shares_by_dtype(layers, count_parameters(model.graph))


def _check_precision(precision: Precision, config: BuildConfig, written: str | None) -> None:
    """`PrecisionError`, before anything is compiled, where the package would not compute in the requested precision."""
    asked, found = precision.requested, precision.main_dtype
    if asked is None or found is None or found == asked:
        return
    if written in _QUANTISED:
        why = f"the backend `inductor` computes quantised layers in {found}, on dequantised values"
        hint = (
            "on a GPU linear layers compute in INT8 and FP8 unless `-O fuse_kernels=off`; `-b tensorrt` or `-b onnxruntime` "
            "has kernels for them; leave `--precision` out to build the graph as it is"
        )
    elif asked == "tf32":
        why, hint = f"{config.device} computes this graph in {found}", "TF32 is of NVIDIA GPUs: `--device cuda:0`"
    else:
        why = f"the graph computes in {precision.shares_text}"
        hint = "precision is in the graph: export the model in it, or leave `--precision` out"
    raise PrecisionError(f"requested {asked}: {why}", hint=hint)


def check_half(dtype: str | None, *, varies: bool = False) -> None:
    """`SetupError` for FP16 and BF16 on an x86-64 processor without instructions for them, and with sizes that vary: PyTorch
    2.13 compiled the example ViT there into code whose results were not numbers (one Xeon with AVX-512 VNNI; one with
    AVX512-FP16, where a fixed batch is right; the cause is not known, and other graphs may be right: refused because parity
    cannot judge BF16 on a CPU)."""
    needed = {"fp16": {"avx512_fp16"}, "bf16": {"avx512_bf16", "amx_bf16"}}.get(dtype or "")
    features = info.cpu().features
    if needed and "avx2" in features and not needed & set(features):
        raise SetupError(
            f"this processor has no {dtype} instructions ({', '.join(sorted(needed))}): TorchInductor fails there",
            hint="build the network in fp32, for `--device cuda:0`, or with `-b onnxruntime`",
        )
    if needed and varies and "avx2" in features:
        raise SetupError(
            f"TorchInductor computes {dtype} wrongly on this processor where a size varies",
            hint="build for one size (`--batch 4`), in fp32, for `--device cuda:0`, or with `-b onnxruntime`",
        )


def _input_ranges(model: Model, profiles: tuple[Profile, ...]) -> tuple[InputRange, ...]:
    """The inputs with the shapes of all profiles together: one package serves them all."""
    made = []
    for spec in model.signature.inputs:
        spans = [profile.ranges[spec.name] for profile in profiles if spec.name in profile.ranges]
        lows, highs = [span.min for span in spans] or [spec.shape], [span.max for span in spans] or [spec.shape]
        made.append(
            InputRange(
                name=spec.name,
                dtype=spec.dtype,
                symbols=tuple(spec.symbols),
                min=tuple(map(min, zip(*lows, strict=True))),
                opt=tuple(spans[0].opt if spans else spec.shape),
                max=tuple(map(max, zip(*highs, strict=True))),
            )
        )
    return tuple(made)


# ------------------------------------------------------------------------------------------------ the compiler

_PROBE = """
#include <regex>
#include <string>
extern "C" bool probe(const char* text) { return std::regex_match(std::string(text), std::regex("cuda:[0-9]+")); }
"""


def find_compiler() -> str:
    """The C++ compiler: `$CXX`, else `g++`; `SetupError` for none, or for one whose libraries PyTorch cannot load."""
    return _check_compiler(os.environ.get("CXX") or "g++")


@cache
def _check_compiler(name: str) -> str:
    program = shutil.which(name)
    hint = "install g++ (`apt install g++`), or name it: `CXX=/usr/bin/g++`"
    if program is None:
        raise SetupError(f"the C++ compiler `{name}` is not here, which compiles the engine", hint=hint)
    with tempfile.TemporaryDirectory(prefix="trt-engine-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE)
        done = subprocess.run(
            [program, "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True, text=True, timeout=120
        )
        if done.returncode or not library.is_file():
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["-"]
            raise SetupError(f"the C++ compiler `{program}` fails: {library_reason(lines[0])}", hint=hint)
        # one that links it statically gives packages that crash in std::regex beside PyTorch's own copy
        if not any(shared in library.read_bytes() for shared in (b"libstdc++.so", b"libc++.so")):
            raise SetupError(
                f"the C++ compiler `{program}` links the C++ library statically: its packages crash when loaded",
                hint="`CXX=/usr/bin/g++` names the system's",
            )
    return program


# ------------------------------------------------------------------------------------------------ the child


_VECTORS = "TORCHINDUCTOR_VEC_ISA_OK"


def _compile(
    request: CompileRequest,
    compiler: str,
    cache: Path,
    paths: BuildPaths,
    *,
    limit_s: float | None = None,
    trusted: bool = True,
) -> CompileResult | None:
    """The child's result; None when it took longer than `limit_s`.

    `trusted`: the compiler knows the instructions that the processor has. Otherwise PyTorch compiles and runs a program for
    each set of them: 25 of 76 s of a small network.
    """
    trusted = trusted and request.device == "cpu" and _VECTORS not in os.environ
    started = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    environment = {"CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    if trusted:
        environment[_VECTORS] = "1"
    with tempfile.TemporaryFile() as output:
        module = "trt_engine.backends.inductor.compile_worker"
        child = spawn_worker(module, msgspec.json.encode(request), output, environment)
        paths.on_status("measuring kernels" if limit_s is not None else "compiling")
        answer: CompileResult | ErrorMessage | None = None
        try:
            while True:  # not `while condition`, whose jump back Python 3.13.0 leaves out of the `try`
                if isinstance(answer, CompileResult | ErrorMessage):
                    break
                line = child.read_line((limit_s or _COMPILE_LIMIT_S) - (time.monotonic() - started))
                if line is None:
                    break
                message = msgspec.json.decode(line, type=CompileResult | ErrorMessage | LogMessage)
                if isinstance(message, LogMessage):
                    logging.getLogger(message.name).log(message.level, "%s", message.text)
                else:
                    answer = message
        except TimeoutError:
            if limit_s is None:
                raise BuildError("TorchInductor did not end", hint="`-v` shows its log") from None
            log.warning(
                "kernels were not all measured within %.0f s; built without, the rest at the next build", limit_s
            )
            return None
        finally:
            ended = child.close(5.0 if isinstance(answer, CompileResult) else 0.0)
            output.seek(0)
            printed = output.read().decode(errors="replace")
            if printed.strip():
                log.debug("the compiler's output: %s", printed)
    if isinstance(answer, CompileResult):
        return answer
    if answer is not None:
        if trusted and "unrecognized" in printed:  # an option of an older compiler
            return _compile(request, compiler, cache, paths, limit_s=limit_s, trusted=False)
        raise restore_error(answer.kind, answer.message, answer.hint)
    if ran_out_of_memory(ended, printed, least_bytes=1 << 30):
        raise restore_error("MemoryExhausted", "out of memory while compiling", "a smaller profile")
    last = library_reason((printed.strip().splitlines() or ["no output"])[-1])
    raise BuildError(f"TorchInductor ended with {exit_name(ended.code)}: {last}", hint="`-v` shows its log")

"""Commands that need a GPU and name no backend, on machines that have one: what is added, and what an error names."""

from __future__ import annotations

from pathlib import Path

import click
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_engine import backend
from trt_engine.cli.click_app import cli
from trt_engine.cli.main import run
from trt_engine.command_line.trtexec_options import translate_args
from trt_engine.device import info

MACHINES = {
    "everything": (True, "tensorrt trtexec onnxruntime inductor", "--backend tensorrt"),
    "trtexec": (True, "trtexec onnxruntime inductor", "--backend trtexec"),
    "onnxruntime-gpu": (True, "onnxruntime inductor", "--device cuda:0"),
    "torch": (True, "inductor", "--backend inductor --device cuda:0"),
    "a GPU alone": (True, "", ""),
    "a CPU": (False, "tensorrt onnxruntime inductor", ""),
}
"""Whether there is a GPU, the backends whose libraries use one, and the flags that a GPU build gets."""

NEEDS_GPU = (
    "build --onnx=net.onnx --saveEngine=x.engine --fp16", "build net.onnx --fp16", "build net.onnx --bf16",
    "build net.onnx --precision fp16", "build --onnx=net.onnx", "build --onnx net.onnx --save-engine x.engine",
    "build net.onnx --precision=tf32", "build net.onnx --stronglyTyped", "bundle meta.json -o made --fp16",
    "bundle meta.json -o made --precision bf16", "bench net.onnx --fp16", "size --onnx=net.onnx --fp16",
    "serve net.onnx --fp16", "profile net.onnx --precision fp16",
)  # fmt: skip

CHOSEN = (
    "build net.onnx", "build net.onnx --precision int8", "build net.onnx --precision fp32",
    "build net.onnx --fp16 --device cpu",
    "build net.onnx --fp16 -b onnxruntime", "build net.onnx --fp16 --backend=inductor",
    "build net.onnx --fp16 --providers cpu",
    "build net.onnx --precision fp16 --device cuda:1", "bench made.engine --fp16", "cast net.onnx --fp16",
    "bench net.onnx --useSpinWait",
)  # fmt: skip
"""Commands that name where to build, or need no GPU."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = numpy_helper.from_array(
        onnx.numpy_helper.to_array(helper.make_tensor("", 1, [4, 3, 3, 3], [0.1] * 108)), "w"
    )
    shapes = {"x": [1, 3, 8, 8], "y": [1, 4, 6, 6]}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"], name="conv")], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), "net.onnx")
    Path("made.engine").write_bytes(b"a plan")
    Path("meta.json").write_text("{}")


def on(monkeypatch: pytest.MonkeyPatch, machine: str) -> str:
    gpu, libraries, flags = MACHINES[machine]
    monkeypatch.setattr(info, "has_gpu", lambda: gpu)
    monkeypatch.setattr(backend, "_uses_gpu", lambda spec: spec.name in libraries.split())
    return flags


def added(words: str) -> str:
    verb, *args = words.split()
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    made = translate_args(verb, command.params, args).args
    return " ".join(made[: next((i for i, word in enumerate(made) if word not in _flags()), len(made))])


def _flags() -> set[str]:
    return {"--backend", "--device", "cuda:0", "tensorrt", "trtexec", "onnxruntime", "inductor"}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_command_that_needs_a_gpu_builds_for_the_one_that_is_here(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = on(monkeypatch, machine)
    assert {words: added(words) for words in NEEDS_GPU} == dict.fromkeys(NEEDS_GPU, flags)
    for precision in ("fp8", "int8", "int4"):  # TensorRT alone has kernels for it
        assert added(f"build net.onnx --{precision}") == (flags if "t" in flags[10:12] else "")
    plan = flags if flags in ("--backend tensorrt", "--backend trtexec") else ""
    assert added("build net.onnx -o x.engine") == added("build net.onnx --out=x.plan") == plan
    graph = "" if not flags else "--device cuda:0" if "onnxruntime" in MACHINES[machine][1] else ""
    assert added("build net.onnx --fp16 -o x.onnx") == graph, "the name says what file it is"


def test_what_is_named_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "everything")
    assert [words for words in CHOSEN if added(words) and "--backend=" not in words] == []
    assert added("build --onnx=net.onnx --device=1") == "--backend tensorrt", "trtexec's device"


@pytest.mark.parametrize(
    ("machine", "precision"),
    [
        *((name, "fp8") for name in MACHINES),
        *((name, "tf32") for name in MACHINES),
        ("a CPU", "fp16"),
        ("torch", "fp16"),
    ],
)
def test_the_error_of_a_cpu_names_the_flags_of_a_gpu_build(
    machine: str, precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = on(monkeypatch, machine)
    code = run(["build", "net.onnx", "--device", "cpu", "--precision", precision, "--calib-data", "random"])
    if code == 0:
        pytest.skip(f"this processor computes in {precision}")
    hint = capsys.readouterr().err.partition("hint: ")[2]
    builds = flags != "" and (precision != "fp8" or machine in ("everything", "trtexec"))
    assert code == 6 and f"`{flags if builds else '--backend tensorrt'}`" in hint
    assert ("or `--device cuda:0`" in hint) == (machine == "a CPU" and precision != "fp8")
    assert ("pip install" in hint) == (machine != "a CPU" and not builds)

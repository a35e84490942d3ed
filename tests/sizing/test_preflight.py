"""What the pre-flight looks at before anything is spent, of TensorRT too: its parts, the driver, the GPU, the precision."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted import HERE

from onnx_models import node, save
from tensorrt_machines import H100, RTX5090, V100, debian, library, trtexec, wheels
from trt_engine.backend import BackendSpec, get_backend
from trt_engine.backends.onnxruntime.cpu_kernels import has_cpu_kernel
from trt_engine.config.build import BuildConfig
from trt_engine.device import info
from trt_engine.device.info import Gpu
from trt_engine.errors import MemoryExhausted, ModelError, PrecisionError, SetupError, TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.records.passport import BuildInfo, Passport, Payload, Precision, Requirements, Source
from trt_engine.records.size import PreflightCheck
from trt_engine.trt.installation import detect_installation
from trt_engine.verbs.size import preflight
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.output_layout import output_layout
from trt_engine.verbs.size.preflight import Preflight, check_model_path, doubling_batches, estimate

CARD = BackendSpec(
    name="card",
    summary="a card",
    payload_suffix=".onnx",
    modules=("onnx",),
    install="pip install it",
    builder=None,
    runtime=None,
    devices=("cpu", "cuda"),
)
BOARD = info.Gpu(index=0, name="a GPU", uuid="u", memory_mib=81920, compute_capability="8.6", driver="580.1")


def checked(
    path: Path, *, backend_spec: BackendSpec = CARD, config: SizeConfig | None = None, **build: object
) -> Preflight:
    config = config or SizeConfig()
    model = open_model(path)
    layout = output_layout(path, path.parent / "out" / "below", ".onnx")
    return Preflight(model, layout, config, BuildConfig(**build), backend_spec, doubling_batches(config))  # type: ignore[arg-type]


def test_every_check_has_a_line_and_nothing_is_made(make_model) -> None:
    path = make_model()
    found = checked(path).run()
    assert [check.name for check in found] == [
        "model",
        "operators",
        "tool",
        "device",
        "folder",
        "disk",
        "memory",
        "time",
    ]
    assert all(check.status != "fail" and check.text for check in found)
    assert not (path.parent / "out").exists()


@pytest.mark.parametrize(
    ("name", "found", "hint"),
    [
        ("net.onnx", "no model at", "torch.onnx.export"),
        ("net.pt", "would be PyTorch, expected ONNX", "torch.onnx.export"),
        ("net.tflite", "TensorFlow Lite, expected ONNX", "tf2onnx"),
        ("net.engine", "is an engine, expected its ONNX model", "trt-engine bench"),
    ],
)
def test_a_missing_model_says_how_to_get_one(tmp_path: Path, name: str, found: str, hint: str) -> None:
    with pytest.raises(ModelError, match=found) as refused:
        check_model_path(tmp_path / name)
    assert hint in str(refused.value.hint)


def failing(checks: Preflight, kind: type[TrtEngineError], match: str) -> None:
    with pytest.raises(kind, match=match):
        checks.run()
    assert [check.status for check in checks.checks].count("fail") == 1
    assert checks.checks[-1].name == "time", "the other checks are still made"


@pytest.mark.parametrize(("precision", "fits"), [("fp16", True), ("bf16", True), ("fp8", False), ("nvfp4", False)])
def test_a_precision_is_held_against_the_compute_capability(
    make_model,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    fits: bool,
) -> None:
    monkeypatch.setattr(info, "gpus", lambda: (BOARD,))
    checks = checked(make_model(), device="cuda:0", precision=precision)
    if fits:
        assert "precision" in [check.name for check in checks.run()]
    else:
        failing(checks, SetupError, f"{precision} needs compute capability .*, a GPU has 8.6")


def test_a_full_disk_fails_and_a_tight_one_warns(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model()
    least = 2 * path.stat().st_size + (16 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=least - 1))
    failing(checked(path), SetupError, "the disk of")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=least))
    assert {check.name: check.status for check in checked(path).run()}["disk"] == "warn"


def test_the_disk_of_the_store_is_looked_at_where_it_is_another(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = make_model(), Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == path.stat().st_dev:
        pytest.skip("there is no second disk here")
    monkeypatch.setenv("TRT_ENGINE_STORE", str(other / "trt-engine-that-is-never-made"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 40))
    assert {check.name: check.status for check in checked(path).run()}["store"] == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 if place == other else 1 << 40))
    failing(checked(path), SetupError, "the disk of the store")


@pytest.mark.parametrize(
    ("operator", "backend_spec", "match"),
    [("Frobnicate", "card", "unknown operator"), ("EfficientNMS_TRT", "onnxruntime", "only TensorRT runs")],
)
def test_operators_nobody_runs_fail_before_anything_is_built(
    tmp_path: Path, operator: str, backend_spec: str, match: str
) -> None:
    path = tmp_path / "odd.onnx"
    save(path, [node(operator, "x", "y")], {"x": (1, ["n", 4])}, {"y": (1, ["n", 4])})
    failing(
        checked(path, backend_spec=CARD if backend_spec == "card" else get_backend(backend_spec)), ModelError, match
    )


def test_too_little_memory_fails_before_anything_is_built(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 1 << 20)
    failing(checked(make_model()), MemoryExhausted, "1.0 MiB of memory available, loading the model takes")


def passport(
    model: Model, seconds: float, nbytes: int, *, digest: str | None = None, backend: str = "card"
) -> Passport:
    return Passport(
        schema="trt-engine/passport",
        schema_version=1,
        backend=backend,
        payload=(Payload("net.onnx", nbytes, "sha256:0"),),
        model=Source(model.name, digest or model.digest, 20, "net.onnx"),
        signature=model.signature,
        profiles=(),
        precision=Precision(None),
        device="cpu",
        build=BuildInfo("trt-engine build", {}, seconds, "card 1"),
        environment=HERE,
        requirements=Requirements("card", "1"),
    )


@pytest.mark.parametrize("asked", ["fp16", "bf16", "fp8", "mxfp8", "nvfp4", "tf32"])
def test_a_precision_without_kernels_is_refused_before_anything_is_built(make_model, asked: str) -> None:
    if asked in ("fp16", "bf16") and has_cpu_kernel("Conv", asked):
        pytest.skip(f"this processor computes {asked} itself")
    looked = checked(make_model(), backend_spec=get_backend("onnxruntime"), precision=asked)
    with pytest.raises(PrecisionError) as caught:
        looked.run()
    assert caught.value.exit_code == 6 and asked in caught.value.message and caught.value.hint
    assert [check.name for check in looked.checks if check.status == "fail"] == ["kernels"]


def test_the_estimate_prefers_earlier_engines_of_the_same_model(make_model) -> None:
    model = open_model(make_model())
    other = passport(model, 100.0, 10 * model.nbytes, digest="sha256:other")
    assert estimate(model, "card", []).seconds is None
    scaled = estimate(model, "card", [other])
    assert (scaled.seconds, scaled.nbytes) == (pytest.approx(10.0), model.nbytes)
    same = estimate(model, "card", [other, passport(model, 3.0, 500), passport(model, 5.0, 700)])
    assert (same.seconds, same.nbytes) == (4.0, 700)
    assert "2 earlier engines of this model" in same.source
    assert estimate(model, "another", [other]).seconds is None


@pytest.mark.parametrize(
    ("start", "limit", "sizes"),
    [(64, 1024, (64, 128, 256, 512, 1024)), (64, 100, (64,)), (64, 8, (8,)), (3, 12, (3, 6, 12)), (1, 1, (1,))],
)
def test_n_starts_at_the_limit_when_that_is_lower_and_never_passes_it(
    start: int, limit: int, sizes: tuple[int, ...]
) -> None:
    assert doubling_batches(SizeConfig(start_batch=start, max_batch=limit)) == sizes


def test_a_device_that_is_not_there_is_said(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "gpus", lambda: (BOARD,))
    failing(checked(make_model(), device="cuda:1"), SetupError, "not found")
    failing(checked(make_model(), device="fake"), UsageError, "runs on cpu, cuda, not on `fake`")


def test_a_missing_package_is_said_with_the_install_line(make_model) -> None:
    backend_spec = BackendSpec("c", "s", ".x", ("no_such_package",), "pip install x", None, None)
    failing(checked(make_model(), backend_spec=backend_spec), SetupError, "needs no_such_package")


BY_BINDINGS = BackendSpec(
    name="bindings",
    summary="a backend over the bindings",
    payload_suffix=".engine",
    modules=("tensorrt",),
    install="pip install it",
    builder=None,
    runtime=None,
    devices=("cuda",),
)
BY_TOOL = replace(BY_BINDINGS, name="tool", modules=(), tools=("trtexec",))

Look = Callable[..., dict[str, PreflightCheck]]


@pytest.fixture
def look(tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Look:
    """The checks by name, of a machine under `tmp_path`."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path = make_model()

    def checks(
        backend_spec: BackendSpec = BY_BINDINGS,
        board: Gpu | None = H100,
        precision: str = "fp16",
        library_path: str = "",
    ) -> dict[str, PreflightCheck]:
        environ = {"PATH": str(tmp_path / "bin"), "LD_LIBRARY_PATH": library_path}
        monkeypatch.setenv("PATH", environ["PATH"])
        here = detect_installation(
            tmp_path, packages=[tmp_path / "site"], environ=environ, known_gpus=() if board is None else (board,)
        )
        config = SizeConfig()
        build = BuildConfig(device="cuda:0", precision=precision)  # type: ignore[arg-type]
        layout = output_layout(path, tmp_path / "out", ".engine")
        flight = Preflight(
            open_model(path), layout, config, build, backend_spec, doubling_batches(config), installation=here
        )
        try:
            flight.run()
        except SetupError as error:
            assert error is flight.failures[0] and error.hint
        assert not {check.name for check in flight.checks if check.status == "fail" and not check.hint}
        return {check.name: check for check in flight.checks}

    return checks


def test_a_machine_that_fits_has_a_line_for_every_part(look: Look, tmp_path: Path) -> None:
    wheels(tmp_path / "site", "10.16.1.11")
    debian(tmp_path, "10.16.1.11-1+cuda13.0", "libnvinfer-bin")
    trtexec(tmp_path, "101601", 11, folder="bin")
    found = look()
    assert {check.status for check in found.values()} == {"ok"}
    assert "trtexec 10.16.1.11" in found["tensorrt-versions"].text
    assert "(minimum 580)" in found["tensorrt-driver"].text and "fp8" in found["tensorrt-gpu-0"].text


def test_parts_of_two_releases_and_two_on_one_path_are_warnings(look: Look, tmp_path: Path) -> None:
    wheels(tmp_path / "site", "10.16.1.11")
    trtexec(tmp_path, "110400", 106, folder="bin")
    for folder, version in (("opt/a", "10.3.0"), ("opt/b", "10.7.0")):
        library(tmp_path, folder, version)
    found = look(library_path="/opt/a:/opt/b")
    assert found["tensorrt-versions"].status == found["tensorrt-twice"].status == "warn"
    assert "11.4.0.106" in found["tensorrt-versions"].text


@pytest.mark.parametrize(
    ("version", "board", "precision", "failed", "words"),
    [
        ("10.16.1.11", V100, "fp16", "tensorrt-gpu-0", "does not run on Tesla V100"),
        ("10.16.1.11", replace(H100, driver="550.54.15"), "fp16", "tensorrt-driver", "needs driver 580"),
        (
            "10.8.0.43",
            RTX5090,
            "mxfp8",
            "precision-tensorrt",
            "mxfp8 needs TensorRT 10.12 or newer, installed is 10.8.0.43",
        ),
        ("10.16.1.11", H100, "nvfp4", "precision", "needs compute capability 10.0"),
    ],
)
def test_what_cannot_work_fails_before_a_minute_is_spent(
    version: str, board: Gpu, precision: str, failed: str, words: str, look: Look, tmp_path: Path
) -> None:
    wheels(tmp_path / "site", version)
    check = look(board=board, precision=precision)[failed]
    assert check.status == "fail" and words in check.text


def test_trtexec_is_judged_by_its_own_version_and_without_nvml_too(look: Look, tmp_path: Path) -> None:
    wheels(tmp_path / "site", "11.4.0.106")
    trtexec(tmp_path, "100700", 23, folder="bin")
    assert look(BY_TOOL, RTX5090)["tensorrt-gpu-0"].status == "fail"
    assert look(BY_BINDINGS, RTX5090)["tensorrt-gpu-0"].status == "ok"
    blind = look(BY_TOOL, None)
    assert blind["device"].status == "warn" and blind["tensorrt-versions"].status == "warn"

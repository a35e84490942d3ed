"""Which providers run: asked for, found, or refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from trt_engine.backends.onnxruntime.providers import choose, read_back
from trt_engine.errors import SetupError, UsageError

GPU_BUILD = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
CPU_BUILD = ("AzureExecutionProvider", "CPUExecutionProvider")


@pytest.mark.parametrize(
    ("providers", "device", "names", "on", "strict"),
    [
        ((), "cpu", ("cpu",), "cpu", False),
        ((), "cuda:1", ("cuda",), "cuda:1", True),
        (("cuda",), "cpu", ("cuda",), "cuda:0", True),
        (("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda:0", ("cuda", "cpu"), "cuda:0", False),
        (("trt", "cuda", "cpu"), "cuda:2", ("tensorrt", "cuda", "cpu"), "cuda:2", False),
    ],
)
def test_names_and_aliases_become_providers_in_order(providers, device, names, on, strict):
    choice = choose(providers, device, available=GPU_BUILD)
    assert (choice.names, choice.device, choice.strict) == (names, on, strict)
    number = on.partition(":")[2]
    assert [options.get("device_id", "") for options in choice.options] == [
        "" if name == "cpu" else number for name in names
    ]
    assert choice.fallback is None


def test_settings_with_a_dot_go_to_their_provider():
    options = {"cuda.gpu_mem_limit": "1000", "tensorrt.trt_engine_cache_enable": "1", "intra_op_threads": "2"}
    choice = choose(("tensorrt", "cuda", "cpu"), "cuda:0", options=options, available=GPU_BUILD)
    assert choice.options == (
        {"device_id": "0", "trt_engine_cache_enable": "1"}, {"device_id": "0", "gpu_mem_limit": "1000"}, {},
    )  # fmt: skip
    assert choice.compiles


def test_a_provider_this_build_lacks_is_an_error_that_names_what_it_has():
    with pytest.raises(SetupError, match=r"`cuda` was asked for, and onnxruntime .* has `cpu`") as caught:
        choose(("cuda", "cpu"), "cpu", available=CPU_BUILD)
    assert "onnxruntime-gpu" in (caught.value.hint or "") and "--allow-fallback" in (caught.value.hint or "")


def test_a_fallback_happens_only_when_allowed_and_is_told():
    choice = choose(("cuda",), "cuda:0", allow_fallback=True, available=CPU_BUILD)
    assert choice.names == ("cpu",) and choice.device == "cpu"
    assert "`cuda` was asked for" in (choice.fallback or "") and "`cpu` runs in its place" in (choice.fallback or "")


@pytest.mark.parametrize(
    ("providers", "device", "options", "text"),
    [
        (("cpux",), "cpu", {}, "unknown provider `cpux`"),
        (("cuda", "gpu"), "cuda:0", {}, "named twice"),
        (("cpu",), "cuda:0", {}, "do not use it"),
        (("cpu",), "cpu", {"cuda.device_id": "1"}, "not asked for"),
        ((), "fake", {}, "no device `fake`"),
    ],
)
def test_contradictions_are_usage_errors(providers, device, options, text):
    with pytest.raises(UsageError, match=text) as caught:
        choose(providers, device, options=options, available=GPU_BUILD)
    assert caught.value.hint


@dataclass
class Dropped:
    """A session as ONNX Runtime leaves it when a provider's library does not load: made, and without the provider."""

    running: tuple[str, ...] = ("CPUExecutionProvider",)

    def get_providers(self) -> list[str]:
        return list(self.running)


def test_a_provider_that_was_dropped_in_silence_is_found_by_asking_the_session():
    choice = choose(("cuda", "cpu"), "cuda:0", available=GPU_BUILD)
    with pytest.raises(SetupError, match=r"`cuda` was asked for and does not run: .") as caught:
        read_back(Dropped(), choice, allow_fallback=False)  # type: ignore[arg-type]
    assert "trt-engine doctor" in (caught.value.hint or "")
    told = read_back(Dropped(), choice, allow_fallback=True)  # type: ignore[arg-type]
    assert told is not None and "`cpu` runs in its place" in told
    assert read_back(Dropped(GPU_BUILD), choice, allow_fallback=False) is None  # type: ignore[arg-type]

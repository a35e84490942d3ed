"""Arrays that pass between libraries without a copy, as far as the host can show it."""

from __future__ import annotations

import gc
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.device import dlpack, foreign, open_device
from trt_engine.device.cuda import libcuda
from trt_engine.device.host import HostDevice
from trt_engine.errors import SetupError, UsageError


def lend(dtype: str, shape: tuple[int, ...] | None, nbytes: int, kind: int = dlpack.CPU) -> tuple[Any, HostDevice]:
    """A buffer of the host as other libraries see one of a device."""
    device = HostDevice()
    buffer = device.allocate(nbytes)
    return dlpack.device_array(buffer, dtype, shape, kind, 0), device


@given(
    st.sampled_from(["int8", "uint16", "float16", "float32", "float64", "int64", "bool", "complex64"]),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
)
def test_numpy_reads_what_we_lend(dtype: str, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    array, device = lend(dtype, shape, count * 16)
    stream = device.stream()
    device.upload(np.arange(count).astype(dtype), array.buffer, stream)
    seen = np.from_dlpack(array)
    assert (seen.dtype, seen.shape) == (np.dtype(dtype), shape)
    assert np.array_equal(seen.reshape(-1), np.arange(count).astype(dtype))
    if count:
        assert seen.__array_interface__["data"][0] == array.buffer.pointer


def test_a_lent_array_keeps_its_memory_until_its_reader_is_gone() -> None:
    array, device = lend("float32", (4,), 16)
    seen = np.from_dlpack(array)
    del array
    gc.collect()
    assert device.memory().allocated_count == 1
    assert seen.shape == (4,)
    del seen
    gc.collect()
    assert device.memory().allocated_count == 0


def test_a_capsule_nobody_takes_keeps_nothing() -> None:
    array, device = lend("float32", (4,), 16)
    capsule = array.__dlpack__()
    del array
    assert device.memory().allocated_count == 1
    del capsule
    gc.collect()
    assert device.memory().allocated_count == 0
    assert not [held for held in dlpack._exports.values() if held[-1].buffer.device is device]


def test_a_copy_or_another_device_is_refused_as_dlpack_says() -> None:
    array, _ = lend("float32", (4,), 16)
    with pytest.raises(BufferError):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(dlpack.CUDA, 0))
    assert array.__dlpack__(max_version=(1, 1), dl_device=(dlpack.CPU, 0), copy=False, stream=None) is not None


def test_the_interface_says_address_type_and_shape_and_refuses_what_it_cannot_say() -> None:
    array, _ = lend("float16", (2, 3), 12, dlpack.CUDA)
    described = array.__cuda_array_interface__
    assert (described["shape"], described["typestr"], described["version"]) == ((2, 3), "<f2", 3)
    assert described["data"] == (array.buffer.pointer, False)
    assert not hasattr(lend("bfloat16", (2,), 4, dlpack.CUDA)[0], "__cuda_array_interface__")
    assert not hasattr(lend("float16", (2,), 4)[0], "__cuda_array_interface__")


def test_a_type_nobody_knows_and_a_shape_that_does_not_fit_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="an array of string cannot be exported"):
        lend("string", (1,), 8)
    with pytest.raises(UsageError, match="takes 12 bytes, the buffer has 8"):
        lend("float32", (3,), 8)


class Interface:
    """Somebody's array by `__cuda_array_interface__` alone."""

    def __init__(self, **described: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (0x7000, False),
            "shape": (2, 3),
            "typestr": "<f4",
        } | described


def test_an_interface_is_read_with_its_stream_and_no_device() -> None:
    lent = dlpack.import_array(Interface(stream=7), None)
    assert (lent.pointer, lent.nbytes, lent.dtype, lent.shape) == (0x7000, 24, "float32", (2, 3))
    assert (lent.device_type, lent.device_id, lent.stream) == (dlpack.CUDA, None, 7)
    assert dlpack.import_array(Interface(strides=(12, 4)), None).nbytes == 24
    with pytest.raises(UsageError, match="strided"):
        dlpack.import_array(Interface(strides=(4, 8)), None)
    with pytest.raises(UsageError, match="type `<U4` is not supported"):
        dlpack.import_array(Interface(typestr="<U4"), None)


def test_a_strided_array_is_refused_by_every_device_that_borrows() -> None:
    class Strided:
        """A transposed numpy array that is no `ndarray`."""

        array = np.zeros((4, 3), np.float32).T

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

    device = open_device("cpu")
    with pytest.raises(UsageError, match="strided"):
        device.borrow(Strided(), device.stream())


def test_a_lender_that_refuses_is_a_usage_error() -> None:
    class Refusing:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (dlpack.CPU, 0)

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("it requires grad")

    device = open_device("cpu")
    with pytest.raises(UsageError, match="an array of Refusing cannot be exported: it requires grad"):
        device.borrow(Refusing(), device.stream())


# ------------------------------------------------------------------------------------------------ a machine without


@pytest.mark.skipif(libcuda._is_importable("cuda.core"), reason="this machine has cuda-core")
def test_a_gpu_without_its_packages_is_a_setup_error_that_says_what_to_install() -> None:
    with pytest.raises(SetupError, match=r"memory on `cuda:1` needs `cuda\.core`.* not installed") as caught:
        open_device("cuda:1")
    assert caught.value.hint is not None and 'trt-engine[gpu]"' in caught.value.hint
    assert "cuda-core>=0.5,<2" in caught.value.hint


class _Tensor:
    """As much of a torch tensor on GPU 1 as is read without a capsule."""

    is_cuda, requires_grad = True, False
    negative = complex_ = strided = sparse = False
    index = 1

    def is_neg(self) -> bool:
        return self.negative

    def is_complex(self) -> bool:
        return self.complex_

    def is_contiguous(self) -> bool:
        return not self.strided

    def get_device(self) -> int:
        return self.index

    def data_ptr(self) -> int:
        if self.sparse:
            raise RuntimeError("a sparse tensor has no storage")
        return 4096


@pytest.fixture
def torch_library(monkeypatch: pytest.MonkeyPatch) -> foreign.ArrayLibrary:
    """torch's arrays, of a stand-in whose current stream on GPU 1 is 77."""
    native = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: {1: 77}[index])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=_Tensor, _C=native))
    monkeypatch.setattr(foreign, "_libraries", {})
    found = foreign.library_of(_Tensor)
    assert found is not None and found is foreign.library_of(_Tensor)
    return found


def test_a_tensor_is_read_after_its_librarys_current_stream(torch_library: foreign.ArrayLibrary) -> None:
    ordered: list[int] = []
    assert torch_library.reader(1, ordered.append)(_Tensor()) == 4096
    assert ordered == [77]
    assert (torch_library.index_of(_Tensor()), torch_library.address_of(_Tensor())()) == (1, 4096)
    assert torch_library.current_stream(1) == 77
    elsewhere = _Tensor()
    elsewhere.is_cuda = False  # on the host, or on an accelerator that counts from 0 too
    assert torch_library.index_of(elsewhere) < 0


@pytest.mark.parametrize(
    "facts",
    [
        {"requires_grad": True},
        {"negative": True},
        {"complex_": True},
        {"strided": True},
        {"index": 0},
        {"sparse": True},
    ],
    ids=str,
)
def test_a_tensor_that_only_a_capsule_describes_is_left_to_it_and_orders_nothing(
    torch_library: foreign.ArrayLibrary, facts: dict[str, Any]
) -> None:
    tensor = _Tensor()
    for name, value in facts.items():
        setattr(tensor, name, value)
    ordered: list[int] = []
    assert torch_library.reader(1, ordered.append)(tensor) is None
    assert ordered == []

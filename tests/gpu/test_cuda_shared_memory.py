"""CUDA shared memory of `serve` with real handles: a client process allocates, registers, infers and reads back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save_model

pytest.importorskip("httptools")
pytest.importorskip("grpc")

import trt_engine as te
from trt_engine.backends.onnxruntime import providers
from trt_engine.backends.onnxruntime.providers import select_providers
from trt_engine.errors import TrtEngineError
from trt_engine.verbs.serve.server import Server

pytestmark = pytest.mark.gpu

CLIENT = r"""
import base64, ctypes, json, sys, urllib.error, urllib.request
import numpy as np

protocol, address, grpc_address, offset = sys.argv[1:4] + [int(sys.argv[4])]
cuda = ctypes.CDLL("libcuda.so.1")


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def check(status):
    if status:
        raise SystemExit(f"CUDA error {status}")


device, context, pointer, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), Handle()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(8192)))
check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), pointer))
x = np.arange(12, dtype=np.float32).reshape(3, 4)
raw = bytes(handle.bytes)


def put(array):
    check(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(pointer.value + offset), array.ctypes.data_as(ctypes.c_void_p), array.nbytes))
    check(cuda.cuCtxSynchronize())


def get():
    found = np.empty_like(x)
    check(cuda.cuMemcpyDtoH_v2(found.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(pointer.value + 4096), found.nbytes))
    return found


def post(path, document):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(document).encode())
    try:
        return urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path}: {error.read().decode()}")


def register(size):
    if protocol == "http":
        body = {"raw_handle": {"b64": base64.b64encode(raw).decode()}, "device_id": 0, "byte_size": size}
        post("/v2/cudasharedmemory/region/mine/register", body)
        return
    call("CudaSharedMemoryRegister", message("CudaSharedMemoryRegisterRequest")(
        name="mine", raw_handle=raw, device_id=0, byte_size=size))


def parameters(at):
    return {"shared_memory_region": "mine", "shared_memory_offset": at, "shared_memory_byte_size": x.nbytes}


def infer():
    if protocol == "http":
        post("/v2/models/double/infer", {
            "inputs": [{"name": "x", "shape": [3, 4], "datatype": "FP32", "parameters": parameters(offset)}],
            "outputs": [{"name": "y", "parameters": parameters(4096)}],
        })
        return
    request = message("ModelInferRequest")(model_name="double")
    item = request.inputs.add(name="x", datatype="FP32", shape=[3, 4])
    for tensor, at in ((item, offset), (request.outputs.add(name="y"), 4096)):
        for key, value in parameters(at).items():
            field = "string_param" if isinstance(value, str) else "int64_param"
            setattr(tensor.parameters[key], field, value)
    call("ModelInfer", request)


if protocol == "grpc":
    import grpc
    from trt_engine.open_inference.messages import message

    channel = grpc.insecure_channel(grpc_address)

    def call(method, request):
        return channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(request.SerializeToString())

put(x)
register(8192)
for number in range(30):
    put(x + number)
    infer()
    assert (get() == 2 * (x + number)).all(), (number, get())
if protocol == "http":
    listed = json.load(urllib.request.urlopen(f"http://{address}/v2/cudasharedmemory/status"))
    assert listed == [{"name": "mine", "device_id": 0, "byte_size": 8192}], listed
    post("/v2/cudasharedmemory/region/mine/unregister", {})
    try:
        post("/v2/models/double/infer", {
            "inputs": [{"name": "x", "shape": [3, 4], "datatype": "FP32", "parameters": parameters(offset)}]})
    except SystemExit as error:
        assert "unknown region" in str(error), error
    try:
        register(1 << 40)
    except SystemExit as error:
        assert "the allocation" in str(error), error
    else:
        raise SystemExit("a region larger than its allocation was registered")
else:
    call("CudaSharedMemoryUnregister", message("CudaSharedMemoryUnregisterRequest")(name="mine"))
print("all right")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        if (dead := providers.start_error(select_providers((), "cuda:0"))) is not None:
            raise dead
    except TrtEngineError as error:
        pytest.skip(f"no GPU for ONNX Runtime here: {error.message}")
    folder = tmp_path_factory.mktemp("cuda")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["y"])], "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.array(2, np.float32), "two")],
    )  # fmt: skip
    model = folder / "double.onnx"
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), model)
    engine = te.build(
        model, out=folder / "double.engine.onnx", device="cuda:0", batch=(1, 4, 8), store=te.Store(folder / "store")
    )
    settings = {"http_port": 0, "grpc_port": 0, "metrics_port": -1, "drain_delay_s": 0, "shared_memory_prefix": "/own_"}
    with te.serve([f"double={engine.path}"], **settings) as server:
        yield server


@pytest.mark.parametrize("offset", [0, 256, 16], ids=["start", "aligned", "through the host"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_process_registers_its_memory_and_infers_in_it(server: Server, protocol: str, offset: int) -> None:
    addresses = (str(server.http_address), str(server.grpc_address))
    ran = subprocess.run(
        [sys.executable, "-c", CLIENT, protocol, *addresses, str(offset)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == "all right"


def test_a_handle_of_nothing_is_refused_and_the_server_goes_on(server: Server) -> None:
    import json
    import urllib.error
    import urllib.request

    body = {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 64}
    request = urllib.request.Request(
        f"http://{server.http_address}/v2/cudasharedmemory/region/none/register", json.dumps(body).encode()
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400 and b"cannot be opened" in refused.value.read()
    test_a_client_process_registers_its_memory_and_infers_in_it(server, "http", 0)

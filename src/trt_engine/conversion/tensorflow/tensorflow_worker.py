"""TensorFlow worker of `convert`: reads a source, writes ONNX with tf2onnx, and runs the source on request.

Standalone file for Python 3.9 and later with TensorFlow and tf2onnx; does not import this package. Requests are JSON
lines on stdin, each with one reply on the pipe whose number is the first argument; arrays are passed in `.npz` files.
Untrusted files (SavedModels, graphs, Keras, TFLite) are parsed only here. The process ends at EOF on stdin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent  # at the end of the path: its files shadow no package
sys.path[:] = [place for place in sys.path if Path(place).resolve() != FOLDER]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the reference is the CPU's FP32, not a GPU's TF32

import difflib  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import queue  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

MISSING = None
try:
    import numpy as np
    import onnx
    import tensorflow as tf
    import tf2onnx
    from tf2onnx import optimizer
    from tf2onnx.tfonnx import process_tf_graph

    sys.path.append(str(FOLDER))
    import tensorflow_readers as readers  # type: ignore[import-not-found, unused-ignore]
except ImportError as problem:
    # a name only if the package itself is missing; other import errors keep their message
    MISSING = (str(problem.name) if isinstance(problem, ModuleNotFoundError) else "", str(problem))

NEWEST_OPSET = 18  # of tf2onnx 1.17
TO_NCHW = (0, 3, 1, 2)
TO_NHWC = (0, 2, 3, 1)


# ------------------------------------------------------------------------------------------------ conversion


def convert(source: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Write the ONNX file (weights above the limit in one side file); returns its inputs and outputs."""
    opset = min(request["opset"], NEWEST_OPSET, onnx.defs.onnx_opset_version())
    nchw = set(request["nchw"])
    shapes = {
        port.name: in_layout(request["shapes"][port.name], TO_NHWC if port.name in nchw else None)
        for port in source.inputs
    }
    frozen, large = source.frozen(shapes, request["large"])
    new_names = {frozen.inputs[place]: port.name for place, port in enumerate(source.inputs)}
    new_names.update({frozen.outputs[place]: port.name for place, port in enumerate(source.outputs)})
    values = storage = None
    if large:
        from tf2onnx.graph import ExternalTensorStorage, Node
        from tf2onnx.tf_utils import compress_graph_def

        storage = ExternalTensorStorage()
        if frozen.graph is not None:
            values = compress_graph_def(frozen.graph)
        if not hasattr(np, "product"):  # removed in NumPy 2, but used by tf2onnx 1.17
            np.product = np.prod  # type: ignore[attr-defined, unused-ignore]
        Node.update_proto = without_weights(Node.update_proto)
    try:
        with tf.device("/cpu:0"), tf.Graph().as_default() as graph:
            if frozen.graph is not None:
                tf.import_graph_def(frozen.graph, name="")
            made = process_tf_graph(
                graph,
                continue_on_error=False,
                opset=opset,
                input_names=list(frozen.inputs),
                output_names=list(frozen.outputs),
                inputs_as_nchw=[one for one in frozen.inputs if new_names[one] in nchw],
                const_node_values=values,
                tensors_to_rename=new_names,
                initialized_tables=frozen.tables,
                custom_op_handlers={"Erfc": (write_erfc, [])},
                **frozen.more,
            )
            model = optimizer.optimize_graph(made, catch_errors=not large).make_model(
                "converted", external_tensor_storage=storage
            )
    except Exception as error:
        reject_unconverted(CONVERSION_LOG.unsupported)
        traceback.print_exc()
        raise converter_error(error, frozen) from error
    reject_unconverted(unconverted_nodes(model))
    write_model(model, storage, Path(request["out"]))
    return {"opset": opset, "unused": sorted({p.name for p in source.inputs} - {one.name for one in model.graph.input})}


def write_model(model: Any, storage: Any, out: Path) -> None:
    """Write the model without opset imports that no node uses; its large weights go to a side file."""
    domains = {node.domain for node in nodes_of(model.graph)} | {""}
    kept = [one for one in model.opset_import if one.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    if storage is None:
        out.write_bytes(model.SerializeToString())
    else:
        write_large(model, storage, out)


def without_weights(update_proto: Any) -> Any:
    """Delay writing constants until the model is made. tf2onnx serializes every node's attributes after each of some 30
    optimizations, and protobuf does not free that memory: 1.5 GB of weights exhausted 24 GB."""

    def update(node: Any, external_tensor_storage: Any = None) -> None:
        if external_tensor_storage is not None or not node.is_const():
            update_proto(node, external_tensor_storage)
            return
        held, node._attr = node._attr, {}
        try:
            update_proto(node)
        finally:
            node._attr = held

    return update


def write_erfc(context: Any, node: Any, name: str, args: Any) -> None:
    """Erfc as 1 - Erf(x): Keras's GELU uses Erfc, which ONNX lacks and tf2onnx 1.17 does not support."""
    output = node.output[0]
    shape, dtype = context.get_shape(output), context.get_dtype(output)
    context.remove_node(node.name)
    one = context.make_const(name + "/one", np.ones((), onnx.helper.tensor_dtype_to_np_dtype(dtype)))
    erf = context.make_node("Erf", node.input, shapes=[shape], dtypes=[dtype])
    context.make_node(
        "Sub", [one.output[0], erf.output[0]], name=name, outputs=[output], shapes=[shape], dtypes=[dtype]
    )


def in_layout(shape: Any, order: Any) -> Any:
    return shape if order is None or shape is None else [shape[place] for place in order]


def nodes_of(graph: Any) -> Any:
    """Every node, those of bodies and branches included."""
    return (node for body in graphs_of(graph) for node in body.node)


def graphs_of(graph: Any) -> Any:
    """The graph and the bodies and branches inside it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in [attribute.g] * attribute.HasField("g") + list(attribute.graphs):
                yield from graphs_of(body)


def unconverted_nodes(model: Any) -> dict[str, str]:
    """Operators without an ONNX domain, each with a node: those tf2onnx did not convert."""
    versions = {one.domain: one.version for one in model.opset_import}
    found: dict[str, str] = {}
    for node in nodes_of(model.graph):
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain in ("", "ai.onnx.ml") and not onnx.defs.has(node.op_type, versions.get(domain, 1), domain):
            found.setdefault(node.op_type, node.name)
    return found


def reject_unconverted(found: dict[str, str]) -> None:
    if not found:
        return
    listed = ", ".join(f"`{op}` (node `{found[op]}`)" if found[op] else f"`{op}`" for op in sorted(found))
    raise readers.ReportedError(
        "ModelError",
        "tf2onnx cannot convert {}: {}".format("this operator" if len(found) == 1 else "these operators", listed),
        "write that part of the model with other operators, or cut it off: `-O outputs=` of a frozen graph, a signature",
    )


def write_large(model: Any, storage: Any, out: Path) -> None:
    """Write the protobuf without large tensors, and those to one side file."""
    places = {}
    side = out.name + ".data"
    if not storage.name_to_tensor_data:  # many small weights
        out.write_bytes(model.SerializeToString())
        return
    with out.with_name(side).open("wb") as file:
        for name in storage.name_to_tensor_data:
            raw = storage.name_to_tensor_data[name]
            file.seek(-file.tell() % 4096, 1)  # whole pages: they are mapped, not read
            places[name] = (file.tell(), len(raw))
            file.write(raw)
    stored = [tensor for graph in graphs_of(model.graph) for tensor in graph.initializer]
    stored += [attribute.t for node in nodes_of(model.graph) for attribute in node.attribute if attribute.HasField("t")]
    for tensor in stored:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        name = next(one.value for one in tensor.external_data if one.key == "location")
        del tensor.external_data[:]
        for key, value in (("location", side), ("offset", places[name][0]), ("length", places[name][1])):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
    out.write_bytes(model.SerializeToString())


class ConversionLog(logging.Handler):
    """Operators that tf2onnx logged as unsupported, each with a node, and nodes whose conversion failed."""

    def __init__(self) -> None:
        super().__init__()
        self.unsupported: dict[str, str] = {}
        self.failed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        given = record.args if isinstance(record.args, tuple) else ()
        if "is not supported" in str(record.msg) and len(given) == 2:
            self.unsupported.setdefault(str(given[1]), str(given[0]))
        elif str(record.msg).startswith("Failed to convert node") and given:
            self.failed.append(str(given[0]))


CONVERSION_LOG = ConversionLog()


def refused(message: str, hint: str) -> Exception:
    error: Exception = readers.ReportedError("ModelError", message, hint)
    return error


def converter_error(error: Exception, frozen: Any) -> Exception:
    """The error for an exception of tf2onnx: what the model holds that it cannot read, else its exception and node."""
    lite = frozen.more.get("tflite_path")
    held = readers.unreadable_in_tflite(lite) if lite else None
    if held is not None:
        return refused(f"tf2onnx cannot convert {held[0]}", held[1])
    text, node = readers.first_line(error), f" at node `{CONVERSION_LOG.failed[0]}`" if CONVERSION_LOG.failed else ""
    limit = text.startswith("make_sure failure: ")
    if limit:
        said = f"tf2onnx {tf2onnx.__version__} cannot convert the model{node}: {text.partition(': ')[2]}"
    else:
        said = f"the converter failed, not the model: tf2onnx {tf2onnx.__version__} ended{node} with "
        said += f"{type(error).__name__}: {text}"
    if lite:
        hint = "export ONNX from the model's training code; `-v` shows the converter's stack trace"
    else:
        part = f"write `{CONVERSION_LOG.failed[0]}` with other operators" if node else "convert another signature"
        hint = f"{part}, or cut it off (`-O outputs=` of a frozen graph); `-v` shows the converter's stack trace"
    return refused(said, hint)


# ------------------------------------------------------------------------------------------------ reference


def run(source: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Outputs of the source for the feeds of an `.npz`, both in the order of its inputs and outputs."""
    nchw = set(request["nchw"])
    with np.load(request["feeds"], allow_pickle=False) as given:
        feeds = [given[f"a{place}"] for place in range(len(source.inputs))]
    for place, port in enumerate(source.inputs):
        wanted = tf.as_dtype(port.dtype).as_numpy_dtype
        if feeds[place].dtype.kind == "V":  # NumPy writes bfloat16 as bytes
            feeds[place] = feeds[place].view(wanted)
        if port.name in nchw:
            feeds[place] = np.ascontiguousarray(feeds[place].transpose(TO_NHWC))
    shapes = ", ".join(f"{p.name} {list(feeds[place].shape)}" for place, p in enumerate(source.inputs))
    with readers.failures(f"the source does not run on {shapes}"):
        answers = source.run(feeds)
    answers = [np.asarray(one) for one in answers]
    np.savez(request["out"], **{f"a{place}": one for place, one in enumerate(answers)})
    return {"dtypes": [str(one.dtype) for one in answers]}


# ------------------------------------------------------------------------------------------------ the loop


def describe_source(source: Any, nchw: list[str]) -> dict[str, Any]:
    for name in nchw:
        port = next((one for one in source.inputs if one.name == name), None)
        if port is None:
            listed = ", ".join(f"`{one.name}`" for one in source.inputs)
            near = difflib.get_close_matches(name, [one.name for one in source.inputs], 1, 0.3)
            hint = f"did you mean `{near[0]}`?" if near else "name an input as it is listed"
            raise readers.ReportedError("UsageError", f"no input is called `{name}`; the source has {listed}", hint)
        if port.shape is not None and len(port.shape) != 4:
            raise readers.ReportedError(
                "UsageError",
                f"input `{name}` has {len(port.shape)} dimensions, and NHWC has four",
                "leave it out of `inputs_as_nchw`",
            )
    return {
        "inputs": [
            {"name": p.name, "dtype": p.dtype, "shape": in_layout(p.shape, TO_NCHW if p.name in nchw else None)}
            for p in source.inputs
        ],
        "outputs": [{"name": p.name, "dtype": p.dtype} for p in source.outputs],
        "notes": source.notes,
    }


def handle_request(state: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    do = request["do"]
    if do == "open":
        logging.getLogger("tf2onnx").addHandler(CONVERSION_LOG)
        state["request"] = request
        state["source"] = readers.open_source(request)
        return describe_source(state["source"], request["nchw"])
    if do == "convert":
        made = convert(state["source"], request)
        # freezing destroys tables and captures: reopen the source as reference
        names = [port.name for port in state["source"].inputs]
        state["source"] = readers.open_source(state["request"])
        assert names == [port.name for port in state["source"].inputs]
        return made
    return run(state["source"], request)


def main() -> None:
    mouth = os.fdopen(int(sys.argv[1]), "wb", buffering=0)

    def say(message: dict[str, Any]) -> None:
        raw = memoryview(json.dumps(message).encode() + b"\n")
        while raw:
            raw = raw[mouth.write(raw) :]

    if MISSING is not None:
        say({"missing": MISSING[0], "text": MISSING[1], "python": sys.version.split()[0]})
        return
    versions = {"tensorflow": tf.__version__, "tf2onnx": tf2onnx.__version__, "python": sys.version.split()[0]}
    say({"versions": versions})
    requests: queue.Queue[bytes] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            requests.put(line)
        os._exit(0)  # the parent has exited or closed the pipe

    threading.Thread(target=listen, name="listen", daemon=True).start()
    state: dict[str, Any] = {}
    while True:
        request = json.loads(requests.get())
        try:
            say({"answer": handle_request(state, request)})
        except readers.ReportedError as error:
            say({"error": [error.kind, error.message, error.hint]})
        except BaseException as error:  # every error becomes a reply
            traceback.print_exc()
            if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
                say({"error": ["MemoryExhausted", "out of memory: " + readers.first_line(error), "a smaller example"]})
            else:
                text = f"{type(error).__name__}: {readers.first_line(error)}"
                say({"error": ["ModelError", "TensorFlow failed: " + text, "`-v` shows what it printed"]})
        sys.stderr.flush()
        sys.stdout.flush()


if __name__ == "__main__":
    main()

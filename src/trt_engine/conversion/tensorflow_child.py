"""The TensorFlow side of `convert`: reads a source, writes ONNX with tf2onnx, and runs the source on request.

A plain file for any interpreter from Python 3.9 that has TensorFlow and tf2onnx; nothing of this package is needed there.
Requests come as JSON lines on stdin, each has one answer on the pipe whose number is the first argument, arrays travel in
`.npz` files. What is untrusted (SavedModels, graphs, Keras and TFLite files) is parsed here and nowhere else. The process
ends when its stdin does.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys
from pathlib import Path

# This file's folder has a `tensorflow.py` of ours, and Python puts it first.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the reference is the CPU's FP32, not a GPU's TF32

import collections
import difflib
import json
import queue
import re
import threading
import traceback
import zipfile
from typing import Any

MISSING = None
try:
    import numpy as np
    import onnx
    import tensorflow as tf
    import tf2onnx
    from tf2onnx import optimizer, tf_loader
    from tf2onnx.tfonnx import process_tf_graph
except ImportError as problem:
    # a name only where the package itself is not there; what is broken is told in its own words
    MISSING = (str(problem.name) if isinstance(problem, ModuleNotFoundError) else "", str(problem))

NEWEST_OPSET = 18  # of tf2onnx 1.17
LARGE = 1500 * 2**20  # bytes of weights from which they go to a side file: one protobuf ends at 2 GB
TO_NCHW = (0, 3, 1, 2)
TO_NHWC = (0, 2, 3, 1)


class Refusal(Exception):
    """An error for the person: the name of a class of `trt_engine.errors`, a message, a hint."""

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint


class Port:
    """An input or output: its name in ONNX, its element type, its shape in the source (None where open, or unknown)."""

    def __init__(self, name: str, dtype: Any, shape: Any, tensor: Any = None) -> None:
        self.name = name
        self.dtype = tf.as_dtype(dtype).name
        rank = tf.TensorShape(shape).rank
        self.shape = None if rank is None else tf.TensorShape(shape).as_list()
        self.tensor = tensor


class Frozen:
    """What tf2onnx takes: a graph without variables (None for TFLite), the names in it, its lookup tables."""

    def __init__(self, graph: Any, inputs: list[str], outputs: list[str], tables: Any = None, **more: Any) -> None:
        self.graph, self.inputs, self.outputs, self.tables, self.more = graph, inputs, outputs, tables, more


def first_line(error: BaseException) -> str:
    """The telling line of an error that may fill a screen."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


# ------------------------------------------------------------------------------------------------ sources


class Function:
    """A SavedModel's signature or a Keras model: a function of tensors, traced as often as shapes are asked for."""

    def __init__(self, call: Any, inputs: list[Port], name_outputs: Any, trackable: Any) -> None:
        self._call, self._name_outputs, self._trackable = call, name_outputs, trackable
        self.inputs = inputs
        self.notes: list[str] = []
        self.outputs: list[Port] = []
        self._traced = self._trace({port.name: port.shape for port in inputs})

    def _trace(self, shapes: dict[str, Any]) -> Any:
        found: list[Port] = []

        def flat(*tensors: Any) -> list[Any]:
            found.clear()
            found.extend(Port(name, one.dtype, one.shape) for name, one in self._name_outputs(self._call(tensors)))
            return [tf.identity(one) for _, one in self._name_outputs(self._call(tensors))]

        specs = [
            tf.TensorSpec(shapes[port.name], tf.as_dtype(port.dtype), name=f"input_{place}")
            for place, port in enumerate(self.inputs)
        ]
        traced = tf.function(flat).get_concrete_function(*specs)
        self.outputs = list(found)
        return traced

    def frozen(self, shapes: dict[str, Any], large: int) -> tuple[Frozen, bool]:
        if any(shapes[port.name] != port.shape for port in self.inputs):
            self._traced = self._trace(shapes)
        traced = self._traced
        sizes = [int(np.prod(one.shape)) * tf.as_dtype(one.dtype).size for one in traced.variables]
        for place, size in enumerate(sizes):
            if size >= 2**31:
                raise Refusal(
                    "ModelError",
                    f"the weight `{traced.variables[place].name}` has {size} bytes, and what tf2onnx passes it through "
                    "(a protobuf) ends at 2 GiB",
                    "split that weight, and add or join what its parts give",
                )
        is_large = sum(sizes) > large
        inputs = [traced.inputs[place].name for place in range(len(self.inputs))]
        outputs = [one.name for one in traced.outputs]
        graph, tables = tf_loader.from_trackable(self._trackable, traced, inputs, outputs, is_large)
        return Frozen(graph, inputs, outputs, tables), is_large

    def run(self, feeds: list[Any]) -> list[Any]:
        answers = self._name_outputs(self._call([tf.constant(one) for one in feeds]))
        return [one.numpy() for _, one in answers]


def named_leaves(structure: Any, default: str) -> list[tuple[str, Any]]:
    """The tensors of a nest with a name each: the keys of a dict, `default` with a number otherwise."""
    if isinstance(structure, collections.abc.Mapping):
        found = []
        for key in sorted(structure):
            inside = structure[key]
            if tf.is_tensor(inside):
                found.append((str(key), inside))
            else:
                found += [(f"{key}_{name}", one) for name, one in named_leaves(inside, default)]
        return found
    return [(f"{default}_{place}", one) for place, one in enumerate(tf.nest.flatten(structure))]


def open_saved_model(request: dict[str, Any]) -> Any:
    path = Path(request["path"])
    folder = str(path if path.is_dir() else path.parent)
    notes = []
    tags = request["tags"]
    try:
        from tensorflow.python.tools import saved_model_utils

        known = [sorted(one) for one in saved_model_utils.get_saved_model_tag_sets(folder)]
    except ImportError:  # it has no promise to stay there
        known = [["serve"]]
    except Exception as error:
        raise Refusal(
            "ModelError", f"`{folder}` is no SavedModel: {first_line(error)}", "save or copy the folder again"
        ) from error
    if not tags:
        if ["serve"] in known or not known:
            tags = ["serve"]
        elif len(known) == 1:
            tags = known[0]
            notes.append(
                "the SavedModel has no graph tagged `serve`; the one tagged `{}` was taken".format(",".join(tags))
            )
    if known and sorted(tags) not in known:
        listed = ", ".join("`{}`".format(",".join(one)) for one in known)
        raise Refusal(
            "UsageError",
            "the SavedModel has no graph tagged `{}`, only {}".format(",".join(tags) or "serve", listed),
            "`-O tags={}`".format(",".join(known[0])),
        )
    try:
        loaded = tf.saved_model.load(folder, tags=tags)
    except Exception as error:
        traceback.print_exc()
        raise Refusal(
            "ModelError",
            f"TensorFlow cannot load the SavedModel `{folder}`: {first_line(error)}",
            "a SavedModel is saved_model.pb with its folder `variables` beside it; copy it whole",
        ) from error
    source = of_signature(loaded, request["signature"])
    source.notes = notes + source.notes
    return source


def of_signature(loaded: Any, wanted: str | None) -> Any:
    usable = sorted(name for name in loaded.signatures if not name.startswith("_"))
    if wanted is None:
        wanted = (
            "serving_default" if "serving_default" in usable else usable[0] if len(usable) == 1 else None
        )  # fmt: skip
    if wanted is None and not usable:
        return of_call(loaded)
    if wanted == "__call__":
        return of_call(loaded)
    if wanted is None or wanted not in usable:
        listed = ", ".join(f"`{one}`" for one in usable) or "none"
        if wanted is None:
            message = f"the SavedModel has several signatures and none is `serving_default`: {listed}"
        else:
            message = f"the SavedModel has no signature `{wanted}`; it has: {listed}"
        near = difflib.get_close_matches(wanted or "", usable, 1, 0.3) or usable or ["__call__"]
        raise Refusal("UsageError", message, f"`-O signature={near[0]}`")
    signature = loaded.signatures[wanted]
    specs = dict(signature.structured_input_signature[1])
    names = sorted(specs)
    inputs = [Port(name, specs[name].dtype, specs[name].shape) for name in names]

    def call(tensors: Any) -> Any:
        return signature(**{name: tensors[place] for place, name in enumerate(names)})

    source = Function(call, inputs, lambda answer: named_leaves(answer, "output"), loaded)
    source.notes.append(f"signature `{wanted}`")
    return source


def of_call(loaded: Any) -> Any:
    """A SavedModel without signatures whose `__call__` was traced once, or once outside of training."""
    function = getattr(loaded, "__call__", None)  # noqa: B004
    traced = list(getattr(function, "concrete_functions", ()))
    plain = [one for one in traced if True not in tf.nest.flatten(one.structured_input_signature)]
    if len(plain) != 1:
        raise Refusal(
            "ModelError",
            f"the SavedModel has no signature, and its `__call__` was traced {len(plain)} times",
            "save it with one: `tf.saved_model.save(module, folder, signatures=function.get_concrete_function(...))`",
        )
    structure = plain[0].structured_input_signature
    leaves = tf.nest.flatten(structure)
    specs = [one for one in leaves if isinstance(one, tf.TensorSpec)]
    inputs = [Port(one.name or f"input_{place}", one.dtype, one.shape) for place, one in enumerate(specs)]

    def call(tensors: Any) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(one, tf.TensorSpec) else one for one in leaves]
        args, kwargs = tf.nest.pack_sequence_as(structure, filled)
        return loaded(*args, **kwargs)

    source = Function(call, inputs, lambda answer: named_leaves(answer, "output"), loaded)
    source.notes.append("the SavedModel has no signature: its `__call__` was taken")
    return source


def open_keras(request: dict[str, Any]) -> Any:
    path = request["path"]
    try:
        model = load_keras(path)
    except Exception as error:
        traceback.print_exc()
        text = str(error)
        hint = "load it in your own code and write a SavedModel: `model.export('folder')`"
        if "Lambda" in text or "lambda" in text or "unsafe" in text:
            message = f"`{path}` carries Python code (a Lambda layer), which is not run"
        elif "Could not locate" in text or "Unknown layer" in text or "custom" in text:
            message = f"`{path}` needs classes that are not in the file: {first_line(error)}"
        elif "No model config" in text or "No model found" in text:
            message = f"`{path}` holds weights without a model"
            hint = "build the model in your own code, load the weights, and write `model.export('folder')`"
        else:
            message = f"Keras cannot load `{path}`: {first_line(error)}"
        raise Refusal("ModelError", message, hint) from error
    if not getattr(model, "inputs", None):
        raise Refusal(
            "ModelError",
            f"the Keras model in `{path}` does not say what its inputs are: it was never built",
            "load it in your own code, call it once, and write a SavedModel: `model.export('folder')`",
        )
    structure = getattr(model, "input", None)  # a loaded Sequential has none
    if structure is None:
        structure = model.inputs if len(model.inputs) > 1 else model.inputs[0]
    inputs = []
    for place, one in enumerate(model.inputs):
        name = one.name.split(":")[0]
        if name.startswith("keras_tensor"):  # a number of the session it was made in
            name = "input" if len(model.inputs) == 1 else f"input_{place}"
        inputs.append(Port(name, one.dtype, one.shape))

    def call(tensors: Any) -> Any:
        return model(tf.nest.pack_sequence_as(structure, list(tensors)), training=False)

    def name_outputs(answer: Any) -> list[tuple[str, Any]]:
        if isinstance(answer, collections.abc.Mapping):
            return named_leaves(answer, "output")
        leaves = tf.nest.flatten(answer)
        names = list(getattr(model, "output_names", None) or ())
        if not names and len(leaves) == 1 and model.layers:
            names = [model.layers[-1].name]
        if len(names) != len(leaves) or len(set(names)) != len(names):
            return named_leaves(answer, "output")
        return [(names[place].split(":")[0], one) for place, one in enumerate(leaves)]

    return Function(call, inputs, name_outputs, model)


def load_keras(path: str) -> Any:
    """The model, whatever its file is called: Keras goes by the suffix, we by the content."""
    suffix = ".keras" if zipfile.is_zipfile(path) else ".h5"
    if path.endswith(suffix):
        return tf.keras.models.load_model(path, compile=False)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "model" + suffix)
        link.symlink_to(Path(path).resolve())
        return tf.keras.models.load_model(str(link), compile=False)


VARIABLES = ("Variable", "VariableV2", "VarHandleOp", "AutoReloadVariable")
EFFECTS = ("NoOp", "Assert", "Print", "PrintV2", "Const", "Placeholder", "PlaceholderWithDefault", "CheckNumerics")


class Graph:
    """A frozen GraphDef: its inputs are its Placeholders, its outputs what nothing else takes, unless they are named."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.notes: list[str] = []
        path = request["path"]
        definition = tf.compat.v1.GraphDef()
        try:
            definition.ParseFromString(Path(path).read_bytes())
            self._graph = tf.Graph()
            with self._graph.as_default():
                tf.import_graph_def(definition, name="")
        except Exception as error:
            traceback.print_exc()
            raise Refusal(
                "ModelError", f"`{path}` is no TensorFlow graph: {first_line(error)}", "freeze or copy it again"
            ) from error
        self._definition = definition
        kept = sorted({node.op for node in definition.node if node.op in VARIABLES})
        if kept:
            raise Refusal(
                "ModelError",
                "`{}` is not frozen: it has variables ({}) and the file has no values for them".format(
                    path, ", ".join(kept)
                ),
                "give the SavedModel folder, or freeze the graph with the checkpoint first",
            )
        operations = self._graph.get_operations()
        defaults = [one for one in operations if one.type == "PlaceholderWithDefault"]
        found = [one.outputs[0] for one in operations if one.type == "Placeholder"]
        takes = [self._tensor(name, "input") for name in request["inputs"]] or found
        gives = [self._tensor(name, "output") for name in request["outputs"]] or self._sinks(operations)
        if not takes:
            raise Refusal(
                "ModelError", f"`{path}` has no Placeholder, so it has no input", "name it: `-O inputs=node:0`"
            )
        if not gives:
            raise Refusal("ModelError", f"every output of `{path}` goes nowhere", "name it: `-O outputs=node:0`")
        taken = {one.op.name for one in takes}
        self._more: dict[str, Any] = {
            "ignore_default": [one.name for one in defaults if one.name in taken],
            "use_default": [one.name for one in defaults if one.name not in taken],
        }
        for name in self._more["use_default"]:
            self.notes.append(f"`{name}` keeps its default: it is no input unless it is named")
        if not request["outputs"]:
            self.notes.append("outputs found, not named: {}".format(", ".join(f"`{one.name}`" for one in gives)))
        self.inputs = self._ports(takes)
        self.outputs = self._ports(gives)
        self._session: Any = None

    def _tensor(self, name: str, role: str) -> Any:
        try:
            return self._graph.get_tensor_by_name(name if ":" in name else name + ":0")
        except Exception as error:
            names = [one.name for one in self._graph.get_operations() if one.outputs]
            near = difflib.get_close_matches(name.split(":")[0], names, 3, 0.4)
            raise Refusal(
                "UsageError",
                f"the graph has no {role} `{name}`",
                "the nearest: {}".format(", ".join(f"`{one}`" for one in near or names[-3:])),
            ) from error

    def _sinks(self, operations: Any) -> list[Any]:
        return [
            tensor
            for one in operations
            if one.type not in EFFECTS and one.outputs and not any(tensor.consumers() for tensor in one.outputs)
            for tensor in one.outputs
            if tensor.dtype not in (tf.resource, tf.variant)
        ]

    def _ports(self, tensors: list[Any]) -> list[Port]:
        ports = []
        for tensor in tensors:
            node, number = tensor.name.rsplit(":", 1)
            name = node if number == "0" else f"{node}_{number}"
            ports.append(Port(name, tensor.dtype, tensor.shape, tensor))
        return ports

    def frozen(self, shapes: dict[str, Any], large: int) -> tuple[Frozen, bool]:
        inputs = [port.tensor.name for port in self.inputs]
        outputs = [port.tensor.name for port in self.outputs]
        with self._graph.as_default():
            graph = tf_loader.tf_optimize(list(inputs), list(outputs), self._definition)
        override = {
            port.tensor.name: [-1 if size is None else size for size in shapes[port.name]]
            for port in self.inputs
            if shapes[port.name] != port.shape
        }
        return Frozen(
            graph, inputs, outputs, shape_override=override, **self._more
        ), self._definition.ByteSize() > large

    def run(self, feeds: list[Any]) -> list[Any]:
        if self._session is None:
            self._session = tf.compat.v1.Session(graph=self._graph)
        given = {port.tensor: feeds[place] for place, port in enumerate(self.inputs)}
        return list(self._session.run([port.tensor for port in self.outputs], given))


class Lite:
    """A TFLite model, run by TensorFlow's interpreter; names are its signature's where it has one."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.notes: list[str] = []
        self._path = request["path"]
        try:
            self._interpreter = tf.lite.Interpreter(self._path)
            takes, gives = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        except Exception as error:
            traceback.print_exc()
            raise Refusal(
                "ModelError",
                f"TensorFlow Lite cannot read `{self._path}`: {first_line(error)}",
                "convert or copy the file again",
            ) from error
        names = self._signature_names(request["signature"])
        self.inputs = self._ports(takes, names[0])
        self.outputs = self._ports(gives, names[1])
        if any(detail["quantization_parameters"]["scales"].size for detail in takes + gives):
            self.notes.append("the model is quantised: its inputs or outputs are integers with a scale")

    def _signature_names(self, wanted: str | None) -> tuple[dict[int, str], dict[int, str]]:
        """Tensor number -> name, of inputs and of outputs."""
        signatures = self._interpreter._get_full_signature_list()
        if wanted is not None and wanted not in signatures:
            listed = ", ".join(f"`{one}`" for one in sorted(signatures)) or "none"
            hint = "leave `signature` out for the main graph"
            raise Refusal("UsageError", f"the TFLite model has no signature `{wanted}`; it has: {listed}", hint)
        if wanted is None:
            wanted = next((one for one in ("serving_default", *sorted(signatures)) if one in signatures), None)
        if wanted is None:
            return {}, {}
        found = signatures[wanted]
        takes = {int(number): name for name, number in found["inputs"].items()}
        gives = {int(number): name for name, number in found["outputs"].items()}
        main = {int(detail["index"]) for detail in self._interpreter.get_input_details()}
        if not set(takes) <= main:
            raise Refusal(
                "UsageError",
                f"signature `{wanted}` is not the TFLite model's main graph, which is the one that is converted",
                "convert this signature to a TFLite file of its own",
            )
        return takes, gives

    def _ports(self, details: Any, names: dict[int, str]) -> list[Port]:
        ports = []
        for detail in details:
            shape = [None if size < 0 else int(size) for size in detail.get("shape_signature", detail["shape"])]
            plain = re.sub(r":\d+$", "", detail["name"])
            name = names.get(int(detail["index"])) or re.sub(r"^serving_default_", "", plain)
            ports.append(Port(name, detail["dtype"], shape, detail))
        return ports

    def frozen(self, shapes: dict[str, Any], large: int) -> tuple[Frozen, bool]:
        inputs = [port.tensor["name"] for port in self.inputs]
        outputs = [port.tensor["name"] for port in self.outputs]
        size = Path(self._path).stat().st_size
        return Frozen(None, inputs, outputs, tflite_path=self._path), size > large

    def run(self, feeds: list[Any]) -> list[Any]:
        for place, port in enumerate(self.inputs):
            self._interpreter.resize_tensor_input(port.tensor["index"], feeds[place].shape)
        self._interpreter.allocate_tensors()
        for place, port in enumerate(self.inputs):
            self._interpreter.set_tensor(port.tensor["index"], feeds[place])
        self._interpreter.invoke()
        return [np.array(self._interpreter.get_tensor(port.tensor["index"])) for port in self.outputs]


OPENERS = {"saved-model": open_saved_model, "keras": open_keras}


def open_source(request: dict[str, Any]) -> Any:
    kind = request["kind"]
    source = OPENERS[kind](request) if kind in OPENERS else (Graph if kind == "frozen-graph" else Lite)(request)
    kept = [port for port in source.inputs if port.dtype not in ("resource", "variant")]
    text = [port.name for port in kept + source.outputs if port.dtype == "string"]
    if text:
        raise Refusal(
            "ModelError",
            f"`{text[0]}` is text (tf.string), and engines take numbers",
            "give a signature that begins behind the text: `-O signature=`, or save one for the part with numbers",
        )
    taken = {port.name for port in source.inputs}
    for port in source.outputs:
        if port.name in taken:  # ONNX has one name space
            source.notes.append(f"output `{port.name}` is called `{port.name}_output`: an input has its name")
            port.name += "_output"
        taken.add(port.name)
    return source


# ------------------------------------------------------------------------------------------------ conversion


def convert(source: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Write the ONNX file (weights above the limit in one side file); its inputs and outputs are named."""
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
        if not hasattr(np, "product"):  # gone in NumPy 2, and tf2onnx 1.17 uses it here
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
    except Refusal:
        raise
    except Exception as error:
        traceback.print_exc()
        refuse_leftovers(LOGGED.unsupported)
        raise Refusal(
            "ModelError",
            f"tf2onnx cannot convert the model: {first_line(error)}",
            "`-v` shows what tf2onnx printed; another signature or cut, or export from the training code",
        ) from error
    refuse_leftovers(leftovers(model))
    domains = {node.domain for node in nodes_of(model.graph)} | {""}
    kept = [one for one in model.opset_import if one.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    if storage is None:
        Path(request["out"]).write_bytes(model.SerializeToString())
    else:
        write_large(model, storage, Path(request["out"]))
    return {"opset": opset, "unused": sorted({p.name for p in source.inputs} - {one.name for one in model.graph.input})}


def without_weights(update_proto: Any) -> Any:
    """tf2onnx writes every node's attributes into its protobuf after each of some 30 optimizations, and a protobuf does
    not give back what it had: 1.5 GB of weights ran a machine of 24 GB full. Here constants wait until the model is made.
    """

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
    """1 - Erf(x): Keras's GELU is made of Erfc, which ONNX has not and tf2onnx 1.17 does not know."""
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
    """Every node, those of bodies and branches too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in [attribute.g] * attribute.HasField("g") + list(attribute.graphs):
                yield from nodes_of(body)


def leftovers(model: Any) -> dict[str, str]:
    """Operators no ONNX domain knows, with a node of each: what tf2onnx left as it was."""
    versions = {one.domain: one.version for one in model.opset_import}
    found: dict[str, str] = {}
    for node in nodes_of(model.graph):
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain in ("", "ai.onnx.ml") and not onnx.defs.has(node.op_type, versions.get(domain, 1), domain):
            found.setdefault(node.op_type, node.name)
    return found


def refuse_leftovers(found: dict[str, str]) -> None:
    if not found:
        return
    listed = ", ".join(f"`{op}` (node `{found[op]}`)" if found[op] else f"`{op}`" for op in sorted(found))
    raise Refusal(
        "ModelError",
        "tf2onnx cannot convert {}: {}".format("this operator" if len(found) == 1 else "these operators", listed),
        "write that part of the model with other operators, or cut it off: `-O outputs=` of a frozen graph, a signature",
    )


def write_large(model: Any, storage: Any, out: Path) -> None:
    """The protobuf without its large tensors, and those in one file beside it."""
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
    for tensor in tensors_of(model.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        name = next(one.value for one in tensor.external_data if one.key == "location")
        del tensor.external_data[:]
        for key, value in (("location", side), ("offset", places[name][0]), ("length", places[name][1])):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
    out.write_bytes(model.SerializeToString())


def tensors_of(graph: Any) -> Any:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            for body in [attribute.g] * attribute.HasField("g") + list(attribute.graphs):
                yield from tensors_of(body)


class Logged:
    """What tf2onnx logged as unsupported: operator -> a node of it."""

    def __init__(self) -> None:
        self.unsupported: dict[str, str] = {}

    def watch(self) -> None:
        import logging

        outer = self

        class Watcher(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                given = record.args if isinstance(record.args, tuple) else ()
                if "is not supported" in str(record.msg) and len(given) == 2:
                    outer.unsupported.setdefault(str(given[1]), str(given[0]))

        logging.getLogger("tf2onnx").addHandler(Watcher())


LOGGED = Logged()


# ------------------------------------------------------------------------------------------------ reference


def run(source: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The source's outputs for the feeds of an `.npz`, both in the order of its inputs and outputs."""
    nchw = set(request["nchw"])
    with np.load(request["feeds"], allow_pickle=False) as given:
        feeds = [given[f"a{place}"] for place in range(len(source.inputs))]
    for place, port in enumerate(source.inputs):
        wanted = tf.as_dtype(port.dtype).as_numpy_dtype
        if feeds[place].dtype.kind == "V":  # NumPy writes bfloat16 as bytes
            feeds[place] = feeds[place].view(wanted)
        if port.name in nchw:
            feeds[place] = np.ascontiguousarray(feeds[place].transpose(TO_NHWC))
    try:
        answers = source.run(feeds)
    except Exception as error:
        traceback.print_exc()
        shapes = ", ".join(f"{p.name} {list(feeds[place].shape)}" for place, p in enumerate(source.inputs))
        raise Refusal("ModelError", f"the source does not run on {shapes}: {first_line(error)}") from error
    answers = [np.asarray(one) for one in answers]
    np.savez(request["out"], **{f"a{place}": one for place, one in enumerate(answers)})
    return {"dtypes": [str(one.dtype) for one in answers]}


# ------------------------------------------------------------------------------------------------ the loop


def described(source: Any, nchw: list[str]) -> dict[str, Any]:
    for name in nchw:
        port = next((one for one in source.inputs if one.name == name), None)
        if port is None:
            listed = ", ".join(f"`{one.name}`" for one in source.inputs)
            near = difflib.get_close_matches(name, [one.name for one in source.inputs], 1, 0.3)
            hint = f"did you mean `{near[0]}`?" if near else "name an input as it is listed"
            raise Refusal("UsageError", f"no input is called `{name}`; the source has {listed}", hint)
        if port.shape is not None and len(port.shape) != 4:
            raise Refusal(
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


def answer(state: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    do = request["do"]
    if do == "open":
        LOGGED.watch()
        state["request"] = request
        state["source"] = open_source(request)
        return described(state["source"], request["nchw"])
    if do == "convert":
        made = convert(state["source"], request)
        # freezing takes a model's tables and captures apart: the reference is the source read again
        names = [port.name for port in state["source"].inputs]
        state["source"] = open_source(state["request"])
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
        os._exit(0)  # the parent is gone, or is done with us

    threading.Thread(target=listen, name="listen", daemon=True).start()
    state: dict[str, Any] = {}
    while True:
        request = json.loads(requests.get())
        try:
            say({"answer": answer(state, request)})
        except Refusal as error:
            say({"error": [error.kind, error.message, error.hint]})
        except BaseException as error:  # everything becomes the one answer
            traceback.print_exc()
            if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
                say({"error": ["MemoryExhausted", "out of memory: " + first_line(error), "a smaller example"]})
            else:
                text = f"{type(error).__name__}: {first_line(error)}"
                say({"error": ["ModelError", "TensorFlow failed: " + text, "`-v` shows what it printed"]})
        sys.stderr.flush()
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""TensorFlow sources of `tensorflow_worker.py`: SavedModel, Keras, frozen graph, TFLite; each has inputs, outputs, `frozen`
for tf2onnx, and `run`.

Standalone file for Python 3.9 and later, beside the worker, which imports it.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import re
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_checks as checks  # type: ignore[import-not-found, unused-ignore]
from tf2onnx import tf_loader


class ReportedError(Exception):
    """An error for the user: name of a `trt_engine.errors` class, message, hint."""

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint


class Port:
    """An input or output: ONNX name, dtype, source shape (None if dynamic or unknown)."""

    def __init__(self, name: str, dtype: Any, shape: Any, tensor: Any = None) -> None:
        self.name = name
        self.dtype = tf.as_dtype(dtype).name
        rank = tf.TensorShape(shape).rank
        self.shape = None if rank is None else tf.TensorShape(shape).as_list()
        self.tensor = tensor


class FrozenGraph:
    """Input of tf2onnx: a graph without variables (None for TFLite), its names and lookup tables."""

    def __init__(self, graph: Any, inputs: list[str], outputs: list[str], tables: Any = None, **more: Any) -> None:
        self.graph, self.inputs, self.outputs, self.tables, self.more = graph, inputs, outputs, tables, more


def first_line(error: BaseException) -> str:
    """First meaningful line of an error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-195:]}"  # the reason is often at the end


@contextlib.contextmanager
def failures(message: str, hint: str | None = None) -> Iterator[None]:
    """Errors of TensorFlow and tf2onnx as a `ReportedError` with their first line."""
    try:
        yield
    except ReportedError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ReportedError("ModelError", f"{message}: {first_line(error)}", hint) from error


def reject_code(code: str | None, path: str, trusted: bool) -> list[str]:
    """`ReportedError` for a source that does more than compute, or a note if it is trusted."""
    if code is None:
        return []
    if trusted:
        return [f"trusted: the source holds {code}"]
    raise ReportedError(
        "ModelError",
        f"`{path}` does more than compute: it holds {code}, which is not run",
        "if you trust it, `--trust-source`: its code then runs with your rights",
    )


class FunctionSource:
    """A SavedModel signature or Keras model: a function of tensors, traced once per set of shapes."""

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

    def frozen(self, shapes: dict[str, Any], large: int) -> tuple[FrozenGraph, bool]:
        if any(shapes[port.name] != port.shape for port in self.inputs):
            self._traced = self._trace(shapes)
        traced = self._traced
        sizes = [int(np.prod(one.shape)) * tf.as_dtype(one.dtype).size for one in traced.variables]
        for place, size in enumerate(sizes):
            if size >= 2**31:
                raise ReportedError(
                    "ModelError",
                    f"the weight `{traced.variables[place].name}` has {size} bytes, and what tf2onnx passes it through "
                    "(a protobuf) ends at 2 GiB",
                    "split that weight, and add or concatenate the results",
                )
        is_large = sum(sizes) > large
        inputs = [traced.inputs[place].name for place in range(len(self.inputs))]
        outputs = [one.name for one in traced.outputs]
        graph, tables = tf_loader.from_trackable(self._trackable, traced, inputs, outputs, is_large)
        return FrozenGraph(graph, inputs, outputs, tables), is_large

    def run(self, feeds: list[Any]) -> list[Any]:
        answers = self._name_outputs(self._call([tf.constant(one) for one in feeds]))
        return [one.numpy() for _, one in answers]


def named_leaves(structure: Any, default: str) -> list[tuple[str, Any]]:
    """Tensors of a nest by name: dict keys, else `default` with a number."""
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
    with failures(f"`{folder}` is not a SavedModel", "save or copy the folder again"):
        try:
            from tensorflow.python.tools import saved_model_utils

            known = [sorted(one) for one in saved_model_utils.get_saved_model_tag_sets(folder)]
        except ImportError:  # a private name
            known = [["serve"]]
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
        raise ReportedError(
            "UsageError",
            "the SavedModel has no graph tagged `{}`, only {}".format(",".join(tags) or "serve", listed),
            "`-O tags={}`".format(",".join(known[0])),
        )
    with failures(f"`{folder}` is not a SavedModel", "save or copy the folder again"):
        from tensorflow.python.saved_model import loader_impl

        parsed = loader_impl.parse_saved_model(folder)
    notes += reject_code(checks.code_in_saved_model(parsed), folder, request["trust_source"])
    with failures(
        f"TensorFlow cannot load the SavedModel `{folder}`",
        "a SavedModel is saved_model.pb with its folder `variables` beside it; copy it whole",
    ):
        loaded = tf.saved_model.load(folder, tags=tags)
    source = from_signature(loaded, request["signature"])
    source.notes = notes + source.notes
    return source


def from_signature(loaded: Any, wanted: str | None) -> Any:
    usable = sorted(name for name in loaded.signatures if not name.startswith("_"))
    if wanted is None:
        wanted = (
            "serving_default" if "serving_default" in usable else usable[0] if len(usable) == 1 else None
        )  # fmt: skip
    if wanted == "__call__" or (wanted is None and not usable):
        return from_call(loaded)
    if wanted is None or wanted not in usable:
        listed = ", ".join(f"`{one}`" for one in usable) or "none"
        if wanted is None:
            message = f"the SavedModel has several signatures and none is `serving_default`: {listed}"
        else:
            message = f"the SavedModel has no signature `{wanted}`; it has: {listed}"
        near = difflib.get_close_matches(wanted or "", usable, 1, 0.3) or usable or ["__call__"]
        raise ReportedError("UsageError", message, f"`-O signature={near[0]}`")
    signature = loaded.signatures[wanted]
    specs = dict(signature.structured_input_signature[1])
    names = sorted(specs)
    inputs = [Port(name, specs[name].dtype, specs[name].shape) for name in names]

    def call(tensors: Any) -> Any:
        return signature(**{name: tensors[place] for place, name in enumerate(names)})

    source = FunctionSource(call, inputs, lambda answer: named_leaves(answer, "output"), loaded)
    source.notes.append(f"signature `{wanted}`")
    return source


def from_call(loaded: Any) -> Any:
    """A SavedModel without signatures whose `__call__` was traced once, or once outside training."""
    function = getattr(loaded, "__call__", None)  # noqa: B004
    traced = list(getattr(function, "concrete_functions", ()))
    plain = [one for one in traced if True not in tf.nest.flatten(one.structured_input_signature)]
    if len(plain) != 1:
        raise ReportedError(
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

    source = FunctionSource(call, inputs, lambda answer: named_leaves(answer, "output"), loaded)
    source.notes.append("the SavedModel has no signature: its `__call__` was taken")
    return source


def open_keras(request: dict[str, Any]) -> Any:
    path, trusted = request["path"], request["trust_source"]
    with failures(f"Keras cannot load `{path}`", "save or copy the file again"):
        found = checks.code_in_keras(path)
    if found is not None and not trusted:
        raise ReportedError(
            "ModelError",
            f"`{path}` carries Python code or reads other files ({found}), which is not run",
            "load it in your own code and write a SavedModel: `model.export('folder')`; or, if you trust where it came "
            "from, `--trust-source`: it then runs with your rights",
        )
    notes = [] if found is None else [f"trusted: the source holds {found}"]
    try:
        model = load_keras(path, trusted)
    except Exception as error:
        traceback.print_exc()
        raise keras_load_error(error, path) from error
    if not getattr(model, "inputs", None):
        raise ReportedError(
            "ModelError",
            f"the Keras model in `{path}` has no inputs: it was never built",
            "load it in your own code, call it once, and write a SavedModel: `model.export('folder')`",
        )
    structure = getattr(model, "input", None)  # a loaded Sequential has none
    if structure is None:
        structure = model.inputs if len(model.inputs) > 1 else model.inputs[0]
    inputs = []
    for place, one in enumerate(model.inputs):
        name = one.name.split(":")[0]
        if name.startswith("keras_tensor"):  # a per-session number
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

    source = FunctionSource(call, inputs, name_outputs, model)
    source.notes += notes
    return source


def keras_load_error(error: Exception, path: str) -> ReportedError:
    """Error for a Keras file that cannot be loaded, by the words of Keras' own message."""
    text = str(error)
    hint = "load it in your own code and write a SavedModel: `model.export('folder')`"
    if "Lambda" in text or "lambda" in text or "unsafe" in text:
        message = f"`{path}` carries Python code (a Lambda layer), which is not run"
    elif operation := operation_of_keras(text):
        message = f"Keras does not load `{path}`: its reader of HDF5 files lacks its own operation `{operation}`"
        hint = "load it where it was saved and write a `.keras` file (`model.save('model.keras')`) or a SavedModel"
    elif "Could not locate" in text or "Unknown layer" in text or "custom" in text:
        message = f"`{path}` needs classes that are not in the file: {first_line(error)}"
    elif "No model config" in text or "No model found" in text:
        message = f"`{path}` holds weights without a model"
        hint = "build the model in your own code, load the weights, and write `model.export('folder')`"
    else:
        message = f"Keras cannot load `{path}`: {first_line(error)}"
    return ReportedError("ModelError", message, hint)


def operation_of_keras(text: str) -> str | None:
    """The operation of `keras.ops` that Keras does not know as a layer, by its message; None for any other class."""
    found = re.search(r"Unknown layer: ['\"]?(\w+)", text)
    function = re.sub(r"(?<!^)(?=[A-Z])", "_", found[1]).lower() if found else ""
    ours = hasattr(getattr(tf.keras, "ops", None), function) and not hasattr(tf.keras.layers, found[1] if found else "")
    return found[1] if found and ours else None


def load_keras(path: str, trusted: bool) -> Any:
    """The model, whatever its suffix: Keras goes by suffix, so it is loaded by content."""
    suffix = ".keras" if zipfile.is_zipfile(path) else ".h5"
    if path.endswith(suffix):
        return tf.keras.models.load_model(path, compile=False, safe_mode=not trusted)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "model" + suffix)
        link.symlink_to(Path(path).resolve())
        return tf.keras.models.load_model(str(link), compile=False, safe_mode=not trusted)


VARIABLES = ("Variable", "VariableV2", "VarHandleOp", "AutoReloadVariable")
EFFECTS = ("NoOp", "Assert", "Print", "PrintV2", "Const", "Placeholder", "PlaceholderWithDefault", "CheckNumerics")


class GraphDefSource:
    """A frozen GraphDef: inputs are its Placeholders, outputs the tensors without a reader, unless named."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.notes: list[str] = []
        path = request["path"]
        definition = tf.compat.v1.GraphDef()
        with failures(f"`{path}` is not a TensorFlow graph", "freeze or copy it again"):
            definition.ParseFromString(Path(path).read_bytes())
            self._graph = tf.Graph()
            with self._graph.as_default():
                tf.import_graph_def(definition, name="")
        self._definition = definition
        kept = sorted({node.op for node in definition.node if node.op in VARIABLES})
        if kept:
            raise ReportedError(
                "ModelError",
                "`{}` is not frozen: it has variables ({}) and the file has no values for them".format(
                    path, ", ".join(kept)
                ),
                "give the SavedModel folder, or freeze the graph with the checkpoint first",
            )
        self.notes += reject_code(checks.code_in_graph(definition), path, request["trust_source"])
        operations = self._graph.get_operations()
        defaults = [one for one in operations if one.type == "PlaceholderWithDefault"]
        found = [one.outputs[0] for one in operations if one.type == "Placeholder"]
        takes = [self._tensor(name, "input") for name in request["inputs"]] or found
        gives = [self._tensor(name, "output") for name in request["outputs"]] or self._sinks(operations)
        if not takes:
            raise ReportedError(
                "ModelError", f"`{path}` has no Placeholder, so it has no input", "name it: `-O inputs=node:0`"
            )
        if not gives:
            raise ReportedError("ModelError", f"`{path}` has no outputs", "name it: `-O outputs=node:0`")
        taken = {one.op.name for one in takes}
        self._more: dict[str, Any] = {
            "ignore_default": [one.name for one in defaults if one.name in taken],
            "use_default": [one.name for one in defaults if one.name not in taken],
        }
        for name in self._more["use_default"]:
            self.notes.append(f"`{name}` keeps its default: name it to make it an input")
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
            raise ReportedError(
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

    def frozen(self, shapes: dict[str, Any], large: int) -> tuple[FrozenGraph, bool]:
        inputs = [port.tensor.name for port in self.inputs]
        outputs = [port.tensor.name for port in self.outputs]
        with self._graph.as_default():
            graph = tf_loader.tf_optimize(list(inputs), list(outputs), self._definition)
        override = {
            port.tensor.name: [-1 if size is None else size for size in shapes[port.name]]
            for port in self.inputs
            if shapes[port.name] != port.shape
        }
        return FrozenGraph(
            graph, inputs, outputs, shape_override=override, **self._more
        ), self._definition.ByteSize() > large

    def run(self, feeds: list[Any]) -> list[Any]:
        if self._session is None:
            self._session = tf.compat.v1.Session(graph=self._graph)
        given = {port.tensor: feeds[place] for place, port in enumerate(self.inputs)}
        return list(self._session.run([port.tensor for port in self.outputs], given))


class TfliteModel:
    """A TFLite model run by TensorFlow's interpreter; names come from its signature, if any."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.notes: list[str] = []
        self._path = request["path"]
        self.notes += reject_code(checks.code_in_tflite(self._path), self._path, request["trust_source"])
        with failures(f"TensorFlow Lite cannot read `{self._path}`", "convert or copy the file again"):
            self._interpreter = tf.lite.Interpreter(self._path)
            takes, gives = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        names = self._signature_names(request["signature"])
        self.inputs = self._ports(takes, names[0])
        self.outputs = self._ports(gives, names[1])
        if any(detail["quantization_parameters"]["scales"].size for detail in takes + gives):
            self.notes.append("the model is quantised: its inputs or outputs are integers with a scale")

    def _signature_names(self, wanted: str | None) -> tuple[dict[int, str], dict[int, str]]:
        """Tensor number -> name, for inputs and outputs."""
        signatures = self._interpreter._get_full_signature_list()
        if wanted is not None and wanted not in signatures:
            listed = ", ".join(f"`{one}`" for one in sorted(signatures)) or "none"
            hint = "leave `signature` out for the main graph"
            raise ReportedError("UsageError", f"the TFLite model has no signature `{wanted}`; it has: {listed}", hint)
        if wanted is None:
            wanted = next((one for one in ("serving_default", *sorted(signatures)) if one in signatures), None)
        if wanted is None:
            return {}, {}
        found = signatures[wanted]
        takes = {int(number): name for name, number in found["inputs"].items()}
        gives = {int(number): name for name, number in found["outputs"].items()}
        main = {int(detail["index"]) for detail in self._interpreter.get_input_details()}
        if not set(takes) <= main:
            raise ReportedError(
                "UsageError",
                f"signature `{wanted}` is not the TFLite model's main graph, and only that is converted",
                "write this signature to a separate TFLite file",
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

    def frozen(self, shapes: dict[str, Any], large: int) -> tuple[FrozenGraph, bool]:
        inputs = [port.tensor["name"] for port in self.inputs]
        outputs = [port.tensor["name"] for port in self.outputs]
        size = Path(self._path).stat().st_size
        return FrozenGraph(None, inputs, outputs, tflite_path=self._path), size > large

    def run(self, feeds: list[Any]) -> list[Any]:
        for place, port in enumerate(self.inputs):
            self._interpreter.resize_tensor_input(port.tensor["index"], feeds[place].shape)
        self._interpreter.allocate_tensors()
        for place, port in enumerate(self.inputs):
            self._interpreter.set_tensor(port.tensor["index"], feeds[place])
        self._interpreter.invoke()
        return [np.array(self._interpreter.get_tensor(port.tensor["index"])) for port in self.outputs]


def unreadable_in_tflite(path: str) -> tuple[str, str] | None:
    """What the TFLite file holds that tf2onnx has no form for, and the remedy; None if nothing known."""
    from tf2onnx.tflite.BuiltinOperator import BuiltinOperator
    from tf2onnx.tflite.Model import Model

    model = Model.GetRootAsModel(bytearray(Path(path).read_bytes()), 0)
    graphs = [model.Subgraphs(number) for number in range(model.SubgraphsLength())]
    names = {number: name for name, number in vars(BuiltinOperator).items() if isinstance(number, int)}
    codes = [model.OperatorCodes(number) for number in range(model.OperatorCodesLength())]
    used = {names.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), "") for code in codes}  # one of them is 0
    variables = sorted(used & {"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"})
    if variables:
        listed = ", ".join(f"`{name}`" for name in variables)
        return (
            f"variables of a TFLite model ({listed}): the model keeps state between calls",
            "export it with its state as inputs and outputs, or from its training code",
        )
    tensors = [graph.Tensors(number) for graph in graphs for number in range(graph.TensorsLength())]
    sparse = [tensor.Name().decode(errors="replace") for tensor in tensors if tensor.Sparsity() is not None]
    if sparse:
        return (
            f"sparse weights of a TFLite model ({len(sparse)}, `{sparse[0]}` first)",
            "use the model's dense file, or export it again without sparsity",
        )
    return None


OPENERS = {"saved-model": open_saved_model, "keras": open_keras, "frozen-graph": GraphDefSource, "tflite": TfliteModel}


def open_source(request: dict[str, Any]) -> Any:
    source = OPENERS[request["kind"]](request)
    kept = [port for port in source.inputs if port.dtype not in ("resource", "variant")]
    text = [port.name for port in kept + source.outputs if port.dtype == "string"]
    if text:
        raise ReportedError(
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

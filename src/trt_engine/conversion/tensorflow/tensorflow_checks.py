"""Executable content of a TensorFlow source: Python in Keras files, operators that access files or processes.

Standalone file for Python 3.9 and later, imported by `tensorflow_readers.py`. Does not import TensorFlow: graphs
are parsed protobufs.
"""

from __future__ import annotations

import json
import mmap
import re
import zipfile
from pathlib import Path
from typing import Any

CLASSES = {
    "Lambda": "a Lambda layer",
    "__lambda__": "a Lambda layer",
    "TorchModuleWrapper": "a pickled PyTorch module",
    "JaxLayer": "a JAX function",
    "FlaxLayer": "a Flax module",
    "TFSMLayer": "another SavedModel, by its path",
}
PARTS = (
    "activations|applications|callbacks|constraints|distribution|dtype_policies|engine|initializers|layers|losses|metrics|"
    "mixed_precision|models|ops|optimizers|random|regularizers"
)
MODULES = re.compile(rf"(tensorflow\.(python\.)?)?(tf_)?keras(\.(api\.)?(_?v\d\.)?(src\.)?({PARTS})(\.\w+)*)?")
LARGEST = 256 << 20  # maximum bytes of a configuration
REACHING = re.compile(
    r"(Eager)?PyFunc(Stateless)?|ReadFile|WriteFile|MatchingFiles|FileSystem\w*|\w*Reader(V2)?|Reader(Read|Restore)\w*|"
    r"\w*(TFRecord|TextLine|FixedLengthRecord|LMDB|Sql|Snapshot|Save|Load|Cache|DataService)Dataset\w*|RegisterDataset\w*|"
    r"\w*Summary(Writer|FileWriter|DbWriter)|ImportEvent|InitializeTableFromTextFile(V2)?|GenerateVocabRemapping|"
    r"LoadAndRemapMatrix|\w*Rpc\w*|Debug(Identity|NanCount|NumericSummary)\w*|DistributedSave|AssetsRestore|"
    r"_?XlaRun|_?XlaCompile|Shutdown\w*|_Send|_Recv|_HostSend|_HostRecv"
)
CHECKPOINT = re.compile(r"Save(V2|Slices)?|Restore(V2|Slice)?|MergeV2Checkpoints")
SAVERS = re.compile(r"__inference__traced_(save|restore)_\d+")


def code_in_keras(path: str) -> str | None:
    """Python code or file access in a Keras file; None if it contains only layers and weights."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = code_in_config(read_json(archive.open("config.json").read(LARGEST)))
            for name in archive.namelist():
                if found is None and name.endswith((".npz", ".npy", ".pkl", ".pickle")):
                    found = f"`{name}`, which may be a pickle"
                if found is None and name.endswith(".h5"):
                    with archive.open(name) as inside:
                        found = files_in_h5(inside)[0]
        return found
    found, config = files_in_h5(path)
    return found or (None if config is None else code_in_config(read_json(config)))


def read_json(raw: Any) -> Any:
    """Parsed JSON of a configuration; None if invalid, which Keras itself rejects."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def code_in_config(root: Any) -> str | None:
    """First class, module or function in a configuration that is not a Keras layer."""
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            name, module, config = value.get("class_name"), value.get("module"), value.get("config")
            if isinstance(name, str) and name in CLASSES:
                return CLASSES[name]
            if isinstance(module, str) and "class_name" in value:
                plain = name == "function" and isinstance(config, str) and config.isidentifier()
                if not MODULES.fullmatch(module) and not (module == "builtins" and plain):
                    return f"the class `{module}.{name}`"
            if isinstance(value.get("vocabulary"), str):
                return "a vocabulary in another file"
            left += value.values()
    return None


def files_in_h5(file: Any) -> tuple[str | None, Any]:
    """Whether an HDF5 file reads other files (links, external and virtual data), and its `model_config`."""
    import h5py  # type: ignore[import-not-found,unused-ignore]

    found: list[str] = []
    with h5py.File(file, "r") as opened:
        left = [opened]
        while left and not found:
            group = left.pop()
            for name in group:
                link = group.get(name, getlink=True)
                if isinstance(link, h5py.ExternalLink):
                    found.append("data in another file")
                    break
                if isinstance(link, h5py.SoftLink):
                    continue
                item = group[name]
                if isinstance(item, h5py.Group):
                    left.append(item)
                elif isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
                    found.append("data in another file")
                    break
        return (found[0] if found else None), opened.attrs.get("model_config")


def code_in_nodes(nodes: Any) -> str | None:
    """First operator with effects beyond its tensors."""
    for node in nodes:
        if REACHING.fullmatch(node.op) or CHECKPOINT.fullmatch(node.op):
            return f"the operator `{node.op}` (`{node.name}`)"
        if node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file"):
            return f"the operator `PrintV2` (`{node.name}`), which writes a file"
    return None


def code_in_graph(graph: Any) -> str | None:
    """The same for a GraphDef and its functions."""
    return code_in_nodes(graph.node) or next(
        (found for one in graph.library.function for found in [code_in_nodes(one.node_def)] if found), None
    )


def code_in_saved_model(saved: Any) -> str | None:
    """The same for a SavedModel; its checkpoint operators are ignored unless called elsewhere."""
    for meta in saved.meta_graphs:
        functions = {one.signature.name: one for one in meta.graph_def.library.function}
        savers = {name for name in functions if SAVERS.fullmatch(name)}
        called = {
            name
            for one in functions.values()
            if one.signature.name not in savers
            for name in called_functions(one.node_def)
        }
        for name, one in functions.items():
            if (name not in savers or name in called) and (found := code_in_nodes(one.node_def)):
                return found
        reached = reached_nodes(meta)
        if any(name in called_by for called_by in [set(called_functions(reached))] for name in savers):
            return "a signature that saves or restores a checkpoint"
        if found := code_in_nodes(reached):
            return found
        others = [node for node in meta.graph_def.node if not CHECKPOINT.fullmatch(node.op)]
        if found := code_in_nodes(others):
            return found
    return None


def called_functions(nodes: Any) -> list[str]:
    """Functions called by the nodes."""
    names = []
    for node in nodes:
        names.append(node.op)
        for value in node.attr.values():
            if value.HasField("func"):
                names.append(value.func.name)
            names += [one.name for one in value.list.func]
    return names


def reached_nodes(meta: Any) -> list[Any]:
    """Nodes of the main graph that a signature or initialiser runs."""
    nodes = {node.name: node for node in meta.graph_def.node}
    wanted = [info.name for signature in meta.signature_def.values() for info in signature.outputs.values()]
    if len(meta.object_graph_def.nodes):  # TensorFlow 2 calls the functions and never runs the main graph
        wanted = []
    for name in ("saved_model_init_op", "saved_model_main_op", "legacy_init_op", "table_initializer"):
        if name in meta.collection_def and not len(meta.object_graph_def.nodes):
            wanted += meta.collection_def[name].node_list.value
    seen: dict[str, Any] = {}
    while wanted:
        name = wanted.pop().lstrip("^").split(":")[0]
        if name in nodes and name not in seen:
            seen[name] = nodes[name]
            wanted += nodes[name].input
    return list(seen.values())


FLEX = re.compile(rb"Flex(\w{3,60})")


def code_in_tflite(path: str) -> str | None:
    """First TensorFlow operator of a TFLite file that accesses files or Python."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        for found in FLEX.finditer(raw):
            name = found[1].decode()
            if REACHING.fullmatch(name) or CHECKPOINT.fullmatch(name):
                return f"the operator `{name}`"
    return None

"""Configurations in Triton's repositories: each field has one treatment, and a real Triton loads and refuses the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import helper

import trt_engine as te
from onnx_models import node, save
from serving.conftest import ONNX_TYPES, start
from serving.real_triton import real_triton
from serving.triton import fetch
from trt_engine.errors import UsageError
from trt_engine.open_inference.messages import message
from trt_engine.verbs.serve import model_config
from trt_engine.verbs.serve.model_config import enum_name, read_config, server_settings

BASE = server_settings(te.ServeConfig(), te.RuntimeConfig())
HONOURED = frozenset(
    "name platform backend version_policy latest num_versions all specific versions max_batch_size input output data_type "
    "format dims reshape shape label_filename optimization cuda graphs dynamic_batching preferred_batch_size "
    "max_queue_delay_microseconds priority_levels default_priority_level preserve_ordering default_queue_policy "
    "default_timeout_microseconds allow_timeout_override max_queue_size timeout_action priority_queue_policy instance_group "
    "kind count gpus passive profile default_model_filename parameters string_value model_warmup batch_size inputs "
    "zero_data random_data input_data_file model_transaction_policy model_repository_agents".split()
)
"""Keys that have their effect, or hold others."""


def of(more: str = "", x: str = "dims: 4", y: str = "dims: 4", batch: str = "max_batch_size: 8") -> str:
    tensors = f"input {{ name: 'x' data_type: TYPE_FP32 {x} }} output {{ name: 'y' data_type: TYPE_FP32 {y} }}"
    return f"{batch} {tensors} {more}"


def batching(text: str, **more: str) -> str:
    return of(f"dynamic_batching {{ {text} }}", **more)


def groups(*texts: str) -> str:
    return of(" ".join(f"instance_group {{ {text} }}" for text in texts))


def warm(text: str, head: str = "name: 'w' batch_size: 2") -> str:
    return of(f"model_warmup {{ {head} {text} }}")


WARM = "inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 zero_data: true } }"
LEVELS = "priority_levels: 3 default_priority_level: 2"
SAME = [
    of(), of("name: 'other'"), of("runtime: 'x'"), of(batch="max_batch_size: -1"), of(batch="max_batch_size: 4"),
    of("platform: 'nope'"), of("max_batch_sise: 4"), of("input ["),
    of(x=""), of(x="dims: 0"), of(x="dims: -2"), of(x="dims: -1"), of(y="dims: 0"), of(y="dims: -1"),
    of(x="dims: [2, 2] reshape { shape: 4 }"), of(x="dims: [2, 2] reshape { shape: 5 }"),
    of(x="dims: 4 format: FORMAT_NCHW"), of(x="dims: [4, 1, 1] reshape { shape: 4 } format: FORMAT_NHWC"),
    of(x="dims: 4 allow_ragged_batch: true"), of(x="dims: 4 is_shape_tensor: true"),
    of(y="dims: 4 is_non_linear_format_io: true"), of(y="dims: 4 label_filename: 'labels.txt'"),
    of(y="dims: 4 label_filename: 'missing.txt'"), of("version_policy { latest { num_versions: 0 } }"),
    of("version_policy { latest { num_versions: 2 } }"), of("version_policy { all {} }"),
    of("version_policy { specific { versions: 2 } }"), of("version_policy { specific { versions: [1, 1] } }"),
    groups(""), groups("count: 2"), groups("count: -1"), groups("kind: KIND_CPU gpus: 0"), groups("kind: KIND_MODEL"),
    groups("kind: KIND_CPU count: 2", "kind: KIND_CPU"), groups("name: 'a'", "name: 'a'"), groups("profile: '0'"),
    groups("passive: true", ""), groups("kind: KIND_GPU"), groups("kind: KIND_CPU host_policy: 'x'", "kind: KIND_AUTO"),
    batching(""), batching("preferred_batch_size: [4, 8]"), batching("preferred_batch_size: 9"),
    batching("preferred_batch_size: 0"), batching("priority_levels: 2"), batching(LEVELS),
    batching(f"{LEVELS} preserve_ordering: true"), batching("preserve_ordering: true"),
    batching(f"{LEVELS} priority_queue_policy {{ key: 1 value {{ default_timeout_microseconds: 9 }} }}"),
    batching(f"{LEVELS} priority_queue_policy {{ key: 4 value {{ }} }}"),
    batching("default_queue_policy { timeout_action: DELAY }"), batching("default_queue_policy { max_queue_size: 3 }"),
    warm(WARM), warm(""), warm(WARM.replace("FP32", "INT32")), warm(WARM.replace("4", "5")), warm(WARM, "name: 'w'"),
    warm(WARM.replace("'x'", "'z'")), warm(WARM.replace("zero_data: true", "")), warm(WARM, "name: 'w' batch_size: 9"),
    warm(WARM.replace("zero_data: true", "input_data_file: 'raw'")),
    warm(WARM.replace("zero_data: true", "input_data_file: 'missing'")),
    of("optimization { graph { level: 1 } priority: PRIORITY_MAX cuda { graphs: true } eager_batching: true }"),
    of("optimization { execution_accelerators { gpu_execution_accelerator { name: 'tensorrt' } } }"),
    of("optimization { graph { levels: 1 } }"), of("response_cache { enable: true }"), of("batch_input {}"),
    of("model_transaction_policy {}"), of("metric_tags { key: 'a' value: 'b' }"),
    of("parameters { key: 'execution_mode' value { string_value: '1' } }"),
    of("sequence_batching {} dynamic_batching {}"),
    of("sequence_batching { control_input { name: 'S' control { kind: CONTROL_SEQUENCE_READY } } }"),
]  # fmt: skip
DIFFERENT = {
    of("model_transaction_policy { decoupled: true }"): "one response for each request",
    of("batch_output { target_name: 'y' kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: 'x' }"): "rows alone",
    of("parameters { key: 'provider' value { string_value: 'b' } }"): "a misspelt parameter of ours",
    of("sequence_batching { max_sequence_idle_microseconds: 5000000 control_input { name: 'START' control { "
       "kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } } }"): "Triton's example of sequences",
    groups("passive: true"): "nothing would answer",
    batching("default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 9 }"): "a late request fails",
    batching(f"{LEVELS} priority_queue_policy {{ key: 1 value {{ max_queue_size: 4 }} }}"): "one limit for all levels",
}  # fmt: skip
"""What Triton loads and `serve` refuses, with the reason."""
PUBLIC = {
    "a INT32 16; b INT32 16": ("sum INT32 16; difference INT32 16", "max_batch_size: 8"),
    "data FP32 3,224,224 format: FORMAT_NCHW reshape { shape: [1, 3, 224, 224] }": (
        "fc FP32 1000 reshape { shape: [1, 1000, 1, 1] } label_filename: 'labels.txt'", "",
    ),
    "input FP32 299,299,3 format: FORMAT_NHWC": (
        "scores FP32 1001 label_filename: 'labels.txt'", "max_batch_size: 128 dynamic_batching {}",
    ),
    "images FP32 -1,-1,-1,3": ("scores FP32 -1,-1,-1,1; boxes FP32 -1,-1,-1,5", "max_batch_size: 0"),
    "image FP32 1,32,100": (
        "text FP32 26,37", "max_batch_size: 8 dynamic_batching {} instance_group { kind: KIND_GPU count: 1 gpus: 0 }",
    ),
    "pixels FP32 3,384,384; ids INT64 -1; mask INT64 -1": (
        "logits FP32 -1,30524", "max_batch_size: 8 instance_group { kind: KIND_CPU count: 2 } dynamic_batching { "
        "preferred_batch_size: [1, 2, 4, 8] max_queue_delay_microseconds: 99 } version_policy { specific { versions: 1 } }",
    ),
    "ids INT32 128; mask INT32 128": (
        "probs FP32 1", "max_batch_size: 8 dynamic_batching { preferred_batch_size: 4 } instance_group { count: 2 } "
        "optimization { execution_accelerators { gpu_execution_accelerator { name: 'tensorrt' } } } "
        "model_warmup { name: 'w' batch_size: 1 "
        "inputs { key: 'ids' value { data_type: TYPE_INT32 dims: 128 zero_data: true } } "
        "inputs { key: 'mask' value { data_type: TYPE_INT32 dims: 128 random_data: true } } }",
    ),
    "images FP16 3,384,640": (
        "boxes FP16 84,5040", "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 16000 } "
        "parameters { key: 'FORCE_CPU_ONLY_INPUT_TENSORS' value { string_value: 'no' } } optimization { "
        "input_pinned_memory { enable: true } output_pinned_memory { enable: true } cuda { graphs: true } }",
    ),
    "ids INT64 -1": ("logits FP32 -1,-1", "max_batch_size: 8 optimization { enable_pinned_input: true }"),
    "input FP32 -1,3,480,640": (
        "heat FP32 -1,1,-1,-1 label_filename: 'labels.txt'", "optimization { execution_accelerators { "
        "gpu_execution_accelerator { name: 'tensorrt' parameters { key: 'precision_mode' value: 'FP16' } } } }",
    ),
}  # fmt: skip
"""Features of configurations in Triton's quick start and tutorials (text in pictures), and of applications (questions about
pictures, BERT, YOLO, a language model, faces): inputs, as `name TYPE dims more`, outputs, and the rest."""
ANSWER = """
import json
import numpy
import triton_python_backend_utils as triton
class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
    def execute(self, requests):
        return [triton.InferenceResponse([self.answer(item) for item in self.config["output"]]) for _ in requests]
    def answer(self, item):
        sizes = [max(int(size), 1) for size in (item.get("reshape") or {}).get("shape") or item["dims"]]
        return triton.Tensor(item["name"], numpy.zeros([1] * (self.config["max_batch_size"] > 0) + sizes, "float32"))
"""


def public(inputs: str, outputs: str, more: str) -> str:
    items = [("input", item.split(maxsplit=3)) for item in inputs.split(";")]
    items += [("output", item.split(maxsplit=3)) for item in outputs.split(";")]
    tensors = (
        f"{side} {{ name: '{name}' data_type: TYPE_{kind} dims: [{dims}] {' '.join(rest)} }}"
        for side, (name, kind, dims, *rest) in items
    )
    return " ".join([*tensors, more])


def save_model(path: Path, text: str) -> None:
    """A model with the inputs and outputs of a configuration: zeros."""
    config = text_format.Parse(text, message("ModelConfig")(), allow_unknown_field=True)
    batch, sides = ["batch"] * (config.max_batch_size > 0), []
    for items in (config.input, config.output):
        shapes = {item.name: item.reshape.shape if item.HasField("reshape") else item.dims for item in items}
        sides.append({
            item.name: (
                ONNX_TYPES[enum_name(item, "data_type")[5:]],
                [*batch, *(size if size > 0 else f"{item.name}{axis}" for axis, size in enumerate(shapes[item.name]))],
            )
            for item in items
        })  # fmt: skip
    nodes = [node("Shape", next(iter(sides[0])), "rows", start=0, end=len(batch))]
    weights = {f"sizes-{name}": np.array([max(size, 1) for size in item]) for name, item in shapes.items()}
    for name, (kind, _) in sides[1].items():
        zero = helper.make_tensor("zero", kind, [1], [0])
        nodes.append(node("Concat", f"rows sizes-{name}", f"shape-{name}", axis=0))
        nodes.append(node("ConstantOfShape", f"shape-{name}", name, value=zero))
    save(path, nodes, *sides, weights)


def test_each_field_of_a_configuration_is_honoured_refused_or_without_effect() -> None:
    def names(kind: Any) -> Iterator[str]:
        for item in kind.fields:
            yield item.name
            final = item.name in model_config.REFUSED or item.name in model_config.NO_EFFECT
            if item.message_type is not None and not item.message_type.GetOptions().map_entry and not final:
                yield from names(item.message_type)

    kinds = [HONOURED, frozenset(model_config.REFUSED), model_config.NO_EFFECT]
    found = {*names(message("ModelConfig").DESCRIPTOR)}
    assert {name: sum(name in kind for kind in kinds) for name in found} == dict.fromkeys(found, 1)


def test_a_configuration_is_refused_with_every_reason_at_once() -> None:
    text = of(
        "version_policy { specific {} } default_model_filename: '../x' model_transaction_policy { decoupled: true }"
        "instance_group { kind: KIND_CPU gpus: 0 } dynamic_batching { preferred_batch_size: 9 }"
        "optimization { enable_pinned_input: true levels { a: [1] } }", x="dims: 0 optional: true"
    )  # fmt: skip
    with pytest.raises(UsageError, match="64 changes") as caught:
        read_config(b"key: 1\n" * 20_000, "m", BASE)
    with pytest.raises(UsageError) as caught:
        read_config(text.encode(), "m", BASE)
    for reason in (
        "versions []",
        "expected a file name",
        "decoupled",
        "optional",
        "KIND_CPU",
        "[9]",
        "`enable_p",
        "`levels`",
        "`dims` of `x`",
    ):
        assert reason in caught.value.message


def test_instance_groups_are_contexts_and_replicas() -> None:
    def found(*texts: str) -> tuple[int, str | None]:
        runtime = read_config(groups(*texts).encode(), "m", BASE).runtime
        return runtime.contexts, runtime.device

    assert found("kind: KIND_CPU count: 2", "kind: KIND_CPU") == found("kind: KIND_CPU count: 2", "") == (3, "cpu")
    assert found("count: 2 gpus: [0, 1]", "gpus: 1", "gpus: 0") == (3, "cuda:0,cuda:1")
    assert found("kind: KIND_GPU count: 2") == (2, "cuda:0") == found("", "gpus: 0") and found("", "") == (2, None)
    for each in ("gpus: 0,kind: KIND_CPU", "gpus: 0,gpus: 1 count: 2", "gpus: -1", "kind: 9", "count: 9999"):
        with pytest.raises(UsageError, match=r"instance|gpus|9999"):
            found(*each.split(","))


@pytest.mark.slow
def test_triton_loads_and_refuses_the_same_configurations(engines: dict[str, Path], tmp_path: Path) -> None:
    public_texts = [public(inputs, *rest) for inputs, rest in PUBLIC.items()]
    texts = {f"m{number}": text for number, text in enumerate([*public_texts, *SAME, *DIFFERENT])}
    for name, text in texts.items():
        (mine := tmp_path / "ours" / name / "1").mkdir(parents=True)
        (mine.parent / "config.pbtxt").write_text(text)
        if text in public_texts:
            save_model(mine / "model.onnx", text)
        else:
            te.Engine.open(engines["double"]).copy_to(mine / "model.onnx")
        (theirs := tmp_path / "theirs" / name).joinpath("1").mkdir(parents=True)
        (theirs / "1/model.py").write_text(ANSWER)
        (theirs / "config.pbtxt").write_text(text if "platform" in text else f"backend: 'python' {text}")
        for folder in (theirs, tmp_path / "ours" / name):
            (folder / "warmup").mkdir()
            (folder / "warmup/raw").write_bytes(bytes(16))
            (folder / "labels.txt").write_text("a\nb\n")
    with (
        real_triton(tmp_path / "theirs", tmp_path / "log", "--model-control-mode=explicit") as triton,
        start(
            model_repository=tmp_path / "ours", model_control_mode="explicit", control_without_token=True,
            build_models=True, parity=False,
        ) as ours,
    ):  # fmt: skip

        def load(server: Any, name: str) -> bool:
            status, _ = (fetch(server, f"/v2/repository/models/{name}/{what}", b"{}")[0] for what in ("load", "unload"))
            return bool(status == 200)

        mine, answers = {text: load(ours, name) for name, text in texts.items()}, dict[str, bool]()
        with contextlib.suppress(OSError):  # Triton 2.51 may crash or wait without end; what it answered is compared
            answers.update((text, load(triton, name)) for name, text in texts.items())
    different = {text for text, answer in answers.items() if answer != mine[text]}
    assert different == {text for text in DIFFERENT if text in answers} and not any(mine[text] for text in different)
    if len(answers) < len(texts):
        pytest.skip(f"Triton itself ended or hung after {len(answers)} of {len(texts)} configurations")

"""PyTorch sources to ONNX: ten kinds of networks equal to their graphs, and planted defects found and named."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import trt_engine as te
from programs import load_program, needs
from trt_engine.cli.main import run
from trt_engine.errors import AccuracyError, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.records.convert import ConvertReport

pytestmark = needs("torch", "onnxscript")

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("planted.py")
TABLE = ROOT / "benchmarks" / "export_table.py"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """The program of the export table."""
    return load_program(TABLE, "export_table")


def convert(factory: str, folder: Path, **more: Any) -> ConvertReport:
    """A planted network converted; inputs 2x8 unless given."""
    more.setdefault("inputs", {"x": (2, 8)})
    return te.convert(f"{PLANTED}:{factory}", out=folder / "out.onnx", **more)


def written(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


# ------------------------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize(
    "name",
    ["mlp", "cnn", "resnet", "vit", "unet", "detector", "encoder", "recurrent", "two_inputs", "branching"],
)
def test_every_kind_of_network_is_its_graph_at_three_shapes_or_more(
    name: str, table: ModuleType, tmp_path: Path
) -> None:
    report = table.convert(name, tmp_path)
    assert report.exporter == "dynamo" and report.opset == 20 and report.ir_version == 10
    assert len(report.verification) >= 3
    assert len({str(item.shapes) for item in report.verification}) == len(report.verification)
    assert report.max_rel is not None and report.max_rel <= 1e-4
    for symbol in report.dynamic:
        assert len({item.sizes[symbol.symbol] for item in report.verification}) >= 2
    batches = {spec.name: spec.symbols for spec in report.signature.outputs}
    if name not in ("recurrent", "two_inputs"):
        assert all(symbols[0] == "batch" for symbols in batches.values()), batches
    if name == "recurrent":
        assert batches == {
            "logits": ("batch", "time", None), "next_hidden": (None, "batch", None), "next_cell": (None, "batch", None),
        }  # fmt: skip
    if name == "two_inputs":
        assert batches == {"joined": ("batch", None), "similarity": ("batch", "batch")}
    raw = (tmp_path / f"{name}.onnx").read_bytes()
    assert b"stack_trace" not in raw and str(ROOT).encode() not in raw, (
        "no path of the exporting machine stays in the file"
    )


def test_the_graph_answers_as_the_source_does_outside_our_own_comparison(table: ModuleType, tmp_path: Path) -> None:
    """By hand, at a batch nobody compared at."""
    import torch

    table.convert("resnet", tmp_path)
    networks = load_program(table.NETWORKS, "export_networks")
    images = np.random.default_rng(7).random((7, 3, 64, 64), dtype=np.float32)
    with torch.no_grad():
        wanted = networks.resnet().eval()(torch.from_numpy(images)).numpy()
    (got,) = ort.InferenceSession(tmp_path / "resnet.onnx", providers=["CPUExecutionProvider"]).run(
        None, {"images": images}
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_weights_keep_the_names_they_have_in_the_module(tmp_path: Path) -> None:
    convert("linear", tmp_path, simplify=False)
    proto = onnx.load(tmp_path / "out.onnx")
    assert {item.name for item in proto.graph.initializer} == {"layer.weight", "layer.bias"}


def test_a_name_that_forward_does_not_have_is_the_inputs_name_in_onnx(tmp_path: Path) -> None:
    report = convert("linear", tmp_path, inputs={"features": (2, 8)})
    assert [spec.name for spec in report.signature.inputs] == ["features"]
    assert any("by position" in note for note in report.notes)


def test_weights_go_to_a_side_file_when_asked(tmp_path: Path) -> None:
    report = convert("linear", tmp_path, external_data=True, options={"width": 400})
    assert report.artifacts["weights"] == str(tmp_path / "out.onnx.data")
    assert written(tmp_path) == ["out.onnx", "out.onnx.data"]
    assert (tmp_path / "out.onnx.data").stat().st_size >= 400 * 8 * 4


# ------------------------------------------------------------------------------------------------ planted defects


def test_a_batch_frozen_by_a_python_int_is_refused_with_the_line_it_entered_at(tmp_path: Path) -> None:
    with pytest.raises(AccuracyError, match=r"`batch` is frozen at 2") as refused:
        convert("IntBatch", tmp_path, inputs={"x": (2, 4, 3)})
    line = next(at for at, text in enumerate(PLANTED.read_text().splitlines(), 1) if "batch = int(" in text)
    assert refused.value.exit_code == 7
    assert (
        f"planted.py:{line} in `forward`" in refused.value.message or f"planted.py:{line + 1}" in refused.value.message
    )
    assert written(tmp_path) == [], "nothing is half-written"
    assert convert("IntBatchClean", tmp_path, inputs={"x": (2, 4, 3)}).max_rel == 0


def test_anchors_of_one_size_are_refused_with_the_axis_and_the_line(tmp_path: Path) -> None:
    given = {"inputs": {"images": (2, 3, 32, 32)}, "dynamic": {"images": {0: "batch", 2: "height"}}}
    with pytest.raises(ModelError, match=r"does not follow `height`.*32.*planted\.py:\d+ in `forward`"):
        convert("Anchors", tmp_path, **given)
    assert convert("AnchorsClean", tmp_path, **given).max_rel <= 1e-6
    fixed = {"inputs": {"images": (2, 3, 32, 32)}}
    assert convert("Anchors", tmp_path, overwrite=True, **fixed).max_rel <= 1e-6, "at its own size it is right"


def test_a_size_frozen_in_the_numbers_is_found_where_no_shape_shows_it(tmp_path: Path) -> None:
    given = {"inputs": {"images": (2, 3, 32, 32)}, "dynamic": {"images": {0: "batch", 2: "height"}}}
    with pytest.raises(AccuracyError, match=r"`height` is frozen at 32"):
        convert("Scaled", tmp_path, exporter="torchscript", **given)
    assert convert("ScaledClean", tmp_path, **given).max_rel <= 1e-6


@pytest.mark.parametrize(
    ("network", "what"),
    [
        ("Dropping", "a Dropout in training mode|a random operator"),
        ("Noise", "a random operator"),
        ("Training", "a BatchNormalization in training mode"),
    ],
)
def test_what_belongs_to_training_is_refused_with_the_line(network: str, what: str, tmp_path: Path) -> None:
    inputs = {"x": (4, 4, 3, 3)}
    with pytest.raises(ModelError, match=rf"the (graph|source) has ({what}).*planted\.py:\d+"):
        convert(network, tmp_path, inputs=inputs)
    assert written(tmp_path) == []
    assert convert(f"{network}Clean", tmp_path, inputs=inputs).max_rel <= 1e-6


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3)], ids=["images", "one number a channel"])
def test_statistics_of_the_batch_are_recognised_when_no_operator_shows_them(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"BatchNormalization in training mode.* at .*planted\.py:\d+ in `forward`"):
        convert("Decomposed", tmp_path, inputs={"x": shape})
    assert written(tmp_path) == []


def test_a_network_whose_rows_depend_on_each_other_is_converted_with_a_warning(tmp_path: Path) -> None:
    report = convert("Centred", tmp_path)
    assert report.max_rel <= 1e-5
    assert any("row 0 of `output` changes with the other rows of its batch" in text for text in report.warnings)


def test_a_batch_the_source_fails_at_is_not_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Two(torch.nn.Module):\n    def forward(self, x):\n"
        "        if x.shape[0] < 2:\n            raise ValueError('two rows at least')\n        return x * 2\n"
    )
    out = tmp_path / "out.onnx"
    assert run(["convert", f"{tmp_path / 'net.py'}:Two", "--input", "x:2x8", "-o", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(item["low"], item["high"], item["tested_sizes"]) for item in report["dynamic"]] == [(2, None, [2, 4, 6])]
    (said,) = [text for text in report["warnings"] if "two rows at least" in text]
    assert "does not run at batch 1" in said and said.endswith("the smallest size that was compared is 2")


def test_a_batch_that_leaves_its_axis_and_an_input_nobody_reads_are_said(tmp_path: Path) -> None:
    lost = convert("LostBatch", tmp_path)
    assert "batch-lost" in {item.code for item in lost.findings} and any("`output`" in text for text in lost.warnings)
    clean = convert("LostBatchClean", tmp_path, overwrite=True)
    assert "batch-lost" not in {item.code for item in clean.findings} and clean.warnings == ()
    two = {"x": (2, 8), "scale": (2, 8)}
    unused = convert("Unused", tmp_path, inputs=two, overwrite=True)
    assert "unused-input" in {item.code for item in unused.findings}
    assert "unused-input" not in {
        item.code for item in convert("UnusedClean", tmp_path, inputs=two, overwrite=True).findings
    }


def test_a_graph_that_is_not_its_source_at_the_tolerance_is_refused(tmp_path: Path) -> None:
    """The tolerance is a gate: one that no rounding can pass fails a healthy network."""
    with pytest.raises(AccuracyError, match=r"differs"):
        te.convert(f"{TABLE.with_name('export_networks.py')}:vit", out=tmp_path / "o.onnx",
                   inputs={"images": (2, 3, 64, 64)}, tolerance=1e-12)  # fmt: skip
    assert written(tmp_path) == []


# ------------------------------------------------------------------------------------------------ exporters


def test_a_source_that_dynamo_cannot_read_goes_to_torchscript_and_why_is_said(tmp_path: Path) -> None:
    """A Python `if` on a value, where that is allowed: the trace follows the branch the example takes."""
    report = convert("Branch", tmp_path, inputs={"x": np.full((2, 8), 3, np.float32)}, allow_frozen_branches=True)
    assert report.exporter == "torchscript"
    assert report.attempts[0].exporter == "dynamo" and "planted.py" in str(report.attempts[0].reason)
    assert any("the dynamo exporter failed" in text for text in report.warnings)


def test_a_trace_that_followed_one_way_is_refused_where_the_source_goes_the_other(tmp_path: Path) -> None:
    rows = np.concatenate(
        [np.full((1, 8), -9, np.float32), np.full((1, 8), 3, np.float32), np.full((2, 8), 9, np.float32)]
    )
    with pytest.raises(AccuracyError, match=r"torchscript: .*differs by "):
        convert("Branch", tmp_path, inputs={"x": rows}, allow_frozen_branches=True)
    assert written(tmp_path) == []


def test_one_exporter_alone_says_why_it_failed(tmp_path: Path) -> None:
    with pytest.raises(AccuracyError, match=r"^`if x\.sum\(\) > 0:` at .*planted\.py:\d+") as refused:
        convert("Branch", tmp_path, exporter="dynamo")
    assert "torch.cond" in str(refused.value.hint)
    assert written(tmp_path) == []


def test_an_if_on_values_is_refused_with_its_line_though_no_input_shows_it(tmp_path: Path) -> None:
    """The comparison agrees: only the trace knows that a branch was dropped."""
    line = next(at for at, text in enumerate(PLANTED.read_text().splitlines(), 1) if "y.abs().max() > 50:" in text)
    said = rf"^`if y\.abs\(\)\.max\(\) > 50:` at .*planted\.py:{line} in `forward` depends on the values of a tensor"
    with pytest.raises(AccuracyError, match=said) as refused:
        convert("RareBranch", tmp_path)
    assert "torch.where" in str(refused.value.hint) and "--allow-frozen-branches" in str(refused.value.hint)
    assert written(tmp_path) == []
    allowed = convert("RareBranch", tmp_path, allow_frozen_branches=True)
    assert any(f"planted.py:{line}" in text and "keeps one branch" in text for text in allowed.warnings)
    clean = convert("RareBranchClean", tmp_path, overwrite=True)
    assert clean.exporter == "dynamo" and clean.warnings == ()


def test_every_way_to_read_values_is_found_and_sizes_buffers_and_guards_are_not() -> None:
    import torch

    from trt_engine.conversion.torch.value_reads import value_reads

    planted = _planted()
    reads = value_reads(planted.WholeReads(), (torch.randn(2, 8),))
    lines = {at for at, text in enumerate(PLANTED.read_text().splitlines(), 1) if text.endswith("# frozen")}
    assert {int(re.search(r"planted\.py:(\d+)", read.place)[1]) for read in reads} == lines
    assert {read.branch for read in reads if read.statement.startswith(("if", "while"))} == {True}
    assert value_reads(planted.SizeReads(), (torch.randn(2, 8),)) == []
    assert "__bool__" not in vars(torch.Tensor) and torch.equal.__module__ != "trt_engine", "nothing stays patched"


# ------------------------------------------------------------------------------------------------ other sources


def test_a_torchscript_archive_is_its_module(tmp_path: Path) -> None:
    import torch

    torch.jit.script(_planted().linear().eval()).save(tmp_path / "net.pt")
    report = te.convert(tmp_path / "net.pt", out=tmp_path / "o.onnx", inputs={"x": (2, 8)})
    assert (report.kind, report.exporter) == ("torchscript", "torchscript")
    assert report.max_rel is not None and report.max_rel <= 1e-6
    assert report.signature.outputs[0].symbols[0] == "batch"


def test_an_exported_program_brings_its_inputs_and_its_axes(tmp_path: Path) -> None:
    import torch

    dims = ({0: torch.export.Dim("rows", min=1, max=32)},)
    program = torch.export.export(_planted().linear().eval(), (torch.randn(3, 8),), dynamic_shapes=dims)
    torch.export.save(program, tmp_path / "net.pt2")
    report = te.convert(tmp_path / "net.pt2", out=tmp_path / "o.onnx")
    assert (report.kind, report.exporter) == ("exported-program", "dynamo")
    assert [(item.symbol, item.high) for item in report.dynamic] == [("batch", 32)]
    assert report.signature.outputs[0].symbols[0] == "batch" and report.max_rel <= 1e-6
    named = te.convert(tmp_path / "net.pt2", out=tmp_path / "p.onnx", dynamic={"x": {0: "rows"}})
    assert named.signature.inputs[0].symbols[0] == "rows" == named.signature.outputs[0].symbols[0]
    with pytest.raises(ModelError, match="axis 1 of `x` is fixed at 8 in the exported program"):
        te.convert(tmp_path / "net.pt2", out=tmp_path / "q.onnx", dynamic={"x": {1: "width"}})


def test_an_exported_program_with_an_axis_in_steps_says_what_to_export_instead(tmp_path: Path) -> None:
    """torch 2.13 reads such a program and cannot write it as ONNX."""
    import torch

    step = 8 * torch.export.Dim("step", min=1, max=8)
    program = torch.export.export(_planted().NoiseClean().eval(), (torch.randn(3, 16),), dynamic_shapes=({1: step},))
    torch.export.save(program, tmp_path / "net.pt2")
    with pytest.raises(ModelError, match=r"saved with an axis in steps \(`8\*") as refused:
        te.convert(tmp_path / "net.pt2", out=tmp_path / "o.onnx")
    assert "file.py:factory" in str(refused.value.hint)
    assert written(tmp_path) == ["net.pt2"]


def test_an_axis_in_steps_is_named_as_it_was_asked_for_wherever_it_stands(tmp_path: Path) -> None:
    dynamic = {"images": {0: "batch", 2: "height@16..64/16", 3: "width@16..64/16"}}
    convert("AnchorsClean", tmp_path, inputs={"images": (2, 3, 32, 48)}, dynamic=dynamic)
    proto = onnx.load(tmp_path / "out.onnx")
    sizes = {
        dim.dim_param
        for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param
    }
    assert {"batch", "height", "width"} <= sizes
    assert not [size for size in sizes if re.search(r"\b[su]\d+", size)], "no symbol of torch.export is left"
    assert any("height*width//" in size or "width*height//" in size for size in sizes)


def test_a_sort_in_the_source_is_compared_in_any_order_of_near_equal_scores(tmp_path: Path) -> None:
    report = convert("Sorting", tmp_path)
    assert [spec.name for spec in report.signature.outputs] == ["scores", "rows"]
    assert report.max_rel is not None and report.max_rel <= 1e-4 and len(report.verification) == 3


def test_outputs_of_training_are_left_out_by_name_where_a_head_has_a_mode_for_exporters(tmp_path: Path) -> None:
    report = convert("Heads", tmp_path, inputs={"images": (2, 3, 8, 8)})
    (output,) = report.signature.outputs
    assert output.shape == (-1, 4, 64) and report.exporter == "dynamo"
    (note,) = [text for text in report.notes if "training-only outputs" in text]
    assert "`output_1_feats_0`, `output_1_feats_1`" in note and "`head` (Head)" in note and "--all-outputs" in note
    kept = convert("Heads", tmp_path, inputs={"images": (2, 3, 8, 8)}, all_outputs=True, overwrite=True)
    assert [spec.name for spec in kept.signature.outputs] == ["output_0", "output_1_feats_0", "output_1_feats_1"]
    assert all(spec.shape[0] == -1 and min(spec.shape[1:]) > 0 for spec in kept.signature.outputs), (
        "a size that never moved is a number"
    )


def test_an_embedding_that_is_fed_floats_is_told_its_type_its_range_and_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scalar types: Long, Int") as refused:
        convert("Looked", tmp_path, inputs={"ids": (2, 128)})
    assert "`--input input_ids:2x128:int64@0..30521`" in str(refused.value.hint)
    with pytest.raises(ModelError, match="index out of range") as refused:
        convert("Looked", tmp_path, inputs=["input_ids:2x8:int64@0..40000"])
    assert "`--input input_ids:2x8:int64@0..30521`" in str(refused.value.hint)


def test_the_next_command_builds_for_the_sizes_that_are_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "o.onnx")

    def following(*more: str) -> str:
        assert (
            run(["convert", f"{PLANTED}:ScaledClean", "--input", "images:2x3x8x8", "-o", out, "--overwrite", *more])
            == 0
        )
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next:")]
        return line.partition(out)[2].strip()

    assert following() == "--batch 1:8:64"
    assert following("--dynamic", "0=batch@1..16") == "--batch 1:8:16"
    assert following("--static") == ""
    assert following("--dynamic", "0=batch,2=height") == "--profile images:1x3x8x8,8x3x24x8,64x3x24x8"


def test_code_in_a_folder_of_the_hub_is_not_run_unasked(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed here")
    folder = tmp_path / "hub"
    folder.mkdir()
    parts = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "of_my_own", "auto_map": parts}))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="contains Python code") as refused:
        te.convert(folder, out=tmp_path / "o.onnx", options={"random": "true"}, offline=True)
    assert "--trust-source" in str(refused.value.hint)
    assert written(tmp_path) == ["hub"]


def test_an_interrupted_convert_leaves_nothing_and_promises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    assert run(["convert", f"{tmp_path / 'net.py'}:build", "-o", str(tmp_path / "out.onnx"), "--input", "x:2x8"]) == 130
    said = capsys.readouterr().err
    assert "written whole, or not at all" in said and "finished work is kept" not in said
    assert [item.name for item in tmp_path.iterdir() if "onnx" in item.name] == []


def test_a_network_of_one_row_alone_is_told_the_option(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass One(torch.nn.Module):\n    def forward(self, x):\n"
        "        assert x.shape[0] == 1, 'one row'\n        return x * 2\n"
    )
    with pytest.raises(ModelError, match="one row") as refused:
        te.convert(f"{tmp_path / 'net.py'}:One", out=tmp_path / "out.onnx", inputs={"x": (1, 8)})
    assert "was raised from 1 to 2: `--static` keeps every size" in str(refused.value.hint)


def test_a_state_dict_goes_into_what_its_factory_makes(tmp_path: Path) -> None:
    import torch

    trained = _planted().linear(seed=5)
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in trained.state_dict().items()}},
               tmp_path / "weights.pth")  # fmt: skip
    given = {"out": tmp_path / "o.onnx", "inputs": {"x": (2, 8)}}
    with pytest.raises(UsageError, match="contains only weights") as refused:
        te.convert(tmp_path / "weights.pth", **given)
    assert "--factory" in str(refused.value.hint)
    report = te.convert(tmp_path / "weights.pth", factory=f"{PLANTED}:linear", **given)
    assert report.kind == "state-dict" and any("`module.`" in note for note in report.notes)
    x = np.random.default_rng(0).random((5, 8), dtype=np.float32)
    (got,) = ort.InferenceSession(tmp_path / "o.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    with torch.no_grad():
        np.testing.assert_allclose(got, trained(torch.from_numpy(x)).numpy(), atol=1e-5)
    with pytest.raises(ModelError, match=r"`layer\.weight` is 4x8 in .* and 6x8 in"):
        te.convert(
            tmp_path / "weights.pth", factory=f"{PLANTED}:linear", options={"width": "6"}, overwrite=True, **given
        )


def test_a_hugging_face_folder_brings_its_inputs_and_its_axes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    report = te.convert(tmp_path / "bert", out=tmp_path / "bert.onnx", offline=True)
    assert report.kind == "huggingface" and any("BertForSequenceClassification" in note for note in report.notes)
    assert {spec.name: spec.symbols for spec in report.signature.inputs} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), ("batch", "sequence")
    )
    assert report.signature.outputs[0].name == "logits" and report.signature.outputs[0].symbols[0] == "batch"
    assert report.max_rel <= 1e-4 and {item.sizes["sequence"] for item in report.verification} >= {16, 32}


def test_a_hugging_face_configuration_alone_is_made_with_random_weights_when_asked(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path / "vit")
    with pytest.raises(ModelError, match="cannot be loaded") as refused:
        te.convert(tmp_path / "vit", out=tmp_path / "vit.onnx", offline=True)
    assert "random=true" in str(refused.value.hint)
    report = te.convert(tmp_path / "vit", out=tmp_path / "vit.onnx", offline=True, options={"random": "true"})
    assert report.signature.inputs[0].shape == (-1, 3, 32, 32) and report.max_rel <= 1e-4


def test_a_hub_name_that_is_not_in_the_cache_needs_no_network_to_say_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed here")
    with pytest.raises(SetupError, match="not in the cache"):
        te.convert("nobody/no-such-model", out=tmp_path / "o.onnx", offline=True, cache=tmp_path / "cache")


def test_a_timm_name_is_its_model(tmp_path: Path) -> None:
    pytest.importorskip(
        "timm", reason="timm is not installed here: it brings torchvision, which has no CPU build; run on the GPU"
    )
    report = te.convert("timm/resnet18", out=tmp_path / "o.onnx", options={"pretrained": "false"})
    assert report.max_rel <= 1e-4 and report.signature.inputs[0].shape == (-1, 3, 224, 224)
    with pytest.raises(UsageError, match="timm has no model"):
        te.convert("timm/resnet_that_is_not", out=tmp_path / "p.onnx")


# ------------------------------------------------------------------------------------------------ other people's code


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("Raising", ModelError, r"RuntimeError: the camera is not there \(.*planted\.py:\d+ in `forward`\)"),
        ("Leaving", ModelError, r"SystemExit: 5 \(.*planted\.py:\d+ in `__init__`\)"),
        ("no_module", ModelError, "gives a str, expected a `torch.nn.Module`"),
        ("linaer", UsageError, "no attribute `linaer`"),
    ],
)
def test_code_that_raises_is_told_with_its_line(
    factory: str, kind: type[TrtEngineError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        convert(factory, tmp_path)
    assert written(tmp_path) == []


def test_a_file_that_does_not_import_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, code, told in (
        ("syntax.py", "def build(:\n", 4, "syntax.py:1"),
        ("lacks.py", "import a_package_nobody_has\n", 3, "a_package_nobody_has"),
        ("dies.py", "x = 1\nraise ValueError('early')\n", 4, "dies.py:2"),
    ):
        (tmp_path / name).write_text(text)
        assert run(["convert", f"{tmp_path / name}:build", "-o", str(tmp_path / "o.onnx")]) == code
        said = capsys.readouterr().err
        assert told in said and "Traceback" not in said


def test_a_module_by_its_dotted_name_is_found_beside_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets_of_a_test").mkdir()
    (tmp_path / "own_nets_of_a_test" / "small.py").write_text(PLANTED.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    report = te.convert("own_nets_of_a_test.small:with_example", out="o.onnx", options={"width": 3})
    assert report.signature.outputs[0].shape == (-1, 3), "its own example is taken"
    with pytest.raises(UsageError, match=r"no Python module `own_nets_of_a_test\.big`"):
        te.convert("own_nets_of_a_test.big:build", out="p.onnx")


def test_what_the_source_prints_does_not_reach_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", f"{PLANTED}:Talking", "--input", "x:2x8", "-o", str(tmp_path / "o.onnx"), "--json"]
    assert run(command) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["kind"] == "torch-module"
    assert "a word on stdout" in told.err


def test_inputs_that_are_missing_or_wrong_are_told_with_what_forward_takes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the inputs are unknown; its forward takes \(x\)"):
        convert("linear", tmp_path, inputs=None)
    with pytest.raises(UsageError, match="takes no argument `widht`") as refused:
        convert("linear", tmp_path, options={"widht": 3})
    assert "`width`" in str(refused.value.hint)
    with pytest.raises(UsageError, match="forward takes no `scal`"):
        convert("UnusedClean", tmp_path, inputs={"x": (2, 8), "scal": (2, 8)})
    with pytest.raises(ModelError, match=r"on the example inputs failed: .*planted\.py:\d+"):
        convert("linear", tmp_path, inputs={"x": (2, 9)})


def _planted() -> Any:
    return load_program(PLANTED, "planted_networks")


def test_a_product_that_onnx_lacks_names_the_setting_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_engine.conversion.torch.torch_export import ExportFailed

    def lacks(*_: Any, **__: Any) -> None:
        raise ExportFailed("No ONNX function found for <OpOverload(op='transformers.grouped_mm_fallback')>")

    monkeypatch.setattr("trt_engine.conversion.torch.torch_export.export_torch", lacks)
    with pytest.raises(ModelError, match="no exporter takes") as caught:
        convert("SizeReads", tmp_path)
    assert 'experts_implementation="batched_mm"' in str(caught.value.hint)
    assert written(tmp_path) == []


# ------------------------------------------------------------------------------------------------ other arguments


@pytest.mark.parametrize("form", ["factory", "script", "program"])
def test_an_argument_that_is_no_tensor_is_a_constant_of_the_graph(form: str, tmp_path: Path) -> None:
    import torch

    module = planted_module("repeated").eval()
    inputs: Any = ["x:2x8", "y:2x8", "times=3"]
    source = f"{PLANTED}:repeated"
    if form == "script":
        torch.jit.script(module).save(source := str(tmp_path / "m.pt"))
        inputs.append("negate=false")
    elif form == "program":
        program = torch.export.export(module, (torch.ones(2, 8), 3, torch.ones(2, 8)), {"negate": True})
        torch.export.save(program, source := str(tmp_path / "m.pt2"))
        inputs = None
    report = te.convert(source, out=tmp_path / "out.onnx", inputs=inputs)
    assert [spec.name for spec in open_model(tmp_path / "out.onnx").signature.inputs] == ["x", "y"]
    assert report.max_rel is not None and report.max_rel <= 1e-4
    assert any(" is 3" in note for note in report.notes)


def planted_module(name: str) -> Any:
    made = load_program(PLANTED, "planted")
    return getattr(made, name)()


def test_an_argument_that_is_no_tensor_and_is_not_given_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        convert("repeated", tmp_path, inputs={"x": (2, 8)})
    assert "`--input times=VALUE`" in str(refused.value.hint)
    with pytest.raises(UsageError, match="forward takes no `time`"):
        convert("repeated", tmp_path, inputs=["x:2x8", "time=3"])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("linear", "2x40"), ("conv1d", "2x80x3000"), ("conv2d", "2x1x224x224"), ("embedding", "2x128:int64@0..49"),
        ("recurrent", "2x100x24"),
    ],
)  # fmt: skip
def test_the_inputs_that_are_asked_for_fit_the_first_layer(kind: str, shape: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        convert("reads", tmp_path, inputs=None, options={"kind": kind})
    assert refused.value.hint == f"`--input input:{shape}`"


def test_a_library_that_does_not_import_is_a_fault_of_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(SetupError, match="torchvision::nms does not exist") as refused:
        te.convert("timm/resnet18", out=tmp_path / "out.onnx")
    assert "install the torchvision of torch" in str(refused.value.hint)

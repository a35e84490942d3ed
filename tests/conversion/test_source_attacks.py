"""Files that would run code when they are opened: none of them does, and honest files of the same kinds are converted."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from trt_engine.conversion.sources import detect_source
from trt_engine.errors import ModelError, TrtEngineError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from trt_engine.conversion.torch.pickle_guard import no_pickled_code  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, for TorchScript


class Touch:
    """Unpickled by Python, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.path}",))


class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
        return torch.nn.functional.relu(self.linear(x))


def saved(value: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **more)
    return file.getvalue()


def members_of(raw: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return file.getvalue()


@pytest.fixture(scope="module")
def program() -> bytes:
    """An honest exported program, as bytes."""
    file = io.BytesIO()
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    torch.export.save(torch.export.export(Net().eval(), (torch.zeros(3, 4),), dynamic_shapes=sizes), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def script() -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(Net().eval()), file)
    return file.getvalue()


def member(members: dict[str, bytes], ending: str) -> str:
    return next(name for name in members if name.endswith(ending))


def put(ending: str, raw: Callable[[Path], bytes]) -> Callable[[dict[str, bytes], Path], None]:
    def change(members: dict[str, bytes], ran: Path) -> None:
        members[member(members, ending)] = raw(ran)

    return change


def add(name: str, raw: Callable[[Path], bytes]) -> Callable[[dict[str, bytes], Path], None]:
    def change(members: dict[str, bytes], ran: Path) -> None:
        members[f"{next(iter(members)).split('/')[0]}/{name}"] = raw(ran)

    return change


def replaced(old: str, new: str) -> Callable[[dict[str, bytes], Path], None]:
    def change(members: dict[str, bytes], ran: Path) -> None:
        name = member(members, "models/model.json")
        before = members[name]
        members[name] = before.replace(old.encode(), new.replace("RAN", str(ran)).encode())
        assert members[name] != before

    return change


def in_json(do: Callable[[Any, Path], None]) -> Callable[[dict[str, bytes], Path], None]:
    def change(members: dict[str, bytes], ran: Path) -> None:
        name = member(members, "models/model.json")
        root = json.loads(members[name])
        do(root, ran)
        members[name] = json.dumps(root).encode()

    return change


def weights_as_pickle(members: dict[str, bytes], ran: Path) -> None:
    name = member(members, "weights_config.json")
    config = json.loads(members[name])
    config["config"]["linear.weight"]["use_pickle"] = True
    members[name] = json.dumps(config).encode()
    members[member(members, "weights/weight_0")] = saved(Touch(ran))


def protocol_0_weight(members: dict[str, bytes], ran: Path) -> None:
    weights_as_pickle(members, ran)
    members[member(members, "weights/weight_0")] = f"cos\nsystem\n(S'touch {ran}'\ntR.".encode()


def renamed(ending: str, to: str, raw: Callable[[bytes], bytes]) -> Callable[[dict[str, bytes], Path], None]:
    """The member under another name that PyTorch takes for the same: its lookup knows no case, and some no suffix."""

    def change(members: dict[str, bytes], ran: Path) -> None:
        name = member(members, ending)
        changed = raw(members.pop(name)).replace(b"RAN", str(ran).encode())
        members[name.removesuffix(ending) + to] = changed

    return change


def code_in_size(raw: bytes) -> bytes:
    return raw.replace(b"Symbol('s77', positive=True, integer=True)", b"__import__('os').system('touch RAN')")


def code_in_file(raw: bytes) -> bytes:
    before = b"    linear = self.linear\n"
    return raw.replace(before, b'    secret = torch.from_file("RAN", True, 10)\n' + before)


def constant(name: str) -> Callable[[dict[str, bytes], Path], None]:
    def change(members: dict[str, bytes], ran: Path) -> None:
        listed = member(members, "constants_config.json")
        entry = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        members[listed] = json.dumps({"config": {"c": entry}}).encode()
        members[listed.rsplit("/", 1)[0] + f"/{name}"] = pickle.dumps(Touch(ran), protocol=2)

    return change


def call_of_system(root: Any, ran: Path) -> None:
    node = root["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.os.system"
    node["inputs"] = [{"name": "x", "arg": {"as_string": f"touch {ran}"}, "kind": 1}]


def enum_of_a_module(root: Any, ran: Path) -> None:
    signature = root["graph_module"]["module_call_graph"][0]["signature"]
    context = json.dumps({"__enum__": True, "fqn": "antigravity:x", "name": "y"})
    signature["in_spec"] = json.dumps([1, {"type": "builtins.tuple", "context": context, "children_spec": []}])


def default_of_a_module(root: Any, ran: Path) -> None:
    signature = root["graph_module"]["module_call_graph"][0]["signature"]
    context = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
    signature["in_spec"] = json.dumps([1, {"type": "collections.defaultdict", "context": context, "children_spec": []}])


def code_as_input_name(root: Any, ran: Path) -> None:
    graph = root["graph_module"]["graph"]
    graph["inputs"][-1]["as_tensor"]["name"] = f"x=__import__('os').system('touch {ran}')"


def older(members: dict[str, bytes], ran: Path, evil: str) -> None:
    """The layout of torch 2.7 and before."""
    model = members[member(members, "models/model.json")]
    members.clear()
    good = saved({})
    members |= {
        "version": b"8.1", "serialized_exported_program.json": model, "serialized_state_dict.pt": good,
        "serialized_constants.pt": good, "serialized_example_inputs.pt": good,
    }  # fmt: skip
    members[evil] = saved(Touch(ran))


PROGRAMS: dict[str, Callable[[dict[str, bytes], Path], None]] = {
    "sample inputs": put("sample_inputs/model.pt", lambda ran: saved(Touch(ran))),
    "sample inputs, older format": put(
        "sample_inputs/model.pt", lambda ran: saved(Touch(ran), _use_new_zipfile_serialization=False)
    ),
    "sample inputs, bare pickle": put("sample_inputs/model.pt", lambda ran: pickle.dumps(Touch(ran))),
    "sample inputs, protocol 0": put(
        "sample_inputs/model.pt", lambda ran: f"cos\nsystem\n(S'touch {ran}'\ntR.".encode()
    ),
    "sample inputs, nested": put("sample_inputs/model.pt", lambda ran: zipped({"a/b.bin": saved(Touch(ran))})),
    "weights": weights_as_pickle,
    "weights, protocol 0": protocol_0_weight,
    "weights, layout of old": add("data/weights/model.pt", lambda ran: saved(Touch(ran))),
    "constants, layout of old": add("data/constants/model.pt", lambda ran: saved(Touch(ran))),
    "constant": constant("tensor_0"),
    "opaque constant": constant("opaque_obj_0"),
    "custom object": constant("custom_obj_0"),
    "extra": add("extra/notes", lambda ran: pickle.dumps(Touch(ran))),
    "compiled code": add("data/aotinductor/model/model.so", lambda ran: b"\x7fELF"),
    "state dict of 2.7": lambda members, ran: older(members, ran, "serialized_state_dict.pt"),
    "constants of 2.7": lambda members, ran: older(members, ran, "serialized_constants.pt"),
    "example inputs of 2.7": lambda members, ran: older(members, ran, "serialized_example_inputs.pt"),
    "target": in_json(call_of_system),
    "target, torch.load": replaced("torch.ops.aten.relu.default", "torch.load"),
    "target, attribute of an operator": replaced(
        "torch.ops.aten.relu.default", "torch.ops.load_library.__globals__.os"
    ),
    "target, file": replaced("torch.ops.aten.relu.default", "torch.ops.aten.from_file.default"),
    "target, methodcaller": replaced("torch.ops.aten.relu.default", "_operator.methodcaller"),
    "size": replaced("Symbol('s77', positive=True, integer=True)", "__import__('os').system('touch RAN')"),
    "size, in a program of another suffix": renamed("models/model.json", "models/model.jsox", code_in_size),
    "size, in a program without a suffix": renamed("models/model.json", "models/model12345", code_in_size),
    "size, in a program in capitals": renamed("models/model.json", "models/model.JSON", code_in_size),
    "size, powers of powers": replaced(
        "Symbol('s77', positive=True, integer=True)", "((((((9**64)**64)**64)**64)**64)**64)"
    ),
    "size, attribute": replaced("Symbol('s77', positive=True, integer=True)", "Symbol.__init__.__globals__"),
    "size, tower": replaced("Symbol('s77', positive=True, integer=True)", "9**9**9**9"),
    "size, lambdify": replaced("Symbol('s77', positive=True, integer=True)", "lambdify(1)"),
    "tree, enum": in_json(enum_of_a_module),
    "tree, default": in_json(default_of_a_module),
    "name of an input": in_json(code_as_input_name),
    "range of a size": replaced('"range_constraints": {"s77"', '"range_constraints": {"u99999999999"'),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_part_of_an_exported_program_runs_code(name: str, program: bytes, tmp_path: Path) -> None:
    members, ran = members_of(program), tmp_path / "ran"
    PROGRAMS[name](members, ran)
    path = tmp_path / "net.pt2"
    path.write_bytes(zipped(members))
    with pytest.raises(ModelError, match=r"does more than compute|cannot be read|compiled code"):
        detect_source(path)
    assert not ran.exists()
    assert "antigravity" not in sys.modules


def test_the_fallback_of_torch_to_full_pickles_is_impossible_without_the_check(
    program: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The guard alone, as if the check had missed it; without the guard the code runs."""
    for name in ("sample inputs", "weights", "constant", "opaque constant", "state dict of 2.7"):
        members, ran = members_of(program), tmp_path / "ran"
        PROGRAMS[name](members, ran)
        path = tmp_path / "net.pt2"
        path.write_bytes(zipped(members))
        with no_pickled_code(), pytest.raises(Exception):  # noqa: B017 (of torch, or of the hook)
            torch.export.load(str(path))
        assert not ran.exists(), name
    assert "Logging error" not in capfd.readouterr().err
    with pytest.raises(ModelError), no_pickled_code():
        pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))
    with no_pickled_code(), pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(saved(Touch(tmp_path / "ran"))), weights_only=False)
    pickle.loads(pickle.dumps(Touch(tmp_path / "after")))
    assert (tmp_path / "after").exists(), "the guard holds inside of the block alone"


def test_honest_programs_pass_and_keep_their_batch(program: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.pt2").write_bytes(program)
    report = te.convert(tmp_path / "net.pt2", out=tmp_path / "o.onnx")
    assert report.signature is not None and report.signature.inputs[0].symbols[0] is not None
    assert not report.trust_source and report.embedded_code == ()


# ------------------------------------------------------------------------------------------------ checkpoints


CHECKPOINTS: dict[str, Callable[[Path], bytes]] = {
    "module": lambda ran: saved(Touch(ran)),
    "older format": lambda ran: saved(Touch(ran), _use_new_zipfile_serialization=False),
    "protocol 4": lambda ran: saved(Touch(ran), pickle_protocol=4),
    "inside of a state dict": lambda ran: saved({"weight": torch.zeros(2), "callbacks": [Touch(ran)]}),
    "behind the weights of old": lambda ran: (
        saved({}, _use_new_zipfile_serialization=False)[:-2] + pickle.dumps(Touch(ran), protocol=2)
    ),
    "another name": lambda ran: zipped(
        {"m/data.pkl": pickle.dumps({}, protocol=2), "m/x.bin": pickle.dumps(Touch(ran))}
    ),
    "an archive in an archive": lambda ran: zipped(
        {"m/data.pkl": pickle.dumps({}, protocol=2), "m/x": saved(Touch(ran))}
    ),
    "behind data": lambda ran: zipped(
        {"m/data.pkl": pickle.dumps({}, protocol=2), "n/data.pkl": pickle.dumps(Touch(ran), protocol=2)}
    ),
    "of another case": lambda ran: zipped(
        {"m/data.pkl": pickle.dumps({}, protocol=2), "m/DATA.PKL": pickle.dumps(Touch(ran), protocol=2)}
    ),
    "behind a comment": lambda ran: saved({})[:-2] + b"\x04\x00abcd",
    "two archives": lambda ran: saved(Touch(ran)) + saved({}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_no_checkpoint_runs_code(name: str, tmp_path: Path) -> None:
    path, ran = tmp_path / "weights.pt", tmp_path / "ran"
    path.write_bytes(CHECKPOINTS[name](ran))
    with pytest.raises(ModelError):
        detect_source(path)
    assert not ran.exists()


HONEST: dict[str, Callable[[], Any]] = {
    "every dtype": lambda: {
        str(dtype): torch.zeros(2, dtype=dtype)
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.bool,
        )
    },
    "newer dtypes": lambda: {
        str(dtype): torch.zeros(2, dtype=dtype)
        for dtype in (torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2)
    },
    "parameters": lambda: {"weight": torch.nn.Parameter(torch.zeros(2)), "buffer": torch.nn.Buffer(torch.zeros(2))},
    "ordered": lambda: Net().state_dict(),
    "sparse": lambda: {"coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr()},
    "quantised": lambda: {
        "q": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        "c": torch.quantize_per_channel(torch.randn(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint8),
    },
    "shared and strided": lambda: (lambda base: {"a": base, "b": base[::2], "c": base.t()})(torch.randn(4, 4)),
    "numpy scalars": lambda: {
        "state_dict": {"w": torch.zeros(1)},
        "best": np.float64(0.5),
        "count": np.int64(3),
        "array": np.ones(3),
    },
    "training": lambda: {
        "model": Net().state_dict(),
        "optimizer": torch.optim.Adam(Net().parameters()).state_dict(),
        "epoch": 3,
        "rng": torch.get_rng_state(),
        "device": torch.device("cpu"),
        "shape": torch.Size([1, 2]),
    },
    "layouts": lambda: {"a": torch.strided, "b": torch.zeros(2), "c": bytearray(b"x"), "d": {1, 2}, "e": 1j},
    "meta": lambda: {"a": torch.zeros(2, device="meta")},
}


@pytest.mark.filterwarnings("ignore")  # of torch, for kinds of tensors that it calls old or new
@pytest.mark.parametrize("older_format", [False, True])
@pytest.mark.parametrize("name", HONEST)
def test_what_torch_saves_for_tensors_passes_and_opens(name: str, older_format: bool, tmp_path: Path) -> None:
    if older_format and name == "newer dtypes":
        pytest.skip("torch cannot read them itself")
    path = tmp_path / "weights.bin"
    path.write_bytes(saved(HONEST[name](), _use_new_zipfile_serialization=not older_format))
    assert detect_source(path).kind == "state-dict"
    with no_pickled_code():
        assert torch.load(path, weights_only=True) is not None


def test_a_checkpoint_whose_raw_weights_look_like_a_pickle_is_honest(tmp_path: Path) -> None:
    raw = torch.tensor([0x80, 0x02, 0x63, 0x6F, 0x73, 0x0A, 0xFF, 0x80, 0x04, 0x95], dtype=torch.uint8)
    (tmp_path / "w.pt").write_bytes(saved({"w": raw}))
    assert detect_source(tmp_path / "w.pt").code == ()


def test_a_pickled_module_is_opened_with_trust_source_alone_and_that_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trusted_net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import trusted_net  # type: ignore[import-not-found]

    path = tmp_path / "whole.pt"
    torch.save(trusted_net.Net().eval(), path)
    for name in ("TRT_ENGINE_TRUST_SOURCE", "TRUST_SOURCE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ModelError, match=r"imports `trusted_net\.Net`") as refused:
        te.convert(path, out=tmp_path / "o.onnx", inputs="x:2x3", overwrite=True)
    assert "--trust-source" in str(refused.value.hint)
    report = te.convert(path, out=tmp_path / "o.onnx", inputs="x:2x3", trust_source=True)
    assert report.trust_source and report.embedded_code == ("it imports `trusted_net.Net`",)


# ------------------------------------------------------------------------------------------------ TorchScript


def coded(body: str) -> Callable[[dict[str, bytes], Path], None]:
    def change(members: dict[str, bytes], ran: Path) -> None:
        name = member(members, "test_source_attacks.py")
        before = b"    linear = self.linear\n"
        members[name] = members[name].replace(before, body.replace("RAN", str(ran)).encode() + b"\n" + before)
        assert body.split("RAN")[0].encode() in members[name]

    return change


SCRIPTS: dict[str, Callable[[dict[str, bytes], Path], None]] = {
    "write": coded('    torch.save([1], "RAN")'),
    "write, as a method": coded('    ([1]).save("RAN")'),
    "write, as ops": coded('    ops.aten.save([1], "RAN")'),
    "read": coded('    secret = torch.from_file("/etc/passwd", False, 10)'),
    "by a text": coded('    getattr(torch, "from" "_file")("/etc/passwd", False, 10)'),
    "foreign operators": coded('    ops.c10d.barrier()'),
    "a class of another library": coded('    store = torch.classes.dist_c10d.FileStore("RAN", 1)'),
    "remote": coded('    ops.prim.rpc_sync("a", "b")'),
    "read, in a folder in capitals": renamed(
        "code/__torch__/test_source_attacks.py", "CODE/__torch__/test_source_attacks.py", code_in_file
    ),
    "read, in a file in capitals": renamed("test_source_attacks.py", "test_source_attacks.PY", code_in_file),
    "a pickle of Python": put("data.pkl", lambda ran: pickle.dumps(Touch(ran), protocol=2)),
    "constants": put("constants.pkl", lambda ran: pickle.dumps(Touch(ran), protocol=2)),
    "an extra file": add("extra/notes", lambda ran: pickle.dumps(Touch(ran), protocol=2)),
    "an extra archive": add("extra/weights", lambda ran: saved(Touch(ran))),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_torchscript_that_reaches_files_or_python_is_refused_before_it_is_compiled(
    name: str, script: bytes, tmp_path: Path
) -> None:
    members, ran = members_of(script), tmp_path / "ran"
    SCRIPTS[name](members, ran)
    (tmp_path / "net.pt").write_bytes(zipped(members))
    with pytest.raises(ModelError, match=r"does more than compute") as refused:
        te.convert(tmp_path / "net.pt", out=tmp_path / "o.onnx", inputs="x:2x4")
    assert "--trust-source" in str(refused.value.hint) and not ran.exists()


def test_what_torchscript_prints_cannot_forge_a_line_or_reach_the_terminal(
    script: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = members_of(script)
    coded('    print("\\033[31mred\\nerror: forged")')(members, tmp_path)
    (tmp_path / "net.pt").write_bytes(zipped(members))
    te.convert(tmp_path / "net.pt", out=tmp_path / "o.onnx", inputs="x:2x4")
    printed = capsys.readouterr()
    assert "| \\x1b[31mred\n| error: forged\n" in printed.err
    assert "\x1b" not in printed.err and printed.out == ""


def test_every_operator_of_torch_that_takes_the_name_of_a_file_is_known() -> None:
    """A release that brings another one fails here."""
    words = ("filename", "file_name", "path", "url", "dirname")
    schemas = [str(item) for item in torch._C._jit_get_all_schemas()]
    files = {
        item.split("(")[0].split("::")[1].split(".")[0]
        for item in schemas
        if any(f"str {word}" in item for word in words)
    }
    assert files == {"from_file", "save"}


# ------------------------------------------------------------------------------------------------ folders of a hub


def folder(path: Path, config: dict[str, Any], files: dict[str, bytes]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"], **config}))
    for name, raw in files.items():
        (path / name).write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {"pytorch_model.bin": saved(Touch(Path("ran")))}),
        ({}, {"pytorch_model.bin": saved(Touch(Path("ran")), _use_new_zipfile_serialization=False)}),
        ({}, {"pytorch_model-00001-of-00002.bin": saved(Touch(Path("ran")))}),
        (
            {},
            {
                "pytorch_model.bin.index.json": b'{"weight_map": {"a": "odd.name"}}',
                "odd.name": saved(Touch(Path("ran"))),
            },
        ),
        ({}, {"pytorch_model.bin.index.json": b'{"weight_map": {"a": "../x.bin"}}'}),
        ({}, {"adapter_model.bin": saved(Touch(Path("ran")))}),
        ({"auto_map": {"AutoModel": "evil.Net"}}, {"evil.py": b"open('ran', 'w')"}),
        ({"_attn_implementation": "someone/kernels"}, {}),
    ],
)
def test_no_folder_of_a_hub_runs_code(
    config: dict[str, Any], files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = folder(tmp_path / "hub", config, files)
    with pytest.raises(ModelError):
        te.convert(made, out=tmp_path / "o.onnx", offline=True)
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------------ archives


def bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("m/data/0", bytes(64 << 20))
    return file.getvalue()


def nested(depth: int) -> bytes:
    raw = saved({})
    for _ in range(depth):
        raw = zipped({"m/data.pkl": pickle.dumps({}, protocol=2), "m/x": raw})
    return raw


def twice() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, pytest.warns(UserWarning):
        for _ in range(2):
            archive.writestr("m/data.pkl", pickle.dumps({}, protocol=2))
    return file.getvalue()


def overlapping() -> bytes:
    raw = bytearray(zipped({"m/data.pkl": pickle.dumps({}, protocol=2), "m/data/0": bytes(64)}))
    last = raw.rindex(b"PK\x01\x02")
    raw[last + 42 : last + 46] = bytes(4)
    return bytes(raw)


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "bomb": (bomb, "TRT_ENGINE_MAX_ARCHIVE_RATIO"),
    "deep": (lambda: nested(6), "again"),
    "two of a name": (twice, "again"),
    "overlap": (overlapping, "again"),
    "out of it": (lambda: zipped({"m/data.pkl": pickle.dumps({}, protocol=2), "../x": b""}), "again"),
    "cut": (lambda: saved({})[:-40], "again"),
    "before it": (lambda: b"PK\x03\x04" + bytes(100) + saved({}), "again"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_readers_see_differently_or_that_grows_is_refused(name: str, tmp_path: Path) -> None:
    make, hint = ARCHIVES[name]
    (tmp_path / "w.pt").write_bytes(make())
    with pytest.raises(TrtEngineError, match="ZIP archive") as refused:
        detect_source(tmp_path / "w.pt")
    assert hint in str(refused.value.hint)


def test_the_command_says_what_it_refuses_and_takes_the_flag(tmp_path: Path) -> None:
    """In a process of its own: exit code 4, no code, nothing of torch's on stderr."""
    path = tmp_path / "weights.pt"
    path.write_bytes(saved(Touch(tmp_path / "ran")))
    command = [sys.executable, "-m", "trt_engine", "convert", str(path), "-o", str(tmp_path / "o.onnx"), "--overwrite"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4 and "--trust-source" in done.stderr and not (tmp_path / "ran").exists()
    done = subprocess.run([*command, "--trust-source"], capture_output=True, text=True)
    assert (tmp_path / "ran").exists(), "the flag is the request to run it"

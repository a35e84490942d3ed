"""Plugins over the real bindings: the page's own Python plugin, libraries, and what is said of those that fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ALL = pytest.mark.releases("10.0.1", "10.16.1", "11.0.0", "11.4.0")
PAGE = Path(__file__).parents[2] / "docs/extending.md"


def page_module(folder: Path) -> Path:
    """The plugin of docs/extending.md, as a file."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    path = folder / "scale_plugin.py"
    path.write_text(next(block for block in blocks if "scale_plugin.py" in block))
    return path


def registers(world: Any) -> list[int]:
    """Let the registry take creators; those it was given. Where the call lands is seen by making it once."""
    import tensorrt as trt

    given: list[int] = []
    rules, landed = world.puppet.rules, []

    class Watching(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return lambda call: landed.append(key)

    registry = trt.get_plugin_registry()
    world.puppet.rules = Watching()
    registry.register_creator(trt.IPluginCreatorV3One(), "")
    world.puppet.rules = rules
    key = next(key for key in landed if key[0] == "IPluginRegistry")
    rules[key] = lambda call: given.append(call.address(0)) or 1
    return given


def load(*libraries: str, modules: tuple[str, ...] = ()) -> Any:
    from trt_engine.backends.tensorrt.logger import TensorRtLogger
    from trt_engine.backends.tensorrt.plugins import load_plugins

    with TensorRtLogger() as logger:
        return load_plugins(libraries, modules, logger)


@ALL
def test_the_plugin_of_the_page_registers_once(world: Any, tmp_path: Path) -> None:
    path, given = page_module(tmp_path), registers(world)
    load(modules=(str(path),))
    load(modules=(str(path),))
    assert len(given) == 1


# not on 10.0.1, whose bindings crashed the process once in many runs of what follows
def test_the_plugin_of_the_page_makes_what_the_bindings_take(world: Any, tmp_path: Path) -> None:
    import sys

    import numpy as np
    import tensorrt as trt

    path, given = page_module(tmp_path), registers(world)
    load(modules=(str(path),))
    assert len(given) == 1
    module = next(made for name, made in sys.modules.items() if name.startswith("trt_engine_plugin_scale_plugin"))
    asked = np.array([2.5], np.float32)
    plugin = module.CREATOR.create_plugin("s", module.fields(asked), trt.TensorRTPhase.BUILD)
    assert plugin.num_outputs == 1
    assert (plugin.plugin_name, plugin.plugin_version) == ("Scale", "1")
    assert plugin.get_output_data_types([trt.DataType.HALF]) == [trt.DataType.HALF]
    copy = plugin.clone()
    assert [(field.name, field.type, list(field.data)) for field in copy.get_fields_to_serialize()] == [
        ("factor", trt.PluginFieldType.FLOAT32, [2.5])
    ]
    tensor = trt.DynamicPluginTensorDesc()
    tensor.desc.type, tensor.desc.format = trt.DataType.FLOAT, trt.TensorFormat.LINEAR
    other = trt.DynamicPluginTensorDesc()
    other.desc.type, other.desc.format = trt.DataType.HALF, trt.TensorFormat.LINEAR
    assert plugin.supports_format_combination(0, [tensor, tensor], 1)
    assert not plugin.supports_format_combination(1, [tensor, other], 1)


@pytest.mark.releases("11.4.0")
def test_what_keeps_a_plugin_from_loading_is_said_by_name(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import ModelError, SetupError

    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('no luck')\n")
    (tmp_path / "libnothing.so").write_bytes(b"not a library")
    for given, modules, kind, words in (
        ((str(tmp_path / "gone.so"),), (), SetupError, "gone.so"),
        ((str(tmp_path / "libnothing.so"),), (), SetupError, "libnothing.so"),
        (("libnowhere_at_all.so",), (), SetupError, "libnowhere_at_all.so"),
        ((), (str(tmp_path / "gone.py"),), SetupError, "gone.py"),
        ((), ("no_such_module_of_plugins",), SetupError, "no_such_module_of_plugins"),
        ((), (str(broken),), ModelError, "no luck"),
    ):
        with pytest.raises(kind, match=re.escape(words)) as caught:
            load(*given, modules=modules)
        assert caught.value.hint


@pytest.mark.releases("10.16.1", "11.4.0")
def test_a_library_is_given_to_the_registry_once_and_its_refusal_is_said(world: Any, tmp_path: Path) -> None:
    import subprocess

    from trt_engine.errors import SetupError

    def library(name: str) -> Path:
        path = tmp_path / name
        source = "void *getCreators(int *n) { *n = 0; return 0; }"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source, text=True, check=True
        )
        return path

    taken, refused = library("libtaken.so"), library("librefused.so")
    taken.with_suffix(".ops").write_text("Scale")
    assert load(str(taken)) == (taken,)
    assert load(str(taken)) == (taken,)
    assert list(world.registry.libraries) == [str(taken)]
    with pytest.raises(SetupError, match="registered already"):
        load(str(refused))

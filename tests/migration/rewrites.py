"""The same construct written in many ways, rewrites.txt: each form must give the finding that the plainest one gives."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from trt_engine.verbs.migrate.rules import RuleSet
from trt_engine.verbs.migrate.run import scan_source
from trt_engine.verbs.migrate.source import Source, file_kind


@dataclass(frozen=True)
class Rewrite:
    """A file that has a construct of a rule in some form."""

    rule: str
    name: str
    form: str
    file: str
    text: str


def _forms() -> dict[str, dict[str, str]]:
    """The forms of each kind: OWNER.MEMBER is a name, MAKE a call that returns an OWNER, TOOL a program."""
    kinds = Path(__file__).with_name("rewrites.txt").read_text().split("==== ")[1:]
    return {
        kind.partition("\n")[0]: {
            form.partition("\n")[0]: form.partition("\n")[2] for form in kind.partition("\n")[2].split("== ")[1:]
        }
        for kind in kinds
    }


_MAKERS = {
    "IBuilderConfig": "thing.create_builder_config()", "INetworkDefinition": "thing.create_network()",
    "ILayer": "network.get_layer(0)", "ITensor": "network.get_input(0)", "Builder": "trt.Builder(log)",
    "OnnxParser": "trt.OnnxParser(net, log)", "Refitter": "trt.Refitter(e, log)",
    "ICudaEngine": "thing.deserialize_cuda_engine(b)", "IExecutionContext": "thing.create_execution_context()",
    "INormalizationLayer": "thing.add_normalization(a, b, c, 1)", "IPluginRegistry": "thing.get_plugin_registry()",
    "IConvolutionLayer": "thing.add_convolution_nd(a, 1, k)", "IPoolingLayer": "thing.add_pooling_nd(a, t, k)",
    "IDeconvolutionLayer": "thing.add_deconvolution_nd(a, 1, k)", "IPaddingLayer": "thing.add_padding_nd(a, b, c)",
}  # fmt: skip
_CPP_HEAD = "#include <NvInfer.h>\n#include <NvOnnxParser.h>\n"
_VALUES = {"--workspace": "=64", "--calib": "=c.bin", "--precisionConstraints": "=obey", "--layerPrecisions": "=*:fp16"}


def rewrites(rules: RuleSet) -> Iterator[Rewrite]:
    """Every name and option of every rule in every form that applies to it."""
    forms = _forms()
    for language, sign in (("python", "."), ("cpp", "::")):
        for name, rule in getattr(rules, language).items():
            yield from _names(rule.id, name, sign, forms)
    for tool, base in (("trtexec", "--onnx=m.onnx"), ("polygraphy", "convert m.onnx")):
        for option, rule in getattr(rules, tool).items():
            for file in [kind for kind in forms if not kind.startswith(("PYTHON", "CPP"))]:
                for form, text in forms[file].items():
                    words = base if '"BASE"' not in text else base.replace(" ", '", "')
                    shown = option + _VALUES.get(option, "")
                    whole = text.replace("BASE", words).replace("OPTION", shown).replace("TOOL", tool)
                    yield Rewrite(rule.id, option, form, file, _as_file(file, whole))


def _names(rule: str, name: str, sign: str, forms: dict[str, dict[str, str]]) -> Iterator[Rewrite]:
    owner, _, member = name.partition(sign)
    python = sign == "."
    if not python and (owner[:1].islower() or (owner.startswith("IPluginV2") and member)):
        return  # functions, and methods that plugins override
    constant = member.isupper() or (not python and member.startswith("k"))
    kind = "CLASSES" if not member else "NAMES" if constant else "MEMBERS"
    for form, text in forms[f"{'PYTHON' if python else 'CPP'}_{kind}"].items():
        made = _MAKERS.get(owner)
        if (made is None and "MAKE" in text) or (member == "destroy" and ("qq.MEMBER" in text or "(*qq)" in text)):
            continue
        whole = text.replace("thing.MAKE", made or "").replace("OWNER", owner).replace("MEMBER", member)
        whole = whole.replace("thing", "network") if (made or "").startswith("network") else whole
        if not python:
            space = "nvonnxparser" if owner == "IParser" else "nvinfer1"
            whole = _CPP_HEAD + whole.replace("ARGS", "0").replace("nvinfer1", space)
        yield Rewrite(rule, name, form, "tool.py" if python else "tool.cpp", whole)


def _as_file(file: str, text: str) -> str:
    if file.endswith(".ipynb"):
        cell = {"cell_type": "code", "source": text.rstrip("\n"), "metadata": {}, "outputs": []}
        return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)
    return {".sh": "#!/bin/sh\n", ".cpp": _CPP_HEAD}.get(PurePath(file).suffix, "") + text


def finds(case: Rewrite, rules: RuleSet) -> bool:
    """Whether the rule has a finding in the file."""
    path = PurePath(case.file)
    kind = file_kind(Path(case.file))
    assert kind is not None
    return any(hit.rule.id == case.rule for hit in scan_source(Source(path, case.text), kind, rules))


def sample(cases: list[Rewrite], count: int, seed: int) -> list[Rewrite]:
    """Some of the cases: of each form at least one."""
    random.Random(seed).shuffle(cases)
    first = {(case.file, case.form): case for case in cases}
    return [*first.values(), *cases[: max(0, count - len(first))]]

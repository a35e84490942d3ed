"""Mistakes put into a copy of our backend, each of which the other tests of this folder must see.

A wrong name, a swapped parameter, a check of a None left out, a precision flag on 11: what reading finds is held to be
found by test_bindings_surface.py's look, what only running finds by the named test, which passes on the backend as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bindings.harness import SOURCE, Bindings
from bindings.worker import Failure, Worker

pytestmark = pytest.mark.slow

BACKEND = Path("trt_engine/backends/tensorrt")
HERE = Path(__file__).resolve().parent
LOOK = """
import json, sys
from pathlib import Path
from bindings import uses
print(json.dumps([uses.problems(Path(folder)) for folder in sys.argv[1:]]))
"""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One text of a module replaced by another."""

    module: str
    right: str
    wrong: str
    said: str = ""
    """What reading says of it, in part."""
    test: tuple[str, str] = ("", "")
    """The file and the test that runs into it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    release: str = "11.4.0"

    def make(self, backend: Path) -> None:
        path = backend / f"{self.module}.py"
        text = path.read_text()
        assert text.count(self.right) == 1, (
            f"`{self.module}.py` has `{self.right}` {text.count(self.right)} times, not once"
        )
        path.write_text(text.replace(self.right, self.wrong))


READ = {
    "a wrong name of a method": Mutation(
        "build", "_create(builder.create_builder_config,", "_create(builder.create_builder_configuration,",
        "`Builder.create_builder_configuration` is not in TensorRT 11.4",
    ),
    "a wrong name on an object two calls away": Mutation(
        "configure", "made.set_shape(name, *span.shapes)", "made.set_shapes(name, *span.shapes)",
        "`IOptimizationProfile.set_shapes` is not in TensorRT 11.4",
    ),
    "a wrong name in the hot path": Mutation(
        "context", "self._native.execute_async_v3", "self._native.execute_async_v4",
        "`IExecutionContext.execute_async_v4` is not in TensorRT 11.4",
    ),
    "a parameter left out": Mutation(
        "timing_cache", "cache.combine(others, False)", "cache.combine(others)", "`ITimingCache.combine` is called with 1",
    ),
    "a parameter of another name": Mutation(
        "timing_cache", "cache.combine(others, False)", "cache.combine(others, ignore=False)",
        "`ITimingCache.combine` is called",
    ),
    "a precision flag": Mutation(
        "configure", "    _SettingsWriter(binding, builder, config, settings).apply()",
        "    _SettingsWriter(binding, builder, config, settings).apply()\n    trt = binding.trt\n"
        "    config.set_flag(binding.trt.BuilderFlag.FP16)",
        "`BuilderFlag.FP16` is not in TensorRT 11.4",
    ),
    "a precision flag, on 10 too": Mutation(
        "configure", "    _SettingsWriter(binding, builder, config, settings).apply()",
        "    _SettingsWriter(binding, builder, config, settings).apply()\n    trt = binding.trt\n"
        "    config.set_flag(binding.trt.BuilderFlag.FP16)",
        "`BuilderFlag.FP16` is used and not in API_TABLE", release="10.16.1",
    ),
    "a flag by its number": Mutation(
        "build", "builder.create_network(binding.strongly_typed_flags())", "builder.create_network(1 << 1)",
        "`Builder.create_network` is given a number",
    ),
    "a method that 11 took out": Mutation(
        "inspector", "engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)",
        "engine.create_execution_context_without_device_memory()", "create_execution_context_without_device_memory",
    ),
    "a name of 10.1 on 10.0": Mutation(
        "build", 'binding.has_api("ICudaEngine.device_memory_size_v2")',
        'binding.has_api("ICudaEngine.device_memory_size_v3")',
        '"ICudaEngine.device_memory_size_v3" is not in API_TABLE', release="10.0.1",
    ),
    "a callback that takes too little": Mutation(
        "build_progress", "def phase_finish(self, phase_name: str)", "def phase_finish(self)",
        "`BuildProgress.phase_finish` does not take",
    ),
    "a callback TensorRT does not know": Mutation(
        "build_progress", "def step_complete(", "def step_completed(", "has no `step_complete`",
    ),
}  # fmt: skip

_BUILD, _RUN = "test_bindings_build.py", "test_bindings_run.py"

RUN = {
    "nothing is not looked for where an object is made": Mutation(
        "build", "    if made is None:\n        raise logger.make_error(action, kind)\n", "",
        test=(_BUILD, "test_nothing_where_an_object_was_expected_is_an_error_in_words"),
        arguments={"member": "Builder.create_network"},
    ),
    "nothing is not looked for where the plan is made": Mutation(
        "build", "done = plan is not None", "done = True",
        test=(_BUILD, "test_nothing_where_an_object_was_expected_is_an_error_in_words"),
        arguments={"member": "Builder.build_serialized_network"},
    ),
    "a parser's no is not heard": Mutation(
        "onnx_parser", "if not parser.parse(raw, str(path.absolute())):",
        "if parser.parse(raw, str(path.absolute())) is None:",
        test=(_BUILD, "test_parser_errors_name_node_operator_and_reason"), release="10.16.1",
    ),
    "two parameters are swapped": Mutation(
        "configure", "config.set_memory_pool_limit(pool, size)", "config.set_memory_pool_limit(size, pool)",
        test=(_BUILD, "test_a_build_is_strongly_typed_proved_and_sealed"),
    ),
    "the ends of a profile are swapped": Mutation(
        "configure", "made.set_shape(name, *span.shapes)", "made.set_shape(name, *reversed(span.shapes))",
        test=(_BUILD, "test_a_build_is_strongly_typed_proved_and_sealed"), release="10.16.1",
    ),
    "a precision flag is set behind a name nobody reads": Mutation(
        "configure", "(binding, builder, config, settings).apply()",
        '(binding, builder, config, settings).apply()\n    trt = binding.trt\n'
        '    config.set_flag(getattr(binding.trt.BuilderFlag, "FP" + "16"))',
        test=(_BUILD, "test_a_build_is_strongly_typed_proved_and_sealed"),
    ),
    "the same on 10": Mutation(
        "configure", "(binding, builder, config, settings).apply()",
        '(binding, builder, config, settings).apply()\n    trt = binding.trt\n'
        '    config.set_flag(getattr(binding.trt.BuilderFlag, "FP" + "16"))',
        test=(_BUILD, "test_a_build_is_strongly_typed_proved_and_sealed"), release="10.16.1",
    ),
    "a setter is believed": Mutation(
        "configure", "    if applied != requested:", "    if False:",
        test=(_BUILD, "test_a_setter_that_does_nothing_is_found_by_reading_back"),
        arguments={"member": "IBuilderConfig.max_aux_streams="},
    ),
    "a timing cache of another GPU is taken": Mutation(
        "timing_cache", "if self._native is not None and config.set_timing_cache(self._native, False):",
        "if self._native is not None and config.set_timing_cache(self._native, True):",
        test=(_BUILD, "test_a_cache_of_another_identity_is_refused_said_and_replaced"), arguments={"wrong": "device"},
    ),
    "others' timings are overwritten": Mutation(
        "timing_cache", "if now and (others is None or not cache.combine(others, False)):", "if now and others is None:",
        test=(_BUILD, "test_what_another_process_timed_meanwhile_is_kept"),
    ),
    "the monitor never says stop": Mutation(
        "build_progress", "return not (self._stop.is_set() or self.error is not None)", "return True",
        test=(_BUILD, "test_ctrl_c_ends_a_build_at_its_next_step_and_leaves_nothing"),
    ),
    "an inference goes to the default stream": Mutation(
        "context", "self._execute(stream.handle)", "self._execute(0)",
        test=(_RUN, "test_each_inference_goes_to_the_stream_it_is_given"),
    ),
    "a refused shape is not heard": Mutation(
        "context", "if not self._native.set_input_shape(name, tuple(shape)):",
        "if self._native.set_input_shape(name, tuple(shape)) is None:",
        test=(_RUN, "test_shapes_are_refused_by_us_first_and_then_in_tensorrts_words"), release="10.16.1",
    ),
    "host code is allowed to everybody": Mutation(
        "deserialize", "    runtime.engine_host_code_allowed = settings.allow_host_code",
        "    runtime.engine_host_code_allowed = True",
        test=(_RUN, "test_host_code_runs_only_after_an_explicit_yes"), release="10.16.1",
    ),
    "an error keeps the engine alive longer than its memory": Mutation(
        "run", "            clear_frames(error)\n", "",
        test=(_RUN, "test_a_plan_that_is_not_its_passports_is_found_before_it_computes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("release", sorted({mutation.release for mutation in READ.values()}))
def test_reading_finds_every_mistake(bindings: Callable[[str], Bindings], tmp_path: Path, release: str) -> None:
    """All of a release in one process: what costs is the beginning."""
    mutations = {name: mutation for name, mutation in READ.items() if mutation.release == release}
    folders = [tmp_path / str(number) for number in range(len(mutations))]
    for mutation, folder in zip(mutations.values(), folders, strict=True):
        shutil.copytree(SOURCE / BACKEND, folder, ignore=shutil.ignore_patterns("__pycache__"))
        mutation.make(folder)
    done = bindings(release).run(LOOK, *map(str, folders), timeout_s=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(zip(mutations, json.loads(done.stdout), strict=True))
    assert {
        name: found[name] for name, it in mutations.items() if not any(it.said in line for line in found[name])
    } == {}


@pytest.mark.parametrize("name", RUN)
def test_running_finds(
    bindings: Callable[[str], Bindings], workers: Callable[[str], Worker], tmp_path: Path, name: str
) -> None:
    mutation = RUN[name]
    file, function = mutation.test
    shutil.copytree(SOURCE, tmp_path / "src")  # with what is compiled: only the mutated module is compiled again
    mutation.make(tmp_path / "src" / BACKEND)
    places = [tmp_path / "right", tmp_path / "wrong"]
    for place in places:
        place.mkdir()
    workers(mutation.release).run(HERE / file, function, mutation.arguments, places[0])
    mutated = Worker(bindings(mutation.release), tmp_path / "src")
    try:
        with pytest.raises(Failure):
            mutated.run(HERE / file, function, mutation.arguments, places[1])
    finally:
        mutated.close()

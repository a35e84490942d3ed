"""Settings: what people type is read as they mean it, and refused with what to type instead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.command_line import options
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.parse import parse_batch, parse_options, parse_shapes
from trt_engine.config.profiles import ShapeRange, parse_profile, profile_for
from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.config.settings import from_values, opt, settings, to_argv
from trt_engine.errors import ProfileError, ShapeError, TrtEngineError, UsageError
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.units import parse_duration, parse_size
from trt_engine.verbs.size.config import SizeConfig

IMAGES = TensorSpec("images", "float32", (-1, 3, -1, -1), ("batch", None, "height", "width"))
SIGNATURE = Signature((IMAGES,), ())

# ------------------------------------------------------------------------------------------------ sizes and durations


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("32768MiB", 32768 << 20),  # trtexec reads this one as 32768 bytes
        ("32GiB", 32 << 30),
        ("32G", 32 << 30),
        ("32 gb", 32 << 30),
        ("512M", 512 << 20),
        ("4096K", 4096 << 10),
        ("1024B", 1024),
        ("1T", 1 << 40),
        ("0.5GiB", 1 << 29),
        ("64", 64 << 20),
        (64, 64 << 20),
        ("0", 0),
    ],
)
def test_a_size_is_read_in_base_two_and_a_bare_number_is_mib(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200ms", 0.2),
        ("0.2s", 0.2),
        (".2", 0.2),
        ("10", 10),
        (10, 10),
        ("2min", 120),
        ("2m", 120),
        ("1.5h", 5400),
        ("30d", 2_592_000),
        ("250us", 0.00025),
        ("0", 0),
    ],
)
def test_a_duration_is_read_with_its_unit_and_a_bare_number_is_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


# ------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    "text",
    [
        "images:1x3x640x640,scale:2",  # trtexec
        "images:[1,3,640,640],scale:[2]",  # Polygraphy
        "images:[1, 3, 640, 640] scale:[2]",
        "images:1,3,640,640,scale:2",  # perf_analyzer, joined
        "images:1x3x640x640 scale:2",
        "images:1x3x640x640; scale:2",
        "images: 1x3x640x640 , scale: 2",
        "'images':1*3*640*640,\"scale\":2",
    ],
)
def test_the_four_spellings_of_shapes_mean_the_same(text: str) -> None:
    assert parse_shapes(text) == {"images": (1, 3, 640, 640), "scale": (2,)}


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("Input:0:1x3", {"Input:0": (1, 3)}),
        ("ns/Input:0:1x3,ns/Input:1:4", {"ns/Input:0": (1, 3), "ns/Input:1": (4,)}),
        ("'Input:0':1x3", {"Input:0": (1, 3)}),
        ("'a,b c':1x3", {"a,b c": (1, 3)}),
        ("0:1x3,1:2", {"0": (1, 3), "1": (2,)}),
        ("x[0]:1x3", {"x[0]": (1, 3)}),
        ("scale:", {"scale": ()}),
        ("scale:scalar", {"scale": ()}),
        ("scale:,x:2", {"scale": (), "x": (2,)}),
        ("x:0x3", {"x": (0, 3)}),
        ("x:-1x3", {"x": (-1, 3)}),
    ],
)
def test_names_with_colons_quotes_digits_and_brackets_and_scalars_are_read(text: str, shapes: object) -> None:
    assert parse_shapes(text) == shapes


@pytest.mark.parametrize(
    "text",
    ["", "images", "1x3x640x640", "images:1x", "images:axb", ":1x3", "'':1x3", "x:1x3,", "x:[1,3", "x:1_0", "x:1.5"],
)
def test_shapes_nobody_can_read_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the shape") as caught:
        parse_shapes(text)
    assert caught.value.hint == "write shapes as `images:1x3x640x640`, several with commas"


shapes = st.lists(st.integers(0, 4096), min_size=1, max_size=5).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> ShapeRange:
    sizes = [
        sorted(draw(st.lists(st.integers(0, 4096), min_size=3, max_size=3))) for _ in range(draw(st.integers(1, 4)))
    ]
    low, best, high = zip(*sizes, strict=True)
    return ShapeRange(low, best, high)


# ------------------------------------------------------------------------------------------------ batch and options


@pytest.mark.parametrize(
    ("text", "batch"), [("1:8:64", (1, 8, 64)), ("8", (8, 8, 8)), (8, (8, 8, 8)), ((1, 2, 4), (1, 2, 4))]
)
def test_a_batch_range_is_min_opt_max_and_one_number_is_all_three(text: object, batch: object) -> None:
    assert parse_batch(text) == batch  # type: ignore[arg-type]


def test_options_are_name_value_pairs_and_the_first_equals_sign_parts_them() -> None:
    assert parse_options(["intra-op-threads=2", "path = a=b "]) == {"intra_op_threads": "2", "path": "a=b"}


# ------------------------------------------------------------------------------------------------ profiles


@pytest.mark.parametrize(
    ("low", "best", "high", "what"),
    [
        ((1, 3), (1,), (1, 3), "differ in rank"),
        ((2, 3), (1, 3), (4, 3), "dimension 0 is 2, 1, 4"),
        ((1, 3), (4, 3), (2, 3), "dimension 0 is 1, 4, 2"),
        ((-1, 3), (1, 3), (2, 3), "have the size -1"),
    ],
)
def test_a_range_that_contradicts_itself_is_a_profile_error(
    low: tuple[int, ...], best: tuple[int, ...], high: tuple[int, ...], what: str
) -> None:
    with pytest.raises(ProfileError, match=what) as caught:
        ShapeRange(low, best, high)
    assert caught.value.hint


def test_a_feed_outside_a_profile_says_how_to_rebuild_and_that_line_works() -> None:
    class Feed:
        shape = (16, 3)

    profile = parse_profile("x:2x3,4x3,8x3")
    with pytest.raises(ProfileError, match="input `x` is 16x3, profile 1 spans 2x3 to 8x3") as caught:
        profile.check({"x": Feed()}, index=1)
    assert caught.value.hint == "rebuild with `--profile x:2x3,4x3,16x3`"
    assert parse_profile(caught.value.hint.split("`")[1].removeprefix("--profile ")).ranges["x"].contains((16, 3))


@given(ranges(), st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_a_range_holds_exactly_what_lies_between_its_ends(span: ShapeRange, shape: list[int]) -> None:
    between = len(shape) == len(span.min) and all(
        a <= b <= c for a, b, c in zip(span.min, shape, span.max, strict=True)
    )
    assert span.contains(shape) == between
    assert span.contains(span.min) and span.contains(span.opt) and span.contains(span.max)


def test_height_and_width_nobody_gave_stop_with_the_exact_option_to_add() -> None:
    with pytest.raises(ShapeError) as caught:
        profile_for(SIGNATURE, batch=(1, 8, 64))
    assert (
        caught.value.message
        == "input `images` is batchx3xheightxwidth: dimension 2 (height) and 3 (width) must be given"
    )
    assert caught.value.hint == "add `--shapes images:1x3x640x640` with the sizes this model expects"
    typed = caught.value.hint.split("`")[1].removeprefix("--shapes ")
    made = profile_for(SIGNATURE, batch=(1, 8, 64), shapes=parse_shapes(typed))
    assert str(made) == "images:1x3x640x640,8x3x640x640,64x3x640x640"


def test_a_batch_for_a_model_whose_batch_is_fixed_is_refused_not_ignored() -> None:
    fixed = Signature((TensorSpec("x", "float32", (4, 3)),), ())
    with pytest.raises(ShapeError, match="its batch is fixed at 4") as caught:
        profile_for(fixed, batch=(1, 8, 64))
    assert caught.value.hint == "leave `--batch` out (or `--batch 4`), or export the model with a dynamic batch"
    assert str(profile_for(fixed, batch=(4, 4, 4))) == "x:4x3,4x3,4x3"
    assert str(profile_for(fixed)) == "x:4x3,4x3,4x3"


def test_a_batch_moves_the_inputs_that_can_move_and_leaves_the_others() -> None:
    both = Signature((TensorSpec("x", "float32", (-1, 3)), TensorSpec("scale", "float32", (1,))), ())
    assert str(profile_for(both, batch=(1, 2, 4))) == "x:1x3,2x3,4x3 scale:1,1,1"


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "given", [{"shapes": {"x": (4, 9)}}, {"profiles": (parse_profile("x:1x9,4x9,6x9"),)}, {"batch": (1, 4, 6)}], ids=str
)
def test_a_dimension_moves_with_the_given_one_of_its_symbol(axis: int, given: dict[str, Any]) -> None:
    sizes, symbols = [8, 8], list[str | None]([None, None])
    sizes.insert(axis, -1)
    symbols.insert(axis, "N")
    state = TensorSpec("state", "float32", tuple(sizes), tuple(symbols))
    x, lens = TensorSpec("x", "float32", (-1, 9), ("N", None)), TensorSpec("lens", "int64", (-1,), ("N",))
    (made,) = BuildConfig(**given).resolve(Signature((state, x, lens), ()))
    assert list(made.ranges) == ["state", "x", "lens"]
    for end, batch in enumerate((4, 4, 4) if "shapes" in given else (1, 4, 6)):
        assert made.ranges["state"].shapes[end][axis] == made.ranges["lens"].shapes[end][0] == batch


def test_resolving_fills_in_the_inputs_a_profile_leaves_out_in_the_models_order() -> None:
    both = Signature((TensorSpec("mask", "bool", (-1, 8)), IMAGES), ())
    config = BuildConfig(profiles=(parse_profile("images:1x3x64x64,2x3x64x64,4x3x64x64"),))
    (made,) = config.resolve(both)
    assert str(made) == "mask:1x8,2x8,4x8 images:1x3x64x64,2x3x64x64,4x3x64x64", "one batch"


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        (
            BuildConfig(profiles=(parse_profile("images:1x3x64x64"),), batch=(1, 2, 4)),
            "`--profile` and `--batch` contradict each other",
            "give one of them",
        ),
        (
            BuildConfig(profiles=(parse_profile("image:1x3x64x64"),)),
            "unknown input `image`",
            "did you mean `images`?",
        ),
        (
            BuildConfig(profiles=(parse_profile("images:1x4x64x64"),)),
            "`--profile images:1x4x64x64` does not fit input `images`, which is batchx3xheightxwidth",
            "`--profile images:1x3x640x640`",
        ),
        (
            BuildConfig(profiles=(parse_profile("images:1x3x64x64"),), shapes={"images": (1, 3, 64, 64)}),
            "input `images` has both a `--profile` and a `--shapes`",
            "a profile has min, opt and max: leave `--shapes` out for this input",
        ),
        (
            BuildConfig(profiles=(parse_profile("images:1x3x64x64"),), shapes={"imagse": (1,)}),
            "unknown input `imagse`",
            "did you mean `images`?",
        ),
        (
            BuildConfig(),
            "input `images` is batchx3xheightxwidth: dimension 2 (height) and 3 (width) must be given",
            "add `--shapes images:1x3x640x640` with the sizes this model expects",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_say_what_to_type(config: BuildConfig, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.resolve(SIGNATURE)
    assert (caught.value.message, caught.value.hint) == (message, hint)


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize("config", [BuildConfig, RuntimeConfig, BenchConfig, SizeConfig])
def test_every_setting_has_a_help_and_flags_that_no_other_setting_of_its_verb_has(config: type) -> None:
    found = settings(config)
    flags = [flag for item in found for flag in item.flags]
    assert len(set(flags)) == len(flags)
    for item in found:
        assert item.help and not item.help.endswith(("?", "!"))
        assert all(flag.startswith("-") for flag in item.flags)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (SizeConfig, {"fps": 0}, "`--fps` is 0, expected 0.001 or more"),
        (SizeConfig, {"fps": math.nan}, "`--fps` is nan, expected 0.001 or more"),
        (SizeConfig, {"fps": math.inf}, "`--fps` is inf, expected 0.001 or more"),
        (SizeConfig, {"max_batch": 0}, "`--max-batch` is 0, expected 1 or more"),
        (SizeConfig, {"start_batch": -4}, "`--start-batch` is -4, expected 1 or more"),
        (BenchConfig, {"batch": 0}, "`--batch` is 0, expected 1 or more"),
        (BenchConfig, {"iterations": 0}, "`--iterations` is 0, expected 1 or more"),
        (RuntimeConfig, {"contexts": 0}, "`--contexts` is 0, expected 1 or more"),
        (BuildConfig, {"parity_rtol": -1e-3}, "`--parity-rtol` is -0.001, expected more than 0"),
    ],
)
def test_a_number_outside_its_limits_is_refused_from_the_shell_and_from_python(
    config: type, values: dict[str, float], message: str
) -> None:
    for make in (lambda: config(**values), lambda: from_values(config, values)):
        with pytest.raises(UsageError) as caught:
            make()
        assert caught.value.message == message


def test_values_from_a_file_or_a_call_are_parsed_as_flags_are() -> None:
    made = from_values(
        BenchConfig,
        {"duration_s": "200ms", "shapes": "x:1x3", "percentiles": "50,99", "inputs": "a.npz", "batch": None},
    )
    assert made == BenchConfig(duration_s=0.2, shapes={"x": (1, 3)}, percentiles=(50.0, 99.0), inputs=Path("a.npz"))
    assert from_values(BuildConfig, {"workspace_mib": "32768MiB"}).workspace_mib == 32768
    assert from_values(BuildConfig, {"options": ["a-b=1"], "providers": "cuda, cpu"}) == BuildConfig(
        options={"a_b": "1"}, providers=("cuda", "cpu")
    )


def test_an_unknown_setting_and_an_unknown_choice_name_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown setting `durations_s`") as caught:
        from_values(BenchConfig, {"durations_s": 1})
    assert caught.value.hint == "did you mean `duration_s`?"
    with pytest.raises(UsageError, match="`precision` cannot be `fp61`") as caught:
        from_values(BuildConfig, {"precision": "fp61"})
    assert caught.value.hint == "did you mean `fp16`?"
    with pytest.raises(UsageError, match="percentiles"):
        from_values(BenchConfig, {"percentiles": "101"})


@dataclass(frozen=True)
class Knobs:
    threads: int = opt(0, "threads of one operator", ge=0)
    ratio: float = opt(1.0, "a ratio")
    spin: bool = opt(False, "wait by spinning")


def test_a_backends_own_settings_are_numbers_and_switches_though_the_shell_gives_text() -> None:
    assert from_values(Knobs, {"threads": "2", "ratio": "0.5", "spin": "on"}) == Knobs(2, 0.5, True)
    for values in ({"threads": "two"}, {"ratio": "half"}, {"spin": "maybe"}, {"threads": "-1"}):
        with pytest.raises(UsageError) as caught:
            from_values(Knobs, values)
        assert caught.value.hint


def test_the_key_has_what_makes_engines_different_and_nothing_else() -> None:
    key = BuildConfig().key()
    assert {"precision", "profiles", "batch", "options", "workspace_mib"} <= set(key)
    assert not {"parity", "parity_rtol"} & set(key)
    assert BuildConfig(parity=False).key() == key != BuildConfig(precision="fp16").key()


def test_every_usage_error_of_the_parsers_has_exit_code_two() -> None:
    for call in (
        lambda: parse_size("x"),
        lambda: parse_batch("x"),
        lambda: parse_shapes("x"),
        lambda: parse_batch("2:1:1"),
    ):
        with pytest.raises(TrtEngineError) as caught:
            call()
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "config",
    [
        BuildConfig(),
        BuildConfig(
            batch=(1, 8, 64), precision="fp16", workspace_mib=512, providers=("cuda", "cpu"), parity=False,
            options={"intra_op_threads": "2", "b": "x y"}, parity_rtol=0.05,
        ),
        BuildConfig(shapes={"a b": (1, 3), "it's": (2,)}),
        BuildConfig(profiles=(parse_profile("x:1x3,2x3,4x3 'y:0':1,2,4"), parse_profile("x:4x3,8x3,9x3"))),
        SizeConfig(duration_s=1234567.0, warmup_s=0.2, memory_limit=3_000_000_001, min_streams=4, scan=True),
        BenchConfig(transfers=False, graph=True, percentiles=(50.0, 99.9), idle_s=1e-4),
    ],
)  # fmt: skip
def test_a_config_written_as_words_is_read_back_as_it_was(config: object) -> None:
    import click

    @click.command()
    @options.config_options(type(config))
    def verb(**values: object) -> None:
        read.append(options.config_from(type(config), values))

    read: list[object] = []
    verb.main(to_argv(config), standalone_mode=False)
    assert read == [config]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_batch": 2.5}, "`max_batch` is 2.5, expected a whole number"),
        ({"max_batch": True}, "`max_batch` is True, expected a whole number"),
        ({"max_wait_ms": "soon"}, "`max_wait_ms` is 'soon', expected a number"),
        ({"buckets": 5}, "`buckets` is 5, expected whole numbers"),
        ({"buckets": (0, 4)}, "`0` is less than 1"),
    ],
)
def test_a_number_that_is_none_is_refused_where_the_config_is_made(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Batching(**settings)


@pytest.mark.parametrize("settings", [{"options": 5}, {"providers": 5}, {"providers": [1]}])
def test_what_are_no_names_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot read the"):
        from_values(RuntimeConfig, settings)

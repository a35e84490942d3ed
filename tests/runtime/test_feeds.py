"""Feeds from seeds and files."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.errors import FeedError, ModelError, ProfileError, SetupError, ShapeError, UsageError
from trt_engine.runtime.feeds import numpy_dtype, random_feeds, read_feeds, shapes_of, write_outputs
from trt_engine.tensors import DTYPES, Signature, TensorSpec

IMAGES = TensorSpec("images", "float32", (-1, 3, 4, 4), ("batch", None, None, None))
ONE = Signature((IMAGES,), ())
TWO = Signature((IMAGES, TensorSpec("sizes", "int64", (-1, 2), ("batch", None))), ())
OPEN = Signature((TensorSpec("tokens", "int64", (-1, -1), ("batch", "length")),), ())
PROFILE = Profile({"images": ShapeRange((1, 3, 4, 4), (2, 3, 4, 4), (8, 3, 4, 4))})


# ------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(("which", "rows"), [("min", 1), ("opt", 2), ("max", 8)])
def test_shapes_come_from_the_profile(which: str, rows: int) -> None:
    assert shapes_of(ONE, PROFILE, which=which) == {"images": (rows, 3, 4, 4)}


def test_a_batch_moves_the_first_dimension_of_every_input() -> None:
    assert shapes_of(TWO, None, batch=5) == {"images": (5, 3, 4, 4), "sizes": (5, 2)}


def test_without_a_profile_an_open_batch_is_one() -> None:
    assert shapes_of(ONE, None) == {"images": (1, 3, 4, 4)}


def test_a_given_shape_wins() -> None:
    assert shapes_of(OPEN, None, overrides={"tokens": (2, 7)}) == {"tokens": (2, 7)}


def test_an_open_size_nobody_gave_is_refused_with_the_option_to_add() -> None:
    with pytest.raises(ShapeError, match=r"`tokens` is batchxlength.*\n.*--shapes tokens:1x128"):
        shapes_of(OPEN, None)


@pytest.mark.parametrize("shape", [(2,), (2, 3, 4, 5), (2, 4, 4, 4), (-1, 3, 4, 4)])
def test_a_given_shape_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="does not fit input `images`"):
        shapes_of(ONE, None, overrides={"images": shape})


def test_a_batch_outside_the_profile_is_refused() -> None:
    with pytest.raises(ProfileError, match="9x3x4x4"):
        shapes_of(ONE, PROFILE, batch=9)


def test_a_batch_for_a_model_of_fixed_batch_is_refused() -> None:
    fixed = Signature((TensorSpec("x", "float32", (1, 3)),), ())
    assert shapes_of(fixed, None, batch=1) == {"x": (1, 3)}
    with pytest.raises(ShapeError, match="no input of this model has a dynamic batch"):
        shapes_of(fixed, None, batch=2)


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(ShapeError, match="cannot be 0"):
        shapes_of(ONE, None, batch=0)


def test_a_batch_against_a_given_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match="`--shapes` gives another"):
        shapes_of(ONE, None, batch=2, overrides={"images": (1, 3, 4, 4)})


def test_a_shape_for_an_unknown_input_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean `images`"):
        shapes_of(ONE, None, overrides={"image": (1, 3, 4, 4)})


# ------------------------------------------------------------------------------------------------ random


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_has_random_values_of_its_own_type(name: str) -> None:
    signature = Signature((TensorSpec("x", name, (-1, 3)),), ())
    feeds = random_feeds(signature, {"x": (4, 3)})
    assert feeds["x"].dtype == numpy_dtype(name)
    signature.check(feeds)


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_index_inputs_are_safe(name: str) -> None:
    values = random_feeds(Signature((TensorSpec("x", name, (-1,)),), ()), {"x": (1000,)})["x"]
    assert set(values.tolist()) == {0, 1}


def test_floats_lie_between_zero_and_one() -> None:
    values = random_feeds(ONE, {"images": (8, 3, 4, 4)})["images"]
    assert 0 <= values.min() < 0.1
    assert 0.9 < values.max() < 1


def test_the_same_seed_gives_the_same_array_and_another_seed_another() -> None:
    shapes = {"images": (2, 3, 4, 4)}
    assert np.array_equal(random_feeds(ONE, shapes)["images"], random_feeds(ONE, shapes)["images"])
    assert not np.array_equal(random_feeds(ONE, shapes)["images"], random_feeds(ONE, shapes, seed=1)["images"])


def test_a_row_is_the_same_in_every_batch_and_beside_every_other_input() -> None:
    alone = random_feeds(ONE, {"images": (2, 3, 4, 4)})["images"]
    beside = random_feeds(TWO, {"images": (7, 3, 4, 4), "sizes": (7, 2)})["images"]
    assert np.array_equal(alone, beside[:2])


# ------------------------------------------------------------------------------------------------ files


def test_an_npy_feeds_a_model_of_one_input(tmp_path: Path) -> None:
    x = np.ones((2, 3, 4, 4), np.float32)
    np.save(tmp_path / "x.npy", x)
    assert np.array_equal(read_feeds(tmp_path / "x.npy", ONE)["images"], x)


def test_an_npy_cannot_feed_two_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 3, 4, 4), np.float32))
    with pytest.raises(FeedError, match="2 inputs: `images`, `sizes`"):
        read_feeds(tmp_path / "x.npy", TWO)


def test_an_npz_feeds_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=np.ones((2, 3, 4, 4), np.float32), sizes=np.ones((2, 2), np.int64))
    assert set(read_feeds(tmp_path / "x.npz", TWO)) == {"images", "sizes"}


def test_fortran_order_and_foreign_byte_order_are_read_as_the_same_values(tmp_path: Path) -> None:
    x = np.arange(96, dtype=np.float32).reshape(2, 3, 4, 4)
    np.save(tmp_path / "x.npy", np.asfortranarray(x.astype(">f4")))
    read = read_feeds(tmp_path / "x.npy", ONE)["images"]
    assert read.flags.c_contiguous
    assert read.dtype.isnative
    assert np.array_equal(read, x)


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"images": 1}))


def write_objects(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def write_objects_in_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, images=np.array([{"a": 1}], dtype=object))


def write_short_npy(path: Path) -> None:
    np.save(path, np.ones((2, 3, 4, 4), np.float32))
    path.write_bytes(path.read_bytes()[:-100])


def write_short_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, images=np.ones((2, 3, 4, 4), np.float32))
    path.write_bytes(path.read_bytes()[:-40])


def write_flipped_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, images=np.random.default_rng(0).random((2, 3, 4, 4), np.float32))
    raw = bytearray(path.read_bytes())
    raw[200] ^= 0xFF
    path.write_bytes(raw)


def write_huge_header(path: Path) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 60, 3, 4, 4)}
        )


def write_text_in_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images", "hello")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (write_pickle, "neither .npy nor .npz"),
        (write_objects, "pickled objects"),
        (write_objects_in_npz, "pickled objects"),
        (write_short_npy, "damaged"),
        (write_short_npz, "damaged"),
        (write_flipped_npz, "damaged"),
        (write_huge_header, "damaged"),
        (write_text_in_zip, "not an array"),
        (lambda path: path.write_bytes(b""), "neither .npy nor .npz"),
        (lambda path: path.write_text("1 2 3"), "neither .npy nor .npz"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: None, "no such file"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, write: object, says: str) -> None:
    path = tmp_path / "x.npy"
    write(path)
    with pytest.raises(FeedError, match=says):
        read_feeds(path, ONE)


def test_a_wrong_name_in_an_npz_names_the_nearest(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", image=np.ones((2, 3, 4, 4), np.float32))
    with pytest.raises(FeedError, match="did you mean `images`"):
        read_feeds(tmp_path / "x.npz", ONE)


@pytest.mark.parametrize(
    "array", [np.ones((2, 3, 4, 4), np.float64), np.ones((3, 4, 4), np.float32), np.ones((2, 3, 4, 5), np.float32)]
)
def test_types_and_shapes_are_checked_and_never_converted(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(FeedError, match="`images`"):
        read_feeds(tmp_path / "x.npy", ONE)


@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPES[name].bits != 0])
def test_outputs_written_are_inputs_read(tmp_path: Path, name: str) -> None:
    signature = Signature((TensorSpec("x", name, (-1, 3)),), ())
    feeds = random_feeds(signature, {"x": (4, 3)})
    for suffix in ("npy", "npz"):
        path = write_outputs(tmp_path / f"y.{suffix}", feeds)
        again = read_feeds(path, signature)["x"]
        assert again.dtype == feeds["x"].dtype
        assert again.tobytes() == feeds["x"].tobytes()


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5), min_size=1))
def test_strings_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    signature = Signature((TensorSpec("x", "string", (-1,)),), ())
    path = write_outputs(tmp_path_factory.mktemp("s") / "y.npz", {"x": np.array(words, dtype=object)})
    assert read_feeds(path, signature)["x"].tolist() == words


@pytest.mark.parametrize("name", ["file", "arr_0", "a/b:0", "allow_pickle"])
def test_an_output_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = write_outputs(tmp_path / "y.npz", {name: np.ones(3, np.float32)})
    with np.load(path) as archive:
        assert archive[name].tolist() == [1, 1, 1]


def test_a_scalar_output_stays_a_scalar(tmp_path: Path) -> None:
    assert np.load(write_outputs(tmp_path / "y.npy", {"y": np.float32(2)})).shape == ()


def test_two_outputs_do_not_fit_an_npy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there are 2: `a`, `b`"):
        write_outputs(tmp_path / "y.npy", {"a": np.ones(1), "b": np.ones(1)})
    assert not list(tmp_path.iterdir())


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.npz or \.npy"):
        write_outputs(tmp_path / "y.csv", {"a": np.ones(1)})


def test_a_place_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="a file is in the way"):
        write_outputs(tmp_path / "file" / "y.npz", {"a": np.ones(1)})


def test_an_input_that_no_memory_holds_is_refused_before_it_is_drawn() -> None:
    deep = TensorSpec("x", "float32", (1,) * 100_000)
    with pytest.raises(ModelError, match="100000 dimensions"):
        random_feeds(Signature((deep,), ()), {"x": deep.shape})
    wide = TensorSpec("x", "float32", (1 << 61, 2))
    with pytest.raises(ModelError, match="bytes, more than"):
        random_feeds(Signature((wide,), ()), {"x": wide.shape})
    with pytest.raises(ShapeError, match="does not fit in memory"):
        random_feeds(Signature((TensorSpec("x", "float32", (-1, -1)),), ()), {"x": (1 << 31, 1 << 31)})

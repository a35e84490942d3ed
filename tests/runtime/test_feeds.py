"""Feeds from seeds and files."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.errors import FeedError, ModelError, ProfileError, ShapeError
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


# ------------------------------------------------------------------------------------------------ random


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_has_random_values_of_its_own_type(name: str) -> None:
    signature = Signature((TensorSpec("x", name, (-1, 3)),), ())
    feeds = random_feeds(signature, {"x": (4, 3)})
    assert feeds["x"].dtype == numpy_dtype(name)
    signature.check(feeds)


def test_the_same_seed_gives_the_same_array_and_another_seed_another() -> None:
    shapes = {"images": (2, 3, 4, 4)}
    assert np.array_equal(random_feeds(ONE, shapes)["images"], random_feeds(ONE, shapes)["images"])
    assert not np.array_equal(random_feeds(ONE, shapes)["images"], random_feeds(ONE, shapes, seed=1)["images"])


def test_a_row_is_the_same_in_every_batch_and_beside_every_other_input() -> None:
    alone = random_feeds(ONE, {"images": (2, 3, 4, 4)})["images"]
    beside = random_feeds(TWO, {"images": (7, 3, 4, 4), "sizes": (7, 2)})["images"]
    assert np.array_equal(alone, beside[:2])


# ------------------------------------------------------------------------------------------------ files


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


def test_an_input_that_no_memory_holds_is_refused_before_it_is_drawn() -> None:
    deep = TensorSpec("x", "float32", (1,) * 100_000)
    with pytest.raises(ModelError, match="100000 dimensions"):
        random_feeds(Signature((deep,), ()), {"x": deep.shape})
    wide = TensorSpec("x", "float32", (1 << 61, 2))
    with pytest.raises(ModelError, match="bytes, more than"):
        random_feeds(Signature((wide,), ()), {"x": wide.shape})
    with pytest.raises(ShapeError, match="does not fit in memory"):
        random_feeds(Signature((TensorSpec("x", "float32", (-1, -1)),), ()), {"x": (1 << 31, 1 << 31)})


def test_an_npy_cannot_feed_two_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 3, 4, 4), np.float32))
    with pytest.raises(FeedError, match="2 inputs: `images`, `sizes`"):
        read_feeds(tmp_path / "x.npy", TWO)

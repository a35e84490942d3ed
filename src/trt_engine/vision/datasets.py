"""Image datasets: COCO annotations, one folder per class, arrays, or images without labels.

`open_dataset` lists and checks; a `Reader` decodes batch by batch, in one order, skips what is damaged and keeps count.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec
import numpy as np

from trt_engine.arrayfiles import Array, ArrayFileError, ArrayHeader, open_arrays
from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.errors import UsageError
from trt_engine.tensors import format_shape
from trt_engine.vision.preprocess import BadImage, Placement, Preprocessor, image_from_array, read_image, require_pillow

log = logging.getLogger(__name__)

_SUFFIXES = frozenset(".jpg .jpeg .png .bmp .webp .tif .tiff .ppm .pgm".split())
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Category:
    """One category of the annotations."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """One annotated object; `bbox` is x, y, width, height in image pixels."""

    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    area: float | None = None
    iscrowd: int | bool = 0


@dataclass(frozen=True, slots=True)
class DatasetImage:
    """One image of a dataset."""

    name: str
    """Inside the dataset, the same on every machine."""
    image_id: int
    path: Path | None = None
    """Path of its file; None for a row of an array."""
    label: int | None = None
    """Index into the dataset's `labels`, or the class itself for arrays."""
    size: tuple[int, int] | None = None
    """Width and height by the annotations."""


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """An image that was left out, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset on disk; no image is decoded yet."""

    kind: Literal["coco", "folders", "arrays", "pictures"]
    path: Path
    items: tuple[DatasetImage, ...]
    categories: tuple[Category, ...] = ()
    ground_truth: tuple[GroundTruth, ...] = ()
    labels: tuple[str, ...] = ()
    """Folder names, in order."""
    arrays: Array | None = None
    skipped: tuple[SkippedImage, ...] = ()
    """Images known to be missing before any is read."""
    warnings: tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        return self.kind != "pictures"

    def subset(self, limit: int | None, seed: int | None = None) -> Dataset:
        """At most `limit` images in dataset order: the first ones, or with `seed` a reproducible random sample."""
        if limit is None or limit >= len(self.items):
            return self
        chosen = np.arange(limit)
        if seed is not None:
            chosen = np.sort(np.random.default_rng(seed).choice(len(self.items), limit, replace=False))
        return replace(self, items=tuple(self.items[index] for index in chosen))


def open_dataset(path: Path | str) -> Dataset:
    """The dataset at `path`: an annotations file, a folder, or an `.npz`; `UsageError` for anything else."""
    path = Path(path)
    if path.is_dir():
        found = _open_folder(path)
    elif not path.exists():
        raise UsageError(f"no such dataset `{path}`", hint="give a folder, an annotations .json or an .npz")
    elif path.suffix == ".json":
        found = _open_coco(path)
    elif path.suffix == ".npz":
        found = _open_arrays(path)
    else:
        raise UsageError(f"`{path}` is not a dataset", hint="give a folder, an annotations .json or an .npz")
    require_pillow()
    for warning in found.warnings:
        log.warning("%s", warning)
    return found


def _open_folder(path: Path) -> Dataset:
    if (path / "annotations.json").is_file():
        return _open_coco(path / "annotations.json")
    annotations = sorted(item for item in path.glob("*.json") if item.is_file())
    if len(annotations) == 1:
        return _open_coco(annotations[0])
    if annotations:
        listed = ", ".join(f"`{item.name}`" for item in annotations[:5])
        raise UsageError(f"`{path}` has several annotation files: {listed}", hint="name one of them")
    folders = sorted(item for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))
    by_folder = {folder.name: sorted(item for item in folder.rglob("*") if _is_image(item)) for folder in folders}
    own = sorted(item for item in path.iterdir() if _is_image(item))
    if own or list(by_folder) == ["images"]:
        pictures = own or by_folder["images"]
        if not pictures:
            raise UsageError(f"`{path}` contains no images", hint="images end in .jpg, .png, .webp, .bmp or .tif")
        names = [picture.relative_to(path).as_posix() for picture in pictures]
        found = tuple(DatasetImage(name, at, file) for at, (name, file) in enumerate(zip(names, pictures, strict=True)))
        return Dataset("pictures", path, found)
    items = [(name, picture) for name, pictures in by_folder.items() for picture in pictures]
    if not items:
        raise UsageError(
            f"`{path}` contains no images and no annotations",
            hint="expected annotations.json with images/, or one folder of images per class",
        )
    labels = tuple(by_folder)
    empty = [name for name, pictures in by_folder.items() if not pictures]
    return Dataset(
        "folders",
        path,
        tuple(
            DatasetImage(picture.relative_to(path).as_posix(), index, picture, labels.index(name))
            for index, (name, picture) in enumerate(items)
        ),
        labels=labels,
        warnings=(f"no images in {', '.join(f'`{name}`' for name in empty[:5])}",) if empty else (),
    )


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()


# ------------------------------------------------------------------------------------------------ COCO


@dataclass(frozen=True, slots=True)
class _Image:
    id: int
    file_name: str
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True)
class _Coco:
    """The part of a COCO file that detection needs."""

    images: list[_Image]
    annotations: list[GroundTruth] = field(default_factory=list)
    categories: list[Category] = field(default_factory=list)


def _open_coco(path: Path) -> Dataset:
    try:
        found = decode_json(read_bounded(path), _Coco)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read the annotations `{path}`: {reason}", hint="give a COCO .json file") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(
            f"`{path}` is not a COCO annotations file: {error}",
            hint="expected `images`, `annotations` (image_id, category_id, bbox) and `categories`",
        ) from error
    _check_ids(found, path)
    # images/, next to the file, or the layout of an unpacked COCO: annotations/instances_val2017.json and val2017/
    above, split = path.parent.parent, path.stem.rpartition("_")[2]
    folders = [path.parent / "images", path.parent, above / split, above / "images" / split]
    items, skipped = [], []
    for image in found.images:
        file = _find_image(image.file_name, folders)
        if isinstance(file, str):
            skipped.append(SkippedImage(image.file_name, file))
            continue
        size = (image.width, image.height) if image.width and image.height else None
        items.append(DatasetImage(image.file_name, image.id, file, size=size))
    if not items:
        looked = ", ".join(f"`{folder}`" for folder in folders)
        raise UsageError(
            f"`{path}` names {len(found.images)} images, none of which exists (searched {looked})",
            hint="put them next to the annotations, or into images/ there",
        )
    known = {image.id for image in found.images}
    stray = sum(item.image_id not in known for item in found.annotations)
    return Dataset(
        "coco",
        path,
        tuple(items),
        categories=tuple(found.categories),
        ground_truth=tuple(item for item in found.annotations if item.image_id in known),
        skipped=tuple(skipped),
        warnings=(f"{stray} annotations name an image that is not listed: they are ignored",) if stray else (),
    )


_MAX_COORDINATE = 1e9
"""Pixels; a larger box coordinate is an error."""


def _check_ids(found: _Coco, path: Path) -> None:
    """Raise `UsageError` for annotations from which COCO metrics cannot be computed."""
    if not found.images:
        raise UsageError(f"`{path}` lists no images", hint="expected `images` with `id` and `file_name`")
    if not found.categories:
        raise UsageError(f"`{path}` has no categories", hint="expected `categories` with `id` and `name`")
    for what, ids in (("image", [x.id for x in found.images]), ("category", [x.id for x in found.categories])):
        if len(set(ids)) != len(ids):
            raise UsageError(f"`{path}` has two {what} entries with the same id", hint="ids must be unique")
    categories = {item.id for item in found.categories}
    for number, item in enumerate(found.annotations):
        if item.category_id not in categories:
            raise UsageError(
                f"annotation {number} of `{path}` has the category {item.category_id}, which is not listed",
                hint="add it to `categories`",
            )
        if max(map(abs, item.bbox)) >= _MAX_COORDINATE or not np.isfinite(item.bbox).all() or min(item.bbox[2:]) < 0:
            raise UsageError(
                f"annotation {number} of `{path}` has the box {list(item.bbox)}, expected x, y, width, height",
                hint="COCO's boxes are not corners",
            )


def _find_image(name: str, folders: Sequence[Path]) -> Path | str:
    """The path, or the reason why there is none."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not name or "\x00" in name:
        return "its path is outside the dataset"
    try:
        return next((folder / name for folder in folders if (folder / name).is_file()), "no such file")
    except OSError as error:  # a name that is too long
        return (error.strerror or "it cannot be read").lower()


# ------------------------------------------------------------------------------------------------ arrays


def _open_arrays(path: Path) -> Dataset:
    """`images` uint8 [N, H, W, C] or [N, H, W], or network input [N, ...]; `labels` integers [N]."""
    try:
        with open_arrays(path) as file:
            names = list(file.headers)
            if not {"images", "labels"} <= set(names):
                listed = ", ".join(f"`{name}`" for name in names) or "nothing"
                raise UsageError(
                    f"`{path}` holds {listed}, expected `images` and `labels`",
                    hint="`numpy.savez(file, images=..., labels=...)`",
                )
            _check_headers(path, file.headers["images"], file.headers["labels"])
            images, labels = file.read("images"), file.read("labels")
    except (ArrayFileError, OSError) as error:
        hint = error.hint if isinstance(error, ArrayFileError) else "write it again"
        raise UsageError(f"`{path}` cannot be read: {error or type(error).__name__}", hint=hint) from error
    items = tuple(DatasetImage(f"row {row}", row, label=int(label)) for row, label in enumerate(labels))
    return Dataset("arrays", path, items, arrays=images)


def _check_headers(path: Path, images: ArrayHeader, labels: ArrayHeader) -> None:
    if len(images.shape) < 3 or not images.shape[0]:
        raise UsageError(
            f"`images` of `{path}` is {format_shape(images.shape)}, expected batch x height x width x channels",
            hint="the first dimension is the number of images",
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UsageError(
            f"`labels` of `{path}` is {labels.dtype} {format_shape(labels.shape)} for {images.shape[0]} images",
            hint="expected one integer per image",
        )


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Preprocessed images: `pixels` [N, ...] in network input layout."""

    pixels: Array
    items: tuple[DatasetImage, ...]
    placements: tuple[Placement, ...]

    def __len__(self) -> int:
        return len(self.items)


class DatasetReader:
    """Batches of a dataset in order, decoded in background threads. Iterate once.

    Unreadable images are in `skipped` afterwards; `digest` covers the bytes read.
    """

    def __init__(self, dataset: Dataset, preprocessor: Preprocessor, batch: int) -> None:
        self.dataset = dataset
        self.skipped: list[SkippedImage] = list(dataset.skipped)
        self.images = 0
        """Images yielded so far."""
        self._preprocessor = preprocessor
        self._batch = batch
        self._total = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 over the names and bytes of all images read so far, in order."""
        return f"sha256:{self._total.hexdigest()}"

    def __iter__(self) -> Iterator[ImageBatch]:
        """Full batches; the last may be smaller."""
        waiting: list[tuple[DatasetImage, Array, Placement]] = []
        with ThreadPoolExecutor(_THREADS, "decode") as pool:
            for start in range(0, len(self.dataset.items), self._batch):
                items = self.dataset.items[start : start + self._batch]
                for item, (raw, found) in zip(items, pool.map(self._read, items), strict=True):
                    self._total.update(f"{item.name}\0{raw}\n".encode())
                    if isinstance(found, str):
                        self.skipped.append(SkippedImage(item.name, found))
                        log.debug("`%s` is left out: %s", item.name, found)
                    else:
                        waiting.append((item, *found))
                while len(waiting) >= self._batch:
                    yield self._make_batch(waiting[: self._batch])
                    del waiting[: self._batch]
        if waiting:
            yield self._make_batch(waiting)

    def _make_batch(self, rows: Sequence[tuple[DatasetImage, Array, Placement]]) -> ImageBatch:
        self.images += len(rows)
        items, pixels, places = zip(*rows, strict=True)
        return ImageBatch(np.stack(pixels), items, places)

    def _read(self, item: DatasetImage) -> tuple[str, tuple[Array, Placement] | str]:
        """The digest of one image's bytes, and the preprocessed image or the reason why there is none."""
        if item.path is None:
            assert self.dataset.arrays is not None
            row = self.dataset.arrays[item.image_id]
            return hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest(), self._from_row(row)
        try:
            raw = read_bounded(item.path)
        except UsageError as error:
            return "unread", error.message
        except OSError as error:
            return "unread", (error.strerror or str(error)).lower()
        digest = hashlib.sha256(raw).hexdigest()
        try:
            picture = read_image(raw)
        except BadImage as error:
            return digest, str(error)
        if item.size is not None and picture.size != item.size:
            found, annotated = "x".join(map(str, picture.size)), "x".join(map(str, item.size))
            return digest, f"it is {found} pixels, its annotation has {annotated}"
        return digest, self._preprocessor(picture)

    def _from_row(self, row: Array) -> tuple[Array, Placement] | str:
        """Preprocess a uint8 row; any other dtype is already network input."""
        declared = self._preprocessor.spec
        if row.dtype == np.uint8 and (row.ndim == 2 or row.shape[-1] in (1, 3)):
            grey = row.shape[-1] == 1 and row.ndim == 3
            return self._preprocessor(image_from_array(row[..., 0] if grey else row))
        if row.shape != declared.shape:
            return f"it is {format_shape(row.shape)}, the network takes {format_shape(declared.shape)}"
        if row.dtype.kind == "f" and not np.isfinite(row).all():
            return "it contains NaN or Inf"
        height, width = declared.size
        return row.astype(self._preprocessor.dtype, copy=False), Placement(width, height)

"""Pictures with what is true about them: COCO annotations, a folder for each class, arrays, or pictures alone.

`open_dataset` lists and checks; a `Reader` decodes batch by batch, in one order, skips what is damaged and keeps count.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from trt_engine.errors import SetupError, UsageError
from trt_engine.tensors import format_shape
from trt_engine.vision.preprocess import BadImage, Placement, Preprocessor, read_image

try:
    from PIL import Image
except ImportError as error:
    raise SetupError(
        "pictures are read with pillow, which is not installed", hint="`pip install 'trt-engine[eval]'`"
    ) from error

__all__ = ["Batch", "Category", "Dataset", "Item", "Reader", "Skip", "Truth", "open_dataset"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_SUFFIXES = frozenset(".jpg .jpeg .png .bmp .webp .tif .tiff .ppm .pgm".split())
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Category:
    """One category of the annotations."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Truth:
    """One annotated object: x, y, width, height in pixels of the picture."""

    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    area: float | None = None
    iscrowd: int | bool = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One picture of a dataset."""

    name: str
    """Inside the dataset, the same on every machine."""
    image_id: int
    path: Path | None = None
    """Of its file; None for a row of an array."""
    label: int | None = None
    """Index into the dataset's `labels`, or the class itself for arrays."""
    size: tuple[int, int] | None = None
    """Width and height the annotations say."""


@dataclass(frozen=True, slots=True)
class Skip:
    """One picture that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """What `open_dataset` found. Nothing is decoded yet."""

    kind: Literal["coco", "folders", "arrays", "pictures"]
    path: Path
    items: tuple[Item, ...]
    categories: tuple[Category, ...] = ()
    truth: tuple[Truth, ...] = ()
    labels: tuple[str, ...] = ()
    """Names of the folders, in order."""
    arrays: Array | None = None
    skipped: tuple[Skip, ...] = ()
    """What is known to be missing without reading a picture."""
    warnings: tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        return self.kind != "pictures"

    def subset(self, limit: int | None, seed: int | None = None) -> Dataset:
        """At most `limit` pictures in their order: the first ones, or with a seed the same random ones everywhere."""
        if limit is None or limit >= len(self.items):
            return self
        chosen = np.arange(limit)
        if seed is not None:
            chosen = np.sort(np.random.default_rng(seed).choice(len(self.items), limit, replace=False))
        return replace(self, items=tuple(self.items[index] for index in chosen))


def open_dataset(path: Path | str) -> Dataset:
    """The dataset at `path`: an annotations file, a folder, or an `.npz`; `UsageError` for what is none."""
    path = Path(path)
    if path.is_dir():
        found = _folder(path)
    elif not path.exists():
        raise UsageError(f"no such dataset `{path}`", hint="give a folder, an annotations .json or an .npz")
    elif path.suffix == ".json":
        found = _coco(path)
    elif path.suffix == ".npz":
        found = _arrays(path)
    else:
        raise UsageError(f"`{path}` is no dataset", hint="give a folder, an annotations .json or an .npz")
    for warning in found.warnings:
        log.warning("%s", warning)
    return found


def _folder(path: Path) -> Dataset:
    if (path / "annotations.json").is_file():
        return _coco(path / "annotations.json")
    annotations = sorted(item for item in path.glob("*.json") if item.is_file())
    if len(annotations) == 1:
        return _coco(annotations[0])
    if annotations:
        listed = ", ".join(f"`{item.name}`" for item in annotations[:5])
        raise UsageError(f"`{path}` has several annotation files: {listed}", hint="name the one that is meant")
    folders = sorted(item for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))
    by_folder = {folder.name: _pictures(folder) for folder in folders}
    own = sorted(item for item in path.iterdir() if _is_picture(item))
    if own or list(by_folder) == ["images"]:
        return _unlabelled(path, own or by_folder["images"])
    items = [(name, picture) for name, pictures in by_folder.items() for picture in pictures]
    if not items:
        raise UsageError(
            f"`{path}` has no pictures in it, and no annotations",
            hint="expected annotations.json with images/, or a folder of pictures for each class",
        )
    labels = tuple(by_folder)
    empty = [name for name, pictures in by_folder.items() if not pictures]
    return Dataset(
        "folders",
        path,
        tuple(
            Item(_inside(picture, path), index, picture, labels.index(name))
            for index, (name, picture) in enumerate(items)
        ),
        labels=labels,
        warnings=(f"no pictures in {', '.join(f'`{name}`' for name in empty[:5])}",) if empty else (),
    )


def _pictures(folder: Path) -> list[Path]:
    return sorted(item for item in folder.rglob("*") if _is_picture(item))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def _inside(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _unlabelled(path: Path, pictures: Sequence[Path]) -> Dataset:
    if not pictures:
        raise UsageError(f"`{path}` has no pictures in it", hint="pictures end in .jpg, .png, .webp, .bmp or .tif")
    items = tuple(Item(_inside(picture, path), index, picture) for index, picture in enumerate(pictures))
    return Dataset("pictures", path, items)


# ------------------------------------------------------------------------------------------------ COCO


@dataclass(frozen=True, slots=True)
class _Image:
    id: int
    file_name: str
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True)
class _Coco:
    """The part of a COCO file that detection needs; the rest is not read."""

    images: list[_Image]
    annotations: list[Truth] = field(default_factory=list)
    categories: list[Category] = field(default_factory=list)


def _coco(path: Path) -> Dataset:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Coco)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read the annotations `{path}`: {reason}", hint="give a COCO .json file") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(
            f"`{path}` has no COCO annotations: {error}",
            hint="expected `images`, `annotations` (image_id, category_id, bbox) and `categories`",
        ) from error
    _check_ids(found, path)
    folders = _image_folders(path)
    items, skipped = [], []
    for image in found.images:
        file = _find(image.file_name, folders)
        if isinstance(file, str):
            skipped.append(Skip(image.file_name, file))
            continue
        size = (image.width, image.height) if image.width and image.height else None
        items.append(Item(image.file_name, image.id, file, size=size))
    if not items:
        looked = ", ".join(f"`{folder}`" for folder in folders)
        raise UsageError(
            f"`{path}` names {len(found.images)} pictures, and none of them is there (looked in {looked})",
            hint="put them beside the annotations, or into images/ there",
        )
    known = {image.id for image in found.images}
    stray = sum(item.image_id not in known for item in found.annotations)
    return Dataset(
        "coco",
        path,
        tuple(items),
        categories=tuple(found.categories),
        truth=tuple(item for item in found.annotations if item.image_id in known),
        skipped=tuple(skipped),
        warnings=(f"{stray} annotations name a picture that is not listed: they are left out",) if stray else (),
    )


def _check_ids(found: _Coco, path: Path) -> None:
    """`UsageError` for what COCO's figures cannot be worked out from."""
    if not found.images:
        raise UsageError(f"`{path}` lists no pictures", hint="expected `images` with `id` and `file_name`")
    if not found.categories:
        raise UsageError(f"`{path}` has no categories", hint="expected `categories` with `id` and `name`")
    for what, ids in (("picture", [x.id for x in found.images]), ("category", [x.id for x in found.categories])):
        if len(set(ids)) != len(ids):
            raise UsageError(f"`{path}` gives two {what} entries the same id", hint="ids must be unique")
    categories = {item.id for item in found.categories}
    for number, item in enumerate(found.annotations):
        if item.category_id not in categories:
            raise UsageError(
                f"annotation {number} of `{path}` has the category {item.category_id}, which is not listed",
                hint="add it to `categories`",
            )
        if not np.isfinite(item.bbox).all() or min(item.bbox[2:]) < 0:
            raise UsageError(
                f"annotation {number} of `{path}` has the box {list(item.bbox)}, expected x, y, width, height",
                hint="COCO's boxes are not corners",
            )


def _image_folders(path: Path) -> list[Path]:
    """Where the pictures of annotations may lie: in images/, beside them, or as COCO itself is unpacked."""
    beside = [path.parent / "images", path.parent]
    split = path.stem.rpartition("_")[2]  # annotations/instances_val2017.json and val2017/
    return [*beside, path.parent.parent / split, path.parent.parent / "images" / split]


def _find(name: str, folders: Sequence[Path]) -> Path | str:
    """The file, or why it is not there."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not name or "\x00" in name:
        return "its name leads outside the dataset"
    return next((folder / name for folder in folders if (folder / name).is_file()), "no such file")


# ------------------------------------------------------------------------------------------------ arrays


def _arrays(path: Path) -> Dataset:
    """`images` [N, H, W, C] or [N, H, W] of bytes, or [N, ...] of the network's own type; `labels` [N] of whole numbers."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            names = list(archive.files)
            if not {"images", "labels"} <= set(names):
                listed = ", ".join(f"`{name}`" for name in names) or "nothing"
                raise UsageError(
                    f"`{path}` holds {listed}, expected `images` and `labels`",
                    hint="`numpy.savez(file, images=..., labels=...)`",
                )
            images, labels = archive["images"], archive["labels"]
    except (ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"`{path}` is damaged: {error or type(error).__name__}", hint="write it again") from error
    if images.ndim < 3 or not len(images):
        raise UsageError(
            f"`images` of `{path}` is {format_shape(images.shape)}, expected batch x height x width x channels",
            hint="the first dimension counts the pictures",
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UsageError(
            f"`labels` of `{path}` is {labels.dtype} {format_shape(labels.shape)} for {len(images)} pictures",
            hint="expected one whole number for each",
        )
    items = tuple(Item(f"row {row}", row, label=int(label)) for row, label in enumerate(labels))
    return Dataset("arrays", path, items, arrays=images)


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class Batch:
    """Some pictures as the network takes them."""

    pixels: Array
    items: tuple[Item, ...]
    places: tuple[Placement, ...]

    def __len__(self) -> int:
        return len(self.items)


class Reader:
    """Batches of a dataset in its order, decoded while they are asked for. Iterate it once.

    What cannot be read stands in `skipped` afterwards, and `digest` says which bytes were read.
    """

    def __init__(self, dataset: Dataset, preprocessor: Preprocessor, batch: int) -> None:
        self.dataset = dataset
        self.skipped: list[Skip] = list(dataset.skipped)
        self.images = 0
        """Handed out so far."""
        self._preprocessor = preprocessor
        self._batch = batch
        self._total = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 over the names and the bytes of all pictures asked for so far, in their order."""
        return f"sha256:{self._total.hexdigest()}"

    def __iter__(self) -> Iterator[Batch]:
        """Whole batches while there are enough readable pictures; the last may be smaller."""
        waiting: list[tuple[Item, Array, Placement]] = []
        with ThreadPoolExecutor(_THREADS, "decode") as pool:
            for start in range(0, len(self.dataset.items), self._batch):
                items = self.dataset.items[start : start + self._batch]
                for item, (raw, found) in zip(items, pool.map(self._read, items), strict=True):
                    self._total.update(f"{item.name}\0{raw}\n".encode())
                    if isinstance(found, str):
                        self.skipped.append(Skip(item.name, found))
                        log.debug("`%s` is left out: %s", item.name, found)
                    else:
                        waiting.append((item, *found))
                while len(waiting) >= self._batch:
                    yield self._made(waiting[: self._batch])
                    del waiting[: self._batch]
        if waiting:
            yield self._made(waiting)

    def _made(self, rows: Sequence[tuple[Item, Array, Placement]]) -> Batch:
        self.images += len(rows)
        items, pixels, places = zip(*rows, strict=True)
        return Batch(np.stack(pixels), items, places)

    def _read(self, item: Item) -> tuple[str, tuple[Array, Placement] | str]:
        """The digest of one picture's bytes, and the picture or why there is none."""
        if item.path is None:
            assert self.dataset.arrays is not None
            row = self.dataset.arrays[item.image_id]
            return hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest(), self._from_row(row)
        try:
            raw = item.path.read_bytes()
        except OSError as error:
            return "unread", (error.strerror or str(error)).lower()
        digest = hashlib.sha256(raw).hexdigest()
        try:
            picture = read_image(raw)
        except BadImage as error:
            return digest, str(error)
        if item.size is not None and picture.size != item.size:
            found, said = "x".join(map(str, picture.size)), "x".join(map(str, item.size))
            return digest, f"it is {found} pixels, its annotation says {said}"
        return digest, self._preprocessor(picture)

    def _from_row(self, row: Array) -> tuple[Array, Placement] | str:
        """Bytes are a picture; anything else is the network's input already."""
        declared = self._preprocessor.declared
        if row.dtype == np.uint8 and (row.ndim == 2 or row.shape[-1] in (1, 3)):
            return self._preprocessor(Image.fromarray(row[..., 0] if row.shape[-1] == 1 and row.ndim == 3 else row))
        if row.shape != declared.shape:
            return f"it is {format_shape(row.shape)}, the network takes {format_shape(declared.shape)}"
        if row.dtype.kind == "f" and not np.isfinite(row).all():
            return "it holds NaN or infinities"
        height, width = declared.size
        return row.astype(self._preprocessor.dtype, copy=False), Placement(width, height)

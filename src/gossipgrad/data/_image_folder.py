"""Images in a folder a class, the layout of ImageNet, decoded as they are needed."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ._dataset import Dataset, DatasetInfo
from ._image_ends import check_whole_images
from ._image_files import check_pillow, read_cropped
from ._pixels import Standardise
from ._places import places

NAME = "imagefolder"
IMAGE_SIZE = 224
_SUFFIXES = (".jpg", ".jpeg")
_OTHER_IMAGES = (".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jp2")
# Mean and deviation of ImageNet's channels, as is usual also for other photographs.
_STANDARDISE = Standardise(
    tuple(255 * mean for mean in (0.485, 0.456, 0.406)),
    tuple(255 * std for std in (0.229, 0.224, 0.225)),
)
# Sets the draws apart from those that order the samples of an epoch.
_STREAM = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFolderSamples:
    """The images of one part, in the order of class and file name; none is held in memory.

    Args:
        folder: Of the part; it has a folder for each class.
        classes: Names of these folders; the label of a class is its place here.
        files: Names of the files, encoded as the file system does.
        labels: Class of each file.
        image_size: Height and width of the inputs, in pixels.
    """

    folder: Path
    classes: tuple[str, ...]
    files: Shaped[np.ndarray, " sample"]
    labels: Int[Tensor, " sample"]
    image_size: int

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.files)

    def path(self, index: int) -> Path:
        """The file of the sample at `index`."""
        return self.folder / self.classes[self.labels[index]] / os.fsdecode(self.files[index])

    def paths(self) -> Iterator[str]:
        """The files of all samples, in turn."""
        for label, name in zip(self.labels.tolist(), self.files, strict=True):
            yield f"{self.folder}/{self.classes[label]}/{os.fsdecode(name)}"

    def batch(
        self, indices: Int[Tensor, " batch"], *, augment: tuple[int, int] | None = None
    ) -> tuple[Float[Tensor, "batch 3 size size"], Int[Tensor, " batch"]]:
        """Images and their classes; see `Samples.batch`.

        Raises:
            ValueError: A file is no image that can be decoded; the message names it.
        """
        pixels = np.empty((len(indices), 3, self.image_size, self.image_size), dtype=np.uint8)
        for row, index in zip(pixels, indices.tolist(), strict=True):
            rng = None
            if augment is not None:
                rng = np.random.default_rng((*augment, _STREAM, index))
            row[:] = read_cropped(self.path(index), self.image_size, rng)
        return _STANDARDISE(torch.from_numpy(pixels)), self.labels[indices]


def prepare_image_folder(data_dir: Path | None, *, image_size: int) -> None:
    """Make sure that Pillow and the folders are there, and that all images are whole.

    Of each file its end is read, and what does not end as a JPEG does is decoded. Of each part one
    image is decoded in any case.

    Raises:
        ValueError: Something is missing, empty or broken; the message names it.
    """
    dataset = load_image_folder(data_dir, image_size=image_size)
    for samples in (dataset.train, dataset.test):
        assert isinstance(samples, ImageFolderSamples)
        check_whole_images(samples.paths())
        samples.batch(torch.tensor([0]))


def load_image_folder(data_dir: Path | None, *, image_size: int) -> Dataset:
    """The image folder in `data_dir`, or this folder itself; of the other places only if None.

    Raises:
        ValueError: As `image_folder`; or no place has one.
    """
    check_pillow(NAME)
    # Images elsewhere, unlike the files of other data sets, are not the ones that were meant.
    folders = places(NAME, None) if data_dir is None else [data_dir, data_dir / NAME]
    for folder in folders:
        if all((folder / part).is_dir() for part in ("train", "val")):
            return image_folder(folder, image_size=image_size)
    raise ValueError(
        f"data {NAME!r} needs a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, and none of "
        f"{', '.join(map(str, folders))} has train and val; name it with --data-dir."
    )


def image_folder(folder: Path, *, image_size: int = IMAGE_SIZE) -> Dataset:
    """A data set of JPEG files in `folder/train/CLASS` and `folder/val/CLASS`, as of ImageNet.

    Files are decoded when a batch needs them. For training a random part of the image is scaled
    to the size asked for, and half of them are mirrored; for evaluation the centre is taken. What
    is drawn for an image depends on seed, epoch and its index alone. Channels are standardised by
    the mean and deviation of ImageNet.

    Args:
        folder: Holds `train` and `val`.
        image_size: Height and width of the inputs, in pixels.

    Returns:
        The data set; its test part is `val`, its classes are numbered in the order of their names.

    Raises:
        ValueError: `image_size` is below 1, there are no classes or no images of one, or the two
            parts do not have the same classes; the message names the folder.
    """
    if image_size < 1:
        raise ValueError(f"image_size is {image_size}, but must be at least 1.")
    classes = _classes(folder / "train")
    in_val = _classes(folder / "val")
    for part, missing in (
        ("val", sorted(set(classes) - set(in_val))),
        ("train", sorted(set(in_val) - set(classes))),
    ):
        if missing:
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"{folder / part} has no folder of class {missing[0]!r}{more}; train and val need "
                "the same classes."
            )
    train, test = (_listed(folder / part, classes, image_size) for part in ("train", "val"))
    info = DatasetInfo(
        name=NAME,
        input_shape=(3, image_size, image_size),
        num_classes=len(classes),
        train_samples=len(train),
        test_samples=len(test),
    )
    return Dataset(info=info, train=train, test=test)


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; images lie in its class folders.")
    with os.scandir(folder) as entries:
        classes = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise ValueError(
            f"{folder} has no folders; sort the images into a folder for each class of them."
        )
    return tuple(classes)


def _listed(folder: Path, classes: tuple[str, ...], image_size: int) -> ImageFolderSamples:
    files: list[bytes] = []
    labels = []
    passed_over: list[Path] = []
    for label, name in enumerate(classes):
        with os.scandir(folder / name) as entries:
            names = {e.name for e in entries if e.is_file() and not e.name.startswith(".")}
        chosen = {file for file in names if file.lower().endswith(_SUFFIXES)}
        others = {file for file in names - chosen if file.lower().endswith(_OTHER_IMAGES)}
        passed_over += [folder / name / file for file in sorted(others)]
        found = sorted(map(os.fsencode, chosen))
        if not found:
            raise ValueError(
                f"{folder / name} has no files that end in {' or '.join(_SUFFIXES)}; put the "
                "images of this class there, or remove its folder from train and val."
            )
        files += found
        labels.append(torch.full((len(found),), label))
    if passed_over:
        warnings.warn(
            f"{len(passed_over)} images in {folder} are not used, like {passed_over[0]}: they "
            f"have to end in {' or '.join(_SUFFIXES)}.",
            stacklevel=2,
        )
    return ImageFolderSamples(
        folder=folder,
        classes=classes,
        files=np.array(files),
        labels=torch.cat(labels),
        image_size=image_size,
    )

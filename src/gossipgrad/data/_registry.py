"""Data sets by name."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import _cifar10, _cifar10_small, _digits, _fashion_mnist, _image_folder, _shakespeare
from ._dataset import Dataset, DatasetInfo


@dataclass(frozen=True, slots=True)
class _Source:
    """How one data set is come by; each function takes the folder of data sets."""

    info: DatasetInfo
    prepare: Callable[[Path | None], None]
    load: Callable[[Path | None], Dataset]


_SOURCES = {
    source.info.name: source
    for source in (
        _Source(_digits.INFO, lambda _: _digits.prepare_digits(), lambda _: _digits.load_digits()),
        _Source(
            _fashion_mnist.INFO,
            _fashion_mnist.prepare_fashion_mnist,
            _fashion_mnist.load_fashion_mnist,
        ),
        _Source(_cifar10.INFO, _cifar10.prepare_cifar10, _cifar10.load_cifar10),
        _Source(
            _cifar10_small.INFO,
            _cifar10_small.prepare_cifar10_small,
            _cifar10_small.load_cifar10_small,
        ),
        _Source(_shakespeare.INFO, _shakespeare.prepare_shakespeare, _shakespeare.load_shakespeare),
    )
}
NAMES = (*_SOURCES, _image_folder.NAME)


def info(name: str, data_dir: Path | None = None, *, image_size: int | None = None) -> DatasetInfo:
    """Sizes and shapes of a data set, without loading it.

    Args:
        name: One of `NAMES`.
        data_dir: Folder of data sets, where the image folder lies.
        image_size: Height and width of the inputs from an image folder; None: 224.

    Raises:
        ValueError: There is no data set of this name, `image_size` is not for it, or the image
            folder is not as it should be.

    Example:
        >>> info("digits").input_shape
        (1, 8, 8)
    """
    if name == _image_folder.NAME:
        return load(name, data_dir, image_size=image_size).info
    return _source(name, image_size).info


def prepare(name: str, data_dir: Path | None = None, *, image_size: int | None = None) -> None:
    """Do what must happen once a machine before ranks load `name`: find or fetch its files.

    Files are checked here as well as when they are loaded, so that a damaged one is told once.

    Raises:
        ValueError: There is no data set of this name, or a package it needs is missing, or a
            file of it is damaged or missing without an address to fetch it from, or `image_size`
            is not for it.
        GossipError: A file could not be fetched.
    """
    if data_dir is not None and not data_dir.is_dir():
        if data_dir.exists():
            raise ValueError(f"data_dir is {data_dir}, a file; name the folder of data sets.")
        warnings.warn(
            f"data_dir={data_dir} does not exist: {name} is taken from where else it lies, or "
            "fetched into a new folder there.",
            stacklevel=2,
        )
    if name == _image_folder.NAME:
        size = _image_folder.IMAGE_SIZE if image_size is None else image_size
        _image_folder.prepare_image_folder(data_dir, image_size=size)
    else:
        _source(name, image_size).prepare(data_dir)


def load(name: str, data_dir: Path | None = None, *, image_size: int | None = None) -> Dataset:
    """Load a data set, in about a second; of an image folder, the names of its files.

    Args:
        name: One of `NAMES`.
        data_dir: Folder of data sets; looked in before the one that `GOSSIPGRAD_DATA` names and
            the user's cache. Missing files are fetched to it, or to the cache when None. An image
            folder may be this folder itself.
        image_size: Height and width of the inputs from an image folder; None: 224.

    Raises:
        ValueError: As `prepare`.
        GossipError: A file is missing and could not be fetched.
    """
    if name == _image_folder.NAME:
        size = _image_folder.IMAGE_SIZE if image_size is None else image_size
        return _image_folder.load_image_folder(data_dir, image_size=size)
    return _source(name, image_size).load(data_dir)


def _source(name: str, image_size: int | None) -> _Source:
    if name not in _SOURCES:
        raise ValueError(f"data {name!r} is not known; choose one of {', '.join(NAMES)}.")
    if image_size is not None:
        raise ValueError(
            f"image_size is {image_size}, but data {name!r} has inputs of its own shape, "
            f"{_SOURCES[name].info.input_shape}; leave it out, or take data "
            f"{_image_folder.NAME!r}."
        )
    return _SOURCES[name]

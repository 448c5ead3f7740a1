"""Data sets by name."""

from pathlib import Path

from . import _digits, _fashion_mnist
from ._dataset import Dataset, DatasetInfo

_INFOS = {module.INFO.name: module.INFO for module in (_digits, _fashion_mnist)}
NAMES = tuple(_INFOS)


def info(name: str, data_dir: Path | None = None) -> DatasetInfo:
    """Sizes and shapes of a data set, without loading it.

    Args:
        name: One of `NAMES`.
        data_dir: Folder of data sets, for those whose sizes lie there.

    Raises:
        ValueError: There is no data set of this name.

    Example:
        >>> info("digits").input_shape
        (1, 8, 8)
    """
    if name not in _INFOS:
        raise ValueError(f"data {name!r} is not known; choose one of {', '.join(NAMES)}.")
    return _INFOS[name]


def prepare(name: str, data_dir: Path | None = None) -> None:
    """Do what must happen once a machine before ranks load `name`: find or fetch its files.

    Files are checked here as well as when they are loaded, so that a damaged one is told once.

    Raises:
        ValueError: There is no data set of this name, or a package it needs is missing, or a
            file of it is damaged.
        GossipError: A file could not be fetched.
    """
    if info(name) is _digits.INFO:
        _digits.prepare_digits()
    else:
        _fashion_mnist.prepare_fashion_mnist(data_dir)


def load(name: str, data_dir: Path | None = None) -> Dataset:
    """Load a data set into memory, in about a second.

    Args:
        name: One of `NAMES`.
        data_dir: Folder of data sets; see `find_fashion_mnist` for where else is looked.

    Raises:
        ValueError: There is no data set of this name, or a file of it is damaged.
        GossipError: A file is missing and could not be fetched.
    """
    if info(name) is _digits.INFO:
        return _digits.load_digits()
    return _fashion_mnist.load_fashion_mnist(data_dir)

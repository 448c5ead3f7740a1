"""Data sets by name."""

from collections.abc import Callable
from pathlib import Path

from gossipgrad._messages import warn

from . import _digits, _fashion_mnist
from ._dataset import Dataset, DatasetInfo

_SOURCES: dict[str, tuple[DatasetInfo, Callable[[Path | None], Dataset]]] = {
    "digits": (_digits.INFO, lambda _: _digits.digits_dataset()),
    "fashion-mnist": (_fashion_mnist.INFO, _fashion_mnist.load_fashion_mnist),
}
NAMES = tuple(_SOURCES)


def info(name: str) -> DatasetInfo:
    """Sizes and shapes of a data set, without loading it.

    Args:
        name: One of `NAMES`.

    Raises:
        ValueError: There is no data set of this name.

    Example:
        >>> info("digits").input_shape
        (1, 8, 8)
    """
    return _source(name)[0]


def prepare(name: str, data_dir: Path | None = None) -> None:
    """Do what must happen once a machine before ranks load `name`: find, fetch and check its files.

    Raises:
        ValueError: There is no data set of this name, or a package it needs is missing, or a
            file of it is damaged or missing without an address to fetch it from.
        GossipError: A file could not be fetched.
    """
    _, load_it = _source(name)
    if data_dir is not None and not data_dir.is_dir():
        if data_dir.exists():
            raise ValueError(f"data_dir is {data_dir}, a file; name the folder of data sets.")
        warn(
            f"data_dir={data_dir} does not exist: {name} is taken from where else it lies, or "
            "fetched into a new folder there."
        )
    load_it(data_dir)


def load(name: str, data_dir: Path | None = None) -> Dataset:
    """Load a data set, in about a second.

    Args:
        name: One of `NAMES`.
        data_dir: Folder of data sets; looked in before the one that `GOSSIPGRAD_DATA` names and
            the user's cache. Missing files are fetched to it, or to the cache when None.

    Raises:
        ValueError: As `prepare`.
        GossipError: A file is missing and could not be fetched.
    """
    return _source(name)[1](data_dir)


def _source(name: str) -> tuple[DatasetInfo, Callable[[Path | None], Dataset]]:
    if name not in _SOURCES:
        raise ValueError(
            f"data {name!r} is not known; choose one of {', '.join(NAMES)}, or train on your own "
            "with --job (see examples/)."
        )
    return _SOURCES[name]

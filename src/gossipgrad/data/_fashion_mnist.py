"""Fashion-MNIST from its four IDX files, fetched once where they are missing.

References:
    Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; MIT licence.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from ._dataset import Dataset, DatasetInfo
from ._fetch import fetch
from ._idx import read_idx
from ._pixels import Standardise
from ._places import place_to_fetch_to, place_with, places, way_out
from ._samples import TensorSamples

INFO = DatasetInfo(
    name="fashion-mnist",
    input_shape=(1, 28, 28),
    num_classes=10,
    train_samples=60_000,
    test_samples=10_000,
)
# The publisher's address. It speaks no TLS; the digests below say whether the content is right.
ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
# SHA-256 of each file unpacked.
DIGESTS = {
    "train-images-idx3-ubyte.gz": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "train-labels-idx1-ubyte.gz": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
}


def prepare_fashion_mnist(data_dir: Path | None = None) -> None:
    """Make sure that the four files are there and are the right ones; takes a second.

    Raises:
        GossipError: A file is missing and could not be fetched.
        ValueError: A file in place is not the right one; the message names it.
    """
    folder = find_fashion_mnist(data_dir)
    for name, digest in DIGESTS.items():
        read_idx(folder / name, sha256=digest)


def find_fashion_mnist(data_dir: Path | None = None, *, address: str = ADDRESS) -> Path:
    """Find the four files; fetch them where no place has them all.

    See `places` for where is looked. Missing files go to `data_dir`, or to the user's cache when
    none is given.

    Returns:
        The folder with the four files.

    Raises:
        GossipError: A file could not be fetched, or is not the right one.
    """
    if (found := place_with(DIGESTS, places(INFO.name, data_dir))) is not None:
        return found
    folder = place_to_fetch_to(INFO.name, data_dir)
    instead = way_out(f"the four files of {INFO.name}", INFO.name, folder)
    for name, digest in DIGESTS.items():
        if not (folder / name).is_file():
            check = partial(read_idx, sha256=digest)
            fetch(f"{address}/{name}", folder / name, check, way_out=instead)
    return folder


def load_fashion_mnist(data_dir: Path | None = None) -> Dataset:
    """Fashion-MNIST: 60,000 training and 10,000 test images, 28x28 grey, ten classes.

    Raises:
        GossipError: A file is missing and could not be fetched.
        ValueError: A file in place is not the right one; the message names it.
    """
    folder = find_fashion_mnist(data_dir)
    arrays = {name: read_idx(folder / name, sha256=digest) for name, digest in DIGESTS.items()}
    parts = []
    for part in ("train", "t10k"):
        # Copied, since the unpacked content is read-only.
        pixels = torch.from_numpy(arrays[f"{part}-images-idx3-ubyte.gz"].copy()).unsqueeze(1)
        labels = torch.from_numpy(arrays[f"{part}-labels-idx1-ubyte.gz"].astype(np.int64))
        parts.append((pixels, labels))
    finish = Standardise.of(parts[0][0])
    train, test = (TensorSamples(pixels, labels, finish=finish) for pixels, labels in parts)
    return Dataset(info=INFO, train=train, test=test)

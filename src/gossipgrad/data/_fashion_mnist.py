"""Fashion-MNIST from its four IDX files, fetched once where they are missing; and their format.

References:
    Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; MIT licence.
"""

import gzip
import hashlib
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from ._dataset import Dataset, DatasetInfo, TensorSamples
from ._files import DELETE_IT, data_folders, download_folder, fetch, find_folder
from ._pixels import Standardise

INFO = DatasetInfo(
    name="fashion-mnist",
    input_shape=(1, 28, 28),
    num_classes=10,
    train_samples=60_000,
    test_samples=10_000,
)
# The publisher's address. It speaks no TLS; the digests below say whether the content is right.
ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_UNSIGNED_BYTE = 0x08
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


def find_fashion_mnist(data_dir: Path | None = None) -> Path:
    """Find the four files; fetch them where no folder has them all.

    `data_folders` says where. Missing files go to `data_dir`, or to the user's cache when None.

    Returns:
        The folder with the four files.

    Raises:
        GossipError: A file could not be fetched, or is not the right one.
    """
    if (found := find_folder(DIGESTS, data_folders(INFO.name, data_dir))) is not None:
        return found
    folder = download_folder(INFO.name, data_dir)
    for name, digest in DIGESTS.items():
        if not (folder / name).is_file():
            check = partial(read_idx, sha256=digest)
            what = f"the four files of {INFO.name}"
            fetch(f"{ADDRESS}/{name}", folder / name, check, what=what)
    return folder


def load_fashion_mnist(data_dir: Path | None = None) -> Dataset:
    """Fashion-MNIST: 60,000 training and 10,000 test images, 28x28 grey, ten classes.

    Raises:
        GossipError: A file is missing and could not be fetched.
        ValueError: A file in the folder is not the right one; the message names it.
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


def read_idx(path: Path, *, sha256: str | None = None) -> UInt8[np.ndarray, "..."]:
    """Read a gzipped IDX file of unsigned bytes.

    Args:
        path: The `.gz` file.
        sha256: Digest of the *unpacked* content in hexadecimal. The content and not the archive
            is checked, since the same data set is in circulation packed by different compressors.

    Returns:
        The array, in the shape that the header gives.

    Raises:
        ValueError: The file is no gzipped IDX file of bytes, is cut short, or its digest differs.

    References:
        The IDX file format, as on the MNIST page: magic `0 0 type dims`, one 32-bit size a
        dimension, then the values, last index fastest.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}){DELETE_IT}") from error
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(
            f"{path} unpacks to content with SHA-256 {found}, expected {sha256}{DELETE_IT}"
        )
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise ValueError(f"{path} is no IDX file of unsigned bytes: it starts {content[:4]!r}.")
    num_dims = content[3]
    header_bytes = 4 + 4 * num_dims
    if len(content) < header_bytes:
        raise ValueError(f"{path} ends inside its header of {header_bytes} bytes.")
    shape = struct.unpack(f">{num_dims}I", content[4:header_bytes])
    if len(content) != header_bytes + math.prod(shape):
        raise ValueError(
            f"{path} holds {len(content) - header_bytes} values, but its header says {shape}."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)

"""Fashion-MNIST from its four IDX files, fetched once where they are missing; and their format.

References:
    Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; MIT licence.
"""

import gzip
import hashlib
import http.client
import math
import os
import struct
import sys
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from jaxtyping import Float, UInt8
from torch import Tensor

from gossipgrad.errors import GossipError

from ._dataset import Dataset, DatasetInfo, TensorSamples

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
_TIMEOUT_SECONDS = 30.0  # without a byte from the publisher


def find_fashion_mnist(data_dir: Path | None = None) -> Path:
    """Find the folder with the four files; fetch them where there is none."""
    # Of several processes one fetches, and the others wait for it.
    shared, cache = os.environ.get("GOSSIPGRAD_DATA"), _cache_folder()
    roots = [data_dir, Path(shared) if shared else None, cache]
    folders = [root / INFO.name for root in roots if root is not None]
    for folder in folders:
        if all((folder / name).is_file() for name in DIGESTS):
            return folder
    root = data_dir or cache
    if root is None:
        raise GossipError(
            f"{INFO.name}/ has to be fetched, but this user has no home folder to keep it in; name "
            "a folder with --data-dir or XDG_CACHE_HOME."
        )
    folder = root / INFO.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for name, digest in DIGESTS.items():
                if not (folder / name).is_file():
                    _fetch(f"{ADDRESS}/{name}", folder / name, digest)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        raise GossipError(
            f"could not fetch {ADDRESS} to {folder} ({reason}); put the four files of {INFO.name} "
            f"there, or name the folder that has them in its {INFO.name}/ with --data-dir or "
            "GOSSIPGRAD_DATA."
        ) from error
    return folder


def _cache_folder() -> Path | None:
    """The user's cache of data sets, which need not exist; None for a user without a home."""
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "gossipgrad"
    try:
        return Path.home() / ".cache" / "gossipgrad"
    except RuntimeError:
        return None


def _fetch(url: str, path: Path, digest: str) -> None:
    part = path.with_name(f".{path.name}.part")
    print(f"fetching {url}", file=sys.stderr)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            part.write_bytes(answer.read())
        read_idx(part, sha256=digest)
        part.replace(path)
    except urllib.error.HTTPError as error:
        error.close()  # it keeps the connection open
        raise
    finally:
        part.unlink(missing_ok=True)


def load_fashion_mnist(data_dir: Path | None = None) -> Dataset:
    """Fashion-MNIST: 60,000 training and 10,000 test images, 28x28 grey, ten classes."""
    folder = find_fashion_mnist(data_dir)
    arrays = {name: read_idx(folder / name, sha256=digest) for name, digest in DIGESTS.items()}
    values = arrays["train-images-idx3-ubyte.gz"].astype(np.float64)
    mean, std = float(values.mean()), float(values.std())

    def standardise(
        rows: UInt8[Tensor, "batch channel height width"],
    ) -> Float[Tensor, "batch channel height width"]:
        return rows.float().sub_(mean).div_(std)

    parts = []
    for part in ("train", "t10k"):
        # Copied, since the unpacked content is read-only.
        pixels = torch.from_numpy(arrays[f"{part}-images-idx3-ubyte.gz"].copy()).unsqueeze(1)
        labels = torch.from_numpy(arrays[f"{part}-labels-idx1-ubyte.gz"].astype(np.int64))
        parts.append(TensorSamples(pixels, labels, finish=standardise))
    return Dataset(info=INFO, train=parts[0], test=parts[1])


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
        raise ValueError(f"{path} is damaged ({error}); delete it to fetch it again.") from error
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(
            f"{path} unpacks to content with SHA-256 {found}, expected {sha256}; delete it to "
            "fetch it again."
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

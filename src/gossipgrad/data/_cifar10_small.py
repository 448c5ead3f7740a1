"""A tenth of CIFAR-10 as JPEG: 12,000 images, for runs that are compared with each other."""

import io
import tempfile
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from ._cifar10 import pixel_dataset
from ._dataset import Dataset, DatasetInfo
from ._files import cache_dir, check_sha256, data_folders, find_folder

INFO = DatasetInfo(
    name="cifar10-small",
    input_shape=(3, 32, 32),
    num_classes=10,
    train_samples=10_000,
    test_samples=2_000,
)
DIGESTS = {
    "cifar10_small_train_jpeg.npz": (
        "c53595c359d3c1165e812ecac6651d888ea7c5b5706d6760bba13fed8c90579b"
    ),
    "cifar10_small_test_jpeg.npz": (
        "636eaab087469d38cba334e4b971602a6c2493cbf4fade40ec9b026273094c46"
    ),
}
_WAY_OUT = (
    f"; put the right one there, name another folder that has it in its {INFO.name}/ with "
    "--data-dir or GOSSIPGRAD_DATA, or take data 'cifar10'."
)


def load_cifar10_small(data_dir: Path | None = None) -> Dataset:
    """10,000 training and 2,000 test images of CIFAR-10, through JPEG at quality 75.

    Real, but lossy: compare runs with each other, not with published accuracies. Augmented and
    standardised like CIFAR-10. The decoded pixels are kept in the user's cache, where all ranks
    of a machine map them into memory: decoding takes a second of each.

    Raises:
        ValueError: The archives are not there, one is not the right one, or Pillow is missing.
    """
    if find_spec("PIL") is None:
        raise ValueError(
            f"data {INFO.name!r} is read with Pillow: pip install 'gossipgrad[images]'."
        )
    folder = find_folder(DIGESTS, data_folders(INFO.name, data_dir))
    if folder is None:
        raise ValueError(
            f"data {INFO.name!r} has no public address to fetch it from, and is in none of "
            f"{', '.join(map(str, data_folders(INFO.name, data_dir)))}; name the folder that has "
            f"{' and '.join(DIGESTS)} in its {INFO.name}/ with --data-dir or GOSSIPGRAD_DATA, or "
            "take data 'cifar10'."
        )
    parts = []
    for name, digest in DIGESTS.items():
        check_sha256(folder / name, digest, way_out=_WAY_OUT)
        with np.load(folder / name) as archive:
            parts += [_pixels(archive, digest), archive["labels"]]
    return pixel_dataset(INFO, *parts)


def _pixels(
    archive: np.lib.npyio.NpzFile, digest: str
) -> UInt8[np.ndarray, "sample channel height width"]:
    """Of the archive with this digest, mapped from the cache or decoded."""
    # Another version of the library may decode otherwise.
    cache = cache_dir()
    if cache is None:
        return _decoded(archive["jpeg"], archive["offsets"])
    cached = cache / INFO.name / f"{digest[:16]}-pillow-{version('pillow')}.npy"
    with suppress(OSError, ValueError, EOFError):
        # Copy on write: pages are shared between the ranks, and torch takes them for writable.
        return np.load(cached, mmap_mode="c")
    pixels = _decoded(archive["jpeg"], archive["offsets"])
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Ranks that do this at once write the same bytes; each renames a whole file.
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".writing-") as folder:
            np.save(Path(folder) / cached.name, pixels)
            (Path(folder) / cached.name).replace(cached)
    return pixels


def _decoded(
    jpeg: UInt8[np.ndarray, " byte"], offsets: Int64[np.ndarray, " boundary"]
) -> UInt8[np.ndarray, "sample channel height width"]:
    from PIL import Image

    content = jpeg.tobytes()
    pixels = np.empty((len(offsets) - 1, *INFO.input_shape), dtype=np.uint8)
    for row, start, end in zip(pixels, offsets[:-1], offsets[1:], strict=True):
        with Image.open(io.BytesIO(content[start:end]), formats=("JPEG",)) as image:
            row[:] = np.asarray(image).transpose(2, 0, 1)
    return pixels

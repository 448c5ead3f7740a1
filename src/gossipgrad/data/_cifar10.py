"""CIFAR-10 from its binary files, fetched and unpacked once where they are missing.

References:
    Krizhevsky, Learning multiple layers of features from tiny images, 2009.
"""

import hashlib
import shutil
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from gossipgrad.errors import GossipError

from ._dataset import Dataset, DatasetInfo, TensorSamples
from ._files import check_sha256, data_folders, download_folder, fetch, find_folder
from ._pixels import CropAndFlip, Standardise

INFO = DatasetInfo(
    name="cifar10",
    input_shape=(3, 32, 32),
    num_classes=10,
    train_samples=50_000,
    test_samples=10_000,
)
# Of these files no stronger digest is published than MD5; it tells damage, not forgery.
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
*TRAIN_FILES, TEST_FILE = MD5
ADDRESS = "https://www.cs.toronto.edu/~kriz"
ARCHIVE = "cifar-10-binary.tar.gz"
# Of the archive; its published MD5 is c32a1d4ab5d03f1284b67883e8d87530.
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_ARCHIVED_IN = "cifar-10-batches-bin"
_RECORDS = 10_000
_RECORD_BYTES = 1 + 3 * 32 * 32


def find_cifar10(data_dir: Path | None = None) -> Path:
    """Find the six files; unpack or fetch them where no folder has them all.

    `data_folders` says where; the publisher's archive unpacks to `cifar-10-batches-bin`, which may
    be inside. An archive found there is unpacked beside itself. Else it is fetched to `data_dir`,
    or to the user's cache when None.

    Returns:
        The folder with the six files.

    Raises:
        GossipError: The archive could not be fetched or unpacked, or is not the right one.
        ValueError: An archive in the folder is not the right one.
    """
    names = (*TRAIN_FILES, TEST_FILE)
    folders = data_folders(INFO.name, data_dir)
    unpacked = [folder / inner for folder in folders for inner in ("", _ARCHIVED_IN)]
    if (found := find_folder(names, unpacked)) is not None:
        return found
    check = partial(check_sha256, sha256=SHA256)
    folder = find_folder([ARCHIVE], folders)
    if folder is not None:
        check(folder / ARCHIVE)
    else:
        folder = download_folder(INFO.name, data_dir)
        what = f"{ARCHIVE}, or the six .bin files in it,"
        fetch(f"{ADDRESS}/{ARCHIVE}", folder / ARCHIVE, check, what=what)
    _unpack(folder / ARCHIVE, names)
    return folder


def load_cifar10(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 test images, 32x32 in colour, ten classes.

    Training images are cropped and mirrored at random; all are standardised by the mean and
    deviation of each channel of the training part.

    Raises:
        GossipError: A file is missing and could not be fetched.
        ValueError: A file is damaged; the message names it.
    """
    folder = find_cifar10(data_dir)
    batches = [read_batch(folder / name) for name in TRAIN_FILES]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return pixel_dataset(INFO, pixels, labels, *read_batch(folder / TEST_FILE))


def pixel_dataset(
    info: DatasetInfo,
    train_pixels: UInt8[np.ndarray, "train 3 32 32"],
    train_labels: UInt8[np.ndarray, " train"],
    test_pixels: UInt8[np.ndarray, "test 3 32 32"],
    test_labels: UInt8[np.ndarray, " test"],
) -> Dataset:
    """A data set of images like CIFAR's, augmented and standardised as these are."""
    train_x = torch.from_numpy(train_pixels)
    finish = Standardise.of(train_x)
    return Dataset(
        info=info,
        train=TensorSamples(
            train_x,
            torch.from_numpy(train_labels.astype(np.int64)),
            CropAndFlip(len(train_pixels)),
            finish,
        ),
        test=TensorSamples(
            torch.from_numpy(test_pixels),
            torch.from_numpy(test_labels.astype(np.int64)),
            finish=finish,
        ),
    )


def read_batch(
    path: Path,
) -> tuple[UInt8[np.ndarray, "sample 3 32 32"], UInt8[np.ndarray, " sample"]]:
    """Images and labels of one binary file.

    Raises:
        ValueError: The file is not the published one of its name, 10,000 records of a label from
            0 to 9 and 3,072 pixels.
    """
    content = np.fromfile(path, dtype=np.uint8)
    if content.size != _RECORDS * _RECORD_BYTES:
        raise ValueError(
            f"{path} has {content.size:,} bytes, expected {_RECORDS * _RECORD_BYTES:,}; delete it "
            "to unpack or fetch it anew."
        )
    found = hashlib.md5(content.data, usedforsecurity=False).hexdigest()
    if found != MD5[path.name]:
        raise ValueError(
            f"{path} has MD5 {found}, expected {MD5[path.name]}; delete it to unpack or fetch it "
            "anew."
        )
    records = content.reshape(_RECORDS, _RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _unpack(archive: Path, names: tuple[str, ...]) -> None:
    folder = archive.parent
    try:
        with (
            tarfile.open(archive) as tar,
            tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as partial_folder,
        ):
            for name in names:
                content = tar.extractfile(f"{_ARCHIVED_IN}/{name}")
                assert content is not None, "the archive with this digest holds files"
                with content, (Path(partial_folder) / name).open("wb") as file:
                    shutil.copyfileobj(content, file)
            for name in names:
                (Path(partial_folder) / name).replace(folder / name)
    except OSError as error:
        raise GossipError(
            f"could not unpack {archive} ({error.strerror}); unpack it by hand to a folder "
            f"{INFO.name}/ and name the one that holds this with --data-dir or GOSSIPGRAD_DATA."
        ) from error

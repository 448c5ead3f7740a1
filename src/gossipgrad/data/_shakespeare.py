"""Tiny Shakespeare: a megabyte of plays, predicted character by character."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from ._dataset import Dataset, DatasetInfo
from ._digest import check_sha256
from ._fetch import fetch
from ._places import place_to_fetch_to, place_with, places, way_out
from ._text import TextSamples

FOLDER = "tinyshakespeare"
FILE = "input.txt"
ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
LENGTH = 128
_TRAIN_CHARACTERS = 1_003_854  # 90 percent; the test part is the 111,540 after them
INFO = DatasetInfo(
    name="shakespeare",
    input_shape=(LENGTH,),
    num_classes=65,
    train_samples=7_842,
    test_samples=871,
    kind="text",
)


def prepare_shakespeare(data_dir: Path | None = None) -> None:
    """Make sure that the text is there and is the right one.

    Raises:
        GossipError: It is missing and could not be fetched.
        ValueError: The file in place is not the right one; the message names it.
    """
    check_sha256(find_shakespeare(data_dir), SHA256)


def find_shakespeare(data_dir: Path | None = None, *, address: str = ADDRESS) -> Path:
    """Find `tinyshakespeare/input.txt`; fetch it where no place has it.

    See `places` for where is looked. Goes to `data_dir`, or to the user's cache when none is
    given.

    Raises:
        GossipError: The text could not be fetched, or is not the right one.
    """
    if (found := place_with([FILE], places(FOLDER, data_dir))) is not None:
        return found / FILE
    folder = place_to_fetch_to(FOLDER, data_dir)
    check = partial(check_sha256, sha256=SHA256)
    instead = way_out(f"the {FILE} of tiny Shakespeare", FOLDER, folder)
    fetch(f"{address}/{FILE}", folder / FILE, check, way_out=instead)
    return folder / FILE


def load_shakespeare(data_dir: Path | None = None) -> Dataset:
    """The plays in pieces of 128 characters, each with those that come next as labels.

    The first 90 percent are for training, the rest for the test; characters are numbered in the
    order of their codes.

    Raises:
        GossipError: The text is missing and could not be fetched.
        ValueError: The file in place is not the right one; the message names it.
    """
    path = find_shakespeare(data_dir)
    check_sha256(path, SHA256)
    characters = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    _, numbers = np.unique(characters, return_inverse=True)
    text = torch.from_numpy(numbers.astype(np.uint8))
    return Dataset(
        info=INFO,
        train=TextSamples(text[:_TRAIN_CHARACTERS], LENGTH),
        test=TextSamples(text[_TRAIN_CHARACTERS:], LENGTH),
    )

"""Text in pieces, each labelled with the characters that come next; and tiny Shakespeare."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from ._dataset import Dataset, DatasetInfo
from ._files import check_sha256, data_folders, download_folder, fetch, find_folder

FOLDER = "tinyshakespeare"
FILE = "input.txt"
ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
LENGTH = 128
# Sets the draws apart from those that order the samples of an epoch.
_STREAM = 1
_TRAIN_CHARACTERS = 1_003_854  # 90 percent; the test part is the 111,540 after them
INFO = DatasetInfo(
    name="shakespeare",
    input_shape=(LENGTH,),
    num_classes=65,
    train_samples=7_842,
    test_samples=871,
    kind="text",
)


def find_shakespeare(data_dir: Path | None = None) -> Path:
    """Find `tinyshakespeare/input.txt`; fetch it where no folder has it.

    `data_folders` says where. Goes to `data_dir`, or to the user's cache when None.

    Raises:
        GossipError: The text could not be fetched, or is not the right one.
    """
    if (found := find_folder([FILE], data_folders(FOLDER, data_dir))) is not None:
        return found / FILE
    folder = download_folder(FOLDER, data_dir)
    check = partial(check_sha256, sha256=SHA256)
    fetch(f"{ADDRESS}/{FILE}", folder / FILE, check, what=f"the {FILE} of tiny Shakespeare")
    return folder / FILE


def load_shakespeare(data_dir: Path | None = None) -> Dataset:
    """The plays in pieces of 128 characters, each with those that come next as labels.

    The first 90 percent are for training, the rest for the test; characters are numbered in the
    order of their codes.

    Raises:
        GossipError: The text is missing and could not be fetched.
        ValueError: The file in the folder is not the right one; the message names it.
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


@dataclass(frozen=True, slots=True)
class TextSamples:
    """Pieces of a text, one after the other, without overlap.

    In training an epoch starts the first piece at another character, drawn from `(seed, epoch)`,
    so that the cuts fall elsewhere; a last piece that would pass the end of the text starts
    earlier.

    Args:
        text: Numbers of the characters.
        length: Characters a piece.

    Raises:
        ValueError: The text is too short for one piece and the character after it.

    Example:
        >>> samples = TextSamples(torch.arange(9, dtype=torch.uint8), 4)
        >>> x, y = samples.batch(torch.tensor([1]))
        >>> x.tolist(), y.tolist()
        ([[4, 5, 6, 7]], [[5, 6, 7, 8]])
    """

    text: UInt8[Tensor, " character"]
    length: int

    def __post_init__(self) -> None:
        if not 0 < self.length < len(self.text):
            raise ValueError(
                f"length is {self.length}, but must be at least 1 and below the "
                f"{len(self.text)} characters of the text."
            )

    def __len__(self) -> int:
        """How many whole pieces there are."""
        return (len(self.text) - 1) // self.length

    @property
    def labels(self) -> None:
        """None: every position has a label of its own."""
        return None

    def batch(
        self, indices: Int[Tensor, " batch"], *, augment: tuple[int, int] | None = None
    ) -> tuple[Int[Tensor, "batch position"], Int[Tensor, "batch position"]]:
        """Pieces and what comes next at each of their positions; see `Samples.batch`."""
        first = 0
        if augment is not None:
            first = int(np.random.default_rng((*augment, _STREAM)).integers(self.length))
        last = len(self.text) - self.length - 1
        starts = (indices * self.length + first).clamp(max=last)
        pieces = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]

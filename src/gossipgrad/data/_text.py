"""A text in pieces, each labelled with the characters that come next."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

# Sets the draws apart from those that order the samples of an epoch.
_STREAM = 1


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

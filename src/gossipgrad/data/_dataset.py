"""A data set as a value: what is known of it, and its training and test parts, by index."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Int, Shaped
from torch import Tensor

Augmentation = Callable[
    [Shaped[Tensor, "batch *shape"], Int[Tensor, " batch"], tuple[int, int]],
    Shaped[Tensor, "batch *shape"],
]
"""Takes raw rows, their indices and `(seed, epoch)`; gives rows of the same shape."""
Finish = Callable[[Shaped[Tensor, "batch *shape"]], Shaped[Tensor, "batch *shape"]]
"""Makes inputs for a model out of rows as they are stored."""


@runtime_checkable
class Samples(Protocol):
    """One part of a data set, the training or the test part, by index."""

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    @property
    def labels(self) -> Int[Tensor, " sample"] | None:
        """The class of each sample; None where a sample has no single one, as in text."""
        ...

    def batch(
        self, indices: Int[Tensor, " batch"], *, augment: tuple[int, int] | None = None
    ) -> tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]:
        """Inputs and targets of the samples at `indices`, in this order.

        Args:
            indices: Which samples, each in `0..len(self) - 1`.
            augment: `(seed, epoch)` for training: what is drawn for a sample depends on these and
                on its index alone, not on the batch it comes in. None gives it as it is.
        """
        ...


@dataclass(frozen=True, slots=True)
class TensorSamples:
    """Samples that lie in memory as two tensors.

    Args:
        x: Inputs as stored, one row a sample; pixels may stay bytes until a batch is made.
        y: The class of each sample, (sample,), or of each position of it, (sample, position).
        augmentation: Changes the rows of a training batch.
        finish: Makes the inputs of a model out of the rows of a batch, after the augmentation;
            None: they are ready as stored.

    Raises:
        ValueError: `x` and `y` are not equally long.

    Example:
        >>> import torch
        >>> samples = TensorSamples(torch.eye(3), torch.arange(3))
        >>> x, y = samples.batch(torch.tensor([2, 0]))
        >>> x.tolist(), y.tolist()
        ([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], [2, 0])
    """

    x: Shaped[Tensor, "..."]
    y: Int[Tensor, "..."]
    augmentation: Augmentation | None = None
    finish: Finish | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} inputs but {len(self.y)} labels; each needs one.")

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.y)

    @property
    def labels(self) -> Int[Tensor, " sample"] | None:
        """The class of each sample; None where every position has one."""
        return self.y if self.y.ndim == 1 else None

    def batch(
        self, indices: Int[Tensor, " batch"], *, augment: tuple[int, int] | None = None
    ) -> tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]:
        """Inputs and targets of the samples at `indices`; see `Samples.batch`."""
        return self.inputs(self.x[indices], indices, augment=augment), self.y[indices]

    def inputs(
        self,
        rows: Shaped[Tensor, "batch ..."],
        indices: Int[Tensor, " batch"],
        *,
        augment: tuple[int, int] | None = None,
    ) -> Shaped[Tensor, "batch ..."]:
        """Inputs of a model from rows of `x`, wherever they are now.

        Args:
            rows: As stored in `x`.
            indices: Of these rows in `x`; they decide what is drawn.
            augment: See `Samples.batch`.
        """
        if augment is not None and self.augmentation is not None:
            rows = self.augmentation(rows, indices, augment)
        return rows if self.finish is None else self.finish(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """What is known of a data set before it is loaded."""

    name: str
    """Name on the command line."""
    input_shape: tuple[int, ...]
    """Of one sample: channels, height and width."""
    num_classes: int
    """Labels run from 0 to `num_classes - 1`."""
    train_samples: int
    """Size of the training part."""
    test_samples: int
    """Size of the test part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A data set: what is known of it and its two parts.

    Raises:
        ValueError: A part is not as long as `info` says, or a label is out of range.
    """

    info: DatasetInfo
    train: Samples
    test: Samples

    def __post_init__(self) -> None:
        name, num_classes = self.info.name, self.info.num_classes
        for part, samples, size in (
            ("train", self.train, self.info.train_samples),
            ("test", self.test, self.info.test_samples),
        ):
            if len(samples) != size:
                raise ValueError(
                    f"{name}: {len(samples)} {part} samples, but its info says {size}."
                )
            labels = samples.labels
            if labels is None or not len(labels):
                continue
            low, high = int(labels.min()), int(labels.max())
            if not 0 <= low <= high < num_classes:
                raise ValueError(
                    f"{name}: {part} labels run from {low} to {high}, but must lie in "
                    f"0..{num_classes - 1} for num_classes={num_classes}."
                )

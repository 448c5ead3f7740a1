"""A data set as a value: what is known of it, its training part and its test part."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ._samples import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """What is known of a data set before it is loaded."""

    name: str
    """Name on the command line."""
    input_shape: tuple[int, ...]
    """Of one sample: channels, height and width of an image; the length of a text."""
    num_classes: int
    """Labels run from 0 to `num_classes - 1`; of a text, the size of its vocabulary."""
    train_samples: int
    """Size of the training part."""
    test_samples: int
    """Size of the test part."""
    kind: Literal["images", "text"] = "images"
    """images: one label a sample. text: one label a position, the character that comes next."""


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
        for part, samples, told in (
            ("train", self.train, self.info.train_samples),
            ("test", self.test, self.info.test_samples),
        ):
            if len(samples) != told:
                raise ValueError(
                    f"{name}: {len(samples)} {part} samples, but its info says {told}."
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


def normalised(
    train: Float[Tensor, "train channel height width"],
    test: Float[Tensor, "test channel height width"],
) -> tuple[Float[Tensor, "train channel height width"], Float[Tensor, "test channel height width"]]:
    """Both parts shifted and scaled by the mean and standard deviation of the training part."""
    std, mean = (float(value) for value in _std_mean(train))
    return train.sub_(mean).div_(std), test.sub_(mean).div_(std)


def _std_mean(x: Float[Tensor, "train channel height width"]) -> tuple[float, float]:
    # One pass in float64 over row means keeps a mean of 47 million values exact to float32.
    flat = x.flatten(1)
    mean = float(flat.mean(1).double().mean())
    second_moment = float(flat.square().mean(1).double().mean())
    return (second_moment - mean * mean) ** 0.5, mean

"""Images as bytes in memory: made into inputs, and cropped and flipped, batch by batch."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

_MEASURED_AT_ONCE = 500
# Sets the stream of draws apart from the one that orders the samples of an epoch.
_STREAM = 1


@dataclass(frozen=True, slots=True)
class Standardise:
    """Shifts and scales pixels to mean 0 and standard deviation 1 in each channel.

    Args:
        mean: Of each channel, in the unit of the pixels.
        std: Of each channel; above 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, pixels: UInt8[Tensor, "sample channel height width"]) -> "Standardise":
        """By the mean and deviation of each channel of `pixels`, a training part."""
        sums = torch.zeros(2, pixels.shape[1], dtype=torch.float64)
        for rows in pixels.flatten(2).split(_MEASURED_AT_ONCE):
            values = rows.float()
            for total in sums:
                # Float32 within an image and float64 across images is as exact as is needed.
                total += values.sum(-1).double().sum(0)
                values.square_()
        mean, square = sums / (pixels.numel() / pixels.shape[1])
        std = (square - mean.square()).clamp(min=0).sqrt()
        # A channel without contrast is 0 throughout.
        std[std == 0] = 1
        return cls(tuple(mean.tolist()), tuple(std.tolist()))

    def __call__(
        self, rows: UInt8[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch channel height width"]:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return rows.float().sub_(mean).div_(std)


@dataclass(frozen=True, slots=True)
class CropAndFlip:
    """The augmentation of CIFAR: padded with black, cropped at random, half of them mirrored.

    What is drawn for a sample depends on `(seed, epoch)` and its index alone.

    Args:
        num_samples: Of the part that the samples are from.
        padding: Pixels on each side.

    References:
        He, Zhang, Ren, Sun, Deep residual learning for image recognition, 2016, section 4.2.
        Deviation: (1) padded before the mean is taken off, so with black and not with the mean.
    """

    num_samples: int
    padding: int = 4

    def __call__(
        self,
        rows: UInt8[Tensor, "batch channel height width"],
        indices: Int[Tensor, " batch"],
        augment: tuple[int, int],
    ) -> UInt8[Tensor, "batch channel height width"]:
        """Crops of `rows`, the samples at `indices`; `augment` is `(seed, epoch)`."""
        height, width = rows.shape[-2:]
        draws = _draws(self.num_samples, self.padding, augment)[indices.numpy()]
        top, left, mirrored = torch.from_numpy(draws).unbind(1)
        padded = F.pad(rows, (self.padding,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        crops = windows[torch.arange(len(rows)), :, top, left]
        return torch.where(mirrored.bool()[:, None, None, None], crops.flip(-1), crops)


@lru_cache(maxsize=2)
def _draws(num_samples: int, padding: int, augment: tuple[int, int]) -> Int[np.ndarray, "sample 3"]:
    """Top, left and whether to mirror, of every sample in an epoch."""
    rng = np.random.default_rng((*augment, _STREAM))
    return rng.integers(0, (2 * padding + 1, 2 * padding + 1, 2), size=(num_samples, 3))

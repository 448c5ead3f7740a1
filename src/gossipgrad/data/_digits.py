"""Handwritten digits of 8x8 pixels, part of the package: 1797 samples, no download."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._dataset import Dataset, DatasetInfo, TensorSamples

INFO = DatasetInfo(
    name="digits", input_shape=(1, 8, 8), num_classes=10, train_samples=1437, test_samples=360
)
# The split belongs to the data set: runs with different seeds are judged on the same samples.
_SPLIT_SEED = 0
_TABLE = Path(__file__).parent / "digits" / "digits.csv.gz"


def load_digits() -> tuple[Float[Tensor, "row pixel"], Int[Tensor, " row"]]:
    """The table of digits as it lies in the package: 1797 images of 8x8 pixels, and their labels.

    `data.load("digits")` has the same rows normalised, and split into two parts.

    Returns:
        Rows of 64 pixels, float32 from 0 to 1, and the digits they show, int64.

    Example:
        >>> images, labels = load_digits()
        >>> images.shape, labels[:5].tolist()
        (torch.Size([1797, 64]), [0, 1, 2, 3, 4])
    """
    table = torch.from_numpy(np.loadtxt(_TABLE, delimiter=",", dtype=np.int64))
    return table[:, :64].float() / 16, table[:, 64].clone()


def digits_dataset() -> Dataset:
    """The digits, split into 1437 training and 360 test samples."""
    images, targets = load_digits()
    images, labels = 16 * images.reshape(-1, *INFO.input_shape), targets.numpy()
    test = torch.from_numpy(stratified_mask(labels, INFO.test_samples, seed=_SPLIT_SEED))
    train_x, test_x = _normalised(images[~test], images[test])
    return Dataset(
        info=INFO,
        train=TensorSamples(train_x, targets[~test]),
        test=TensorSamples(test_x, targets[test]),
    )


def stratified_mask(labels: Int[np.ndarray, " sample"], count: int, *, seed: int) -> np.ndarray:
    """Choose `count` samples so that each class keeps its share to within one."""
    rng = np.random.default_rng(seed)
    classes, sizes = np.unique(labels, return_counts=True)
    shares = sizes * count / len(labels)
    quotas = np.floor(shares).astype(int)
    missing = count - int(quotas.sum())
    quotas[np.argsort(quotas - shares, kind="stable")[:missing]] += 1
    mask = np.zeros(len(labels), dtype=bool)
    for label, quota in zip(classes, quotas, strict=True):
        mask[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    return mask


def _normalised(
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

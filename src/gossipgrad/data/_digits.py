"""The 8x8 digits that come with scikit-learn: 1797 samples, no download."""

from importlib.util import find_spec
from typing import Any

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


def load_digits() -> Dataset:
    """The digits, split into 1437 training and 360 test samples.

    The split is seeded and stratified: of each class, the same share (to within one sample) is
    test.

    Raises:
        ValueError: Scikit-learn is missing.
    """
    if find_spec("sklearn") is None:
        raise ValueError("data 'digits' comes with scikit-learn: pip install 'gossipgrad[demo]'.")
    from sklearn.datasets import load_digits as sklearn_digits  # 1 s to import

    bunch: Any = sklearn_digits()
    labels = np.asarray(bunch["target"], dtype=np.int64)
    images = torch.from_numpy(np.asarray(bunch["images"], dtype=np.float32)).unsqueeze(1)
    targets = torch.from_numpy(labels)
    test = torch.from_numpy(stratified_mask(labels, INFO.test_samples, seed=_SPLIT_SEED))
    train_x, test_x = _normalised(images[~test], images[test])
    return Dataset(
        info=INFO,
        train=TensorSamples(train_x, targets[~test]),
        test=TensorSamples(test_x, targets[test]),
    )


def stratified_mask(labels: Int[np.ndarray, " sample"], count: int, *, seed: int) -> np.ndarray:
    """Choose `count` samples so that each class keeps its share to within one.

    Classes get the floor of their share; the samples still missing go to the largest remainders,
    the smaller label first.
    """
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

"""Samples by index, and batches that are made ahead."""

import threading

import pytest
import torch

from gossipgrad.data import (
    Dataset,
    DatasetInfo,
    TensorSamples,
    made_ahead,
)


def toy_info(**changes):
    sizes = {"input_shape": (1,), "num_classes": 2, "train_samples": 2, "test_samples": 2}
    return DatasetInfo(name="toy", **{**sizes, **changes})


def toy(labels):
    return TensorSamples(torch.zeros(len(labels), 1), torch.tensor(labels))


def test_augmentation_goes_before_the_finish_and_only_when_asked_for():
    samples = TensorSamples(
        torch.tensor([10, 20], dtype=torch.uint8),
        torch.arange(2),
        lambda rows, indices, augment: rows + indices + augment[0] + augment[1],
        lambda rows: rows / 2,
    )
    everything = torch.arange(2)
    assert samples.batch(everything)[0].tolist() == [5.0, 10.0]
    assert samples.batch(everything, augment=(2, 3))[0].tolist() == [7.5, 13.0]


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 inputs but 2 labels"):
        TensorSamples(torch.zeros(3), torch.arange(2))
    with pytest.raises(ValueError, match=r"toy: test labels"):
        Dataset(info=toy_info(), train=toy([0, 1]), test=toy([0, 2]))
    with pytest.raises(ValueError, match="toy: 2 train samples"):
        Dataset(info=toy_info(train_samples=3), train=toy([0, 1]), test=toy([0, 1]))


def data_threads():
    return [thread for thread in threading.enumerate() if "gossipgrad-data" in thread.name]


@pytest.mark.parametrize("threads", [0, 1, 3, 20])
def test_results_made_ahead_come_in_order_and_errors_where_they_belong(threads):
    def make(item):
        return 60 // (7 - item)

    results = made_ahead(make, range(10), threads=threads)
    assert [next(results) for _ in range(7)] == [60 // (7 - item) for item in range(7)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not data_threads()

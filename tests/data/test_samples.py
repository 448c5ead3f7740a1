"""Samples by index: tensors, text, augmented pixels; and batches that are made ahead."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.data import (
    CropAndFlip,
    Dataset,
    DatasetInfo,
    Samples,
    Standardise,
    TensorSamples,
    TextSamples,
    made_ahead,
)
from support.waiting import HANG_SECONDS


def toy_info(**changes):
    sizes = {"input_shape": (1,), "num_classes": 2, "train_samples": 2, "test_samples": 2}
    return DatasetInfo(name="toy", **{**sizes, **changes})


def toy(labels):
    return TensorSamples(torch.zeros(len(labels), 1), torch.tensor(labels))


def test_rows_come_in_the_order_of_the_indices():
    samples = TensorSamples(torch.arange(8).reshape(4, 2), torch.arange(4))
    x, y = samples.batch(torch.tensor([3, 0]))
    assert (x.tolist(), y.tolist()) == ([[6, 7], [0, 1]], [3, 0])
    assert isinstance(samples, Samples)


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


def test_labels_of_positions_are_no_labels_of_samples():
    assert TensorSamples(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)).labels is None
    assert toy([1, 0]).labels.tolist() == [1, 0]


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 inputs but 2 labels"):
        TensorSamples(torch.zeros(3), torch.arange(2))
    with pytest.raises(ValueError, match=r"toy: test labels"):
        Dataset(info=toy_info(), train=toy([0, 1]), test=toy([0, 2]))
    with pytest.raises(ValueError, match="toy: 2 train samples"):
        Dataset(info=toy_info(train_samples=3), train=toy([0, 1]), test=toy([0, 1]))
    with pytest.raises(ValueError, match="length is 4"):
        counted(4, 4)


def counted(characters, length):
    return TextSamples(torch.arange(characters, dtype=torch.uint8), length)


def everything(samples):
    return torch.arange(len(samples))


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(n + 1, 200), st.just(n))))
def test_pieces_cover_the_text_without_overlap(sizes):
    samples = counted(*sizes)
    x, y = samples.batch(everything(samples))
    covered = len(samples) * sizes[1]
    assert x.flatten().tolist() == list(range(covered))
    assert y.flatten().tolist() == list(range(1, covered + 1))
    assert covered + sizes[1] >= sizes[0]
    assert isinstance(samples, Samples)


def test_text_is_cut_elsewhere_in_each_epoch_and_stays_in_the_text():
    samples = counted(200, 7)
    starts = set()
    for epoch in range(60):
        x, y = samples.batch(everything(samples), augment=(0, epoch))
        assert torch.equal(y, x + 1)
        assert torch.equal(x[:-1, 0], x[0, 0] + 7 * torch.arange(len(x) - 1))
        assert int(y.max()) <= 199
        starts.add(int(x[0, 0]))
        alone, _ = samples.batch(torch.tensor([3]), augment=(0, epoch))
        assert torch.equal(alone[0], x[3])
    assert starts == set(range(7))


@pytest.fixture
def rows():
    draw = torch.Generator().manual_seed(0)
    return torch.randint(256, (1030, 3, 8, 6), generator=draw, dtype=torch.uint8)


def test_standardised_channels_have_mean_0_and_deviation_1(rows):
    x = Standardise.of(rows)(rows).double()
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3).double(), atol=1e-6, rtol=0)
    deviation = x.std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviation, torch.ones(3).double(), atol=1e-6, rtol=0)
    flat = torch.full((4, 1, 2, 2), 7, dtype=torch.uint8)
    assert not Standardise.of(flat)(flat).any(), "a channel without contrast becomes 0"


def test_every_crop_is_a_window_of_the_padded_image_or_its_mirror(rows):
    rows = rows[:30]
    crops = CropAndFlip(30, padding=2)(rows, torch.arange(30), (0, 0))
    frame = torch.nn.functional.pad(rows, (2, 2, 2, 2))
    found = set()
    for index in range(30):
        windows = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(
                crops[index].flip(-1) if mirrored else crops[index],
                frame[index, :, top : top + 8, left : left + 6],
            )
        ]
        assert len(windows) == 1
        found.update(windows)
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(5))
    assert {mirrored for _, _, mirrored in found} == {False, True}


@given(st.permutations(range(12)), st.integers(1, 12))
def test_the_draw_of_a_sample_depends_on_seed_epoch_and_index_alone(order, size):
    rows = torch.arange(12 * 16, dtype=torch.uint8).reshape(12, 1, 4, 4)
    augmentation = CropAndFlip(12, padding=3)
    whole = augmentation(rows, torch.arange(12), (3, 1))
    for start in range(0, 12, size):
        indices = torch.tensor(order[start : start + size])
        assert torch.equal(augmentation(rows[indices], indices, (3, 1)), whole[indices])
    for other in ((3, 2), (2, 1)):
        assert not torch.equal(whole, augmentation(rows, torch.arange(12), other))


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


def test_works_so_far_ahead_and_no_farther():
    made, third = [], threading.Event()

    def make(item):
        made.append(item)
        if len(made) == 3:
            third.set()
        return item

    results = made_ahead(make, range(10), threads=2)
    assert next(results) == 0
    assert third.wait(HANG_SECONDS)
    assert sorted(made) == [0, 1, 2]
    results.close()
    assert not data_threads()

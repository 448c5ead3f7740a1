import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.data import _pixels
from gossipgrad.data._pixels import CropAndFlip, Standardise


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (30, 3, 8, 6), dtype=np.uint8)


def test_standardised_channels_have_mean_0_and_deviation_1(pixels, monkeypatch):
    monkeypatch.setattr(_pixels, "_MEASURED_AT_ONCE", 7)
    rows = torch.from_numpy(pixels)
    x = Standardise.of(rows)(rows).double()
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        x.std((0, 2, 3), correction=0), torch.ones(3).double(), atol=1e-6, rtol=0
    )


def test_channel_without_contrast_becomes_0():
    pixels = torch.full((4, 1, 2, 2), 7, dtype=torch.uint8)
    assert not Standardise.of(pixels)(pixels).any()


def padded(rows, padding):
    size = rows.shape
    frame = torch.zeros(*size[:2], size[2] + 2 * padding, size[3] + 2 * padding, dtype=torch.uint8)
    frame[:, :, padding:-padding, padding:-padding] = rows
    return frame


def test_every_crop_is_a_window_of_the_padded_image_or_its_mirror(pixels):
    rows = torch.from_numpy(pixels)
    crops = CropAndFlip(30, padding=2)(rows, torch.arange(30), (0, 0))
    frame = padded(rows, 2)
    found = set()
    for index in range(30):
        places = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(
                crops[index].flip(-1) if mirrored else crops[index],
                frame[index, :, top : top + 8, left : left + 6],
            )
        ]
        assert len(places) == 1
        found.update(places)
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(5))
    assert {mirrored for _, _, mirrored in found} == {False, True}


@given(st.permutations(range(12)), st.integers(1, 12))
def test_draw_of_a_sample_does_not_depend_on_its_batch(order, size):
    rows = torch.arange(12 * 16, dtype=torch.uint8).reshape(12, 1, 4, 4)
    augmentation = CropAndFlip(12, padding=3)
    whole = augmentation(rows, torch.arange(12), (3, 1))
    for start in range(0, 12, size):
        indices = torch.tensor(order[start : start + size])
        assert torch.equal(augmentation(rows[indices], indices, (3, 1)), whole[indices])


def test_draws_change_with_epoch_and_seed(pixels):
    rows, everything = torch.from_numpy(pixels), torch.arange(30)
    augmentation = CropAndFlip(30)
    first = augmentation(rows, everything, (0, 0))
    assert torch.equal(first, augmentation(rows, everything, (0, 0)))
    for other in ((0, 1), (1, 0)):
        assert not torch.equal(first, augmentation(rows, everything, other))

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad import data
from gossipgrad.data._digits import stratified_mask


def test_loads_what_info_says():
    digits = data.load("digits")
    assert digits.info == data.info("digits")
    assert len(digits.train) == 1437
    assert len(digits.test) == 360


def test_is_normalised_by_the_training_part():
    digits = data.load("digits")
    assert abs(float(digits.train.x.mean())) < 1e-5
    assert abs(float(digits.train.x.std()) - 1) < 1e-3
    assert abs(float(digits.test.x.mean())) > 1e-4


def test_split_is_the_same_every_time_and_shares_no_sample():
    first, second = data.load("digits"), data.load("digits")
    torch.testing.assert_close(first.test.x, second.test.x, rtol=0, atol=0)
    both = torch.cat([first.train.x, first.test.x]).flatten(1)
    assert len(both.unique(dim=0)) == len(both)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data(), st.integers(0, 2**32))
def test_stratified_mask_keeps_every_share_to_within_one(labels, draw, seed):
    count = draw.draw(st.integers(0, len(labels)))
    labels = np.array(labels)
    mask = stratified_mask(labels, count, seed=seed)
    assert mask.sum() == count
    for label in np.unique(labels):
        share = (labels == label).sum() * count / len(labels)
        assert abs(mask[labels == label].sum() - share) < 1

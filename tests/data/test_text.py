import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.data import Samples
from gossipgrad.data._text import TextSamples


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


def test_is_samples_without_labels():
    samples = counted(50, 4)
    assert isinstance(samples, Samples)
    assert samples.labels is None


def test_training_cuts_elsewhere_in_each_epoch_and_stays_in_the_text():
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


def test_refuses_a_text_shorter_than_a_piece():
    with pytest.raises(ValueError, match="length is 4, but must be at least 1 and below the 4 cha"):
        counted(4, 4)

import pytest
import torch
from torch import nn

from gossipgrad.data import Dataset, DatasetInfo, TensorSamples
from gossipgrad.train._evaluate import TestPart
from support.jobs import job_on


class Repeat(nn.Module):
    """Predicts that each character comes again."""

    def forward(self, x):
        assert not self.training
        return nn.functional.one_hot(x, 5).float()


@pytest.fixture
def text():
    x = torch.randint(5, (150, 7), generator=torch.Generator().manual_seed(0))
    y = torch.where(torch.arange(7) < 3, x, (x + 1) % 5)
    samples = TensorSamples(x, y)
    info = DatasetInfo(
        name="toy",
        input_shape=(7,),
        num_classes=5,
        train_samples=150,
        test_samples=150,
    )
    return Dataset(info=info, train=samples, test=samples)


def test_accuracy_of_text_counts_every_position(text):
    part = TestPart(job_on(text), rank=0, world_size=1)
    assert part.accuracy(Repeat()) == pytest.approx(3 / 7)


def test_shares_add_up_to_the_whole(text):
    parts = [TestPart(job_on(text), rank=rank, world_size=4) for rank in range(4)]
    assert sum(part.sum_share(Repeat()) for part in parts).tolist() == [150 * 3, 150 * 7]

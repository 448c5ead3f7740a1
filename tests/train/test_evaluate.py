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


def test_model_is_left_in_the_mode_it_was_in(text):
    model = Repeat()
    TestPart(job_on(text), rank=0, world_size=1).accuracy(model)
    assert model.training


def test_large_images_come_in_small_batches():
    def part(*shape):
        samples = TensorSamples(torch.zeros(2, *shape), torch.arange(2))
        info = DatasetInfo(
            name="toy", input_shape=shape, num_classes=2, train_samples=2, test_samples=2
        )
        dataset = Dataset(info=info, train=samples, test=samples)
        return TestPart(job_on(dataset), rank=0, world_size=1)

    assert part(1, 8, 8).batch_size == 1000
    assert part(3, 224, 224).batch_size == 6

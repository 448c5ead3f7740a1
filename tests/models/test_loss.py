import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossipgrad.models import AuxiliaryLogits, training_loss


class Returns(nn.Module):
    def __init__(self, *logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        first, *others = self.logits
        return AuxiliaryLogits(first, tuple(others)) if others else first


def test_of_a_class_each_sample():
    logits, y = torch.randn(6, 10), torch.arange(6)
    loss = training_loss(Returns(logits), torch.zeros(6, 4), y)
    assert torch.equal(loss, F.cross_entropy(logits, y))


def test_of_a_class_each_position():
    logits, y = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [4, 3, 2]])
    loss = training_loss(Returns(logits), torch.zeros(2, 3, dtype=torch.int64), y)
    by_hand = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(loss, by_hand)


def test_auxiliary_heads_count_three_tenths_each():
    logits, first, second = torch.randn(3, 4, 7)
    y = torch.arange(4)
    loss = training_loss(Returns(logits, first, second), torch.zeros(4, 1), y)
    others = F.cross_entropy(first, y) + F.cross_entropy(second, y)
    torch.testing.assert_close(loss, F.cross_entropy(logits, y) + 0.3 * others)


def test_logits_that_do_not_fit_the_labels_are_refused():
    with pytest.raises(
        ValueError,
        match=r"labels of shape \(2, 3\) need logits of shape \(2, 3, 'classes'\), but the model "
        r"returned \(2, 10\); is it a model for this data\?",
    ):
        training_loss(Returns(torch.zeros(2, 10)), torch.zeros(2, 3), torch.zeros(2, 3).long())

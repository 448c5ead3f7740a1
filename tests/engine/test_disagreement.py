"""`session.disagreement`: how far what replicas predict for one batch is apart."""

import pytest
import torch
from torch import nn

from support.replicas import network, plain_sgd
from support.sessions import run_sessions

BATCH = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))


def test_is_the_mean_distance_of_jensen_and_shannon():
    """By its definition, on three ranks; equal replicas agree."""

    def use(me):
        me.train(3)
        me.session.wait()
        distance = me.session.disagreement(BATCH)
        predicted = me.model(BATCH).detach().double().softmax(-1)
        me.session.average_()
        return distance, predicted, me.session.disagreement(BATCH)

    distances, predicted, of_equal = zip(*run_sessions(3, use, mode="sync"), strict=True)
    p = torch.stack(predicted)
    divergence = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    assert list(distances) == pytest.approx([divergence.sqrt().mean().item()] * 3)
    assert max(of_equal) < 1e-7


class Constant(nn.Module):
    """Predicts the same for each row, with dropout and what else must not be disturbed."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(6)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.dropout(self.logits + 0 * self.frozen(x).sum(1, keepdim=True))


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_changes_nothing(mode):
    def use(me, looks=True):
        me.train()
        me.model.frozen.eval()
        buffers = [b.clone() for b in me.model.buffers()]
        me.group.barrier()
        if looks:
            me.session.disagreement(BATCH)
        assert me.model.training
        assert me.model.dropout.training
        assert not me.model.frozen.training
        assert all(torch.equal(a, b) for a, b in zip(buffers, me.model.buffers(), strict=True))
        assert me.model.logits.grad is not None
        me.train(2)
        return me.weights()

    def gradients(model, rank, step):
        model.logits.grad = torch.full((3,), float(rank + step))

    settings = {"make": lambda rank: Constant(), "optimizer": plain_sgd, "gradients": gradients}
    ours = run_sessions(2, use, mode=mode, **settings)
    plain = run_sessions(2, lambda me: use(me, looks=False), mode=mode, **settings)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_different_batches_and_what_is_no_logits_are_refused_on_every_rank():
    class Named(nn.Sequential):
        def forward(self, x):
            return {"out": super().forward(x)}

    def use(me):
        with pytest.raises(ValueError, match=r"different|logits"):
            me.session.disagreement(BATCH + me.rank)

    run_sessions(2, use)
    run_sessions(1, use, make=lambda rank: Named(*network()))

"""`session.disagreement`: how far what replicas predict for one batch is apart."""

import math

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.replicas import network, plain_sgd
from support.sessions import run_sessions

BATCH = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))


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


def set_logits(me, values):
    with torch.no_grad():
        me.model.logits.copy_(torch.tensor(values))
    me.session.accept_changes()


def test_equal_replicas_agree():
    assert max(run_sessions(3, lambda me: me.session.disagreement(BATCH))) < 1e-7


def test_is_the_distance_of_jensen_and_shannon():
    """Two replicas, each sure of another class: the divergence is log 2."""

    def use(me):
        set_logits(me, [60.0, 0.0, 0.0] if me.rank == 0 else [0.0, 60.0, 0.0])
        return me.session.disagreement(BATCH)

    found = run_sessions(2, use, make=lambda rank: Constant(), optimizer=plain_sgd, mode="sync")
    assert found == pytest.approx([math.sqrt(math.log(2))] * 2)


def test_agrees_with_its_definition_on_three_ranks():
    def use(me):
        me.train(3)
        me.session.wait()
        distance = me.session.disagreement(BATCH)
        return distance, me.model(BATCH).detach().double().softmax(-1)

    results = run_sessions(3, use, mode="sync")
    p = torch.stack([p for _, p in results])
    divergence = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    assert [d for d, _ in results] == pytest.approx([divergence.sqrt().mean().item()] * 3)


def test_changes_nothing():
    def use(me):
        me.train()
        me.model.frozen.eval()
        buffers = [b.clone() for b in me.model.buffers()]
        if me.rank == 0:  # threads share the generator
            torch.manual_seed(3)
        me.group.barrier()
        me.session.disagreement(BATCH)
        assert me.model.training
        assert me.model.dropout.training
        assert not me.model.frozen.training
        assert all(torch.equal(a, b) for a, b in zip(buffers, me.model.buffers(), strict=True))
        assert me.model.logits.grad is not None
        me.train(2)
        return me.weights()

    def undisturbed(me):
        me.train(3)
        return me.weights()

    def gradients(model, rank, step):
        model.logits.grad = torch.full((3,), float(rank + step))

    settings = {"make": lambda rank: Constant(), "optimizer": plain_sgd, "gradients": gradients}
    for mode in ("overlap", "sync"):
        ours = run_sessions(2, use, mode=mode, **settings)
        plain = run_sessions(2, undisturbed, mode=mode, **settings)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_random_numbers_go_on_as_before():
    def use(me):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        me.session.disagreement(BATCH)
        return torch.equal(before, torch.get_rng_state())

    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + torch.randn(1)

    assert run_sessions(1, use, make=lambda rank: Noisy(*network())) == [True]


def test_different_batches_are_refused_on_every_rank():
    def use(me):
        with pytest.raises(ValueError, match="different"):
            me.session.disagreement(BATCH + me.rank)
        return me.session.disagreement(BATCH)

    assert max(run_sessions(2, use)) < 1e-7


def test_what_returns_no_logits_is_refused():
    class Named(nn.Sequential):
        def forward(self, x):
            return {"out": super().forward(x)}

    def use(me):
        with pytest.raises(ValueError, match="logits"):
            me.session.disagreement(BATCH)

    run_sessions(1, use, make=lambda rank: Named(*network()))


def test_is_of_those_that_live():
    def use(me):
        me.train()
        me.group.barrier()
        if me.rank == 2:
            me.session.close()
            return None
        me.train_until(lambda: len(me.session.membership.living) == 2)
        return me.session.disagreement(BATCH)

    quick = gg.Heartbeats(silent_seconds=2.0, lease_seconds=1.0, interval_seconds=0.1)
    first, second, _ = run_sessions(3, use, heartbeats=quick, leaves_together=False)
    assert first == second > 0

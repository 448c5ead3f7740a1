"""One rule for buffers in all collectives: statistics are averaged, all else stays a rank's own."""

import torch
from torch import nn

import gossipgrad as gg
from support.sessions import run_sessions

LOW = torch.finfo(torch.float32).min


class Buffers(nn.Module):
    """One of each kind: statistics, unit vectors, a mask, and a cache that grows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.unit = nn.utils.spectral_norm(nn.Linear(2, 2))
        self.register_buffer("mask", torch.full((3,), LOW))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def held(self):
        return {name: buffer.tolist() for name, buffer in self.named_buffers()}


def differ(me):
    """Let the ranks see other data, and grow their caches to other lengths."""
    torch.manual_seed(me.rank)
    for _ in range(3):
        me.optimizer.zero_grad()
        me.model.unit(me.model.norm(torch.randn(8, 2) + me.rank)).square().mean().backward()
        me.optimizer.step()
    me.model.cache = torch.arange(4.0 + me.rank)


def check(me, shown, own):
    """Compare what a collective shows with the ranks' own buffers."""
    ranks = me.group.all_gather_object(own)
    for name, values in shown.items():
        if "running" in name:
            mean = torch.tensor([rank[name] for rank in ranks]).mean(0)
            torch.testing.assert_close(torch.tensor(values), mean)
        else:
            assert values == own[name], name


def test_consensus_and_average_treat_buffers_alike():
    def use(me):
        differ(me)
        own = me.model.held()
        with me.session.consensus():
            check(me, me.model.held(), own)
        assert me.model.held() == own
        state = me.session.consensus_state_dict()
        if me.rank == 0:
            assert state["mask"].tolist() == [LOW] * 3
        me.session.average_()
        check(me, me.model.held(), own)

    run_sessions(3, use, make=lambda rank: Buffers())


def test_replicas_with_caches_of_other_lengths_are_made_equal():
    def use(me):
        differ(me)
        me.session.broadcast_()
        assert len(me.model.cache) == 4 + me.rank
        ranks = me.group.all_gather_object(me.model.held())
        assert all(rank["norm.running_mean"] == ranks[0]["norm.running_mean"] for rank in ranks)
        assert all(rank["unit.weight_u"] == ranks[0]["unit.weight_u"] for rank in ranks)

    run_sessions(2, use, make=lambda rank: Buffers())


def test_states_with_caches_of_other_lengths_are_averaged_and_loaded():
    def use(me):
        differ(me)
        return me.session.state_dict(drain=True)

    states = run_sessions(2, use, make=lambda rank: Buffers())
    model = Buffers()
    mean = gg.average_states(states)
    gg.load_replica(model, [torch.optim.SGD(model.parameters(), lr=0.1)], mean)
    assert torch.equal(model.mask, torch.full((3,), LOW))
    assert torch.equal(model.unit.weight_u, states[0]["model"]["unit.weight_u"])
    both = [state["model"]["norm.running_mean"] for state in states]
    torch.testing.assert_close(model.norm.running_mean, (both[0] + both[1]) / 2)
    assert len(model.cache) == 1

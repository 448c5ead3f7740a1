"""A family of its own on the engine, as docs/architecture.md tells how to write one.

Elastic averaging with a rotating partner: each rank keeps a slow copy of its weights, the anchor.
After each update both move towards each other, and the anchors, not the weights, are gossiped.
"""

import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Hub, TensorSpec
from gossipgrad.engine import (
    Entry,
    Flow,
    Overlap,
    Phase,
    Replica,
    RoundSettings,
    Session,
    weight_entries,
)
from support.ranks import run_ranks


class AnchorSession(Session):
    """Weights stay local but for averages; anchors travel across each step.

    Args:
        pull: How far weights and anchors move towards each other after an update.
    """

    call = "anchored"

    def __init__(self, replica, settings, *, pull, **options):
        self.pull = pull
        self.anchors = {name: p.detach().clone() for name, p in replica.trained.items()}
        super().__init__(replica, settings, **options)

    def _make_flows(self):
        trained, anchors = self.replica.trained, self.anchors  # a flow must not hold the session
        weights = Flow.per_device(
            "weights", Phase.NEVER, weight_entries(trained), self.settings, in_consensus=True
        )
        entries = [
            Entry(TensorSpec.of(f"anchor of {name}", p), p, read=lambda name=name: anchors[name])
            for name, p in trained.items()
        ]
        return weights + Flow.per_device(
            "anchors", Phase.ACROSS, entries, self.settings, behind=weights
        )

    @torch.no_grad()
    def _after_update(self):
        for name, parameter in self.replica.trained.items():
            step = self.pull * (parameter - self.anchors[name])
            parameter -= step
            self.anchors[name] += step

    def _family_state(self):
        return {name: anchor.clone() for name, anchor in self.anchors.items()}

    def _load_family_state(self, state):
        for name, anchor in state.items():
            self.anchors[name].copy_(anchor)


def anchored(model, optimizer, group, hub, pull=0.2):
    """The door: resolves what the user chose, and begins the session."""
    settings = RoundSettings(
        schedule=gg.topology.dissemination(group.world_size, seed=1),
        mode=Overlap(),
        every=1,
        average_every=None,
        wire_dtype=None,
        bucket_bytes=64,
    )
    return AnchorSession(
        Replica(model, [optimizer], call="anchored"),
        settings,
        pull=pull,
        group=group,
        transport=lambda group: hub.transport(group.rank),
        heartbeats=gg.Heartbeats(),
    )


def train(rank, session, model, optimizer, steps):
    generator = torch.Generator().manual_seed(session.position * 10 + rank)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        (model(x) - x.sum(1, keepdim=True) - rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def begin(rank, group, hub):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, anchored(model, optimizer, group, hub)


def test_anchors_agree_and_training_goes_on():
    hub = Hub(4)

    def rank_main(rank, group):
        model, optimizer, session = begin(rank, group, hub)
        with session:
            train(rank, session, model, optimizer, 60)
            distance = session.consensus_distance()
            with session.consensus():
                shared = model[0].weight.detach().clone()
            stats = session.stats()
            group.barrier()
            return {n: a.clone() for n, a in session.anchors.items()}, distance, shared, stats

    ranks = run_ranks(4, rank_main)
    anchors = torch.stack([a["0.weight"] for a, *_ in ranks])
    assert (anchors - anchors.mean(0)).norm() < 0.5 * anchors.mean(0).norm()
    assert all(
        stats.outcomes["delivered"] > 100 and distance > 0 for _, distance, _, stats in ranks
    )
    for _, _, shared, _ in ranks:
        torch.testing.assert_close(shared, ranks[0][2], rtol=0, atol=0)


def test_it_resumes_bit_for_bit():
    hubs = [Hub(2), Hub(2)]

    def whole(rank, group):
        model, optimizer, session = begin(rank, group, hubs[0])
        with session:
            train(rank, session, model, optimizer, 5)
            state = session.state_dict()
            train(rank, session, model, optimizer, 5)
            group.barrier()
            return state, [p.detach().clone() for p in model.parameters()]

    first = run_ranks(2, whole)

    def resumed(rank, group):
        model, optimizer, session = begin(rank, group, hubs[1])
        with session:
            session.load_state_dict(first[rank][0])
            train(rank, session, model, optimizer, 5)
            group.barrier()
            return [p.detach().clone() for p in model.parameters()]

    for (_, expected), weights in zip(first, run_ranks(2, resumed), strict=True):
        assert all(map(torch.equal, expected, weights))

"""What every optimizer of the library must pass beside gossip: see `support/families.py`."""

from functools import partial

import pytest
import torch

from support.families import FAMILIES as ALL
from support.families import OPTIMIZERS, ROUND_STEPS, gossip, on_ranks, train
from support.replicas import network

# Of all optimizers here one is made for it, and torch's Adam is refused there.
MIXED = "gossip, sync, momentum"
FAMILIES = ALL | {MIXED: partial(gossip, mode="sync", payload="weights+momentum")}
# `make test` has all optimizers with factors that are averaged, and one beside every family.
QUICK = {(MIXED, "GossipAdamW"), *(("gossip, state", name) for name in OPTIMIZERS)} | {
    (name, "SOAP") for name in ("gossip", "gossip, stale")
}
PAIRS = [
    pytest.param(family, name, marks=[] if (family, name) in QUICK else [pytest.mark.slow])
    for family in FAMILIES
    if family.startswith("gossip") and family not in ROUND_STEPS
    for name in OPTIMIZERS
    if family != MIXED or name == "GossipAdamW"
]

pairs = pytest.mark.parametrize(("family", "optimizer"), PAIRS)
# It learns there as well, no better than AdamW.
pytestmark = pytest.mark.filterwarnings("ignore:GossipAdamW takes its second moment")


@pairs
def test_learns_and_ends_near_the_others(family, optimizer):
    def rank_main(rank, attach):
        model = network()
        first = OPTIMIZERS[optimizer](model, lr=0.03)
        with attach(model, first) as session:
            losses = [train(model, first, rank, count=12) for _ in range(4)]
            session.group.barrier()
            distance = session.consensus_distance()
            size = torch.stack([p.detach().norm() for p in model.parameters()]).norm().item()
        getattr(first, "close", int)()
        return losses, distance, size

    for losses, distance, size in on_ranks(FAMILIES[family], rank_main, world_size=2):
        assert losses[-1] < 0.5 * losses[0]
        assert distance < (0.4 if "stale" in family else 0.2) * size  # those are some steps apart


@pairs
def test_a_checkpoint_goes_on_alike_on_all_ranks(family, optimizer):
    """Rank 0's state, loaded in mid-session and broadcast, is where everyone goes on."""

    def rank_main(rank, attach):
        model = network()
        own = OPTIMIZERS[optimizer](model)
        with attach(model, own) as session:
            train(model, own, rank, count=7)
            session.broadcast_()
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            state = own.state_dict()
            state["state"] = {
                place: {k: torch.as_tensor(v).clone() for k, v in kept.items()}
                for place, kept in state["state"].items()
            }
            train(model, own, rank, count=3)
            if rank == 0:
                model.load_state_dict(weights)
                own.load_state_dict(state)
            session.broadcast_()
            found = own.state_dict()["state"]
            for name, value in model.state_dict().items():
                assert torch.equal(value, weights[name])
            for place, kept in state["state"].items():
                assert kept.keys() == found[place].keys()
                for name, value in kept.items():
                    assert torch.equal(torch.as_tensor(found[place][name]), value)
            train(model, own, rank, count=3)
        getattr(own, "close", int)()
        assert all(p.isfinite().all() for p in model.parameters())

    on_ranks(FAMILIES[family], rank_main, world_size=2)


@pairs
def test_a_step_that_the_scaler_skips_leaves_factors_as_they_are(family, optimizer):
    def rank_main(rank, attach):
        model = network()
        own = OPTIMIZERS[optimizer](model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with attach(model, own, scaler=scaler) as session:
            for number in range(9):
                factor = float("inf") if rank == 1 and number in (1, 5) else 1.0
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
                scaler.scale(factor * model(x).square().mean()).backward()
                scaler.step(own)
                scaler.update()
                own.zero_grad()
            session.wait()
            assert session.stats().rounds >= 9
        steps = {int(kept["step"]) for kept in own.state_dict()["state"].values()}
        assert steps == {7 if rank == 1 else 9}
        getattr(own, "close", int)()
        assert all(p.isfinite().all() for p in model.parameters())

    on_ranks(FAMILIES[family], rank_main, world_size=2)

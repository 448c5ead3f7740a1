"""Second-order optimizers beside sessions, checkpoints and traces of the rest of the library."""

import copy

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Hub, load_replica, replica_state
from support.ranks import run_ranks

# Bare tensors suffice for these tests.
pytestmark = pytest.mark.filterwarnings("ignore:gg.")

KINDS = [gg.SOAP, gg.KLShampoo, gg.Shampoo]
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        loss = (model(x) - x[:, :3].square()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def factors(optimizer):
    state = optimizer.state_dict()["state"]
    return [state[index]["left.0"] for index in sorted(state) if "left.0" in state[index]]


def on_ranks(kind, rank_main, world_size=2, **settings):
    hub = Hub(world_size)

    def start(rank, group):
        model = copy.deepcopy(MODEL)
        optimizer = kind(model, lr=3e-3, refresh=gg.Refresh(3))
        links = {"process_group": group, "transport": lambda g: hub.transport(rank)}
        with gg.gossip(model, optimizer, **links, **settings) as session:
            return rank_main(rank, model, optimizer, session)

    return run_ranks(world_size, start)


def distance(tensors):
    first, second = tensors
    return max(float((a - b).norm() / a.norm()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("kind", "mode"), [*((kind, "sync") for kind in KINDS), (gg.SOAP, "overlap")]
)
def test_gossip_averages_factors_with_the_partner(kind, mode):
    def rank_main(rank, model, optimizer, session):
        train(model, optimizer, 12, seed=rank)
        session.wait()
        return factors(optimizer)

    apart = distance(on_ranks(kind, rank_main, mode=mode))
    together = distance(on_ranks(kind, rank_main, mode=mode, payload="weights+state"))
    assert apart > 0.02
    assert together < (1e-5 if mode == "sync" else apart / 2)


def test_a_layer_without_gradients_so_far_takes_part_in_averages():
    used, unused = nn.Linear(6, 3), nn.Linear(6, 8)
    optimizer = gg.SOAP([*used.parameters(), *unused.parameters()])
    train(used, optimizer, 2, seed=0)
    averaged = [(id(p), name, shape) for p, name, shape, *_ in optimizer.state_to_average()]
    assert (id(unused.weight), "left.0", (6, 6)) in averaged
    fresh = gg.SOAP([*used.parameters(), *unused.parameters()])
    assert averaged == [(id(p), name, shape) for p, name, shape, *_ in fresh.state_to_average()]


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_are_to_shrink_are_refused_before_the_first_step(kind):
    model = copy.deepcopy(MODEL)
    optimizer = kind(model)
    with pytest.raises(ValueError, match=kind.__name__):
        gg.shrink(model, optimizer, example_input=torch.randn(2, 6))


def test_the_mean_of_saved_replicas_has_the_mean_of_factors_and_orthogonal_bases():
    states = []
    for seed in range(2):
        model = copy.deepcopy(MODEL)
        optimizer = gg.SOAP(model, refresh=gg.Refresh(3))
        train(model, optimizer, 7, seed=seed)
        states.append((replica_state(model, [optimizer]), factors(optimizer)))
    model = copy.deepcopy(MODEL)
    optimizer = gg.SOAP(model, refresh=gg.Refresh(3))
    load_replica(model, [optimizer], gg.average_states([state for state, _ in states]))
    for mean, a, b in zip(factors(optimizer), states[0][1], states[1][1], strict=True):
        torch.testing.assert_close(mean, (a + b) / 2)
    basis = optimizer.state_dict()["state"][0]["left_basis.0"]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)), atol=1e-5, rtol=0)
    train(model, optimizer, 4, seed=3)

"""Roots in host memory: equal bits, and what is fetched when."""

import copy

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.sine import train

ALL = (gg.SOAP, gg.KLShampoo, gg.Shampoo)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)
    )


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("kind", ALL)
def test_roots_in_host_memory_change_no_bit(kind, delay, where):
    """Also after a copy, which has hooks of its own; host and device are the same memory here."""
    model, twin = network(), network()
    refresh = gg.Refresh(4, delay, where=where)
    plain = kind(model, lr=0.02, refresh=refresh)
    tiered = kind(twin, lr=0.02, refresh=refresh, storage=gg.Tiers(host="pinned"))
    expected = train(model, plain, range(15))
    assert all(map(torch.equal, expected, train(twin, tiered, range(15))))
    third, other = copy.deepcopy((twin, tiered))
    expected = train(model, plain, range(15, 25))
    assert all(map(torch.equal, expected, train(third, other, range(15, 25))))
    for optimizer in (plain, tiered, other):
        optimizer.close()


@pytest.mark.usefixtures("unchecked_types")
def test_other_tiers_are_refused():
    with pytest.raises(ValueError, match="host="):
        gg.Tiers(host="disk")
    with pytest.raises(ValueError, match="storage="):
        gg.SOAP(network(), storage="pinned")

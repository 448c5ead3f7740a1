"""The families that must pass `tests/conformance/`. A new family is one more entry in `FAMILIES`.

A family is a function `attach(model, optimizer, group, **settings)` that returns a session: hooks
on the user's own objects, `consensus()`, `consensus_distance()`, `broadcast_()`, `state_dict()`,
`load_state_dict()` and `close()`.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import gossipgrad as gg
from gossipgrad.comm import Group, Hub
from support.ranks import run_ranks

__all__ = [
    "DISTANCES",
    "FAMILIES",
    "LOCKSTEP",
    "OPTIMIZERS",
    "ROUND_STEPS",
    "STEPS",
    "WORLD_SIZE",
    "batches",
    "on_ranks",
    "train",
]


def gossip(model, optimizer, group: Group, *, hub: Hub, **settings):
    settings.setdefault("transport", lambda group: hub.transport(group.rank))
    return gg.gossip(model, optimizer, process_group=group, **settings)


def sparsify(model, optimizer, group: Group, *, hub: Hub, **settings):
    return gg.sparsify(model, optimizer, process_group=group, **settings)


def suda(model, optimizer, group: Group, *, hub: Hub, **settings):
    settings.setdefault("transport", lambda group: hub.transport(group.rank))
    return gg.suda(model, optimizer, process_group=group, **settings)


OPTIMIZERS = {
    "SOAP": partial(gg.SOAP, refresh=gg.Refresh(3)),
    "SOAP, late roots": partial(gg.SOAP, refresh=gg.Refresh(3, 2)),
    "KL-Shampoo": partial(gg.KLShampoo, refresh=gg.Refresh(3)),
    "Shampoo": partial(gg.Shampoo, refresh=gg.Refresh(3)),
    "GossipAdamW": lambda model, **options: gg.GossipAdamW(model.parameters(), **options),
}
"""Optimizers of the library's own, which take a model, for the families of gossip."""

FAMILIES: dict[str, Callable] = {
    "gossip": gossip,
    "gossip, sync": partial(gossip, mode="sync"),
    "gossip, sync with momentum": partial(gossip, mode=gg.Sync(momentum=0.9)),
    "gossip, sync with overlap": partial(gossip, mode=gg.Sync(overlap=True), exchanges=2),
    "gossip, stale": partial(gossip, mode="stale"),
    "gossip, state": partial(gossip, payload="weights+state"),
    "gossip, bf16 wire": partial(gossip, wire_dtype=torch.bfloat16),
    "gossip, shared mask": partial(gossip, compress=gg.SharedMask(0.25)),
    "gossip, local steps": partial(gossip, local_steps=2),
    "suda": suda,
    "suda, ed on a ring, bf16 wire": partial(
        suda, backbone="ed", topology="ring", wire_dtype=torch.bfloat16
    ),
    "sparsify": sparsify,
    "sparsify, fixed plan": partial(sparsify, plan=200, density=0.3),
    "sparsify, bf16 values": partial(sparsify, plan=200, density=0.3, value_dtype=torch.bfloat16),
}
# Those of all ranks step with the same gradients: what one skips, all skip.
LOCKSTEP = {name for name in FAMILIES if name.startswith("sparsify")}
# Ranks that wait for nobody are a few steps apart, and so are their replicas; those that mix a
# quarter of their weights in a round mix less often.
DISTANCES = {"gossip, stale": 0.3, "gossip, shared mask": 0.1, "gossip, local steps": 0.3}
STEPS = {"gossip, stale": 160, "gossip, shared mask": 150, "gossip, local steps": 240}
# Steps in a round, and those whose outer optimizer steps without partners, too.
ROUND_STEPS = {"gossip, local steps": 2, "gossip, sync with overlap": 1 / 2}

WORLD_SIZE = 4


def on_ranks(family, rank_main, world_size=WORLD_SIZE):
    """Runs `rank_main(rank, attach)` on all ranks; `attach(model, optimizer, **settings)`."""
    hub = Hub(world_size)

    def start(rank, group):
        return rank_main(rank, lambda m, o, **kw: family(m, o, group, hub=hub, **kw))

    return run_ranks(world_size, start)


def train(model, optimizer, rank, *, count=24, after_backward=None, scheduler=None):
    loss = torch.tensor(0.0)
    for x, y in batches(rank, count):
        loss = (model(x) - y).square().mean()
        loss.backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return loss.item()


def batches(rank: int, count: int = 24, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a small regression task, other ones on each rank, one truth for all."""
    truth = torch.randn(6, 3, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(count):
        x = torch.randn(16, 6, generator=generator)
        yield x, x @ truth

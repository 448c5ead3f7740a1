"""Contestants and bare transfers by name, and what a block of each is like."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import gossipgrad as gg

from ._contestants import (
    DDP,
    PERIOD,
    SELDOM,
    STATE_EVERY,
    Alone,
    Bare,
    Contestant,
    DecentDP,
    Gossip,
    Layerwise,
    Local,
    Surroundings,
)
from ._sparse import RIVALS, Rival, Sparsified

ALONE = "no communication"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a contestant is.

    Attributes:
        make: Gets rank-local surroundings, returns a contestant.
        bare: The bare transfer that its bound is made of, None if it sends nothing.
        steps: Steps of a block are a multiple of this.
        warm_up: Steps of each block that are not counted: with nothing in flight the first one is
            shorter.
        in_step: Whether ranks wait for each other in every step. Those that need not are out of
            step before long; if they began together all would end their steps at once, and wait for
            the processors that they share as no hosts do.
        least: Steps of a block that are counted, at least.
        rival: How its plan is made, for those of sparse gradients.
    """

    make: Callable[[Surroundings], Contestant]
    bare: str | None = None
    steps: int = 1
    warm_up: int = 0
    in_step: bool = True
    least: int = 1
    rival: Rival | None = None


def _hidden(make: Callable[[Surroundings], Contestant], bare: str = "bare exchange") -> Kind:
    """One whose transfers are hidden behind the compute of the next step."""
    return Kind(make=make, bare=bare, warm_up=2, in_step=False, least=2)


BARE = (
    *("bare exchange", "bare exchange, bf16", "bare exchange, state", f"bare exchange, {SELDOM}"),
    *("bare all-reduce", "bare all-reduce, fp16"),
)
GOSSIP: dict[str, Kind] = {
    **{
        name: Kind(
            make=lambda s, name=name: Bare(s, name.removeprefix("bare ")),
            steps=STATE_EVERY if name.endswith(SELDOM) else 1,
        )
        for name in BARE
    },
    ALONE: Kind(make=Alone, in_step=False),
    "gossip": _hidden(Gossip),
    # The next forward pass waits for what a step of `sync` has sent: steps have to follow steps.
    "gossip, sync": _hidden(lambda s: Gossip(s, "sync")),
    "gossip, sync, in backward": _hidden(lambda s: Gossip(s, "sync", update="in-backward")),
    "gossip, bf16 wire": _hidden(
        lambda s: Gossip(s, wire_dtype=torch.bfloat16), bare="bare exchange, bf16"
    ),
    "gossip, state": _hidden(
        lambda s: Gossip(s, payload=gg.WeightsAndState()), bare="bare exchange, state"
    ),
    f"gossip, {SELDOM}": replace(
        _hidden(
            lambda s: Gossip(s, payload=gg.WeightsAndState(every=STATE_EVERY)),
            bare=f"bare exchange, {SELDOM}",
        ),
        steps=STATE_EVERY,
    ),
    "ddp": Kind(make=DDP, bare="bare all-reduce", rival=Rival("ddp", ("dense",))),
    "ddp, fp16 hook": Kind(
        make=lambda s: DDP(s, "fp16"), bare="bare all-reduce, fp16", rival=Rival("ddp", ("fp16",))
    ),
    "ddp, PowerSGD": Kind(make=lambda s: DDP(s, "PowerSGD")),
    "agd": Kind(make=Layerwise, bare="bare all-reduce"),
    "local SGD, period 8": Kind(make=Local, steps=PERIOD),
    "Decent-DP, ring": _hidden(lambda s: DecentDP(s, "ring")),
    "Decent-DP, one-peer exponential": _hidden(lambda s: DecentDP(s, "one-peer-exp")),
}
SPARSE = {name: Kind(make=Sparsified, rival=rival) for name, rival in RIVALS.items()}
KINDS = GOSSIP | SPARSE

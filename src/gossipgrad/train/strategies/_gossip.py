"""Gossip as a strategy: its options, what they need of a run, and the session that they ask for."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad import topology
from gossipgrad.comm import Faults, FaultyTransport, Group, TCPTransport, Transport
from gossipgrad.decentralized import CheckedOptions, resolve_compress
from gossipgrad.train._options import check_at_least, check_fields, check_rule, make_plain

from ._gossip_run import Gossip
from ._strategy import GROUP, Replica, Setting, Strategy, check_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipConfig:
    """How replicas gossip; used by `strategy` gossip alone."""

    topology: Literal["dissemination", "hypercube", "matching", "ring", "complete"] = "matching"
    """Who meets whom. dissemination does not suit mode stale, nor ranks that are often late.
    hypercube needs a power of two of processes; the others take any number."""
    mode: Literal["overlap", "sync", "stale"] = "overlap"
    """overlap: exchange behind the step's compute. sync: exchange after the update and wait.
    stale: mix what has come and wait for nobody; the run then counts rounds, and a slow rank takes
    fewer steps."""
    max_staleness: int = 2
    """Rounds by which exchanges of mode stale may be late, 0 to 15: the more, the less weight."""
    payload: Literal[
        "weights", "weights+momentum", "weights+state", "gradients", "gradients+weights"
    ] = "weights"
    """What is sent: weights, weights with momentum or all moments, or (for study) gradients."""
    every: int = 1
    """Exchange every so many steps."""
    average_every: int | Literal["log_p"] | None = None
    """Average all replicas exactly every so many steps; log_p: every ceil(log2 p); None: never
    while training."""
    exchanges: int = 1
    """Partners that a step of mode sync meets, one after the other: accuracy for bytes."""
    sync_momentum: float = 0.0
    """In mode sync, correct weights as if momentum were mixed, too: the optimizer's momentum, such
    as 0.9. 0: do not."""
    sync_gain: float = 0.4
    """What the correction takes of each change by an exchange, above 0, at most 1."""
    sync_overlap: bool = False
    """In mode sync with two exchanges or more, hide the last one behind the backward pass."""
    local_steps: int | None = None
    """Exchange after so many steps alone, which an outer optimizer takes as one; None: as `every`
    says, without one."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer, with local_steps."""
    outer_momentum: float = 0.9
    """Its Nesterov momentum, from 0 to below 1."""
    disagreement: bool = False
    """With each evaluation, measure how far the replicas' predictions for the first 256 test
    samples (16 of text) are apart."""
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    """Number type on the wire; None: that of the parameters."""
    compress: str | None = None
    """Send a share of the weights each round: shared-mask:0.1, the same tenth on all ranks and
    another each round. None: all weights."""
    patience_seconds: float = 300.0
    """How long a step waits at most for a partner that is not ready. Its part is mixed later, and
    nobody waits for it again until it is heard of; a run with little patience is not repeated bit
    for bit."""
    faults: str | None = None
    """Faults to try the run with, by rank and round: "delay rank=1 rounds=20-29 seconds=0.05",
    "drop rank=1 round=20" or "kill rank=1 round=20", several with ; between."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "every", "exchanges", "local_steps")
        gg.Nesterov(lr=self.outer_lr, momentum=self.outer_momentum)
        gg.Sync(momentum=self.sync_momentum, gain=self.sync_gain, overlap=self.sync_overlap)
        resolve_compress(self.compress)
        check_rule(
            self,
            "above 0 and finite",
            lambda value: 0 < value < math.inf,
            "patience_seconds",
        )
        check_rule(self, "from 0 to 15", lambda value: 0 <= value <= 15, "max_staleness")
        if self.faults is not None and not Faults.parse(self.faults).ranks:
            object.__setattr__(self, "faults", None)
        if self.average_every != "log_p":
            check_at_least(self, 1, "average_every")


class GossipStrategy(Strategy):
    """Gossip in the background of every step."""

    name = "gossip"
    help = "one partner a step"
    bytes_are = (
        "counted; what the last step sent ahead for a step that did not come is in it; periodic "
        "averages computed: 2 (p - 1) / p of what is averaged"
    )
    section = "gossip"
    options_type = GossipConfig
    may_change_on_resume = frozenset({"patience_seconds", "disagreement", "faults"})
    needs_every_rank = False
    has_islands = can_grow = True

    def check(self, options: GossipConfig, setting: Setting) -> None:
        """Refuse what no session could have, or waits where mode stale has none."""
        CheckedOptions(
            topology=options.topology,
            mode=_mode(options),
            payload=options.payload,
            every=options.every,
            average_every=options.average_every,
            exchanges=options.exchanges,
            local_steps=options.local_steps,
            compress=options.compress,
            seed=setting.seed,
        )
        topology.by_name(options.topology, setting.world_size, seed=setting.seed)
        if setting.island > 1 and options.payload.startswith("gradients"):
            raise ValueError(
                f"payload is {options.payload}, but island is {setting.island}: gradients are "
                "averaged inside an island, and weights are exchanged between islands. Use "
                "--payload weights."
            )
        if setting.island > 1 and options.mode == "sync" and options.sync_overlap:
            raise ValueError(
                f"sync_overlap is set, but island is {setting.island}: no pass of an island hides "
                "its exchanges in mode sync. Leave --sync-overlap out."
            )
        check_ranks(options.faults, setting.world_size)

    def unused(self, options: GossipConfig, setting: Setting) -> dict[str, str]:
        idle = "patience_seconds" if options.mode == "stale" else "max_staleness"
        found = {idle: f"mode is {options.mode}"}
        if options.mode != "sync":
            names = "sync_momentum", "sync_gain", "sync_overlap"
            found |= dict.fromkeys(names, f"mode is {options.mode}")
        elif not options.sync_momentum:
            found["sync_gain"] = "there is no sync_momentum"
        if options.local_steps is None:
            found |= dict.fromkeys(("outer_lr", "outer_momentum"), "there are no local_steps")
        if (
            setting.optimizer == "sgd"
            and not setting.momentum
            and options.payload in ("weights+momentum", "weights+state")
        ):
            found["payload"] = "sgd without momentum keeps no state"
        return found

    def describe(self, options: GossipConfig) -> dict[str, str]:
        return {"topology": options.topology, "mode": options.mode, "payload": options.payload}

    def session_settings(self, options: GossipConfig, setting: Setting) -> dict[str, Any]:
        return {
            "topology": options.topology,
            "mode": _mode(options),
            "payload": options.payload,
            "every": options.every,
            "average_every": options.average_every,
            "exchanges": options.exchanges,
            "local_steps": options.local_steps,
            "outer": None
            if options.local_steps is None
            else gg.Nesterov(lr=options.outer_lr, momentum=options.outer_momentum),
            "wire_dtype": options.wire_dtype and getattr(torch, options.wire_dtype),
            "compress": options.compress,
            "seed": setting.seed,
            "heartbeats": setting.heartbeats,
        }

    def build(self, replica: Replica, setting: Setting, options: GossipConfig) -> Gossip:
        settings = self.session_settings(options, setting)
        if options.faults is not None:
            faults = Faults.parse(options.faults)

            def links(group: Group) -> Transport:
                return FaultyTransport(TCPTransport(group), faults)

            settings |= {"transport": links}
        if replica.island > 1:
            settings |= {"island": dist.group.WORLD}
        session = replica.session or gg.gossip(
            replica.model,
            replica.optimizers,
            **settings,
            process_group=None if replica.groups is None else replica.groups(GROUP),
            recorder=replica.spans,
        )
        running = Gossip(
            replica,
            session,
            every=options.local_steps or options.every,
            checkpoint_every=setting.checkpoint_every,
            measures_disagreement=options.disagreement,
        )
        if options.faults is not None:
            running.notes.append(f"faults by script: {options.faults}")
        return running


def _mode(options: GossipConfig) -> gg.Stale | gg.Overlap | gg.Sync:
    if options.mode == "stale":
        return gg.Stale(max_staleness=options.max_staleness)
    if options.mode == "sync":
        return gg.Sync(
            patience_seconds=options.patience_seconds,
            momentum=options.sync_momentum,
            gain=options.sync_gain,
            overlap=options.sync_overlap,
        )
    return gg.Overlap(patience_seconds=options.patience_seconds)

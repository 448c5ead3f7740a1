"""Decentralized Muon as a strategy of the loop."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

import gossipgrad as gg
from gossipgrad import topology
from gossipgrad.muon import BACKBONES, resolve_settings
from gossipgrad.train._options import check_fields, check_rule, make_plain

from ._gossip_run import Gossip
from ._strategy import GROUP, Replica, Setting, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class SudaConfig:
    """How weights and trackers of decentralized Muon are mixed; used by `strategy` suda alone."""

    backbone: str = "semi-atc-gt"
    """How weights are mixed around an update: semi-atc-gt, atc-gt, non-atc-gt, demuon with any
    topology; ed, extra with ring alone."""
    topology: Literal["dissemination", "hypercube", "matching", "ring", "complete"] = (
        "dissemination"
    )
    """Whom a rank exchanges with: on a ring with both neighbours in each step, else with one that
    is another in the next. hypercube needs a power of two of processes."""
    lazy: bool = False
    """Take half of what others send, (I + W) / 2."""
    mode: Literal["overlap", "sync"] | None = None
    """overlap: what does not depend on the update travels behind the step's compute. None: overlap
    where the backbone has such, else sync."""
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    """Number type on the wire; None: that of the parameters."""
    patience_seconds: float = 300.0
    """How long a step waits at most for a partner that is not ready."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_rule(self, f"one of {', '.join(BACKBONES)}", BACKBONES.__contains__, "backbone")
        check_rule(
            self,
            "above 0 and finite",
            lambda value: 0 < value < math.inf,
            "patience_seconds",
        )


class Suda(Gossip):
    """A session of `gg.suda`; see `Gossip` for what happens when ranks die."""

    def _beyond(self, here: int) -> int:
        """In steps: nobody is further ahead of anyone than there are ranks between them."""
        return here + 1 + len(self._alive)


class SudaStrategy(Strategy):
    """SUDA-Muon: momentum is tracked before it is polarised, and weights are mixed."""

    name = "suda"
    help = "Muon with trackers, neighbours alone"
    bytes_are = "counted; what the last step sent ahead for a step that did not come is in it"
    section = "suda"
    options_type = SudaConfig
    may_change_on_resume = frozenset({"patience_seconds"})
    needs_every_rank = False

    def check(self, options: SudaConfig, setting: Setting) -> None:
        """Refuse other optimizers, and backbones that diverge on the topology."""
        if setting.optimizer != "muon":
            raise ValueError(
                f"strategy suda trains with Muon, and optimizer is {setting.optimizer}: add "
                "--optimizer muon."
            )
        topology.by_name(options.topology, setting.world_size)
        resolve_settings(setting.world_size, **_settings(options, setting))

    def describe(self, options: SudaConfig) -> dict[str, str]:
        return {"topology": options.topology, "backbone": options.backbone}

    def build(self, replica: Replica, setting: Setting, options: SudaConfig) -> Suda:
        session = gg.suda(
            replica.model,
            replica.optimizers[0],
            **_settings(options, setting),
            process_group=None if replica.groups is None else replica.groups(GROUP),
            recorder=replica.spans,
            heartbeats=setting.heartbeats,
        )
        return Suda(replica, session, every=1, checkpoint_every=setting.checkpoint_every)


def _settings(options: SudaConfig, setting: Setting) -> dict[str, Any]:
    """Those of the session; how long it waits goes with the mode."""
    rest: dict[str, Any] = {
        "backbone": options.backbone,
        "topology": options.topology,
        "lazy": options.lazy,
        "wire_dtype": options.wire_dtype and getattr(torch, options.wire_dtype),
        "seed": setting.seed,
    }
    overlaps = isinstance(resolve_settings(1, **rest, mode=options.mode).mode, gg.Overlap)
    mode = gg.Overlap if overlaps else gg.Sync
    return rest | {"mode": mode(patience_seconds=options.patience_seconds)}

"""What a run is told of its strategy: frozen dataclasses, checked when made."""

import math
from dataclasses import dataclass
from typing import Literal

from gossipgrad.comm import Faults
from gossipgrad.compression import check_density
from gossipgrad.decentralized import resolve_compress

from ._options import check_at_least, check_fields, make_plain


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipConfig:
    """How replicas gossip; used by `strategy` gossip alone."""

    topology: Literal["dissemination", "hypercube", "matching", "ring", "complete"] | None = None
    """Who meets whom; None: dissemination, or matching in mode stale, which dissemination does not
    suit. hypercube needs a power of two of processes; the others take any number."""
    mode: Literal["overlap", "sync", "stale"] = "overlap"
    """overlap: exchange behind the step's compute. sync: exchange after the update and wait.
    stale: mix what has come and wait for nobody; the run then counts rounds, and a slow rank takes
    fewer steps."""
    max_staleness: int = 2
    """Rounds by which exchanges of mode stale may be late, 0 to 15: the more, the less weight."""
    payload: Literal["weights", "weights+state", "gradients", "gradients+weights"] = "weights"
    """What is sent: weights, weights with the optimizer's moments, or (for study) gradients."""
    every: int = 1
    """Exchange every so many steps."""
    average_every: int | Literal["log_p"] | None = None
    """Average all replicas exactly every so many steps; log_p: every ceil(log2 p); None: never
    while training."""
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    """Number type on the wire; None: that of the parameters."""
    compress: str | None = None
    """Send a share of the weights each round: shared-mask:0.1, the same tenth on all ranks and
    another each round. None: all weights."""
    deadline_seconds: float = 300.0
    """How long a step waits at most for a partner that is alive but late. Less where the link's
    recent arrivals were prompt."""
    deadline_floor_seconds: float = 10.0
    """How long it waits at least, if deadline_seconds is not less."""
    lost_after_seconds: float = 10.0
    """How long a rank may show no sign of life before the others go on without it for good."""
    faults: str | None = None
    """Faults to try the run with, by rank and round: "delay rank=1 rounds=20-29 seconds=0.05",
    "drop rank=1 round=20" or "kill rank=1 round=20", several with ; between."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "every")
        resolve_compress(self.compress)
        for name in ("deadline_seconds", "deadline_floor_seconds", "lost_after_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}, but must be above 0.")
            if value == math.inf:
                raise ValueError(f"{name} is inf, but must be finite: a partner may never come.")
        if not 0 <= self.max_staleness <= 15:
            raise ValueError(f"max_staleness is {self.max_staleness}, but must be from 0 to 15.")
        if self.faults is not None and not Faults.parse(self.faults).ranks:
            object.__setattr__(self, "faults", None)
        if self.average_every != "log_p":
            check_at_least(self, 1, "average_every")

    @property
    def default_topology(self) -> Literal["dissemination", "matching"]:
        """Who meets whom where nothing is said, symmetric pairs where rounds can be void."""
        return "matching" if self.mode == "stale" else "dissemination"


@dataclass(frozen=True, kw_only=True, slots=True)
class PostLocalConfig:
    """When and how often replicas are averaged; used by `strategy` post-local-sgd alone."""

    post_local_after: float = 0.5
    """Share of the run, from 0 to 1, in which gradients are all-reduced before local steps."""
    local_steps: int = 16
    """Local steps between two averages."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "local_steps")
        if not 0 <= self.post_local_after <= 1:
            raise ValueError(
                f"post_local_after is {self.post_local_after}, but is a share of the run: from 0 "
                "to 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig:
    """What is sent of gradients; used by `strategy` omgs, topk and lags alone."""

    density: float = 0.001
    """Share of the coordinates of a gradient that is sent; the rest is carried over."""
    density_warmup_steps: int | None = None
    """Steps of each of four stages at the start in which 0.25, 0.0625, 0.015625 and 0.004 are sent,
    if that is more than density. None: a quarter of an epoch each, of a run of one epoch an eighth;
    0: no stages."""
    select: Literal["per_group", "per_tensor"] = "per_group"
    """Whose largest coordinates are sent: of all tensors of a message together, or of each."""
    momentum_correction: bool = False
    """Apply the momentum of sgd before selection, as Deep Gradient Compression does, not after."""
    value_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number type of sparse values on the wire; None: float32."""
    replan_every: int = 100
    """Steps between looks at whether the plan of omgs still fits what is measured; 0: never, and no
    plans compete in the first steps."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 0, "density_warmup_steps", "replan_every")
        check_density(self.density)

"""What is measured: profiles cut to a budget, world sizes, rates, contestants, repeats."""

from dataclasses import dataclass, replace
from itertools import product

from gossipgrad.planning import Profile

from ._kinds import ALONE, GOSSIP, SPARSE
from ._links import MOST_BITS_PER_SECOND


@dataclass(frozen=True, kw_only=True)
class Place:
    """A profile replayed by some workers on links of a rate, and who is measured there.

    Attributes:
        profile: Of the network.
        time_factor: By how much times are longer in the replay.
        size_factor: By how much sizes are smaller.
        world_size: Workers.
        rate: Bits a second of each shaped link.
        names: Contestants.
        density: The share of a gradient that is sent, where gradients are sparse.
    """

    profile: str
    time_factor: float
    size_factor: float
    world_size: int
    rate: float
    names: tuple[str, ...]
    density: float | None = None

    def scaled(self) -> Profile:
        """The profile that is replayed."""
        return Profile.load(self.profile).scaled(time=self.time_factor, size=self.size_factor)

    def key(self) -> dict[str, object]:
        """By what its cells are known."""
        return {
            "profile": self.profile,
            "time_factor": self.time_factor,
            "size_factor": self.size_factor,
            "world_size": self.world_size,
            "rate_bits_per_second": self.rate,
            "density": self.density,
        }

    @property
    def full_rate(self) -> float:
        """Of the links that these stand for at full size."""
        return float(f"{self.rate * self.time_factor / self.size_factor:.6g}")

    def __str__(self) -> str:
        density = "" if self.density is None else f", density {self.density:g}"
        return f"{self.profile}, p = {self.world_size}, {self.rate / 1e6:g} Mbit/s{density}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Places, and how often and how long their contestants take turns.

    Attributes:
        places: Where.
        blocks: Repeats of every contestant; they take turns.
        block_seconds: About how long a block is, a step at least.
        hurried: Of a period, run what differs alone: a local step stands for those like it.
        patience_seconds: How long to wait for other programs, before each turn.
        out: The results are called so.
    """

    places: tuple[Place, ...]
    blocks: int
    block_seconds: float
    hurried: bool = False
    patience_seconds: float = 0.0
    out: str = "network"


ALL = tuple(GOSSIP)
STATELESS = tuple(name for name in ALL if "state" not in name)
# A worker holds under 8 MB, so that 16 on 2 cores have the processors for it, and steps take 0.9 s,
# of which the replay's own cost is 1 %. Bare exchanges then take from a thirtieth of the compute to
# one and a half of it. Times are stretched by 100 and 200 times what sizes are.
_RESNET50, _GPT2 = ("resnet50", 3.0, 0.03), ("gpt2", 3.0, 0.015)


def _places(
    budget: tuple[str, float, float],
    world_sizes: tuple[int, ...],
    rates: tuple[float, ...],
    names: tuple[str, ...],
) -> tuple[Place, ...]:
    profile, times, sizes = budget
    return tuple(
        Place(
            profile=profile,
            time_factor=times,
            size_factor=sizes,
            world_size=world_size,
            rate=rate,
            names=names,
        )
        for world_size, rate in product(world_sizes, rates)
        if world_size * rate <= MOST_BITS_PER_SECOND
    )


QUICK = Grid(
    places=(
        *_places(_RESNET50, (4, 8, 16), (1e9,), STATELESS),
        *_places(_RESNET50, (4, 16), (1e8,), STATELESS),
        *_places(_RESNET50, (8,), (1e8,), ALL),
        *_places(_GPT2, (8,), (1e8,), STATELESS),
    ),
    blocks=5,
    block_seconds=0.6,
    hurried=True,
    patience_seconds=3.0,
)
FULL = Grid(
    places=tuple(
        place
        for budget in (
            *(_RESNET50, _GPT2, ("resnet50", 3.0, 0.15), ("googlenet", 6.0, 0.15)),
            *(("vgg16", 2.0, 0.02), ("gpt2", 8.0, 0.03)),
        )
        for place in _places(budget, (4, 8, 16), (1e8, 3e8, 1e9, 4e9), ALL)
    ),
    blocks=9,
    block_seconds=4.0,
    patience_seconds=60.0,
)
# What mode sync exposes: exchanges from a thirtieth of the compute to as long as the compute.
_SYNC = (
    *("bare exchange", "bare all-reduce", ALONE, "gossip", "gossip, sync"),
    *("gossip, sync, in backward", "ddp"),
)
SYNC = replace(
    QUICK,
    places=_places(_RESNET50, (4, 8), (3e7, 1e8, 3e8, 1e9), _SYNC),
    out="network_sync",
)

_SPARSE = (ALONE, "ddp", "ddp, fp16 hook", *SPARSE)
_FULL_RATE = 1e9
# Slow enough that what the workers do on two processors is little beside what they wait for.
_FACTORS = {
    "resnet50": (8.0, 0.06),
    "vgg16": (4.0, 0.012),
    "gpt2": (8.0, 0.012),
    "lstm": (8.0, 0.025),
}
SPARSE_GRID = Grid(
    places=tuple(
        Place(
            profile=profile,
            time_factor=times,
            size_factor=sizes,
            world_size=16,
            rate=_FULL_RATE * sizes / times,  # the proportions of full size
            names=_SPARSE,
            density=0.001,
        )
        for profile, (times, sizes) in _FACTORS.items()
    ),
    blocks=3,
    block_seconds=0.5,
    out="sparse_network",
)
GRIDS = {"quick": QUICK, "full": FULL, "sync": SYNC, "sparse": SPARSE_GRID}

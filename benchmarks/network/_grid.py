"""What is measured: world sizes, rates, profiles cut to a budget, repeats."""

from dataclasses import dataclass, replace

from gossipgrad.planning import Profile

from ._kinds import ALONE, BARE, CONTESTANTS, PAYLOADS


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A profile, and by how much its times and sizes are changed to fit the machine.

    Attributes:
        world_sizes: Where it is measured; None for all of the grid's.
        rates: On which links; None for all of the grid's.
    """

    profile: str
    time_factor: float
    size_factor: float
    world_sizes: tuple[int, ...] | None = None
    rates: tuple[float, ...] | None = None

    def scaled(self) -> Profile:
        """The profile that is replayed."""
        return Profile.load(self.profile).scaled(time=self.time_factor, size=self.size_factor)

    def __str__(self) -> str:
        """In words; a link stands for one that is faster by the size that was taken away."""
        times = self.time_factor / self.size_factor
        return (
            f"{self.profile}, times by {self.time_factor:g}, sizes by {self.size_factor:g}: "
            f"100 Mbit/s here are {times / 10:.3g} Gbit/s at full size"
        )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells to measure, and how often.

    Attributes:
        blocks: Repeats of every contestant; they take turns.
        block_seconds: About how long a block is, a step at least.
        payload_places: World size and rate where gossip with state is measured; None is all.
        hurried: Of a period, run what differs alone: a local step stands for those like it.
        patience_seconds: How long to wait for other programs, before each turn.
        only: Contestants.
    """

    world_sizes: tuple[int, ...]
    rates: tuple[float, ...]
    budgets: tuple[Budget, ...]
    blocks: int
    block_seconds: float
    payload_places: tuple[tuple[int, float], ...] | None = None
    hurried: bool = False
    patience_seconds: float = 0.0
    only: tuple[str, ...] = tuple(CONTESTANTS)

    def names(self, world_size: int, rate: float, budget: Budget) -> tuple[str, ...]:
        """Who is measured in a place."""
        places = self.payload_places
        with_state = places is None or ((world_size, rate) in places and budget == self.budgets[0])
        asked = (*BARE, *(name for name in CONTESTANTS if name in self.only))
        return tuple(name for name in asked if with_state or name not in PAYLOADS)


# The budget: under 8 MB a worker, so that 16 workers on 2 cores have the processors for it, and
# steps of 0.9 s, of which the replay's own cost is 1 %: all workers end their steps at once, on two
# cores. Bare exchanges then take from a thirtieth of the compute to one and a half of it. Times are
# stretched by 100 and 200 times what sizes are.
QUICK = Grid(
    world_sizes=(4, 8, 16),
    rates=(1e8, 1e9, 1e10),
    budgets=(
        Budget(profile="resnet50", time_factor=3.0, size_factor=0.03),
        Budget(profile="gpt2", time_factor=3.0, size_factor=0.015, world_sizes=(8,), rates=(1e8,)),
    ),
    blocks=5,
    block_seconds=0.6,
    payload_places=((8, 1e8),),
    hurried=True,
    patience_seconds=3.0,
)
FULL = Grid(
    world_sizes=(4, 8, 16),
    rates=(1e8, 3e8, 1e9, 4e9, 1e10),
    budgets=(
        QUICK.budgets[0],
        Budget(profile="gpt2", time_factor=3.0, size_factor=0.015),
        Budget(profile="resnet50", time_factor=3.0, size_factor=0.15),
        Budget(profile="googlenet", time_factor=6.0, size_factor=0.15),
        Budget(profile="vgg16", time_factor=2.0, size_factor=0.02),
        Budget(profile="gpt2", time_factor=8.0, size_factor=0.03),
    ),
    blocks=9,
    block_seconds=4.0,
    patience_seconds=60.0,
)
# What mode sync exposes: exchanges from a thirtieth of the compute to as long as the compute.
SYNC = replace(
    QUICK,
    world_sizes=(4, 8),
    rates=(3e7, 1e8, 3e8, 1e9),
    budgets=QUICK.budgets[:1],
    only=(ALONE, "gossip", "gossip, sync", "gossip, sync, in backward", "ddp"),
)
GRIDS = {"quick": QUICK, "full": FULL, "sync": SYNC}

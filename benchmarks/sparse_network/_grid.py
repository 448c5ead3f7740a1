"""What is replayed, on which links, by how many workers."""

from dataclasses import dataclass

from gossipgrad.planning import Profile

from ._kinds import KINDS, OPTIMAL


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place of the grid, in figures of full size.

    Attributes:
        profile: Of the network.
        world_size: Workers.
        rate: Bits a second of each link.
        density: The share that is sent.
        time_factor: By how much times are longer in the replay.
        size_factor: By how much sizes are smaller.
        contestants: Who.
        blocks: Turns of every contestant.
        most_times: Leave out, with its prediction, who is predicted to take so much longer than
            the best; None for nobody.
    """

    profile: str
    world_size: int
    rate: float
    density: float
    time_factor: float
    size_factor: float
    contestants: tuple[str, ...]
    blocks: int
    most_times: float | None = None

    @property
    def link_rate(self) -> float:
        """Of the shaped links: bytes and times keep the proportions of full size."""
        return self.rate * self.size_factor / self.time_factor

    def scaled(self) -> Profile:
        """The profile that is replayed."""
        return Profile.load(self.profile).scaled(time=self.time_factor, size=self.size_factor)

    def key(self) -> dict[str, object]:
        """By what a cell is known."""
        return {
            "profile": self.profile,
            "world_size": self.world_size,
            "rate_bits_per_second": self.rate,
            "density": self.density,
            "time_factor": self.time_factor,
            "size_factor": self.size_factor,
        }

    def __str__(self) -> str:
        return (
            f"{self.profile}, p = {self.world_size}, {self.rate / 1e6:g} Mbit/s, "
            f"density {self.density:g}"
        )


_ALL = tuple(KINDS)
_OUR_SELECTION = tuple(name for name, kind in KINDS.items() if kind.fixed or name == OPTIMAL)
# Slow enough that what the workers do on two processors is little beside what they wait for.
_FACTORS = {
    "resnet50": (8.0, 0.06),
    "vgg16": (4.0, 0.012),
    "gpt2": (8.0, 0.012),
    "lstm": (8.0, 0.025),
}
_SWEPT_FACTORS = {2: (1.0, 0.06), 4: (2.0, 0.06), 8: (4.0, 0.06), 16: (8.0, 0.06)}
_SLOWEST = 5e7
# There links would be too slow for packets of 1,500 bytes, and what workers do counts for less.
_SLOWEST_FACTORS = {2: (1.0, 0.06), 4: (2.0, 0.12), 8: (2.0, 0.12), 16: (4.0, 0.16)}


def _at(
    profile: str,
    density: float = 0.001,
    blocks: int = 3,
    contestants: tuple[str, ...] = _ALL,
) -> Place:
    time_factor, size_factor = _FACTORS[profile]
    return Place(
        profile=profile,
        world_size=16,
        rate=1e9,
        density=density,
        time_factor=time_factor,
        size_factor=size_factor,
        contestants=contestants,
        blocks=blocks,
    )


def _swept(world_size: int, rate: float) -> Place:
    factors = _SLOWEST_FACTORS if rate == _SLOWEST else _SWEPT_FACTORS
    time_factor, size_factor = factors[world_size]
    return Place(
        profile="resnet50",
        world_size=world_size,
        rate=rate,
        density=0.001,
        time_factor=time_factor,
        size_factor=size_factor,
        contestants=_OUR_SELECTION,
        blocks=3,
        most_times=2.0,
    )


GRIDS: dict[str, tuple[Place, ...]] = {
    "resnet50": (_at("resnet50"),),
    "denser": (_at("resnet50", 0.01, contestants=_OUR_SELECTION),),
    "vgg16": (_at("vgg16"),),
    "gpt2": (_at("gpt2"),),
    "lstm": (_at("lstm"),),
    "sweep": tuple(
        _swept(world_size, rate)
        for world_size in (16, 4, 8, 2)
        for rate in (_SLOWEST, 1e9, 1e10, 3e8)
    ),
}

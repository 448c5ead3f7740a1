"""Densities that are the same on all ranks, or an error that says where they are not."""

from collections.abc import Sequence

from gossipgrad.comm import Group
from gossipgrad.errors import GossipError
from gossipgrad.sparsification._density import Density, Warmup, densities_at

__all__ = ["AgreedDensity"]

_AHEAD = 100  # rounds for which a function of the density is asked at once


class AgreedDensity:
    """A density round by round; a function is asked ahead for many, and compared over ranks.

    Messages of unequal sizes would not be an error of a collective but the end of a process.

    Args:
        density: Which of all but functions the ranks have agreed on already.
        group: Whose ranks go through the same rounds.
    """

    def __init__(self, density: Density, group: Group) -> None:
        self._density = density
        self._group = group
        self._course: dict[int, float] = {}

    def at(self, names: Sequence[str], round: int) -> tuple[float, ...]:
        """Of each parameter; of a function a collective, in one round of many.

        Raises:
            GossipError: A function gives other values on other ranks.
            ValueError: It gives what is no density.
        """
        of = self._density
        if not callable(of) or isinstance(of, Warmup):
            return densities_at(of, names, round)
        if round not in self._course:
            self._ask(range(round, round + _AHEAD))
        return (self._course[round],) * len(names)

    def _ask(self, ahead: range) -> None:
        course = [densities_at(self._density, [""], at)[0] for at in ahead]
        told = self._group.all_gather_object(course)
        for rank, other in enumerate(told):
            for at, here, there in zip(ahead, told[0], other, strict=True):
                if here != there:
                    raise GossipError(
                        f"density in round {at} is {there} on rank {rank}, but {here} on rank "
                        "0: a function must give the same on all ranks"
                    )
        self._course = dict(zip(ahead, course, strict=True))

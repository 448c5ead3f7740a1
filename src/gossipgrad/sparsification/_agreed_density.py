"""Densities that are the same on all ranks, or an error that says where they are not."""

from collections.abc import Sequence

from gossipgrad.comm import Group
from gossipgrad.errors import GossipError
from gossipgrad.sparsification._density import Density, densities_at, is_function

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
        self._told: dict[int, float] = {}

    def anew(self) -> "AgreedDensity":
        """The same, where nothing has been asked yet."""
        return AgreedDensity(self._density, self._group)

    def at(self, names: Sequence[str], round: int) -> tuple[float, ...]:
        """Of each parameter; of a function a collective, in one round of many.

        A function that fails beyond this round is asked again when that round has come: a table of
        as many densities as the run has steps will do.

        Raises:
            GossipError: On all ranks, if a function gives other values on other ranks, or raises
                or gives what is no density on one for this round.
        """
        if not is_function(self._density):
            return densities_at(self._density, names, round)
        if round not in self._told:
            self._ask(range(round, round + _AHEAD))
        return (self._told[round],) * len(names)

    def told(self, names: Sequence[str], round: int) -> tuple[float, ...] | None:
        """As `at`, and never a collective: None where a function has yet to be asked."""
        if is_function(self._density) and round not in self._told:
            return None
        return self.at(names, round)

    def _ask(self, ahead: range) -> None:
        values: list[float] = []
        error: Exception | None = None
        for at in ahead:
            try:
                value = densities_at(self._density, [""], at)[0]
            except Exception as its:
                error = its
                break
            values.append(value)
        problem = None if error is None else f"{type(error).__name__}: {error}"
        told = self._group.all_gather_object([values, problem])
        for rank, (known, problem) in enumerate(told):
            if not known:
                raise GossipError(
                    f"the function that density is has failed on rank {rank}, asked about round "
                    f"{ahead.start}: {problem}. It has to give a density for every round from 0 "
                    "on; a round is a backward pass outside no_sync(), or a step without one"
                ) from error
        ahead = ahead[: min(len(known) for known, _ in told)]
        for rank, (other, _) in enumerate(told):
            for at, here, there in zip(ahead, told[0][0], other, strict=False):
                if here != there:
                    raise GossipError(
                        f"density in round {at} is {there} on rank {rank}, but {here} on rank "
                        "0: a function must give the same on all ranks"
                    )
        self._told = dict(zip(ahead, values, strict=False))

"""What the differences to a rank's own partners tell of the distance between replicas."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PairDistance"]


class PairDistance:
    """Squared distances to the partners of the last period."""

    def __init__(self) -> None:
        self._rounds: list[Sequence[Tensor]] = []

    def note(self, squares: Sequence[Tensor], period: int) -> None:
        """Takes in the parts of a round's square, if there are any; a period has so many rounds."""
        if squares:
            self._rounds = [*self._rounds, squares][-period:]

    def state(self) -> list[list[float]]:
        """The squares as numbers, a list a round."""
        return [[float(square) for square in round] for round in self._rounds]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Takes up what `state` gave."""
        rounds = [[torch.tensor(square, dtype=torch.float64) for square in r] for r in state]
        self._rounds = [*rounds]

    @property
    def mean_square(self) -> float | None:
        """Mean over the rounds of `|received - snapshot|^2`, None before any."""
        if not self._rounds:
            return None
        return sum(float(square) for round in self._rounds for square in round) / len(self._rounds)

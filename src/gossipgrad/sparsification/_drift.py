"""Whether what groups take has drifted from what was predicted, and the density from the plan's."""

from collections.abc import Sequence

from gossipgrad.sparsification._settings import Replan

__all__ = ["DensityWatch", "Drift"]


class Drift:
    """Cumulative sums of relative errors, one for slower and one for faster than predicted.

    An error within the allowance lets both sums fall, so noise comes to nothing, and an error that
    stays adds up until it is over the threshold. After each alarm the steps between looks double:
    a network that goes back and forth costs a number of measurements that grows with the logarithm
    of the steps, not with the steps. A state that is loaded says how often they have doubled, and
    not how many they are: that is for the settings.

    References:
        Page, Continuous inspection schemes, Biometrika 1954 (CUSUM).
    """

    def __init__(self, settings: Replan) -> None:
        self._settings = settings
        self.slower = self.faster = 0.0
        self._doublings = 0
        self._looked = 0  # after how many rounds, last

    @property
    def every(self) -> int:
        """Rounds between two looks."""
        return self._settings.every * 2**self._doublings

    def due(self, rounds: int) -> bool:
        """Whether a look is due after so many rounds."""
        return rounds >= self._looked + self.every

    def look(self, rounds: int, measured: Sequence[float], predicted: Sequence[float]) -> bool:
        """Takes in what groups took, in seconds; whether costs are to be measured anew."""
        self._looked = rounds
        expected = sum(predicted)
        error = (sum(measured) - expected) / expected if expected else 0.0
        self.slower = max(0.0, self.slower + error - self._settings.drift)
        self.faster = max(0.0, self.faster - error - self._settings.drift)
        return max(self.slower, self.faster) > self._settings.threshold

    def measured_anew(self, rounds: int) -> None:
        """There are new predictions; the next look is twice as far away."""
        self._doublings += 1
        self.begin_anew(rounds)

    def begin_anew(self, rounds: int) -> None:
        """There is another plan: nothing is known of its groups, and the next look is due then."""
        self.slower = self.faster = 0.0
        self._looked = rounds

    def state(self) -> dict[str, float | int]:
        """For a session's state."""
        return {
            "doublings": self._doublings,
            "looked": self._looked,
            "slower": self.slower,
            "faster": self.faster,
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Takes up what `state` gave."""
        self._doublings, self._looked = int(state["doublings"]), int(state["looked"])
        self.slower, self.faster = state["slower"], state["faster"]


class DensityWatch:
    """Whether the density has left that of the plan, and stays away from it.

    It has to be another for `patience` rounds on end, 1 at first, and after each look twice as
    many: a stage of a warm-up is seen soon, and a density that goes back and forth costs a number
    of looks that grows with the logarithm of the steps, and has the plan of where it mostly is.

    Attributes:
        patience: Rounds on end after which a look is due.
    """

    def __init__(self) -> None:
        self.patience = 1
        self._away = 0

    def look_due(self, *, away: bool) -> bool:
        """Takes in whether a round had another density than that of the plan."""
        self._away = self._away + 1 if away else 0
        return self._away >= self.patience

    def looked(self) -> None:
        """The plan is for this density now."""
        self.patience *= 2
        self._away = 0

    def state(self) -> dict[str, int]:
        """For a session's state."""
        return {"patience": self.patience, "away": self._away}

    def load(self, state: dict[str, int]) -> None:
        """Takes up what `state` gave."""
        self.patience, self._away = state["patience"], state["away"]

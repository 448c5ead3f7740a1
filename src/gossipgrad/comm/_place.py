"""Places: rounds of all generations in one order."""

__all__ = ["generation_of", "place"]

_BITS = 40


def place(generation: int, round: int) -> int:
    """Where a round of a generation stands among the rounds of all generations.

    Whatever orders rounds orders generations with it: every round of a generation comes after
    those of the one before. In generation 0 a place is the round itself.

    Example:
        >>> place(0, 7), place(1, 0) > place(0, 7)
        (7, True)
    """
    return (generation << _BITS) + round


def generation_of(at: int) -> int:
    """The generation of a place; 0 for what comes before the first round."""
    return max(at, 0) >> _BITS

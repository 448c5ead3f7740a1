"""Why a cell claims nothing."""

from typing import Any

MOST_BUSY = 0.7
MOST_BUSY_BY_OTHERS = 0.2
MOST_LATE = 0.05

Cell = dict[str, Any]


def marks_of(cell: Cell, alone: float | None = None, bare: Cell | None = None) -> list[str]:
    """What disturbed a cell.

    Args:
        cell: Its figures.
        alone: Seconds of a step without communication in the same place.
        bare: The cell of the bare transfer that its second bound is made of.
    """
    marks = []
    if cell["cpu_busy"] > MOST_BUSY:
        marks.append(f"CPUs {100 * cell['cpu_busy']:.0f} % busy")
    if cell["cpu_busy_by_others"] > MOST_BUSY_BY_OTHERS:
        marks.append(f"CPUs {100 * cell['cpu_busy_by_others']:.0f} % taken by other programs")
    if cell["late_share"] > MOST_LATE:
        marks.append(f"emulated compute {100 * cell['late_share']:.0f} % late")
    if cell["uneven_share"] > MOST_LATE:
        marks.append(f"the last rank began {100 * cell['uneven_share']:.0f} % late")
    compute = cell["compute_seconds"]
    if compute and alone is not None and alone / compute - 1 > MOST_LATE:
        marks.append(f"the replay alone takes {100 * (alone / compute - 1):.0f} % too long")
    if bare is not None and bare["marks"] and bare["step_seconds_median"] > compute:
        marks.append(f"its bound is marked: {'; '.join(bare['marks'])}")
    return marks

"""Which session has which parameters, so that none is exchanged twice."""

import gc
import threading
import weakref
from collections.abc import Mapping

from torch import Tensor

__all__ = ["Claim", "is_claimed"]

_ALONE, _HOOK = "sparsify", "CommHook"
_lock = threading.RLock()  # a signal handler may close a session while another begins


class Claim:
    """The parameters of one session, until it is closed, or nobody holds this any more.

    None is in two sessions that exchange it. Only the hook of DistributedDataParallel may share
    those of others but `sparsify`, as where it averages inside nodes and gossip between them.

    Args:
        door: The function that makes the session, for messages.
    """

    def __init__(self, door: str) -> None:
        self._door = door
        self._held: dict[int, weakref.ref[Tensor]] = {}

    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """Claims these, by name, in place of what it has; local.

        Raises:
            ValueError: One is in another session; nothing is claimed anew then.
        """
        with _lock:
            if self._conflict(parameters) is not None:
                gc.collect()  # a session that was dropped with its optimizer is a cycle
            if (why := self._conflict(parameters)) is not None:
                raise ValueError(why)
            self._held = {id(each): weakref.ref(each) for each in parameters.values()}
            _claims[id(self)] = weakref.ref(self)

    def has(self, parameter: Tensor) -> bool:
        """Whether it is one of those."""
        held = self._held.get(id(parameter))
        return held is not None and held() is parameter

    def release(self) -> None:
        """Gives up all of them; may be called twice."""
        with _lock:
            _claims.pop(id(self), None)

    def _conflict(self, parameters: Mapping[str, Tensor]) -> str | None:
        """Which of these cannot be in one more session, and why."""
        for other in _others(self):
            doors = {self._door, other._door}
            if doors == {"shrink"} or (_HOOK in doors and _ALONE not in doors):
                continue
            name = next((name for name, each in parameters.items() if other.has(each)), None)
            if name is not None:
                why = "both would exchange it in every step"
                if _ALONE in doors:
                    why = f"{_ALONE}() keeps replicas equal by itself"
                one = ", give both optimizers to one session" if len(doors) == 1 else ""
                if "shrink" in doors:
                    one = ", pass it as shrink(..., session=session)"
                return (
                    f"{name!r} is in a session of {other._door}() that is not over, so "
                    f"{self._door}() cannot have it, too: {why}. close() the other session "
                    f"first{one}, or begin with a new model and optimizer"
                )
        return None


_claims: dict[int, weakref.ref[Claim]] = {}


def is_claimed(parameter: Tensor) -> bool:
    """Whether a session that lives has it."""
    return any(each.has(parameter) for each in _others(None))


def _others(own: Claim | None) -> list[Claim]:
    """All that live; `list` of a dict is one step, which no signal handler comes into."""
    found = []
    for key, held in list(_claims.items()):
        other = held()
        if other is None and _claims.get(key) is held:
            del _claims[key]
        elif other is not None and other is not own:
            found.append(other)
    return found

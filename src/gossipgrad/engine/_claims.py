"""Which session has which parameters, so that no gradient meets twice."""

import gc
import threading
import weakref
from collections.abc import Mapping

from torch import Tensor

__all__ = ["Claim"]

_ALONE = "sparsify"
_lock = threading.RLock()  # a signal handler may close a session while another begins


class Claim:
    """The parameters of one session, until it is closed, or nobody holds this any more.

    Those of a session of `sparsify` are in no other: it keeps replicas equal by itself. Sessions of
    other kinds may share theirs, as gossip between nodes and averaging inside each of them do.

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
            if _ALONE not in (self._door, other._door):
                continue
            name = next((name for name, each in parameters.items() if other.has(each)), None)
            if name is not None:
                one = ", give both optimizers to one session" if self._door == other._door else ""
                return (
                    f"{name!r} is in a session of {other._door}() that is not over, so "
                    f"{self._door}() cannot have it, too: {_ALONE}() keeps replicas equal by "
                    f"itself. close() the other session first{one}, or begin with a new model and "
                    "optimizer"
                )
        return None


_claims: dict[int, weakref.ref[Claim]] = {}


def _others(own: Claim) -> list[Claim]:
    """All that live; `list` of a dict is one step, which no signal handler comes into."""
    found = []
    for key, held in list(_claims.items()):
        other = held()
        if other is None and _claims.get(key) is held:
            del _claims[key]
        elif other is not None and other is not own:
            found.append(other)
    return found

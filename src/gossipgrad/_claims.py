"""Which session has which parameters, so that no gradient meets twice."""

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
            for other in list(_claims):
                if other is not self and _ALONE in (self._door, other._door):
                    for name, parameter in parameters.items():
                        if other.has(parameter):
                            raise ValueError(self._conflict(name, other))
            self._held = {id(each): weakref.ref(each) for each in parameters.values()}
            _claims.add(self)

    def has(self, parameter: Tensor) -> bool:
        """Whether it is one of those."""
        held = self._held.get(id(parameter))
        return held is not None and held() is parameter

    def release(self) -> None:
        """Gives up all of them; may be called twice."""
        with _lock:
            _claims.discard(self)

    def _conflict(self, name: str, other: "Claim") -> str:
        one = ", give both optimizers to one session" if self._door == other._door else ""
        return (
            f"{name!r} is in a session of {other._door}() that is not over, so {self._door}() "
            f"cannot have it, too: {_ALONE}() keeps replicas equal by itself. close() the other "
            f"session first{one}, or begin with a new model and optimizer"
        )


_claims: "weakref.WeakSet[Claim]" = weakref.WeakSet()

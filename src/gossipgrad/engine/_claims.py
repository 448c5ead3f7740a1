"""The parameters of each session, so that none is exchanged twice."""

import gc
import threading
import weakref
from collections.abc import Mapping

from torch import Tensor

__all__ = ["Claim", "is_claimed"]

_ALONE = "sparsify"
_claims: "weakref.WeakSet[Claim]" = weakref.WeakSet()
_lock = threading.RLock()  # ranks may be threads


class Claim:
    """The parameters of one session, until the session is closed or the claim is collected.

    No parameter is in two sessions that exchange it.

    Args:
        call: The function that makes the session, for messages.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._held: dict[int, weakref.ref[Tensor]] = {}

    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """Replace the claimed parameters by these, by name; local.

        Raises:
            ValueError: One is in another session; the claim is unchanged then.
        """
        with _lock:
            if self._conflict(parameters) is not None:
                gc.collect()  # a session dropped with its optimizer is a cycle
            if (why := self._conflict(parameters)) is not None:
                raise ValueError(why)
            self._held = {id(each): weakref.ref(each) for each in parameters.values()}
            _claims.add(self)

    def has(self, parameter: Tensor) -> bool:
        """Whether the claim has it."""
        held = self._held.get(id(parameter))
        return held is not None and held() is parameter

    def release(self) -> None:
        """Release all parameters; may be called twice."""
        with _lock:
            _claims.discard(self)

    def _conflict(self, parameters: Mapping[str, Tensor]) -> str | None:
        """Return which parameter cannot be in one more session, and why."""
        for other in list(_claims):  # a signal handler may close a session meanwhile
            calls = {self._call, other._call}
            if other is self or calls == {"shrink"}:
                continue
            name = next((name for name, each in parameters.items() if other.has(each)), None)
            if name is not None:
                why = "both would exchange it in every step"
                if _ALONE in calls:
                    why = f"{_ALONE}() keeps replicas equal by itself"
                one = ", give both optimizers to one session" if len(calls) == 1 else ""
                if "shrink" in calls:
                    one = ", pass it as shrink(..., session=session)"
                return (
                    f"{name!r} is in an open session of {other._call}(), so "
                    f"{self._call}() cannot have it, too: {why}. close() the other session "
                    f"first{one}, or begin with a new model and optimizer"
                )
        return None


def is_claimed(parameter: Tensor) -> bool:
    """Whether an open session has it."""
    with _lock:
        return any(each.has(parameter) for each in list(_claims))

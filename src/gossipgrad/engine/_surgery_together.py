"""A surgery on all ranks: all that live end with it, or none, also if one is lost meanwhile."""

from collections.abc import Callable

from gossipgrad.comm import Group
from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._surgery import Surgery
from gossipgrad.errors import AgreementError, EvictedError, GossipError, ReplicaChangedError

__all__ = ["apply_together"]

_TRIES = 4  # as ranks are lost in the middle of it, or call something else first


def apply_together(
    surgery: Surgery,
    replica: Replica,
    group: Group,
    averaging: Averaging,
    pending_change: Callable[[], str | None],
    *,
    renew: Callable[[], object],
) -> bool:
    """Applies a surgery; a collective.

    Args:
        surgery: Equal on all ranks.
        replica: Of this rank.
        group: Where the ranks meet.
        averaging: Brings them to the same round, with nothing in flight.
        pending_change: What is wrong with the replica, if something is.
        renew: Makes what travels anew, of the new shapes; a collective.

    Returns:
        False if there is nothing to apply: what is in flight is in flight still.

    Raises:
        AgreementError: On every rank, if the surgeries are not equal; nothing is changed then.
        GossipError: The ranks did not come together.
    """
    version = replica.version
    for left in reversed(range(_TRIES)):
        try:
            averaging.enter_collective("surgery", pending_change())
            with averaging.together():
                if len(set(group.all_gather_object(surgery.digest()))) > 1:
                    raise AgreementError(
                        "the ranks pass unlike surgeries to apply_(); nothing was changed. Make "
                        "one of the same numbers on all ranks, such as means over ranks"
                    )
                if not surgery.resizes and not surgery.shifts:
                    return False
                averaging.drain()
                if replica.version == version:
                    replica.apply(surgery)
                renew()
                group.barrier()  # no rank sends by the new plan before all have it
            return True
        except (AgreementError, EvictedError, ReplicaChangedError):
            raise
        except GossipError:
            # A rank may have applied it already, so none may turn back while it lives. And those
            # whose last collective failed come here as the next one.
            if left == 0:
                raise
    raise AssertionError("unreachable")

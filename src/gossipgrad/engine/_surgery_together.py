"""A surgery on all ranks: all living ranks apply it, or none, even if a rank is lost."""

from collections.abc import Callable

from gossipgrad.comm import Group
from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._surgery import Surgery
from gossipgrad.errors import AgreementError, EvictedError, GossipError, ReplicaChangedError

__all__ = ["apply_together"]

_TRIES = 4  # ranks may be lost in the middle of it, or call something else first


def apply_together(
    surgery: Surgery,
    replica: Replica,
    group: Group,
    averaging: Averaging,
    pending_change: Callable[[], str | None],
    *,
    renew: Callable[[], object],
) -> bool:
    """Apply a surgery; a collective.

    Args:
        surgery: Equal on all ranks.
        replica: This rank's replica.
        group: Runs the collectives.
        averaging: Aligns the ranks' rounds, with nothing in flight.
        pending_change: Returns the error message if the replica was changed.
        renew: Creates the flows again, of the new shapes; a collective.

    Returns:
        False if there is nothing to apply; parts in flight stay in flight.

    Raises:
        AgreementError: On every rank, if the surgeries are not equal; nothing is changed then.
        GossipError: The ranks did not meet.
    """
    version = replica.version
    for left in reversed(range(_TRIES)):
        try:
            averaging.enter_collective("surgery", pending_change())
            with averaging.together():
                if len(set(group.all_gather_object(surgery.digest()))) > 1:
                    raise AgreementError(
                        "the ranks pass different surgeries to apply_(); nothing was changed. Make "
                        "it from equal numbers on all ranks, such as means over ranks"
                    )
                if not surgery.resizes and not surgery.shifts:
                    return False
                averaging.drain()
                if replica.version == version:
                    replica.apply(surgery)
                renew()
                group.barrier()  # no rank sends by the new plan until all have it
            return True
        except (AgreementError, EvictedError, ReplicaChangedError):
            raise
        except GossipError:
            # A rank may have applied it already, so no living rank may abandon it. Ranks whose last
            # collective failed continue here as their next one.
            if left == 0:
                raise
    raise AssertionError("unreachable")

"""A change of shapes on all ranks: every living rank makes it, or none, even if one is lost."""

from collections.abc import Callable

from gossipgrad.comm import Group
from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._replica import Replica
from gossipgrad.errors import AgreementError, EvictedError, GossipError, ReplicaChangedError

__all__ = ["rebuild_together"]

_TRIES = 4  # ranks may be lost in the middle of it, or call something else first


def rebuild_together(
    change: Callable[[], object] | None,
    digest: str,
    *,
    replica: Replica,
    group: Group,
    averaging: Averaging,
    pending_change: Callable[[], str | None],
    renew: Callable[[], object],
) -> bool:
    """Make a change with nothing in flight, and create the flows again; return whether any did."""
    is_made = is_renewed = False
    for left in reversed(range(_TRIES)):
        try:
            averaging.enter_collective("rebuild", None if is_made else pending_change())
            with averaging.together():
                if len(set(group.all_gather_object(digest))) > 1:
                    raise AgreementError(
                        "the ranks pass different changes to rebuild(); nothing was changed. Make "
                        "them from equal numbers on all ranks, such as means over ranks"
                    )
                if not is_made:
                    averaging.drain()
                    if change is not None:
                        change()
                    is_made = True
                differs = replica.has_other_shapes() or bool(replica.set_change())
                if not averaging.is_any(is_renewed or differs):
                    return False
                renew()
                is_renewed = True  # a try that fails at the barrier is no reason to forget it
                group.barrier()  # no rank sends by the new plan until all have it
            return True
        except (AgreementError, EvictedError, ReplicaChangedError):
            raise
        except GossipError:
            # A rank may have made the change already, so no living rank may abandon it. Ranks whose
            # last collective failed continue here as their next one.
            if left == 0:
                raise
    raise AssertionError("unreachable")

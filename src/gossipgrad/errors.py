"""What gossipgrad raises; bad arguments are a plain `ValueError`."""

from typing import ClassVar

__all__ = [
    "AgreementError",
    "EvictedError",
    "GossipError",
    "ReplicaChangedError",
    "UnlikeCallsError",
]


class GossipError(RuntimeError):
    """A run cannot continue as asked; the message names what happened and the way out.

    A note below the traceback names the page that has the message.
    """

    section: ClassVar[str | None] = None
    """The heading of docs/troubleshooting.md, as in a link; None if it depends on the message."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        anchor = "" if self.section is None else f"#{self.section}"
        self.add_note(f"gossipgrad: for causes and cures see docs/troubleshooting.md{anchor}")


class AgreementError(GossipError):
    """The ranks do not train the same model with the same settings.

    Raised on every rank before anything is sent, and names the first difference.
    """

    section = "the-ranks-do-not-agree"


class EvictedError(GossipError):
    """The others took this rank for dead while it hung, and train on without it.

    It has sent nothing since. Its weights are intact: save them, or start a new process from them.
    """

    section = "a-rank-is-lost-evicted-or-late"


class UnlikeCallsError(GossipError):
    """The ranks call different collectives of the session; none of them has done anything."""


class ReplicaChangedError(GossipError):
    """A replica was changed behind the session's back.

    In `gossip()` an optimizer has loaded a state. In the other families it is also raised for
    weights that other code writes, and for another set of trained parameters.
    `session.broadcast_()` on every rank makes the replicas one again.
    """

    section = "replicas-move-apart"

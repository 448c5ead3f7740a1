"""What gossipgrad raises; bad arguments are a plain `ValueError`."""

__all__ = ["AgreementError", "EvictedError", "GossipError", "ReplicaChangedError"]


class GossipError(RuntimeError):
    """A run cannot go on as asked; the message names what happened and the way out."""


class AgreementError(GossipError):
    """The ranks do not train the same model with the same settings.

    Raised on every rank before anything is sent, and names the first difference.
    """


class EvictedError(GossipError):
    """The others took this rank for dead while it hung, and train on without it.

    It has sent nothing since. Its weights are intact: save them, or start a new process from them.
    """


class ReplicaChangedError(GossipError):
    """A replica was changed behind the session's back.

    In `gossip()` an optimizer has loaded a state. In the other families it is also raised for
    weights that other code writes, and for another set of trained parameters.
    `session.broadcast_()` on every rank makes the replicas one again.
    """

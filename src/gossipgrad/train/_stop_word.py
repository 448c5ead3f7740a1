"""The word, in the store, by which those who joined a run learn that it was told to stop."""

import contextlib

import torch.distributed as dist

from gossipgrad.comm import AskedStore

_STORE_SECONDS = 2.0
_KEY = "gossipgrad/stopping"


class StopWord:
    """Said once, by any rank of the start; whoever started these tells them.

    Args:
        store: That of the session, with the same prefix on all ranks.
    """

    def __init__(self, store: dist.Store) -> None:
        self._asked = AskedStore(store, timeout_seconds=_STORE_SECONDS)

    def say(self) -> None:
        """Tell those who joined, if the store can be asked."""
        with contextlib.suppress(RuntimeError):
            self._asked.ask(lambda store: store.set(_KEY, ""))

    def was_said(self) -> bool | None:
        """Whether the run was told to stop; None if that cannot be known."""
        try:
            return self._asked.ask(lambda store: store.check([_KEY]))
        except RuntimeError:
            return None

    def close(self) -> None:
        """Ask nothing more."""
        self._asked.close()

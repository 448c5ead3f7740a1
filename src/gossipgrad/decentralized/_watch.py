"""Seeing that a replica was changed behind the session's back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad._claims import Claim
from gossipgrad.comm import is_sharded, local, trained_parameters
from gossipgrad.errors import ReplicaChangedError

__all__ = ["ReplicaWatch"]


class ReplicaWatch:
    """Remembers the trained parameters as they are, and says what else has touched them.

    In-place changes are seen by torch's version counters and new storage by its address; writes
    through `.data` into the same storage are not seen.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._claim = Claim("gossip")
        self._loaded: list[str] = []
        self.accept()
        loaded = self._loaded  # so that hooks hold no more than this list
        self._handles = [
            o.register_load_state_dict_post_hook(lambda o: loaded.append(type(o).__name__))
            for o in optimizers
        ]

    @torch.no_grad()
    def accept(self) -> None:
        """Takes the replica as it is now for the right one.

        Raises:
            ValueError: A parameter is in a session of `sparsify`.
        """
        trained = trained_parameters(self._model, self._optimizers)
        self._claim.take(trained)
        self._loaded.clear()
        self._parameters = trained
        self._sharded = any(is_sharded(p) for p in self._parameters.values())
        self._owned = self._owned_now()
        self.note()

    @torch.no_grad()
    def note(self) -> None:
        """Remembers the versions after a change of our own."""
        self._marks = self._marks_now()

    @torch.no_grad()
    def touched(self) -> list[str]:
        """Names of parameters that changed since `note`."""
        now = self._marks_now()
        if now == self._marks:
            return []
        return [
            name
            for name, mark, before in zip(self._parameters, now, self._marks, strict=True)
            if mark != before
        ]

    def check(self, is_as_sent: Callable[[], bool]) -> None:
        """Checks that nothing was changed since `note` but by this session.

        Args:
            is_as_sent: Asked if weights were written: whether they still are what they were.

        Raises:
            ReplicaChangedError: If something was; it names what.
        """
        self.check_set()
        names = self.touched()
        if names and not is_as_sent():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ReplicaChangedError(
                f"parameter {names[0]!r}{more} changed outside optimizer.step() (load_state_dict, "
                f"re-initialisation, ...). {_WAY_OUT}"
            )

    def check_set(self) -> None:
        """Checks that the optimizers still train the same parameters, from the same state.

        Raises:
            ReplicaChangedError: If not; it names what is new, gone, or was loaded.
        """
        if self._loaded:
            raise ReplicaChangedError(
                f"{self._loaded[0]}.load_state_dict was called inside a session. {_WAY_OUT}"
            )
        if self._owned == self._owned_now():
            return
        now = trained_parameters(self._model, self._optimizers)
        before = self._parameters
        new = [name for name in now if now[name] is not before.get(name)]
        gone = [name for name in before if name not in now]
        what = [f"new: {', '.join(new)}"] if new else []
        what += [f"gone: {', '.join(gone)}"] if gone else []
        raise ReplicaChangedError(
            "the parameters that the optimizers train have changed (add_param_group, "
            f"requires_grad): {'; '.join(what) or 'in their order'}. Call session.broadcast_() on "
            "every rank to go on with the new set"
        )

    def remove(self) -> None:
        """Takes the hooks off, and gives the parameters up."""
        for handle in self._handles:
            handle.remove()
        self._claim.release()

    def _marks_now(self) -> list[tuple[int, int]]:
        if self._sharded:
            return [_mark(local(p)) for p in self._parameters.values()]
        return [_mark(p) for p in self._parameters.values()]

    def _owned_now(self) -> list[tuple[int, bool]]:
        parameters = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
        return [(id(p), p.requires_grad) for p in parameters]


_WAY_OUT = (
    "Call session.broadcast_() on every rank to make all replicas rank 0's, or "
    "session.accept_changes() on this rank if the change is meant to be mixed in"
)


def _mark(held: Tensor) -> tuple[int, int]:
    return held._version, held.data_ptr()

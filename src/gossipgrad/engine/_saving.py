"""What happens as the state of the user's model is taken: it is made whole, or warned of."""

import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossipgrad.comm import is_sharded

if TYPE_CHECKING:
    from gossipgrad.engine._session import Session

__all__ = ["state_on_one", "watch_state_dict"]


def state_on_one(session: "Session", dst: int) -> dict[str, Any] | None:
    """See `Session.consensus_state_dict`."""
    of = session.membership
    known = {*range(session.world_size), *of.living, *of.gone}
    if dst not in known:
        raise ValueError(f"dst must be a rank of the session, one of {sorted(known)}, got {dst}")
    with session.consensus():
        living = session.membership.living
        if session.rank != (dst if dst in living else living[0]):
            return None
        return {
            name: value.detach().to("cpu", copy=True)
            if isinstance(value, Tensor) and not is_sharded(value)
            else deepcopy(value)
            for name, value in session.replica.model.state_dict().items()
        }


def watch_state_dict(model: nn.Module, differs: Callable[[], bool]) -> RemovableHandle:
    """Calls `differs` as the state of the model is taken, and warns once if it is true.

    Saved by rank 0 alone, or by `torch.distributed.checkpoint`, which keeps one of several equal
    keys, such a state loses the other replicas without a word. `differs` is a method, whose object
    the model does not keep alive. Copies of the model, pickled ones too, do not warn.
    """
    return model.register_state_dict_pre_hook(_Hook(differs))


class _Hook:
    """The hook; a copy of it, pickled or not, says nothing."""

    def __init__(self, differs: Callable[[], bool] | None = None) -> None:
        self._differs = None if differs is None else weakref.WeakMethod(differs)
        self._has_warned = False

    def __call__(self, *_: object) -> None:
        differs = None if self._differs is None else self._differs()
        if differs is not None and differs() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "state_dict() of one replica, and replicas may differ: saved, it loses what the "
                "others have learned. Take it inside `with session.consensus():`, which shows the "
                "average of all. (Right as it is if each rank saves its own, under its own name.)",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()

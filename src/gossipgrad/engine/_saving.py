"""Hooks on saving and loading: complete the state before, or warn."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad.comm import is_sharded

if TYPE_CHECKING:
    from gossipgrad.engine._session import Session

__all__ = ["state_on_one", "watch_state_dict", "watch_states"]


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


def watch_states(
    model: nn.Module, optimizers: Sequence[Optimizer], wait: Callable[[], None]
) -> list[RemovableHandle]:
    """Call the method `wait` before model state is loaded, and optimizer state loaded or saved.

    So parts in flight are never mixed into loaded state.
    """
    hook = _Hook(wait)
    loads = [each.register_load_state_dict_pre_hook(hook) for each in (model, *optimizers)]
    return loads + [each.register_state_dict_pre_hook(hook) for each in optimizers]


def watch_state_dict(model: nn.Module, differs: Callable[[], bool]) -> RemovableHandle:
    """Call `differs` when the model's state is saved, and warn once if it returns True.

    A state saved by rank 0 alone, or by `torch.distributed.checkpoint`, which keeps one of several
    equal keys, silently loses the other replicas. `differs` is a method; the model does not keep
    its object alive. Copies of the model, including pickled ones, do not warn.
    """
    return model.register_state_dict_pre_hook(_Hook(differs))


class _Hook:
    """The hook; a copy of it does nothing."""

    def __init__(self, differs: Callable[[], object] | None = None) -> None:
        self._differs = None if differs is None else weakref.WeakMethod(differs)
        self._has_warned = False

    def __call__(self, *_: object) -> None:
        differs = None if self._differs is None else self._differs()
        if differs is not None and differs() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "state_dict() of one replica, and replicas may differ: saving it loses what the "
                "others have learned. Take it inside `with session.consensus():`, which shows the "
                "average of all. (Right as it is if each rank saves its own, under its own name.)",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()

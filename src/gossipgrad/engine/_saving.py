"""What happens as the state of the user's model is taken: it is made whole, or warned of."""

import warnings
import weakref
from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["watch_state_dict"]


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

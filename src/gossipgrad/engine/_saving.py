"""A word to who saves one replica of several that differ."""

import warnings
import weakref
from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["warn_of_lone_replicas"]


def warn_of_lone_replicas(model: nn.Module, differs: Callable[[], bool]) -> RemovableHandle:
    """Warns once if the state of the model is taken while `differs()`; until it is removed.

    Saved by rank 0 alone, or by `torch.distributed.checkpoint`, which keeps one of several equal
    keys, such a state loses the other replicas without a word. `differs` is a method, whose object
    the model does not keep alive. Copies of the model, pickled ones too, do not warn.
    """
    return model.register_state_dict_pre_hook(_Warning(differs))


class _Warning:
    """The hook; a copy of it, pickled or not, says nothing."""

    def __init__(self, differs: Callable[[], bool] | None = None) -> None:
        self._differs = None if differs is None else weakref.WeakMethod(differs)

    def __call__(self, *_: object) -> None:
        differs = None if self._differs is None else self._differs()
        if differs is not None and differs():
            self._differs = None
            warnings.warn(
                "state_dict() of one replica, and replicas may differ: saved, it loses what the "
                "others have learned. Take it inside `with session.consensus():`, which shows the "
                "average of all. (Right as it is if each rank saves its own, under its own name.)",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[type["_Warning"], tuple[()]]:
        return _Warning, ()

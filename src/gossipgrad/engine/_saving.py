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
    """The hook."""

    def __init__(self, differs: Callable[[], bool]) -> None:
        self._differs = weakref.WeakMethod(differs)
        self._told = False

    def __call__(self, *_: object) -> None:
        differs = self._differs()
        if not self._told and differs is not None and differs():
            self._told = True
            warnings.warn(
                "state_dict() of one replica, and replicas may differ: saved, it loses what the "
                "others have learned. Take it inside `with session.consensus():`, which shows the "
                "average of all. (Right as it is if each rank saves its own, under its own name.)",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[Callable[[], "_Warning"], tuple[()]]:
        return _silent, ()


def _silent() -> _Warning:
    return _Warning(_Nothing().differs)


class _Nothing:
    """Gone at once, so that nothing differs from it."""

    def differs(self) -> bool:
        return False

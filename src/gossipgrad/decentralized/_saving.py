"""A word to who saves one replica of several that differ."""

import warnings
from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["warn_of_lone_replicas"]


def warn_of_lone_replicas(model: nn.Module, differs: Callable[[], bool]) -> RemovableHandle:
    """Warns once if the state of the model is taken while `differs()`; until it is removed.

    Saved by rank 0 alone, or by `torch.distributed.checkpoint`, which keeps one of several equal
    keys, such a state loses the other replicas without a word.
    """
    told = False

    def before_state_dict(*_: object) -> None:
        nonlocal told
        if not told and differs():
            told = True
            warnings.warn(
                "state_dict() of one replica, and the replicas differ: saved, it loses what the "
                "others have learned. Take it inside `with session.consensus():`, which shows the "
                "average of all. (Right as it is if each rank saves its own, under its own name.)",
                stacklevel=3,
            )

    return model.register_state_dict_pre_hook(before_state_dict)

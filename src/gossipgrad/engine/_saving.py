"""Hooks on saving and loading: complete the state before, or warn."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad._messages import warn

__all__ = ["NOTHING", "warn_of_load", "watch_state_dict", "watch_states"]


def watch_states(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    wait: Callable[[], None],
    before_load: Callable[[], None],
) -> list[RemovableHandle]:
    """Call `before_load` before model state is loaded, and `wait` as an optimizer's is or is saved.

    Both mix parts in flight, which are so never mixed into loaded state.
    """
    hook = _Hook(wait)
    handles = [model.register_load_state_dict_pre_hook(_Hook(before_load))]
    handles += [each.register_load_state_dict_pre_hook(hook) for each in optimizers]
    return handles + [each.register_state_dict_pre_hook(hook) for each in optimizers]


def watch_state_dict(model: nn.Module, differs: Callable[[], bool]) -> RemovableHandle:
    """Call `differs` when the model's state is saved, and warn once if it returns True.

    A state of rank 0 alone silently loses the other replicas. Copies of the model do not warn.
    """
    return model.register_state_dict_pre_hook(_Hook(differs, _DIFFERS))


class _Hook:
    """Calls a method, and warns once if it returns True; a copy of the hook does nothing."""

    def __init__(self, call: Callable[[], object], warning: str = "") -> None:
        self._call = weakref.WeakMethod(call)
        self._warning = warning

    def __call__(self, *_: object) -> None:
        call = self._call()
        if call is not None and call() and self._warning:
            warn(self._warning)
            self._warning = ""

    def __reduce__(self) -> Any:
        return NOTHING


# What a hook is in a copy or a pickle of its module: a callable of the standard library that
# ignores its arguments, so that the file opens where this package is not installed.
NOTHING = (getattr, (nullcontext(), "__exit__"))
_DIFFERS = (
    "state_dict() of one replica, and replicas may differ: saving it loses what the "
    "others have learned. Take it inside `with session.consensus():`, which shows the "
    "average of all. (Right as it is if each rank saves its own, under its own name.)"
)


def warn_of_load() -> None:
    """Warn of a model that was loaded amid training, when it is about to be mixed."""
    warn(
        "model.load_state_dict() inside a session: what was loaded is mixed with the other ranks' "
        "weights like any update. If only some ranks load, or load another state, call "
        "session.broadcast_() on every rank first, which makes all replicas rank 0's"
    )

"""Gradients of the model that no session makes equal on all ranks."""

import warnings
from collections.abc import Callable

from torch import nn

__all__ = ["LeftOut"]

_LOOK_EVERY = 100  # rounds; a layer may be replaced at any time


class LeftOut:
    """Warns once of a parameter that has a gradient and is trained by no optimizer of a session.

    Under DistributedDataParallel its gradient would be the mean of all ranks. Here it stays this
    rank's own, which does no harm until something is computed from all gradients: the norm by
    which they are clipped is another on every rank then, and so are the weights.

    Args:
        model: Whose parameters are looked at.
        knows: Whether gradients of one meet in this session.
    """

    def __init__(self, model: nn.Module, knows: Callable[[nn.Parameter], bool]) -> None:
        self._model, self._knows = model, knows
        self._warned = False
        self._looked_in = -1  # the spell of rounds

    def look(self, rounds: int, *, stacklevel: int) -> None:
        """Before a step, after so many rounds."""
        if self._warned or rounds // _LOOK_EVERY == self._looked_in:
            return
        self._looked_in = rounds // _LOOK_EVERY
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None or self._knows(parameter) or _is_hooked(parameter):
                continue
            if parameter.requires_grad and parameter.numel():
                self._warned = True
                warnings.warn(
                    f"{name!r} has a gradient, and no optimizer of this session trains it: the "
                    "gradient stays this rank's own. What is computed from all of them, such as "
                    "clip_grad_norm_(model.parameters()), is then another on every rank, and "
                    "weights drift apart. Freeze it with requires_grad_(False), or clip what the "
                    "optimizers train, or give it to one of them and call session.broadcast_()",
                    stacklevel=stacklevel + 1,
                )
                return


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether somebody waits for its gradient: another session, for one."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))

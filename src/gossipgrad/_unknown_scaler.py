"""A step through a scaler that a session was not told of."""

import sys
import warnings

import torch

__all__ = ["warn_of_unknown_scaler"]

_FRAMES = 12  # from a step hook up to the scaler's own step there are about five


def warn_of_unknown_scaler(door: str, harm: str) -> None:
    """Warns if `torch.amp.GradScaler.step` is among the callers of a step hook.

    Args:
        door: The function that takes the scaler, for the message.
        harm: What comes of it that it does not have it.
    """
    code = torch.amp.GradScaler.step.__code__
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if frame.f_code is code:
            warnings.warn(
                "optimizer.step() is called by a GradScaler that the session does not know: "
                f"{harm}. Pass {door}(..., scaler=scaler)",
                stacklevel=5,
            )
            return
        frame = frame.f_back

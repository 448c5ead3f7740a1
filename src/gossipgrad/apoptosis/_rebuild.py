"""Narrowing of a full model to load the weights of one that has shrunk."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.engine import narrow

__all__ = ["rebuild"]


@torch.no_grad()
def rebuild(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Narrow a model to the widths of a state and load it; parameters stay the same objects.

    Call it before an optimizer has state, and before `gossip()` or `shrink()`, to continue a run
    from a checkpoint of a narrower model.

    Args:
        model: As it was built for the run, at least as wide as the state.
        state: `model.state_dict()` of the narrower model, or a session's `state_dict()`.

    Returns:
        The model.

    Raises:
        ValueError: The state has another architecture; nothing is changed then.

    Example:
        >>> import torch, gossipgrad as gg
        >>> small, wide = torch.nn.Linear(2, 3), torch.nn.Linear(2, 5)
        >>> gg.rebuild(wide, small.state_dict()).out_features
        3
    """
    inner = state.get("model")
    tensors: Mapping[str, Tensor] = inner if isinstance(inner, Mapping) else state
    missing = sorted({name for name, _ in model.named_parameters()} - tensors.keys())
    if missing:
        raise ValueError(f"the state has no {missing[0]}: it is of another model")
    narrow(model, {name: t.shape for name, t in tensors.items() if isinstance(t, Tensor)})
    if tensors is state:
        model.load_state_dict(state)
        return model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in tensors:
            tensor.copy_(tensors[name])
    return model

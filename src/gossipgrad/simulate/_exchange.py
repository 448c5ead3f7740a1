"""One round of all ranks at once: row r of every tensor takes from the row of r's partner."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gossipgrad.topology import Schedule

_NOBODY = -1


class Exchange:
    """The messages of one round, for tensors of shape `(rank, ...)`.

    `open` takes the snapshots and works out what each rank will add; `close` adds it. Between the
    two the tensors may change.

    Args:
        schedule: Who meets whom, with what weight.
        wire_dtype: What everything is sent as; None for the tensors' own.
        lagged: Whether the difference is to the tensor at `close`, not to the snapshot.
    """

    def __init__(self, schedule: Schedule, wire_dtype: torch.dtype | None, *, lagged: bool) -> None:
        self._schedule = schedule
        self._wire_dtype = wire_dtype
        self._lagged = lagged
        self._held: dict[int, Tensor] = {}  # by the tensor's id: what was received, or the delta
        self._memory: dict[int, Tensor] = {}

    def open(self, round: int, tensors: Sequence[Shaped[Tensor, "rank ..."]]) -> None:
        """Sends a snapshot of every tensor along the edges of `round`."""
        recv_from = torch.from_numpy(self._schedule.round_peers(round).recv_from)
        sender = torch.where(recv_from == _NOBODY, torch.arange(len(recv_from)), recv_from)
        for v in tensors:
            memory = self._memory.get(id(v))
            if memory is None or memory.shape != v.shape:
                memory = self._memory[id(v)] = torch.empty_like(v)
            rows = sender.to(v.device)
            if self._wire_dtype is None:
                torch.index_select(v, 0, rows, out=memory)
                snapshot = v
            else:
                snapshot = v.to(self._wire_dtype)
                memory.copy_(snapshot.index_select(0, rows))
            if not self._lagged:
                memory.sub_(snapshot)
            self._held[id(v)] = memory

    def close(self, round: int, tensors: Sequence[Shaped[Tensor, "rank ..."]]) -> None:
        """Adds to every tensor the weighted differences of its round."""
        weight = self._weights(round)
        for v in tensors:
            delta = self._held.pop(id(v), None)
            if self._lagged:  # what was not there to be sent counts as zeros
                delta = v.neg() if delta is None else delta.sub_(v)
            if delta is None:
                continue
            if isinstance(weight, float):
                v.add_(delta, alpha=weight)
            else:
                v.addcmul_(delta, weight.to(v).view(-1, *[1] * (v.ndim - 1)))

    def _weights(self, round: int) -> float | Float[Tensor, " rank"]:
        """Of all ranks, one number where all have the same; 0 for who sits out."""
        weights = torch.from_numpy(self._schedule.round_weights(round))
        sits_out = torch.from_numpy(self._schedule.round_peers(round).recv_from) == _NOBODY
        weights = torch.where(sits_out, 0.0, weights)
        return float(weights[0]) if bool((weights == weights[0]).all()) else weights

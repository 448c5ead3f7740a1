"""Rounds of all ranks at once: row r of every tensor takes from the row of r's partner."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gossipgrad.topology import Schedule

_NOBODY = -1


class Exchange:
    """The messages of rounds, for tensors of shape `(rank, ...)`."""

    # `open` takes the snapshots and computes each rank's delta, `close` adds it; between the two
    # the tensors may change, and more rounds be opened.

    def __init__(
        self,
        schedule: Schedule,
        wire_dtype: torch.dtype | None,
        *,
        lagged: bool,
        weight: float | None = None,
    ) -> None:
        self._schedule = schedule
        self._wire_dtype = wire_dtype
        self._lagged = lagged
        self._weight = weight
        # By round and the tensor's id: what was received, or the delta.
        self._deltas: dict[tuple[int, int], Tensor] = {}

    @property
    def outstanding(self) -> list[int]:
        """Rounds that were opened and not closed."""
        return sorted({round for round, _ in self._deltas})

    def open(self, round: int, tensors: Sequence[Shaped[Tensor, "rank ..."]]) -> None:
        """Sends a snapshot of every tensor along the edges of `round`."""
        recv_from = torch.from_numpy(self._schedule.round_peers(round).recv_from)
        sender = torch.where(recv_from == _NOBODY, torch.arange(len(recv_from)), recv_from)
        for v in tensors:
            snapshot = v if self._wire_dtype is None else v.to(self._wire_dtype)
            received = snapshot.index_select(0, sender.to(v.device)).to(v.dtype)
            self._deltas[round, id(v)] = received if self._lagged else received.sub_(snapshot)

    def close(
        self,
        round: int,
        tensors: Sequence[Shaped[Tensor, "rank ..."]],
        corrections: Sequence[Shaped[Tensor, "rank ..."]] = (),
        gain: float = 0.0,
    ) -> None:
        """Adds to every tensor the weighted differences of its round, to its correction a share."""
        weight = self._weights(round)
        for number, v in enumerate(tensors):
            delta = self._deltas.pop((round, id(v)), None)
            if self._lagged:  # a tensor that did not exist when it was sent counts as zeros
                delta = v.neg() if delta is None else delta.sub_(v)
            if delta is None:
                continue
            both = [(v, 1.0), *((c, gain) for c in corrections[number : number + 1])]
            for to, share in both:
                if isinstance(weight, float):
                    to.add_(delta, alpha=weight * share)
                else:
                    to.addcmul_(delta, weight.to(v).view(-1, *[1] * (v.ndim - 1)), value=share)

    def _weights(self, round: int) -> float | Float[Tensor, " rank"]:
        """Of all ranks, one number where they are equal; 0 for a rank without a partner."""
        weights = torch.from_numpy(self._schedule.round_weights(round, self._weight or 0.5))
        if self._weight is not None:
            weights = weights.clamp(max=self._weight)
        is_alone = torch.from_numpy(self._schedule.round_peers(round).recv_from) == _NOBODY
        weights = torch.where(is_alone, 0.0, weights)
        return float(weights[0]) if bool((weights == weights[0]).all()) else weights

r"""Gossip of some coordinates a round: p replicas in one process, in the letters of `_reference`.

It says what a session with `compress=SharedMask(density)` must compute; it is not for training.

Letters
    C_t(i)       the coordinates of parameter i that round t exchanges: the same on all ranks
    v[C]         the elements of v, in row-major order, that C names

Rules. The comments in the code name the rule that a line implements. R1, R2, R6 and R9 are those of
`_reference`.
    M1  sync and overlap. r sends x_r = q(w_r)[C_t] and receives y_r = x_s. It mixes, however late,
        w_r[C_t] <- w_r[C_t] + a (y_r - x_r): nothing else of w_r changes.
    M2  Low-precision parameters: the residual e_r also takes part only in C_t.

For each coordinate this is plain gossip in those rounds that choose it, a share `density` of all.
So the mean over ranks is kept under any schedule, and a round reduces the squared distance between
replicas `density` times as much as a round of all weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from gossipgrad.decentralized._reference import Exchange, Reference, Values, add
from gossipgrad.topology import Schedule

Coordinates = Callable[[int, int], Int64[Tensor, " chosen"]]


class MaskedReference(Reference):
    """Gossip with a shared mask on p replicas in one process; used like `Reference`.

    Args:
        models: As of `Reference`.
        optimizers: As of `Reference`.
        schedule: As of `Reference`.
        coordinates: C_t(i), by round and number of the parameter, ascending.
        **options: `mode` ("sync" or "overlap"), `every`, `average_every` and `wire_dtype` of
            `Reference`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        coordinates: Coordinates,
        **options: Any,
    ) -> None:
        super().__init__(models, optimizers, schedule, **options)
        self.coordinates = coordinates
        self.t = 0  # the round that is outstanding

    def _exchange(self, values: list[Values]) -> list[Exchange | None]:
        """M1: every rank sends its coordinates of round t to one rank, and receives from one."""
        self.t = self.rounds
        return super()._exchange(
            [
                {key: at(w, self.coordinates(self.t, key[0])) for key, w in of_rank.items()}
                for of_rank in values
            ]
        )

    def _count_in(self, total: Tensor, exchange: Exchange, i: int, w: Tensor) -> None:
        """M1, for a sum."""
        y_x = self._difference(exchange, (i, "w"), w).double()
        total.view(-1)[self.coordinates(self.t, i)] += exchange.a * y_x

    def _settle(self) -> None:
        """M1: w_r[C_t] <- w_r[C_t] + a (y_r - x_r)."""
        for r, exchange in enumerate(self.outstanding):
            if exchange is None:
                continue
            for i, w in enumerate(self.w[r]):
                c = self.coordinates(self.t, i)
                v, e = at(w, c), None if (whole := self.e[r][i]) is None else at(whole, c)
                add(v, self._difference(exchange, (i, "w"), w), exchange.a, e)  # M2
                w.view(-1)[c] = v
                if whole is not None and e is not None:
                    whole.view(-1)[c] = e
        self.outstanding = [None] * self.p


def at(v: Float[Tensor, "..."], c: Int64[Tensor, " chosen"]) -> Float[Tensor, " chosen"]:
    """Return a copy of v[C]."""
    return v.detach().reshape(-1)[c]

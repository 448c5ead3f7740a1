r"""Gossip of compressed differences: p replicas in one process, in the letters of CHOCO-SGD.

It is for study: sessions do not do this, and compress with `gg.SharedMask`. The letters p, r, s, t,
w_r, a, q and e_r are those of `_reference`.

Letters
    h_rs         s's estimate of r, the paper's x-hat_r; r knows it; one copy per link
    top_k(v)     v where its magnitude is among the k largest, and 0 elsewhere; of equal
                 ones the first
    gamma        the consensus step size

Rules. The comments in the code name the rule that a line implements. R1, R2, R6 and R9 are those of
`_reference`.
    K1  In the beginning h_rs = w_r.
    K2  sync: after the update r sends s, its partner of round t, x_r = q(top_k(w_r + e_r - h_rs)).
        (Algorithm 2, lines 3 to 5.) overlap: it does so before the update.
    K3  Both ends add it: h_rs <- h_rs + x_r. (Lines 6 and 7.)
    K4  After the update, w_r <- w_r + a gamma (h_sr - h_rs). (Line 8, with w_rs = a.) Its sum over
        the two ends is zero.
    K5  Where R9 has made all replicas equal, K1 again.

Deviations from the paper
    1. One partner a round, in place of all neighbours in each: a rank is known to each of its
       neighbours as of when they last met, so that there are two copies a link. The paper has one
       of each neighbour and one of the rank itself.
    2. h begins as the weights, which are equal, and not as 0.
    3. overlap, which is not in the paper, sends before the update and mixes after it.
    4. top_k is taken of each message's parameters for themselves.

References:
    Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with
    Compressed Communication, arXiv:1902.00340, Algorithm 2 (CHOCO-SGD); with neural networks:
    Koloskova et al., arXiv:1907.09356.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gossipgrad.decentralized._reference import Exchange, Reference, Values, add
from gossipgrad.topology import Schedule


class DifferenceReference(Reference):
    """CHOCO-SGD with one partner per round, on p replicas in one process; used like `Reference`.

    Args:
        models: As of `Reference`.
        optimizers: As of `Reference`.
        schedule: A schedule of symmetric pairs.
        density: k / n of a message.
        gamma: The consensus step size.
        groups: Numbers of the parameters of each message; None: all in one.
        mode: "sync" or "overlap".
        every: As of `Reference`.
        average_every: As of `Reference`.
        wire_dtype: Type of differences on the wire; None: the parameters' own.

    Raises:
        ValueError: For settings outside these, or replicas that do not match.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        density: float,
        gamma: float,
        groups: Sequence[Sequence[int]] | None = None,
        mode: str = "overlap",
        every: int = 1,
        average_every: int | str | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        if mode == "lagged" or not schedule.symmetric:
            raise ValueError(
                f"mode={mode!r}, schedule {schedule.name}: differences need mode 'sync' or "
                "'overlap' and symmetric pairs."
            )
        super().__init__(
            models,
            optimizers,
            schedule,
            mode=mode,
            every=every,
            average_every=average_every,
            wire_dtype=wire_dtype,
        )
        self.density = density
        self.gamma = gamma
        self.groups = [range(len(self.w[0]))] if groups is None else groups
        self.h: dict[tuple[int, int], list[Tensor]] = {}
        self._begin_links()
        self.met: list[int | None] = [None] * self.p  # s of the round that is outstanding

    @torch.no_grad()
    def average_(self) -> None:
        """R9, and K5."""
        super().average_()
        self._begin_links()

    @torch.no_grad()
    def _begin_links(self) -> None:
        """Apply K1 for all pairs of the schedule."""
        for t in range(self.schedule.period):
            for r in range(self.p):
                s = self.schedule.peers(t, r).send_to
                if s is not None:
                    self.h[r, s] = [self._total(r, g) for g in range(len(self.groups))]

    def _exchange(self, values: list[Values]) -> list[Exchange | None]:
        """Apply K2: every rank sends the largest differences to its partner's estimate."""
        t = self.rounds
        self.met = [self.schedule.peers(t, r).recv_from for r in range(self.p)]  # R1
        x = [{} if s is None else self._largest(r, s) for r, s in enumerate(self.met)]
        return [
            None if s is None else Exchange(self.schedule.weight(t, r, default=0.5), x[r], x[s])
            for r, s in enumerate(self.met)
        ]

    def _largest(self, r: int, s: int) -> Values:
        x: Values = {}
        for g, h in enumerate(self.h[r, s]):
            v = self._total(r, g)
            k = max(1, round(self.density * len(v)))
            at = (v - h).abs().sort(descending=True, stable=True).indices[:k]
            sent = (v - h)[at].to(self.wire_dtype or self.w[r][self.groups[g][0]].dtype)
            x[g, "x"] = torch.zeros_like(v).index_copy_(0, at, sent.to(v.dtype))
        return x

    def _settle(self) -> None:
        """K3, then K4."""
        for r, (s, exchange) in enumerate(zip(self.met, self.outstanding, strict=True)):
            if s is not None and exchange is not None:
                for g, h in enumerate(self.h[r, s]):
                    h += exchange.x[g, "x"]
        for r, (s, exchange) in enumerate(zip(self.met, self.outstanding, strict=True)):
            if s is not None and exchange is not None:
                for g, (h_rs, h_sr) in enumerate(zip(self.h[r, s], self.h[s, r], strict=True)):
                    for i, d in zip(self.groups[g], self._split(g, h_sr - h_rs), strict=True):
                        add(self.w[r][i], d, exchange.a * self.gamma, self.e[r][i])
        self.outstanding = [None] * self.p

    def _total(self, r: int, g: int) -> Float[Tensor, " n"]:
        """Return a copy of w_r + e_r of a message's parameters."""
        pairs = [(self.w[r][i].detach(), self.e[r][i]) for i in self.groups[g]]
        return torch.cat([(w.clone() if e is None else w.float() + e).flatten() for w, e in pairs])

    def _split(self, g: int, flat: Tensor) -> list[Tensor]:
        like = [self.w[0][i] for i in self.groups[g]]
        pieces = flat.split([w.numel() for w in like])
        return [piece.view_as(w) for piece, w in zip(pieces, like, strict=True)]

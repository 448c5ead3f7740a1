r"""Local steps with an outer optimizer, by gossip: p replicas in one process, beside the papers.

The letters p, r, t, w_r and e_r are those of `_reference`; the others are DiLoCo's.

Letters
    H            local steps in a period
    y_r          outer weights: w_r where a period begins
    d_r          pseudo-gradient: y_r - w_r where it ends (GASLoC writes -g_t^r)
    m_r          outer momentum of rank r
    eta, beta    outer learning rate and momentum
    W_t          the mixing of round t: R3 in mode sync, R4 in mode overlap

Rules. The comments in the code name the rule that a line implements.
    L1  A period begins with y_r = w_r. H steps of the rank's own optimizer follow, and nothing is
        exchanged. (DiLoCo, Algorithm 1, lines 2 to 9; GASLoC, theta_{t,h}.)
    L2  At its end d_r = y_r - w_r, m_r <- beta m_r + d_r, w_r <- y_r - eta (d_r + beta m_r): a step
        of Nesterov's SGD on the outer weights. (DiLoCo, lines 12 to 14, of the rank's own d.)
    L3  sync. Then w <- W_t w: the new outer weights are mixed, and so in one message the outer
        weights and pseudo-gradients of both. (GASLoC: u - alpha Lambda u of u = theta + eta g;
        adapt-then-combine.)
    L4  overlap. w <- w + (W_t - I) y in place of L3: the outer weights from the beginning of the
        period are mixed; they were sent during it. (Factored Gossip DiLoCo's mixing that does
        not block: it starts from the newest outer step, and no gradient is stale.)
    L5  Mixing within a period (R9) changes y_r as it changes w_r: d_r contains only local steps.

The rules are linear in d, m and y. So in both modes the means over ranks follow DiLoCo's recursion
for the mean pseudo-gradient, and where W_t is the exact average the replicas are DiLoCo's.

Deviations from the papers, of which we know GASLoC's update and Factored Gossip DiLoCo's abstract,
figures and the notes of others, not their code
    1. GASLoC's momentum is of the iterates, gamma (u_t - u_{t-1}), and has in it what mixing has
       moved. Ours is of the pseudo-gradients alone, as DiLoCo's: mixing with a random partner and
       beta 0.9 would feed on itself (without gradients E|w_r - mean|^2 of many ranks grows by 1.2
       a round).
    2. Factored Gossip DiLoCo may also mix pseudo-gradients before the outer step, blocking; L3
       mixes them with the weights, after it. The old momentum is mixed with them into w, and m_r
       itself is not: each rank keeps that of its own pseudo-gradients.
    3. A void round is W_t = I: the outer step is that of the rank's own pseudo-gradient.
    4. The inner optimizer is the user's and keeps its state; nothing is reset between periods.

References:
    Douillard et al., DiLoCo, arXiv:2311.08105, Algorithm 1.
    Cagnasso, Belilovsky, Oyallon, Unifying Local Communications and Local Updates for LLM
    Pretraining (GASLoC), arXiv:2606.11081.
    Koneputugodage et al., Factored Gossip DiLoCo, arXiv:2606.22768.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.decentralized._reference import Reference, replace
from gossipgrad.topology import Schedule


class LocalStepsReference(Reference):
    """Local steps with an outer optimizer on p replicas in one process; used like `Reference`.

    Args:
        models: As of `Reference`.
        optimizers: The inner optimizers.
        schedule: As of `Reference`.
        local_steps: H.
        lr: eta.
        momentum: beta.
        **options: `mode`, `average_every`, `exchanges` and `wire_dtype` of `Reference`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        local_steps: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(models, optimizers, schedule, every=local_steps, **options)
        self.eta, self.beta = lr, momentum
        self.y: list[list[Tensor]] = [[] for _ in range(self.p)]
        self.m = [[torch.zeros_like(x) for x in self._wide(r)] for r in range(self.p)]

    @torch.no_grad()
    def average_(self) -> None:
        """R9, and L5."""
        before = [self._wide(r) for r in range(self.p)]
        super().average_()
        for r in range(self.p):
            for y, was, now in zip(self.y[r], before[r], self._wide(r), strict=True):
                y += now - was

    def _update(self) -> None:
        if self.steps % self.every == 0:
            self.y = [self._wide(r) for r in range(self.p)]  # L1
        super()._update()
        if (self.steps + 1) % self.every == 0:
            for r in range(self.p):
                self._outer_step(r)

    def _outer_step(self, r: int) -> None:
        """L2, written from w: with eta 1 and beta 0 the local steps stay as they are, exactly."""
        for i, x in enumerate(self._wide(r)):
            d = self.y[r][i] - x
            self.m[r][i].mul_(self.beta).add_(d)
            x.add_(d, alpha=1 - self.eta).add_(self.m[r][i], alpha=-self.eta * self.beta)
            replace(self.w[r][i], x, self.e[r][i])

    def _wide(self, r: int) -> list[Tensor]:
        """Copies of w_r + e_r, in fp32 where w is narrower."""
        pairs = zip(self.w[r], self.e[r], strict=True)
        return [w.detach().clone() if e is None else w.float() + e for w, e in pairs]

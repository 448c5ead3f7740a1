"""How often ranks of unequal pace mix in mode stale, by the reference with a clock.

No training: only which rank steps when, and when its messages arrive.
"""

import heapq
import random

import torch
from torch import nn

from gossipgrad.decentralized._reference_stale import Message, StaleReference
from gossipgrad.topology import matching

PACES = {
    "8 alike": [1.0] * 8,
    "32 alike": [1.0] * 32,
    "8, one takes twice as long": [2.0] + [1.0] * 7,
    "8, one takes half as long": [0.5] + [1.0] * 7,
    "8, four take twice as long": [2.0] * 4 + [1.0] * 4,
}
DELAYS = (0.0, 0.5, 2.0)
STALENESS = (0, 1, 2, 4)
JITTER = 0.1
STEPS = 150


class Clocked(StaleReference):
    """Stale gossip in which a message is `delay` on its way, and mixed rounds are counted."""

    def __init__(self, paces: list[float], d: int, delay: float) -> None:
        p = len(paces)
        models = [nn.Linear(1, 1, bias=False) for _ in range(p)]
        for model in models:
            model.weight.grad = torch.zeros(1, 1)
        self.now = 0.0
        self.mixed = [0] * p
        self._delay = delay
        self._posted: dict[int, float] = {}
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
        super().__init__(models, optimizers, matching(p), max_staleness=d)

    def arrive(self, r: int) -> None:
        """Brings to r what has been on its way for long enough."""
        for (s, to), messages in self.links.items():
            for message in messages:
                self._posted.setdefault(id(message), self.now)
            while to == r and messages and self._age(messages[0]) >= self._delay:
                self._posted.pop(id(messages[0]))
                self.ranks[r].inbox.append((s, messages.pop(0)))

    def _age(self, message: Message) -> float:
        return self.now - self._posted[id(message)]

    def _mix(self, r: int) -> None:
        before = len(self.ranks[r].sent)
        super()._mix(r)
        self.mixed[r] += before - len(self.ranks[r].sent)


def mixes_per_step(paces: list[float], d: int, delay: float) -> list[float]:
    """Of each rank, over `STEPS` steps of a rank of pace 1."""
    draw = random.Random(0)
    ranks = Clocked(paces, d, delay)
    due = [(draw.random(), r) for r in range(len(paces))]
    heapq.heapify(due)
    steps = [0] * len(paces)
    while due[0][0] < STEPS:
        ranks.now, r = heapq.heappop(due)
        ranks.arrive(r)
        ranks.step(r)
        steps[r] += 1
        ranks.arrive(r)  # what it sent now is on its way from now
        heapq.heappush(due, (ranks.now + paces[r] * draw.lognormvariate(0, JITTER), r))
    return [mixed / made for mixed, made in zip(ranks.mixed, steps, strict=True)]


def pace_rows() -> list[dict]:
    """A row for each group of ranks, delay and staleness: mixes a step of the first, the others."""
    rows = []
    for name, paces in PACES.items():
        for delay in DELAYS:
            for d in STALENESS:
                first, *others = mixes_per_step(paces, d, delay)
                rows.append(
                    {
                        "ranks": name,
                        "message_steps": delay,
                        "max_staleness": d,
                        "mixes_per_step_first": round(first, 3),
                        "mixes_per_step_others": round(sum(others) / len(others), 3),
                    }
                )
    return rows

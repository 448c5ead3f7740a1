"""What does bounded staleness cost? Accuracy and consensus distance against `max_staleness`.

Eight virtual ranks train an MLP on Fashion-MNIST in mode stale, with `max_staleness` from 0 to 8:
once with every exchange as late as it allows, once with every exchange in time, which shows what
the smaller weight alone costs. The same samples, seeds and initial weights for all. A cell that is
done is kept between calls. Beside it, how often ranks of unequal pace come to mix at all.

    python -m benchmarks.staleness
"""

import argparse
import heapq
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks._common import once, write
from benchmarks._fashion import Part, accuracy, cosine, fashion
from gossipgrad import Stale, data, models
from gossipgrad.decentralized._reference_stale import Message, StaleReference
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import matching

PACES = {
    "8 alike": [1.0] * 8,
    "32 alike": [1.0] * 32,
    "8, one takes twice as long": [2.0] + [1.0] * 7,
    "8, one takes half as long": [0.5] + [1.0] * 7,
    "8, four take twice as long": [2.0] * 4 + [1.0] * 4,
}
DELAYS = (0.0, 0.5, 2.0)
PACE_STALENESS = (0, 1, 2, 4)
JITTER = 0.1
PACE_STEPS = 150


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
    """Of each rank, over `PACE_STEPS` steps of a rank of pace 1."""
    draw = random.Random(0)
    ranks = Clocked(paces, d, delay)
    due = [(draw.random(), r) for r in range(len(paces))]
    heapq.heapify(due)
    steps = [0] * len(paces)
    while due[0][0] < PACE_STEPS:
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
            for d in PACE_STALENESS:
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


WORLD_SIZE = 8
BATCH_SIZE = 64
EPOCHS = 6
LEARNING_RATE = 0.05
MOMENTUM = 0.9
STALENESS = tuple(range(9))
DISTANCE_EVERY = 20  # steps


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        contestant: "allreduce", "overlap", "stale, late" or "stale, in time".
        max_staleness: Of mode stale, None for the others.
        seed: Of initial weights, samples and partners.
    """

    contestant: str
    max_staleness: int | None
    seed: int

    @property
    def name(self) -> str:
        parts = [self.contestant.replace(", ", "-").replace(" ", "-"), self.max_staleness]
        return "-".join(str(part) for part in (*parts, self.seed) if part is not None)

    @property
    def settings(self) -> dict:
        """What virtual ranks are told."""
        if self.contestant == "allreduce":
            return {"strategy": "allreduce"}
        topology = matching(WORLD_SIZE, seed=self.seed)
        if self.max_staleness is None:
            return {"topology": topology}
        delay = self.max_staleness if self.contestant == "stale, late" else 0
        mode = Stale(max_staleness=self.max_staleness)
        return {"topology": topology, "mode": mode, "delay": delay}


def cells(seeds: int) -> list[Cell]:
    """Every cell, seed by seed."""
    contestants = [("allreduce", None), ("overlap", None)]
    contestants += [("stale, late", d) for d in STALENESS]
    contestants += [("stale, in time", d) for d in STALENESS]
    return [Cell(name, d, seed) for seed in range(seeds) for name, d in contestants]


def run(cell: Cell, train: Part, test: Part) -> dict:
    """The figures of one cell."""
    x, y = train
    torch.manual_seed(cell.seed)
    ranks = VirtualRanks(
        models.build("mlp", data.info("fashion-mnist")),
        WORLD_SIZE,
        optimizer=lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=MOMENTUM),
        **cell.settings,
    )
    step_samples = WORLD_SIZE * BATCH_SIZE
    steps = len(y) // step_samples
    distances: list[float] = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((cell.seed, epoch)).permutation(len(y))[
            : steps * step_samples
        ]
        for chosen in torch.from_numpy(order).view(steps, WORLD_SIZE, BATCH_SIZE):
            rate = cosine(LEARNING_RATE, ranks.steps, EPOCHS * steps)
            ranks.optimizer.param_groups[0]["lr"] = rate
            ranks.step(x[chosen], y[chosen])
            if ranks.steps % DISTANCE_EVERY == 0:
                distances.append(ranks.consensus_distance())
    return {
        "accuracy": accuracy(ranks.consensus_model(), test),
        "mean_distance": statistics.fmean(distances),
    }


def table(results: list[tuple[Cell, dict]]) -> list[dict]:
    """One row a contestant and staleness: means over the seeds."""
    groups: dict[tuple, list[tuple[Cell, dict]]] = {}
    for cell, figures in results:
        groups.setdefault((cell.contestant, cell.max_staleness), []).append((cell, figures))
    return [
        {
            "contestant": contestant,
            "max_staleness": d,
            "weight": None if d is None else round(Stale(max_staleness=d).weight, 4),
            **{
                name: round(statistics.fmean(figures[name] for _, figures in found), 5)
                for name in ("accuracy", "mean_distance")
            },
            "accuracies": [figures["accuracy"] for _, figures in found],
            "seeds": [cell.seed for cell, _ in found],
        }
        for (contestant, d), found in groups.items()
    ]


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = fashion()
    results = []
    for cell in cells(options.seeds):
        path = options.folder / f"{cell.name}.json"
        figures = once(path, asdict(cell), lambda cell=cell: run(cell, train, test))
        results.append((cell, figures))
        print(cell.name, figures, flush=True)
    setting = {
        "data": "fashion-mnist",
        "model": "mlp",
        "world_size": WORLD_SIZE,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "learning_rate": f"{LEARNING_RATE}, cosine to 0",
        "momentum": MOMENTUM,
        "topology": "matching",
    }
    figures = {
        "setting": setting,
        "rows": table(results),
        "pace_setting": f"steps of length 1, log-normal with sigma {JITTER}; nothing is trained",
        "pace": pace_rows(),
    }
    print(write("staleness", figures))


if __name__ == "__main__":
    main()

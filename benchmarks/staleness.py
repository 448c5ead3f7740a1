"""What does bounded staleness cost? Accuracy and consensus distance against `max_staleness`.

Eight virtual ranks train an MLP on Fashion-MNIST in mode stale, with `max_staleness` from 0 to 8:
once with every exchange as late as it allows, once with every exchange in time, which shows what
the smaller weight alone costs. The same samples, seeds and initial weights for all. Runs that are
done are kept. Beside it, how often ranks of unequal pace come to mix at all.

    python -m benchmarks.staleness
"""

import argparse
import heapq
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks._common import once, write
from benchmarks._tasks import Part, accuracy, cosine, whole
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
WORLD_SIZE, BATCH_SIZE, EPOCHS, LEARNING_RATE, MOMENTUM = 8, 64, 6, 0.05, 0.9
STALENESS = tuple(range(9))
DISTANCE_EVERY = 20  # steps


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
                row: dict[str, Any] = {"ranks": name, "message_steps": delay, "max_staleness": d}
                row["mixes_per_step_first"] = round(first, 3)
                row["mixes_per_step_others"] = round(statistics.fmean(others), 3)
                rows.append(row)
    return rows


# How late exchanges come, and the largest staleness, None for modes that have none.
CONTESTANTS: list[tuple[str, int | None]] = [
    *(("allreduce", None), ("overlap", None)),
    *(("stale, late", d) for d in STALENESS),
    *(("stale, in time", d) for d in STALENESS),
]


def settings(contestant: str, d: int | None, seed: int) -> dict[str, Any]:
    """Of virtual ranks."""
    if contestant == "allreduce":
        return {"strategy": "allreduce"}
    topology = matching(WORLD_SIZE, seed=seed)
    if d is None:
        return {"topology": topology}
    delay = d if contestant == "stale, late" else 0
    return {"topology": topology, "mode": Stale(max_staleness=d), "delay": delay}


def run(contestant: str, d: int | None, seed: int, train: Part, test: Part) -> dict[str, float]:
    """The figures of one run."""
    x, y = train
    torch.manual_seed(seed)
    ranks = VirtualRanks(
        models.build("mlp", data.info("fashion-mnist")),
        WORLD_SIZE,
        optimizer=lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=MOMENTUM),
        **settings(contestant, d, seed),
    )
    steps = len(y) // (WORLD_SIZE * BATCH_SIZE)
    distances: list[float] = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((seed, epoch)).permutation(len(y))
        order = order[: steps * WORLD_SIZE * BATCH_SIZE].reshape(steps, WORLD_SIZE, BATCH_SIZE)
        for chosen in torch.from_numpy(order):
            rate = cosine(LEARNING_RATE, ranks.steps, EPOCHS * steps)
            ranks.optimizer.param_groups[0]["lr"] = rate
            ranks.step(x[chosen], y[chosen])
            if ranks.steps % DISTANCE_EVERY == 0:
                distances.append(ranks.consensus_distance())
    found = accuracy(ranks.consensus_model(), test)
    return {"accuracy": found, "mean_distance": statistics.fmean(distances)}


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts, rows = whole("fashion-mnist"), []
    for contestant, d in CONTESTANTS:
        found = []
        for seed in range(options.seeds):
            of = {"contestant": contestant, "max_staleness": d, "seed": seed}
            name = "-".join(str(value) for value in of.values() if value is not None)
            path = options.folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"
            found.append(once(path, of, lambda of=(contestant, d, seed): run(*of, *parts)))
            print(name, found[-1], flush=True)
        row: dict[str, Any] = {"contestant": contestant, "max_staleness": d}
        row["weight"] = None if d is None else round(Stale(max_staleness=d).weight, 4)
        for key in ("accuracy", "mean_distance"):
            row[key] = round(statistics.fmean(figures[key] for figures in found), 5)
        row["accuracies"] = [figures["accuracy"] for figures in found]
        rows.append(row | {"seeds": list(range(options.seeds))})
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
    pace = f"steps of length 1, log-normal with sigma {JITTER}; nothing is trained"
    figures = {"setting": setting, "rows": rows, "pace_setting": pace, "pace": pace_rows()}
    print(write("staleness", figures))


if __name__ == "__main__":
    main()

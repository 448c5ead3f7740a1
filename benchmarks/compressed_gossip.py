"""What does gossip lose by sending less? Bytes, accuracy and distance of what may be sent.

Eight virtual ranks train LeNet on Fashion-MNIST and exchange after each update: nothing; all
weights, every step or every tenth; a shared mask's; the largest differences to what the partner
knows, on a ring (CHOCO-SGD); and the largest weights themselves. Of these the library has the
shared mask. The same samples, seeds and initial weights for all. A cell that is done is kept
between calls.

    python -m benchmarks.compressed_gossip
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gossipgrad as gg
from benchmarks._common import once, write
from benchmarks._tasks import Part, accuracy, cosine, whole
from gossipgrad import data, models
from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import Schedule, dissemination, ring

WORLD_SIZE = 8
BATCH_SIZE = 32
EPOCHS = 3
LEARNING_RATE = 0.05
MOMENTUM = 0.9
DISTANCE_EVERY = 20  # steps

Mix = Callable[[int, Tensor], int]
"""Mixes replicas, the rows of a matrix, in a round; the bytes that each rank sent."""


def all_weights(schedule: Schedule, every: int = 1) -> Mix:
    """All weights."""

    def mix(step: int, w: Tensor) -> int:
        if (step + 1) % every:
            return 0
        w.copy_(0.5 * (w + w[partners(schedule, step // every)]))
        return w[0].nbytes

    return mix


def masked(schedule: Schedule, mask: gg.SharedMask, seed: int) -> Mix:
    """The coordinates of a round, the same on all ranks."""

    def mix(step: int, w: Tensor) -> int:
        at = mask.indices(w.shape[1], seed=seed, round=step)
        chosen = w[:, at]
        w[:, at] = 0.5 * (chosen + chosen[partners(schedule, step)])
        return 4 * mask.largest_count(w.shape[1])

    return mix


def differences(schedule: Schedule, density: float, initial: Tensor) -> Mix:
    """The largest differences to what the partner knows, which begins as the common weights.

    The consensus step is twice the density.
    """
    copies = {
        (r, s): initial.clone()
        for turn in range(schedule.period)
        for r, s in enumerate(partners(schedule, turn).tolist())
    }

    def mix(step: int, w: Tensor) -> int:
        form = SparseFormat(w.shape[1], round(density * w.shape[1]))
        met = list(enumerate(partners(schedule, step).tolist()))
        for r, s in met:
            difference = w[r] - copies[r, s]
            at = top_k(difference, form.count)
            copies[r, s][at] += difference[at]
        for r, s in met:
            w[r].add_(copies[s, r] - copies[r, s], alpha=density)
        return 8 + form.size_bytes

    return mix


def naive(schedule: Schedule, density: float) -> Mix:
    """The largest weights, mixed where they came."""

    def mix(step: int, w: Tensor) -> int:
        form = SparseFormat(w.shape[1], round(density * w.shape[1]))
        before = w.clone()
        for r, s in enumerate(partners(schedule, step).tolist()):
            at = top_k(before[s], form.count)
            w[r, at] = 0.5 * (before[r, at] + before[s, at])
        return form.size_bytes

    return mix


def partners(schedule: Schedule, round: int) -> Tensor:
    """Whom each rank receives from."""
    return torch.from_numpy(schedule.round_peers(round).recv_from)


def contestants(seed: int, initial: Tensor) -> dict[str, tuple[str, Mix]]:
    """By name: the topology, and what is exchanged."""
    rotating, fixed = dissemination(WORLD_SIZE, seed=seed), ring(WORLD_SIZE)
    return {
        "nothing": ("none", lambda step, w: 0),
        "all weights": ("dissemination", all_weights(rotating)),
        "all weights, every=10": ("dissemination", all_weights(rotating, every=10)),
        "SharedMask(0.1)": ("dissemination", masked(rotating, gg.SharedMask(0.1), seed)),
        "SharedMask(0.01)": ("dissemination", masked(rotating, gg.SharedMask(0.01), seed)),
        "all weights, ring": ("ring", all_weights(fixed)),
        "SharedMask(0.1), ring": ("ring", masked(fixed, gg.SharedMask(0.1), seed)),
        "CHOCO-SGD 0.1, ring": ("ring", differences(fixed, 0.1, initial)),
        "CHOCO-SGD 0.01, ring": ("ring", differences(fixed, 0.01, initial)),
        "naive top-k 0.1": ("dissemination", naive(rotating, 0.1)),
        "naive top-k 0.01": ("dissemination", naive(rotating, 0.01)),
    }


def run(name: str, seed: int, train: Part, test: Part) -> dict:
    """The figures of one contestant and seed."""
    x, y = train
    torch.manual_seed(seed)
    ranks = VirtualRanks(
        models.build("lenet", data.info("fashion-mnist")),
        WORLD_SIZE,
        optimizer=lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=MOMENTUM),
        strategy="local",
    )
    stacked = [p.detach() for p in ranks.optimizer.param_groups[0]["params"]]
    w = torch.cat([p.view(WORLD_SIZE, -1) for p in stacked], 1)
    topology, mix = contestants(seed, w[0].clone())[name]
    sent_bytes, shift = 0, torch.zeros(w.shape[1])
    steps = len(y) // (WORLD_SIZE * BATCH_SIZE)
    distances: list[float] = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((seed, epoch)).permutation(len(y))
        order = order[: steps * WORLD_SIZE * BATCH_SIZE].reshape(steps, WORLD_SIZE, BATCH_SIZE)
        for chosen in torch.from_numpy(order):
            rate = cosine(LEARNING_RATE, ranks.steps, EPOCHS * steps)
            ranks.optimizer.param_groups[0]["lr"] = rate
            ranks.step(x[chosen], y[chosen])
            torch.cat([p.view(WORLD_SIZE, -1) for p in stacked], 1, out=w)
            mean = w.mean(0)
            sent_bytes += mix(ranks.steps - 1, w)
            shift += w.mean(0) - mean
            for p, part in zip(stacked, w.split([p[0].numel() for p in stacked], 1), strict=True):
                p.view(WORLD_SIZE, -1).copy_(part)
            if ranks.steps % DISTANCE_EVERY == 0:
                distances.append(ranks.consensus_distance())
    replicas = [accuracy(ranks.replica(rank), test) for rank in range(WORLD_SIZE)]
    return {
        "contestant": name,
        "seed": seed,
        "topology": topology,
        "bytes_per_step": sent_bytes / (EPOCHS * steps),
        "accuracy": accuracy(ranks.consensus_model(), test),
        "worst_replica_accuracy": min(replicas),
        "mean_distance": statistics.fmean(distances),
        "mean_shift": float(shift.norm()),
    }


def table(results: list[dict]) -> list[dict]:
    """One row a contestant: means over the seeds."""
    rows = []
    for name in dict.fromkeys(result["contestant"] for result in results):
        found = [result for result in results if result["contestant"] == name]
        numbers = [key for key, value in found[0].items() if isinstance(value, float)]
        rows.append(
            {
                "contestant": name,
                "topology": found[0]["topology"],
                **{key: round(statistics.fmean(r[key] for r in found), 5) for key in numbers},
                "accuracies": [r["accuracy"] for r in found],
                "seeds": [r["seed"] for r in found],
            }
        )
    return rows


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, help="of each part, for a try")
    parser.add_argument("--folder", type=Path, default=Path("runs/compressed_gossip"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = whole("fashion-mnist")
    train, test = ((x[: options.samples], y[: options.samples]) for x, y in (train, test))
    results = []
    for seed in range(options.seeds):
        for name in contestants(0, torch.zeros(1)):
            path = options.folder / f"{name.replace(' ', '-')}-{seed}.json"
            of = {"contestant": name, "seed": seed}
            results.append(once(path, of, lambda of=(name, seed): run(*of, train, test)))
            print(results[-1], flush=True)
    setting = {
        "data": "fashion-mnist",
        "model": "lenet",
        "world_size": WORLD_SIZE,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "learning_rate": f"{LEARNING_RATE}, cosine to 0",
        "momentum": MOMENTUM,
        "mode": "sync",
    }
    print(write("compressed_gossip", {"setting": setting, "rows": table(results)}))


if __name__ == "__main__":
    main()

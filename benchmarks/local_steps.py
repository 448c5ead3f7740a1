"""Local steps with an outer optimizer: accuracy against bytes, beside DiLoCo and its kin.

All ranks are in one process: a perceptron 196-64-64-10 on Fashion-MNIST pooled to 14 x 14, whose
parameters have the ranks as their first dimension. Inner optimizer AdamW, warm-up then cosine to 0;
each rank has its own samples, 512 in all in a step. What is judged is the mean of the replicas, on
the 10,000 test images. Inner and outer learning rates come from one search on a seed of its own,
for each H and number of ranks: the inner one with the paper's outer one, then the outer one; all
pairs for H = 1, where the two multiply.

    python -m benchmarks.local_steps
    python -m benchmarks.local_steps --ranks 8 --periods 32 --seeds 1 --only DiLoCo ours

With DiLoCo among the contestants, the others have their paired difference to it, too.
"""

import argparse
import math
import statistics
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import half_width_95, merged, paired, tell, write
from benchmarks._tasks import Part, cosine, loss, whole
from gossipgrad.topology import by_name

SHAPES = [(196, 64), (64,), (64, 64), (64,), (64, 10), (10,)]
NUMEL = sum(math.prod(shape) for shape in SHAPES)
GLOBAL_BATCH, SEARCH_SEED = 512, 100
INNER_LRS = (0.002, 0.005, 0.012, 0.03)


class Ranks:
    """Replicas of one perceptron, stacked, and their AdamW."""

    def __init__(self, count: int, lr: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.count, self.x = count, list[nn.Parameter]()
        for shape in SHAPES:
            bound = 1 / math.sqrt(shape[0])
            one = (2 * torch.rand(shape, generator=generator) - 1) * bound
            self.x.append(nn.Parameter(one.expand(count, *shape).clone()))
        self.adam = torch.optim.AdamW(self.x, lr=lr, weight_decay=0.1, fused=True)

    def logits(self, images: Tensor, weights: list[Tensor]) -> Tensor:
        """For images of shape `(ranks, batch, 196)`."""
        h = images
        for index in range(0, len(weights), 2):
            h = torch.baddbmm(weights[index + 1][:, None], h, weights[index])
            h = h.relu() if index < 4 else h
        return h

    def step(self, images: Tensor, labels: Tensor, lr: float, *, averages: bool) -> None:
        """A step of every rank."""
        value = loss(self.logits(images, self.x), labels) * self.count  # the sum of mean losses
        for parameter, gradient in zip(self.x, torch.autograd.grad(value, self.x), strict=True):
            parameter.grad = average(gradient).contiguous() if averages else gradient
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()


def average(stacked: Tensor) -> Tensor:
    """The mean over ranks, on every rank."""
    return stacked.mean(0, keepdim=True).expand_as(stacked)


@cache
def partners_of(topology: str, count: int, seed: int, round: int) -> Tensor:
    """The rank from which each one receives in a round."""
    schedule = by_name(topology, count, seed=seed)
    return torch.tensor([schedule.peers(round, r).recv_from for r in range(count)])


class Contestant:
    """What happens after the local step `t`, counted from 1; counts the bytes that a rank sends."""

    outer_lrs: tuple[float, ...] = (0.1, 0.3, 0.7, 1.0)
    outer_lr, momentum, topology = 0.7, 0.9, "dissemination"
    periods: tuple[int, ...] = (1, 8, 32, 100)
    averages_gradients = False
    exchanges = 1
    wire: torch.dtype | None = None

    def __init__(self, ranks: Ranks, period: int, outer_lr: float, seed: int) -> None:
        self.ranks, self.period, self.lr, self.seed = ranks, period, outer_lr, seed
        self.bytes, self.rounds = 0.0, 0
        self.y = [x.detach().clone() for x in ranks.x]
        self.m = [torch.zeros_like(y) for y in self.y]

    def after(self, t: int) -> None:
        """Ends a period if it is due."""
        if t % self.period == 0:
            self.exchange()
            self.rounds += 1

    def exchange(self) -> None:
        """At the end of a period."""
        raise NotImplementedError

    def mix(self, stacked: Tensor) -> Tensor:
        """With the partner of the round."""
        partners = partners_of(self.topology, self.ranks.count, self.seed, self.rounds)
        sent = stacked if self.wire is None else stacked.to(self.wire).to(stacked.dtype)
        return stacked + (sent[partners] - sent) / 2

    def sends(self, elements: float, *, all_reduce: bool) -> None:
        """Counts so many elements of every rank."""
        p, size = self.ranks.count, (self.wire or torch.float32).itemsize
        self.bytes += size * elements * (2 * (p - 1) / p if all_reduce else 1.0)

    def restart(self, weights: list[Tensor]) -> None:
        """Local and outer weights are these."""
        for x, y, new in zip(self.ranks.x, self.y, weights, strict=True):
            x.copy_(new)
            y.copy_(new)

    def nesterov(self, index: int, y: Tensor, d: Tensor) -> Tensor:
        """An outer step with pseudo-gradient `d`."""
        m = self.m[index].mul_(self.momentum).add_(d)
        return y - self.lr * (d + self.momentum * m)

    def pseudo_gradients(self) -> list[Tensor]:
        """What the period has changed."""
        return [y - x for y, x in zip(self.y, self.ranks.x, strict=True)]


class AllReduce(Contestant):
    """Gradients averaged exactly in every step: what the others are compared with."""

    periods, outer_lrs, averages_gradients = (1,), (), True

    def exchange(self) -> None:
        self.sends(NUMEL, all_reduce=True)


class DiLoCo(Contestant):
    """Douillard et al., arXiv:2311.08105, Algorithm 1."""

    def exchange(self) -> None:
        d = [average(each) for each in self.pseudo_gradients()]
        self.restart([self.nesterov(i, y, d[i]) for i, y in enumerate(self.y)])
        self.sends(NUMEL, all_reduce=True)


class NoLoCo(Contestant):
    """arXiv:2506.10911, as in its public code: random pairs, weights and pseudo-gradients.

    Deviation: its rate of mixing is the outer one there, too, so it falls with it in the search.
    """

    topology, momentum = "matching", 0.5

    def exchange(self) -> None:
        new = []
        for i, (y, d) in enumerate(zip(self.y, self.pseudo_gradients(), strict=True)):
            step = self.lr * (self.mix(y) - y - self.mix(d))
            new.append(y + self.m[i].mul_(self.momentum).add_(step))
        self.restart(new)
        self.sends(2 * NUMEL, all_reduce=False)


class Ours(Contestant):
    """`gg.gossip(mode="sync", local_steps=H)`: the outer step, then weights with one partner."""

    def exchange(self) -> None:
        d = self.pseudo_gradients()
        self.restart([self.mix(self.nesterov(i, y, d[i])) for i, y in enumerate(self.y)])
        self.sends(NUMEL, all_reduce=False)


class OursOverlap(Ours):
    """`mode="overlap"`: what was sent as the period began is mixed at its end."""

    def exchange(self) -> None:
        mixed, d = [self.mix(y) - y for y in self.y], self.pseudo_gradients()
        self.restart([self.nesterov(i, y, d[i]) + mixed[i] for i, y in enumerate(self.y)])
        self.sends(NUMEL, all_reduce=False)


class OursTwice(Ours):
    """`exchanges=2`: mixed with two partners, one after the other."""

    exchanges = 2

    def exchange(self) -> None:
        super().exchange()
        for _ in range(self.exchanges - 1):
            self.rounds += 1
            self.restart([self.mix(y) for y in self.y])
            self.sends(NUMEL, all_reduce=False)


class OursTwiceNarrow(OursTwice):
    """`exchanges=2, wire_dtype=torch.bfloat16`, with pairs of the default topology."""

    topology, wire = "matching", torch.bfloat16


class OursThriceNarrow(OursTwiceNarrow):
    """`exchanges=3, wire_dtype=torch.bfloat16`."""

    exchanges = 3


class PlainGossip(Ours):
    """`gg.gossip(mode="sync", every=H)`: no outer optimizer."""

    outer_lrs = ()

    def exchange(self) -> None:
        self.restart([self.mix(x) for x in self.ranks.x])
        self.sends(NUMEL, all_reduce=False)


CONTESTANTS: dict[str, type[Contestant]] = {
    "all-reduce": AllReduce,
    "ours": Ours,
    "ours, overlap": OursOverlap,
    "plain gossip": PlainGossip,
    "DiLoCo": DiLoCo,
    "NoLoCo": NoLoCo,
    "ours, two exchanges": OursTwice,
    "ours, two in bf16": OursTwiceNarrow,
    "ours, three in bf16": OursThriceNarrow,
}


@cache
def images() -> tuple[Part, Part]:
    """Standardised images of shape `(n, 196)`, and labels: to train, to test."""
    parts = [
        (F.avg_pool2d(x.view(-1, 1, 28, 28), 2).flatten(1), y) for x, y in whole("fashion-mnist")
    ]
    mean, deviation = parts[0][0].mean(), parts[0][0].std()
    train, test = (((x - mean) / deviation, y) for x, y in parts)
    return train, test


def run(
    kind: type[Contestant], p: int, period: int, steps: int, lr: float, outer_lr: float, seed: int
) -> dict[str, float]:
    """One training: accuracy and loss of the mean at the end, and megabytes that a rank sent."""
    (x, y), (test_x, test_y) = images()
    ranks, order = Ranks(p, lr, seed), torch.empty(0, dtype=torch.long)
    with torch.no_grad():
        contestant = kind(ranks, period, outer_lr, seed)
    generator = torch.Generator().manual_seed(seed)
    for t in range(1, steps + 1):
        if len(order) < GLOBAL_BATCH:
            order = torch.randperm(len(y), generator=generator)
        chosen, order = order[:GLOBAL_BATCH].view(p, -1), order[GLOBAL_BATCH:]
        rate = min(1.0, t / (0.1 * steps)) * cosine(lr, t, steps)
        ranks.step(x[chosen], y[chosen], rate, averages=kind.averages_gradients)
        with torch.no_grad():
            contestant.after(t)
    with torch.no_grad():
        logits = ranks.logits(test_x[None], [w.mean(0, keepdim=True) for w in ranks.x])[0]
    accuracy = 100 * (logits.argmax(1) == test_y).float().mean().item()
    return {
        "accuracy": accuracy,
        "loss": loss(logits, test_y).item(),
        "megabytes": contestant.bytes / 1e6,
    }


def search(kind: type[Contestant], p: int, period: int, steps: int) -> tuple[float, float, str]:
    """The best inner and outer rate, and the loss of all that were tried."""
    losses: dict[tuple[float, float], float] = {}

    def best_of(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
        for pair in pairs:
            if pair not in losses:
                value = run(kind, p, period, steps, *pair, SEARCH_SEED)["loss"]
                losses[pair] = value if math.isfinite(value) else math.inf
        return min(losses, key=lambda pair: losses[pair])

    inner, _ = best_of((lr, kind.outer_lr) for lr in INNER_LRS)
    inners = INNER_LRS if period == 1 else (inner,)
    inner, outer = best_of((lr, each) for each in kind.outer_lrs for lr in inners)
    tried = ", ".join(f"{i:g}/{o:g} {value:.4f}" for (i, o), value in losses.items())
    return inner, outer, tried


def main() -> None:
    """Trains what is asked for; rows of others stay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 8, 32, 100])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    options = parser.parse_args()
    setting = {"steps": options.steps, "global_batch": GLOBAL_BATCH, "parameters": NUMEL}
    rows: list[dict[str, Any]] = []
    references: dict[tuple[int, int], list[float]] = {}
    for p in options.ranks:
        for name in sorted(options.only, key=lambda name: name != "DiLoCo"):
            kind = CONTESTANTS[name]
            for period in (h for h in options.periods if h in kind.periods):
                inner, outer, tried = search(kind, p, period, options.steps)
                rates = (kind, p, period, options.steps, inner, outer)
                runs = [run(*rates, seed) for seed in range(options.seeds)]
                row: dict[str, Any] = {"ranks": p, "contestant": name, "local_steps": period}
                row |= {"inner_lr": inner, "outer_lr": outer if kind.outer_lrs else None}
                for key in ("accuracy", "loss"):
                    values = [each[key] for each in runs]
                    row[key] = [
                        round(value, 4) if math.isfinite(value) else None for value in values
                    ]
                    is_finite = all(map(math.isfinite, values))
                    row[f"{key}_mean"] = round(statistics.fmean(values), 4) if is_finite else None
                    row[f"{key}_interval"] = half_width_95(values) if is_finite else None
                if name == "DiLoCo":
                    references[p, period] = row["accuracy"]
                if (known := references.get((p, period))) and name != "DiLoCo":
                    row["to_diloco"] = paired(row["accuracy"], known, 2)
                rows.append(row | {"megabytes": round(runs[0]["megabytes"], 3), "search": tried})
                tell("", rows[-1])
                published = merged("local_steps", rows, "ranks", "contestant", "local_steps")
                write("local_steps", {"settings": setting, "rows": published})


if __name__ == "__main__":
    main()

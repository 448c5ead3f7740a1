"""Local steps with an outer optimizer: accuracy against bytes, beside DiLoCo and its kin.

All ranks are in one process: a perceptron 196-64-64-10 on Fashion-MNIST pooled to 14 x 14, whose
parameters have the ranks as their first dimension, so that all ranks step in one `bmm`. Inner
optimizer AdamW, warm-up then cosine to 0; each rank has its own samples, 512 in all in a step. What
is judged is the mean of the replicas, at the end, on the 10,000 test images.

Each contestant is below in under 100 lines. Its inner and outer learning rates are found by one
search on a seed of its own, for each H and number of ranks.

What is trained replaces what is published of it; other rows stay.

    python -m benchmarks.local_steps
    python -m benchmarks.local_steps --ranks 8 --periods 32 --seeds 1 --only "DiLoCo;ours"
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._common import RESULTS, half_width_95, write
from benchmarks._tasks import whole
from gossipgrad.topology import by_name

SHAPES = [(196, 64), (64,), (64, 64), (64,), (64, 10), (10,)]
NUMEL = sum(math.prod(shape) for shape in SHAPES)
GLOBAL_BATCH = 512
INNER_LRS = (0.002, 0.005, 0.012, 0.03)
OUTER_LRS = (0.1, 0.3, 0.7, 1.0)
SEARCH_SEED = 100


class Ranks:
    """Replicas of one perceptron, stacked, and their AdamW."""

    def __init__(self, count: int, lr: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.count = count
        self.x: list[nn.Parameter] = []
        for shape in SHAPES:
            bound = 1 / math.sqrt(shape[0])
            one = (2 * torch.rand(shape, generator=generator) - 1) * bound
            self.x.append(nn.Parameter(one.expand(count, *shape).clone()))
        self.adam = torch.optim.AdamW(self.x, lr=lr, weight_decay=0.1, fused=True)

    def logits(self, images: Tensor, of: list[Tensor]) -> Tensor:
        """Of images of shape `(ranks, batch, 196)`."""
        h = images
        for place in range(0, len(of), 2):
            h = torch.baddbmm(of[place + 1][:, None], h, of[place])
            if place < 4:
                h = h.relu()
        return h

    def step(self, images: Tensor, labels: Tensor, lr: float, *, averages: bool = False) -> None:
        """A step of every rank."""
        logits = self.logits(images, self.x)
        # The sum over ranks of their mean losses.
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        gradients = torch.autograd.grad(loss * self.count, self.x)
        for parameter, gradient in zip(self.x, gradients, strict=True):
            parameter.grad = average(gradient).contiguous() if averages else gradient
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()

    @torch.no_grad()
    def judge(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Accuracy in percent and loss of the mean of the replicas."""
        mean = [parameter.mean(0, keepdim=True) for parameter in self.x]
        logits = self.logits(images[None], mean)[0]
        right = (logits.argmax(1) == labels).float().mean().item()
        return 100 * right, nn.functional.cross_entropy(logits, labels).item()


def average(stacked: Tensor) -> Tensor:
    """The mean over ranks, on every rank."""
    return stacked.mean(0, keepdim=True).expand_as(stacked)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Detached copies."""
    return [tensor.detach().clone() for tensor in tensors]


@cache
def partners_of(topology: str, count: int, seed: int, round: int) -> Tensor:
    """Whom each rank hears from in a round."""
    schedule = by_name(topology, count, seed=seed)
    return torch.tensor([schedule.peers(round, r).recv_from for r in range(count)])


class Contestant:
    """What happens after the local step `t`, counted from 1; counts the bytes that a rank sends."""

    outer_lrs: tuple[float, ...] = OUTER_LRS
    outer_lr = 0.7
    momentum = 0.9
    periods: tuple[int, ...] = (1, 8, 32, 100)
    averages_gradients = False
    topology = "dissemination"
    most_ranks = 32

    def __init__(self, ranks: Ranks, period: int, outer_lr: float, seed: int) -> None:
        self.ranks, self.period, self.lr, self.seed = ranks, period, outer_lr, seed
        self.bytes = 0.0
        self.y = copies(ranks.x)
        self.m = [torch.zeros_like(y) for y in self.y]
        self.rounds = 0

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
        return (stacked + stacked[partners]) / 2

    def sends(self, elements: float, *, all_reduce: bool, width: float = 4.0) -> None:
        """Counts so many elements of every rank, of `width` bytes."""
        p = self.ranks.count
        self.bytes += elements * width * (2 * (p - 1) / p if all_reduce else 1.0)

    def restart(self, at: list[Tensor]) -> None:
        """Local weights go on from these, which are the outer ones."""
        for x, y, new in zip(self.ranks.x, self.y, at, strict=True):
            x.copy_(new)
            y.copy_(new)

    def nesterov(self, place: int, y: Tensor, d: Tensor) -> Tensor:
        """An outer step with pseudo-gradient `d`."""
        m = self.m[place].mul_(self.momentum).add_(d)
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


class StreamingDiLoCo(Contestant):
    """Douillard et al., arXiv:2501.18512: three fragments in turn, applied `delay` steps later.

    Deviations: a fragment is a layer; messages are fp32, not 4 bits.
    """

    periods, delay, mixing = (8, 32, 100), 2, 0.5

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.due: dict[int, tuple[int, list[Tensor]]] = {}

    def after(self, t: int) -> None:
        for fragment in range(3):
            if t % self.period == (fragment + 1) * self.period // 3 % self.period:
                places = (2 * fragment, 2 * fragment + 1)
                d = [average(self.y[i] - self.ranks.x[i]) for i in places]
                self.due[t + self.delay] = fragment, d
                self.sends(sum(math.prod(SHAPES[i]) for i in places), all_reduce=True)
        if t in self.due:
            fragment, d = self.due.pop(t)
            for i, each in zip((2 * fragment, 2 * fragment + 1), d, strict=True):
                self.y[i] = self.nesterov(i, self.y[i], each)
                self.ranks.x[i].lerp_(self.y[i], 1 - self.mixing)


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


class Sparta(Contestant):
    """A random share of the weights averaged exactly in every step, and no outer optimizer.

    Exogym's rule; the share is 1 / H, so that a period sends each weight once on average.
    """

    outer_lrs = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.generator = torch.Generator().manual_seed(self.seed)

    def after(self, t: int) -> None:
        for x in self.ranks.x:
            at = torch.rand(x.shape[1:], generator=self.generator) < 1 / self.period
            x.copy_(torch.where(at, average(x), x))
            self.sends(at.sum().item(), all_reduce=True)


class SparseLoCo(Contestant):
    """arXiv:2508.15706: the largest 1/32 of each 4,096 pseudo-gradients at 2 bits, error feedback.

    Deviations: chunks are a tensor's elements in order; four even levels in place of its codebook.
    Every rank gathers what the others send: 12 bits an index, 2 a value, p - 1 times.
    """

    outer_lr, decay, chunk, share = 1.0, 0.95, 4096, 1 / 32

    def exchange(self) -> None:
        p, new = self.ranks.count, []
        for i, (y, d) in enumerate(zip(self.y, self.pseudo_gradients(), strict=True)):
            e = self.m[i].mul_(self.decay).add_(d)  # here m is what was not sent
            pieces = []
            for piece in e.view(p, -1).split(self.chunk, 1):
                k = max(1, round(self.share * piece.shape[1]))
                value, at = piece.gather(1, (top := piece.abs().topk(k, 1)).indices), top.indices
                most = value.abs().amax(1, keepdim=True).clamp_min(1e-30)
                level = ((value / most + 1) * 1.5).round().clamp(0, 3)
                sent = most * (2 * level - 3) / 3
                pieces.append(torch.zeros_like(piece).scatter(1, at, sent))
                self.sends(k * (p - 1), all_reduce=False, width=14 / 8)
            sent = torch.cat(pieces, 1).view_as(e)
            e.sub_(sent)
            new.append(y - self.lr * average(sent))
        self.restart(new)


class Ours(Contestant):
    """`gg.gossip(mode="sync", local_steps=H)`: the outer step, then weights with one partner."""

    def exchange(self) -> None:
        d = self.pseudo_gradients()
        self.restart([self.mix(self.nesterov(i, y, d[i])) for i, y in enumerate(self.y)])
        self.sends(NUMEL, all_reduce=False)


class OursOverlap(Ours):
    """`mode="overlap"`: what was sent as the period began is mixed at its end."""

    def exchange(self) -> None:
        mixed = [self.mix(y) - y for y in self.y]
        d = self.pseudo_gradients()
        self.restart([self.nesterov(i, y, d[i]) + mixed[i] for i, y in enumerate(self.y)])
        self.sends(NUMEL, all_reduce=False)


class OursTwice(Ours):
    """`exchanges=2`: mixed with two partners, one after the other."""

    def exchange(self) -> None:
        super().exchange()
        self.rounds += 1
        self.restart([self.mix(y) for y in self.y])
        self.sends(NUMEL, all_reduce=False)


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
    "Streaming DiLoCo": StreamingDiLoCo,
    "NoLoCo": NoLoCo,
    "SPARTA": Sparta,
    "SparseLoCo": SparseLoCo,
    "ours, two exchanges": OursTwice,
}


def batches(images: Tensor, labels: Tensor, p: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples of every rank for ever; each epoch in another order, dealt without repetition."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for at in order[: len(order) // GLOBAL_BATCH * GLOBAL_BATCH].view(-1, p, GLOBAL_BATCH // p):
            yield images[at], labels[at]


def run(
    kind: type[Contestant],
    p: int,
    period: int,
    steps: int,
    lr: float,
    outer_lr: float,
    seed: int,
    images: dict[str, tuple[Tensor, Tensor]],
    watch: Callable[[int, Ranks], None] = lambda t, ranks: None,
) -> dict[str, float]:
    """One training; accuracy of the mean at the end, its loss, and megabytes that a rank sent.

    `watch` is called after each step with its number, from 1.
    """
    ranks = Ranks(p, lr, seed)
    with torch.no_grad():
        contestant = kind(ranks, period, outer_lr, seed)
    source = batches(*images["train"], p, seed)
    for t in range(1, steps + 1):
        warm = min(1.0, t / (0.1 * steps))
        rate = lr * warm * (0.5 + 0.5 * math.cos(math.pi * t / steps))
        ranks.step(*next(source), rate, averages=kind.averages_gradients)
        with torch.no_grad():
            contestant.after(t)
            watch(t, ranks)
    accuracy, loss = ranks.judge(*images["test"])
    return {"accuracy": accuracy, "loss": loss, "megabytes": contestant.bytes / 1e6}


def search(kind: type[Contestant], *args: Any, images: Any) -> tuple[float, float, str]:
    """The best inner and outer rate, and the loss of all that were tried.

    The inner one with the outer one of the paper, then the outer one with that. With H = 1, where
    the two multiply and the best of both is far from the papers', all pairs.
    """
    losses: dict[tuple[float, float], float] = {}

    def best_of(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
        for pair in pairs:
            if pair not in losses:
                loss = run(kind, *args, *pair, SEARCH_SEED, images)["loss"]
                losses[pair] = loss if math.isfinite(loss) else math.inf
        return min(losses, key=lambda pair: losses[pair])

    inner, outer = best_of((lr, kind.outer_lr) for lr in INNER_LRS)
    inners = INNER_LRS if args[1] == 1 else (inner,)
    inner, outer = best_of((lr, each) for each in kind.outer_lrs for lr in inners)
    tried = ", ".join(f"{i:g}/{o:g} {loss:.4f}" for (i, o), loss in losses.items())
    return inner, outer, tried


def load() -> dict[str, tuple[Tensor, Tensor]]:
    """Images of shape `(n, 196)`, and labels."""
    found = {
        name: (nn.functional.avg_pool2d(x.view(-1, 1, 28, 28), 2).flatten(1), y)
        for name, (x, y) in zip(("train", "test"), whole("fashion-mnist"), strict=True)
    }
    mean, deviation = found["train"][0].mean(), found["train"][0].std()
    return {name: ((x - mean) / deviation, y) for name, (x, y) in found.items()}


def merged(rows: list[dict[str, Any]], setting: dict[str, Any]) -> list[dict[str, Any]]:
    """These rows, and what is published of others.

    Raises:
        ValueError: Those are of other settings.
    """

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["ranks"], list(CONTESTANTS).index(row["contestant"]), row["local_steps"]

    found = {}
    if (path := RESULTS / "local_steps.json").exists():
        before = json.loads(path.read_text())
        if before["settings"] != setting:
            raise ValueError(f"{path} is of {before['settings']}, not {setting}: remove it first")
        found = {key(row): row for row in before["rows"]}
    found |= {key(row): row for row in rows}
    return [found[each] for each in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 8, 32, 100])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="contestants, with ; between; by default all")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    names = list(CONTESTANTS) if options.only is None else options.only.split(";")
    setting = {
        "steps": options.steps,
        "global_batch": GLOBAL_BATCH,
        "parameters": NUMEL,
        "search_seed": SEARCH_SEED,
    }
    images, rows, begun = load(), [], time.perf_counter()
    for p in options.ranks:
        for name in (name for name in names if p <= CONTESTANTS[name].most_ranks):
            kind = CONTESTANTS[name]
            for period in (h for h in options.periods if h in kind.periods):
                of = kind, p, period, options.steps
                inner, outer, tried = search(*of, images=images)
                runs = [run(*of, inner, outer, seed, images) for seed in range(options.seeds)]
                row: dict[str, Any] = {"ranks": p, "contestant": name, "local_steps": period}
                row |= {"inner_lr": inner, "outer_lr": outer if kind.outer_lrs else None}
                for key in ("accuracy", "loss"):
                    values = [each[key] for each in runs]
                    mean = statistics.fmean(values)
                    half = half_width_95(values) if math.isfinite(mean) else None
                    row[key] = [round(v, 4) if math.isfinite(v) else None for v in values]
                    row[f"{key}_mean"] = round(mean, 4) if math.isfinite(mean) else None
                    row[f"{key}_interval"] = None if half is None else round(half, 4)
                row["megabytes"] = round(runs[0]["megabytes"], 3)
                row["search"] = tried
                rows.append(row)
                print(f"{time.perf_counter() - begun:5.0f} s", row, flush=True)
        if not options.no_write:
            write("local_steps", {"settings": setting, "rows": merged(rows, setting)})


if __name__ == "__main__":
    main()

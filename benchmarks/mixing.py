"""Which rule of mixing keeps all-reduce's accuracy at many ranks? Many seeds in one matrix.

Replicas of all seeds are the rows of one matrix, and a step is a few operations on it: 16 seeds of
128 ranks take minutes on one core. The model is a perceptron, its gradient written by hand; with
the same settings it repeats the figures of `equal_accuracy`. Warm-up, cosine and verdicts are those
of `equal_accuracy`: the best rate of factors of 2 by the loss of two seeds that are not reported,
then seeds in groups of four until the 95 % interval of the difference to all-reduce, paired by
seed, is at most 0.2 points. Partners are those of `matching`, relabelled for each seed.

    python -m benchmarks.mixing --ranks 32 128
    python -m benchmarks.mixing --ranks 128 --ways "sync, c" --seconds 240   # again to continue

Every way keeps the mean over ranks. With W the weights, u the optimizer's update, C a buffer of
zeros at first, U = u + C, and D the mean of what partners sent less what was sent:

    overlap   S = W + b U of the last step; D of S; C = k C + c D; W = W + u + C + w D
    sync      C = k C; W = W + u + C; D of W; W = W + w D; C = C + c D
    both      D of W; C = k C; W = W + u + C + w D; C = C + c D; then the exchange of sync

C takes from the optimizer's momentum what it has of its own: if the update is u = 0.9 u - lr g,
then u + C is what an optimizer would do whose momentum is changed by c D. Its bytes are 0.

The ways of `gg.suda` polarise a tracker H of the mean momentum M, with a partner's values half and
half in every exchange (`gossipgrad.suda`, its backbones `demuon` and `semi-atc-gt`):

    suda      H = mix(H + M - M of before), U = -u(H)
              demuon: W = mix(W - U); else Z = mix(Z + U - U of before), W = mix(W) - Z
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._common import best_rate, merged, once, paired, tell, verdict, write
from benchmarks._tasks import Part, cosine, whole
from gossipgrad.topology import matching

GROUP, MOST_SEEDS, SEARCH_SEED = 4, 16, 1000
MARGINS = {"accuracy": 0.2, "loss": 0.02}  # points, nats


class Way(NamedTuple):
    """A rule of mixing, in the letters of this file's head."""

    bytes: float = 1  # in sizes of the model a step
    mode: str = "overlap"  # or "sync", "both", "all-reduce", "demuon", "semi-atc-gt"
    w: float = 0.5
    b: float = 0.0
    c: float = 0.0
    k: float = 0.9
    partners: int = 1
    rounds: int = 1  # of sync in a step, one after the other, each with as many partners
    momentum: float = 0.0  # weight with which momentum is mixed too
    cross: float = 0.0  # weight of the momentum's difference in the weights
    wire: torch.dtype | None = None
    slices: int = 0  # each step one of so many slices is averaged exactly
    second: str = "own"  # Adam's second moment: of own gradients, mixed, of the mixed momentum
    inside: bool = False  # c D is added to Adam's momentum, in its units, instead of C
    mu: float = (
        0.9  # the optimizer's momentum; rates are for 0.9, and others have equal rate / (1 - mu)
    )


HALF = torch.bfloat16
WAYS = {
    "all-reduce": Way(2, "all-reduce"),
    "overlap": Way(),
    "sync": Way(mode="sync"),
    "sync, momentum": Way(2, "sync", momentum=0.5),
    "sync, c": Way(mode="sync", c=0.2),
    "sync, c, in bf16": Way(0.5, "sync", c=0.2, wire=HALF),
    "sync, c, two in bf16": Way(mode="sync", w=0.65, c=0.35, partners=2, wire=HALF),
    "sync, one after the other in bf16": Way(mode="sync", rounds=2, wire=HALF),
    "sync, c, one after the other in bf16": Way(mode="sync", c=0.2, rounds=2, wire=HALF),
    "both, in bf16": Way(mode="both", wire=HALF),
    "both, c, in bf16": Way(mode="both", c=0.2, wire=HALF),
    "both, c = 0.15, in bf16": Way(mode="both", c=0.15, wire=HALF),
    "overlap, two in bf16": Way(w=2 / 3, partners=2, wire=HALF),
    "overlap, c, two in bf16": Way(w=0.5, c=0.1, partners=2, wire=HALF),
    "overlap, b = 1, c, two in bf16": Way(w=0.25, b=1.0, c=0.15, partners=2, wire=HALF),
    "overlap, b = 0.5": Way(b=0.5),
    "overlap, b = 0.9": Way(b=0.9),
    "overlap, b = 1": Way(b=1.0),
    "overlap, b, c": Way(w=0.2, b=1.17, c=0.12),
    "overlap, c": Way(w=0.4, c=0.1),
    "overlap, momentum": Way(2, momentum=0.45, cross=0.45),
    "overlap, w = 0.7": Way(w=0.7),
    "overlap, half averaged": Way(slices=2),
    "overlap, eighth averaged": Way(0.25, slices=8),
    # `gg.GossipAdamW`, and the second moment mixed, too.
    "sync, second of momentum": Way(2, "sync", momentum=0.5, second="momentum"),
    "overlap, second of momentum": Way(2, momentum=0.5, second="momentum"),
    "sync, moments": Way(3, "sync", momentum=0.5, second="mixed"),
    "sync, c = 0.3, one after the other in bf16": Way(mode="sync", c=0.3, rounds=2, wire=HALF),
    "sync, c = 0.4, one after the other in bf16": Way(mode="sync", c=0.4, rounds=2, wire=HALF),
    "sync, c, two, second of own momentum": Way(
        mode="sync", c=0.2, rounds=2, wire=HALF, second="momentum"
    ),
    "sync, c = 0.4, two, second of own momentum": Way(
        mode="sync", c=0.4, rounds=2, wire=HALF, second="momentum"
    ),
    "overlap, second of own momentum": Way(second="momentum"),
    "overlap, two, second of own momentum": Way(w=2 / 3, partners=2, wire=HALF, second="momentum"),
    # With Muon.
    "suda, demuon": Way(2, "demuon"),
    "suda": Way(3, "semi-atc-gt"),
    "sync, second of momentum, c": Way(2, "sync", c=0.2, momentum=0.5, second="momentum"),
}


class Task(NamedTuple):
    """A perceptron and its training."""

    data: str
    pool: int  # images are averaged over squares of this side
    widths: tuple[int, ...]
    batch: int  # samples of all ranks in a step
    steps: int
    rates: tuple[float, ...]
    optimizer: str = "sgd"  # or "adam", or "muon": Adam where no hidden layer's matrix is
    ranks: tuple[int, ...] = (8, 32, 128)


TASKS = {
    "digits": Task("digits", 1, (64, 64), 1024, 300, (0.1, 0.2)),
    "fashion": Task("fashion-mnist", 4, (64, 64), 2048, 400, (0.2, 0.4)),
    "fashion-muon": Task("fashion-mnist", 4, (64, 64), 512, 468, (0.01, 0.02), "muon", (8, 32)),
    "fashion-wide": Task("fashion-mnist", 1, (128, 128), 2048, 580, (0.1, 0.2)),
    "fashion-adam": Task("fashion-mnist", 4, (64, 64), 512, 468, (0.01, 0.02), "adam"),
    # The task of `equal_accuracy --tasks topology`, for a comparison of the two.
    "check": Task("digits", 1, (128, 128), 256, 600, (0.05,)),
}


def parts(task: Task) -> tuple[Part, Part]:
    """Flat images and labels."""

    def flat(part: Part) -> Part:
        x = part[0]
        if task.pool > 1:
            x = F.avg_pool2d(x, task.pool)
        return x.flatten(1).contiguous(), part[1]

    train, test = whole(task.data)
    return flat(train), flat(test)


class Perceptrons:
    """Replicas in the rows of a matrix, with the gradient of cross entropy."""

    def __init__(self, sizes: list[int], seeds: list[int], ranks: int) -> None:
        first = []
        for seed in seeds:  # as torch.nn.Linear begins
            torch.manual_seed(seed)
            layers = [torch.nn.Linear(i, o) for i, o in pairwise(sizes)]
            first.append(torch.cat([p.detach().flatten() for m in layers for p in m.parameters()]))
        self.weights = torch.stack(first).repeat_interleave(ranks, 0)
        self.gradients = torch.empty_like(self.weights)
        self._layers, self._slopes = (
            list(self.views(of, sizes)) for of in (self.weights, self.gradients)
        )

    @staticmethod
    def views(of: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for i, o in pairwise(sizes):
            weight = of[:, start : start + i * o].unflatten(1, (o, i))
            start += i * o
            yield weight, of[:, start : start + o]
            start += o

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradients of all rows, for inputs `(rows, samples, inputs)`; the loss of each row."""
        inputs = [x]
        for weight, bias in self._layers[:-1]:
            hidden = torch.baddbmm(bias[:, None], inputs[-1], weight.mT)
            inputs.append(hidden.relu_())
        weight, bias = self._layers[-1]
        logits = torch.baddbmm(bias[:, None], inputs[-1], weight.mT)
        logs = logits.log_softmax(-1)
        losses = -logs.gather(-1, y[..., None]).mean((1, 2))
        slope = logs.exp_()
        slope.scatter_add_(-1, y[..., None], torch.full_like(y, -1.0, dtype=x.dtype)[..., None])
        slope /= x.shape[1]
        for layer in reversed(range(len(self._layers))):
            into, of_bias = self._slopes[layer]
            torch.bmm(slope.mT, inputs[layer], out=into)
            torch.sum(slope, 1, out=of_bias)
            if layer:
                slope = torch.bmm(slope, self._layers[layer][0])
                slope *= inputs[layer] > 0
        return losses

    def outputs(self, x: Tensor, means: Tensor, sizes: list[int]) -> Tensor:
        """Logits `(seeds, samples, classes)` of the means."""
        layers = list(self.views(means, sizes))
        x = x.expand(len(means), *x.shape)
        for number, (weight, bias) in enumerate(layers):
            x = torch.baddbmm(bias[:, None], x, weight.mT)
            x = x.relu_() if number < len(layers) - 1 else x
        return x


def polar(matrices: Tensor) -> Tensor:
    """Orthogonal factors of a stack, by the five Newton-Schulz steps of `torch.optim.Muon`."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(-4.775 * gram, gram, gram, alpha=2.0315) @ x
    return x.mT if is_tall else x


@torch.no_grad()
def train(task: Task, ranks: int, way: Way, rate: float, seeds: list[int]) -> dict[str, Any]:
    """Accuracy and loss of the mean of all replicas by seed, and their distance to it."""
    began = time.perf_counter()
    (x, y), (test_x, test_y) = parts(task)
    sizes = [x.shape[1], *task.widths, 10]
    is_exact, count = way.mode == "all-reduce", len(seeds)
    rows = 1 if is_exact else ranks
    model = Perceptrons(sizes, seeds, rows)
    w, g = model.weights, model.gradients
    is_adam, is_muon = task.optimizer != "sgd", task.optimizer == "muon"
    is_suda = way.mode in ("demuon", "semi-atc-gt")
    state = [torch.zeros_like(w) for _ in range(1 + is_adam)]
    tracker, duals, before = [torch.zeros_like(w) for _ in range(3)] if is_suda else [w] * 3
    correction = torch.zeros_like(w) if way.c and not way.inside else None
    update = torch.zeros_like(w)
    sent, scale = torch.zeros_like(w), w
    schedules = [matching(ranks, seed=seed) for seed in seeds]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    orders = [torch.empty(0, dtype=torch.long) for _ in seeds]
    warm_up, distances = max(1, task.steps // 20), []

    def partners(round: int) -> Tensor:
        found = [torch.from_numpy(s.round_peers(round).recv_from) for s in schedules]
        return torch.cat([rows * n + each for n, each in enumerate(found)])

    def mean(of: Tensor) -> Tensor:
        return of.view(count, rows, -1).mean(1)

    def difference(of: Tensor, round: int) -> Tensor:
        """The mean of what partners sent, less what was sent."""
        if way.slices:
            size = math.ceil(of.shape[1] / way.slices)
            piece = slice(step % way.slices * size, (step % way.slices + 1) * size)
            result = torch.zeros_like(of)
            of = of[:, piece]
            result[:, piece] = mean(of).repeat_interleave(rows, 0) - of
            return result.div_(way.w)
        if way.wire:
            of = of.to(way.wire).to(of.dtype)
        result = of.index_select(0, partners(way.partners * round))
        for other in range(1, way.partners):
            result += of.index_select(0, partners(way.partners * round + other))
        return result.div_(way.partners).sub_(of)

    def polarise(momentum: Tensor, lr: float) -> None:
        """Muon's update of the hidden matrices, of the size of Adam's; biases keep theirs."""
        views = (list(model.views(each, sizes))[:-1] for each in (momentum, update, w))
        for (matrices, _), (updates, _), (weights, _) in zip(*views, strict=True):
            size = 0.2 * math.sqrt(max(matrices.shape[-2:]))
            updates.copy_(polar(matrices)).mul_(-lr * size).add_(weights, alpha=-lr * 0.01)

    for step in range(task.steps):
        lr = cosine(rate * (1 - way.mu) / 0.1, step, task.steps, warm_up)
        chosen = []
        for n, generator in enumerate(generators):
            if len(orders[n]) < task.batch:
                orders[n] = torch.randperm(len(y), generator=generator)
            chosen.append(orders[n][: task.batch])
            orders[n] = orders[n][task.batch :]
        index = torch.cat(chosen).view(count * rows, -1)
        model.backward(x[index.flatten()].view(*index.shape, -1), y[index])
        is_overlap = way.mode == "overlap"
        if is_overlap:
            torch.add(w, update, alpha=way.b, out=sent)
        momenta = state[0].clone() if (is_overlap and way.momentum) or is_suda else None
        # The optimizer's update.
        if is_adam:
            first, second = state
            debt = 1 - 0.9 ** (step + 1)
            if way.second == "momentum":  # gg.GossipAdamW
                share = [0.001 * 19 / max(1e-9, 1 - 0.81**t) for t in (step, step + 1)]
                if step:
                    second.mul_(0.999).addcmul_(first, first, value=share[0])
                first.lerp_(g, 0.1)
                root = torch.addcmul(second * 0.999, first, first, value=share[1])
            else:
                first.lerp_(g, 0.1)
                second.mul_(0.999).addcmul_(g, g, value=0.001)
                root = second.clone()
            root = root.div_(1 - 0.999 ** (step + 1)).sqrt_().add_(1e-8)
            torch.mul(w, -lr * 0.01, out=update)
            update.addcdiv_(first, root, value=-lr / debt)
            scale = root.mul_(-debt / lr)  # of a change of weights in the first moment
            if is_suda and momenta is not None:
                tracker.add_(first).sub_(momenta)
                tracker.add_(difference(tracker, step), alpha=0.5)
            if is_muon:
                polarise(tracker if is_suda else torch.lerp(g, first, 0.9), lr)
        else:
            state[0].mul_(way.mu).add_(g)
            torch.mul(state[0], -lr, out=update)
        if is_exact:
            w.add_(update)
        elif way.mode == "demuon":
            w.add_(update)
            w.add_(difference(w, step), alpha=0.5)
        elif is_suda:
            duals.sub_(update).sub_(before)
            duals.add_(difference(duals, step), alpha=0.5)
            before = -update
            w.add_(difference(w, step), alpha=0.5).sub_(duals)
        elif is_overlap:
            delta = difference(sent, step)
            if way.inside:
                state[0].addcmul_(delta, scale, value=0.9 * way.c)
                update.add_(delta, alpha=way.c)
            elif correction is not None:
                correction.mul_(way.k).add_(delta, alpha=way.c)
                update.add_(correction)
            w.add_(update).add_(delta, alpha=way.w)
            if momenta is not None:
                delta = difference(momenta, step)
                state[0].add_(delta, alpha=way.momentum)
                w.add_(delta, alpha=-lr * way.cross)
        else:
            is_both = way.mode == "both"
            first = (is_both + way.rounds) * step
            hidden = difference(w, first) if is_both else None
            if correction is not None:
                correction.mul_(way.k)
                update.add_(correction)
            w.add_(update)
            if hidden is not None:
                w.add_(hidden, alpha=way.w)
                if correction is not None:
                    correction.add_(hidden, alpha=way.c)
            for each in range(way.rounds):
                delta = difference(w, first + is_both + each)
                w.add_(delta, alpha=way.w)
                if way.inside:
                    state[0].addcmul_(delta, scale, value=way.c)
                elif correction is not None:
                    correction.add_(delta, alpha=way.c)
            if way.momentum:
                state[0].add_(difference(state[0], step), alpha=way.momentum)
            if way.second == "mixed":
                state[1].add_(difference(state[1], step), alpha=way.w).clamp_(min=0)
        if (step + 1) % (task.steps // 10) == 0 and not is_exact:
            far = (w.view(count, rows, -1) - mean(w)[:, None]).square().sum((1, 2))
            distances.append([round(math.sqrt(d / rows), 4) for d in far.tolist()])
    logits = [model.outputs(part, mean(w), sizes) for part in test_x.split(2_000)]
    right = torch.cat([out.argmax(-1) for out in logits], 1).eq(test_y)
    all_logits = torch.cat(logits, 1)
    losses = [float(F.cross_entropy(out, test_y)) for out in all_logits]
    return {
        "accuracy": (100 * right.double().mean(1)).tolist(),
        "loss": losses,
        "distance": distances,
        "seconds": round(time.perf_counter() - began, 1),
    }


def row(
    name: str,
    ranks: int,
    way: str,
    seeds: tuple[int, int],
    reference: Callable[[int], dict[str, float]] | None,
    folder: Path,
    end: float,
) -> tuple[dict[str, Any], Callable[[int], dict[str, float]]]:
    """Figures of a way with their difference to the reference, and its figures by seed."""
    task, rule = TASKS[name], WAYS[way]
    usual = Way()._asdict()
    changed = {key: str(v) for key, v in rule._asdict().items() if v != usual[key]}
    setting = {"task": str(task), "way": changed}

    def run(rate: float, first: int, count: int) -> dict[str, Any]:
        path = folder / name / f"{ranks}-{way}-{rate:g}-{first}.json".replace(" ", "")
        if not path.exists() and time.time() > end:
            raise TimeoutError
        chosen = list(range(first, first + count))
        return once(path, setting, lambda: train(task, ranks, rule, rate, chosen))

    rate = task.rates[0]
    if len(task.rates) > 1:

        def loss_of(rate: float) -> float:
            return statistics.mean(map(finite, run(rate, SEARCH_SEED, 2)["loss"]))

        rate = best_rate(task.rates, loss_of, 2.0)[0]

    def result(seed: int) -> dict[str, float]:
        found = run(rate, seed // GROUP * GROUP, GROUP)
        return {key: finite(found[key][seed % GROUP]) for key in ("accuracy", "loss")}

    reference, (count, most) = reference or result, seeds
    while True:
        figures: dict[str, Any] = {"task": name, "ranks": ranks, "way": way, "rate": rate}
        figures |= {"bytes": rule.bytes, "seeds": count}
        for key, margin in MARGINS.items():
            values = [result(seed)[key] for seed in range(count)]
            found = paired(values, [reference(seed)[key] for seed in range(count)], 4)
            found["mean"] = round(statistics.mean(values), 4)
            found["verdict"] = verdict(
                found["difference"], found["interval"], margin, higher=key == "accuracy"
            )
            figures[key] = found
        if figures["accuracy"]["verdict"] != "undecided" or count >= most:
            break
        count += GROUP
    groups = [run(rate, first, GROUP)["distance"] for first in range(0, count, GROUP)]
    if groups[0]:
        far = [statistics.mean(of[step] for of in map(mean_of, groups)) for step in range(10)]
        figures["distance"] = [round(each, 4) for each in far]
    return figures, result


def mean_of(distances: list[list[float]]) -> list[float]:
    """Over the seeds of a group, by step."""
    return [statistics.mean(each) for each in distances]


def finite(loss: float) -> float:
    """A run that diverged has a loss of 100."""
    return loss if math.isfinite(loss) else 100.0


def main() -> None:
    """Runs what is asked for and not done, and writes after each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["fashion"], choices=list(TASKS))
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS))
    parser.add_argument("--seeds", type=int, default=8, help="at least")
    parser.add_argument("--most-seeds", type=int, default=MOST_SEEDS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run later")
    parser.add_argument("--folder", type=Path, default=Path("runs/mixing"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    end, seeds = time.time() + options.seconds, (options.seeds, options.most_seeds)
    for name in options.tasks:
        for ranks in options.ranks or TASKS[name].ranks:
            reference = None
            for way in dict.fromkeys(["all-reduce", *(options.ways or WAYS)]):
                try:
                    figures, result = row(name, ranks, way, seeds, reference, options.folder, end)
                except TimeoutError:
                    return print("more is to do: start it again")
                reference = reference or result
                tell("", figures)
                rows = merged("mixing", [figures], "task", "ranks", "way")
                write("mixing", {"rows": rows})
    return None


if __name__ == "__main__":
    main()

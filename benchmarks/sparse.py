"""Does a sparsified gradient train to the accuracy of the dense one, and what helps if not?

Fashion-MNIST LeNet, CIFAR-10 small ResNet-20 and a character GPT, at 4 and 8 ranks in one process,
seeds paired. All runs of one model see the same samples in the same steps: global batch, epochs and
learning rate are one for all. Runs that are done are kept.

    python -m benchmarks.sparse
    python -m benchmarks.sparse --only lenet/4 --seeds 1
    python -m benchmarks.network --grid sparse      # the time of a step; Linux, root
"""

import argparse
import inspect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import once, paired, tell, write
from benchmarks._tasks import (
    GPT,
    Part,
    ResNet20,
    cosine,
    crop_and_flip,
    evaluate,
    lenet,
    loss,
    pieces,
    whole,
)
from gossipgrad.compression import top_k
from gossipgrad.sparsification._reference import owners

DENSITIES = (0.25, 0.0625, 0.015625, 0.004)  # of the warm-up
DEFAULT_DENSITY = inspect.signature(gg.sparsify).parameters["density"].default
SEEDS = 3


class Setting(NamedTuple):
    """What all runs of one model share."""

    data: str
    optimizer: str
    global_batch: int
    epochs: int
    peak_lr: float
    warm_up_epochs: float  # of the density: half of a run at most
    clip: float | None = None


SETTINGS = {
    "lenet": Setting("fashion-mnist", "sgd", 256, 8, 0.05, 4),
    "resnet20": Setting("cifar10-small", "sgd", 128, 10, 0.2, 4),
    "gpt": Setting("shakespeare", "adamw", 64, 3, 1e-3, 1.5, clip=1.0),
}
MODELS = {"lenet": lenet, "resnet20": ResNet20, "gpt": GPT}


@dataclass(frozen=True, slots=True)
class Method:
    """What is done to the gradient."""

    density: float | None = None  # None: dense
    warm_up: bool = False
    correction: bool = False
    clips_locally: bool = False
    is_default: bool = False

    @property
    def name(self) -> str:
        """In words."""
        if self.is_default:
            return "the default of gg.sparsify"
        if self.density is None:
            return "dense"
        parts = [f"density {self.density:g}"]
        parts += ["warm-up"] * self.warm_up + ["momentum correction"] * self.correction
        parts += ["local clipping"] * self.clips_locally
        return ", ".join(parts)

    def at(self, step: int, warm_up_steps: int) -> float:
        """The density in a step: falling over the first steps, with warm-up."""
        if self.is_default:
            return DEFAULT_DENSITY(step)
        assert self.density is not None, "the dense method has none"
        stage = len(DENSITIES) * step // warm_up_steps
        if self.warm_up and stage < len(DENSITIES):
            return max(self.density, DENSITIES[stage])
        return self.density


METHODS = (
    Method(),
    *(Method(density) for density in (0.01, 0.001)),
    Method(0.01, is_default=True),
    *(Method(density, warm_up=True) for density in (0.01, 0.001)),
    *(Method(density, warm_up=True, correction=True) for density in (0.01, 0.001)),
    Method(0.01, warm_up=True, clips_locally=True),
)


class SparsifiedRanks:
    """Trains as p workers of `gg.sparsify` would whose selection is of the whole model.

    All replicas are equal in every step, so there is one; what differs from rank to rank is the
    batch and the residual. The arithmetic is that of `sparsification._reference`, rules R1 to R6
    and R8. BatchNorm's running statistics see the batches of all ranks in turn.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world_size: int,
        *,
        density: Any,
        momentum: float | None = None,
        clip: float | None = None,
        local_clip: float | None = None,
    ) -> None:
        self.steps = 0
        self._world_size, self._model, self._optimizer = world_size, model, optimizer
        self._density, self._momentum, self._clip = density, momentum, clip
        self._local_clip = local_clip
        self._parameters = list(reversed([p for p in model.parameters() if p.requires_grad]))
        self._sizes = [p.numel() for p in self._parameters]
        self._residuals, self._velocities = torch.zeros(2, world_size, sum(self._sizes))
        self._owners: Tensor | None = None  # with more than 8 ranks, of the coordinates
        if world_size > 8:
            self._owners = owners(sum(self._sizes), world_size)

    def step(self, batches: Sequence[Part]) -> float:
        """One step on a batch a rank; the mean loss."""
        total, losses = torch.zeros(sum(self._sizes)), []
        self._sent: list[tuple[Tensor, Tensor]] = []
        for rank, (x, y) in enumerate(batches):
            self._optimizer.zero_grad()
            value = loss(self._model(x), y)
            value.backward()
            if self._local_clip is not None:
                limit = self._local_clip * math.sqrt(self._world_size)
                torch.nn.utils.clip_grad_norm_(self._parameters, limit)
            losses.append(float(value.detach()))
            gradients = (
                torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters
            )
            self._add(rank, torch.cat([gradient.flatten() for gradient in gradients]), total)
        if self._owners is not None and self._sent:
            self._select_sums(total)
        total.div_(self._world_size)
        for parameter, mean in zip(self._parameters, total.split(self._sizes), strict=True):
            parameter.grad = mean.view_as(parameter)
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self.steps += 1
        return sum(losses) / len(losses)

    def _add(self, rank: int, gradient: Tensor, total: Tensor) -> None:
        """Adds what a rank sends to the sum, and keeps the rest."""
        density = 1.0 if self._density is None else self._density(self.steps)
        if density >= 1:
            total += gradient + self._residuals[rank]
            self._residuals[rank] = 0
            return
        if self._momentum is not None:
            gradient = self._velocities[rank].mul_(self._momentum).add_(gradient)
        wanted = self._residuals[rank].add_(gradient)
        chosen = top_k(wanted, max(int(density * len(wanted)), 1))
        if self._owners is not None:
            average = len(chosen) / self._world_size
            room, of = math.ceil(average + 3 * math.sqrt(average)), self._owners[chosen]
            chosen = torch.cat([chosen[of == owner][:room] for owner in range(self._world_size)])
            self._sent.append((chosen, wanted[chosen]))
        total[chosen] += wanted[chosen]
        wanted[chosen] = self._velocities[rank, chosen] = 0

    def _select_sums(self, total: Tensor) -> None:
        """Keeps the largest sums of each owner; the others go back to residuals."""
        assert self._density is not None
        count = max(1, int(self._density(self.steps) * len(total)) // self._world_size)
        kept = torch.zeros_like(total)
        for owner in range(self._world_size):
            mine = (self._owners == owner).nonzero().flatten()
            largest = mine[top_k(total[mine], count)]
            kept[largest] = total[largest]
        total.copy_(kept)
        for rank, (chosen, values) in enumerate(self._sent):
            left_out = kept[chosen] == 0
            self._residuals[rank, chosen[left_out]] = values[left_out]


def run(
    model_name: str, setting: Setting, world_size: int, method: Method, seed: int
) -> dict[str, list[float]]:
    """Accuracy and loss on the test part after each epoch."""
    is_text = setting.data == "shakespeare"
    (x, y), test = (pieces(0), pieces(1)) if is_text else whole(setting.data)
    steps = len(y) // setting.global_batch
    torch.manual_seed(seed)
    model = MODELS[model_name]()
    sgd = partial(torch.optim.SGD, momentum=0.0 if method.correction else 0.9)
    make = sgd if setting.optimizer == "sgd" else partial(torch.optim.AdamW, weight_decay=0.1)
    optimizer = make(model.parameters(), lr=setting.peak_lr)
    warm_up_steps = round(setting.warm_up_epochs * steps)
    ranks = SparsifiedRanks(
        model,
        optimizer,
        world_size,
        density=None if method.density is None else partial(method.at, warm_up_steps=warm_up_steps),
        momentum=0.9 if method.correction else None,
        clip=None if method.clips_locally else setting.clip,
        local_clip=setting.clip if method.clips_locally else None,
    )
    figures: dict[str, list[float]] = {"accuracy": [], "test_loss": [], "loss": []}
    for epoch in range(setting.epochs):
        torch.manual_seed(1000 * seed + epoch)
        order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(len(y)))
        losses = []
        for chosen in order.split(setting.global_batch)[:steps]:
            for group in optimizer.param_groups:
                total = setting.epochs * steps
                group["lr"] = cosine(setting.peak_lr, ranks.steps, total, warm_up_steps=steps)
            inputs = crop_and_flip(x[chosen]) if setting.data == "cifar10-small" else x[chosen]
            parts = range(world_size)
            batch = [(inputs[r::world_size], y[chosen][r::world_size]) for r in parts]
            losses.append(ranks.step(batch))
        found = evaluate(model, test)
        figures["accuracy"].append(found["accuracy"] / 100)
        figures["test_loss"].append(found["loss"])
        figures["loss"].append(statistics.fmean(losses))
        if not math.isfinite(figures["loss"][-1]):  # nothing brings it back
            break
    return figures


def main() -> None:
    """Runs what is missing, then writes the table; with `--only` into the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="the start of names such as lenet/4/dense")
    parser.add_argument("--epochs", type=int, help="for a try")
    parser.add_argument("--folder", type=Path, default=Path("runs/sparse"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    epochs = {"epochs": options.epochs} if options.epochs else {}
    rows: list[dict[str, Any]] = []
    for model, world_size in product(SETTINGS, (4, 8)):
        setting, dense = SETTINGS[model]._replace(**epochs), list[float]()
        names = {
            m: f"{model}/{world_size}/{m.name.replace(', ', '-').replace(' ', '-')}"
            for m in METHODS
        }
        wanted = [method for method in METHODS if names[method].startswith(options.only)]
        for method in (METHODS[0], *(m for m in wanted if m != METHODS[0])) if wanted else ():
            if method.correction and setting.optimizer != "sgd":
                continue
            if method.clips_locally and setting.clip is None:
                continue
            found = []
            for seed in range(options.seeds):
                path = options.folder / names[method] / f"{seed}.json"
                cell = (model, setting, world_size, method, seed)
                found.append(once(path, setting._asdict(), lambda cell=cell: run(*cell)))
                tell(f"{names[method]}/{seed}", {"accuracy": found[-1]["accuracy"][-1]})
            ends = [100 * figures["accuracy"][-1] for figures in found]
            dense = dense or ends
            row = {"model": model, "world_size": world_size, "method": method.name}
            row |= {"seeds": [*range(options.seeds)], "accuracy": [end / 100 for end in ends]}
            row["test_loss"] = [figures["test_loss"][-1] for figures in found]
            rows.append(row | ({} if method.density is None else paired(ends, dense)))
    rule = "accuracy after the last epoch; differences to dense in points, paired by seed"
    settings = {name: setting._asdict() for name, setting in SETTINGS.items()}
    is_whole = not options.only and options.seeds >= SEEDS and not epochs
    path = None if is_whole else options.folder / "sparse_convergence.json"
    figures = {"rule": rule, "warm_up": DENSITIES, "settings": settings, "rows": rows}
    print(write("sparse_convergence", figures, module="sparse", path=path))


if __name__ == "__main__":
    main()

"""Does a sparsified gradient train to the accuracy of the dense one, and what helps if not?

Fashion-MNIST LeNet, CIFAR-10 ResNet-20 and a character GPT, at 4 and 8 ranks in one process (see
`SparsifiedRanks`), seeds paired. All cells of one model see the same samples in the same steps:
global batch, epochs and learning rate are one for all. A cell that is done is kept.

    python -m benchmarks.sparse_convergence
    python -m benchmarks.sparse_convergence --only lenet/4 --seeds 1
"""

import argparse
import inspect
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import half_width_95, once, write
from benchmarks._tasks import cosine
from gossipgrad import data, models
from gossipgrad.compression import top_k
from gossipgrad.models import training_loss

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Density = Callable[[int], float]


class SparsifiedRanks:
    """Trains as p workers of `gossipgrad.sparsify` would whose selection is of the whole model.

    All replicas are equal in every step, so there is one; what differs from rank to rank is the
    batch and the residual. The arithmetic is that of `gossipgrad.sparsification._reference`, rules
    R1 to R6 and R8. BatchNorm's running statistics see the batches of all ranks in turn.

    Args:
        model: The one replica.
        optimizer: Of its parameters.
        world_size: How many ranks, p.
        loss: Of the model on a batch, a scalar.
        density: The share that is sent, a function of the step; None: gradients are averaged.
        per_tensor: Whether each tensor has a number of coordinates of its own.
        momentum: Factor of momentum correction; None: none.
        clip: Largest norm of the aggregated gradient; None: any.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world_size: int,
        *,
        loss: Loss,
        density: Density | None,
        per_tensor: bool = False,
        momentum: float | None = None,
        clip: float | None = None,
    ) -> None:
        self.steps = 0
        self.world_size = world_size
        self.residuals: Tensor | None = None
        self.velocities: Tensor | None = None
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._density, self._momentum, self._clip = density, momentum, clip
        self._parameters = list(reversed([p for p in model.parameters() if p.requires_grad]))
        sizes = [p.numel() for p in self._parameters]
        self._sizes, self._selected_from = sizes, sizes if per_tensor else [sum(sizes)]
        if density is not None:
            self.residuals = torch.zeros(world_size, sum(sizes))
        if momentum is not None:
            self.velocities = torch.zeros(world_size, sum(sizes))

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One step on a batch a rank; the mean loss."""
        total = torch.zeros(sum(self._sizes))
        losses = []
        for rank, (x, y) in enumerate(batches):
            self._optimizer.zero_grad()
            loss = self._loss(self._model, x, y)
            loss.backward()
            losses.append(float(loss.detach()))
            gradient = torch.cat([_gradient(p) for p in self._parameters])
            self._add(rank, gradient, total)
        total.div_(self.world_size)
        for parameter, mean in zip(self._parameters, total.split(self._sizes), strict=True):
            parameter.grad = mean.view_as(parameter)
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self.steps += 1
        return sum(losses) / len(losses)

    def _add(self, rank: int, gradient: Shaped[Tensor, " n"], total: Shaped[Tensor, " n"]) -> None:
        """Adds what a rank sends to the sum, and keeps the rest."""
        if self._density is None or self.residuals is None:
            total += gradient
            return
        if self.velocities is not None:
            gradient = self.velocities[rank].mul_(self._momentum).add_(gradient)
        wanted = self.residuals[rank].add_(gradient)
        density, start = self._density(self.steps), 0
        for size in self._selected_from:
            count = max(int(density * size), 1)
            chosen = start + top_k(wanted[start : start + size], count)
            total[chosen] += wanted[chosen]
            wanted[chosen] = 0
            if self.velocities is not None:
                self.velocities[rank, chosen] = 0
            start += size


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel())
    return parameter.grad.flatten()


WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)
WARMUP_EPOCHS = {"lenet": 4, "resnet20": 4, "gpt": 1.5}  # half of a run at most
SEEDS = 3
DEFAULT_DENSITY = inspect.signature(gg.sparsify).parameters["density"].default


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all cells of one model share."""

    data: str
    optimizer: str
    global_batch: int
    epochs: int
    peak_lr: float
    clip: float | None = None


SETTINGS = {
    "lenet": Setting(
        data="fashion-mnist", optimizer="sgd", global_batch=256, epochs=8, peak_lr=0.05
    ),
    "resnet20": Setting(
        data="cifar10-small", optimizer="sgd", global_batch=128, epochs=10, peak_lr=0.2
    ),
    "gpt": Setting(
        data="shakespeare", optimizer="adamw", global_batch=64, epochs=3, peak_lr=1e-3, clip=1.0
    ),
}


@dataclass(frozen=True, slots=True)
class Method:
    """What is done to the gradient."""

    density: float | None = None  # or that of `default`; None: dense
    per_tensor: bool = False
    warmup: bool = False
    correction: bool = False
    default: bool = False

    @property
    def name(self) -> str:
        if self.default:
            return "the default of gg.sparsify"
        if self.density is None:
            return "dense"
        parts = [f"density {self.density:g}"]
        parts += ["per tensor"] * self.per_tensor + ["warm-up"] * self.warmup
        parts += ["momentum correction"] * self.correction
        return ", ".join(parts)

    def at(self, step: int, warmup_steps: int) -> float:
        """The density in a step: falling over the first steps, with warm-up."""
        if self.default:
            return DEFAULT_DENSITY(step)
        assert self.density is not None, "the dense method has none"
        stage = len(WARMUP_DENSITIES) * step // warmup_steps
        if self.warmup and stage < len(WARMUP_DENSITIES):
            return max(self.density, WARMUP_DENSITIES[stage])
        return self.density


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    model: str
    world_size: int
    method: Method
    seed: int

    @property
    def name(self) -> str:
        slug = self.method.name.replace(", ", "-").replace(" ", "-")
        return f"{self.model}/{self.world_size}/{slug}/{self.seed}"


def cells(seeds: int) -> list[Cell]:
    """Every cell, the most telling first."""
    main = [Method(), Method(0.01), Method(0.001)]
    helps = [Method(0.001, warmup=True), Method(0.001, per_tensor=True)]
    helps += [Method(0.01, per_tensor=True), Method(0.01, warmup=True)]
    corrected = [Method(rho, warmup=True, correction=True) for rho in (0.001, 0.01)]
    order = []
    default = [Method(0.01, default=True)]
    for methods in (main, default, helps[:2], corrected, helps[2:]):
        for seed in range(seeds):
            for model in SETTINGS:
                if methods is corrected and SETTINGS[model].optimizer != "sgd":
                    continue
                order += [Cell(model, p, method, seed) for p in (4, 8) for method in methods]
    return order


def make(cell: Cell, info: data.DatasetInfo, steps_per_epoch: int) -> tuple[nn.Module, tuple]:
    """The model, and with it its optimizer and the ranks; alike for one seed."""
    setting, method = SETTINGS[cell.model], cell.method
    warmup_steps = round(WARMUP_EPOCHS[cell.model] * steps_per_epoch)
    torch.manual_seed(cell.seed)
    model = models.build(cell.model, info)
    if setting.optimizer == "sgd":
        momentum = 0.0 if method.correction else 0.9
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=setting.peak_lr, momentum=momentum
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting.peak_lr, weight_decay=0.1)
    ranks = SparsifiedRanks(
        model,
        optimizer,
        cell.world_size,
        loss=training_loss,
        density=(None if method.density is None else partial(method.at, warmup_steps=warmup_steps)),
        per_tensor=method.per_tensor,
        momentum=0.9 if method.correction else None,
        clip=setting.clip,
    )
    return model, (optimizer, ranks)


@torch.no_grad()
def evaluate(model: nn.Module, test: data.Samples) -> tuple[float, float]:
    """Accuracy over all labels of the test part, and loss a label."""
    model.eval()
    right = labels = 0
    total = 0.0
    for indices in torch.arange(len(test)).split(100):
        x, y = test.batch(indices)
        logits = model(x)
        right += int((logits.argmax(-1) == y).sum())
        flat = logits.reshape(-1, logits.shape[-1])
        total += float(nn.functional.cross_entropy(flat, y.reshape(-1), reduction="sum"))
        labels += y.numel()
    model.train()
    return right / labels, total / labels


def batches_of(
    samples: data.Samples, chosen: Tensor, world_size: int, augment: tuple[int, int]
) -> list[tuple[Tensor, Tensor]]:
    """The step's samples, dealt out: rank r has positions r, r + p, ..."""
    return [samples.batch(rows, augment=augment) for rows in chosen.view(-1, world_size).T]


def run(cell: Cell, dataset: data.Dataset) -> dict:
    """Accuracy and loss on the test part after each epoch."""
    setting = SETTINGS[cell.model]
    steps = len(dataset.train) // setting.global_batch
    model, (optimizer, ranks) = make(cell, dataset.info, steps)
    figures: dict = {"accuracy": [], "test_loss": [], "loss": []}
    for epoch in range(setting.epochs):
        torch.manual_seed(1000 * cell.seed + epoch)
        order = np.random.default_rng((cell.seed, epoch)).permutation(len(dataset.train))
        losses = []
        for chosen in torch.from_numpy(order).split(setting.global_batch)[:steps]:
            for group in optimizer.param_groups:
                group["lr"] = cosine(
                    setting.peak_lr, ranks.steps, setting.epochs * steps, warm_up_steps=steps
                )
            losses.append(
                ranks.step(batches_of(dataset.train, chosen, cell.world_size, (cell.seed, epoch)))
            )
        accuracy, test_loss = evaluate(model, dataset.test)
        figures["accuracy"].append(accuracy)
        figures["test_loss"].append(test_loss)
        figures["loss"].append(statistics.fmean(losses))
        if not math.isfinite(figures["loss"][-1]):  # nothing brings it back
            break
    return figures


def rows_of(found: Iterable[tuple[Cell, dict]]) -> list[dict]:
    """One row a model, world size and method; differences to dense paired by seed, in points."""
    by_row: dict[tuple[str, int, Method], dict[int, dict]] = defaultdict(dict)
    for cell, figures in found:
        by_row[cell.model, cell.world_size, cell.method][cell.seed] = figures
    rows = []
    methods = list(dict.fromkeys(cell.method for cell in cells(1)))
    order = sorted(
        by_row, key=lambda key: (list(SETTINGS).index(key[0]), key[1], methods.index(key[2]))
    )
    for model, world_size, method in order:
        of_seeds = by_row[model, world_size, method]
        seeds = sorted(of_seeds)
        dense = by_row[model, world_size, Method()] if method.density is not None else {}
        both = [seed for seed in seeds if seed in dense]
        differences = [
            100 * (of_seeds[seed]["accuracy"][-1] - dense[seed]["accuracy"][-1]) for seed in both
        ]
        row = {
            "model": model,
            "world_size": world_size,
            "method": method.name,
            "seeds": seeds,
            "accuracy": [of_seeds[seed]["accuracy"][-1] for seed in seeds],
            "test_loss": [of_seeds[seed]["test_loss"][-1] for seed in seeds],
            "difference_to_dense_points": differences,
        }
        if len(differences) > 1:
            row["mean_difference_points"] = round(statistics.fmean(differences), 3)
            row["half_width_95_points"] = round(half_width_95(differences) or 0.0, 3)
        rows.append(row)
    return rows


def main() -> None:
    """Runs what is missing, then writes the table; with `--only` into the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="the start of names such as lenet/4/dense")
    parser.add_argument("--folder", type=Path, default=Path("runs/sparse_convergence"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    datasets: dict[str, data.Dataset] = {}
    found = []
    for cell in [c for c in cells(options.seeds) if c.name.startswith(options.only)]:
        setting = SETTINGS[cell.model]
        if setting.data not in datasets:
            datasets[setting.data] = data.load(setting.data)
        figures = once(
            options.folder / f"{cell.name}.json",
            asdict(setting),
            lambda cell=cell, name=setting.data: run(cell, datasets[name]),
        )
        found.append((cell, figures))
        print(
            f"{cell.name:48s} accuracy {100 * figures['accuracy'][-1]:.2f} %  "
            f"test loss {figures['test_loss'][-1]:.3f}",
            flush=True,
        )
    figures = {
        "rule": "accuracy on the test part after the last epoch; of the text, of the next "
        "character; differences to the dense run of the same seed, in points",
        "selection": "from the whole model as one group, or by tensor",
        "warm_up": f"densities {WARMUP_DENSITIES}, equally long, over {WARMUP_EPOCHS} epochs",
        "settings": {name: asdict(setting) for name, setting in SETTINGS.items()},
        "rows": rows_of(found),
    }
    is_whole = not options.only and options.seeds >= SEEDS
    path = None if is_whole else options.folder / "sparse_convergence.json"
    print(write("sparse_convergence", figures, path=path))


if __name__ == "__main__":
    main()

"""CIFARNet on CIFAR-10 by gossip, as GossipGraD's authors train it.

    torchrun --nproc-per-node 4 recipes/cifar10_cifarnet.py
    torchrun --nproc-per-node 4 recipes/cifar10_cifarnet.py --data cifar10-small

Batch size, momentum, weight decay and the drop of the learning rate after eight of ten epochs are
those of Caffe's `cifar10_quick` solver, which we take to be what the authors started from. Not as
there: the rate is 0.02, since inputs are normalised here and have pixels from 0 to 255 there; the
exchange is mixed without losing half of each update (docs/gossipgrad.md); an epoch's shards are
drawn anew. How many workers and epochs their table is for is not known to us.
"""

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro

import gossipgrad as gg
from gossipgrad import data, models


@dataclass(frozen=True, kw_only=True)
class Options:
    """CIFARNet by gossip; start it with torchrun."""

    data: Literal["cifar10", "cifar10-small"] = "cifar10"
    """cifar10-small: a tenth of it as JPEG."""
    data_dir: Path | None = None
    """Folder of data sets; None: $GOSSIPGRAD_DATA, then the cache of the user."""
    epochs: int = 10
    """Passes over the training part."""
    steps: int | None = None
    """Steps an epoch, to try it out; None: all."""
    batch_size: int = 100
    """Samples a step on each rank."""
    lr: float = 0.02
    """Learning rate of the first four fifths of the epochs; a tenth of it after them."""
    seed: int = 0
    """Decides initial weights, order of samples and partners."""


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: data.Samples, session: gg.GossipSession) -> float:
    """Accuracy on the test part, shared out over the ranks."""
    model.eval()
    right = torch.zeros(1)
    for indices in torch.arange(session.rank, len(test), session.world_size).split(500):
        x, y = test.batch(indices)
        right += (model(x).argmax(1) == y).sum()
    model.train()
    return float(session.group.all_reduce_(right)) / len(test)


def train(options: Options, group: gg.Group | None = None) -> float:
    """Trains on the ranks of `group`, by default all; returns the consensus's accuracy."""
    dataset = data.load(options.data, options.data_dir)
    torch.manual_seed(options.seed)
    model = models.build("cifarnet", dataset.info)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=0.004)
    drop = torch.optim.lr_scheduler.StepLR(optimizer, max(1, options.epochs * 4 // 5), gamma=0.1)

    with gg.gossip(
        model, optimizer, payload="weights+state", seed=options.seed, process_group=group
    ) as session:
        batches = data.ShardedBatches(
            samples=dataset.train,
            batch_size=options.batch_size,
            rank=session.rank,
            world_size=session.world_size,
            seed=options.seed,
        )
        reached = 0.0
        for epoch in range(options.epochs):
            for x, y in islice(batches.epoch(epoch), options.steps):
                loss = models.training_loss(model, x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            drop.step()
            with session.consensus():
                reached = accuracy(model, dataset.test, session)
            if session.rank == 0:
                distance = session.stats().consensus_distance
                print(f"epoch {epoch + 1}  accuracy {reached:.2%}  distance {distance:.3f}")
    return reached


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(chosen)

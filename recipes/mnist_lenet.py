"""LeNet by gossip on MNIST, or on Fashion-MNIST where MNIST is not at hand.

    torchrun --nproc-per-node 4 recipes/mnist_lenet.py                 # Fashion-MNIST
    torchrun --nproc-per-node 4 recipes/mnist_lenet.py --mnist FOLDER  # MNIST's four .gz files

GossipGraD's authors train LeNet on MNIST. Batch size, learning rate and its decay, momentum and
weight decay are those of their solver (matex-org/caffe-intel, examples/mnist), as are what is sent
and the partners. Not as theirs: LeNet is LeNet-5 here, theirs has 20 and 50 channels; the exchange
is mixed without losing half of each update (docs/gossipgrad.md); an epoch's shards are drawn anew.
How many workers and epochs their table is for is not known to us.
"""

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

import gossipgrad as gg
from gossipgrad import data, models


@dataclass(frozen=True, kw_only=True)
class Options:
    """LeNet by gossip; start it with torchrun."""

    mnist: Path | None = None
    """Folder with MNIST's four .gz files; None: Fashion-MNIST."""
    data_dir: Path | None = None
    """Folder of data sets; None: $GOSSIPGRAD_DATA, then the cache of the user."""
    epochs: int = 10
    """Passes over the training part."""
    steps: int | None = None
    """Steps an epoch, to try it out; None: all."""
    batch_size: int = 64
    """Samples a step on each rank."""
    lr: float = 0.01
    """Learning rate at the start."""
    seed: int = 0
    """Decides initial weights, order of samples and partners."""


def read_mnist(folder: Path) -> tuple[data.TensorSamples, data.TensorSamples]:
    """Training and test part of MNIST, pixels from 0 to 1 as in the authors' net."""
    parts = []
    for part in ("train", "t10k"):
        images = data.read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = data.read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
        x = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 256
        parts.append(data.TensorSamples(x, torch.tensor(labels, dtype=torch.int64)))
    return parts[0], parts[1]


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
    if options.mnist is not None:
        training, test = read_mnist(options.mnist)
    else:
        dataset = data.load("fashion-mnist", options.data_dir)
        training, test = dataset.train, dataset.test
    torch.manual_seed(options.seed)
    model = models.LeNet(num_classes=10)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, weight_decay=0.0005
    )
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + 0.0001 * t) ** -0.75)

    with gg.gossip(
        model, optimizer, payload="weights+state", seed=options.seed, process_group=group
    ) as session:
        batches = data.ShardedBatches(
            samples=training,
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
                decay.step()
            with session.consensus():
                reached = accuracy(model, test, session)
            if session.rank == 0:
                distance = session.stats().consensus_distance
                print(f"epoch {epoch + 1}  accuracy {reached:.2%}  distance {distance:.3f}")
    return reached


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(chosen)

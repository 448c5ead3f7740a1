"""A small GPT on tiny Shakespeare, character by character, by gossip with AdamW.

    torchrun --nproc-per-node 4 recipes/shakespeare_gpt.py

Not of GossipGraD's paper: it shows an optimizer with moments, a warm-up, clipping by the global
norm, and weights that travel as bfloat16, in the loop that one would write anyway.
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
    """GPT by gossip; start it with torchrun."""

    data_dir: Path | None = None
    """Folder of data sets; None: $GOSSIPGRAD_DATA, then the cache of the user."""
    epochs: int = 20
    """Passes over the training part."""
    steps: int | None = None
    """Steps an epoch, to try it out; None: all."""
    batch_size: int = 16
    """Pieces of text a step on each rank."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    warmup_steps: int = 50
    """Steps in which the rate rises."""
    layers: int = 4
    """Blocks of attention and perceptron."""
    seed: int = 0
    """Decides initial weights, order of samples and partners."""


@torch.no_grad()
def loss_on(model: torch.nn.Module, test: data.Samples, session: gg.GossipSession) -> float:
    """Loss a character on the test part, in nats, shared out over the ranks."""
    model.eval()
    total = torch.zeros(2)
    for indices in torch.arange(session.rank, len(test), session.world_size).split(32):
        x, y = test.batch(indices)
        total += torch.tensor([float(models.training_loss(model, x, y)) * y.numel(), y.numel()])
    model.train()
    summed, characters = session.group.all_reduce_(total)
    return float(summed / characters)


def train(options: Options, group: gg.Group | None = None) -> float:
    """Trains on the ranks of `group`, by default all; returns the consensus's loss."""
    dataset = data.load("shakespeare", options.data_dir)
    torch.manual_seed(options.seed)
    model = models.GPT(dataset.info.num_classes, layers=options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1 / options.warmup_steps, total_iters=options.warmup_steps
    )

    with gg.gossip(
        model, optimizer, wire_dtype=torch.bfloat16, seed=options.seed, process_group=group
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
                models.training_loss(model, x, y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                warmup.step()
            with session.consensus():
                reached = loss_on(model, dataset.test, session)
            if session.rank == 0:
                distance = session.stats().consensus_distance
                print(f"epoch {epoch + 1}  test loss {reached:.3f}  distance {distance:.3f}")
    return reached


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(chosen)

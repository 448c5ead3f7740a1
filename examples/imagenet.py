"""ResNet-50 or GoogLeNet on ImageNet by gossip, the large workloads of GossipGraD's paper.

`DATA` has `train/CLASS/*.jpg` and `val/CLASS/*.jpg`. Needs torchvision. Sixteen nodes with eight
workers each, by torchrun on every node:

    torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE0:29500 \
        examples/imagenet.py --data-dir DATA --model resnet50 --device cuda

What the paper's abstract states of ResNet-50: 128 P100 on InfiniBand, one partner a step that
rotates, exchanges behind the step's compute, top-1 accuracy "matching ... published in literature".
From the authors' code: dissemination or hypercube, weights and momentum sent, BatchNorm's
statistics not; GoogLeNet with 32 images a worker, crops of 224 with mirroring, auxiliary losses
weighted 0.3, and a rate that falls in a straight line.

Not known to us, so the usual ones stand here. ResNet-50: 32 images a worker, momentum 0.9, weight
decay 1e-4, 90 epochs, and the rate of Goyal et al. (arXiv:1706.02677): 0.1 for 256 images, in
proportion to the batch, 5 epochs of warm-up, a tenth of it every 30 epochs; the authors' code
leaves the rate alone as workers are added. GoogLeNet, after Caffe's quick solver: rate 0.01, weight
decay 2e-4, 60 epochs. Not as theirs: BatchNorm in place of local response normalisation.

This has not been run at 128 workers, nor on ImageNet, nor on a GPU, by us.
"""

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import gossipgrad as gg
from gossipgrad.data import ShardedSampler

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Options:
    """ResNet-50 or GoogLeNet by gossip; start it with torchrun."""

    data_dir: Path
    """Folder with train/CLASS/*.jpg and val/CLASS/*.jpg."""
    model: Literal["resnet50", "googlenet"] = "resnet50"
    """Which of the two."""
    epochs: int | None = None
    """Passes over the training part; None: 90 for ResNet-50, 60 for GoogLeNet."""
    steps: int | None = None
    """Steps an epoch, to try it out; None: all."""
    batch_size: int = 32
    """Images a step on each rank."""
    image_size: int = 224
    """Height and width of the inputs."""
    workers: int = 4
    """Processes of a rank that decode images."""
    device: str = "cpu"
    """cuda: the GPU of this rank's LOCAL_RANK."""
    seed: int = 0
    """Decides initial weights, order of samples and partners."""


def make_parts(options: Options) -> tuple[datasets.ImageFolder, datasets.ImageFolder]:
    """The training part, augmented, and the validation part."""
    finish = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    cropped = transforms.RandomResizedCrop(options.image_size)
    training = transforms.Compose([cropped, transforms.RandomHorizontalFlip(), *finish])
    shorter_side = transforms.Resize(options.image_size * 256 // 224)
    centre = [shorter_side, transforms.CenterCrop(options.image_size)]
    return (
        datasets.ImageFolder(str(options.data_dir / "train"), training),
        datasets.ImageFolder(str(options.data_dir / "val"), transforms.Compose([*centre, *finish])),
    )


def make_model(options: Options, num_classes: int) -> torch.nn.Module:
    """The model as torchvision has it; GoogLeNet with its auxiliary heads."""
    if options.model == "resnet50":
        return models.resnet50(num_classes=num_classes)
    return models.googlenet(num_classes=num_classes, aux_logits=True, init_weights=False)


def make_optimizer(options: Options, model: torch.nn.Module) -> torch.optim.SGD:
    """SGD with the settings of the head of this file, the rate that of one worker."""
    if options.model == "googlenet":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=2e-4)
    rate = 0.1 * options.batch_size / 256
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)


def make_schedule(
    options: Options, optimizer: torch.optim.SGD, epochs: int, world_size: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate by epochs, for so many workers."""
    if options.model == "googlenet":
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda epoch: world_size * ((epoch + 1) / 5 if epoch < 5 else 0.1 ** (epoch // 30)),
    )


def loss_of(outputs: torch.Tensor | tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
    """Cross entropy; auxiliary heads count with a weight of 0.3 each."""
    if isinstance(outputs, torch.Tensor):
        return cross_entropy(outputs, y)
    logits, *auxiliary = outputs
    return cross_entropy(logits, y) + 0.3 * sum(cross_entropy(one, y) for one in auxiliary)


@torch.no_grad()
def accuracy(
    model: torch.nn.Module, loader: DataLoader, session: gg.GossipSession, device: torch.device
) -> float:
    """Accuracy on the validation part, shared out over the ranks."""
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        right = (model(x.to(device)).argmax(1).cpu() == y).sum()
        counts += torch.tensor([float(right), len(y)])
    model.train()
    right, total = session.group.all_reduce_(counts)
    return float(right / total)


def train(options: Options, group: gg.Group | None = None) -> float:
    """Trains on the ranks of `group`, by default all; returns the consensus's accuracy."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if options.device == "cuda" else torch.device("cpu")
    training, validation = make_parts(options)
    epochs = options.epochs or (90 if options.model == "resnet50" else 60)
    torch.manual_seed(options.seed)
    model = make_model(options, len(training.classes)).to(device)
    optimizer = make_optimizer(options, model)

    with gg.gossip(
        model,
        optimizer,
        topology="dissemination",
        payload="weights+state",
        seed=options.seed,
        process_group=group,
    ) as session:

        def load(part: datasets.ImageFolder, sampler: ShardedSampler) -> DataLoader:
            return DataLoader(
                part,
                batch_size=options.batch_size,
                sampler=sampler,
                num_workers=options.workers,
                pin_memory=device.type == "cuda",
            )

        rank, world_size = session.rank, session.world_size
        schedule = make_schedule(options, optimizer, epochs, world_size)
        sampler = ShardedSampler(len(training), rank, world_size, options.seed)
        batches = load(training, sampler)
        tests = load(
            validation,
            ShardedSampler(len(validation), rank, world_size, shuffle=False, uneven="keep"),
        )
        reached = 0.0
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in islice(batches, options.steps):
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                loss_of(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            with session.consensus():
                reached = accuracy(model, tests, session, device)
                distance = session.consensus_distance()
            if session.rank == 0:
                print(f"epoch {epoch + 1}  accuracy {reached:.2%}  distance {distance:.3f}")
    return reached


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    if chosen.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    train(chosen)

"""ResNet-20 on images of CIFAR-10, trained by the command; needs Pillow.

    gossipgrad train --job examples.cifar_resnet20:job --lr 0.1 --batch-size 32 --nproc 4

Reads `cifar10-small/cifar10_small_{train,test}_jpeg.npz` in the folder that GOSSIPGRAD_DATA names.
"""

import io
import os
from itertools import pairwise

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gossipgrad.train import Job


class Block(nn.Module):
    """Two convolutions beside a shortcut without weights (He et al., 2016, section 4.2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0,) * 5 + (self.new_channels,))
        return F.relu(inner + shortcut)


def resnet20() -> nn.Module:
    """Nine blocks."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(n, m, 1 + (n < m)) for n, m in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def images(part: str) -> TensorDataset:
    """Pixels from -1 to 1, and labels."""
    folder = os.environ["GOSSIPGRAD_DATA"]
    with np.load(f"{folder}/cifar10-small/cifar10_small_{part}_jpeg.npz") as archive:
        jpeg, bounds = archive["jpeg"].tobytes(), pairwise(archive["offsets"])
        rows = np.stack([np.asarray(Image.open(io.BytesIO(jpeg[a:b]))) for a, b in bounds])
        labels = torch.from_numpy(archive["labels"]).long()
    return TensorDataset(torch.from_numpy(rows).permute(0, 3, 1, 2) / 127.5 - 1, labels)


def job() -> Job:
    """10,000 images to train on, 2,000 to test with."""
    return Job(model=resnet20(), train=images("train"), test=images("test"), loss=F.cross_entropy)

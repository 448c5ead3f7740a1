"""Models and data of the benchmarks, and jobs of `gossipgrad train --job benchmarks._tasks:NAME`.

CIFAR-10 small (10,000 + 2,000 images, re-encoded as JPEG), tiny Shakespeare and HIGGS are read from
the folder that `GOSSIPGRAD_DATA` names. Compare their accuracies with each other, not with
published ones.
"""

import io
import math
import os
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from gossipgrad import data
from gossipgrad.train import Job

Part = tuple[Tensor, Tensor]
ROOT = Path(__file__).parents[1]
CHARACTERS = 65
_TRAIN_CHARACTERS = 1_003_854  # 90 percent
_PIECE = 128


def folder(name: str) -> Path:
    """A folder of the shared data."""
    path = Path(os.environ.get("GOSSIPGRAD_DATA") or ROOT / "../shared/data") / name
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is missing: name its parent by GOSSIPGRAD_DATA")
    return path


@cache
def whole(name: str) -> tuple[Part, Part]:
    """Inputs and labels of images: all to train on, all to test with."""
    if name == "cifar10-small":
        return _cifar()
    dataset = data.load(name)
    train, test = (part.batch(torch.arange(len(part))) for part in (dataset.train, dataset.test))
    return train, test


def _cifar() -> tuple[Part, Part]:
    """Standardised by channel."""
    from PIL import Image

    parts = []
    for name in ("train", "test"):
        with np.load(folder("cifar10-small") / f"cifar10_small_{name}_jpeg.npz") as archive:
            jpeg, ends = archive["jpeg"].tobytes(), archive["offsets"]
            images = [
                np.asarray(Image.open(io.BytesIO(jpeg[start:end]))) for start, end in pairwise(ends)
            ]
            x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
            parts.append((x.contiguous(), torch.from_numpy(archive["labels"]).long()))
    pixels = parts[0][0].double().transpose(0, 1).flatten(1)
    mean, deviation = (each.float().view(-1, 1, 1) for each in (pixels.mean(1), pixels.std(1)))
    train, test = (((x - mean) / deviation, y) for x, y in parts)
    return train, test


def crop_and_flip(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Images shifted by up to 4 pixels, half of them mirrored (He et al., 2016, section 4.2)."""
    height, width = x.shape[-2:]
    windows = F.pad(x, (4,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    top, left = torch.randint(9, (2, len(x)), generator=generator)
    mirrored = torch.randint(2, (len(x), 1, 1, 1), generator=generator).bool()
    crops = windows[torch.arange(len(x)), :, top, left]
    return torch.where(mirrored, crops.flip(-1), crops)


@cache
def text() -> tuple[Tensor, Tensor]:
    """Tiny Shakespeare in numbers of characters: to train on, to test with."""
    path = folder("tinyshakespeare") / "input.txt"
    _, numbers = np.unique(np.frombuffer(path.read_bytes(), dtype=np.uint8), return_inverse=True)
    characters = torch.from_numpy(numbers.astype(np.int64))
    return characters[:_TRAIN_CHARACTERS], characters[_TRAIN_CHARACTERS:]


def pieces(part: int, length: int = _PIECE) -> Part:
    """The training part (0) or the other in pieces, with the characters that follow."""
    characters = text()[part]
    count = (len(characters) - 1) // length
    shifted = (characters[first : first + count * length] for first in (0, 1))
    x, y = (each.view(count, length) for each in shifted)
    return x, y


def windows(part: int, generator: torch.Generator, count: int, length: int) -> Part:
    """Random pieces."""
    characters = text()[part]
    starts = torch.randint(len(characters) - length, (count,), generator=generator)
    positions = starts[:, None] + torch.arange(length)
    return characters[positions], characters[positions + 1]


def shuffled(parts: Part, batch: int, seed: int) -> Iterator[Part]:
    """Batches without end, drawn in a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    while True:
        if len(order) < batch:
            order = torch.randperm(len(parts[1]), generator=generator)
        rows, order = order[:batch], order[batch:]
        yield parts[0][rows], parts[1][rows]


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, averaged over all labels."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, test: Part) -> dict[str, float]:
    """Accuracy in percent, and the mean loss a label."""
    model.eval()
    pairs = zip(test[0].split(250), test[1].split(250), strict=True)
    outputs = [(model(x), y) for x, y in pairs]
    model.train()
    count = test[1].numel()
    right = sum(int((out.argmax(-1) == y).sum()) for out, y in outputs)
    return {
        "accuracy": 100 * right / count,
        "loss": sum(float(loss(out, y)) * y.numel() for out, y in outputs) / count,
    }


def cosine(peak: float, step: int, steps: int, warm_up_steps: int = 0) -> float:
    """Linear to the peak, then a cosine to 0."""
    if step < warm_up_steps:
        return peak * (step + 1) / warm_up_steps
    done = (step - warm_up_steps) / (steps - warm_up_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def mlp(inputs: int, classes: int, *widths: int, dropout: float = 0.0) -> nn.Sequential:
    """A perceptron with ReLU; two hidden layers of 128 by default."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in widths or (128, 128):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def lenet(widths: tuple[int, int, int, int] = (6, 16, 120, 84)) -> nn.Sequential:
    """LeNet-5 with ReLU and maximum pooling, for 28x28 images and ten classes."""
    one, two, three, four = widths
    return nn.Sequential(
        *(nn.Conv2d(1, one, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(one, two, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(25 * two, three), nn.ReLU(), nn.Linear(three, four), nn.ReLU()),
        nn.Linear(four, 10),
    )


class Block(nn.Module):
    """Two convolutions beside a shortcut without weights."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, inner: int = 0) -> None:
        super().__init__()
        self.stride, self.new_channels, inner = stride, outputs - inputs, inner or outputs
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Half as high and wide where the stride is 2."""
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return torch.relu(inner + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels)))


class ResNet20(nn.Module):
    """Nine blocks for small images, shortcuts without weights (He et al., 2016, section 4.2).

    `wider` multiplies the inner channels of each block.
    """

    def __init__(self, wider: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
            sizes = [(inputs, 1 + (inputs < outputs)), (outputs, 1), (outputs, 1)]
            blocks += [Block(n, outputs, stride, wider * outputs) for n, stride in sizes]
        self.stages, self.fc = nn.Sequential(*blocks), nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stages(torch.relu(self.norm(self.conv(x))))
        return self.fc(x.mean((2, 3)))


class GPT(nn.Module):
    """A decoder of GPT-2's form, norms first, the last layer shared with the embedding."""

    def __init__(
        self,
        vocabulary: int = CHARACTERS,
        *,
        context: int = _PIECE,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                branch = (2 * layers) ** 0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / branch)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each next character."""
        hidden = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.characters.weight)


class Layer(nn.Module):
    """Attention and a perceptron, each with its norm before it and its sum behind."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in self.attention_in(self.attention_norm(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).flatten(2))
        return x + self.perceptron_out(F.gelu(self.perceptron_in(self.perceptron_norm(x))))


class Augmented(Dataset):
    """Images that are cropped and mirrored as they are read."""

    def __init__(self, parts: Part) -> None:
        self.x, self.y = parts

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Part:
        return crop_and_flip(self.x[index, None])[0], self.y[index]


def cifar_resnet() -> Job:
    """ResNet-20 on CIFAR-10 small."""
    train, test = whole("cifar10-small")
    return Job(model=ResNet20(), train=Augmented(train), test=TensorDataset(*test), loss=loss)


def shakespeare_gpt() -> Job:
    """A GPT of 0.8 million parameters on tiny Shakespeare, in pieces of 128 characters."""
    train, test = TensorDataset(*pieces(0)), TensorDataset(*pieces(1))
    return Job(model=GPT(), train=train, test=test, loss=loss)


def fashion_wide() -> Job:
    """A perceptron 784-1024-1024-10 on Fashion-MNIST."""
    train, test = (TensorDataset(*part) for part in whole("fashion-mnist"))
    return Job(model=mlp(784, 10, 1024, 1024), train=train, test=test, loss=loss)

"""GoogLeNet with BatchNorm."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ._initial import he_normal_
from ._loss import AuxiliaryLogits


class GoogLeNet(nn.Module):
    """Nine inception modules for images of ImageNet's kind, with BatchNorm.

    | layer | output of a 224x224 image |
    |---|---|
    | 7x7 convolution, stride 2 | 64 x 112 x 112 |
    | 3x3 maximum pooling, stride 2 | 64 x 56 x 56 |
    | 1x1 convolution, 3x3 convolution | 192 x 56 x 56 |
    | 3x3 maximum pooling, stride 2 | 192 x 28 x 28 |
    | inception 3a, 3b | 256, 480 x 28 x 28 |
    | 3x3 maximum pooling, stride 2 | 480 x 14 x 14 |
    | inception 4a, 4b, 4c, 4d, 4e | 512, 512, 512, 528, 832 x 14 x 14 |
    | 3x3 maximum pooling, stride 2 | 832 x 7 x 7 |
    | inception 5a, 5b | 832, 1024 x 7 x 7 |
    | mean over positions, dropout of 0.4 | 1024 |
    | linear | classes |

    In training, auxiliary heads behind 4a and 4d (mean to 4x4, 1x1 convolution to 128, linear
    1024, dropout of 0.7, linear) give logits of their own: the output is `AuxiliaryLogits` then,
    which `training_loss` knows. In evaluation it is the logits alone.

    For a thousand classes and three channels: 13,004,888 parameters, 6,624,904 without auxiliary
    heads. Height and width are divided by 32, so images are 32x32 or larger.

    Convolutions start as He et al. 2015 have it (fan out), linear layers as torch makes them.

    Args:
        num_classes: Logits a sample.
        channels: Of the images.
        auxiliary: Whether there are auxiliary heads.

    References:
        Szegedy et al., Going deeper with convolutions, 2015, table 1 and section 5. Deviations:
        (1) BatchNorm behind each convolution, for local response normalisation and biases, after
        Ioffe and Szegedy, Batch normalization, 2015; (2) 3x3 convolutions where an inception
        module has 5x5, as torchvision has it: 0.38 million parameters less; (3) auxiliary heads
        average to 4x4 from any size, for windows of 5x5 with stride 3; (4) He's initial weights,
        where the paper does not tell.
    """

    def __init__(self, num_classes: int, channels: int = 3, *, auxiliary: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(channels, 64, 7, stride=2),
            _pooling(),
            _convolution(64, 64, 1),
            _convolution(64, 192, 3),
            _pooling(),
        )
        self.inception3 = nn.Sequential(
            _Inception(192, 64, (96, 128), (16, 32), 32),
            _Inception(256, 128, (128, 192), (32, 96), 64),
            _pooling(),
        )
        self.inception4a = _Inception(480, 192, (96, 208), (16, 48), 64)
        self.inception4bcd = nn.Sequential(
            _Inception(512, 160, (112, 224), (24, 64), 64),
            _Inception(512, 128, (128, 256), (24, 64), 64),
            _Inception(512, 112, (144, 288), (32, 64), 64),
        )
        self.inception4e = _Inception(528, 256, (160, 320), (32, 128), 128)
        self.inception5 = nn.Sequential(
            _pooling(),
            _Inception(832, 256, (160, 320), (32, 128), 128),
            _Inception(832, 384, (192, 384), (48, 128), 128),
        )
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(1024, num_classes)
        self.heads = nn.ModuleList(
            _auxiliary_head(inputs, num_classes) for inputs in ((512, 528) if auxiliary else ())
        )
        he_normal_(self, "fan_out")

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`."""
        return (self.fc, *self.heads)

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch class"] | AuxiliaryLogits:
        after_4a = self.inception4a(self.inception3(self.stem(x)))
        after_4d = self.inception4bcd(after_4a)
        x = self.inception5(self.inception4e(after_4d))
        logits = self.fc(self.dropout(x.mean((2, 3))))
        if not (self.training and self.heads):
            return logits
        inner = zip(self.heads, (after_4a, after_4d), strict=True)
        return AuxiliaryLogits(logits, tuple(head(x) for head, x in inner))


class _Inception(nn.Module):
    """Four branches side by side, joined along the channels."""

    def __init__(
        self,
        inputs: int,
        one: int,
        three: tuple[int, int],
        five: tuple[int, int],
        pooled: int,
    ) -> None:
        """Takes the channels of the branches, named by the paper; of two in a row, both."""
        super().__init__()
        self.one = _convolution(inputs, one, 1)
        self.three = nn.Sequential(_convolution(inputs, three[0], 1), _convolution(*three, 3))
        self.five = nn.Sequential(_convolution(inputs, five[0], 1), _convolution(*five, 3))
        self.pooled = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), _convolution(inputs, pooled, 1)
        )

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch joined height width"]:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


def _convolution(inputs: int, outputs: int, size: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def _pooling() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _auxiliary_head(inputs: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        _convolution(inputs, 128, 1),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(),
        nn.Dropout(0.7),
        nn.Linear(1024, num_classes),
    )

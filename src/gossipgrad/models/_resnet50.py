"""ResNet-50, as it is trained today."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ._initial import he_normal_


class ResNet50(nn.Module):
    """Sixteen bottleneck blocks for images of ImageNet's kind; version 1.5.

    | layer | output of a 224x224 image |
    |---|---|
    | 7x7 convolution, stride 2 | 64 x 112 x 112 |
    | 3x3 maximum pooling, stride 2 | 64 x 56 x 56 |
    | 3 blocks of 1x1, 3x3, 1x1 convolutions, 64 wide | 256 x 56 x 56 |
    | 4 blocks, 128 wide, the first with stride 2 | 512 x 28 x 28 |
    | 6 blocks, 256 wide, the first with stride 2 | 1024 x 14 x 14 |
    | 3 blocks, 512 wide, the first with stride 2 | 2048 x 7 x 7 |
    | mean over positions | 2048 |
    | linear | classes |

    BatchNorm follows each convolution, ReLU follows it (after the last of a block, the sum). The
    first block of each stage has a 1x1 convolution in its shortcut, option B of the paper. For a
    thousand classes and three channels: 25,557,032 parameters. Height and width are divided by 32,
    so images are 32x32 or larger.

    Convolutions start as He et al. 2015 have it (fan out), the linear layer as torch makes it.

    Args:
        num_classes: Logits a sample.
        channels: Of the images.

    References:
        He, Zhang, Ren, Sun, Deep residual learning for image recognition, 2016, table 1 and
        section 4.1. Deviations: (1) the stride of a block is in its 3x3 convolution, not in its
        first 1x1, as in what is called version 1.5; (2) torch's initial weights in the linear
        layer.
    """

    def __init__(self, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.stages = nn.Sequential(
            _stage(64, 64, blocks=3, stride=1),
            _stage(256, 128, blocks=4, stride=2),
            _stage(512, 256, blocks=6, stride=2),
            _stage(1024, 512, blocks=3, stride=2),
        )
        self.fc = nn.Linear(2048, num_classes)
        he_normal_(self, "fan_out")

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`."""
        return (self.fc,)

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch class"]:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 3, stride=2, padding=1)
        return self.fc(self.stages(x).mean((2, 3)))


def _stage(inputs: int, width: int, *, blocks: int, stride: int) -> nn.Sequential:
    others = (_Bottleneck(4 * width, width) for _ in range(blocks - 1))
    return nn.Sequential(_Bottleneck(inputs, width, stride), *others)


class _Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 that narrow to `width` and widen to four times that."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch deeper lower narrower"]:
        inner = torch.relu(self.norm1(self.conv1(x)))
        inner = torch.relu(self.norm2(self.conv2(inner)))
        return torch.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))

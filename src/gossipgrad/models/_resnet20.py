"""ResNet-20, the residual network for CIFAR-10."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ._initial import he_normal_


class ResNet20(nn.Module):
    """Nine residual blocks for small images, with shortcuts that have no weights.

    | layer | output of a 32x32 image |
    |---|---|
    | 3x3 convolution | 16 x 32 x 32 |
    | 3 blocks of two 3x3 convolutions | 16 x 32 x 32 |
    | 3 blocks, the first with stride 2 | 32 x 16 x 16 |
    | 3 blocks, the first with stride 2 | 64 x 8 x 8 |
    | mean over positions | 64 |
    | linear | classes |

    BatchNorm follows each convolution, ReLU follows it and each sum. For ten classes and three
    channels: 269,722 parameters. Height and width are divided by 4, so images are 4x4 or larger.

    Convolutions start as He et al. 2015 have it (fan out), the linear layer as torch makes it.

    Args:
        num_classes: Logits a sample.
        channels: Of the images.

    References:
        He, Zhang, Ren, Sun, Deep residual learning for image recognition, 2016, section 4.2, with
        n = 3; shortcuts by option A of section 4.1 (every second position, zeros for the channels
        that are new). Deviation: (1) torch's initial weights in the linear layer.
    """

    def __init__(self, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.stages = nn.Sequential(_stage(16, 16, 1), _stage(16, 32, 2), _stage(32, 64, 2))
        self.fc = nn.Linear(64, num_classes)
        he_normal_(self, "fan_out")

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`."""
        return (self.fc,)

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch class"]:
        x = self.stages(torch.relu(self.norm(self.conv(x))))
        return self.fc(x.mean((2, 3)))


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        _Block(inputs, outputs, stride), _Block(outputs, outputs), _Block(outputs, outputs)
    )


class _Block(nn.Module):
    """Two convolutions beside a shortcut without weights."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch deeper lower narrower"]:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels)
        )
        return torch.relu(inner + shortcut)

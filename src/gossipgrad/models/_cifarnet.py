"""CIFARNet, Caffe's quick network for CIFAR-10."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ._initial import he_normal_


class CIFARNet(nn.Module):
    """Three convolutions and two linear layers for 32x32 images: Caffe's `cifar10_quick`.

    | layer | output |
    |---|---|
    | 5x5 convolution, padding 2 | 32 x 32 x 32 |
    | 3x3 maximum pooling, stride 2, ReLU | 32 x 16 x 16 |
    | 5x5 convolution, padding 2, ReLU | 32 x 16 x 16 |
    | 3x3 average pooling, stride 2 | 32 x 8 x 8 |
    | 5x5 convolution, padding 2, ReLU | 64 x 8 x 8 |
    | 3x3 average pooling, stride 2 | 64 x 4 x 4 |
    | linear | 64 |
    | linear | classes |

    For ten classes and three channels: 145,578 parameters. Pooling windows may reach past the
    border, and average what they find. There is no non-linearity between the two linear layers.

    Of Caffe's two networks this is `quick`, not `full`: `full` has one linear layer less and
    local response normalisation, which has gone out of use.

    Nothing normalises its activations: with momentum 0.9 it learns at a rate of 0.02, not at 0.1.

    Convolutions start as He et al. 2015 have it (fan in), linear layers as torch makes them.

    Args:
        num_classes: Logits a sample.
        channels: Of the images.

    References:
        Jia et al., Caffe, 2014, `examples/cifar10/cifar10_quick_train_test.prototxt`, after
        Krizhevsky, cuda-convnet, 2011, `layers-18pct`. Deviation: (1) the initial deviations of
        0.0001 to 0.1 were made for pixels from 0 to 255, and inputs are normalised here.
    """

    def __init__(self, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, kernel_size=5, padding=2)
        self.conv3 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.fc1 = nn.Linear(64 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, num_classes)
        he_normal_(self, "fan_in")

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`."""
        return (self.fc2,)

    def forward(self, x: Float[Tensor, "batch channel 32 32"]) -> Float[Tensor, "batch class"]:
        x = torch.relu(F.max_pool2d(self.conv1(x), 3, stride=2, ceil_mode=True))
        x = F.avg_pool2d(torch.relu(self.conv2(x)), 3, stride=2, ceil_mode=True)
        x = F.avg_pool2d(torch.relu(self.conv3(x)), 3, stride=2, ceil_mode=True)
        return self.fc2(self.fc1(x.flatten(1)))

"""Image models: a perceptron, LeNet, CIFARNet and ResNet-20."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Flattened input, two hidden layers of 128 with ReLU, one logit a class.

    For ten classes: 26,122 parameters on 8x8 digits, 118,282 on 28x28 images.
    """

    def __init__(self, input_size: int, num_classes: int, *, hidden_size: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(input_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, num_classes),
        )

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`."""
        return (self.layers[-1],)

    def forward(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch class"]:
        return self.layers(x)


class LeNet(nn.Module):
    """LeNet-5 for 28x28 grey images, with ReLU and maximum pooling.

    | layer | output |
    |---|---|
    | 5x5 convolution, padding 2 | 6 x 28 x 28 |
    | 2x2 pooling | 6 x 14 x 14 |
    | 5x5 convolution | 16 x 10 x 10 |
    | 2x2 pooling | 16 x 5 x 5 |
    | linear | 120 |
    | linear | 84 |
    | linear | classes |

    For ten classes: 61,706 parameters.

    References:
        LeCun, Bottou, Bengio, Haffner, Gradient-based learning applied to document recognition,
        1998, section II.B. Deviations: (1) ReLU for the scaled tanh; (2) maximum pooling for
        trained subsampling; (3) the second convolution sees all six maps; (4) linear logits for
        the radial basis functions; (5) padding in place of 32x32 inputs.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`."""
        return (self.fc3,)

    def forward(self, x: Float[Tensor, "batch 1 28 28"]) -> Float[Tensor, "batch class"]:
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.relu(self.fc2(x))
        return self.fc3(x)


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
        _he_normal_(self, "fan_in")

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`."""
        return (self.fc2,)

    def forward(self, x: Float[Tensor, "batch channel 32 32"]) -> Float[Tensor, "batch class"]:
        x = torch.relu(F.max_pool2d(self.conv1(x), 3, stride=2, ceil_mode=True))
        x = F.avg_pool2d(torch.relu(self.conv2(x)), 3, stride=2, ceil_mode=True)
        x = F.avg_pool2d(torch.relu(self.conv3(x)), 3, stride=2, ceil_mode=True)
        return self.fc2(self.fc1(x.flatten(1)))


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
        _he_normal_(self, "fan_out")

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


def _he_normal_(model: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """Draw the weights of all convolutions for layers that ReLU follows; biases become 0.

    Deviation `sqrt(2 / n)`, n being the weights that an output (fan_in) or an input (fan_out)
    takes part in: the first keeps the size of activations, the second that of gradients.

    References:
        He, Zhang, Ren, Sun, Delving deep into rectifiers, 2015, section 2.2.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)

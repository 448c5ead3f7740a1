"""The two models of the command's own tasks."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gossipgrad.data import DatasetInfo


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

    def forward(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch class"]:
        return self.layers(x)


class LeNet(nn.Module):
    """LeNet-5 for 28x28 grey images, with ReLU and maximum pooling.

    Convolutions 5x5 to 6 channels (padding 2) and to 16, each with 2x2 pooling, then linear layers
    of 120 and 84 and the logits. For ten classes: 61,706 parameters.

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

    def forward(self, x: Float[Tensor, "batch 1 28 28"]) -> Float[Tensor, "batch class"]:
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.relu(self.fc2(x))
        return self.fc3(x)


_MODELS: dict[str, Callable[[DatasetInfo], nn.Module]] = {
    "mlp": lambda info: MLP(math.prod(info.input_shape), info.num_classes),
    "lenet": lambda info: LeNet(info.num_classes),
}


def build_model(name: str, info: DatasetInfo) -> nn.Module:
    """Make a model of this name for a data set; ranks that seed torch alike get equal replicas.

    Raises:
        ValueError: The model does not take such inputs.
    """
    if name == "lenet" and info.input_shape != (1, 28, 28):
        raise ValueError(
            f"model 'lenet' takes inputs of shape (1, 28, 28), but data {info.name!r} has "
            f"{info.input_shape}; use --model mlp, or --data fashion-mnist."
        )
    return _MODELS[name](info)

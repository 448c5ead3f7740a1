"""LeNet-5 as it is written today."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


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

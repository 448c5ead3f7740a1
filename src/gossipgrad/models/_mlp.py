"""A perceptron with two hidden layers."""

from jaxtyping import Float
from torch import Tensor, nn


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

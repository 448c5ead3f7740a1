"""A small GPT over characters."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class GPT(nn.Module):
    """Predicts each next character from those before it; a transformer decoder, norms first.

    | layer | output, of width w |
    |---|---|
    | character embedding + learned position embedding | position x w |
    | `layers` times: norm, causal attention, add | position x w |
    | ... and norm, linear, GELU, linear, add | position x 4 w, position x w |
    | norm | position x w |
    | linear, the weights of the character embedding | position x characters |

    Parameters: `layers (12 w^2 + 13 w) + 2 w + (characters + context) w`. That is 818,048 for the
    default of 4 layers, width 128 and 65 characters, which a laptop's CPU trains; 10,770,816 with
    `layers=6, width=384, heads=6, context=256`.

    Initial weights are normal with deviation 0.02, by `sqrt(2 layers)` less where a branch joins
    the residual stream; biases are 0.

    Args:
        vocabulary_size: How many characters there are.
        context: The longest input, in characters.
        layers: Blocks of attention and perceptron.
        width: Of the residual stream; a multiple of `heads`.
        heads: Of each attention.
        dropout: Share of activations dropped in training: of the embeddings, the attention and
            what joins the residual stream. Large models on little text need it.

    Raises:
        ValueError: A size is below 1, `heads` does not divide `width`, or `dropout` is no share.

    References:
        Radford et al., Language models are unsupervised multitask learners, 2019, section 2.3.
        Deviations: (1) characters for byte pairs; (2) far smaller, with a context of 128 for
        1024; (3) no dropout unless asked for; (4) positions start at deviation 0.02, like
        characters; the paper does not tell.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        context: int = 128,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {
            "vocabulary_size": vocabulary_size,
            "context": context,
            "layers": layers,
            "width": width,
            "heads": heads,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")
        if width % heads:
            raise ValueError(
                f"width is {width}, but must be a multiple of heads, {heads}; "
                f"{width // heads * heads + heads} is one."
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}, but must be at least 0 and below 1.")
        self.context = context
        self.characters = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("_out.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def head_modules(self) -> tuple[nn.Module, ...]:
        """See `heads`: the one there is shares the weights of the embedding."""
        return ()

    def forward(
        self, x: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position character"]:
        length = x.shape[1]
        if length > self.context:
            raise ValueError(
                f"the input has {length} positions, but the context is {self.context}; give the "
                f"last {self.context}, or make the model with context={length}."
            )
        hidden = self.characters(x) + self.positions(torch.arange(length, device=x.device))
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.characters.weight)


class _Block(nn.Module):
    """Attention and a perceptron, each with its norm before it and its sum behind."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)

    def forward(
        self, x: Float[Tensor, "batch position width"]
    ) -> Float[Tensor, "batch position width"]:
        x = x + self._drop(self.attention_out(self._attend(self.attention_norm(x))))
        inner = F.gelu(self.perceptron_in(self.perceptron_norm(x)))
        return x + self._drop(self.perceptron_out(inner))

    def _attend(
        self, x: Float[Tensor, "batch position width"]
    ) -> Float[Tensor, "batch position width"]:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention_in(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return seen.transpose(1, 2).flatten(2)

    def _drop(
        self, x: Float[Tensor, "batch position width"]
    ) -> Float[Tensor, "batch position width"]:
        return F.dropout(x, self.dropout, self.training)

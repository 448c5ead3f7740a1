"""A small GPT on tiny Shakespeare, character by character, trained by the command.

    gossipgrad train --job examples.shakespeare_gpt:job --optimizer adamw --lr 0.003 --nproc 4

Reads `tinyshakespeare/input.txt` in the folder that GOSSIPGRAD_DATA names.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from gossipgrad.train import Job

LENGTH, WIDTH, HEADS, LAYERS = 128, 128, 4, 4


class GPT(nn.Module):
    """Blocks of attention and perceptron over characters; input and output weights are tied."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        mask = nn.Transformer.generate_square_subsequent_mask
        self.register_buffer("mask", mask(LENGTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions
        hidden = self.norm(self.blocks(hidden, mask=self.mask, is_causal=True))
        return hidden @ self.tokens.weight.T


def job() -> Job:
    """The first 90 percent of the plays to train on, the rest to test with."""
    plays = Path(os.environ["GOSSIPGRAD_DATA"], "tinyshakespeare/input.txt").read_bytes()
    text = torch.frombuffer(bytearray(plays), dtype=torch.uint8)
    characters, numbers = text.unique(return_inverse=True)
    pieces = numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)
    x, y = pieces[:-1], numbers[1:][: pieces[:-1].numel()].view(-1, LENGTH)
    cut = len(x) * 9 // 10
    return Job(
        model=GPT(len(characters)),
        train=TensorDataset(x[:cut], y[:cut]),
        test=TensorDataset(x[cut:], y[cut:]),
        loss=lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
    )

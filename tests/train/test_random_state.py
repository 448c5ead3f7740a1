"""Random numbers of a rank repeat with its seed, and go on where a state was taken."""

import random

import numpy as np
import pytest
import torch

from gossipgrad.train._state import load_random_state, random_state, seed_rank


@pytest.fixture(autouse=True)
def _own_numbers():
    kept = random_state(torch.device("cpu"))
    yield
    load_random_state(kept, torch.device("cpu"))


def _draw():
    torchs = torch.rand(2).tolist()
    return [random.getrandbits(64), *np.random.rand(2), *torchs]  # noqa: NPY002


def test_goes_on_where_the_state_was_taken():
    seed_rank(0, 0)
    _draw()
    state = random_state(torch.device("cpu"))
    first = _draw()
    seed_rank(1, 0)
    load_random_state(state, torch.device("cpu"))
    assert _draw() == first

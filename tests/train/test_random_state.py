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


def test_a_rank_draws_the_same_in_every_run_and_others_draw_others():
    drawn = []
    for seed, rank in ((3, 1), (3, 1), (3, 2), (4, 1)):
        seed_rank(seed, rank)
        drawn.append(_draw())
    assert drawn[0] == drawn[1]
    assert not {*drawn[0]} & {*drawn[2]}
    assert not {*drawn[0]} & {*drawn[3]}


def test_goes_on_where_the_state_was_taken():
    seed_rank(0, 0)
    _draw()
    state = random_state(torch.device("cpu"))
    first = _draw()
    seed_rank(1, 0)
    load_random_state(state, torch.device("cpu"))
    assert _draw() == first

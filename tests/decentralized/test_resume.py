"""A session that is saved and gone on with does what it would have done, bit for bit.

What the plain settings of each family do, `tests/conformance/test_resume.py` holds.
"""

import pytest
import torch

import gossipgrad as gg
from support.replicas import adam, set_gradients, sgd
from support.resuming import stop_and_resume

SETTINGS = {
    "overlap, matching, three ranks": {"world_size": 3, "topology": "matching"},
    "overlap, five ranks": {"world_size": 5},
    "overlap, every 2, in a round": {"every": 2, "stop": 5},
    "overlap, in its first round": {"every": 4, "stop": 2},
    "overlap, before a step": {"stop": 0},
    "overlap, averages": {"average_every": 3, "stop": 5},
    "sync, averages": {"mode": "sync", "average_every": 2},
    "sync, momentum": {"mode": gg.Sync(momentum=0.9), "exchanges": 2},
    "sync, overlap": {"mode": gg.Sync(momentum=0.9, overlap=True), "exchanges": 2},
    "sync, momentum, every 3, in a round": {"mode": gg.Sync(momentum=0.9), "every": 3, "stop": 5},
    "state every 2": {"payload": gg.WeightsAndState(every=2), "optimizer": adam, "stop": 5},
    "bf16 weights": {"dtype": torch.bfloat16, "gradients": set_gradients},
    "gradients and weights": {"payload": "gradients+weights"},
    "one rank": {"world_size": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_goes_on_bit_for_bit(name):
    settings = {"world_size": 4, "stop": 6, "end": 11, "optimizer": sgd, **SETTINGS[name]}
    stop_and_resume(
        settings.pop("world_size"), settings.pop("stop"), settings.pop("end"), **settings
    )

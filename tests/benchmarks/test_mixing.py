"""The study of mixing computes what virtual ranks compute."""

import pytest
import torch

import gossipgrad as gg
from benchmarks import equal_accuracy, mixing
from benchmarks._tasks import mlp
from gossipgrad.topology import matching


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("all-reduce", {"strategy": "allreduce"}),
        ("overlap", {"mode": "overlap"}),
        ("sync", {"mode": "sync"}),
        ("sync, c", {"mode": gg.Sync(momentum=0.9)}),
        (
            "sync, c, one after the other in bf16",
            {"mode": gg.Sync(momentum=0.9), "exchanges": 2, "wire_dtype": torch.bfloat16},
        ),
        (
            "both, c, in bf16",
            {
                "mode": gg.Sync(momentum=0.9, overlap=True),
                "exchanges": 2,
                "wire_dtype": torch.bfloat16,
            },
        ),
        ("sync, momentum", {"mode": "sync", "payload": "weights+momentum"}),
    ],
)
def test_the_study_repeats_virtual_ranks(way, options):
    task = mixing.Task("digits", 1, (16,), 64, 20, (0.1,))
    found = mixing.train(task, 4, mixing.WAYS[way], 0.1, [0, 1])
    of_ranks = equal_accuracy.Task("digits", lambda: mlp(64, 10, 16), {}, 64, 20, (0.1,))
    for seed in (0, 1):
        if "mode" in options:
            options = options | {"topology": matching(4, seed=seed)}
        expected = equal_accuracy.train(of_ranks, 4, options, 0.1, seed)
        assert found["loss"][seed] == pytest.approx(expected["loss"], rel=1e-4)

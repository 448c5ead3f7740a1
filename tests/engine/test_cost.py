"""What a round costs the training thread."""

import time

import torch
from torch import nn

from support.sessions import run_sessions


def test_the_cost_of_a_round_is_linear_in_its_buckets():
    """Processor time of a bucket, among many and among few; once it grew with their number."""

    def use(me):
        me.train()
        begun = time.thread_time()
        me.train(4)
        return (time.thread_time() - begun) / len(me.model)

    def of_buckets(count):
        make = lambda rank: nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(count)])  # noqa: E731
        gradients = lambda model, rank, step: [  # noqa: E731
            setattr(p, "grad", torch.zeros(4)) for p in model.parameters()
        ]
        return min(run_sessions(2, use, make=make, gradients=gradients, bucket_bytes=16))

    few = min(of_buckets(64) for _ in range(2))
    assert of_buckets(2048) < 3 * few


def test_the_distance_of_large_replicas_is_estimated_from_a_part_of_them():
    def gradients(model, rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model[0].grad = torch.randn(400, 500, generator=generator)

    def use(me):
        me.train(1)
        model = [nn.Parameter(torch.empty(400, 500))]
        drawn = []
        for rank in range(2):
            gradients(model, rank, 0)
            drawn.append(model[0].grad)
        learning_rate = me.session.replica.optimizers[0].param_groups[0]["lr"]
        expected = learning_rate * float((drawn[0] - drawn[1]).norm()) / 2
        return me.session.stats().consensus_distance_estimate / expected

    make = lambda rank: nn.ParameterList([nn.Parameter(torch.zeros(400, 500))])  # noqa: E731
    for ratio in run_sessions(2, use, make=make, gradients=gradients, mode="sync"):
        assert 0.97 < ratio < 1.03

"""Flows: what a round sends of a bucket, and what it makes of what arrives."""

import threading

import pytest
import torch
from torch import nn

from gossipgrad import SharedMask
from gossipgrad.engine import Flow, Phase, weight_entries


def flow_of(parameter, *, mask=None):
    """One bucket of weights."""
    return Flow(
        "weights",
        Phase.ACROSS,
        weight_entries({"w": parameter}),
        first_bucket=0,
        bucket_bytes=1 << 20,
        in_consensus=True,
        mask=mask,
    )


def sent_by(flow, round):
    """A copy of what a round sends of the flow's one bucket."""
    snapshot = flow.pool.acquire(lambda: None, 0.0)
    payload, filled = flow.buckets[0].snapshot(snapshot, 0, round)
    if filled is not None:
        filled()
    sent = payload.clone()
    flow.pool.release(snapshot)
    return sent


def test_the_square_of_a_delta_is_the_same_in_any_thread_and_at_any_address():
    values = torch.randn(25_000, generator=torch.Generator().manual_seed(0))
    (bucket,) = flow_of(nn.Parameter(torch.zeros(25_000))).buckets
    squares = []

    def note(received):
        squares.append(bucket.delta(received, torch.zeros(25_000), 0).square.item())

    for offset in range(16):
        received = torch.empty(len(values) + offset)[offset:]
        note(received.copy_(values))
        thread = threading.Thread(target=note, args=(received.copy_(values),))
        thread.start()
        thread.join()
    assert len({*squares}) == 1
    assert squares[0] == pytest.approx(values.double().square().sum().item(), rel=1e-5)


def test_the_squares_of_a_mask_stand_for_all_coordinates():
    values = torch.randn(400, generator=torch.Generator().manual_seed(1))
    flow = flow_of(nn.Parameter(values), mask=SharedMask(0.1))
    squares = []
    for round in range(300):
        received = sent_by(flow, round)
        delta = flow.buckets[0].delta(received, torch.zeros_like(received), round)
        squares.append(delta.square.item())
    assert sum(squares) / 300 == pytest.approx(values.square().sum().item(), rel=0.05)


def test_a_mask_mixes_weights_that_do_not_lie_row_by_row_in_the_order_of_their_elements():
    plain = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    weights = [nn.Parameter(plain.clone()), nn.Parameter(plain.t().contiguous().t())]
    assert not weights[1].is_contiguous()
    sent = []
    for w in weights:
        flow = flow_of(w, mask=SharedMask(0.5))
        sent.append(sent_by(flow, 7))
        delta = flow.buckets[0].delta(sent[-1] + 1.0, sent[-1], 7)
        flow.buckets[0].add(delta, 0.5)
    assert torch.equal(*sent)
    assert torch.equal(*weights)
    changed = weights[0].detach() != plain
    assert changed.sum() == len(sent[0].nonzero())
    torch.testing.assert_close(weights[0].detach()[changed], plain[changed] + 0.5)

"""Tensors published by key: the latest version, without waiting."""

import pytest
import torch

from gossipgrad.comm import Mailbox, Outcome, Part
from support.waiting import HANG_SECONDS, until

PLAN = [Part(torch.float32, 4), Part(torch.bfloat16, 70_000)]


@pytest.fixture
def boxes(channels):
    ends = channels(3)
    return ends, [Mailbox(end, PLAN) for end in ends]


def arrived(ends, boxes, rank, key, version):
    def is_here():
        ends[rank].poll()
        mail = boxes[rank].latest(key)
        return mail is not None and mail.version == version

    until(is_here)
    return boxes[rank].latest(key)


def test_what_is_published_is_here_and_with_those_it_was_sent_to(boxes):
    ends, boxes = boxes
    values = torch.randn(70_000).to(torch.bfloat16)
    tickets = boxes[0].publish(1, values, version=3, peers=[1])
    mail = arrived(ends, boxes, 1, 1, 3)
    assert torch.equal(mail.values, values)
    assert (mail.sender, boxes[0].latest(1).version) == (0, 3)
    until(lambda: all(ticket.done for ticket in tickets))
    ends[2].poll()
    assert boxes[2].latest(1) is None
    assert boxes[1].latest(0) is None


def test_an_older_version_replaces_no_newer_one(boxes):
    ends, boxes = boxes
    for sender, version in ((0, 5), (1, 4), (1, 6), (0, 1)):
        boxes[sender].publish(0, torch.full((4,), float(version)), version=version, peers=[2])
    for sender in (0, 1):  # behind all that
        boxes[sender].publish(
            1, torch.zeros(70_000, dtype=torch.bfloat16), version=sender, peers=[2]
        )
    arrived(ends, boxes, 2, 1, 1)
    assert arrived(ends, boxes, 2, 0, 6).values.tolist() == [6.0] * 4


def test_mail_goes_on_beside_rounds_and_collectives(boxes):
    ends, boxes = boxes
    a, b, _ = ends
    boxes[0].publish(0, torch.ones(4), version=1, peers=[1])
    epochs = {rank: end.fence() for rank, end in enumerate(ends)}
    boxes[0].publish(0, torch.ones(4), version=2, peers=[1])
    for end in ends:
        end.resume(epochs, 0)
    mine = a.post(0, 0, torch.ones(4), send_to=1, recv_from=1)
    theirs = b.post(0, 0, torch.ones(4), send_to=0, recv_from=0)
    assert (a.take(mine, HANG_SECONDS), b.take(theirs, HANG_SECONDS)) == (Outcome.DELIVERED,) * 2
    arrived(ends, boxes, 1, 0, 2)


def test_a_peer_that_is_gone_gets_nothing_and_holds_nothing(boxes):
    ends, boxes = boxes
    ends[1].close()
    ends[0].void(0, 1)
    until(lambda: ends[0].poll() or ends[0].gone)
    tickets = boxes[0].publish(0, torch.ones(4), version=1, peers=[1, 2])
    assert arrived(ends, boxes, 2, 0, 1).version == 1
    until(lambda: all(ticket.done for ticket in tickets))


@pytest.mark.parametrize("values", [torch.ones(5), torch.ones(4).double()])
def test_what_does_not_fit_the_plan_is_refused_here_and_there(boxes, values):
    ends, boxes = boxes
    with pytest.raises(ValueError, match="planned as"):
        boxes[0].publish(0, values, version=0, peers=[1])
    ends[0].send_mail(0, 0, values, [1])
    until(lambda: ends[1].poll() or ends[1].refused)
    assert boxes[1].latest(0) is None

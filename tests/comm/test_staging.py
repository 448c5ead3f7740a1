import time

import pytest
import torch

from gossipgrad.comm import BucketPlan, Outcome, Snapshot, SnapshotPool, TensorSpec, to_device
from support.waiting import quick

CPU = torch.device("cpu")


class Held:
    done = False

    def wait(self, timeout_seconds):
        return self.done


def plan_of(*sizes):
    return BucketPlan.make(
        [TensorSpec(str(i), (n,), torch.float32) for i, n in enumerate(sizes)], bucket_bytes=8
    )


def test_a_snapshot_is_a_copy():
    plan = plan_of(3)
    snapshot = Snapshot(plan, CPU)
    tensor = torch.ones(3)
    payload, ready = snapshot.take(0, [tensor])
    tensor.zero_()
    assert ready is None
    assert payload.tolist() == [1.0] * 3
    assert payload.data_ptr() == snapshot.flats[0].data_ptr()
    assert snapshot.size_bytes == 12


def test_a_snapshot_is_used_again_only_when_its_tickets_are_done():
    pool = SnapshotPool(plan_of(3), CPU, limit=2)
    polls = []
    first = pool.acquire(lambda: polls.append(1), 0.0)
    ticket = Held()
    first.hold(ticket)
    pool.release(first)
    assert not first.free
    second = pool.acquire(lambda: polls.append(1), 0.0)
    assert second is not first
    assert pool.size_bytes == 24

    def let_go():
        polls.append(1)
        ticket.done = True

    assert pool.acquire(let_go, 30.0) is first
    assert polls


def test_the_pool_is_bounded_and_does_not_wait_for_its_owners():
    pool = SnapshotPool(plan_of(3), CPU, limit=2)
    taken = [pool.acquire(lambda: None, 0.0) for _ in range(2)]
    start = time.perf_counter()
    assert pool.acquire(lambda: None, 60.0) is None
    assert time.perf_counter() - start < 30.0
    pool.release(taken[1])
    assert pool.acquire(lambda: None, 0.0) is taken[1]
    taken[0].hold(Held())
    pool.release(taken[0])

    def waited():
        start = time.perf_counter()
        assert pool.acquire(lambda: time.sleep(0.001), 0.1) is None
        assert time.perf_counter() - start >= 0.1
        return time.perf_counter() - start

    quick(waited, 0.4)
    assert pool.size_bytes == 24


def test_on_the_cpu_what_was_received_is_where_it_must_be():
    received = torch.ones(2)
    assert to_device(received, torch.zeros(1)) is received


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("cuda", [pytest.param(True, marks=gpu), False])
def test_staging_brings_the_same_values(cuda):
    device = torch.device("cuda") if cuda else CPU
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1 << 20, generator=generator) for _ in range(3)]
    plan = BucketPlan.make([TensorSpec.of("w", t) for t in tensors], bucket_bytes=1 << 22)
    snapshot = Snapshot(plan, device)
    there = [t.clone().to(device) for t in tensors]
    sent = []
    for bucket, layout in enumerate(plan.buckets):
        payload, ready = snapshot.take(bucket, [there[i] for i in layout.indices])
        for i in layout.indices:
            there[i].zero_()
        sent.append((layout, payload, ready))
    for layout, payload, ready in sent:
        if ready is not None:
            ready()
        assert payload.device == CPU
        assert torch.equal(payload, torch.cat([tensors[i] for i in layout.indices]))
        back = to_device(payload.clone(), snapshot.flats[0])
        assert back.device.type == device.type
        assert torch.equal(back.cpu(), payload)
    assert snapshot.size_bytes == plan.size_bytes * (2 if cuda else 1)


@pytest.mark.parametrize("cuda", [pytest.param(True, marks=gpu)])
def test_the_compute_stream_does_not_wait_for_the_transfer(cuda):
    device = torch.device("cuda")
    tensor = torch.ones(64 << 20, device=device)
    plan = BucketPlan.make([TensorSpec.of("w", tensor)])
    snapshot = Snapshot(plan, device)
    snapshot.take(0, [tensor])[1]()
    torch.cuda.synchronize()
    _, ready = snapshot.take(0, [tensor])
    filled = torch.cuda.Event()
    filled.record()
    filled.synchronize()
    left = torch.cuda.Event()
    left.record(snapshot._stream)
    assert not left.query()
    ready()
    assert left.query()


@pytest.mark.parametrize("cuda", [pytest.param(True, marks=gpu), False])
@pytest.mark.parametrize("kind", ["zeromq"])
def test_snapshots_travel_between_ranks(channels, cuda):
    device = torch.device("cuda") if cuda else CPU
    ends = channels(sizes=(1 << 16,), credits=1)
    plan = plan_of(1 << 16)
    pools = [SnapshotPool(plan, device, 2) for _ in ends]
    values = [torch.full((1 << 16,), float(rank), device=device) for rank in range(2)]
    for round in range(20):
        posted = []
        for rank, channel in enumerate(ends):
            snapshot = pools[rank].acquire(lambda channel=channel: channel.poll(0.001), 30.0)
            payload, ready = snapshot.take(0, [values[rank] + round])
            exchange = channel.post(
                round, 0, payload, send_to=1 - rank, recv_from=1 - rank, ready=ready
            )
            snapshot.hold(exchange.ticket)
            posted.append((snapshot, exchange))
        for rank, (snapshot, exchange) in enumerate(posted):
            assert ends[rank].take(exchange, 30.0) is Outcome.DELIVERED
            there = to_device(exchange.received, values[rank])
            assert there.eq(1 - rank + round).all()
            pools[rank].release(snapshot)

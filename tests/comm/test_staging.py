"""Snapshots that travel while training goes on, and what is received on its way to a device."""

import time

import pytest
import torch

from gossipgrad.comm import BucketPlan, Outcome, SnapshotPool, TensorSpec, stage
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until

CPU = torch.device("cpu")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
devices = pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=gpu)])


class Held:
    done = False

    def wait(self, timeout_seconds):
        return self.done


def plan_of(*tensors, **options):
    return BucketPlan.make([TensorSpec.of(str(i), t) for i, t in enumerate(tensors)], **options)


@devices
def test_a_snapshot_is_a_copy_in_host_memory_whatever_the_strides(device):
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 2).t(),
        torch.tensor(7.0),
        torch.randn(1 << 20),
    ]
    plan = plan_of(*tensors, bucket_bytes=1 << 22)
    pool = SnapshotPool(plan, device, limit=1)
    snapshot = pool.acquire(lambda: None, 0.0)
    live = [tensor.clone().to(device) for tensor in tensors]
    taken = [snapshot.take(n, [live[i] for i in b.indices]) for n, b in enumerate(plan.buckets)]
    for tensor in live:
        tensor.zero_()
    for layout, (payload, is_filled) in zip(plan.buckets, taken, strict=True):
        until(lambda is_filled=is_filled: is_filled is None or is_filled())
        assert payload.device == CPU
        assert torch.equal(payload, torch.cat([tensors[i].reshape(-1) for i in layout.indices]))
        back = stage(payload.clone(), device)()
        assert back.device.type == device.type
        assert torch.equal(back.cpu(), payload)
    for bucket, (payload, _) in enumerate(taken):
        assert torch.equal(snapshot.flat(bucket).cpu(), payload)
    assert pool.size_bytes == plan.size_bytes * (1 if device == CPU else 2)


@pytest.mark.parametrize("cuda", [pytest.param(True, marks=gpu)])
def test_the_compute_stream_does_not_wait_for_the_transfer(cuda):
    device = torch.device("cuda")
    tensor = torch.ones(64 << 20, device=device)
    snapshot = SnapshotPool(plan_of(tensor), device, limit=1).acquire(lambda: None, 0.0)
    snapshot.take(0, [tensor])[1]()
    torch.cuda.synchronize()
    start = time.perf_counter()
    _, is_filled = snapshot.take(0, [tensor])
    torch.cuda.current_stream().synchronize()
    filled_seconds = time.perf_counter() - start
    until(is_filled)
    assert filled_seconds < (time.perf_counter() - start) / 2


def test_no_tensor_counts_as_zeros_and_a_narrow_wire_rounds():
    tensor = torch.tensor([1.0, 1.0 + 2**-12, 1e6])
    for dtype, there in ((torch.bfloat16, [1.0, 1.0, 999424.0]), (torch.float16, [1, 1, 65504])):
        pool = SnapshotPool(plan_of(tensor, wire_dtype=dtype), CPU, limit=1)
        snapshot = pool.acquire(lambda: None, 0.0)
        payload, _ = snapshot.take(0, [tensor])
        assert (payload.dtype, payload.tolist()) == (dtype, there)
        assert snapshot.take(0, [None])[0].eq(0).all()
    assert tensor[1] != 1.0


def test_the_pool_is_bounded_and_does_not_wait_for_its_owners():
    pool = SnapshotPool(plan_of(torch.ones(3)), CPU, limit=2)
    taken = [pool.acquire(lambda: None, 0.0) for _ in range(2)]
    assert pool.acquire(lambda: None, NEVER_SECONDS) is None
    for snapshot in taken:
        snapshot.take(0, [torch.ones(3)])
    taken[0].hold(0, Held())
    taken[0].release()
    assert pool.acquire(lambda: time.sleep(0.001), 0.1) is None, "the wire still reads it"
    assert pool.size_bytes == pool.limit_bytes == 24


def test_the_next_snapshot_gets_the_memory_of_a_bucket_that_is_read():
    plan = plan_of(*[torch.ones(1 << 10) for _ in range(8)], bucket_bytes=1 << 12)
    pool = SnapshotPool(plan, CPU, limit=2)
    snapshot = pool.acquire(lambda: None, 0.0)
    for bucket in range(8):
        snapshot.take(bucket, [torch.zeros(1 << 10)])
    for number in range(1, 20):
        following = pool.acquire(lambda: None, 0.0)
        for bucket in range(8):
            assert snapshot.flat(bucket).eq(number - 1).all()
            snapshot.drop(bucket)
            following.take(bucket, [torch.full((1 << 10,), float(number))])
        snapshot.release()
        snapshot = following
    assert pool.size_bytes == plan.size_bytes == pool.limit_bytes / 2


@devices
@pytest.mark.parametrize("kind", ["tcp"])
def test_snapshots_travel_between_ranks(channels, device):
    ends = channels(sizes=(1 << 16,), window=1)
    plan = plan_of(torch.zeros(1 << 16))
    pools = [SnapshotPool(plan, device, 2) for _ in ends]
    values = [torch.full((1 << 16,), float(rank), device=device) for rank in range(2)]
    for round in range(20):
        posted = []
        for rank, channel in enumerate(ends):
            snapshot = pools[rank].acquire(
                lambda channel=channel: channel.poll(0.001), HANG_SECONDS
            )
            payload, is_filled = snapshot.take(0, [values[rank] + round])
            exchange = channel.post(
                round, 0, payload, send_to=1 - rank, recv_from=1 - rank, is_filled=is_filled
            )
            snapshot.hold(0, exchange.ticket)
            posted.append((snapshot, exchange))
        for rank, (snapshot, exchange) in enumerate(posted):
            assert ends[rank].take(exchange, HANG_SECONDS) is Outcome.DELIVERED
            assert stage(exchange.received, device)().eq(1 - rank + round).all()
            snapshot.release()

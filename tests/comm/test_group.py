import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gossipgrad.comm import AskedStore, Group, Loss, _group, _rendezvous
from gossipgrad.errors import GossipError
from support.hanging_store import Hanging
from support.ranks import run_ranks

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)


def test_a_group_is_there_when_all_are_connected(monkeypatch):
    """Else one that leaves at once would break those that are still connecting."""
    connect = dist.ProcessGroupGloo

    def late(store, rank, *others):
        made = connect(store, rank, *others)
        time.sleep(0.3 * rank)
        return made

    monkeypatch.setattr(_rendezvous.dist, "ProcessGroupGloo", late)
    store, start = dist.HashStore(), time.perf_counter()
    others = [threading.Thread(target=Group, args=(store, rank, 3)) for rank in (1, 2)]
    for other in others:
        other.start()
    Group(store, 0, 3)
    assert time.perf_counter() - start > 0.5
    for other in others:
        other.join()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_sums_in_place(dtype):
    def work(rank, group):
        tensor = torch.full((2, 3), rank + 1).to(dtype)
        assert group.all_reduce_(tensor) is tensor
        return tensor

    for tensor in run_ranks(3, work):
        assert tensor.dtype == dtype
        assert tensor.eq(6).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64], ids=str)
def test_broadcast_overwrites_bit_for_bit(dtype):
    def work(rank, group):
        values = torch.arange(-3, 3).reshape(2, 3) if rank == 1 else torch.zeros(2, 3)
        return group.broadcast_(values.to(dtype), source=1)

    for tensor in run_ranks(3, work):
        assert torch.equal(tensor, torch.arange(-3, 3).reshape(2, 3).to(dtype))


def test_views_strided_empty_scalar_and_parameters():
    def work(rank, group):
        base = torch.zeros(4, 6)
        base[:, ::2] += rank
        group.all_reduce_(base[:, ::2])
        image = torch.full((1, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last)
        group.broadcast_(image, source=1)
        assert image.is_contiguous(memory_format=torch.channels_last)
        parameter = torch.nn.Parameter(torch.full((3, 2), float(rank)).t())
        group.broadcast_(parameter, source=1)
        group.all_reduce_(parameter)
        assert parameter.requires_grad
        empty = group.broadcast_(torch.zeros(0, 3))
        scalar = group.all_reduce_(torch.tensor(float(rank)))
        return base, image, parameter.detach(), empty, scalar

    for base, image, parameter, empty, scalar in run_ranks(2, work):
        assert base[:, ::2].eq(1).all()
        assert base[:, 1::2].eq(0).all()
        assert image.eq(1).all()
        assert parameter.eq(2).all()
        assert empty.shape == (0, 3)
        assert scalar == 1


def test_objects_of_json_come_in_the_order_of_ranks():
    values = [{"name": "a", "sizes": [1, 2.5, None, True]}, "x" * 1000, ""]
    assert run_ranks(3, lambda rank, group: group.all_gather_object(values[rank])) == [values] * 3
    assert run_ranks(3, lambda rank, group: group.broadcast_object(rank, source=2)) == [2] * 3


@pytest.mark.parametrize("at_once_bytes", [1024, 0], ids=["at once", "ring"])
def test_what_all_have_is_gathered_in_the_order_of_ranks(at_once_bytes):
    def work(rank, group):
        group.at_once_bytes = at_once_bytes
        mine = torch.arange(5.0) + 10 * rank
        gathered = torch.empty(15)
        assert group.all_gather_into_(gathered, mine) is gathered
        assert torch.equal(mine, torch.arange(5.0) + 10 * rank)
        return gathered

    expected = torch.cat([torch.arange(5.0) + 10 * rank for rank in range(3)])
    for gathered in run_ranks(3, work):
        assert torch.equal(gathered, expected)


@pytest.mark.parametrize("at_once_bytes", [1024, 0], ids=["at once", "ring"])
def test_a_gather_that_a_rank_does_not_come_to_fails_on_all(at_once_bytes):
    def work(rank, group):
        group.at_once_bytes = at_once_bytes
        if rank == 2:
            group.close()
            return None
        with pytest.raises(GossipError, match="died, left or broken"):
            group.all_gather_into_(torch.empty(3), torch.ones(1))
        return time.perf_counter()

    start = time.perf_counter()
    assert max(end - start for end in run_ranks(3, work)[:2]) < 30


def test_one_rank_needs_nobody():
    group = Group(dist.HashStore(), 0, 1)
    tensor = torch.ones(2)
    assert group.all_reduce_(tensor) is tensor
    assert group.broadcast_(tensor) is tensor
    assert group.all_gather_object({"a": 1}) == [{"a": 1}]
    group.barrier()
    group.close()


def test_those_that_wait_for_a_rank_that_closed_get_an_error_and_do_not_hang():
    def work(rank, group):
        group.barrier()
        if rank == 0:
            group.close()
            with pytest.raises(GossipError, match=r"^collectives are over: this rank has closed"):
                group.barrier()
            with pytest.raises(GossipError, match="collectives are over"):
                group.broadcast_(torch.ones(1))
            return
        start = time.monotonic()
        with pytest.raises(
            GossipError,
            match=r"^the collective did not come about: a rank has died, left or .* off: rank 0 \(",
        ):
            group.all_reduce_(torch.ones(3))
        assert time.monotonic() - start < 30.0
        with pytest.raises(
            GossipError, match=r"^collectives are over: a rank has died, left or broken it off"
        ):
            group.all_gather_object(1)

    run_ranks(3, work)


def test_a_rank_that_never_comes_is_awaited_up_to_the_timeout():
    with pytest.raises(
        GossipError, match=r"^rank 0 waited in vain for the other 1 ranks to enter the session"
    ):
        Group(dist.HashStore(), 0, 2, timeout_seconds=0.3)


def test_a_store_that_hangs_does_not_hold_a_rank_up(monkeypatch):
    monkeypatch.setattr(_rendezvous, "AskedStore", partial(AskedStore, timeout_seconds=0.2))
    store = Hanging()
    try:
        with pytest.raises(
            GossipError, match=r"rank 0 waited in vain .* store did not answer within 0\.2 s"
        ):
            Group(store, 0, 2)
    finally:
        store.answers.set()


def test_one_that_is_given_up_is_not_awaited_at_the_start():
    lost = Loss(generation=1, when_seconds=0.0, why="it hangs", left=False, by=0)
    with pytest.raises(GossipError, match=r"waited in vain .*: rank 1 was lost: it hangs"):
        Group(dist.HashStore(), 0, 2, gone=lambda: {1: lost})


def test_an_interrupted_collective_ends_the_group_everywhere(monkeypatch):
    within = threading.Event()

    def sleep(seconds):
        if threading.current_thread().name == "rank 0" and within.is_set():
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(_group, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    interrupted = threading.Event()

    def work(rank, group):
        if rank == 0:
            within.set()
            with pytest.raises(KeyboardInterrupt):
                group.barrier()
            interrupted.set()
            with pytest.raises(
                GossipError, match="collectives are over: this rank was interrupted"
            ):
                group.barrier()
        if rank == 1:
            with pytest.raises(GossipError, match="a rank has died, left or broken it off"):
                group.barrier()
        if rank == 2:
            interrupted.wait(60)
        start = time.monotonic()
        group.close()
        assert time.monotonic() - start < 30.0

    run_ranks(3, work)


def test_a_signal_handler_may_close_in_the_middle_of_a_collective(monkeypatch):
    within: list[Group] = []

    def sleep(seconds):
        if threading.current_thread().name == "rank 0" and within:
            within.pop().close()
        time.sleep(seconds)

    monkeypatch.setattr(_group, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    closed = threading.Event()

    def work(rank, group):
        if rank == 0:
            within.append(group)
            with pytest.raises(GossipError, match="this rank has closed its session"):
                group.barrier()
            closed.set()
        else:
            assert closed.wait(20)
            with pytest.raises(GossipError, match="a rank has died, left or broken it off"):
                group.barrier()
        with pytest.raises(GossipError, match="collectives are over"):
            group.barrier()

    run_ranks(2, work, timeout_seconds=30)


def test_who_waits_for_the_others_to_come_may_close():
    def work(rank, group):
        if rank == 0:
            closing = threading.Timer(0.1, group.close)
            closing.start()
            with pytest.raises(GossipError, match="this rank has closed its session"):
                group.barrier()
            closing.join()

    run_ranks(2, work, timeout_seconds=60)


def test_a_collective_inside_another_of_the_same_thread_is_refused():
    def work(rank, group):
        def start(gloo):
            with pytest.raises(GossipError, match="in the middle of another of the same thread"):
                group.barrier()
            return gloo.allreduce([torch.ones(1)])

        group._run(start)
        group.barrier()

    run_ranks(2, work)


def test_who_waits_for_the_others_no_more_meets_them_later(monkeypatch):
    """Also where the store takes its time to forget that it was there."""
    elsewhere, forgotten = threading.Event(), threading.Event()

    class Slow(AskedStore):
        asking = False

        def ask(self, question, **options):
            self.asking = True
            try:
                return super().ask(question, **options)
            finally:
                self.asking = False

        def begin(self, question):
            asking = self.asking

            def slow(store):
                time.sleep(0.1)
                question(store)
                forgotten.set()

            return super().begin(question if asking else slow)

    def work(rank, group):
        group.enter(1, (0, 1))
        if rank == 1:
            assert elsewhere.wait(60)
            assert forgotten.wait(60)
            return group.all_gather_object(rank)

        def unless():
            raise GossipError("rank 1 is elsewhere")

        monkeypatch.setattr(_rendezvous, "AskedStore", Slow)
        group.unless = unless
        with pytest.raises(GossipError, match=r"^rank 1 is elsewhere$"):
            group.barrier()
        assert group.broken is None
        group.unless = lambda: None
        elsewhere.set()
        return group.all_gather_object(rank)

    assert run_ranks(2, work, timeout_seconds=30) == [[0, 1], [0, 1]]


def test_the_source_is_a_rank():
    group = Group(dist.HashStore(), 0, 1)
    with pytest.raises(ValueError, match=r"source must lie in 0\.\.0, got 1"):
        group.broadcast_(torch.ones(1), source=1)

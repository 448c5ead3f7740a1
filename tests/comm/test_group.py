"""The private group of a session: what its collectives give, and how they end."""

import threading
import time
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

from gossipgrad.comm import Group, Loss, Membership, _group, _rendezvous
from gossipgrad.errors import GossipError
from support.hanging_store import Hanging
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8),
)
GONE = "a rank has died, left or broken it off"


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
        assert group.broadcast_(torch.zeros(0, 3)).shape == (0, 3)
        return base, image, parameter.detach(), group.all_reduce_(torch.tensor(float(rank)))

    for base, image, parameter, scalar in run_ranks(2, work):
        assert base[:, ::2].eq(1).all()
        assert base[:, 1::2].eq(0).all()
        assert image.eq(1).all()
        assert parameter.eq(2).all()
        assert scalar == 1


@pytest.mark.parametrize("numel", [5, 500], ids=["at once", "ring"])
def test_what_all_have_is_gathered_in_the_order_of_ranks(numel):
    def work(rank, group):
        mine = torch.arange(numel) + 1000.0 * rank
        gathered = torch.empty(3 * numel)
        assert group.all_gather_into_(gathered, mine) is gathered
        if rank == 2:
            group.close()
            return gathered
        with pytest.raises(GossipError, match=GONE):  # a rank that is missing is not awaited
            group.all_gather_into_(torch.empty(3), torch.ones(1))
        return gathered

    expected = torch.cat([torch.arange(numel) + 1000.0 * rank for rank in range(3)])
    for gathered in run_ranks(3, work):
        assert torch.equal(gathered, expected)


def test_each_rank_gets_its_part_of_every_other():
    def work(rank, group):
        mine = torch.arange(6).view(3, 2) + 10 * rank
        return group.all_to_all_into_(torch.empty_like(mine), mine)

    for rank, received in enumerate(run_ranks(3, work)):
        expected = [[10 * other + 2 * rank, 10 * other + 2 * rank + 1] for other in range(3)]
        assert received.tolist() == expected


def test_one_rank_needs_nobody():
    group = Group(dist.HashStore(), 0, 1)
    tensor = torch.ones(2)
    assert group.all_reduce_(tensor) is tensor
    assert group.broadcast_(tensor) is tensor
    assert group.all_gather_object({"a": 1}) == [{"a": 1}]
    group.barrier()
    with pytest.raises(ValueError, match=r"source must lie in 0\.\.0, got 1"):
        group.broadcast_(torch.ones(1), source=1)
    group.close()


def test_those_that_wait_for_a_rank_that_closed_get_an_error_that_names_it():
    def work(rank, group):
        group.barrier()
        if rank == 0:
            group.close()
            with pytest.raises(GossipError, match="collectives are over: this rank has closed"):
                group.barrier()
            return
        with pytest.raises(GossipError, match=rf"{GONE}: rank 0 \("):
            group.all_reduce_(torch.ones(3))
        with pytest.raises(GossipError, match=f"collectives are over: {GONE}"):
            group.all_gather_object(1)

    run_ranks(3, work)


def test_a_rank_that_never_comes_is_awaited_up_to_the_timeout_and_named():
    with pytest.raises(GossipError, match=r"waited in vain .* rank 1"):
        Group(dist.HashStore(), 0, 2, timeout_seconds=3.0)


def test_a_rank_that_comes_when_the_others_gave_up_is_told_so_and_not_of_the_network():
    store = dist.HashStore()
    with pytest.raises(GossipError):
        Group(store, 0, 2, timeout_seconds=3.0)
    with pytest.raises(GossipError, match="rank 0") as late:
        Group(store, 1, 2, timeout_seconds=HANG_SECONDS)
    assert "GLOO_SOCKET_IFNAME" not in str(late.value)


def test_a_store_that_hangs_is_awaited_up_to_the_timeout_and_named():
    store = Hanging()
    try:
        with pytest.raises(
            GossipError, match=r"did not answer within 0\.2 s: .* rank 0 by default"
        ):
            Group(store, 0, 2, timeout_seconds=0.2)
    finally:
        store.answers.set()


def lost(rank):
    loss = Loss(generation=1, when_seconds=0.0, why="it hangs", left=False, by=0)
    return {rank: loss}


@pytest.mark.parametrize("comes", [False, True])
def test_a_member_that_is_lost_ends_a_collective_that_waits_for_it(comes):
    """Though its connection is there: it hangs, before it has connected or in the middle."""
    over = threading.Event()

    def work(rank, group):
        newest = Membership.first(3)
        group.follow(lambda: newest, "members", listen=lambda: None)
        if comes:
            group.barrier()
        if rank == 1:
            over.wait(HANG_SECONDS)
            return
        newest = Membership(generation=1, living=(0, 2), gone=lost(1))
        with pytest.raises(GossipError):
            group.barrier()
        group.enter(1, newest.living)
        assert group.all_gather_object(rank) == [0, 2]
        over.set()

    run_ranks(3, work)


def test_a_collective_that_some_never_come_to_ends_in_time_and_names_them(monkeypatch):
    """The time is over when both others wait, and so is that for their own answers."""
    over, waits = threading.Event(), threading.Event()

    waiting = defaultdict(set)  # by how long they wait

    class Over:
        def __init__(self, seconds):
            self._waiting = waiting[seconds]

        def is_over(self):
            if waits.is_set() and threading.current_thread().name != "rank 1":
                self._waiting.add(threading.get_ident())
            return len(self._waiting) == 2

    for module in (_group, _rendezvous):
        monkeypatch.setattr(module, "Deadline", Over)

    def work(rank, group):
        if rank == 1:
            over.wait(HANG_SECONDS)
            return None
        waits.set()
        with group.limit(0.5), pytest.raises(GossipError) as caught:
            group.barrier()
        ended.wait(HANG_SECONDS)
        over.set()
        return str(caught.value)

    ended = threading.Barrier(2)
    for said in run_ranks(3, work)[::2]:
        assert "rank 1" in said
        assert "rank 0" not in said


@pytest.mark.parametrize("way", ["interrupt", "close"])
def test_a_signal_in_the_middle_of_a_collective_ends_it_everywhere(way):
    ended = threading.Event()

    def work(rank, group):
        def listen():
            if rank != 0 or ended.is_set():
                return
            if way == "interrupt":
                raise KeyboardInterrupt
            with pytest.raises(GossipError, match="in the middle of another of the same thread"):
                group.barrier()
            group.close()

        group.follow(lambda: None, "followed", listen=listen)
        if rank == 0:
            error = KeyboardInterrupt if way == "interrupt" else GossipError
            with pytest.raises(error):
                group.barrier()
            ended.set()
        elif rank == 1:
            with pytest.raises(GossipError, match=GONE):
                group.barrier()
        else:
            assert ended.wait(HANG_SECONDS)
        with pytest.raises(GossipError):
            group.barrier()

    run_ranks(3, work)


def test_a_rank_that_stops_waiting_for_the_others_may_meet_them_later():
    elsewhere = threading.Event()

    def work(rank, group):
        group.enter(1, (0, 1))
        if rank == 1:
            assert elsewhere.wait(HANG_SECONDS)
            return group.all_gather_object(rank)

        def unless():
            raise GossipError("rank 1 is elsewhere")

        group.unless = unless
        with pytest.raises(GossipError, match=r"^rank 1 is elsewhere"):
            group.barrier()
        assert group.broken is None
        group.unless = lambda: None
        elsewhere.set()
        return group.all_gather_object(rank)

    assert run_ranks(2, work) == [[0, 1], [0, 1]]


def test_a_rank_may_be_later_in_a_collective_than_at_the_start(monkeypatch):
    """Gloo's own clock runs 30 times faster here: 150 s of the start take five."""

    class Hasty(dist.ProcessGroupGloo):
        def _set_default_timeout(self, timeout):
            super()._set_default_timeout(timeout / 30)

    monkeypatch.setattr(dist, "ProcessGroupGloo", Hasty)
    store = dist.HashStore()

    def work(rank, _):
        group = Group(
            dist.PrefixStore("late", store),
            *(rank, 2),
            timeout_seconds=3600.0,
            start_timeout_seconds=150.0,
        )
        if rank == 1:
            time.sleep(5.5)
        return group.all_gather_object(rank)

    assert run_ranks(2, work) == [[0, 1], [0, 1]]

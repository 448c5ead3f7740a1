"""The helper that runs ranks as threads must itself fail loudly."""

import threading
from types import SimpleNamespace

import pytest
import torch

from support import ranks
from support.ranks import run_ranks, where


def test_results_come_by_rank_and_groups_are_real():
    def work(rank, group):
        return group.all_reduce_(torch.tensor([float(rank)])).item(), group.rank

    assert run_ranks(3, work) == [(3.0, 0), (3.0, 1), (3.0, 2)]


def test_the_first_failure_is_raised_with_its_rank_and_others_do_not_wait():
    def work(rank, group):
        if rank == 1:
            raise KeyError("lost")
        group.barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(3, work)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]  # and nobody runs still


def test_a_hang_is_shown_with_where_it_stands(monkeypatch):
    wait = threading.Event()

    def work(rank, group):
        if rank == 1:
            wait.wait(100)

    def hangs():
        there = {thread.name: thread for thread in threading.enumerate()}
        return "rank 0" not in there and "wait.wait(100)" in where(there["rank 1"])

    class Expiring(threading.Condition):
        """Its time is over as soon as one rank is done and the other one hangs."""

        def wait_for(self, predicate, timeout=None):
            while not hangs():
                self.wait(0.01)
            return False

    threads = SimpleNamespace(Thread=threading.Thread, Condition=Expiring)
    monkeypatch.setattr(ranks, "threading", threads)
    said = r"(?s)1 of 2 ranks were not done after 60 s.*rank 1 stands at.*wait\.wait\(100\)"
    with pytest.raises(TimeoutError, match=said):
        run_ranks(2, work, timeout_seconds=60)
    wait.set()

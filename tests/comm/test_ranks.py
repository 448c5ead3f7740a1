"""The helper that runs ranks as threads must itself fail loudly."""

import threading
import time

import pytest
import torch

from support.ranks import run_ranks


def test_results_come_by_rank_and_groups_are_real():
    def work(rank, group):
        return group.all_reduce_(torch.tensor([float(rank)])).item(), group.rank

    assert run_ranks(3, work) == [(3.0, 0), (3.0, 1), (3.0, 2)]


def test_the_first_failure_is_raised_with_its_rank_and_others_do_not_wait():
    def work(rank, group):
        if rank == 1:
            raise KeyError("lost")
        group.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(3, work)
    assert caught.value.__notes__[0] == "raised on rank 1 of 3"
    assert time.monotonic() - start < 3


def test_a_hang_is_shown_with_where_it_stands():
    wait = threading.Event()

    def work(rank, group):
        if rank == 1:
            wait.wait(10)

    with pytest.raises(TimeoutError, match=r"(?s)1 of 2 ranks.*rank 1 stands at.*wait\.wait\(10\)"):
        run_ranks(2, work, timeout_seconds=0.5)
    wait.set()

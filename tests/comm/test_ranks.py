"""The helper that runs ranks as threads must itself fail loudly."""

import pytest

from support.ranks import run_ranks


def test_the_first_failure_is_raised_with_its_rank_and_others_do_not_wait():
    def work(rank, group):
        if rank == 1:
            raise KeyError("lost")
        group.barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(3, work)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]  # and nobody runs still

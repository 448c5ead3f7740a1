import pytest

from support.lockstep_rank import STEPS, evaluated, parted, started, statistics
from support.processes import one_by_one, run_processes


@pytest.mark.process
def test_each_rank_trains_with_statistics_of_its_own_samples_and_exports_their_mean():
    names = "allreduce", "agd", "every-log-p", "post-local-sgd", "local"
    kept = "allreduce", "agd"
    calls = [(evaluated, name) for name in kept], [(statistics, names), (started, kept)]
    begun = []
    for rank, found in enumerate(run_processes(2, one_by_one, *calls[0], *calls[1])):
        *exports, trained, start = found
        for told, exported, shown, own in exports:
            assert told == exported == 1.0
            assert shown == 5.0
            assert own == 10.0 * rank
        own = 10.0 * (rank + 1) * (1 - 0.5**STEPS)
        assert trained == {name: (pytest.approx(own), STEPS) for name in names}
        begun.append(start)
    assert begun[0] == begun[1], "all start as rank 0, whatever their seeds"


@pytest.mark.process
@pytest.mark.parametrize(("name", "first", "world_size"), [("allreduce", 0, 5), ("agd", 1, 2)])
def test_a_rank_that_leaves_is_not_awaited_though_it_lives_on(name, first, world_size):
    """Nor one that is gone because another is: not all are connected to the first."""
    found = run_processes(world_size, parted, name, first, world_size)
    assert [ended for ended, *_ in found] == [
        "left" if rank == first else "the run was told to stop" for rank in range(world_size)
    ]
    for _, seconds, is_consensus, notes, weights in found:
        assert seconds < 30, "else it is Gloo that gives up, after half an hour"
        assert weights == pytest.approx(found[0][-1], abs=0.1)
        assert not is_consensus
        assert "its statistics of BatchNorm those of its own samples" in notes[0]

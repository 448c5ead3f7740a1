import pytest

from support.lockstep_rank import STEPS, evaluated, parted, started, statistics
from support.processes import run_processes


@pytest.mark.process
@pytest.mark.parametrize("name", ["allreduce", "agd"])
def test_what_is_exported_has_the_accuracy_that_is_told(name):
    """Statistics of BatchNorm differ between ranks: their mean is judged, each keeps its own."""
    for rank, (told, exported, shown, own) in enumerate(run_processes(2, evaluated, name)):
        assert told == exported == 1.0
        assert shown == 5.0
        assert own == 10.0 * rank


@pytest.mark.process
def test_each_rank_trains_with_the_statistics_of_its_own_samples():
    names = "allreduce", "agd", "every-log-p", "post-local-sgd", "local"
    for rank, found in enumerate(run_processes(2, statistics, names)):
        own = 10.0 * (rank + 1) * (1 - 0.5**STEPS)
        assert found == {name: (pytest.approx(own), STEPS) for name in names}


@pytest.mark.process
def test_all_start_as_rank_0_whatever_their_seeds():
    first, second = run_processes(2, started, ("allreduce", "agd"))
    assert first == second


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

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
@pytest.mark.parametrize(("name", "first"), [("allreduce", 0), ("agd", 1)])
def test_a_rank_that_leaves_is_not_awaited_though_it_lives_on(name, first):
    found = run_processes(2, parted, name, first)
    assert found[first][0] == "left"
    assert found[1 - first][0] == "the run was told to stop"
    for _, seconds, is_consensus, notes, weights in found:
        assert seconds < 5
        assert weights == found[0][-1]
        assert not is_consensus
        assert "the statistics of BatchNorm are those of this rank's samples" in notes[0]

import pytest

from support.lockstep_rank import STEPS, evaluated, started, statistics, stopped
from support.processes import one_by_one, run_processes


@pytest.mark.process
def test_each_rank_trains_with_statistics_of_its_own_samples_and_exports_their_mean():
    names, kept = ("allreduce", "sparse", "local"), ("allreduce", "sparse")
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
def test_all_stop_before_the_same_step_though_one_alone_has_the_signal():
    names = {"allreduce": 2, "sparse": 0}
    calls = [(stopped, name, first) for name, first in names.items()]
    for first, *others in zip(*run_processes(3, one_by_one, *calls), strict=True):
        steps, is_consensus, _ = first
        assert 2 <= steps <= 10
        assert is_consensus
        assert all(one == first for one in others)

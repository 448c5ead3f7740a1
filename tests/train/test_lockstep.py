import pytest

from support.lockstep_rank import evaluated
from support.processes import run_processes


@pytest.mark.process
@pytest.mark.parametrize("name", ["allreduce", "agd"])
def test_what_is_exported_has_the_accuracy_that_is_told(name):
    """Statistics of BatchNorm differ between ranks: their mean is judged, each keeps its own."""
    for rank, (told, exported, shown, own) in enumerate(run_processes(2, evaluated, name)):
        assert told == exported == 1.0
        assert shown == 5.0
        assert own == 10.0 * rank

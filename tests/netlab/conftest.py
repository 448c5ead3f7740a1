import pytest

from benchmarks.netlab import _system
from benchmarks.netlab._probe import probe


@pytest.fixture(scope="session")
def _possible_here():
    if lacks := _system.missing() or probe():
        pytest.skip("; ".join(lacks))

"""Memory of a selection is that of the call."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_call():
    command = [sys.executable, "-m", "benchmarks.selection", "--peaks", str(1 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    found, values = json.loads(done.stdout)["0.01"], 4 << 20
    assert found["torch.topk"] >= 3 * values, "the magnitudes, and pairs of value and index"
    assert found["np.argpartition"] >= 2 * values
    assert found["top_k"] < values

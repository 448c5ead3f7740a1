"""The command beside the table of stalls measures the whole of it."""

import json

from benchmarks import stall
from benchmarks._common import RESULTS


def test_the_command_is_that_of_the_whole_table():
    results = json.loads((RESULTS / "stall.json").read_text())
    assert results["command"] == stall.command_of(results["cells"])
    assert results["command"] == "python -m benchmarks.stall --repeats 3"


def test_contestants_that_were_repeated_more_or_less_have_commands_of_their_own():
    cells = [
        {"contestant": name, "longest_step_seconds": [0.1] * repeats}
        for name, repeats in (("gossip, stale", 2), ("DDP", 3))
    ]
    assert stall.command_of(cells) == (
        "python -m benchmarks.stall --repeats 2 --only 'gossip, stale'; "
        "python -m benchmarks.stall --repeats 3 --only DDP"
    )

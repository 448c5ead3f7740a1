"""Ways to save are timed by turns."""

import random

from benchmarks import checkpoint


def test_every_way_is_timed_in_turns(tmp_path, monkeypatch):
    turns = []
    timed = checkpoint.ways

    def watched(*arguments):
        return {
            name: lambda number, name=name, way=way: (turns.append((number, name)), way(number))[1]
            for name, way in timed(*arguments).items()
        }

    monkeypatch.setattr(checkpoint, "ways", watched)
    monkeypatch.setattr(checkpoint, "ALONE_STEPS", 2)
    found = checkpoint.row(1_000, 3, tmp_path, random.Random(0))
    assert found["state_bytes"] == 12_000 + 400
    assert {"held", "slowed", "torch_save", "save"} <= set(found["quartiles_seconds"])
    names = [[name for number, name in turns if number == turn] for turn in range(4)]
    assert len({tuple(one) for one in names}) == 4, "each turn in an order of its own"
    assert len({tuple(sorted(one)) for one in names}) == 1


def test_what_was_measured_once_is_its_own_quartiles():
    """As of steps beside a save, where the other saves were over before one could begin."""
    assert checkpoint.quartiles([0.25]) == [0.25] * 3

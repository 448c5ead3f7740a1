"""The soak: its rule, and a short one."""

import pytest

from benchmarks import soak


def samples(**rises):
    flat = {"rss_bytes": 300e6, "handles": 40, "threads": 9, "blocks": 1e6}
    return [
        {"exchanges": 100 * at} | {m: flat[m] + at * rises.get(m, 0) for m in flat}
        for at in range(100)
    ]


def test_what_grows_over_the_second_half_is_found():
    assert all(found["flat"] for found in soak.judge(samples()).values())
    found = soak.judge(samples(handles=0.02, blocks=1000, rss_bytes=1000))
    assert [measure for measure in found if not found[measure]["flat"]] == ["handles", "blocks"]
    assert len(soak.growing({"stale": {"found": {"3": found}}})) == 2


@pytest.mark.slow
@pytest.mark.process
def test_a_short_one():
    for part in soak.run(60, ranks=2).values():
        assert part["exchanges"] > 0

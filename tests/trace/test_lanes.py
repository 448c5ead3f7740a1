"""Lanes: as few as keep each readable."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.trace._lanes import assign_lanes

spans = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 10)).map(lambda s: (float(s[0]), float(sum(s)))),
    max_size=25,
).map(lambda found: sorted(found, key=lambda span: (span[0], -span[1])))


def overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def holds(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and b[1] <= a[1]


def by_lane(found: list[tuple[float, float]], lanes: list[int]) -> list[list]:
    return [[s for s, at in zip(found, lanes, strict=True) if at == lane] for lane in set(lanes)]


@given(spans)
def test_the_spans_of_a_lane_never_overlap(found):
    for lane in by_lane(found, assign_lanes(found, nest=False)):
        assert not any(overlap(a, b) for a, b in combinations(lane, 2))


@given(spans)
def test_with_nesting_spans_that_overlap_lie_one_in_the_other(found):
    for lane in by_lane(found, assign_lanes(found, nest=True)):
        for a, b in combinations(lane, 2):
            assert not overlap(a, b) or holds(a, b) or holds(b, a)


@given(spans)
def test_there_are_no_more_lanes_than_spans_at_one_time(found):
    found = [(start, end) for start, end in found if end > start]
    lanes = assign_lanes(found, nest=False)
    busiest = max((sum(s[0] <= at[0] < s[1] for s in found) for at in found), default=0)
    assert max(lanes, default=-1) + 1 <= max(busiest, 1)


def test_a_span_within_another_shares_its_lane_only_with_nesting():
    found = [(0.0, 10.0), (2.0, 4.0), (10.0, 11.0)]
    assert assign_lanes(found, nest=True) == [0, 0, 0]
    assert assign_lanes(found, nest=False) == [0, 1, 0]

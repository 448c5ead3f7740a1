"""The claims of a share: what each change of them keeps."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.data._elastic_claims import without
from gossipgrad.data._elastic_deal import Deal
from gossipgrad.data._elastic_record import (
    Span,
    View,
    begun,
    claimed,
    free_parts,
    parse,
    to_text,
    told,
)

BATCHES = 12


@st.composite
def records(draw):
    """Claims that do not overlap, and a view in which some of their ranks are gone, or to come."""
    generation = draw(st.integers(0, 4))
    living = tuple(sorted({0, *draw(st.sets(st.integers(1, 4)))}))
    to_come = draw(st.sets(st.integers(1, 4)))

    def generations(rank):
        """In which a rank may have claimed: not in one whose members it was not among."""
        if rank in living:
            return st.integers(0, 5)
        if rank in to_come or generation == 0:
            return st.integers(generation + 1, generation + 3)
        return st.integers(0, generation - 1)

    cuts = sorted(draw(st.sets(st.integers(0, BATCHES), min_size=2, max_size=8)))
    spans = [
        (rank, draw(generations(rank)), a, b, draw(st.integers(0, b - a)))
        for a, b in pairwise(cuts)
        if draw(st.booleans())
        for rank in [draw(st.integers(0, 4))]
    ]
    return spans, generation, living


def made(record):
    spans, generation, living = record
    return [Span(*span) for span in spans], View(rank=0, generation=generation, living=living)


def owners(spans, view):
    """Of each batch: whose it is, for good; None if it is free."""
    found = [None] * BATCHES
    for span in spans:
        end = span.start + span.used if view.counts_out(span) else span.end
        found[span.start : end] = [span.rank] * (end - span.start)
    return found


def batches(parts):
    return [batch for part in parts for batch in part]


@given(records())
def test_free_is_what_nobody_has_who_counts(record):
    spans, view = made(record)
    free = batches(free_parts(spans, range(BATCHES), view))
    assert free == [batch for batch, rank in enumerate(owners(spans, view)) if rank is None]


@given(records(), st.data())
def test_a_claim_changes_nothing_but_what_it_claims(record, data):
    spans, view = made(record)
    if not (free := free_parts(spans, range(BATCHES), view)):
        return
    part = data.draw(st.sampled_from(free))
    after = claimed(spans, part, view)
    expected = owners(spans, view)
    expected[part.start : part.stop] = [view.rank] * len(part)
    assert owners(after, view) == expected
    assert parse(to_text(after)) == after
    assert all(one.end <= two.start for one, two in pairwise(after))
    assert len(batches(begun(spans, part, view))) <= len(part)
    assert not begun(after, part, view)


@given(records(), st.sets(st.integers(0, BATCHES - 1)))
def test_what_is_told_as_used_is_nobody_elses_any_more(record, used):
    spans, view = made(record)
    parts = [range(batch, batch + 1) for batch in sorted(used)]
    after = told(spans, parts, view)
    before = owners(spans, view)
    expected = [0 if rank is None and b in used else rank for b, rank in enumerate(before)]
    assert owners(after, view) == expected
    assert told(after, parts, view) == after


def test_what_a_rank_uses_in_its_order_stays_one_claim():
    view = View(rank=1, generation=0, living=(0, 1))
    spans = []
    for start in range(0, BATCHES, 2):
        spans = told(spans, [range(start)], view)
        spans = claimed(spans, range(start, start + 2), view)
    assert spans == [Span(1, 0, 0, 12, 10)]
    assert json.loads(to_text(told(spans, [range(12)], view))) == [[1, 0, 0, 12, 12]]


@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.sets(st.integers(0, 9), min_size=1)
)
def test_hands_hold_every_batch_once(shares, size, chunk, living):
    deal = Deal(shares=shares, batches=size, chunk=chunk)
    ranks = tuple(sorted(living))
    dealt = [
        (piece.share, batch, rank)
        for rank in ranks
        for piece in deal.hand(0, rank, ranks)
        for batch in piece.batches
    ]
    assert sorted(one[:2] for one in dealt) == [(s, b) for s in range(shares) for b in range(size)]
    assert all(deal.owner(share, batch, ranks) == rank for share, batch, rank in dealt)


@given(
    st.integers(0, 3), st.integers(0, 9), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)))
)
def test_without_leaves_what_is_in_no_other(start, length, others):
    part = range(start, start + length)
    ranges = [range(a, b) for a, b in others if a < b]
    expected = [batch for batch in part if not any(batch in other for other in ranges)]
    assert batches(without(part, ranges)) == expected


@pytest.mark.parametrize("text", ["{}x", "[[1]]", "[1]", '{"a": 1}'])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="give each dealer of a run a name of its own"):
        parse(text)

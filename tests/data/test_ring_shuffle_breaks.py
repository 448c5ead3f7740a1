"""Epochs that are left early: the ranks still agree on how many rows travel in a step."""

from itertools import chain

import pytest
import torch

import gossipgrad as gg
from support.links import make_transports
from support.ranks import run_ranks

SIZES = [10, 7, 13]


def train(stop, *, epochs=12, sizes=SIZES, **options):
    """On every rank: rows sent after each step, the batches, and the rows after a settlement."""
    ends = make_transports("in-process", len(sizes))

    def main(rank, group):
        ids = torch.arange(sizes[rank]) + sum(sizes[:rank])
        sent, batches = [], []
        with gg.RingShuffle(
            ids,
            batch_size=4,
            process_group=group,
            transport=lambda group: ends[rank],
            **{"deadline_seconds": 30.0, **options},
        ) as shuffle:
            for epoch in range(epochs):
                for number, (rows,) in enumerate(shuffle, start=1):
                    batches.append(rows.tolist())
                    sent.append(shuffle.stats().rows_sent)
                    if number == stop(rank, epoch):
                        break
            stats = shuffle.stats()
            shuffle.drain()
            return sent, batches, shuffle.rows()[0].tolist(), stats

    return zip(*run_ranks(len(sizes), main), strict=True)


@pytest.mark.parametrize(
    ("stop", "sizes"),
    [
        (lambda rank, epoch: 1, SIZES),
        (lambda rank, epoch: 2, SIZES),
        (lambda rank, epoch: 1 + epoch % 3, [4, 11, 5, 9]),
        (lambda rank, epoch: 1 + (rank + epoch) % 2, SIZES),
        (lambda rank, epoch: 2 if rank else 3, [10, 10]),
    ],
)
def test_every_rank_gives_as_many_rows_in_a_step(stop, sizes):
    sent, batches, held, stats = train(stop, sizes=sizes)
    steps = min(map(len, sent))
    assert steps >= 12
    assert {tuple(counts[:steps]) for counts in sent} == {tuple(sent[0][:steps])}
    assert not any(s.late_rounds for s in stats if s.steps == steps)
    assert [len(rows) for rows in held] == sizes
    assert sorted(chain(*held)) == list(range(sum(sizes)))
    assert all(len(set(batch)) == len(batch) for batch in chain(*batches))


def test_a_run_repeats_bit_for_bit():
    runs = [list(train(lambda rank, epoch: 1 + (rank + epoch) % 3))[1] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("credits", [1, 8])
def test_without_a_deadline_no_row_goes_astray(credits):
    _, _, held, _ = train(
        lambda rank, epoch: 1 + (rank * epoch) % 3, deadline_seconds=0.0, credits=credits
    )
    assert [len(rows) for rows in held] == SIZES
    assert sorted(chain(*held)) == list(range(sum(SIZES)))


def test_a_broken_epoch_resumes_as_if_nothing_had_been():
    def stop(epoch):
        return (1, 2, 1, 4, 2, 4)[epoch]

    def run(pause_after, states):
        """Up to the pause, or from it on; the batches, and the states there."""
        ends = make_transports("in-process", len(SIZES))

        def main(rank, group):
            ids, batches = torch.arange(SIZES[rank]) + sum(SIZES[:rank]), []
            with gg.RingShuffle(
                ids,
                batch_size=4,
                process_group=group,
                transport=lambda group: ends[rank],
                deadline_seconds=30.0,
            ) as shuffle:
                first = 0
                if states is not None:
                    shuffle.load_state_dict(states[rank])
                    first = pause_after
                for epoch in range(first, 6):
                    shuffle.set_epoch(epoch)
                    for number, (rows,) in enumerate(shuffle, start=1):
                        batches.append(rows.tolist())
                        if number == stop(epoch):
                            break
                    if states is None and epoch + 1 == pause_after:
                        shuffle.drain()
                        return batches, shuffle.state_dict()
                return batches, None

        return zip(*run_ranks(len(SIZES), main), strict=True)

    whole, _ = run(None, None)
    begun, states = run(3, None)
    rest, _ = run(3, states)
    assert [a + b for a, b in zip(begun, rest, strict=True)] == list(whole)

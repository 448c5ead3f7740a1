"""Floods: each stranger comes as far as its kind says, and no further."""

import random

import pytest

from benchmarks._strangers import KINDS, said
from benchmarks.flood import LINKS, row_of
from gossipgrad.comm import ZeroMQTransport
from support.hostile import dial, greeting, is_open, port_of
from support.ranks import run_ranks
from support.waiting import until


@pytest.mark.parametrize("link", LINKS)
def test_strangers_come_as_far_as_they_should(link, caplog):
    (end,) = run_ranks(1, lambda rank, group: ZeroMQTransport(group, encrypt=link == "encrypted"))
    try:
        for kind in KINDS:
            before = end.refused_connections
            with dial(port_of(end)) as connection:
                spoken = said(kind, LINKS[link], random.Random(0))
                connection.sendall(spoken)
                if kind in ("garbage", "made-up credentials"):
                    until(lambda: not is_open(connection))
                else:  # a port that still listens answers once the greeting is whole
                    whole = greeting(LINKS[link].encode())
                    assert whole.startswith(spoken)
                    connection.sendall(whole[len(spoken) :])
                    assert len(connection.makefile("rb").read(len(whole))) == len(whole)
            until(lambda: end.refused_connections == before + 1)  # noqa: B023
        shown = "which showed no good credentials" in caplog.text
        assert shown == (link == "plain"), "with CURVE a box is made up, and nobody is asked"
    finally:
        end.close()


def test_a_row_tells_what_each_stranger_costs():
    def block(step_seconds, cpu_seconds, refused):
        return {
            "step_seconds": step_seconds,
            "cpu_seconds": cpu_seconds,
            "seconds": 2.0,
            "refused": refused,
        }

    quiet, busy = block(0.010, 1.0, 0), block(0.012, 1.5, 1000)
    other = block(0.009, 1.1, 0), block(0.015, 1.6, 1000)
    found = [[{"in peace": quiet, "garbage": busy}, {"in peace": other[0], "garbage": other[1]}]]
    row = row_of("plain", "garbage", found)
    assert row["refused_per_second_and_port"] == 500.0
    assert (row["step_milliseconds_in_peace"], row["step_milliseconds"]) == (10.0, 15.0)
    assert row["ratio_of_step_times"] == 1.5
    assert row["cpu_milliseconds_per_stranger"] == 0.5

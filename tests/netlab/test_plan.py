"""Which transfers show that links keep to their rates, and what is made of them."""

import pytest

from benchmarks.netlab import NetlabError
from benchmarks.netlab._layout import PAYLOAD_SHARE, Layout
from benchmarks.netlab._plan import fair_shares, links, plan
from benchmarks.netlab._traffic import Moved
from benchmarks.netlab._verify import verify


def filled(layout):
    return set[str]().union(*(turn.filled for turn in plan(layout)))


@pytest.mark.parametrize(
    ("layout", "rounds"),
    [
        (Layout.of(2, 1e9), 1),
        (Layout.of(5, 1e9), 1),
        (Layout.of(16, 1e9), 1),
        (Layout.of(4, 1e9, {2: 1e8}), 3),
        (Layout.of(4, 1e8, {1: 2e8}), 3),  # the one fast host meets all others together
        (Layout.of(6, 1e8, None, ((0, 1, 2), (3, 4, 5)), 1e8), 3),
        (Layout.of(6, 1e9, None, ((0, 1), (2, 3)), 1e8), 5),
        (Layout.of(6, 1e9, None, ((0, 1), (2, 3)), None), 1),
    ],
)
def test_every_link_is_filled(layout, rounds):
    assert filled(layout) == set(links(layout))
    assert len(plan(layout)) <= rounds


def test_what_cannot_be_filled_is_left_out():
    assert plan(Layout.of(1, 1e9)) == []
    # Host 0 is faster than all others together.
    assert filled(Layout.of(3, 1e8, {0: 1e9})) == set(links(Layout.of(3, 1e8))) - {
        "host 0 sending",
        "host 0 receiving",
    }
    # Each alone in its rack: their own links are wider than the way between.
    assert filled(Layout.of(2, 1e9, None, ((0,), (1,)), 1e8)) == {
        f"rack {rack} {way} the core" for rack in (0, 1) for way in ("to", "from")
    }


def test_fair_shares():
    layout = Layout.of(4, 100e6, {3: 10e6}, ((0, 1), (2, 3)), 60e6)
    shares, full = fair_shares(layout, [(0, 2), (1, 2), (0, 3), (0, 1)])
    # 10 into the slow host; the uplink leaves 25 each; host 0 has 65 left for its neighbour.
    assert shares == [25e6, 25e6, 10e6, 65e6]
    assert full == {
        "host 3 receiving",
        "rack 0 to the core",
        "rack 1 from the core",
        "host 0 sending",
    }


class Pretended:
    """Transfers that come out as told: factors on the fair shares, a round at a time."""

    def __init__(self, layout, factors):
        self.layout, self.factors, self.rounds = layout, factors, 0

    def round(self, flows, *, rate, settle, seconds):
        assert settle > 0
        assert seconds > 0
        assert rate == min(self.layout.rates)
        factor = self.factors[min(self.rounds, len(self.factors) - 1)]
        self.rounds += 1
        shares, _ = fair_shares(self.layout, flows)
        return Moved([share * PAYLOAD_SHARE * factor for share in shares], 0.25)


def test_a_link_that_keeps_to_its_rate():
    layout = Layout.of(3, 1e8)
    traffic = Pretended(layout, [0.99])
    checked = verify(layout, traffic)
    assert traffic.rounds == 1
    assert {check.link for check in checked} == set(links(layout))
    assert all(check.ratio == pytest.approx(0.99) for check in checked)


def test_a_moment_of_something_else_is_tried_again():
    layout = Layout.of(3, 1e8)
    traffic = Pretended(layout, [0.5, 0.98])
    verify(layout, traffic)
    assert traffic.rounds == 2


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (
            0.8,
            r"6 links are off .*: 76.51 Mbit/s of payload, where it should carry 95.64 Mbit/s; "
            r"the processors were 25% busy. Other programs, or rates this machine cannot carry",
        ),
        (1.2, r"Something has changed the shaping, or bytes pass beside it"),
    ],
)
def test_a_link_that_does_not(factor, message):
    layout = Layout.of(3, 1e8)
    with pytest.raises(NetlabError, match=message):
        verify(layout, Pretended(layout, [factor]))

"""Rates as people write them, who is in a network, and what a machine can carry."""

import pytest

from benchmarks.netlab import (
    NetlabError,
    Network,
    _envelope,
    _layout,
    _system,
    format_rate,
    parse_rate,
)
from benchmarks.netlab.__main__ import _parser
from benchmarks.netlab._links import Wiring
from benchmarks.netlab._run import fill_in

Layout = _layout.Layout


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1Gbit", 1e9),
        ("100 Mbit/s", 1e8),
        ("2.5g", 2.5e9),
        ("1Gbps", 1e9),
        ("1GBIT", 1e9),
        ("1e9", 1e9),
        ("1500kbps", 1.5e6),
        ("10000000", 1e7),
    ],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize(
    "text", ["", "fast", "1GBps", "1MBps", "1GBPS", "1Gbyte", "-1Mbit", "1 Tbit", "1GB", "nan"]
)
def test_what_is_no_rate(text):
    with pytest.raises(ValueError, match="write a number and kbit, Mbit or Gbit, as in 100Mbit"):
        parse_rate(text)


def test_a_rate_too_small_for_a_link():
    with pytest.raises(ValueError, match=r"is 100 bit/s: a shaped link carries 1 Mbit/s or more"):
        parse_rate("100")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": 0}, "hosts=0: a network has 1 to 250"),
        ({"hosts": 300}, "hosts=300: a network has 1 to 250"),
        ({"rate_bits_per_second": -1.0}, "rate_bits_per_second is -1 bit/s"),
        ({"rate_bits_per_second": float("nan")}, "rate_bits_per_second is nan"),
        ({"host_rates": {4: 1e8}}, "host_rates names host 4: there are 0 to 3"),
        ({"racks": ((0, 1), (1, 2))}, "racks names host 1 twice: a host stands in one rack"),
        ({"racks": ((0, 9),)}, "racks names host 9: there are 0 to 3"),
        ({"racks": ((0,), ())}, "a rack has at least one host"),
        ({"uplink_bits_per_second": 1e8}, r"without racks: .* as in racks=\(\(0, 1\), \(2, 3\)\)"),
    ],
)
def test_contradictions(settings, message):
    with pytest.raises(ValueError, match=message):
        Network(**{"hosts": 4, "rate_bits_per_second": 1e8} | settings)


def test_what_the_machine_cannot_carry():
    _envelope.check_load(16e9, 16, None)
    with pytest.raises(NetlabError, match="32 hosts at 1 Gbit/s on average can move 32 Gbit/s"):
        _envelope.check_load(32e9, 32, None)
    _envelope.check_load(32e9, 32, 32e9)


@pytest.mark.parametrize(
    ("user", "capabilities", "message"),
    [
        (1000, 0, "^root is needed to make network namespaces: this is user 1000; use sudo$"),
        (0, 1 << 12, "^root here lacks CAP_SYS_ADMIN, .*--cap-add=NET_ADMIN --cap-add=SYS_ADMIN"),
        (0, 0, "^root here lacks CAP_NET_ADMIN and CAP_SYS_ADMIN, which namespaces need"),
    ],
)
def test_without_root(user, capabilities, message, tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_text(
        f"Name:\tx\nUid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t{capabilities:x}\n"
    )
    monkeypatch.setattr(_system, "STATUS", status)
    monkeypatch.setattr(_system.shutil, "which", lambda name: f"/sbin/{name}")
    with (
        pytest.raises(NetlabError, match=message),
        Network(hosts=2, rate_bits_per_second=1e8),
    ):
        pass


def test_without_iproute2(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = _system.missing()[-2:]
    assert said == [
        f"the command {name!r} is not on the PATH: install the package iproute2"
        for name in ("ip", "tc")
    ]


def test_the_command_reads_its_arguments(capsys):
    words = (
        "run --hosts 3 --rate 1Gbit --host-rate 2=100Mbit --rack 0,1 --rack 2 --uplink 50Mbit "
        "-- worker --id {rank}"
    )
    options = _parser().parse_args(words.split())
    assert (options.hosts, options.rate, options.host_rate) == (3, 1e9, [(2, 1e8)])
    assert (options.rack, options.uplink) == ([(0, 1), (2,)], 5e7)
    assert options.argv == ["worker", "--id", "{rank}"]
    for wrong, said in (
        ("--rate quick", "'quick' is not understood"),
        ("--host-rate 100Mbit", "write HOST=RATE, as in 2=100Mbit"),
        ("--rack a,b", "write the numbers of hosts, as in 0,1"),
    ):
        with pytest.raises(SystemExit):
            _parser().parse_args(["run", *wrong.split(), "--", "true"])
        assert said in capsys.readouterr().err


def test_what_is_filled_in():
    words = fill_in(["--rank={rank}", "{other}", "{rank}of{size}"], {"rank": "3", "size": "4"})
    assert words == ["--rank=3", "{other}", "3of4"]


def test_pieces_are_those_of_the_slowest_link():
    """A piece passes slower links whole: none is to be long in debt for it."""

    def size(rate, **settings):
        layout = Network(hosts=2, rate_bits_per_second=rate, **settings).layout
        wiring = Wiring(layout, ["a", "b"], "switch", 1)
        return int(wiring.pieces().split()[-1])

    assert size(1e9) == 64 << 10
    assert size(1e8) < 32 << 10
    assert size(1e9, host_rates={1: 1e8}) == size(1e8)
    assert size(1e9, racks=((0, 1),), uplink_bits_per_second=1e8) == size(1e8)
    assert size(1e9, racks=((0, 1),)) == size(1e9)

"""The laboratory for real: shaped links, processes inside, and nothing left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median_low

import pytest

from benchmarks.netlab import NetlabError, Network, _envelope, _system
from benchmarks.netlab._layout import PAYLOAD_SHARE
from support import netlab_rank
from support.netlabs import name_of, of, running, wait_until_gone

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("_possible_here")]


def assert_carries(network, flow, rate, seconds=0.25):
    """All of the rate, and no more, when the machine has a moment."""
    shares = []
    with network.traffic(flow) as traffic:
        # One that stands still at the start of its time has less of it for what came meanwhile.
        while not shares or not 0.93 < shares[-1] < 1.05:
            assert len(shares) < 8, shares
            moved = traffic.round([flow], rate=rate, settle=0.15, seconds=seconds)
            shares.append(moved.bits_per_second[0] / PAYLOAD_SHARE / rate)
    assert median_low(shares) < 1.05, shares


CALLS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])).close()
except TimeoutError:
    sys.exit(3)
"""


def test_hosts_that_are_cut_hear_nothing_of_each_other_until_they_are_healed():
    with Network(hosts=3, rate_bits_per_second=1e8) as network:
        serve = "import socket\nwith socket.create_server(('', 7000)) as s:\n while 1: s.accept()"
        for host in (0, 1):
            network.popen(host, [sys.executable, "-c", serve])

        def reaches(host, other, timeout="0.3"):
            call = [sys.executable, "-c", CALLS, network.address(other), timeout]
            return network.popen(host, call, stderr=subprocess.DEVNULL).wait() == 0

        wait_until_gone(lambda: not (reaches(2, 0) and reaches(2, 1)))
        network.cut(0, 2)
        assert not reaches(2, 0)
        assert reaches(2, 1, "20")
        network.heal(0, 2)
        assert reaches(2, 0, "20")
        network.cut_off(1)
        assert not reaches(2, 1)
        assert reaches(2, 0, "20")
        network.reconnect(1)
        assert reaches(2, 1, "20")
        with pytest.raises(ValueError, match="host 1 twice: a link has two ends"):
            network.cut(1, 1)


@pytest.mark.slow
def test_links_counters_and_rates_that_change():
    machine = _system.run("ip", "-o", "link")
    with Network(hosts=2, rate_bits_per_second=1e7) as network:
        name = name_of(network)
        assert network.counters(0) == (0, 0)
        # What one sends at a rate is what the other receives, and no more bytes than fit.
        start = time.monotonic()
        assert_carries(network, (0, 1), 1e7)
        seconds = time.monotonic() - start
        sent, received = network.counters(0)
        assert 1e7 / 8 * 0.25 < sent < 1e7 / 8 * seconds
        assert network.counters(1).received_bytes == pytest.approx(sent, rel=0.02)
        assert received < sent / 10
        network.set_rate(0, 4e6)
        assert_carries(network, (0, 1), 4e6)
        assert network.counters(0).sent_bytes > sent
        with pytest.raises(ValueError, match="host 2: there are 0 to 1"):
            network.set_rate(2, 1e8)
        with pytest.raises(ValueError, match=r"rack 0: there are none; racks="):
            network.set_uplink(0, 1e8)
        with pytest.raises(NetlabError, match="this machine carries"):
            network.set_rate(0, 1e12)
        with pytest.raises(NetlabError, match="this network is up already"), network:
            pass
        # Nothing of it stands beside the machine's own interfaces.
        assert _system.run("ip", "-o", "link") == machine
    assert of(name) == []
    with pytest.raises(NetlabError, match="use it inside `with Network"):
        network.address(0)


def interface_counters(network, host):
    shown = _system.run("ip", "-n", network.namespace(host), "-s", "-j", "link", "show", "lab0")
    sent = json.loads(shown)[0]["stats64"]["tx"]
    return sent["bytes"], sent["packets"]


@pytest.mark.slow
def test_links_that_slow_down_under_load_carry_on_at_the_new_rate():
    """Whatever waits in their queues, and in pieces of the new size from then on."""
    serve = (
        "import socket\n"
        "with socket.create_server(('', 7000)) as server:\n"
        " print(flush=True)\n"
        " connection, _ = server.accept()\n"
        " while connection.recv(1 << 20): pass"
    )
    call = (
        "import socket, sys\n"
        "connection = socket.create_connection((sys.argv[1], 7000))\n"
        "while True: connection.sendall(bytes(1 << 20))"
    )
    with Network(
        hosts=3,
        rate_bits_per_second=1e9,
        racks=((0,), (1, 2)),
        uplink_bits_per_second=1e9,
    ) as network:
        server = [sys.executable, "-S", "-c", serve]
        with network.popen(2, server, stdout=subprocess.PIPE).stdout as said:
            said.readline()

        def received():
            return network.counters(2).received_bytes

        def carries(rate):
            """The whole of it for a while, and no more."""
            deadline, start = time.monotonic() + 10, received()
            while received() == start:
                assert time.monotonic() < deadline, "nothing passes any more"
            before, since = received(), time.monotonic()
            time.sleep(0.15)
            share = 8 * (received() - before) / (time.monotonic() - since) / rate
            return 0.85 < share < 1.15

        network.popen(0, [sys.executable, "-S", "-c", call, network.address(2)])
        wait_until_gone(lambda: received() < 1e7)
        for change, rate in (
            (lambda: network.set_rate(2, 5e8), 5e8),
            (lambda: network.set_uplink(0, 4e7), 4e7),
            (lambda: network.set_rate(0, 2e7), 2e7),
        ):
            change()
            wait_until_gone(lambda rate=rate: not carries(rate))
        before = interface_counters(network, 0)
        wait_until_gone(lambda: interface_counters(network, 0)[1] < before[1] + 20)
        sent, pieces = (
            now - then for now, then in zip(interface_counters(network, 0), before, strict=True)
        )
        assert sent / pieces < 2 * 4500  # of 64 kB they were, 5 kB is what the slow link asks for


@pytest.mark.slow
def test_racks_share_a_thin_link_and_two_laboratories_are_apart():
    with (
        Network(
            hosts=4,
            rate_bits_per_second=2e7,
            racks=((0, 1), (2, 3)),
            uplink_bits_per_second=1e7,
        ) as racks,
        Network(hosts=2, rate_bits_per_second=1e7) as other,
    ):
        assert racks.address(0).split(".")[:2] != other.address(0).split(".")[:2]
        assert name_of(racks) != name_of(other)
        checked = {check.link: check for check in racks.verify()}
        between = checked["rack 0 to the core"]
        assert between.expected_bits_per_second == pytest.approx(1e7 * PAYLOAD_SHARE)
        assert len(checked) == 12
        racks.set_uplink(0, None)
        racks.set_uplink(1, 15e6)
        assert_carries(racks, (0, 2), 15e6, seconds=0.5)


@pytest.mark.slow
def test_all_laboratories_together_stay_within_the_envelope(monkeypatch):
    monkeypatch.setattr(_envelope, "MOST_BITS_PER_SECOND", 1e11)
    too_much = r"other laboratories that are up 6\d(\.\d+)? Gbit/s"
    with Network(hosts=1, rate_bits_per_second=6e10) as one:
        with (
            pytest.raises(NetlabError, match=too_much),
            Network(hosts=1, rate_bits_per_second=6e10),
        ):
            pass
        with Network(hosts=1, rate_bits_per_second=1e10) as other:
            with pytest.raises(NetlabError, match=too_much):
                other.set_rate(0, 6e10)
            assert other.layout.rates == [1e10]
            one.set_rate(0, 1e10)
            other.set_rate(0, 6e10)


def test_processes_inside():
    with Network(hosts=2, rate_bits_per_second=1e8) as network:
        name = name_of(network)
        shown = network.popen(
            1,
            [
                sys.executable,
                "-S",
                "-c",
                "import os; print(os.environ['RANK'], os.listdir('/sys/class/net'))",
            ],
            env=os.environ | network.environment(1),
            stdout=subprocess.PIPE,
            text=True,
        )
        out, _ = shown.communicate(timeout=30)
        rank, interfaces = out.split(" ", 1)
        assert rank == "1"
        assert "lab0" in interfaces
        assert "eth0" not in interfaces
        with pytest.raises(
            FileNotFoundError, match="no command 'no-such-command' to run on a host"
        ):
            network.popen(0, ["no-such-command"])
        child = network.popen(
            0, ["sh", "-c", "setsid sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )
        grandchild = int(child.stdout.readline())
        child.stdout.close()
        assert running(grandchild)
    assert child.returncode == -9
    assert not running(grandchild)
    assert of(name) == []


@pytest.mark.slow
def test_gloo_and_gossip_over_the_links():
    rate = 5e7
    with Network(hosts=2, rate_bits_per_second=rate) as network:
        ranks = [
            network.popen(
                host,
                [sys.executable, netlab_rank.__file__, "zeromq"],
                env=os.environ | network.environment(host),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for host in range(2)
        ]
        told = [rank.communicate(timeout=90) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], told
        sent = [network.counters(host).sent_bytes for host in range(2)]
    answers = [json.loads(out) for out, _ in told]
    values, seconds, outcomes, mean = answers[0]
    size = 4 * netlab_rank.ELEMENTS
    assert values == 1
    assert seconds >= 0.9 * size / (rate / 8)
    assert outcomes["delivered"] == netlab_rank.STEPS
    assert answers[1][3] == mean
    # The all-reduce, the exchanges and the consensus: none of it passed beside the link.
    for bytes_ in sent:
        assert bytes_ > (netlab_rank.STEPS + 2) * size

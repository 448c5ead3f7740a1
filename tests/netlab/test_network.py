"""Hosts on one machine: shaped links, processes inside, and nothing left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.network import Network, NetworkError, _namespaces
from benchmarks.network._links import parse_rate

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(
    bool(_namespaces.missing()), reason="; ".join(_namespaces.missing())
)
INSIDE = ["sh", "-c", "echo inside; exec sleep 1000"]
SERVE = (
    "import socket\n"
    "with socket.create_server(('', 7000)) as server:\n"
    " while True:\n"
    "  connection, _ = server.accept()\n"
    "  while connection.recv(1 << 20): pass"
)
CALL = (
    "import socket, sys\n"
    "try: connection = socket.create_connection((sys.argv[1], 7000), float(sys.argv[2]))\n"
    "except OSError: sys.exit(3)"
)


def wait_until(is_so, timeout_seconds=100.0):
    deadline = time.monotonic() + timeout_seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def name_of(network):
    return network.switch.removesuffix("switch")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1Gbit", 1e9), ("100 Mbit/s", 1e8), ("2.5g", 2.5e9), ("1500kbps", 1.5e6), ("1e9", 1e9)],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("hosts", "rate"), [(0, 1e8), (300, 1e8), (2, -1.0), (2, float("nan"))])
def test_networks_that_cannot_be(hosts, rate):
    with pytest.raises(ValueError, match=r"hosts|bit/s"):
        Network(hosts=hosts, rate_bits_per_second=rate)


@needs_root
@pytest.mark.process
def test_processes_inside_end_with_the_block():
    network, children = Network(hosts=2, rate_bits_per_second=1e8), []

    def fail():
        with network:
            with pytest.raises(NetworkError, match="up already"), network:
                pass
            with pytest.raises(FileNotFoundError):
                network.popen(0, ["no-such-command"])
            with pytest.raises(ValueError, match="host 2"):
                network.set_rate(2, 1e8)
            with pytest.raises(NetworkError, match="carries"):
                network.set_rate(0, 1e12)
            show = "import os; print(os.environ['RANK'], *os.listdir('/sys/class/net'))"
            command = [sys.executable, "-S", "-c", show]
            environment = os.environ | network.environment(1)
            out = network.popen(1, command, env=environment, stdout=subprocess.PIPE).communicate()
            rank, *interfaces = out[0].decode().split()
            assert rank == "1"
            assert "lab0" in interfaces
            assert "eth0" not in interfaces
            children.append(network.popen(0, INSIDE, stdout=subprocess.PIPE))
            with children[0].stdout as said:
                said.readline()
            # They may be on their way in still.
            children.extend(network.popen(1, ["sleep", "1000"]) for _ in range(3))
            raise KeyboardInterrupt

    before = _namespaces.namespaces()
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [child.returncode for child in children] == [-9] * 4
    assert set(_namespaces.namespaces()) <= set(before)
    network.close()  # a second time: nothing
    with pytest.raises(NetworkError, match="inside `with Network"):
        network.address(0)


OWNER = """
import os, signal, subprocess, sys
from benchmarks.network import Network
with Network(hosts=2, rate_bits_per_second=1e8) as network:
    child = network.popen(1, sys.argv[1:], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(network.switch.removesuffix("switch"), child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_root
@pytest.mark.process
def test_the_next_network_removes_what_a_killed_process_left_and_nothing_else():
    command = [sys.executable, "-c", OWNER, *INSIDE]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, timeout=60)
    assert done.returncode == -9
    name, child = done.stdout.decode().split()
    assert len(_namespaces.namespaces(name)) == 3
    foreign = "gglab-foreign"
    _namespaces.run("ip", "netns", "add", foreign)
    try:
        with Network(hosts=1, rate_bits_per_second=1e8) as other:
            assert _namespaces.namespaces(name) == []
            assert _namespaces.started(int(child)) is None
            assert _namespaces.sweep() == [], "a living process's networks stay"
            assert len(_namespaces.namespaces(name_of(other))) == 2
        assert foreign in _namespaces.namespaces()
    finally:
        _namespaces.run("ip", "netns", "del", foreign)


@needs_root
@pytest.mark.process
def test_hosts_that_are_cut_reach_nothing_of_each_other_until_they_are_healed():
    with Network(hosts=3, rate_bits_per_second=1e8) as network:
        for host in (0, 1):
            network.popen(host, [sys.executable, "-S", "-c", SERVE])

        def reaches(host, other, timeout="0.3"):
            call = [sys.executable, "-S", "-c", CALL, network.address(other), timeout]
            return network.popen(host, call).wait() == 0

        wait_until(lambda: reaches(2, 0) and reaches(2, 1))
        network.cut(0, 2)
        assert not reaches(2, 0)
        assert reaches(2, 1, "20")
        network.heal(0, 2)
        assert reaches(2, 0, "20")
        network.cut_off(1)
        assert not reaches(2, 1)
        network.reconnect(1)
        assert reaches(2, 1, "20")
        with pytest.raises(ValueError, match="two ends"):
            network.cut(1, 1)

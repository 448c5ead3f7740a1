"""Laboratories leave nothing behind, however they end; their commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import Network, _record, _system
from support.netlabs import name_of, of, running, wait_until_gone

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("_possible_here")]
INSIDE = ["sh", "-c", "echo inside; exec sleep 1000"]


def test_an_exception_ends_what_runs_inside():
    network = Network(hosts=2, rate_bits_per_second=1e8)
    children, names = [], []

    def fail():
        with network:
            children.append(network.popen(0, INSIDE, stdout=subprocess.PIPE))
            children[0].stdout.readline()
            names.append(name_of(network))
            # They may be on their way in still.
            children.extend(network.popen(1, ["sleep", "1000"]) for _ in range(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    children[0].stdout.close()
    assert [child.returncode for child in children] == [-9] * 4
    assert of(names[0]) == []
    network.close()  # a second time: nothing


_OWNER = """
import os, signal, subprocess, sys
from benchmarks.netlab import Network
with Network(hosts=3, rate_bits_per_second=1e8) as network:
    child = network.popen(2, sys.argv[2:], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(network.namespace(0).rpartition("-")[0], child.pid, flush=True)
    if sys.argv[1] == "both":
        network._watchdog.kill()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(whom):
    done = subprocess.run(
        [sys.executable, "-c", _OWNER, whom, *INSIDE],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == -9
    name, child = done.stdout.split()
    return name.decode(), int(child)


def test_its_watchdog_cleans_up_after_kill_9():
    name, child = killed("owner")
    wait_until_gone(lambda: of(name))
    assert not running(child)


def test_the_next_start_cleans_up_after_a_dead_watchdog():
    name, child = killed("both")
    assert of(name)
    assert running(child)
    foreign = "gglab-foreign"
    _system.run("ip", "netns", "add", foreign)
    try:
        with Network(hosts=1, rate_bits_per_second=1e8):
            assert of(name) == []
            assert not running(child)
        assert foreign in _system.namespaces()
        assert foreign in _record.unrecorded()
    finally:
        _system.run("ip", "netns", "del", foreign)


def command(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.netlab", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_the_command_runs_everywhere_and_tells_who_failed():
    options = ["--no-verify", "--keep-going", "--hosts=3", "--rate=10Mbit", "--timeout=60"]
    script = "echo {rank} of $WORLD_SIZE at {address}, $MASTER_ADDR; exit {rank}"
    told = command("run", *options, "--", "sh", "-c", script)
    out, err = told.communicate(timeout=60)
    assert told.returncode in {1, 2}
    lines = sorted(out.splitlines())
    master = lines[0].rpartition(" ")[2]
    network = master.rpartition(".")[0]
    assert lines == [f"{i}| {i} of 3 at {network}.{i + 1}, {master}" for i in range(3)]
    assert sorted(err.splitlines()) == ["host 1: exit status 1", "host 2: exit status 2"]

"""`gossipgrad probe`."""

import json
import subprocess

import pytest

from gossipgrad import cli
from gossipgrad.cli import _probe
from gossipgrad.train import RunFailedError


@pytest.mark.process
def test_two_workers_here_measure_what_simulate_reads(tmp_path, capfd):
    out = tmp_path / "network.json"
    arguments = ["--nproc", "2", "--seconds", "0.5", "--sizes", "4096,65536", "--out", str(out)]
    assert cli.main(["probe", *arguments]) == 0
    shown = capfd.readouterr().out
    assert "exchange, usual pair" in shown
    assert "all-reduce of 2" in shown
    assert "0 and 1" in shown
    held = json.loads(out.read_text())
    assert held["world_size"] == 2
    assert "hosts" not in held
    arguments = ["--network", str(out), "--world-size", "2,8", "--steps", "10"]
    assert cli.main(["simulate", *arguments, "--strategy", "gossip,allreduce"]) == 0
    assert str(out) in capfd.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "1"], "a link has two ends, so start 2 or more"),
        (["--seconds", "0"], "seconds is 0.0: give a time above 0"),
        (["--timeout", "-1"], "timeout is -1.0: give a time above 0"),
        (["--sizes", "4096"], "must rise, and be two or more"),
        (["--sizes", "4kB,8kB"], "give whole numbers of bytes with commas"),
        (["--sizes", "4096,8191"], "must be multiples of 4 bytes"),
        (["--out", "nowhere/network.json"], "there is no folder nowhere"),
    ],
)
def test_mistakes_are_one_kind_line_and_start_nothing(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", None)
    assert cli.main(["probe", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gossipgrad: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_inside_a_world_nproc_is_the_worlds(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert cli.main(["probe", "--nproc", "4"]) == 2
    assert "torchrun has started 8 processes; leave --nproc out" in capsys.readouterr().err


class Ended(subprocess.Popen):
    """A worker that has ended."""

    def __init__(self, code, said=""):
        self.returncode, self.said = code, said

    def poll(self):
        return self.returncode

    def communicate(self):
        return "", self.said


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (
            [
                Ended(2, "gossipgrad: error: no collective: a rank has died or left\n"),
                Ended(2, "warning\ngossipgrad: error: rank 2 did not answer rank 1 within 5 s\n"),
            ],
            "rank 1 failed: rank 2 did not answer rank 1 within 5 s",
        ),
        (
            [Ended(2, "gossipgrad: error: rank 1 has died or left\n"), Ended(-9)],
            "rank 1 was killed by SIGKILL",
        ),
        ([Ended(0), Ended(1)], "rank 1 failed: without a word"),
    ],
)
def test_the_first_to_fail_is_named(workers, message):
    options = _probe.ProbeOptions()
    with pytest.raises(RunFailedError) as raised:
        _probe._await(workers, options)
    assert str(raised.value) == message

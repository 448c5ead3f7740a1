"""`gossipgrad train` started once on each of two machines, here with two addresses of one."""

import json
import os
import subprocess
import sys

import pytest

from gossipgrad.cli import main
from support.launched import count, press_ctrl_c, when
from support.processes import free_port
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.process


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "gossipgrad", "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ),
    )


def test_two_launchers_share_one_run_that_another_worker_joins(tmp_path):
    shared = ("--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}", "--nproc", 1)
    shared += ("--epochs", 100_000, "--out", tmp_path / "run", "--lr", 0.01)
    # Others need the processors until the third one has joined.
    shared += ("--faults", "delay rank=1 rounds=0-100000 seconds=0.2")
    other = start(*shared, "--node-rank", 1)
    joiner = []

    def join_and_end():
        joiner.append(start("--join", tmp_path / "run", "--threads", 1))
        until(lambda: count(tmp_path / "run", 2))
        other.terminate()
        press_ctrl_c()

    with when((tmp_path / "run" / "invitation.json").exists, join_and_end):
        assert main(["train", *map(str, shared), "--node-rank", "0"]) in (0, 130)
    for process in (other, *joiner):
        out, _ = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode in (0, 143), out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert [one["rank"] for one in summary["joined"]] == [2]


@pytest.mark.parametrize(
    "arguments",
    [("--nodes", "2"), ("--rendezvous", "nowhere"), ("--nodes", "2", "--node-rank", "2")],
)
def test_wrong_arguments_are_one_line(arguments, capsys):
    assert main(["train", *arguments]) == 2
    assert capsys.readouterr().err.startswith("gossipgrad: error: ")

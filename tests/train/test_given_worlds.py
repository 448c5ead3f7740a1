"""Worlds of torchrun and Slurm, of which a process is killed; commands are those of the guide."""

import contextlib
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gossipgrad.train import GossipConfig, TrainConfig, run
from support.agents import agents
from support.alone import each_step
from support.launched import count
from support.processes import free_port, run_processes
from support.waiting import until

pytestmark = pytest.mark.process
GUIDE = Path(__file__).parents[2] / "docs" / "run.md"
LOST_STORE = "the rendezvous store is lost"


def train_with_a_death(
    rank: int, store: Any, environs: list[dict[str, str]], out: str, victim: int
) -> tuple[int, dict | None, str]:
    """Trains; `victim` is killed after a few steps.

    The environment of each rank says in which world it is. The exit code, the summary if this rank
    put the run together, and what it said on stderr.
    """
    os.environ |= {**environs[rank], "GLOO_SOCKET_IFNAME": "lo"}

    def die(step: int) -> None:
        if rank == victim and step > 20:
            os.kill(os.getpid(), signal.SIGKILL)

    told, options = io.StringIO(), {"gossip": GossipConfig(topology="matching")}
    with (
        each_step(die),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(told),
    ):
        outcome = run(TrainConfig(epochs=4, log_every=1, trace=0, out=Path(out), options=options))
    return outcome.exit_code, outcome.summary, told.getvalue()


def guide_command(program: str, having: str) -> str:
    """The one command of the section on several machines that has such an option."""
    section = GUIDE.read_text().split("## Launchers that keep survivors")[1].split("\n## ")[0]
    (command,) = re.findall(rf"^{program} .*{having}.*$", section, re.MULTILINE)
    return command


def train_under_agents(command: str, tmp_path: Path, *, nodes: int, victim: int) -> dict:
    """Has the worker of one of some agents killed, and not the agent; the summary of the run."""
    out = tmp_path / "run"
    # The others come no further before it is killed, however late that is.
    few = f"--out {out} --epochs 4 --log-every 1 --trace 0"
    few += f" --faults 'delay rank={victim} round=40 seconds=100'"
    command = command.replace("--nnodes 8", f"--nnodes {nodes}").replace("--out runs/nodes", few)
    commands = [command.replace("--node-rank 0", f"--node-rank {node}") for node in range(nodes)]
    with agents(commands, tmp_path) as running:
        try:
            # A busy machine may take a minute to start so many that load torch themselves.
            until(lambda: count(out, victim) > 20)
            os.kill(running.workers()[victim], signal.SIGKILL)
            until((out / "summary.json").exists)
            # Those of the others have done what they had to, and were ended by nobody.
            until(lambda: not running.workers())
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{running.said()}") from error
        assert "Sending process" not in running.said(), "no agent ends a worker"
    summary = json.loads((out / "summary.json").read_text())
    assert not (out / "partial").exists()
    return summary


def holds(summary: dict, victim: int, *, steps: int, frozen: bool) -> None:
    """What is promised of a run that went on without a rank, and maybe without the store."""
    assert summary["lost_ranks"] == [victim]
    made = summary["steps_per_rank"]
    living = [each for rank, each in enumerate(made) if rank != victim]
    assert made[victim] is None
    if frozen:
        assert living == [steps] * len(living), "each goes on with its own share"
    else:  # what it left is dealt anew, with what it may have used without a word
        total = steps * summary["world_size"]
        assert total - summary["losses"][str(victim)]["step"] <= sum(living) <= total
    assert not summary["interrupted"]
    assert summary["accuracy"] > 0.8
    assert summary["model_is_consensus"] == (not frozen)
    assert summary["model_from_rank"] == (victim == 0)
    assert summary["losses"][str(victim)]["generation"] == (not frozen)
    if frozen:  # nobody is given up any more
        assert LOST_STORE in summary["lost_because"][str(victim)]


@pytest.mark.slow
def test_torchrun_with_an_agent_a_worker_goes_on_without_a_killed_worker(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = guide_command("torchrun", "is_host=0")
    command = command.replace("head:29500", f"127.0.0.1:{store.port}")
    summary = train_under_agents(command, tmp_path, nodes=3, victim=1)
    holds(summary, 1, steps=120, frozen=False)


@pytest.mark.slow
def test_torchrun_with_an_agent_a_worker_goes_on_without_rank_0_and_the_store(tmp_path):
    command = guide_command("torchrun", "--node-rank")
    command = command.replace("head", "127.0.0.1").replace("29500", str(free_port()))
    summary = train_under_agents(command, tmp_path, nodes=2, victim=0)
    # The store is in its agent, which ends a little later: the other may have given it up by then.
    holds(summary, 0, steps=180, frozen=summary["losses"]["0"]["generation"] == 0)


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.slow), 0])
def test_a_world_of_slurm_goes_on_without_a_killed_rank(tmp_path, victim):
    """As srun starts it if it lets the others live, which is up to its options."""
    assert guide_command("srun", "--no-kill --kill-on-bad-exit=0")
    job = str(free_port() - 20_000)
    environs = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "3",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_JOB_ID": job,
        }
        for rank in range(3)
    ]
    out = tmp_path / "run"
    answers = run_processes(
        3, train_with_a_death, environs, str(out), victim, may_die=(victim,), grouped=False
    )
    living = [rank for rank in range(3) if rank != victim]
    assert answers[victim] is None
    assert [answers[rank][0] for rank in living] == [0, 0]
    assert answers[living[1]][1] is None, "it is put together once, by the lowest"
    summary = answers[living[0]][1]
    holds(summary, victim, steps=120, frozen=victim == 0)
    told = [answers[rank][2].count("the membership stays as it is") for rank in living]
    assert told == [victim == 0] * 2, "each says it once"

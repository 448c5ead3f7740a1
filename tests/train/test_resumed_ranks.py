"""Every strategy and mode is resumed bit for bit; unlike numbers of ranks are resumed at all."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gossipgrad import checkpoint
from gossipgrad.train import GossipConfig, SparseConfig, TrainConfig, config_of_run, run
from support.processes import run_processes
from support.resumed_runs import assert_same_runs, state_of

pytestmark = pytest.mark.process
RANKS = 3  # where gloo's sums depend on where a value is in a message
STALE = GossipConfig(mode="stale", topology="matching")
EXACT = {
    "sync": {"options": {"gossip": GossipConfig(mode="sync", every=2)}},
    "overlap": {"options": {"gossip": GossipConfig(topology="matching")}, "lr_rule": "linear"},
    "sparse": {"strategy": "sparse", "options": {"sparse": SparseConfig(plan="single")}},
}


@dataclasses.dataclass(frozen=True)
class Act:
    """A run, or the resumption of a copy of one, from its second checkpoint or another."""

    name: str
    options: dict[str, Any]
    resumes: str | None = None
    at: int = 1
    world_size: int = RANKS


ACTS = [
    *(Act(name, options) for name, options in EXACT.items()),
    *(Act(f"{name}-again", {}, resumes=name) for name in EXACT),
    Act("two", {}, resumes="overlap", world_size=2),
    Act("over", {}, resumes="overlap", at=-1, world_size=2),
    Act("local", {"strategy": "local"}),
    Act("local-two", {}, resumes="local", world_size=2),
    Act("stale", {"options": {"gossip": STALE}, "checkpoint_every": 4}),
    Act("stale-again", {"epochs": 3, "checkpoint_every": 3, "trace": 2}, resumes="stale", at=-1),
]


def play(rank, store, folder, acts):
    """The summary of each act where this rank wrote it, or its error as text."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    warnings.simplefilter("ignore")
    found = {}
    for number, act in enumerate(acts):
        if rank >= act.world_size:
            continue
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(act.world_size)}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(1 + number)  # keys of its own in the store
        config = prepared(Path(folder), act) if rank == 0 else TrainConfig()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                found[act.name] = run(config).summary
            except Exception as error:
                found[act.name] = str(error)
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def prepared(folder, act):
    path = folder / act.name
    if act.resumes is None:
        usual = {"epochs": 1, "log_every": 1, "trace": 0, "batch_size": 64}
        usual |= {"checkpoint_every": 3, "keep_checkpoints": 9, "run_name": act.name}
        return TrainConfig(out=path, **usual | act.options)
    shutil.copytree(folder / act.resumes, path)
    step = checkpoint.steps(path / "checkpoints")[act.at]
    given = dataclasses.replace(config_of_run(path), resume_step=step, nproc=None)
    return dataclasses.replace(given, **act.options)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The folder of all runs, and what each act came to."""
    folder = tmp_path_factory.mktemp("runs")
    found = run_processes(RANKS, play, str(folder), ACTS, grouped=False)
    return folder, found[0]


@pytest.mark.parametrize("name", EXACT)
def test_a_run_that_was_cut_short_comes_to_what_it_would_have_bit_for_bit(played, name):
    folder, found = played
    assert found[f"{name}-again"]["steps"] == found[name]["steps"] == 8
    assert_same_runs(folder / f"{name}-again", folder / name, RANKS)


def test_another_number_of_ranks_begins_with_the_mean_and_has_the_rate_of_these(played):
    folder, found = played
    note = "the checkpoint of step 6 was saved by 3 ranks, and 2 continued from their consensus"
    assert any(note in each for each in found["two"]["notes"])
    assert checkpoint.find(folder / "two" / "checkpoints").members == (0, 1)
    assert found["two"]["steps"] == 12  # of 719 samples a rank
    for rank in range(2):
        (group,) = state_of(folder / "two", rank)["optimizers"][0]["groups"]
        assert group["lr"] == pytest.approx(0.0, abs=1e-9)
    # Resumed at its end, it is the mean, and nothing else.
    exported = load_file(folder / "over" / "model.safetensors")
    for name, mean in checkpoint.consensus(folder / "overlap" / "checkpoints").items():
        torch.testing.assert_close(exported[name], mean)


def test_replicas_that_never_met_are_not_made_one(played):
    said = "nproc is 2, but the checkpoint of step 6 is of 3 ranks, each of"
    assert said in played[1]["local-two"]


def test_mode_stale_is_resumed_with_checkpoints_and_a_trace(played):
    folder, found = played
    assert found["stale-again"]["epochs"] == 3
    before = checkpoint.steps(folder / "stale" / "checkpoints")
    assert checkpoint.steps(folder / "stale-again" / "checkpoints")[-1] > max(before)
    events = json.loads((folder / "stale-again" / "trace.json").read_text())["traceEvents"]
    for rank in range(RANKS):
        forward = [one for one in events if one["name"] == "forward" and one["pid"] == rank]
        assert len(forward) == 2

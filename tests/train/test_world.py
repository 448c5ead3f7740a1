import pytest

from gossipgrad.train import TrainConfig, run
from gossipgrad.train._world import World, find_world, slurm_rendezvous


def test_no_world_in_a_plain_shell():
    assert find_world({"PATH": "/bin"}) is None


def test_torchrun():
    environ = {"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "9"}
    assert find_world(environ) == World(rank=2, world_size=4, launcher="torchrun")


def test_slurm_needs_more_than_one_task():
    assert find_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert find_world({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == World(
        rank=1, world_size=2, launcher="Slurm"
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[07-09,12]", "node07"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("a-b[1-2],c[4-5]", "a-b1"),
    ],
)
def test_slurm_rendezvous_is_at_the_first_node(nodes, first):
    environ = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "20001"}
    assert slurm_rendezvous(environ) == {"MASTER_ADDR": first, "MASTER_PORT": "20001"}


def test_slurm_rendezvous_keeps_what_is_set():
    environ = {"SLURM_JOB_NODELIST": "n1", "MASTER_ADDR": "head", "MASTER_PORT": "1"}
    assert slurm_rendezvous(environ) == {"MASTER_ADDR": "head", "MASTER_PORT": "1"}


def test_nproc_must_fit_the_world(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"nproc is 3, but torchrun has started 2 .*leave --nproc"):
        run(TrainConfig(nproc=3))

"""`gossipgrad export`: the model of a checkpoint, without a worker."""

import pytest
import torch
from safetensors.torch import load_file

from gossipgrad import checkpoint, cli
from support.trees import assert_same


@pytest.fixture
def run(tmp_path):
    for step in (10, 20):
        for rank in range(2):
            state = {"model": {"w": torch.tensor([1.0, 3.0]) * rank * step}}
            checkpoint.save(
                tmp_path / "run" / "checkpoints", state, rank=rank, world_size=2, step=step
            )
    return tmp_path / "run"


def test_the_consensus_of_the_newest_step(run, tmp_path, capsys):
    out = tmp_path / "model.safetensors"
    assert cli.main(["export", str(run), str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert said.err == "step 20, consensus of ranks 0, 1\n"
    assert_same(load_file(out), {"w": torch.tensor([10.0, 30.0])})
    assert cli.main(["export", str(run), str(out)]) == 2
    assert f"{out} exists: give --force" in capsys.readouterr().err
    assert cli.main(["export", str(run / "checkpoints"), str(out), "--force", "--step", "10"]) == 0
    assert_same(load_file(out), {"w": torch.tensor([5.0, 15.0])})
    assert cli.main(["export", str(run), str(out), "--force", "--rank", "1"]) == 0
    assert_same(load_file(out), {"w": torch.tensor([20.0, 60.0])})


def test_what_cannot_be_written(run, tmp_path, capsys):
    out = str(tmp_path / "model.safetensors")
    (run / "checkpoints" / "step-000000020" / "rank-0001.json").unlink()
    for arguments, named in [
        ([str(run), out, "--step", "20"], "step 20"),
        ([str(tmp_path / "nowhere"), out], "nowhere"),
        ([str(run), out, "--key", "net"], "'net'"),
        ([str(run), str(tmp_path / "no" / "m")], "no folder"),
    ]:
        assert cli.main(["export", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("gossipgrad: error: ")
        assert named in err
    assert not list(tmp_path.glob("*.safetensors*"))

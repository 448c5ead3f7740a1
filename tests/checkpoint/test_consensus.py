"""One model of a checkpoint: the mean in 64 bits, written for others"""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from gossipgrad import checkpoint
from gossipgrad.comm import replica_state
from support.trees import assert_same


def save(directory, rank, model, *, step=1, world_size=3, **more):
    state = {"model": model, "optimizer": {"m": torch.ones(3)}, **more}
    checkpoint.save(directory, state, rank=rank, world_size=world_size, step=step)


def replicas():
    torch.manual_seed(0)
    return [
        {
            "w": torch.randn(5, 4) * 10.0 ** torch.arange(-3, 1),
            "narrow": torch.randn(100).bfloat16(),
            "wide": torch.randn(3, dtype=torch.float64),
            "complex": torch.randn(2, dtype=torch.complex64),
            "count": torch.tensor(7 + rank),
            "mask": torch.tensor([rank == 0]),
        }
        for rank in range(3)
    ]


@pytest.fixture
def saved(tmp_path):
    for rank, model in enumerate(replicas()):
        save(tmp_path / "run", rank, model)
    return tmp_path / "run"


def test_the_mean_is_rounded_once(saved):
    found = checkpoint.consensus(saved)
    models = replicas()
    for name in ("w", "narrow", "wide", "complex"):
        kind = torch.complex128 if name == "complex" else torch.float64
        wanted = sum(model[name].to(kind) for model in models) / 3
        assert_same(found[name], wanted.to(models[0][name].dtype))
    assert found["count"].item() == 7
    assert found["mask"].item() is True
    assert list(found) == list(models[0])


def test_residuals_are_added_before_rounding(tmp_path):
    one = torch.ones(2, dtype=torch.bfloat16)
    tiny = torch.tensor([2.0**-10, 0.0])
    save(tmp_path, 0, {"w": one}, world_size=2, residuals={"w": 3 * tiny})
    save(tmp_path, 1, {"w": one}, world_size=2, residuals={"w": 7 * tiny})
    wanted = torch.tensor([1 + 2.0**-7, 1.0], dtype=torch.bfloat16)
    assert_same(checkpoint.consensus(tmp_path), {"w": wanted})


def test_one_step_or_the_newest(saved):
    for rank in range(3):
        save(saved, rank, {"w": torch.full((2,), float(rank))}, step=2)
    save(saved, 0, {"w": torch.zeros(2)}, step=3)
    assert_same(checkpoint.consensus(saved), {"w": torch.ones(2)})
    wide = sum(model["wide"] for model in replicas()) / 3
    assert_same(checkpoint.consensus(saved, step=1)["wide"], wide)


def test_the_names_of_a_model_are_those_of_its_own_state(tmp_path):
    """Tied weights under all their names, without what the model does not save."""
    for rank in range(2):
        model = {"embed": torch.full((2,), float(rank)), "scratch": torch.ones(3)}
        save(tmp_path, rank, model, world_size=2, model_names={"head": "embed", "embed": "embed"})
    assert_same(
        checkpoint.consensus(tmp_path),
        {"head": torch.full((2,), 0.5), "embed": torch.full((2,), 0.5)},
    )
    out = checkpoint.export_safetensors(tmp_path, tmp_path / "one.safetensors", rank=1)
    assert_same(
        dict(sorted(load_file(out).items())), {"embed": torch.ones(2), "head": torch.ones(2)}
    )
    assert_same(checkpoint.consensus(tmp_path, key="optimizer"), {"m": torch.ones(3)})


def test_missing_and_mixed_ranks_are_refused_by_their_numbers(tmp_path):
    for rank in (1, 4):
        save(tmp_path, rank, {"w": torch.zeros(2)}, world_size=5)
    for step in (1, None):
        with pytest.raises(ValueError, match=r"step 1 .*rank 0, 2, 3"):
            checkpoint.consensus(tmp_path, step=step)
    with pytest.raises(ValueError, match=r"step 9 .*complete"):
        checkpoint.consensus(tmp_path, step=9)
    with pytest.raises(ValueError, match=r"step 9 .*nowhere"):
        checkpoint.consensus(tmp_path / "nowhere", step=9)
    save(tmp_path, 0, {"w": torch.zeros(2)}, world_size=2, step=2)
    save(tmp_path, 1, {"w": torch.zeros(2)}, world_size=3, step=2)
    with pytest.raises(ValueError, match=r"step 2 .*rank [01]"):
        checkpoint.consensus(tmp_path, step=2)


@pytest.mark.parametrize(
    ("models", "named"),
    [
        (({"w": torch.ones(2)}, {"w": torch.ones(3)}), r"rank-0001.*'w' .*\(3,\)"),
        (({"w": torch.ones(2)}, {"v": torch.ones(2)}), "rank-0001.*'v'"),
        (({"w": 3}, {"w": 3}), "'w' of type int"),
        (([1], [1]), "'model'"),
    ],
)
def test_models_that_have_no_mean(models, named, tmp_path):
    for rank, model in enumerate(models):
        save(tmp_path, rank, model, world_size=2)
    with pytest.raises(ValueError, match=named):
        checkpoint.consensus(tmp_path)


class Tied(nn.Module):
    """Of the kind that language models are: one matrix at both ends, and a table that is made."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_an_exported_replica_is_what_the_model_loads(tmp_path):
    model, loose = Tied(), nn.Parameter(torch.ones(4))
    state = replica_state(model, [torch.optim.SGD([*model.parameters(), loose], lr=0.1)])
    assert list(state["model_names"]) == list(model.state_dict())
    checkpoint.save(tmp_path / "run", state, rank=0, world_size=1, step=1)
    path = checkpoint.export_safetensors(tmp_path / "run", tmp_path / "model.safetensors")
    torch.manual_seed(7)
    again = Tied()
    again.load_state_dict(load_file(path))
    wanted, found = model.state_dict(), again.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert again.head.weight is again.embed.weight
    kept = checkpoint.load(tmp_path / "run", rank=0)["model"]
    assert {"table", "optimizer 0, parameter 3"} <= set(kept), "what goes on has all"


def plain(tmp_path):
    for rank in range(2):
        weights = {"w": torch.tensor([1.0, 4.0]) * rank, "b": torch.ones(2).bfloat16()}
        save(tmp_path / "run", rank, weights, step=120, world_size=2)
    return tmp_path / "run"


def test_a_file_for_others(tmp_path):
    run, out = plain(tmp_path), tmp_path / "model.safetensors"
    mine = tmp_path / f"{out.name}.partial"
    mine.write_text("mine")
    assert checkpoint.export_safetensors(run, out) == out
    wanted = {"b": torch.ones(2).bfloat16(), "w": torch.tensor([0.5, 2.0])}
    assert_same(dict(sorted(load_file(out).items())), wanted)
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["replica"] == "consensus of ranks 0, 1"
    assert metadata["step"] == "120"
    with pytest.raises(ValueError, match=r"model.safetensors exists"):
        checkpoint.export_safetensors(run, out)
    checkpoint.export_safetensors(run, out, rank=1, overwrite=True)
    assert_same(load_file(out)["w"], torch.tensor([1.0, 4.0]))
    with pytest.raises(ValueError, match="nowhere"):
        checkpoint.export_safetensors(run, tmp_path / "nowhere" / "model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {out.name, mine.name, "run"}
    assert mine.read_text() == "mine"


def test_types_that_the_file_cannot_hold(tmp_path):
    save(tmp_path / "run", 0, {"w": torch.ones(2, dtype=torch.complex128)}, world_size=1)
    with pytest.raises(ValueError, match=r"torch\.complex128"):
        checkpoint.export_safetensors(tmp_path / "run", tmp_path / "model.safetensors")

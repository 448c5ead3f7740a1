"""The benchmark's ranks are the library's: same selection, same residuals, same update."""

import pytest
import torch
from torch import nn

from benchmarks import sparse_convergence
from benchmarks.sparse_convergence import SparsifiedRanks
from gossipgrad.sparsification._reference import Reference

RANKS = 3


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("select", ["per_group", "per_tensor"])
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_ranks_in_one_process_are_those_of_the_reference(select, momentum):
    models = [make() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    reference = Reference(models, optimizers, [4], density=0.05, select=select, momentum=momentum)
    model = make()
    ranks = SparsifiedRanks(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        RANKS,
        loss=loss,
        density=lambda _: 0.05,
        per_tensor=select == "per_tensor",
        momentum=momentum,
    )
    for _ in range(6):
        batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(RANKS)]
        for replica, optimizer, (x, y) in zip(models, optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss(replica, x, y).backward()
        reference.step()
        ranks.step(batches)
    for ours, theirs in zip(model.parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for rank, residuals in enumerate(reference.e):
        assert torch.equal(ranks.residuals[rank], torch.cat([e.flatten() for e in residuals]))


def test_a_warm_up_falls_to_the_density_and_not_below():
    method = sparse_convergence.Method(0.01, warmup=True)
    found = [method.at(10 * epoch, 40) for epoch in range(6)]
    assert found == [0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]


@pytest.mark.parametrize("model", sparse_convergence.SETTINGS)
def test_a_warm_up_is_over_before_half_of_a_run(model):
    epochs = sparse_convergence.SETTINGS[model].epochs
    assert sparse_convergence.WARMUP_EPOCHS[model] <= epochs / 2


def test_differences_are_paired_by_seed():
    cell = sparse_convergence.Cell
    dense, sparse = sparse_convergence.Method(), sparse_convergence.Method(0.01)
    found = [
        (cell("lenet", 4, method, seed), {"accuracy": [0.1, value], "test_loss": [1.0]})
        for method, seed, value in (
            (dense, 0, 0.5),
            (dense, 1, 0.25),
            (sparse, 1, 0.5),
            (sparse, 0, 0.5),
            (sparse, 2, 0.75),
        )
    ]
    rows = {row["method"]: row for row in sparse_convergence.rows_of(found)}
    assert rows["density 0.01"]["difference_to_dense_points"] == [0.0, 25.0]
    assert rows["density 0.01"]["seeds"] == [0, 1, 2]
    assert rows["density 0.01"]["mean_difference_points"] == 12.5

import pytest
import torch
from torch import nn

from gossipgrad import data, models


@pytest.mark.parametrize(
    ("name", "dataset", "parameters"),
    [
        ("mlp", "digits", 26_122),
        ("mlp", "fashion-mnist", 118_282),
        ("lenet", "fashion-mnist", 61_706),
    ],
)
def test_size_and_output(name, dataset, parameters):
    info = data.info(dataset)
    model = models.build(name, info)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.zeros(5, *info.input_shape)).shape == (5, 10)


def test_equal_seeds_give_equal_replicas():
    replicas = []
    for _ in range(2):
        torch.manual_seed(3)
        replicas.append(nn.utils.parameters_to_vector(models.MLP(4, 2).parameters()))
    assert torch.equal(*replicas)


@pytest.mark.parametrize("name", models.NAMES)
def test_learns_a_handful_of_samples(name):
    torch.manual_seed(0)
    info = data.info("fashion-mnist")
    model = models.build(name, info)
    x, y = torch.randn(20, *info.input_shape), torch.arange(20) % 10
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(x).argmax(1) == y).all()


def test_lenet_refuses_small_images():
    with pytest.raises(
        ValueError, match=r"'lenet' takes .*\(1, 28, 28\).*'digits'.*use model 'mlp'"
    ):
        models.build("lenet", data.info("digits"))


def test_unknown_name_tells_the_known_ones():
    with pytest.raises(ValueError, match="model 'vgg' is not known; choose one of mlp, lenet"):
        models.build("vgg", data.info("digits"))

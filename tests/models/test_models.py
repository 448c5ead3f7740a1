"""What holds for every model."""

import io

import pytest
import torch

from gossipgrad.models import CIFARNet, GoogLeNet, LeNet, ResNet20, ResNet50, training_loss
from support.small_models import INPUTS, make_batch, make_model

every_model = pytest.mark.parametrize("name", INPUTS)


def parameter_count(make):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (lambda: LeNet(10), 61_706),
        (lambda: CIFARNet(10), 145_578),
        (lambda: ResNet20(10), 269_722),
        (lambda: ResNet50(1000), 25_557_032),
        (lambda: GoogLeNet(1000), 13_004_888),
        (lambda: GoogLeNet(1000, auxiliary=False), 6_624_904),
    ],
)
def test_parameter_counts_are_the_published_ones(make, published):
    assert parameter_count(make) == published


@every_model
def test_forward_and_backward(name):
    model = make_model(name)
    x, y = make_batch(name)
    loss = training_loss(model, x, y)
    assert loss.shape == ()
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name
    assert model.eval()(x).shape == (*y.shape, 10)


@every_model
def test_the_first_loss_is_that_of_guessing(name):
    """Logits start near zero: the loss starts near ln 10, and no class is preferred by far."""
    loss = training_loss(make_model(name), *make_batch(name)).item()
    heads = 1.6 if name == "googlenet" else 1.0
    assert loss / heads == pytest.approx(2.30, abs=1)


@every_model
def test_state_survives_a_file(name):
    model, other = make_model(name, seed=1), make_model(name, seed=2)
    x, y = make_batch(name)
    training_loss(model, x, y)  # BatchNorm moves
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert not torch.equal(model.eval()(x), other.eval()(x))
    other.load_state_dict(torch.load(file))
    assert torch.equal(model(x), other(x))


@every_model
def test_equal_seeds_give_equal_replicas(name):
    first, second, third = (make_model(name, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], third[key]) for key in first)


@pytest.mark.parametrize("name", ["mlp", "lenet", "cifarnet", "resnet20"])
def test_learns_sixteen_random_images(name):
    model = make_model(name)
    x, y = torch.randn(16, *INPUTS[name][1:]), torch.arange(16) % 10
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        training_loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(x).argmax(1) == y).all()

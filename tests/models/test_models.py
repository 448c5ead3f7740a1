"""What holds for every model."""

import io
from itertools import pairwise

import pytest
import torch

from gossipgrad.models import GPT, CIFARNet, GoogLeNet, LeNet, ResNet20, ResNet50, training_loss
from support.small_models import INPUTS, make_batch, make_model

every_model = pytest.mark.parametrize("name", INPUTS)


def parameter_count(make):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


@pytest.mark.parametrize(
    ("make", "published"),
    [
        # torchvision, ResNet50_Weights.IMAGENET1K_V1.meta["num_params"]
        (lambda: ResNet50(1000), 25_557_032),
        # torchvision, GoogLeNet_Weights.IMAGENET1K_V1.meta["num_params"]
        (lambda: GoogLeNet(1000, auxiliary=False), 6_624_904),
        # the same with aux_logits=True, as torchvision makes it without weights
        (lambda: GoogLeNet(1000), 13_004_888),
        # OpenAI's smallest GPT-2, as transformers counts it: num_parameters() of "gpt2"
        (lambda: GPT(50_257, context=1024, layers=12, width=768, heads=12), 124_439_808),
    ],
)
def test_parameter_counts_are_the_published_ones(make, published):
    assert parameter_count(make) == published


def test_resnet20_has_the_papers_parameters():
    """He et al. 2016, table 6: 0.27 million; no more digits are published there."""
    count = parameter_count(lambda: ResNet20(10))
    assert round(count / 1e6, 2) == 0.27
    # Section 4.2: 3x3 convolutions, 2n to each of the maps of 16, 32 and 64 channels, n = 3.
    channels = [3, *[16] * 7, *[32] * 6, *[64] * 6]
    weights = sum(9 * inputs * outputs for inputs, outputs in pairwise(channels))
    assert count == weights + 2 * sum(channels[1:]) + 64 * 10 + 10


def test_lenet_has_the_papers_parameters_where_it_is_the_papers():
    """LeCun et al. 1998, section II.B, tells those of each layer; C3 there sees some maps only."""
    with torch.device("meta"):
        model = LeNet(10)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in model.children()]
    c1, c3, c5, f6, output = counts
    assert (c1, c5, f6) == (156, 48_120, 10_164)
    assert c3 == 1_516 + (6 * 16 - 60) * 25, "60 of the 96 pairs of maps are connected"
    assert output == 84 * 10 + 10, "linear in place of radial basis functions"


def test_cifarnet_has_the_parameters_of_caffes_file():
    """`cifar10_quick_train_test.prototxt`: num_output 32, 32, 64, 64, 10 and kernel_size 5."""
    convolutions = sum(25 * i * o + o for i, o in pairwise([3, 32, 32, 64]))
    linear = sum(i * o + o for i, o in pairwise([64 * 4 * 4, 64, 10]))
    assert parameter_count(lambda: CIFARNet(10)) == convolutions + linear == 145_578


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


@pytest.mark.parametrize(
    "name",
    ["mlp", "lenet", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cifarnet", "resnet20"))],
)
def test_learns_sixteen_random_images(name):
    model = make_model(name)
    x, y = torch.randn(16, *INPUTS[name][1:]), torch.arange(16) % 10
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        training_loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(x).argmax(1) == y).all()

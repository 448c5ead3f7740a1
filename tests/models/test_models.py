"""What holds for every model, and what each says of itself."""

import io
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossipgrad import data, models
from gossipgrad.data import DatasetInfo
from gossipgrad.models import GPT, MLP, CIFARNet, LeNet, ResNet20, heads, training_loss
from support.small_models import INPUTS, make_batch, make_model

every_model = pytest.mark.parametrize("name", INPUTS)
DIGITS, FASHION, CIFAR, TEXT = map(data.info, ("digits", "fashion-mnist", "cifar10", "shakespeare"))


def parameter_count(make):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def test_parameter_counts_are_the_published_ones():
    # OpenAI's smallest GPT-2, as transformers counts it: num_parameters() of "gpt2"
    gpt2 = parameter_count(lambda: GPT(50_257, context=1024, layers=12, width=768, heads=12))
    assert gpt2 == 124_439_808
    # He et al. 2016, table 6: 0.27 million; no more digits are published there.
    resnet = parameter_count(lambda: ResNet20(10))
    assert round(resnet / 1e6, 2) == 0.27
    # Section 4.2: 3x3 convolutions, 2n to each of the maps of 16, 32 and 64 channels, n = 3.
    channels = [3, *[16] * 7, *[32] * 6, *[64] * 6]
    weights = sum(9 * inputs * outputs for inputs, outputs in pairwise(channels))
    assert resnet == weights + 2 * sum(channels[1:]) + 64 * 10 + 10
    # `cifar10_quick_train_test.prototxt`: num_output 32, 32, 64, 64, 10 and kernel_size 5
    convolutions = sum(25 * i * o + o for i, o in pairwise([3, 32, 32, 64]))
    linear = sum(i * o + o for i, o in pairwise([64 * 4 * 4, 64, 10]))
    assert parameter_count(lambda: CIFARNet(10)) == convolutions + linear


def test_lenet_has_the_papers_parameters_where_it_is_the_papers():
    """LeCun et al. 1998, section II.B, counts those of each layer; C3 there sees some maps only."""
    with torch.device("meta"):
        model = LeNet(10)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in model.children()]
    c1, c3, c5, f6, output = counts
    assert (c1, c5, f6) == (156, 48_120, 10_164)
    assert c3 == 1_516 + (6 * 16 - 60) * 25, "60 of the 96 pairs of maps are connected"
    assert output == 84 * 10 + 10, "linear in place of radial basis functions"


@every_model
def test_forward_and_backward(name):
    model = make_model(name)
    x, y = make_batch(name)
    loss = training_loss(model, x, y)
    # Logits start near zero: the loss starts near ln 10, and no class is preferred by far.
    assert loss.item() == pytest.approx(2.30, abs=1)
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name
    assert model.eval()(x).shape == (*y.shape, 10)


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


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (DIGITS, ["mlp", "mlp-wide", "resnet20"]),
        (FASHION, ["mlp", "mlp-wide", "lenet", "resnet20"]),
        (CIFAR, ["mlp", "mlp-wide", "cifarnet", "resnet20"]),
        (TEXT, ["gpt"]),
    ],
)
def test_every_model_takes_the_data_it_says_it_takes(dataset, names):
    is_text = dataset.kind == "text"
    x = torch.zeros(2, *dataset.input_shape, dtype=torch.int64 if is_text else torch.float32)
    labels = x.shape if is_text else (2,)
    for name in models.NAMES:
        if name in names:
            model = models.build(name, dataset).eval()
            assert model(x).shape == (*labels, dataset.num_classes)
        else:
            with pytest.raises(ValueError, match=f"'{name}'") as refused:
                models.build(name, dataset)
            assert all(repr(fitting) in str(refused.value) for fitting in names), "the way out"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="vgg") as refused:
        models.build("vgg", DIGITS)
    assert all(name in str(refused.value) for name in models.NAMES)


def test_channels_sizes_and_classes_are_the_users():
    info = DatasetInfo(
        name="own", input_shape=(1, 33, 47), num_classes=7, train_samples=9, test_samples=9
    )
    for name in ("mlp", "resnet20"):
        assert models.build(name, info).eval()(torch.zeros(2, 1, 33, 47)).shape == (2, 7)


def shapes_of(model, x):
    """The output shape of each child, by name."""
    shapes = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, __, output, name=name: shapes.__setitem__(name, tuple(output.shape[1:]))
        )
    with torch.no_grad():
        model.eval()(x)
    return shapes


def test_layers_have_the_sizes_of_their_tables():
    shapes = shapes_of(CIFARNet(10), torch.zeros(1, 3, 32, 32))
    assert [shapes[name] for name in ("conv2", "conv3", "fc1")] == [(32, 16, 16), (64, 8, 8), (64,)]
    shapes = shapes_of(ResNet20(10), torch.zeros(1, 3, 32, 32))
    stages = [shapes[f"stages.{stage}"] for stage in range(3)]
    assert stages == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_resnet20_shortcut_is_every_second_position_and_zeros():
    block = ResNet20(10).stages[1][0]
    nn.init.zeros_(block.norm2.weight)  # nothing but the shortcut is left
    x = torch.rand(3, 16, 6, 6)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert not out[:, 16:].any()


def test_heads_are_what_a_model_says_or_its_last_linear_layer():
    assert heads(MLP(4, 3))[0].out_features == 3
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    assert heads(plain) == (plain[1],)
    assert heads(nn.ReLU()) == ()


class Returns(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits


def test_the_loss_is_cross_entropy_over_all_labels():
    logits, y = torch.randn(6, 10), torch.arange(6)
    assert torch.equal(
        training_loss(Returns(logits), torch.zeros(6), y), F.cross_entropy(logits, y)
    )
    logits, y = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [4, 3, 2]])
    by_hand = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(training_loss(Returns(logits), torch.zeros(2, 3), y), by_hand)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        training_loss(Returns(torch.zeros(2, 10)), torch.zeros(2, 3), torch.zeros(2, 3).long())

"""What holds for every model, and what each says of itself."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossipgrad import data, models
from gossipgrad.data import DatasetInfo
from gossipgrad.models import GPT, MLP, CIFARNet, LeNet, ResNet20, heads, training_loss

# Of each: how it is made, for ten classes, and the shape of a batch of four.
_MAKERS = {
    "mlp": lambda: MLP(64, 10),
    "lenet": lambda: LeNet(10),
    "cifarnet": lambda: CIFARNet(10),
    "resnet20": lambda: ResNet20(10),
    "gpt": lambda: GPT(10, context=16, layers=2, width=32),
}
INPUTS = {
    "mlp": (4, 1, 8, 8),
    "lenet": (4, 1, 28, 28),
    "cifarnet": (4, 3, 32, 32),
    "resnet20": (4, 3, 16, 16),
    "gpt": (4, 16),
}


def make_model(name, seed=0):
    torch.manual_seed(seed)
    return _MAKERS[name]()


def make_batch(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = INPUTS[name]
    if name == "gpt":
        x, y = torch.randint(10, (2, *shape), generator=generator)
        return x, y
    x = torch.randn(shape, generator=generator)
    return x, torch.randint(10, shape[:1], generator=generator)


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
    with pytest.raises(ValueError, match="mlp-wide"):
        models.build("vgg", DIGITS)


def test_channels_sizes_and_classes_are_the_users():
    info = DatasetInfo(
        name="own", input_shape=(1, 33, 47), num_classes=7, train_samples=9, test_samples=9
    )
    for name in ("mlp", "resnet20"):
        assert models.build(name, info).eval()(torch.zeros(2, 1, 33, 47)).shape == (2, 7)


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

"""What is particular to the image models."""

import pytest
import torch
from torch import nn

from gossipgrad.models import (
    AuxiliaryLogits,
    CIFARNet,
    GoogLeNet,
    ResNet20,
    ResNet50,
)
from gossipgrad.models._resnet20 import _Block


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


def test_cifarnet_pools_as_caffe_does():
    shapes = shapes_of(CIFARNet(10), torch.zeros(1, 3, 32, 32))
    assert shapes["conv2"] == (32, 16, 16)
    assert shapes["conv3"] == (64, 8, 8)
    assert shapes["fc1"] == (64,)


def test_resnet20_stages():
    shapes = shapes_of(ResNet20(10), torch.zeros(1, 3, 32, 32))
    stages = [shapes[f"stages.{stage}"] for stage in range(3)]
    assert stages == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_resnet20_shortcut_is_every_second_position_and_zeros():
    block = _Block(2, 4, stride=2)
    nn.init.zeros_(block.norm2.weight)  # nothing but the shortcut is left
    x = torch.rand(3, 2, 6, 6)
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert not out[:, 2:].any()


def test_resnet50_stages_and_strides():
    model = ResNet50(10)
    shapes = shapes_of(model, torch.zeros(1, 3, 64, 96))
    stages = [shapes[f"stages.{stage}"] for stage in range(4)]
    assert stages == [(256, 16, 24), (512, 8, 12), (1024, 4, 6), (2048, 2, 3)]
    assert shapes["stages.1.0.conv1"] == (128, 16, 24)  # version 1.5: the 3x3 strides
    assert shapes["stages.1.0.conv2"] == (128, 8, 12)


def test_googlenet_stages():
    shapes = shapes_of(GoogLeNet(10), torch.zeros(1, 3, 224, 224))
    assert shapes["stem"] == (192, 28, 28)
    assert shapes["inception3"] == (480, 14, 14)
    assert shapes["inception4a"] == (512, 14, 14)
    assert shapes["inception4e"] == (832, 14, 14)
    assert shapes["inception5"] == (1024, 7, 7)


@pytest.mark.parametrize("kind", [ResNet20, ResNet50, GoogLeNet])
def test_channels_and_classes_are_the_users(kind):
    model = kind(7, channels=1).eval()
    assert model(torch.zeros(2, 1, 33, 47)).shape == (2, 7)


def test_googlenet_has_auxiliary_logits_in_training_only():
    model, x = GoogLeNet(5), torch.randn(2, 3, 32, 32)
    out = model(x)
    assert isinstance(out, AuxiliaryLogits)
    assert [logits.shape for logits in (out.logits, *out.auxiliary)] == [(2, 5)] * 3
    assert model.eval()(x).shape == (2, 5)
    assert GoogLeNet(5, auxiliary=False)(x).shape == (2, 5)


def test_googlenet_evaluates_alike_with_and_without_auxiliary_heads():
    full, bare = GoogLeNet(5).eval(), GoogLeNet(5, auxiliary=False).eval()
    left = bare.load_state_dict(full.state_dict(), strict=False)
    assert not left.missing_keys
    assert {key.split(".")[0] for key in left.unexpected_keys} == {"heads"}
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(full(x), bare(x))

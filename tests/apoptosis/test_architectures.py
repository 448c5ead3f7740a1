"""Small versions of known architectures: duplicates go, the function stays, training continues."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gossipgrad as gg
from gossipgrad.apoptosis import find
from support.shrinking import random, seen


class Basic(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.one = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.down = nn.Identity()
        if stride > 1 or inputs != width:
            convolution = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.down = nn.Sequential(convolution, nn.BatchNorm2d(width))

    def forward(self, x):
        h = F.relu(self.norms[0](self.one(x)), inplace=True)
        return F.relu(self.norms[1](self.two(h)) + self.down(x))


class Bottleneck(nn.Module):
    """A block of ResNet-50, or of ResNeXt, whose middle convolution is in groups."""

    def __init__(self, inputs, width, stride, groups=1):
        super().__init__()
        self.one = nn.Conv2d(inputs, width, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.three = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, 2 * width))
        convolution = nn.Conv2d(inputs, 2 * width, 1, stride, bias=False)
        self.down = nn.Sequential(convolution, nn.BatchNorm2d(2 * width))

    def forward(self, x):
        h = F.relu(self.norms[0](self.one(x)))
        h = F.relu(self.norms[1](self.two(h)))
        return F.relu(self.norms[2](self.three(h)) + self.down(x))


def resnet(*blocks, out):
    stem = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, 4)
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


class Dense(nn.Module):
    """A layer of DenseNet: its channels join those that it reads."""

    def __init__(self, inputs, growth):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm2d(inputs), nn.BatchNorm2d(2 * growth)
        self.one = nn.Conv2d(inputs, 2 * growth, 1, bias=False)
        self.two = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x):
        h = self.one(F.relu(self.norm(x)))
        return torch.cat([x, self.two(F.relu(self.inner(h)))], 1)


class Inverted(nn.Module):
    """A block of MobileNetV2: a depthwise convolution between two narrow ends."""

    def __init__(self, width, expanded):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, expanded, 1, bias=False), nn.BatchNorm2d(expanded), nn.ReLU6()),
            nn.Conv2d(expanded, expanded, 3, padding=1, groups=expanded, bias=False),
            *(nn.BatchNorm2d(expanded), nn.ReLU6()),
            *(nn.Conv2d(expanded, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x):
        return x + self.layers(x)


class UNet(nn.Module):
    """One level of a U-Net: a transposed convolution, and a concatenation with what came before."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.middle = nn.Conv2d(8, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.join = nn.Conv2d(14, 7, 3, padding=1)
        self.out = nn.Conv2d(7, 2, 1)

    def forward(self, x):
        before = F.silu(self.norm(self.down(x)))
        h = F.relu(self.up(F.relu(self.middle(F.avg_pool2d(before, 2)))))
        return self.out(F.relu(self.join(torch.cat([before, h], 1))))


class Attention(nn.Module):
    """Fused or separate projections; fewer heads of keys and values than of queries; rotations."""

    def __init__(self, width, heads, keys=None, *, fused, rotates=False, by_hand=False):
        super().__init__()
        self.head, self.rotates, self.by_hand = width // heads, rotates, by_hand
        inner = (keys or heads) * self.head
        self.fused = nn.Linear(width, 3 * width) if fused else None
        if not fused:
            self.q = nn.Linear(width, width, bias=False)
            self.k = nn.Linear(width, inner, bias=False)
            self.v = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(width, width)

    def rotate(self, x):
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.ones(self.head).to(x)
        one, two = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

    def forward(self, x):
        if self.fused is not None:
            q, k, v = self.fused(x).chunk(3, -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (q, k, v))
        if self.rotates:
            q, k = self.rotate(q), self.rotate(k)
        repeats = q.shape[1] // k.shape[1]
        k, v = (each[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for each in (k, v))
        if self.by_hand:
            h = (q @ k.mT / self.head**0.5).softmax(-1) @ v
        else:
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """Gate and value in one projection."""

    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width, attention, perceptron, norm=nn.LayerNorm):
        super().__init__()
        self.attention, self.perceptron = attention, perceptron
        self.norms = nn.ModuleList(norm(width) for _ in range(2))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


def perceptron(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 2, 2)
        self.position = nn.Parameter(0.1 * torch.randn(16, 12))
        attention = Attention(12, 4, fused=True, by_hand=True)
        self.block = Block(12, attention, perceptron(12))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        h = self.patches(x).flatten(2).mT + self.position
        return self.head(self.block(h).mean(1))


class Language(nn.Module):
    """GPT-2 or Llama, with or without a head that is tied to the embedding."""

    def __init__(self, *blocks, norm, is_tied):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 12), norm(12)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(12, 11, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def gpt(is_tied=False):
    block = Block(12, Attention(12, 4, fused=True), perceptron(12))
    return Language(block, norm=nn.LayerNorm, is_tied=is_tied)


def llama():
    attention = Attention(12, 6, 3, fused=False, rotates=True)
    return Language(
        Block(12, attention, SwiGLU(12, 20), nn.RMSNorm), norm=nn.RMSNorm, is_tied=False
    )


NORMS = nn.LayerNorm, nn.RMSNorm

# What is found: by name the number of neurons, each of which may be several entries.
IMAGES, TOKENS = (16, 3, 8, 8), (16, 7)
MODELS = {
    "ResNet-18": (
        lambda: resnet(Basic(8, 8, 1), Basic(8, 12, 2), out=12),
        {"0": 8, "4.one": 8, "5.one": 12, "5.two": 12},
    ),
    "ResNet-50": (
        lambda: resnet(Bottleneck(8, 6, 1), Bottleneck(12, 8, 2), out=16),
        {"0": 8, "4.one": 6, "4.two": 6, "4.three": 12, "5.one": 8, "5.two": 8, "5.three": 16},
    ),
    "ResNeXt": (
        lambda: resnet(Bottleneck(8, 12, 1, groups=6), out=24),
        {"0": 8, "4.one": 6, "4.three": 24},
    ),
    "DenseNet": (
        lambda: resnet(Dense(8, 4), Dense(12, 4), nn.BatchNorm2d(16), out=16),
        {"0": 8, "4.one": 8, "4.two": 4, "5.one": 8, "5.two": 4},
    ),
    "MobileNetV2": (
        lambda: resnet(Inverted(8, 16), Inverted(8, 16), out=8),
        {"0": 8, "4.layers.0": 16, "5.layers.0": 16},
    ),
    "U-Net": (UNet, {"down": 4, "middle": 12, "up": 6, "join": 7}),
    "ViT": (ViT, {"patches": 12, "block.attention.fused": 4, "block.perceptron.0": 48}),
    "GPT-2": (gpt, {"embedding": 12, "blocks.0.attention.fused": 4, "blocks.0.perceptron.0": 48}),
    "GPT-2, tied": (
        lambda: gpt(is_tied=True),
        {"blocks.0.attention.fused": 4, "blocks.0.perceptron.0": 48},
    ),
    "Llama": (
        llama,
        {"embedding": 12, "blocks.0.attention.q": 3, "blocks.0.perceptron.up": 20},
    ),
}


def inputs(name, seed):
    if name.startswith(("GPT-2", "Llama")):
        return torch.randint(11, TOKENS, generator=torch.Generator().manual_seed(seed))
    return random(*IMAGES, seed=seed)


def settled(name):
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    with torch.no_grad():
        for seed in range(3):
            model(inputs(name, seed))  # statistics of BatchNorm
    return model


@torch.no_grad()
def plant_duplicates(model, found):
    """Make the last neuron of each kind the same as its first, or what a norm makes zero of."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for each in found.neurons:
        norms = [m for m in map(model.get_submodule, each.companions) if isinstance(m, NORMS)]
        readers = {f"{c}.weight {each.input_of(model, c)[0]}" for c in each.consumers}
        for key, held in each.entries.items():
            name, dim = key.rsplit(" ", 1)
            if key not in readers:
                moved = tensors[name].movedim(int(dim), 0)
                last = held.indices[-1]
                if not norms:
                    moved[last] = moved[held.indices[0]].clone()
                elif not isinstance(model.get_submodule(name.rpartition(".")[0]), NORMS):
                    moved[last] = 0
                    if isinstance(norms[0], nn.LayerNorm):
                        moved[: int(last)] -= moved[: int(last)].mean(0)


@pytest.mark.parametrize("name", MODELS)
def test_duplicates_go_and_the_function_stays(name):
    model = settled(name)
    x = inputs(name, 9)
    found = find(model, x)
    assert {each.name: each.width for each in found.neurons} == MODELS[name][1]
    assert all(found.refused.values())
    plant_duplicates(model, found)
    model.eval()
    before = model(x).detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(x).square().mean().backward()
    optimizer.step()
    for parameter, old in zip(model.parameters(), settled(name).parameters(), strict=True):
        parameter.data.copy_(old)  # only the optimizer's state stays
    plant_duplicates(model, found)
    plan = seen(model, x, [inputs(name, seed) for seed in range(8)], budget=1e-9)
    assert {each.neurons.name for each in plan.mergings} == {*MODELS[name][1]}
    plan.apply(model, [optimizer])
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-5, atol=1e-5)
    for parameter, state in optimizer.state.items():
        assert all(value.shape == parameter.shape for value in state.values() if value.ndim)
    model.train()
    model(x).square().mean().backward()
    optimizer.step()
    wide = settled(name)
    gg.rebuild(wide, model.state_dict())
    torch.testing.assert_close(wide.eval()(x), model.eval()(x))


@pytest.mark.parametrize("name", MODELS)
def test_two_events_follow_each_other(name):
    model = settled(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"every": 4, "batches": 4, "events": 2, "budget": 0.5, "round_to": 2}
    before = sum(p.numel() for p in model.parameters())
    with gg.shrink(model, optimizer, example_input=inputs(name, 9), **settings) as session:
        for seed in range(9):
            model(inputs(name, seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.stats().removed > 0
        found = {n.name: n.width for n in find(model, inputs(name, 9)).neurons}
        assert found == {name: width for name, width in session.widths().items() if width > 1}
    assert sum(p.numel() for p in model.parameters()) < before

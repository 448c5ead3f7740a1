"""Which layers may shrink is found out, and what cannot be followed stays, with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gossipgrad as gg
from gossipgrad.apoptosis import find


class Model(nn.Module):
    """Layers a to d, and what is done with them."""

    def __init__(self, forward, norm=None):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.c, self.d = nn.Linear(6, 8), nn.Linear(6, 8)
        self.norm = norm or nn.Identity()
        self.does = forward

    def forward(self, x, *scale, **named):
        return self.does(self, x, *scale, **named)


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def hard_coded(m, x):
    return m.b(F.relu(m.a(x)).view(-1, 8))


def branches(m, x):
    h = F.relu(m.a(x))
    for part in (h,):
        if x.shape[0] > 1:
            h = part * 2 + 1
    return m.b(F.dropout(h, 0.5, m.training))


def leaks(m, x):
    h = F.relu(m.a(x))
    return m.b(h) + Opaque.apply(h).sum()


def only_in_training(m, x):
    h = F.relu(m.a(x))
    return m.b(h) + (h.sum() if m.training else 0.0)


CASES = {
    "plain": (lambda m, x: m.b(F.gelu(m.a(x))), {"a": ("b",)}),
    "branches and numbers": (branches, {"a": ("b",)}),
    "gated": (lambda m, x: m.b(F.silu(m.c(x)) * m.d(x)), {"c": ("b",)}),
    "two readers": (lambda m, x: m.b(m.a(x).tanh()) + F.linear(m.c(x), m.b.weight), {}),
    "width in a view": (hard_coded, {}),
    "softmax": (lambda m, x: m.b(m.a(x).softmax(-1)), {}),
    "sum of layers": (lambda m, x: m.b(F.relu(m.c(x) + m.d(x))), {"c": ("b",)}),
    "output": (lambda m, x: (m.b(h := F.relu(m.a(x))), h), {}),
    "unseen reader": (leaks, {}),
    "reader in training": (only_in_training, {}),
    "called twice": (lambda m, x: m.b(F.relu(m.a(m.b(F.relu(m.a(x)))))), {"a": ("b",)}),
    "transposed": (lambda m, x: m.b(F.relu(m.a(x)).T.contiguous().T), {"a": ("b",)}),
    "in parts": (lambda m, x: m.b(torch.cat(F.relu(m.a(x)).chunk(2, 1), 1)), {"a": ("b",)}),
    "twice in one": (lambda m, x: m.b(torch.cat([h := m.c(x)[:, :4], h], 1)), {}),
    "mixed": (lambda m, x: m.b(F.relu(m.a(x)) @ torch.eye(8)), {}),
    "sorted": (lambda m, x: m.b(F.relu(m.a(x)).sort().values), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_may_shrink(case):
    forward, expected = CASES[case]
    model = Model(forward)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    found = find(model, torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))
    assert {each.name: each.consumers for each in found.neurons} == expected
    for name in ("a", "b", "c", "d"):
        assert name in expected or name in found.refused or case in ("gated", "sum of layers")
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


class HandMadeRMSNorm(nn.Module):
    """As in Llama, or as in Gemma, whose gains are 1 and the weight."""

    def __init__(self, ahead):
        super().__init__()
        self.weight, self.ahead = nn.Parameter(torch.ones(8)), ahead

    def forward(self, x):
        return (self.ahead + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    ("norm", "units"),
    [
        (nn.LayerNorm(8), 8),
        (nn.RMSNorm(8), 8),
        (HandMadeRMSNorm(0), 8),
        (HandMadeRMSNorm(1), 0),
        (nn.GroupNorm(4, 8), 4),
        (nn.LayerNorm(8, elementwise_affine=False), 0),
        (nn.RMSNorm(8, elementwise_affine=False), 0),
    ],
    ids=lambda of: str(of).replace("\n", " "),
)
def test_norms_over_neurons_let_them_go_if_they_have_gains_and_over_groups_groups_go(norm, units):
    model = Model(lambda m, x: m.b(F.relu(m.norm(m.a(x)))), norm)
    found = find(model, torch.randn(3, 6))
    assert [each.width for each in found.neurons] == [units] * bool(units)
    if not units:
        assert any(why in found.refused["a"] for why in ("norm", "mean", "something else"))


@pytest.mark.filterwarnings("ignore:input's size at dim=1")  # torch: of one without gains
@pytest.mark.parametrize("options", [{}, {"affine": True}, {"track_running_stats": True}])
def test_channels_behind_an_instance_norm_go_alone(options):
    layers = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, **options), nn.ReLU(), nn.Conv2d(8, 4, 1)
    found = find(nn.Sequential(*layers), torch.randn(2, 3, 6, 6))
    assert [(each.name, each.width) for each in found.neurons] == [("0", 8)]
    assert {"1"} >= {*found.neurons[0].companions}


def keep(module, args, output):
    module.seen = output


def test_features_that_leave_the_model_stay_whatever_the_way():
    def stores(m, x):
        m.features = F.relu(m.a(x))
        return m.b(m.features)

    plain = lambda m, x: m.b(F.relu(m.a(x)))  # noqa: E731
    assert find(Model(stores), torch.randn(3, 6)).neurons == ()
    hooked = Model(plain)
    hooked.a.register_forward_hook(keep)
    found = find(hooked, torch.randn(3, 6))
    assert found.neurons == ()
    assert "kept beyond the run" in found.refused["a"]


def test_arguments_of_the_model_and_hand_made_groups():
    model = Model(lambda m, x, scale: m.b(F.relu(m.a(x)) * scale))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 6)
    assert len(find(model, (x, 2.0)).neurons) == len(find(model, {"x": x, "scale": 2.0}).neurons)
    found = gg.shrink(model, optimizer, example_input=(x, 2.0))
    by_hand = gg.shrink(model, optimizer, groups=[gg.Neurons("a", "b")])
    with found, by_hand:
        assert found.widths() == by_hand.widths() == {"a": 8}
        assert "read by b" in found.describe()
        assert "model's" in found.describe()


def test_wrapped_models_are_refused_with_the_way_out():
    class Wrapped(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    model = Wrapped(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="wrap=DistributedDataParallel"):
        gg.shrink(model, optimizer, example_input=torch.ones(1, 2))


@pytest.mark.parametrize(
    ("groups", "mode", "width"), [(1, "reflect", 4), (1, "circular", 4), (2, "zeros", 2)]
)
def test_padding_and_groups_of_convolutions(groups, mode, width):
    conv = nn.Conv2d(4, 4, 3, padding=1, groups=groups, padding_mode=mode)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), conv, nn.ReLU(), nn.Conv2d(4, 2, 1))
    found = find(model, torch.randn(2, 2, 5, 5))
    assert {each.name: each.width for each in found.neurons}["0"] == width


def test_shared_weights_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    assert find(model, torch.randn(3, 4)).neurons == ()

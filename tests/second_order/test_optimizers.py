"""The optimizers as torch's are, by every policy and from every tier."""

import copy
import errno
import io
import os
from itertools import pairwise

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.errors import GossipError

ALL = ("SOAP", "KLShampoo", "Shampoo")
each = pytest.mark.parametrize("cls", [getattr(gg, name) for name in ALL], ids=ALL)


class Net(nn.Module):
    """A convolution, an embedding, alike matrices, a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3, padding=1)
        self.embed = nn.Embedding(5, 6)
        self.hidden = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        h = self.conv(x).mean(-1) + self.embed(torch.arange(len(x)) % 5)
        for layer in self.hidden:
            h = h + torch.tanh(layer(h))
        return self.head(h + self.down(torch.tanh(self.up(h))))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def backward(model, step):
    x = torch.randn(10, 3, 4, generator=torch.Generator().manual_seed(step))
    x = x.to(next(model.parameters()).dtype)
    loss = (model(x) - x[:, :2].mean(-1)).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps=range(13)):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("cls", [gg.KLShampoo, gg.Shampoo])
def test_steps_do_not_depend_on_the_scale_of_gradients(cls):
    def weight_after_steps(scale):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.zeros(6, 9))
        optimizer = cls([weight], weight_decay=0.0)
        for _ in range(6):
            weight.grad = scale * torch.randn(6, 9, generator=generator)
            optimizer.step()
        return weight.detach()

    usual, large = weight_after_steps(1.0), weight_after_steps(100.0)
    assert (large - usual).norm() < 0.1 * usual.norm()


def test_newton_roots_of_rounded_products_are_warned_of():
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.warns(UserWarning, match="TF32"):
            gg.Shampoo(net(), root_method="newton")
    finally:
        torch.set_float32_matmul_precision("highest")


def chain():
    """Matrices of many shapes, so that there are many units."""
    torch.manual_seed(0)
    sizes = (4, 5, 6, 7, 8, 9, 10, 11, 12)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def train_chain(model, optimizer, steps=range(13)):
    for step in steps:
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x)[:, :4] - x.sin()).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(map(torch.equal, a, b))


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- policies and tiers --------------------------------------------------------------------------


@each
@pytest.mark.parametrize(
    "options",
    [
        {"refresh": gg.Background(every=4, max_staleness=0)},
        {"refresh": gg.Background(4, 4, executor=gg.Deterministic(0)), "staggered": True},
        {"storage": gg.Tiers(device_bytes=None)},
        {"storage": "30 %"},
        {"storage": "30 %", "refresh": gg.Background(4, 2, fixed_delay=True)},
    ],
    ids=["background 0", "deterministic 0", "unlimited", "budget", "budget and background"],
)
def test_a_run_is_the_same_bit_for_bit(cls, options, tmp_path):
    """As with Synchronous, or Staggered, and unlimited memory."""
    options = dict(options)
    plain = gg.Staggered(4) if options.pop("staggered", False) else gg.Synchronous(4)
    if options.get("storage") and "refresh" in options:
        plain = gg.Background(4, 2, fixed_delay=True)
    model, twin = chain(), chain()
    optimizer = cls(model, lr=0.02, refresh=plain, max_dim=6)
    expected = train_chain(model, optimizer)
    whole = optimizer.storage_stats.device_bytes
    if options.get("storage") == "30 %":
        options["storage"] = gg.Tiers(device_bytes=whole * 3 // 10, disk=tmp_path)
    other = cls(twin, lr=0.02, max_dim=6, **({"refresh": plain} | options))
    assert equal(expected, train_chain(twin, other))
    if options.get("storage") and options["storage"].disk:
        assert other.storage_stats.highest_device_bytes <= whole * 3 // 10
        assert other.storage_stats.evictions > 0
    assert other.refresh_stats.oldest <= 3 + getattr(plain, "max_staleness", 0)
    optimizer.close()
    other.close()


def test_a_failed_refresh_leaves_the_roots_and_steps_without_one_are_grafted():
    model = net()
    policy = gg.Background(4, 1, on_bound="graft-only", executor=gg.Deterministic(3))
    optimizer = gg.Shampoo(model, refresh=policy)
    before = train(model, optimizer, range(20))
    assert optimizer.refresh_stats.graft_only > 0
    assert all(p.isfinite().all() for p in before)
    for cls in (gg.SOAP, gg.KLShampoo):
        with pytest.raises(ValueError, match="graft"):
            cls(model, refresh=policy)
    with pytest.raises(ValueError, match="graft"):
        gg.Shampoo(model, graft="none", refresh=policy)


@each
@pytest.mark.parametrize("call", ["pwrite", "preadv", "posix_fallocate"])
@pytest.mark.parametrize("good", [0, 1, 5])
def test_a_step_that_the_disk_fails_can_be_taken_again(cls, call, good, tmp_path, monkeypatch):
    """Whichever access it is, in the first step or later: no unit is left with half a root."""
    model = chain()
    tiers = gg.Tiers(device_bytes=5000, disk=tmp_path)
    optimizer = cls(model, refresh=gg.Synchronous(3), max_dim=6, storage=tiers)
    first = 0 if call == "posix_fallocate" else 4
    train_chain(model, optimizer, range(first))
    real, left = getattr(os, call), [good]

    def fail(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(GossipError, match="No space left"):
            train_chain(model, optimizer, range(first, first + 9))
    weights = train_chain(model, optimizer, range(first, first + 13))
    assert all(p.isfinite().all() for p in weights)
    assert optimizer.storage_stats.highest_device_bytes <= 5000
    assert optimizer.refresh_stats.oldest <= 2
    optimizer.close()


def test_a_budget_below_a_unit_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="device_bytes"):
        gg.SOAP(net(), storage=gg.Tiers(device_bytes=100, disk=tmp_path))


# -- state -----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(cls, dtype, tmp_path):
    """Jobs are under way when it is saved; it is loaded into other tiers and settings."""
    model = net(dtype)
    policy = gg.Background(4, 3, executor=gg.Deterministic(2))
    optimizer = cls(model, lr=0.02, refresh=policy)
    train(model, optimizer, range(6))  # jobs of step 4 are under way
    state = saved_and_loaded(optimizer.state_dict())
    twin = copy.deepcopy(model)
    tiers = gg.Tiers(device_bytes=6000, disk=tmp_path)
    other = cls(twin, lr=1.0, max_dim=3, refresh=policy, storage=tiers)
    train(copy.deepcopy(twin), other, range(1))
    other.load_state_dict(state)
    assert equal(train(model, optimizer, range(6, 16)), train(twin, other, range(6, 16)))
    assert saved_and_loaded(optimizer.state_dict()).keys() == {"state", "param_groups"}
    assert all(
        t.dtype is torch.float32
        for values in optimizer.state_dict()["state"].values()
        for t in values.values()
        if isinstance(t, torch.Tensor) and t.is_floating_point()  # orders of columns are whole
    )
    optimizer.close()
    other.close()


@each
def test_a_closed_optimizer_still_has_its_state_unless_that_was_on_disk(cls, tmp_path):
    model = net()
    optimizer = cls(model, refresh=gg.Background(3, 1))
    train(model, optimizer)
    optimizer.state_dict()  # waits for roots on their way
    expected = optimizer.state_dict()["state"]
    optimizer.close()
    found = optimizer.state_dict()["state"]
    for place, values in expected.items():
        kept = {k: v for k, v in values.items() if not k.startswith("pending")}
        assert all(
            torch.equal(*map(torch.as_tensor, (v, found[place][k]))) for k, v in kept.items()
        )
    with pytest.raises(GossipError, match="closed"):
        train(model, optimizer)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": expected})
    train(model, optimizer)
    optimizer.close()
    on_disk = cls(model, storage=gg.Tiers(device_bytes=10_000, disk=tmp_path))
    train(model, on_disk)
    on_disk.close()
    with pytest.raises(GossipError, match="before close"):
        on_disk.state_dict()


def test_the_state_of_another_optimizer_is_refused():
    model, twin = net(), net()
    optimizer, other = gg.SOAP(model), gg.KLShampoo(twin)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="state"):
        other.load_state_dict(state)
    adamw = torch.optim.AdamW(twin.parameters())
    train(twin, adamw, range(1))
    with pytest.raises(ValueError, match=r"group|state"):
        optimizer.load_state_dict(adamw.state_dict())


# -- as torch's optimizers are ---------------------------------------------------------------------


@each
def test_what_goes_where(cls):
    optimizer = cls(net(), lr=0.1, matrices=["embed.*"], adamw=["down.weight"])
    roles = {name: g["role"] for g in optimizer.param_groups for name in g["param_names"]}
    matrices = {name for name, role in roles.items() if role == cls.role}
    hidden = {f"hidden.{i}.weight" for i in range(3)}
    assert matrices == {"conv.weight", "embed.weight", *hidden, "up.weight", "head.weight"}
    assert "hidden.*.weight (6, 6) x 3" in repr(optimizer)
    with pytest.raises(ValueError, match="matrices="):
        cls(net(), matrices=["nowhere"])


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"shampoo_beta": 1.5},
        {"eps": 0.0},
        {"weight_decay": float("inf")},
        {"max_dim": 0},
        {"damping": -1.0},
        {"graft": "sgd"},
        {"root_method": "svd"},
        {"betas": 0.9},
        {"refresh": "background"},
        {"refresh": 10},
        {"refresh": gg.Background},
        {"storage": "scratch"},
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        gg.Shampoo(net(), **options)


@each
def test_a_convolution_is_one_row_an_output_whatever_its_strides(cls):
    conv, flat = nn.Conv2d(3, 4, 2), nn.Linear(12, 4, bias=False)
    with torch.no_grad():
        flat.weight.copy_(conv.weight.flatten(1))
    conv.to(memory_format=torch.channels_last)
    optimizers = [cls([conv.weight], max_dim=8), cls([flat.weight], max_dim=8)]
    optimizers[0] = cls([{"params": [conv.weight], "role": cls.role}], max_dim=8)
    for step in range(5):
        gradient = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(step))
        conv.weight.grad = gradient.to(memory_format=torch.channels_last)
        flat.weight.grad = gradient.flatten(1).clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(conv.weight.flatten(1), flat.weight)


@each
def test_parameters_without_gradient_stay_and_join_later(cls):
    model, twin = net(), net()
    optimizer, other = cls(model, refresh=gg.Staggered(2)), cls(twin, refresh=gg.Staggered(2))
    for step in range(12):
        model.zero_grad()
        backward(model, step)
        twin.load_state_dict(model.state_dict())
        late = model.hidden[0].weight if step < 3 else None  # first gradient in step 3
        off = model.hidden[1].weight if step % 4 == 2 else None  # none now and then
        for p in (late, off):
            if p is not None:
                p.grad = None
        before = {p: p.detach().clone() for p in (late, off) if p is not None}
        moved = model.hidden[2].weight.detach().clone()
        optimizer.step()
        assert all(torch.equal(p, value) for p, value in before.items())
        if step:
            assert not torch.equal(moved, model.hidden[2].weight)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    assert equal(train(model, optimizer, range(20, 26)), train(twin, other, range(20, 26)))
    cls(net()).step()


@each
def test_groups_have_their_own_rates_and_weights_decay(cls):
    model = net()
    optimizer = cls([{"params": list(model.named_parameters()), "lr": 0.5}], lr=0.02)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len([*model.parameters()])
    decayed = cls([p := nn.Parameter(torch.ones(3, 3))], lr=0.1, weight_decay=0.5)
    for _ in range(2):
        p.grad = torch.zeros(3, 3)
        decayed.step()
    steps = 2 if cls is gg.Shampoo else 1  # the first of the others makes the factors
    torch.testing.assert_close(p.detach(), torch.full((3, 3), 0.95**steps))


@each
def test_a_step_that_was_interrupted_can_be_taken_again(cls):
    model = net()
    optimizer = cls(model, refresh=gg.Synchronous(3))
    train(model, optimizer, range(4))

    def interrupt():
        raise KeyboardInterrupt

    make_job, optimizer.make_job = optimizer.make_job, lambda unit, group: interrupt
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(4, 9))
    optimizer.make_job = make_job
    train(model, optimizer, range(4, 9))
    assert optimizer.refresh_stats.oldest <= 2


@each
def test_parameters_that_are_none_are_refused(cls):
    parameters = net().parameters()
    cls(parameters)
    with pytest.raises(ValueError, match="once"):
        cls(parameters)  # the iterator is at its end

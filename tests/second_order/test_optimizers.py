"""The optimizers as torch's are."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import gossipgrad as gg

# Bare tensors suffice for these tests.
pytestmark = pytest.mark.filterwarnings("ignore:gg.")

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


def equal(a, b):
    return all(map(torch.equal, a, b))


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- state -----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_continues_bit_for_bit(cls, dtype, where):
    """Roots wait to be used when it is saved; it is loaded into other settings."""
    model = net(dtype)
    refresh = gg.Refresh(4, 3, where=where)
    optimizer = cls(model, lr=0.02, refresh=refresh)
    train(model, optimizer, range(6))
    state = saved_and_loaded(optimizer.state_dict())
    twin = copy.deepcopy(model)
    other = cls(twin, lr=1.0, max_dim=3, refresh=refresh)
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
def test_a_state_is_loaded_by_another_policy(cls):
    model = net()
    optimizer = cls(model, refresh=gg.Refresh(4, 3))
    train(model, optimizer, range(7))
    state = saved_and_loaded(optimizer.state_dict())
    optimizer.close()
    for refresh in (gg.Refresh(4), gg.Refresh(6, 6), gg.Refresh(2, 1, where="device")):
        twin = copy.deepcopy(model)
        other = cls(twin, refresh=refresh)
        other.load_state_dict(copy.deepcopy(state))
        weights = train(twin, other, range(7, 30))
        assert all(p.isfinite().all() for p in weights)
        assert other.refresh_stats.failed == 0
        other.close()


@each
def test_state_is_what_the_steps_use_and_saving_copies_none_of_it(cls):
    model = net()
    optimizer = cls(model, refresh=gg.Refresh(4))
    train(model, optimizer, range(6))
    held = {t.untyped_storage().data_ptr() for s in optimizer.state.values() for t in s.values()}
    saved = {
        t.untyped_storage().data_ptr()
        for s in optimizer.state_dict()["state"].values()
        for t in s.values()
    }
    assert saved == held
    state = optimizer.state[model.up.weight]
    before = {name: value.clone() for name, value in state.items()}
    train(model, optimizer, range(6, 7))
    assert all(
        torch.equal(value, state[name]) == (name == "cohort")
        for name, value in before.items()
        if not name.startswith(("left_", "right_"))  # roots are not due in each step
    )


@each
def test_a_closed_optimizer_has_its_state_and_may_continue(cls):
    model = net()
    optimizer = cls(model, refresh=gg.Refresh(3, 1))
    train(model, optimizer)
    expected = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    found = optimizer.state_dict()["state"]
    for index, values in expected["state"].items():
        assert all(torch.equal(value, found[index][name]) for name, value in values.items())
    twin, other = copy.deepcopy((model, optimizer))
    assert equal(train(model, optimizer), train(twin, other))
    optimizer.close()
    other.close()


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


@each
def test_a_state_that_does_not_fit_changes_nothing(cls):
    model = net()
    optimizer = cls(model, refresh=gg.Refresh(4, 3))
    train(model, optimizer, range(6))
    twin, other = copy.deepcopy((model, optimizer))
    state = copy.deepcopy(optimizer.state_dict())
    last = max(index for index, values in state["state"].items() if "left.0" in values)
    del state["state"][last]["left.0"]
    with pytest.raises(ValueError, match=r"left\.0"):
        optimizer.load_state_dict(state)
    assert equal(train(model, optimizer, range(6, 16)), train(twin, other, range(6, 16)))
    optimizer.close()
    other.close()


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
        {"refresh": gg.Refresh},
        {"root_dtype": torch.float16},
        {"shampoo_beta": "x"},
        {"damping": "x"},
        {"damping": True},
        {"eps": "x"},
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
    optimizer, other = cls(model, refresh=gg.Refresh(2)), cls(twin, refresh=gg.Refresh(2))
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
def test_vectors_may_be_trained_before_any_matrix(cls):
    model = net()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    for p in matrices:
        p.requires_grad_(False)
    optimizer = cls(model)
    before = train(model, optimizer, range(2))
    for p in matrices:
        p.requires_grad_(True)
    after = train(model, optimizer, range(2, 5))
    assert not any(map(torch.equal, before, after))


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
def test_a_step_that_was_interrupted_can_be_taken_again(cls, monkeypatch):
    model = net()
    optimizer = cls(model, refresh=gg.Refresh(3))
    train(model, optimizer, range(4))

    def interrupt(unit, group):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "find_roots", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, range(4, 9))
    weights = train(model, optimizer, range(4, 9))
    assert all(p.isfinite().all() for p in weights)


def test_parameters_that_are_none_are_refused():
    parameters = net().parameters()
    gg.SOAP(parameters)
    with pytest.raises(ValueError, match="once"):
        gg.SOAP(parameters)  # the iterator is at its end


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.lm_head = nn.Linear(8, 50)


@pytest.mark.parametrize("name", ["SOAP", "KLShampoo", "Shampoo"])
def test_names_tell_embeddings_and_what_cannot_be_told_is_warned_of(name):
    make, model = getattr(gg, name), Words()
    with pytest.warns(UserWarning, match="embeddings"):
        make([model.embed_tokens.weight, model.lm_head.weight, model.lm_head.bias])
    with pytest.warns(UserWarning, match="convolutions"):
        optimizer = make(model.named_parameters())
    found = {n: g["role"] for g in optimizer.param_groups for n in g["param_names"]}
    matrices = {n for n, role in found.items() if role != "adamw"}
    assert matrices == {"lm_head.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(model)
        make(model.lm_head.named_parameters())


def test_eigenvalues_by_lapack_are_computed_on_the_host():
    assert gg.Shampoo(nn.Linear(4, 3), root_method="eigh").refresh.where == "host"
    group = {"params": [nn.Linear(4, 3).weight], "role": "shampoo", "root_method": "eigh"}
    assert gg.Shampoo([group]).refresh.where == "host"

"""The optimizer on one process: what it polarises, against torch.optim.Muon, and as torch's are."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import gossipgrad as gg
from benchmarks._tasks import GPT


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)


class Model(nn.Module):
    """An embedding, a bare positional one, blocks, a convolution and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.zeros(1, 5, 8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 11)


def roles(optimizer):
    return {
        name: group["role"]
        for group in optimizer.param_groups
        for name in group.get("param_names", [])
    }


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)
    ).to(dtype)


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    dtype = next(model.parameters()).dtype
    loss = (model(x.to(dtype)) - x[:, :2].to(dtype)).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps=range(4), scheduler=None):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


# -- what goes where ---------------------------------------------------------------------------


def test_names_overrule_types_and_tied_or_frozen_weights_are_seen():
    model = Model()
    model.head.weight = model.embed.weight
    model.conv.weight.requires_grad_(False)
    found = roles(gg.Muon(model, muon=["position"], adamw=["blocks.*.attention.*"]))
    assert found["embed.weight"] == "adamw"
    assert "head.weight" not in found
    assert found["conv.weight"] == "muon"
    assert found["position"] == "muon"
    assert found["blocks.1.attention.out_proj.weight"] == "adamw"
    assert found["blocks.1.up.weight"] == "muon"
    assert roles(gg.Muon(nn.Linear(3, 2))) == {"weight": "muon", "bias": "adamw"}
    of_gpt = roles(gg.Muon(GPT(65, layers=2, width=8)))  # its head is its embedding
    assert of_gpt["blocks.1.perceptron_out.weight"] == "muon"
    assert of_gpt["characters.weight"] == "adamw"


def update_of(model, gradient, name="weight", **options):
    """What one step at rate 1 subtracts from the model's only trained parameter."""
    optimizer = gg.Muon(model, 1.0, **{"polar": "svd", "nesterov": False, **options})
    parameter = dict(model.named_parameters())[name]
    before = parameter.detach().clone()
    parameter.grad = gradient
    optimizer.step()
    return before - parameter.detach()


def exact(matrix):
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    outputs, inputs = matrix.shape
    return u @ vh * max(1, outputs / inputs) ** 0.5


def test_each_expert_of_a_stack_is_polarised_by_itself():
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(4, 6, 5))
    model.others = nn.Parameter(torch.zeros(4, 6, 5))
    assert roles(gg.Muon(model)) == {"experts": "muon", "others": "adamw"}
    gradient = torch.randn(4, 6, 5)
    for name, options in (("experts", {}), ("others", {"muon": ["others"]})):
        update = update_of(model, gradient, name, **options)
        torch.testing.assert_close(update, torch.stack([exact(one) for one in gradient]))


class Conv1D(nn.Module):
    """Of the library transformers: inputs x outputs."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nx, nf))


@pytest.mark.parametrize(
    ("make", "options", "matrices", "joined"),
    [
        (lambda: nn.Linear(5, 12), {"split": {"weight": 3}}, lambda g: g.chunk(3), torch.cat),
        (
            lambda: nn.Linear(5, 12),
            {"split": {"weight": (8, 4)}},
            lambda g: g.split((8, 4)),
            torch.cat,
        ),
        (lambda: Conv1D(12, 5), {}, lambda g: [g.T], lambda each: each[0].T),
        (
            lambda: Conv1D(12, 5),
            {"split": {"w*": 2}},
            lambda g: g.T.chunk(2),
            lambda each: torch.cat(each).T,
        ),
        (
            lambda: nn.Conv2d(4, 6, 3, groups=2),
            {},
            lambda g: [each.flatten(1) for each in g.chunk(2)],
            lambda each: torch.cat(each).view(6, 2, 3, 3),
        ),
        (
            lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
            {},
            lambda g: [each.transpose(0, 1).flatten(1) for each in g.chunk(2)],
            lambda each: torch.cat([one.view(3, 2, 3).transpose(0, 1) for one in each]),
        ),
        (lambda: nn.LSTMCell(5, 4), {}, lambda g: g.chunk(4), torch.cat),
        (lambda: nn.MultiheadAttention(4, 2), {}, lambda g: g.chunk(3), torch.cat),
    ],
    ids=["qkv", "sizes", "Conv1D", "split Conv1D", "groups", "transposed", "gates", "attention"],
)
def test_layers_say_what_their_matrices_are(make, options, matrices, joined):
    torch.manual_seed(0)
    model = make()
    name = next(name for name, p in model.named_parameters() if p.ndim > 1)
    gradient = torch.randn(dict(model.named_parameters())[name].shape)
    expected = joined([exact(matrix) for matrix in matrices(gradient)])
    torch.testing.assert_close(update_of(model, gradient, name, **options), expected)


@pytest.mark.parametrize("polar", ["muon", "polar-express", "svd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_gradients_does_not_matter(polar, dtype):
    torch.manual_seed(0)
    gradient = torch.randn(24, 40)
    expected, *found = (
        update_of(nn.Linear(40, 24, dtype=dtype), (gradient * scale).to(dtype), polar=polar)
        for scale in (1, 1e-30, 1e-20, 1e-9, 1e9, 1e20, 1e30)
    )
    assert expected.norm() > 3
    for update in found:
        assert (update - expected).norm() < 0.02 * expected.norm()


def test_tensors_without_names_are_warned_of_and_names_are_read():
    model = Model()
    with pytest.warns(UserWarning, match="embeddings and heads"):
        gg.Muon(model.parameters())
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gg.Muon(matrices)
        found = roles(gg.Muon(model.named_parameters()))
    assert found["embed.weight"] == found["head.weight"] == "adamw"
    assert found["blocks.1.up.weight"] == "muon"


@pytest.mark.parametrize("adamw", [[], ["*"]])
def test_maximize_is_a_step_along_the_gradient(adamw):
    up, down = model_of(), model_of()
    optimizers = gg.Muon(up, maximize=True, adamw=adamw), gg.Muon(down, adamw=adamw)
    for step in range(3):
        for model, sign, optimizer in zip((up, down), (1, -1), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            for p in model.parameters():
                p.grad *= sign
            optimizer.step()
    assert all(map(torch.equal, up.parameters(), down.parameters()))


def test_groups_and_plain_tensors_as_torch_takes_them():
    model = model_of()
    with pytest.warns(UserWarning, match="names"):
        whole = gg.Muon(list(model.parameters()))
    assert [group["role"] for group in whole.param_groups] == ["muon", "adamw"]
    assert len(whole.param_groups[0]["params"]) == 3
    grouped = gg.Muon([{"params": model[0].parameters(), "lr": 0.5, "role": "adamw"}])
    grouped.add_param_group({"params": [model[2].weight], "momentum": 0.5})
    assert grouped.param_groups[0]["lr"] == 0.5
    assert grouped.param_groups[1]["role"] == "muon"
    train(model, grouped)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 1.0},
        {"lr": -1.0},
        {"weight_decay": float("nan")},
        {"scale": "keller"},
        {"momentum_form": "heavy"},
        {"polar": "newton"},
        {"polar_dtype": torch.int32},
        {"betas": (0.9, 1.0)},
        {"eps": 0.0},
        {"muon": ["nowhere"]},
        {"muon": ["0.bias"]},
        {"muon": ["0.weight"], "adamw": ["0.*"]},
        {"adamw": "0.weight"},
        {"split": {"nowhere": 3}},
        {"split": {"0.weight": 5}},
        {"split": {"0.weight": (6, 5)}},
    ],
)
def test_what_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        gg.Muon(model_of(), **options)


# -- the update --------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("form", ["sum", "ema"])
def test_matrices_equal_torch_muon(nesterov, scale, form, monkeypatch):
    """torch's multiplies in bf16 alone: here it does so in fp32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.to(torch.float32, copy=True))
    ours, theirs = model_of(), model_of()
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    optimizer = gg.Muon(
        [p for p in ours.parameters() if p.ndim == 2],
        **settings,
        scale=scale,
        momentum_form=form,
        polar="muon",
    )
    weights = [p for p in theirs.parameters() if p.ndim == 2]
    reference = torch.optim.Muon(weights, **settings, adjust_lr_fn=scale)
    for step in range(1 if form == "ema" else 5):  # ema counts the first gradient otherwise
        for model, one in ((ours, optimizer), (theirs, reference)):
            model.zero_grad()
            backward(model, step)
            one.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


# -- as torch's optimizers are -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(dtype):
    model = model_of(dtype)
    optimizer = gg.Muon(model)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    other = gg.Muon(twin, lr=1.0, nesterov=False)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    other.load_state_dict(saved)
    for state in other.state.values():
        assert all(v.dtype is torch.float32 for v in state.values() if isinstance(v, torch.Tensor))
    expected, found = train(model, optimizer, range(4, 7)), train(twin, other, range(4, 7))
    assert all(map(torch.equal, expected, found))


def test_the_rest_equals_torch_adamw():
    ours, theirs = model_of(torch.float64), model_of(torch.float64)
    optimizer = gg.Muon(ours, adamw=["*"], adamw_lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99))
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8
    )
    for a, b in zip(train(ours, optimizer), train(theirs, reference), strict=True):
        torch.testing.assert_close(a, b)

"""What every optimizer does: bad gradients, frozen layers, schedules, checkpoints."""

import copy
import pickle
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

import gossipgrad as gg

SECOND_ORDER = ["SOAP", "KLShampoo", "Shampoo"]
MATRICES = ["Muon", *SECOND_ORDER]
ALL = [*MATRICES, "GossipAdamW"]


def network(*, bias=True):
    torch.manual_seed(0)
    sizes = (6, 24, 24, 3)
    layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(sizes)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make(name, model, **options):
    params = model.parameters() if name == "GossipAdamW" else model
    return getattr(gg, name)(params, **options)


def backward(model, step, scale=1.0):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    loss = (model(x) - x[:, :3].sin()).square().mean()
    (scale * loss).backward()
    return loss


def train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(map(torch.equal, a, b))


# -- gradients that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize("name", ALL)
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(name, value):
    model, twin = network(), network()
    optimizer, other = make(name, model), make(name, twin)
    train(model, optimizer, range(13))
    train(twin, other, range(13))
    backward(model, 99)
    for p in model.parameters():
        is_squared = name != "Muon" or p.ndim < 2 or p is model[4].weight
        p.grad.view(-1)[0] = value if is_squared else torch.nan  # Muon squares no matrix
    with pytest.warns(UserWarning, match="finite"):
        optimizer.step()
    assert optimizer.nonfinite_steps == 1
    assert equal(train(model, optimizer, range(13, 40)), train(twin, other, range(13, 40)))
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        backward(model, 99)
        model[2].weight.grad.fill_(torch.nan if name == "Muon" else value)
        optimizer.step()
    assert optimizer.nonfinite_steps == 2


@pytest.mark.parametrize("name", ALL)
def test_one_bad_gradient_leaves_its_own_parameter_alone(name):
    model = network()
    optimizer = make(name, model)
    before = train(model, optimizer, range(13))
    backward(model, 13)
    model[2].weight.grad[3, 4] = torch.nan
    with pytest.warns(UserWarning, match="finite"):
        optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old) == (parameter is model[2].weight)
    after = train(model, optimizer, range(14, 50))
    assert all(p.isfinite().all() for p in after)
    assert not torch.equal(after[2], before[2])


# -- frozen parameters and schedules ---------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_that_is_unfrozen_later_is_trained(name):
    model = network()
    model[0].requires_grad_(False)
    optimizer = make(name, model)
    before = [p.detach().clone() for p in model[0].parameters()]
    train(model, optimizer, range(3))
    assert equal(before, model[0].parameters())
    model[0].requires_grad_(True)
    train(model, optimizer, range(3, 9))
    assert not any(map(torch.equal, before, model[0].parameters()))
    everything = network().requires_grad_(False)
    optimizer = make(name, everything)
    train(everything.requires_grad_(True), optimizer, range(3))
    assert not any(map(torch.equal, everything.parameters(), network().parameters()))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: OneCycleLR(o, max_lr=0.02, total_steps=12),
        lambda o: CyclicLR(o, base_lr=1e-3, max_lr=0.02, step_size_up=4),
    ],
    ids=["one cycle", "cyclic"],
)
def test_schedules_that_cycle_momentum_work_with_their_defaults(name, schedule):
    model = network()
    optimizer = make(name, model)
    scheduler = schedule(optimizer)
    seen = set()
    for step in range(8):
        train(model, optimizer, [step])
        scheduler.step()
        group = optimizer.param_groups[0]
        seen.add((group["lr"], group["momentum"] if name == "Muon" else group["betas"][0]))
    assert len({lr for lr, _ in seen}) > 4
    assert len({momentum for _, momentum in seen}) > 4
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_a_closure_a_scheduler_and_a_scaler(name):
    model, twin = network(), network()
    optimizer, other = make(name, model), make(name, twin)
    schedules = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(8):
        assert optimizer.step(lambda step=step: backward(model, step)) > 0
        backward(twin, step, scaler.scale(torch.ones(())))
        scaler.step(other)
        scaler.update()
        for schedule in schedules:
            schedule.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    before = [p.detach().clone() for p in twin.parameters()]
    backward(twin, 8, scaler.scale(torch.tensor(torch.inf)))
    scaler.step(other)
    assert equal(before, twin.parameters())
    make(name, network()).step()  # without a gradient


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("name", ALL)
def test_a_copy_trains_its_own_parameters(name, copied):
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, range(4))
    twin, other = copied((model, optimizer))
    assert equal(train(model, optimizer, range(4, 9)), train(twin, other, range(4, 9)))
    extra = nn.Parameter(torch.ones(3, 3))
    named = "param_names" in other.param_groups[0]
    other.add_param_group({"params": [("extra", extra) if named else extra]})
    assert other.param_groups[-1]["lr"] == other.defaults["lr"]
    assert repr(other)


def test_a_group_has_the_settings_of_its_role_alone():
    groups = gg.Muon(network(), weight_decay=0.1).param_groups
    assert {"momentum", "polar"} <= groups[0].keys()
    assert groups[1].keys().isdisjoint({"momentum", "polar"})
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1]


# -- torch.distributed.checkpoint ------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", MATRICES)
def test_reading_the_state_changes_nothing(name, bias):
    model, twin = network(bias=bias), network(bias=bias)
    optimizer, other = make(name, model), make(name, twin)
    for step in range(15):
        train(model, optimizer, [step])
        train(twin, other, [step])
        for each in (model, twin):
            each.zero_grad()  # what a loop does, and what makes torch look at the state
        get_optimizer_state_dict(model, optimizer)
    assert equal(model.parameters(), twin.parameters())
    assert all(
        isinstance(value, torch.Tensor)
        for state in optimizer.state.values()
        for value in state.values()
    )


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_loaded_run_equals_the_uninterrupted_one(name, flatten, late, tmp_path):
    """Also in a new optimizer, whose keys and shapes are what is read from the disk."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    of = {"refresh": gg.Refresh(4, 3)} if late and name in SECOND_ORDER else {}
    model = network(bias=False)
    optimizer = make(name, model, **of)
    train(model, optimizer, range(14))  # roots of the last steps are not in use yet
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)

    twin = copy.deepcopy(model)
    twin.zero_grad()
    other = make(name, twin, **of)
    read = {"optimizer": get_optimizer_state_dict(twin, other, options=options)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(twin, other, read["optimizer"], options=options)
    twin.load_state_dict(model.state_dict())
    assert equal(train(model, optimizer, range(14, 30)), train(twin, other, range(14, 30)))
    for each in (optimizer, other):
        if name in SECOND_ORDER:
            each.close()


@pytest.mark.parametrize("make", [gg.Muon, gg.SOAP, gg.Shampoo, gg.KLShampoo])
def test_counters_stay_on_the_cpu_under_another_default_device(make):
    """The meta device stands for a GPU, where each look at a counter would wait."""
    model = torch.nn.Linear(4, 3)
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.device("meta"):
        optimizer.step()
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert [(step.device.type, step.item()) for step in steps] == [("cpu", 1.0)] * len(steps)
    assert steps

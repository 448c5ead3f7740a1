"""Use that would go wrong in silence is refused, or warned of, by name and with the way out."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from gossipgrad.comm import Hub
from support.processes import run_processes
from support.ranks import run_ranks
from support.replicas import network, sgd

DOORS = {
    "gossip": gg.gossip,
    "suda": gg.suda,
    "sparsify": lambda model, optimizer: gg.sparsify(model, optimizer, density=0.5),
}


@pytest.fixture(params=DOORS)
def door(request):
    return DOORS[request.param]


class Derived(DistributedDataParallel):
    """As frameworks derive theirs."""


def beside_ddp(rank, store):
    said = []

    def try_door(door, model, optimizer, **options):
        try:
            door(model, optimizer, **options).close()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")

    model = network()
    optimizer = sgd(list(model.parameters()))
    wrapped = Derived(model)
    for door in DOORS.values():
        try_door(door, wrapped, optimizer)
        try_door(door, model, optimizer)
        try_door(door, model[0], sgd(list(model[0].parameters())))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("gossip", "inside"))
    try_door(gg.gossip, model, optimizer, mesh=mesh["inside"])
    del wrapped
    gc.collect()
    try_door(gg.gossip, model, optimizer)
    inside = DistributedDataParallel(network(), process_group=mesh["inside"].get_group())
    try_door(gg.gossip, inside.module, sgd(list(inside.parameters())), mesh=mesh["gossip"])
    return said


@pytest.mark.process
def test_a_model_that_ddp_reduces_is_refused_and_one_that_it_reduced_or_reduces_inside_is_not():
    for said in run_processes(2, beside_ddp):
        assert all("DistributedDataParallel averages" in text for text in said[:9])
        assert said[9:] == ["", "", ""]


@pytest.mark.parametrize("second", DOORS)
def test_a_second_session_on_the_same_parameters_is_refused_until_the_first_is_closed(door, second):
    model = network()
    with (
        door(model, sgd(list(model.parameters()))),
        pytest.raises(ValueError, match=r"close\(\) the other session first"),
    ):
        DOORS[second](model[2], sgd(list(model[2].parameters())))
    DOORS[second](model, sgd(list(model.parameters()))).close()


def test_models_may_shrink_beside_a_session_that_is_given_and_beside_no_other():
    model = network()
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(model, optimizer) as session:
        shrink = {"example_input": torch.ones(2, 6)}
        with pytest.raises(ValueError, match="session=session"):
            gg.shrink(model, optimizer, **shrink)
        gg.shrink(model, optimizer, session=session, **shrink).close()


@pytest.mark.parametrize("name", ["gossip", "suda"])
def test_parameters_of_no_optimizer_are_warned_of(name):
    model, door = network(), DOORS[name]
    with pytest.warns(UserWarning, match=r"2 parameters .*'0\.weight', '0\.bias'.* drift apart"):
        door(model, sgd(list(model[2].parameters()))).close()
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door(model, sgd(list(model[2].parameters()))).close()


def test_an_optimizer_of_another_model_is_refused(door):
    with pytest.raises(ValueError, match="none is one of this Sequential"):
        door(network(), sgd(list(network().parameters())))


class Hiding(torch.optim.Optimizer):
    """As Accelerate's: a subclass of torch's that holds the optimizer, and has no hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_the_optimizer_in_a_wrapper_without_hooks_is_found(door):
    model = network()
    inner = sgd(list(model.parameters()))
    with door(model, Hiding(Hiding(inner))) as session:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        Hiding(inner).step()
        assert session.position == 1
    with pytest.raises(ValueError, match=r"Hiding is no torch\.optim\.Optimizer: pass the"):
        door(model, Hiding(None))


def test_what_is_no_model_is_refused(door):
    def train_step(x):
        return x

    optimizer = sgd([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="got function train_step"):
        door(train_step, optimizer)
    with torch.device("meta"):
        model = network()
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device.*to_empty"):
        door(model, sgd(list(model.parameters())))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_model_without_hooks_shapes_or_gradients_is_refused_by_name(door):
    plain = network()
    scripted = torch.jit.script(plain)
    with pytest.raises(ValueError, match="ScriptModule"):
        door(scripted, sgd(list(scripted.parameters())))
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'0\.weight'.*lazy"):
        door(lazy, sgd(list(lazy.parameters())))
    with torch.inference_mode():
        with pytest.raises(ValueError, match=r"session .*inference_mode"):
            door(plain, sgd(list(plain.parameters())))
        inferring = network()
    with pytest.raises(ValueError, match=r"'0\.weight'.*inference_mode"):
        door(inferring, sgd(list(inferring.parameters())))
    door(plain, sgd(list(plain.parameters()))).close()


class Holding(torch.optim.Optimizer):
    """Has another optimizer make its step, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_that_holds_another_is_not_stepped_to_find_its_state():
    model = network()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(gg.GossipError, match="payload='weights'"):
        gg.gossip(model, Holding(sgd(list(model.parameters()))), payload="weights+state")
    assert all(map(torch.equal, before, model.parameters()))


def test_variables_that_another_launcher_left_are_named(door, monkeypatch):
    model = network()
    optimizer = sgd(list(model.parameters()))
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="unset WORLD_SIZE"):
        door(model, optimizer)
    monkeypatch.setenv("WORLD_SIZE", "")
    with door(model, optimizer) as session:
        assert session.world_size == 1


@pytest.mark.parametrize(
    ("optimizer", "settings", "warns"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.AdamW, {"mode": gg.Sync(momentum=0.9)}, False),
        (torch.optim.Adam, {"payload": "weights+state"}, False),
        (torch.optim.Adam, {"local_steps": 4}, False),
        (torch.optim.RMSprop, {}, False),
    ],
)
def test_adam_on_many_ranks_warns_once_and_names_what_loses_less(optimizer, settings, warns):
    hub = Hub(8)

    def rank_main(rank, group):
        model = network()
        transport = hub.transport(rank)
        made = optimizer(model.parameters())
        with gg.gossip(model, made, process_group=group, transport=lambda _: transport, **settings):
            group.barrier()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_ranks(8, rank_main)
    assert ["learning rate" in str(one.message) for one in said] == [True] * warns

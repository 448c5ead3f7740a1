import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Hub
from gossipgrad.errors import GossipError
from support.ranks import run_ranks
from support.replicas import assert_same_bits, backward, network, sgd
from support.sessions import train


def alone(**settings):
    return gg.GossipDataParallel(network(), **settings)


def loss_of(model):
    return model(torch.ones(2, 6)).sum()


@pytest.mark.parametrize("settings", [{}, {"payload": "gradients+weights"}], ids=str)
def test_trains_the_same_bits_as_gossip(settings):
    hub = Hub(3)

    def rank_main(rank, group):
        model = gg.GossipDataParallel(
            network(),
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            bucket_bytes=100,
            **settings,
        )
        optimizer = sgd(list(model.parameters()))
        with model.attach(optimizer):
            for step in range(6):
                backward(model, rank, step)
                optimizer.step()
            held = [p.detach().clone() for p in model.parameters()]
            model.session.group.barrier()
        return held

    assert_same_bits(run_ranks(3, rank_main), train(3, 6, **settings))


def test_names_and_keys_are_those_of_the_module():
    model = gg.GossipDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    plain = model.module
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert [id(p) for p in model.parameters()] == [id(p) for p in plain.parameters()]
    assert model.get_parameter("0.weight") is plain[0].weight
    assert model.get_buffer("1.running_mean") is plain[1].running_mean
    assert isinstance(repr(model), str)


def test_loads_what_it_and_ddp_save():
    source = {name: value + 1 for name, value in network().state_dict().items()}
    for saved in (source, {f"module.{name}": value for name, value in source.items()}):
        model = alone()
        model.load_state_dict(saved)
        assert all(torch.equal(value, source[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"2.weight\""):
        alone().load_state_dict({n: v for n, v in source.items() if n != "2.weight"})


def test_a_training_pass_without_an_optimizer_is_refused():
    model = alone()
    with pytest.raises(GossipError, match=r"this rank would train alone. Call model\.attach\("):
        loss_of(model)
    with torch.no_grad():
        loss_of(model)
    model.eval()
    loss_of(model)
    with pytest.raises(GossipError, match=r"there is no session: call model\.attach\(optimizer\)"):
        _ = model.session


def test_attaches_once():
    model = alone()
    optimizer = sgd(list(model.parameters()))
    with model.attach(optimizer), pytest.raises(GossipError, match="attached already: attach sev"):
        model.attach(optimizer)


def test_every_setting_of_ddp_has_a_way_out():
    ddp = list(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters)
    for name in set(ddp) - {"self", "module", "process_group"}:
        with pytest.raises(TypeError, match=f"not as in DistributedDataParallel. {name}: "):
            alone(**{name: None})


def test_no_sync_lets_gradients_add_up():
    model = alone(payload="gradients+weights")
    with model.no_sync():
        pass
    optimizer = sgd(list(model.parameters()))
    with model.attach(optimizer):
        with model.no_sync():
            loss_of(model).backward()
        once = [p.grad.clone() for p in model.parameters()]
        loss_of(model).backward()
        assert all(
            torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True)
        )


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, lambda m: torch.save(m, BUFFER)])
def test_is_not_pickled_or_copied(copied):
    with pytest.raises(TypeError, match=r"save model\.state_dict\(\), or pickle or copy model\.mo"):
        copied(alone())


BUFFER = io.BytesIO()


def test_inside_another_module_keys_have_no_prefix_either():
    outer = nn.Sequential(alone(), nn.Linear(3, 1))
    saved = outer.state_dict()
    assert list(saved)[:2] == ["0.0.weight", "0.0.bias"]
    other = nn.Sequential(alone(), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(saved)
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), outer.parameters(), strict=True)
    )

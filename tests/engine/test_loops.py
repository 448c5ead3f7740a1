"""Loops as ordinary scripts have them train, in every mode."""

import copy
import io
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Hub, load_replica, replica_state
from support.ranks import run_ranks

MODES = pytest.mark.parametrize("mode", ["overlap", "sync", "stale"])


def sessions(use, make, optimizers, world_size=2, **settings):
    """Run `use(rank, model, optimizers, session)` on each rank."""
    hub = Hub(world_size)

    def rank_main(rank, group):
        torch.manual_seed(0)
        model = make()
        made = optimizers(model)
        torch.manual_seed(rank)
        transport = lambda group: hub.transport(group.rank)  # noqa: E731
        with gg.gossip(
            model, made, process_group=group, transport=transport, **settings
        ) as session:
            result = use(rank, model, made, session)
            session.agree("done")
        return result

    return run_ranks(world_size, rank_main)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def fit(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()


def two_layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))


def frozen(model, is_frozen):
    for parameter in model.parameters():
        parameter.requires_grad_(not is_frozen)


@MODES
def test_a_critic_that_is_frozen_while_the_generator_steps(mode):
    def make():
        return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])

    def use(rank, model, optimizers, session):
        (generator, critic), (first, second) = model, optimizers
        for _ in range(4):
            frozen(critic, True)
            first.zero_grad()
            critic(generator(torch.randn(4, 2))).mean().backward()
            first.step()
            frozen(critic, False)
            second.zero_grad()
            critic(generator(torch.randn(4, 2)).detach()).mean().backward()
            second.step()
        return session.position if mode != "stale" else 4

    assert sessions(use, make, lambda m: [sgd(m[0]), sgd(m[1])], mode=mode) == [4, 4]


@MODES
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_averaged_weights_are_swapped_in_for_an_evaluation(mode, wire_dtype):
    """What is mixed reaches the weights, and not those that are shown for a while."""

    def use(rank, model, optimizer, session):
        with torch.no_grad():
            model[0].weight.fill_(float(rank))
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            own = [p.detach().clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.data.fill_(100.0)
            with torch.no_grad():
                model(torch.ones(1, 2))
            for parameter, value in zip(model.parameters(), own, strict=True):
                parameter.data.copy_(value)
        session.average_()
        return model[0].weight[0, 0].item()

    found = sessions(use, two_layers, lambda m: sgd(m, lr=0.0), mode=mode, wire_dtype=wire_dtype)
    assert found == pytest.approx([0.5, 0.5], abs=1e-6)


@MODES
def test_a_state_that_is_loaded_warns_unless_the_former_one_is_loaded_back(mode, recwarn):
    def use(rank, model, optimizer, session):
        fit(model, optimizer, 2)
        session.wait()
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value + 1.0 for name, value in own.items()})
        with torch.no_grad():
            model(torch.ones(1, 2))
        model.load_state_dict(own)
        fit(model, optimizer)
        warned = len([w for w in recwarn if "load_state_dict" in str(w.message)])
        session.agree("trained on")
        model.load_state_dict(own)
        fit(model, optimizer)
        session.agree("done")
        return warned

    assert sessions(use, two_layers, sgd, mode=mode) == [0, 0]
    assert [w for w in recwarn if "load_state_dict" in str(w.message)]


@MODES
def test_layers_are_unfrozen_amid_training_and_nothing_is_lost(mode):
    def make():
        model = two_layers()
        frozen(model[0], True)
        return model

    def use(rank, model, optimizer, session):
        fit(model, optimizer, 3)
        heads = session.agree(model[2].weight.sum().item())
        mean = session.group.mean_(model[2].weight.detach().clone())
        frozen(model[0], False)
        fit(model, optimizer)
        assert len({*heads}) == 2
        # One step and one exchange away from the mean, and not a whole replica away.
        assert (model[2].weight - mean).abs().max() < 0.5
        fit(model, optimizer, 3)
        session.average_()
        both = session.agree([p.flatten().tolist() for p in model.parameters()])
        assert both[0] == both[1]

    sessions(use, make, sgd, mode=mode)


def test_a_group_of_parameters_is_added_amid_training():
    def use(rank, model, optimizer, session):
        fit(model, optimizer, 2)
        model.append(nn.Linear(1, 1))
        optimizer.add_param_group({"params": list(model[3].parameters())})
        fit(model, optimizer, 2)
        session.average_()
        both = session.agree([p.flatten().tolist() for p in model.parameters()])
        assert both[0] == both[1]

    sessions(use, two_layers, sgd)


class TwoCalls(torch.optim.Optimizer):
    """SAM as it is usually written: no one calls its own `step()`."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05)
        self.param_groups = self.base_optimizer.param_groups

    def held(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self):
        for p in self.held():
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad, alpha=0.01)

    @torch.no_grad()
    def second_step(self):
        for p in self.held():
            p.data = self.state[p]["before"]
        self.base_optimizer.step()

    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@MODES
@pytest.mark.parametrize("way", ["calls", "inner", "closure"])
def test_sam_exchanges_once_where_it_updates(mode, way):
    wrappers = []

    def optimizers(model):
        wrappers.append(TwoCalls(model.parameters()))
        return wrappers[-1].base_optimizer if way == "inner" else wrappers[-1]

    def use(rank, model, optimizer, session):
        sam = next(each for each in wrappers if each.held()[0] is model[0].weight)

        def passes():
            sam.zero_grad()
            model(torch.randn(4, 2)).square().mean().backward()

        for _ in range(4):
            passes()
            if way == "closure":
                sam.step(passes)
            else:
                sam.first_step()
                passes()
                sam.second_step()
        session.wait()
        return session.stats().rounds

    assert sessions(use, two_layers, optimizers, mode=mode) == [4, 4]


class LowRank(nn.Module):
    """Reads parameters of its own before it calls a layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 1)), nn.Parameter(torch.ones(1, 2))
        self.head = nn.Linear(2, 1)

    def loss(self, x):
        return self.head(torch.relu(x @ (self.a @ self.b))).square().mean()


def by_method(model, x):
    return model.loss(x)


def with_penalty(model, x):
    penalty = sum(p.square().sum() for p in model.parameters())
    return model.head(x).square().mean() + penalty


@MODES
@pytest.mark.parametrize("loss", [by_method, with_penalty])
@pytest.mark.parametrize("bucket_bytes", [8, None])
def test_parameters_that_are_read_outside_of_a_forward_pass(mode, loss, bucket_bytes):
    def use(rank, model, optimizer, session):
        for _ in range(6):
            optimizer.zero_grad()
            loss(model, torch.randn(4, 2)).backward()
            optimizer.step()
        with session.consensus():
            return session.stats().outcomes["delivered"]

    delivered = sessions(use, LowRank, sgd, mode=mode, bucket_bytes=bucket_bytes)
    if mode != "stale":  # there a rank may be done before its partner begins
        assert all(delivered)


@MODES
def test_an_evaluation_in_inference_mode_leaves_the_session_usable(mode):
    def use(rank, model, optimizer, session):
        for method in ("consensus", "average_", "consensus_distance", "broadcast_", "agree"):
            fit(model, optimizer, 2)
            with torch.inference_mode():
                if method == "consensus":
                    with session.consensus():
                        model(torch.ones(1, 2))
                else:
                    getattr(session, method)(*(["x"] if method == "agree" else []))
                session.state_dict(drain=True)
        fit(model, optimizer, 2)
        session.average_()
        assert not any(p.is_inference() for p in model.parameters())

    sessions(use, two_layers, lambda m: torch.optim.Adam(m.parameters()), mode=mode)


@MODES
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_optimizers_that_are_fused_into_backward(mode, order):
    def optimizers(model):
        def step(parameter):
            made[parameter].step()
            made[parameter].zero_grad()

        made = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in made:
            p.register_post_accumulate_grad_hook(step)
        return [*made.values()][:: 1 if order == "forward" else -1]

    def use(rank, model, optimizers, session):
        for _ in range(5):
            model(torch.randn(4, 2)).square().mean().backward()
        session.wait()
        return session.stats().rounds

    def make():
        return nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])

    assert sessions(use, make, optimizers, mode=mode) == [5, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports
def test_a_compiled_step_is_a_round():
    def use(rank, model, optimizer, session):
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(3):
            model(torch.randn(4, 2)).square().mean().backward()
            step()
        return session.stats().rounds

    adam = lambda model: torch.optim.AdamW(model.parameters())  # noqa: E731
    assert sessions(use, two_layers, adam) == [3, 3]


@pytest.mark.parametrize(
    "options", [{}, {"compress": "shared-mask:0.5"}, {"payload": "weights+state"}]
)
def test_the_default_device_is_not_that_of_the_sessions_own_tensors(options):
    """On `meta`, which has no values, every forgotten device is an error."""
    hub = Hub(2)

    def rank_main(rank, group):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(4, 2)
        transport = lambda group: hub.transport(group.rank)  # noqa: E731
        with (
            torch.device("meta"),
            gg.gossip(
                model, optimizer, process_group=group, transport=transport, **options
            ) as session,
        ):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            session.average_()
            with session.consensus():
                model(x)
            return session.consensus_distance()

    assert run_ranks(2, rank_main) == [0.0, 0.0]


@MODES
def test_a_model_that_is_pickled_in_a_session_opens_without_this_package(mode):
    def use(rank, model, optimizer, session):
        fit(model, optimizer)
        file = io.BytesIO()
        torch.save(model, file)
        return file.getvalue()

    saved = sessions(use, two_layers, sgd, mode=mode)[0]
    assert b"gossipgrad" not in saved
    opened = torch.load(io.BytesIO(saved), weights_only=False)
    opened(torch.ones(1, 2)).sum().backward()
    opened.state_dict()


def test_a_scaler_can_be_copied_in_a_session():
    model = two_layers()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    with gg.gossip(model, optimizer, scaler=scaler):
        copies = [copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
        for each in copies:
            scaled = each.scale(model(torch.ones(1, 2)).sum())
            scaled.backward()
            each.step(optimizer)
            each.update()
            assert each.get_scale() == 4.0


def test_a_state_that_was_saved_on_a_cpu_continues_on_another_device():
    """`meta` stands for an accelerator: torch's own rule leaves step counts in host memory."""

    def make(device):
        model = nn.Linear(2, 2, device=device)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make("cpu")
    fit(model, optimizer)
    (ours, of_ours), (torchs, of_torchs) = make("meta"), make("meta")
    load_replica(ours, [of_ours], replica_state(model, [optimizer]))
    of_torchs.load_state_dict(optimizer.state_dict())
    devices = [
        {name: value.device for name, value in state.items()}
        for state in (of_ours.state[ours.weight], of_torchs.state[torchs.weight])
    ]
    assert devices[0] == devices[1]


@pytest.mark.filterwarnings("ignore:payload")
def test_ranks_with_other_messages_are_refused():
    """One rank's optimizer keeps no momentum, so it would send fewer."""
    hub = Hub(2)

    def rank_main(rank, group):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * rank)
        begin = partial(gg.gossip, model, optimizer, payload="weights+momentum")
        with pytest.raises(gg.AgreementError):
            begin(process_group=group, transport=lambda group: hub.transport(group.rank))

    run_ranks(2, rank_main)


def test_optimizers_that_exchange_themselves_are_refused_by_name():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """As torch's, which needs a process group."""

    model = two_layers()
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer"):
        gg.gossip(model, ZeroRedundancyOptimizer(model.parameters(), lr=0.1))


@MODES
def test_a_replica_without_elements_trains(mode):
    """The shard of a small parameter may be empty."""

    def use(rank, model, optimizer, session):
        for _ in range(3):
            model[0].grad = torch.zeros_like(model[0])
            optimizer.step()
        session.average_()
        session.state_dict(drain=True)

    sessions(use, lambda: nn.ParameterList([nn.Parameter(torch.empty(0, 3))]), sgd, mode=mode)


def test_the_second_moment_of_narrow_weights_falls():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = gg.GossipAdamW(model.parameters(), lr=0.0)
    squares = []
    for step in range(400):
        model.weight.grad = torch.full_like(model.weight, 1.0 if step < 100 else 0.0)
        optimizer.step()
        squares.append(optimizer.state[model.weight]["momentum_sq"].item())
    assert squares[-1] < 0.9 * max(squares)


def test_warnings_name_a_line_of_the_program():
    """Where the session starts, where an optimizer steps, and where a scaler has one step."""
    model = two_layers()
    optimizer = gg.SOAP(model.named_parameters())
    scaler = torch.amp.GradScaler("cpu")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with gg.gossip(model, optimizer, payload="gradients"):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            model[0].weight.grad.fill_(float("nan"))
            optimizer.step()
    assert len(seen) == 3
    assert {each.filename for each in seen} == {__file__}

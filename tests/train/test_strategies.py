"""Strategies in real processes, step by step, against replicas trained side by side in this one."""

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import load_replica, replica_state
from gossipgrad.train import PostLocalConfig, SparseConfig, TrainConfig
from gossipgrad.train._result import PeerLostError, RunStopped
from gossipgrad.train._ring_clock import ring_bytes
from gossipgrad.train._spans import StepSpans
from gossipgrad.train._strategies import _lost, make_strategy
from gossipgrad.train._strategies._averaged import EveryLogP
from support.processes import run_processes
from support.ranks import run_ranks
from support.replicas import flat, network

pytestmark = pytest.mark.process
WORLD_SIZE = 3
STEPS = 8
OPTIONS = {
    "allreduce": {},
    "agd": {},
    "every-log-p": {},
    "post-local-sgd": {"post_local": PostLocalConfig(post_local_after=0.5, local_steps=2)},
    "wfbp": {},
    "topk": {"sparse": SparseConfig(density=1.0)},  # all of it, in sparse messages
    "omgs": {"sparse": SparseConfig(density=1.0)},  # the plan is changed in the seventh step
}
PARAMETERS = sum(p.numel() for p in network().parameters())


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return model(torch.randn(5, 6, generator=generator)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def start(rank, name, model, optimizer, stop=None, **options):
    return make_strategy(
        TrainConfig(strategy=name, **options),
        model,
        [optimizer],
        total_steps=STEPS,
        stop=stop or threading.Event(),
        spans=StepSpans(rank, num_steps=0, total_steps=STEPS),
    )


def take_step(strategy, optimizer, rank, step):
    strategy.begin_step()
    strategy.backward(loss_of(strategy.model, rank, step))
    optimizer.step()
    optimizer.zero_grad()


def train_all(rank, store):
    """The weights after every step, and what was sent, by strategy."""
    found = {}
    for name, options in OPTIONS.items():
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, name, model, optimizer, **options)
        held = []
        for step in range(STEPS):
            take_step(strategy, optimizer, rank, step)
            held.append(flat(model).tolist())
        traffic = strategy.traffic()
        dist.barrier()
        strategy.close()
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
        found[name] = held, traffic, sum(hooks)
    found["unused"] = train_unused(rank)
    return found


@pytest.fixture(scope="module")
def runs():
    return run_processes(WORLD_SIZE, train_all)


def side_by_side(averaged_gradients: int, average_at: tuple[int, ...], *, state: bool):
    """Weights of all ranks after every step, with all replicas in this process."""
    models = [network() for _ in range(WORLD_SIZE)]
    optimizers = [sgd(model) for model in models]
    held = []
    for step in range(STEPS):
        for rank, model in enumerate(models):
            loss_of(model, rank, step).backward()
        if step < averaged_gradients:
            average([[p.grad for p in model.parameters()] for model in models])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step + 1 in average_at:
            average([[p.data for p in model.parameters()] for model in models])
            if state:
                average([[s["momentum_buffer"] for s in o.state.values()] for o in optimizers])
        held.append([flat(model) for model in models])
    return held


def average(tensors: list[list[torch.Tensor]]) -> None:
    for of_ranks in zip(*tensors, strict=True):
        mean = torch.stack(of_ranks).mean(0)
        for tensor in of_ranks:
            tensor.copy_(mean)


EXPECTED = {
    "allreduce": partial(side_by_side, STEPS, (), state=False),
    "agd": partial(side_by_side, STEPS, (), state=False),
    **dict.fromkeys(("wfbp", "topk", "omgs"), partial(side_by_side, STEPS, (), state=False)),
    "every-log-p": partial(side_by_side, 0, (2, 4, 6, 8), state=True),
    "post-local-sgd": partial(side_by_side, 4, (6, 8), state=False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_step_is_that_of_replicas_side_by_side(runs, name):
    expected = EXPECTED[name]()
    for rank in range(WORLD_SIZE):
        held = runs[rank][name][0]
        for step in range(STEPS):
            mine = torch.tensor(held[step])
            torch.testing.assert_close(mine, expected[step][rank], rtol=0, atol=1e-6)


def test_replicas_are_equal_to_the_bit_wherever_they_are_averaged(runs):
    equal_after = {
        "allreduce": range(STEPS),
        "agd": range(STEPS),
        **dict.fromkeys(("wfbp", "topk", "omgs"), range(STEPS)),
        "every-log-p": (1, 3, 5, 7),
        "post-local-sgd": (0, 1, 2, 3, 5, 7),
    }
    for name, steps in equal_after.items():
        for step in range(STEPS):
            alike = all(runs[0][name][0][step] == r[name][0][step] for r in runs)
            assert alike == (step in steps), (name, step)


def test_bytes_are_those_of_ring_all_reduces(runs):
    a_step = ring_bytes(4 * PARAMETERS, WORLD_SIZE)
    expected = {
        "allreduce": 8 * a_step,
        "agd": 8 * a_step,
        "wfbp": 8 * a_step,
        "every-log-p": 4 * 2 * a_step,  # with momentum
        "post-local-sgd": (4 + 2) * a_step,
    }
    for name, sent in expected.items():
        traffic = runs[0][name][1]
        rounded = 8 if name != "wfbp" else 8 * 4  # for each tensor of each step
        assert traffic.bytes_sent == pytest.approx(sent, abs=rounded), name
        assert traffic.exposed_seconds > 0
    assert runs[0]["agd"][1].extra_memory_bytes == 4 * PARAMETERS


def test_hooks_are_gone_after_close(runs):
    assert runs[0]["agd"][2] == 0
    assert runs[0]["omgs"][2] == 0


def resume_sparse(rank, store):
    """The weights after all steps, without a break and with one after half of them."""
    options = {"sparse": SparseConfig(density=0.1)}
    found = []
    for broken in (False, True):
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, "lags", model, optimizer, **options)
        for step in range(STEPS):
            if broken and step == STEPS // 2:
                state, place = replica_state(model, [optimizer]), strategy.place()
                strategy.close()
                model = network(1)
                optimizer = sgd(model)
                strategy = start(rank, "lags", model, optimizer, **options)
                strategy.go_to(place)
                load_replica(model, [optimizer], state)
                assert strategy.traffic().bytes_sent > 0
            take_step(strategy, optimizer, rank, step)
        notes = strategy._told()
        dist.barrier()
        strategy.close()
        found.append(flat(model).tolist())
    return found, notes


def test_what_is_carried_over_is_part_of_a_checkpoint():
    for (whole, resumed), notes in run_processes(2, resume_sparse):
        assert whole == resumed
        assert notes[0] == "gradients travelled in 4 groups, 4 of them sparse"


def warm_up(rank, store):
    """The densities of all steps, and what is told of them, with and without a warm-up."""
    found = []
    for sparse in (SparseConfig(), SparseConfig(density_warmup_steps=0)):
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, "topk", model, optimizer, epochs=1, sparse=sparse)
        densities = []
        for step in range(STEPS):
            take_step(strategy, optimizer, rank, step)
            densities.append(strategy._session._aggregation.density)
        found.append((densities, strategy._told()[1:]))
        assert strategy.against_divergence == "lower --lr, or give more --density-warmup-steps"
        dist.barrier()
        strategy.close()
    return found


def test_the_density_falls_over_the_first_half_of_a_run_of_one_epoch_unless_told_otherwise():
    for (densities, told), (constant, none) in run_processes(2, warm_up):
        assert densities == [0.25, 0.0625, 0.015625, 0.004] + 4 * [0.001]
        assert told[0] == "the density fell to 0.001 over the first 4 steps"
        assert constant == STEPS * [0.001]
        assert none == []


def carried_over(rank, group):
    model = network()
    optimizer = sgd(model)
    with gg.sparsify(
        model, optimizer, process_group=group, plan="layerwise", density=0.1
    ) as session:
        for step in range(5):
            loss_of(model, rank, step).backward()
            optimizer.step()
        session.group.barrier()
        return {"session": session.own_state()}


def go_on_from_three(rank, store):
    former = run_ranks(3, carried_over)
    model = network()
    options = SparseConfig(density=0.01, density_warmup_steps=3)
    strategy = start(rank, "omgs", model, sgd(model), sparse=options)
    strategy.start_at(7, former)
    taken = strategy.place()["session"]
    take_step(strategy, sgd(model), rank, 0)
    density = strategy._session._aggregation.density
    dist.barrier()
    strategy.close()

    def mean(places, ranks):
        held = [place["session"]["residuals"] for place in places]
        return {name: (sum(each[name] for each in held) / ranks).tolist() for name in held[0]}

    dist.all_gather_object(told := [None, None], mean([{"session": taken}], 2))
    return mean(former, 3), told, taken["counted"]["rounds"], density


def test_another_number_of_ranks_shares_out_what_was_carried_over_and_warms_up_on():
    for before, after, rounds, density in run_processes(2, go_on_from_three):
        assert rounds == 5
        assert density == 0.0625
        for name, mean in before.items():
            shares = [torch.tensor(each[name]) for each in after]
            torch.testing.assert_close(sum(shares), torch.tensor(mean))


def corrected(rank, store):
    """Weights with momentum before selection, and what it is in the optimizer."""
    found = []
    for correction, momentum in ((True, 0.9), (False, 0.9), (True, 0.0)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        sparse = SparseConfig(density=0.1, momentum_correction=correction)
        strategy = start(rank, "topk", model, optimizer, momentum=momentum, sparse=sparse)
        for step in range(STEPS):
            take_step(strategy, optimizer, rank, step)
        dist.barrier()
        settings = strategy._session._settings.momentum_correction
        strategy.close()
        found.append((flat(model).tolist(), settings, optimizer.param_groups[0]["momentum"]))
    return found


def test_momentum_is_applied_before_selection_or_after():
    for before, after, none in run_processes(2, corrected):
        assert before[1:] == (0.9, 0.0)
        assert after[1:] == (None, 0.9)
        assert none[1:] == (None, 0.0)
        assert before[0] != after[0]


def alone_with_momentum(rank, store):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)  # as two ranks saved it
    strategy = start(rank, "omgs", model, optimizer, sparse=SparseConfig(momentum_correction=True))
    strategy.close()
    settings = strategy._session._settings
    return settings.momentum_correction, optimizer.param_groups[0]["momentum"]


def test_one_rank_alone_corrects_no_momentum_and_keeps_it():
    (found,) = run_processes(1, alone_with_momentum)
    assert found == (None, 0.9)


def test_a_correction_of_no_momentum_warns():
    for options in ({"momentum": 0.0}, {"optimizer": "adamw"}):
        sparse = SparseConfig(momentum_correction=True)
        config = TrainConfig(strategy="omgs", sparse=sparse, **options)
        with pytest.warns(UserWarning, match="momentum_correction=True is not used"):
            config.warn_of_unused()


@pytest.mark.parametrize(("p", "steps"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (128, 7)])
def test_every_log_p(p, steps):
    assert EveryLogP.steps(p) == steps


class Unused(nn.Module):
    """Rank 1 alone uses `second`; `tied` shares the weights of `first`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second, self.tied = (nn.Linear(6, 6) for _ in range(3))
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.uses_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.first(x)))
        return self.second(x) if self.uses_second else x


def train_unused(rank):
    """One step by agd: whether `second` moved by a third of rank 1's gradient; the weights."""
    model = Unused()
    model.uses_second = rank == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.second.weight.detach().clone()
    strategy = start(rank, "agd", model, optimizer)
    take_step(strategy, optimizer, rank, 0)
    alone = Unused()
    alone.uses_second = True
    loss_of(alone, 1, 0).backward()
    expected = before - alone.second.weight.grad / WORLD_SIZE
    dist.barrier()
    strategy.close()
    return torch.allclose(model.second.weight, expected), flat(model).tolist()


def test_agd_takes_missing_gradients_as_zeros_and_shared_weights_once(runs):
    assert all(run["unused"][0] for run in runs)
    assert runs[0]["unused"] == runs[1]["unused"] == runs[2]["unused"]


def lose(rank, store, lost, after_steps, name, told, options):
    """Rank `lost` leaves after some steps; what the other, told to stop or not, takes that for."""
    model = nn.Sequential(network(), nn.BatchNorm1d(3))
    optimizer = sgd(model)
    stop = threading.Event()
    _lost._STOP_GRACE_SECONDS = (
        0.2  # no word comes after the loss: it is there before, or not at all
    )
    strategy = start(rank, name, model, optimizer, stop, **options)
    for _ in range(after_steps):
        take_step_on_labels(strategy, optimizer)
    dist.barrier()
    if rank == lost:
        return None
    if told:
        stop.set()
    try:
        for _ in range(4):
            take_step_on_labels(strategy, optimizer)
    except (PeerLostError, RunStopped) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def take_step_on_labels(strategy, optimizer):
    strategy.begin_step()
    strategy.backward(strategy.loss(torch.ones(5, 6), torch.zeros(5, dtype=torch.long)))
    optimizer.step()
    optimizer.zero_grad()


STOPPED = "RunStopped: the run was told to stop"
AN_ALL_REDUCE = "PeerLostError: an all-reduce failed because a rank is gone ("
AT_THE_CHANGE = {"post_local": PostLocalConfig(post_local_after=0.25)}


@pytest.mark.parametrize(
    ("name", "told", "options", "expected"),
    [
        ("allreduce", True, {}, STOPPED),
        ("agd", False, {}, AN_ALL_REDUCE),
        ("every-log-p", False, {}, "PeerLostError: an average over all ranks failed because a "),
        ("post-local-sgd", False, AT_THE_CHANGE, "PeerLostError: the start of local steps failed"),
        ("post-local-sgd", True, AT_THE_CHANGE, STOPPED),
    ],
)
def test_a_peer_that_is_gone_ends_the_run_or_is_the_stop(name, told, options, expected):
    found, _ = run_processes(2, lose, 1, 2, name, told, options)
    assert found.startswith(expected), found


@pytest.mark.parametrize(
    ("name", "told", "expected"),
    [("allreduce", False, AN_ALL_REDUCE), ("post-local-sgd", True, STOPPED)],
)
def test_a_peer_may_be_missed_in_the_second_forward_pass_where_buckets_are_agreed_on(
    name, told, expected
):
    _, found = run_processes(2, lose, 0, 1, name, told, {})
    assert found.startswith(expected), found

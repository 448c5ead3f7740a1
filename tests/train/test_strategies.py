"""Strategies in real processes, step by step, against replicas trained side by side in this one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossipgrad.train import PostLocalConfig, SparseConfig
from gossipgrad.train._result import PeerLostError
from gossipgrad.train.strategies import ring_bytes
from gossipgrad.train.strategies._averaged import EveryLogP
from support.processes import run_processes
from support.replicas import flat, network
from support.strategies import STEPS, loss_of, sgd, start, take_step

pytestmark = pytest.mark.process
WORLD_SIZE = 3
OPTIONS = {
    "allreduce": {},
    "agd": {},
    "every-log-p": {},
    "post-local-sgd": {
        "options": {"post_local": PostLocalConfig(post_local_after=0.5, local_steps=2)}
    },
    "wfbp": {},
    "topk": {"options": {"sparse": SparseConfig(density=1.0)}},  # all of it, in sparse messages
    "omgs": {
        "options": {"sparse": SparseConfig(density=1.0)}
    },  # the plan is changed in the seventh step
}
PARAMETERS = sum(p.numel() for p in network().parameters())


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


def lose(rank, store, lost, after_steps, name, options):
    """Rank `lost` leaves after some steps; what the other takes that for."""
    model = nn.Sequential(network(), nn.BatchNorm1d(3))
    optimizer = sgd(model)
    strategy = start(rank, name, model, optimizer, **options)
    for _ in range(after_steps):
        take_step_on_labels(strategy, optimizer)
    dist.barrier()
    if rank == lost:
        return None
    try:
        for _ in range(4):
            take_step_on_labels(strategy, optimizer)
    except PeerLostError as error:
        return str(error)
    return "nothing was noticed"


def take_step_on_labels(strategy, optimizer):
    strategy.begin_step()
    outputs = strategy.forward(torch.ones(5, 6))
    strategy.backward(cross_entropy(outputs, torch.zeros(5, dtype=torch.long)))
    optimizer.step()
    optimizer.zero_grad()


AT_THE_CHANGE = {"options": {"post_local": PostLocalConfig(post_local_after=0.25)}}


@pytest.mark.parametrize(
    ("name", "lost", "after_steps", "options"),
    [
        ("allreduce", 1, 2, {}),
        ("allreduce", 0, 1, {}),  # in the second forward pass, where buckets are agreed on
        ("agd", 1, 2, {}),
        ("every-log-p", 1, 2, {}),
        ("post-local-sgd", 1, 2, AT_THE_CHANGE),
    ],
)
def test_a_peer_that_is_gone_ends_the_run(name, lost, after_steps, options):
    found = run_processes(2, lose, lost, after_steps, name, options)[1 - lost]
    assert "failed because a rank is gone" in found

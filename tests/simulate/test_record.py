"""Recording a profile: of whatever takes time, whatever its order; and its command."""

import time

import pytest
import torch
from torch import nn

from gossipgrad.simulate import record_profile


class Clock:
    """Time that passes for what says so, and for nothing else."""

    now = 100.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


class Slow(torch.autograd.Function):
    """Passes on what it gets; forward and backward take their time."""

    @staticmethod
    def forward(ctx, x, clock, seconds, backward_seconds):
        ctx.clock, ctx.backward_seconds = clock, backward_seconds
        clock.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.sleep(ctx.backward_seconds)
        return grad, None, None, None


class Net(nn.Module):
    """Two layers, with known times below each."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 2, bias=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        hidden = Slow.apply(self.first(x), self.clock, 0.02, 0.03)
        return Slow.apply(self.last(hidden), self.clock, 0.0, 0.01)


class SlowSGD(torch.optim.SGD):
    def __init__(self, parameters, clock):
        super().__init__(parameters, 0.1)
        self.clock = clock

    def step(self, closure=None):
        self.clock.sleep(0.015)
        return super().step(closure)


def square(model, x):
    return model(x).square().mean()


def test_times_and_order_are_those_of_the_model(clock):
    model = Net(clock)
    profile = record_profile(
        model,
        SlowSGD(model.parameters(), clock),
        [torch.ones(5, 4)],
        square,
        steps=5,
        warm_up_steps=1,
    )
    assert profile.names[0] == "last.weight"
    assert set(profile.names[1:]) == {"first.weight", "first.bias"}  # nothing of `unused`
    assert (profile.name, profile.batch_size, profile.device) == ("Net", 5, "cpu, 1 thread")
    assert profile.source.startswith("recorded: medians over 5 steps with torch")
    assert sum(profile.elements) == 4 * 6 + 6 + 12
    assert profile.forward_seconds == pytest.approx(0.02)
    assert profile.backward_seconds == pytest.approx((0.01, 0.03, 0.0))
    assert profile.optimizer_seconds == pytest.approx(0.015)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_state_is_counted_of_what_is_trained():
    """A head without a gradient has no state, and is not in the profile either."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 800)])
    optimizer = torch.optim.AdamW(model.parameters())
    profile = record_profile(
        model, optimizer, [torch.ones(3, 8)], lambda model, x: model[0](x).mean(), steps=1
    )
    assert sorted(profile.names) == ["0.bias", "0.weight"]
    assert profile.state_copies == 2


def test_steps_that_cannot_be_recorded_are_refused_and_leave_no_hooks(clock):
    model = Net(clock)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, calls = torch.ones(2, 4), iter(range(100))

    def sometimes(model, x):
        return square(model.first if next(calls) == 1 else model, x)

    def twice(model, x):
        square(model, x).backward()
        return square(model, x)

    for trains, of, batch, loss, options in (
        (optimizer, model, [x], square, {"steps": 0}),
        (optimizer, model, [], square, {}),
        (optimizer, Net(clock), [x], square, {}),
        (optimizer, model, [x], lambda model, x: model(x), {}),
        (torch.optim.LBFGS(model.parameters()), model, [x], square, {}),
        (optimizer, model, [x], sometimes, {"steps": 2, "warm_up_steps": 0}),
        (optimizer, model, [x], twice, {}),
        (optimizer, model, [x], lambda m, x: torch.ones((), requires_grad=True), {}),
    ):
        with pytest.raises(ValueError, match=r"step|batch|optimizer|loss|gradient"):
            record_profile(of, trains, batch, loss, **options)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.gpu
def test_times_on_a_gpu():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    profile = record_profile(model, optimizer, [torch.ones(4096, 4096).cuda()], square)
    assert profile.names[-1].startswith("0.")
    assert 0 < profile.forward_seconds < sum(profile.backward_seconds)

"""Each statement of the theory, on random networks: T1 to T10 of exact merges, bounds and state."""

import copy

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.apoptosis import (
    Consumer,
    errors_of,
    folds_of,
    joint_error,
    merged,
    removal_order,
    samples_at_risk,
    split,
)
from gossipgrad.apoptosis._reference import (
    ACTIVATIONS,
    bound_of_constant,
    bound_of_pair,
    merge,
)
from support.shrinking import random, seen

WIDTH, INPUTS, OUTPUTS = 9, 5, 4


def consumer_of_samples(h, v):
    """What a linear layer reads that has a bias, with exact moments."""
    centred, y = h - h.mean(0), h @ v.T
    second = (centred.T @ centred / len(h))[None, :, None]
    return Consumer(
        v[:, None], second, h.mean(0)[None], float(y.var(0, unbiased=False).sum()), 1e12
    )


def within(consumer, budget, at_most):
    """The most neurons that the budget lets go: those kept and removed, the fold, the error."""
    order = removal_order([consumer], at_most)
    errors = errors_of([consumer], order, range(at_most + 1))
    assert errors == sorted(errors)
    count = max(n for n, error in enumerate(errors) if error <= budget)
    (fold,) = folds_of([consumer], order, count)
    return *split(order, count), fold, errors[count]


def hidden(rows, activation, x):
    return activation.function(x @ rows[:, :-1].T + rows[:, -1])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_t2_t3_bounds_of_pairs_and_constants_hold_for_every_input(name):
    activation = ACTIVATIONS[name]
    for seed in range(10):
        rows, x = random(WIDTH, INPUTS + 1, seed=seed), random(300, INPUTS, seed=50 + seed)
        norm = float((x.square().sum(1) + 1).max().sqrt())
        h = hidden(rows, activation, x)
        for j in range(WIDTH):
            bound, b = bound_of_constant(rows[j], activation, norm, x.amin(0), x.amax(0))
            assert (h[:, j] - b).abs().max() <= bound + 1e-9
            for i in {*range(WIDTH)} - {j}:
                bound, a, b = bound_of_pair(rows[j], rows[i], activation, norm)
                assert (h[:, j] - a * h[:, i] - b).abs().max() <= bound + 1e-9


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu"])
def test_t5_t6_the_joint_error_is_what_the_samples_say(name):
    h = ACTIVATIONS[name].function(random(500, WIDTH) @ random(WIDTH, WIDTH, seed=1))
    v = random(OUTPUTS, WIDTH, seed=2)
    consumer = consumer_of_samples(h, v)
    kept, removed, fold, error = within(consumer, 0.4, 6)
    assert len(removed) >= 2
    changed = h.clone()
    changed[:, removed] = h[:, kept] @ fold
    changed += (h - changed).mean(0)
    y, after = h @ v.T, changed @ v.T
    measured = (y - after).square().sum(1).mean() / (y - y.mean(0)).square().sum(1).mean()
    assert joint_error(consumer, kept, removed, fold) == pytest.approx(float(measured), rel=1e-9)
    assert float(measured) <= error <= 0.4


def test_t6_one_plan_is_that_of_the_reference():
    h = torch.relu(random(300, 12) @ random(12, 12, seed=4))
    v = random(OUTPUTS, 12, seed=5)
    kept, removed, fold, error = within(consumer_of_samples(h, v), 0.1, 8)
    expected, shares, expected_error = merge(h, v, len(removed))
    assert kept.tolist() == expected
    torch.testing.assert_close(fold, shares, rtol=1e-6, atol=1e-8)
    assert error == pytest.approx(expected_error, rel=1e-6)


def test_t7_no_sample_changes_its_class_that_was_not_at_risk():
    model = nn.Sequential(nn.Linear(INPUTS, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    x = random(400, INPUTS)
    plan = seen(model, x, [x] * 8, budget=0.05)
    with torch.no_grad():
        before = model(x)
        with merged(model, plan):
            after = model(x)
    shift = float((after - before).abs().max())
    assert shift > 0
    at_risk = samples_at_risk(before, shift)
    has_changed = before.argmax(1) != after.argmax(1)
    assert not (has_changed & ~at_risk).any()
    assert samples_at_risk(before, 0.0).sum() == 0


def test_t8_a_constant_channel_folds_exactly_inside_and_its_border_is_counted():
    torch.manual_seed(0)
    for padding, exact in ((0, slice(None)), (1, slice(2, -2))):
        conv = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=padding)
        ).double()
        with torch.no_grad():
            conv[0].weight[2] = 0
            conv[0].bias[2] = 1.5
            conv[2].weight[:, 2] *= 0.3
        x = random(16, 2, 9, 9)
        plan = seen(conv, x, [x] * 4, budget=0.5, at_most=0.17)
        (merging,) = plan.mergings
        assert merging.kept.tolist() == [0, 1, 3, 4, 5]
        before = conv(x).detach()
        plan.apply(conv)
        after = conv(x).detach()
        if padding == 0:
            assert merging.error < 1e-9
        else:
            assert merging.error > 1e-4
        deviation = (after - before)[..., exact, exact]
        assert deviation.abs().max() < (1e-6 if padding == 0 else 1.0)
        measured = (after - before).square().mean((0, 2, 3)).sum()
        variance = before.var((0, 2, 3), unbiased=False).sum()
        assert float(measured / variance) == pytest.approx(merging.error, rel=0.2, abs=1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_t9_channels_that_differ_by_batch_norms_scale_merge_in_both_modes(sign):
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False),
        nn.BatchNorm2d(6, eps=1e-12),
        nn.ReLU(),
        nn.Conv2d(6, 3, 3, bias=False),
        nn.BatchNorm2d(3),
    ).double()
    x = random(16, 2, 8, 8)
    with torch.no_grad():
        model[0].weight[4] = sign * 3.0 * model[0].weight[1]
        model[1].weight.copy_(torch.tensor([1.0, 0.7, 1.2, 0.4, sign * 2 * 0.7, 0.9]))
        model[1].bias.copy_(torch.tensor([0.1, 0.2, 0.3, -0.2, 2 * 0.2, 0.0]))
    for _ in range(200):
        model(x)
    plan = seen(model, x, [x] * 4, budget=1e-9)
    assert [len(each.kept) for each in plan.mergings] == [5]
    small = copy.deepcopy(model)
    plan.apply(small)
    for mode in (False, True):
        model.train(mode)
        small.train(mode)
        torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-5)


class Stream(nn.Module):
    """A stream of unlike channels, and what reads it behind a norm."""

    def __init__(self, norm, width=24):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Linear(12, width), norm, nn.Linear(width, 5)
        with torch.no_grad():
            self.embedding.weight.mul_(torch.linspace(0.05, 1, width)[:, None])
            norm.weight.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.embedding(x))))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_t11_a_stream_behind_a_norm_loses_channels_at_the_error_that_is_said(norm):
    torch.manual_seed(0)
    model = Stream(norm(24)).double()
    x = random(4000, 12)
    errors = []
    for budget in (0.001, 0.01, 0.05, 0.2):
        plan = seen(model, x[:4], x.split(500), budget=budget)
        if not plan.mergings:
            continue
        small = copy.deepcopy(model)
        plan.apply(small)
        with torch.no_grad(), merged(model, plan):
            torch.testing.assert_close(model(x), small(x), rtol=1e-3, atol=1e-3)
        y, after = model(x).detach(), small(x).detach()
        change = (y - after).square().sum(1).mean() / y.var(0, unbiased=False).sum()
        assert change <= 1.2 * plan.mergings[0].error <= 1.2 * budget
        assert change >= 0.45 * plan.mergings[0].error
        assert small.norm.normalized_shape == (len(small.norm.weight),)
        errors.append(change)
    assert len(errors) >= 3
    assert len(small.norm.weight) < 20


def test_a_session_names_what_is_wrong_with_its_settings():
    model = nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (
        {"budget": -1.0},
        {"every": 0},
        {"round_to": 0},
        {"batches": 300},
        {"at_most": 1.0},
        {"tolerance": float("nan")},
        {"schedule": 0.5},
        {"groups": [gg.Neurons("0", "7")]},
        {"groups": [gg.Neurons("1", "2")]},
        {"groups": [gg.Neurons("0", "2"), gg.Neurons("0", "2")]},
        {"example_input": None},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            gg.shrink(model, optimizer, **{"example_input": torch.ones(1, 2), **wrong})

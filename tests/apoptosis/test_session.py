"""A session that shrinks a network while it trains."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import gossipgrad as gg
from support.shrinking import random


def network(width=48, seed=0):
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh())
    model = model.append(nn.Linear(width, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
    return model


def batches(count, seed=0, size=64):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(size, 6, generator=generator)
        yield x, x[:, :3].sin() + 0.5 * x[:, 3:].square()


def train(model, optimizer, data):
    loss = torch.tensor(0.0)
    for x, y in data:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def loss_of(model):
    x, y = next(batches(1, seed=99, size=512))
    return float((model(x) - y).square().mean())


SETTINGS = {"example_input": torch.zeros(2, 6), "every": 20, "batches": 10, "events": 3}
SETTINGS["round_to"] = 2


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_it_gets_smaller_and_learns_on(optimizer):
    model = network()
    of = {"lr": 0.02, "momentum": 0.9} if optimizer is torch.optim.SGD else {"lr": 0.003}
    made = optimizer(model.parameters(), **of)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1000)
    ids = [id(p) for p in model.parameters()]
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    with gg.shrink(model, made, budget=0.03, **SETTINGS) as session:
        train(model, made, batches(100))
        stats, widths = session.stats(), session.widths()
        assert sum(session.spent.values()) <= 0.03 * len(widths) + 1e-9
        assert all(width % 2 == 0 for width in widths.values())
        assert [e.position for e in session.history] == [20, 40, 60]
    scheduler.step()
    assert stats.events == 3
    assert stats.removed == sum(48 - width for width in widths.values()) > 10
    assert stats.parameters == sum(p.numel() for p in model.parameters()) < stats.parameters_before
    assert [id(p) for p in model.parameters()] == ids
    for p, state in made.state.items():
        assert all(t.shape == p.shape for t in state.values() if t.ndim)
    assert len(seen) == 100
    assert seen[-1] == model[0].weight.shape
    assert loss_of(model) < 0.5 * loss_of(network())


@pytest.mark.parametrize("harm", [True, False])
def test_what_the_loss_notices_is_undone(harm):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls = []

    def evaluate():
        calls.append(model.training)
        return loss_of(model) if not harm else float(len(calls))

    tolerance = 0.0 if harm else 10.0
    with gg.shrink(
        model, optimizer, budget=0.1, evaluate=evaluate, tolerance=tolerance, **SETTINGS
    ) as session:
        train(model, optimizer, batches(65))
        assert session.stats().undone == (3 if harm else 0)
        assert (session.widths() == {"0": 48, "2": 48}) == harm
        assert calls == [False] * 6
        assert model.training
        for event in session.history:
            assert event.applied != harm
            assert event.loss_before is not None


def test_plan_and_apply_are_two_steps_and_copies_follow(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    with gg.shrink(model, optimizer, copies=[mean.module], **SETTINGS) as session:
        session.look()
        for data in batches(12):
            train(model, optimizer, [data])
            mean.update_parameters(model)
        plan = session.plan(0.02)
        assert session.widths() == {"0": 48, "2": 48}
        found = session.certify(plan, next(batches(1, seed=5))[0])
        assert 0 <= found.changed <= found.at_risk <= 1
        assert found.samples == 64
        torch.save(plan.state_dict(), tmp_path / "plan.pt")
        loaded = gg.ShrinkPlan.from_state_dict(torch.load(tmp_path / "plan.pt"))
        assert str(loaded) == str(plan)
        session.apply(loaded)
        assert len(plan) == sum(48 - width for width in session.widths().values()) > 0
        mean.update_parameters(model)
        with pytest.raises(ValueError, match="neurons"):
            plan.apply(model, [optimizer])
        with pytest.raises(ValueError, match="does not fit"):
            plan.apply(nn.Sequential(nn.Linear(6, 48)))
        train(model, optimizer, batches(3))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's own compiler
def test_compiled_code_follows_more_often_than_it_may_be_compiled():
    model, shapes = network(), []

    def backend(graph, inputs):
        shapes.append(model[0].weight.shape)
        return graph.forward

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend=backend)
    settings = {**SETTINGS, "every": 3, "batches": 2, "events": 4, "at_most": 0.1}
    with torch._dynamo.config.patch(recompile_limit=2):
        train(compiled, optimizer, batches(1))
        with gg.shrink(model, optimizer, budget=0.5, **settings) as session:
            train(compiled, optimizer, batches(16))
            assert session.stats().recompilations == 4
    assert {width for width, _ in shapes} >= {e.widths["0"][1] for e in session.history}


def test_convolutions_shrink_in_training():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.1), nn.Linear(16 * 16, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = random(64, 1, 8, 8).float()
    settings = {**SETTINGS, "example_input": x, "batches": 20, "round_to": 4}
    with gg.shrink(model, optimizer, budget=0.2, **settings) as session:
        train(model, optimizer, [(x, x[:, 0, 0, :4])] * 70)
        assert session.stats().removed > 4
        assert {width % 4 for width in session.widths().values()} == {0}
    assert model[1].running_mean.shape == model[1].weight.shape == (model[0].out_channels,)
    assert model[8].in_features == 16 * model[4].out_channels


def test_an_optimizer_that_cannot_shrink_is_refused_at_the_start():
    model = network()
    for optimizer in (torch.optim.LBFGS(model.parameters()), gg.SOAP(model)):
        with pytest.raises(ValueError, match=type(optimizer).__name__):
            gg.shrink(model, optimizer, **SETTINGS)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_a_batch_that_is_not_finite_stops_neither_training_nor_events(bad):
    """The loop looks at the loss and leaves the batch out."""
    model = network()
    made = torch.optim.SGD(model.parameters(), lr=0.02)
    with gg.shrink(model, made, budget=0.03, **{**SETTINGS, "events": 2}) as session:
        for number, (x, y) in enumerate(batches(44)):
            if number in (14, 33):  # one in each window that is measured
                x[5, 3] = bad
            loss = (model(x) - y).square().mean()
            if loss.isfinite():
                loss.backward()
                made.step()
            made.zero_grad()
        assert len(session.history) == 2
        if bad != 1e30:
            assert all(event.applied for event in session.history)
            assert session.stats().removed > 0
    assert loss.isfinite()
    assert all(p.isfinite().all() for p in model.parameters())


class Pair(nn.Module):
    """A student and a frozen teacher, which may stay in evaluation mode."""

    def __init__(self, keeps_eval):
        super().__init__()
        self.student, self.teacher = network(), network(seed=1).requires_grad_(False)
        self.keeps_eval = keeps_eval

    def train(self, mode=True):
        super().train(mode)
        self.teacher.train(mode and not self.keeps_eval)
        return self

    def forward(self, x):
        return self.student(x) + self.teacher(x)


@pytest.mark.parametrize("keeps_eval", [True, False])
@pytest.mark.parametrize("holds_all", [True, False])
def test_a_frozen_teacher_is_not_touched_and_the_student_shrinks(keeps_eval, holds_all):
    model = Pair(keeps_eval)
    before = [p.clone() for p in model.teacher.parameters()]
    trained = model.parameters() if holds_all else model.student.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.01)
    with gg.shrink(model, optimizer, budget=0.1, **SETTINGS) as session:
        train(model, optimizer, batches(65))
        assert {*session.widths()} == {"student.0", "student.2"}
        assert max(session.widths().values()) < 48
        assert session.stats().events == 3
        assert "teacher.0" in session.refused
    assert all(torch.equal(*each) for each in zip(before, model.teacher.parameters(), strict=True))


class Experts(nn.Module):
    """The second expert gets no sample in training, the others half of them each."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(network() for _ in range(3))

    def forward(self, x):
        out = x.new_zeros(len(x), 3)
        best = (x[:, 0] > 0).long() * 2
        if not self.training:
            best = torch.arange(len(x)) % 3
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_an_expert_that_sees_no_batch_sits_out():
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {**SETTINGS, "example_input": next(batches(1))[0]}
    with gg.shrink(model, optimizer, budget=0.1, **settings) as session:
        train(model, optimizer, batches(65))
        widths = session.widths()
        assert all(event.applied for event in session.history)
    assert widths["experts.1.0"] == widths["experts.1.2"] == 48
    assert max(widths[f"experts.{n}.{layer}"] for n in (0, 2) for layer in (0, 2)) < 48


def test_the_error_is_that_of_the_outputs_without_the_noise_of_dropout():
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = next(batches(1, size=4000))[0]
    with gg.shrink(model, optimizer, **{**SETTINGS, "example_input": x[:4]}) as session:
        session.look()
        for part in x.split(500):
            model(part)
        plan = session.plan(0.05)
        model.eval()
        with torch.no_grad():
            before = model(x)
            session.apply(plan)
            change = (model(x) - before).square().sum(1).mean()
    (merging,) = plan.mergings
    expected = float(change / before.var(0, unbiased=False).sum())
    assert merging.error == pytest.approx(expected, rel=0.1)


class Mine(nn.Module):
    """A layer of the user's own, with its weight the other way round."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x):
        return x @ self.weight


def test_layers_of_other_classes_are_described():
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(9, 9))
    model = nn.Sequential(Mine(6, 9), nn.ReLU(), weighted, nn.ReLU(), nn.Linear(9, 9), Mine(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gg.shrink(model, optimizer, example_input=torch.ones(2, 6)) as session:
        lines = session.describe().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["0", "2", "4", "5"]
    assert all("stays" in line for line in lines[1:])


class Branches(nn.Module):
    """Twice the same two convolutions, over a large and over a small image."""

    def __init__(self):
        super().__init__()
        self.small, self.large = (
            nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 1)) for _ in range(2)
        )
        self.large.load_state_dict(self.small.state_dict())

    def forward(self, x):
        return self.small(x[..., :6, :6]).mean((2, 3)) + self.large(x).mean((2, 3))


def test_the_budget_goes_where_a_step_gets_fastest_and_widths_are_rounded():
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [random(256, 1, 18, 18, seed=seed).float() for seed in range(12)]
    settings = {**SETTINGS, "example_input": batches[0][:2], "round_to": 8}
    is_first = False
    with gg.shrink(model, optimizer, **settings) as session:
        session.look()
        for x in batches:
            model(x)
        for budget in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64):
            plan = session.plan(budget)
            kept = {each.neurons.name: len(each.kept) for each in plan.mergings}
            assert sum(each.error for each in plan.mergings) <= 2 * budget
            if len(plan) > 8:  # of the first eight the errors are nearly equal
                assert kept.get("large.0", 32) <= kept.get("small.0", 32)
            is_first |= kept.get("large.0", 32) < kept.get("small.0", 32)
            assert {width % 8 for width in kept.values()} <= {0}
    assert is_first
    assert kept == {"large.0": 16, "small.0": 16}


def test_layers_of_which_muon_polarises_parts_stay():
    """Their parts would change in size."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    for split, stays in (({}, False), ({"2": 4}, True)):
        optimizer = gg.Muon(model, split=split)
        with gg.shrink(model, optimizer, example_input=torch.zeros(2, 8)) as session:
            assert ("gg.Muon" in session.describe()) is stays

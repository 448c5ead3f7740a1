"""What every family must pass: see `support/families.py`."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gossipgrad as gg
from support.families import (
    DISTANCES,
    FAMILIES,
    LOCKSTEP,
    ROUND_STEPS,
    STEPS,
    batches,
    on_ranks,
    train,
)
from support.replicas import network

# `make test` has their convergence and their resumption alone.
VARIANTS = {
    *(
        "gossip, sync",
        "gossip, sync with momentum",
        "gossip, state",
        "gossip, bf16 wire",
        "sparsify, fixed plan",
    ),
    *("suda, ed on a ring", "suda, extra on a ring"),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else [])
        for name in FAMILIES
    ]
)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def in_lockstep(request, family):
    return request.node.callspec.params["family"] in LOCKSTEP


@pytest.fixture
def steps(request):
    return STEPS.get(request.node.callspec.params["family"], 80)


@pytest.fixture
def round_steps(request, family):
    return ROUND_STEPS.get(request.node.callspec.params["family"], 1)


@pytest.fixture
def most_distance(request, family):
    return DISTANCES.get(request.node.callspec.params["family"], 0.03)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_converges_on_a_quadratic(family, steps, most_distance):
    """Every rank pulls to another point; the consensus settles at the mean of all."""

    def rank_main(rank, attach):
        point = nn.Parameter(torch.zeros(5))
        model = nn.Module()
        model.point = point
        optimizer = torch.optim.SGD(model.parameters(), lr=15 / steps)
        goal = torch.arange(5.0) + rank
        with attach(model, optimizer) as session:
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = 15 / steps * (1 - step / steps)
                (0.5 * (point - goal).square().sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 2 == 0:  # those who pull more often would pull the mean with them
                    session.group.barrier()
            distance = session.consensus_distance()
            with session.consensus():
                return point.detach().clone(), distance

    for point, distance in on_ranks(family, rank_main):
        torch.testing.assert_close(point, torch.arange(5.0) + 1.5, rtol=0, atol=0.03)
        assert distance < most_distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_dtype_shape_and_storage(family, dtype):
    def rank_main(rank, attach):
        model = network(dtype=dtype)
        before = [(p.dtype, p.shape, p.data_ptr()) for p in model.parameters()]
        optimizer = torch.optim.Adam(model.parameters())
        with attach(model, optimizer) as session:
            for x, y in batches(rank, 3):
                (model(x.to(dtype)) - y.to(dtype)).square().mean().backward()
                optimizer.step()
            with session.consensus():
                pass
        assert before == [(p.dtype, p.shape, p.data_ptr()) for p in model.parameters()]
        for p in model.parameters():
            assert optimizer.state[p]["exp_avg"].dtype == dtype
            assert torch.isfinite(p).all()

    on_ranks(family, rank_main)


@pytest.mark.filterwarnings("ignore:state_dict.. of one replica")
def test_state_dicts_have_no_trace_of_the_session(family):
    def rank_main(rank, attach):
        model, plain = network(), network()
        optimizer = torch.optim.Adam(model.parameters())
        other = torch.optim.Adam(plain.parameters())
        with attach(model, optimizer):
            train(model, optimizer, rank, count=2)
            train(plain, other, rank, count=2)
            assert model.state_dict().keys() == plain.state_dict().keys()
            ours, theirs = optimizer.state_dict(), other.state_dict()
            assert ours["param_groups"] == theirs["param_groups"]
            assert {k: v.keys() for k, v in ours["state"].items()} == {
                k: v.keys() for k, v in theirs["state"].items()
            }

    on_ranks(family, rank_main)


def test_loading_on_all_ranks_and_broadcasting_resumes(family):
    """Rank 0's checkpoint, loaded in mid-session, is where everyone goes on."""

    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with attach(model, optimizer) as session:
            train(model, optimizer, rank, count=3)
            session.broadcast_()
            kept = {k: v.clone() for k, v in model.state_dict().items()}
            state = torch.optim.Adam(network().parameters()).state_dict() | {
                "state": {
                    k: {n: t.clone() for n, t in v.items()}
                    for k, v in optimizer.state_dict()["state"].items()
                },
                "param_groups": optimizer.state_dict()["param_groups"],
            }
            train(model, optimizer, rank, count=3)
            if rank == 0:
                model.load_state_dict(kept)
                optimizer.load_state_dict(state)
            session.broadcast_()
            for name, value in model.state_dict().items():
                assert torch.equal(value, kept[name])
            assert all(s["step"] == 3 for s in optimizer.state.values())
            train(model, optimizer, rank, count=1)

    on_ranks(family, rank_main)


def test_param_groups_and_schedulers_stay_each_ranks_own(family):
    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.SGD(
            [
                {"params": model[0].parameters(), "lr": 0.1},
                {"params": model[2].parameters(), "lr": 0.0},
            ]
        )
        before = [p.detach().clone() for p in model[2].parameters()]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with attach(model, optimizer):
            train(model, optimizer, rank, count=3, scheduler=scheduler)
            assert [g["lr"] for g in optimizer.param_groups] == [0.0125, 0.0]
        for p, was in zip(model[2].parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), was, rtol=0, atol=1e-7)

    on_ranks(family, rank_main)


def test_clipping_is_the_users_and_global(family):
    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        norms = []

        def clip():
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())

        with attach(model, optimizer):
            train(model, optimizer, rank, count=4, after_backward=clip)
        assert all(norm == pytest.approx(1e-3, rel=1e-3) for norm in norms)

    on_ranks(family, rank_main)


def test_gradient_accumulation(family, round_steps):
    """Two backward passes a step are one round, of which the first is told to send nothing."""

    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with attach(model, optimizer) as session:
            for number, (x, y) in enumerate(batches(rank, 12)):
                with nullcontext() if number % 2 else session.no_sync():
                    ((model(x) - y).square().mean() / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            session.wait()
            assert session.stats().rounds == 6 // round_steps

    on_ranks(family, rank_main)


def autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def checkpointed(model, x):
    return model[2](checkpoint(model[:2], x, use_reentrant=False))


@pytest.mark.parametrize("forward", [autocast, checkpointed])
def test_passes_with_autocast_or_checkpoints_learn(family, forward):
    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = [*batches(rank, 12)]

        def loss(x, y):
            return (forward(model, x) - y).square().mean()

        before = loss(*data[0]).item()
        with attach(model, optimizer):
            for batch in data:
                loss(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert loss(*data[0]).item() < before

    on_ranks(family, rank_main)


@pytest.mark.filterwarnings("ignore:state_dict.. of one replica")
@pytest.mark.parametrize("family", ["gossip, sync"], indirect=True)
def test_what_is_loaded_is_not_mixed_with_what_was_in_flight(family):
    """In mode sync the last round waits for the next forward pass."""

    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with attach(model, optimizer) as session:
            train(model, optimizer, rank, count=3)
            loaded = {k: torch.full_like(v, rank) for k, v in model.state_dict().items()}
            train(model, optimizer, rank, count=3)
            model.load_state_dict(loaded)
            session.wait()
            for name, value in model.state_dict().items():
                assert torch.equal(value, loaded[name])

    on_ranks(family, rank_main)


def test_a_step_that_the_scaler_skips_still_meets_its_partner(family, in_lockstep, round_steps):
    """Rank 1 overflows in two of its steps; nobody waits, and rounds stay in step."""

    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        skipped = 0
        with attach(model, optimizer, scaler=scaler) as session:
            for number, (x, y) in enumerate(batches(rank, 8)):
                factor = float("inf") if rank == 1 and number in (2, 5) else 1.0
                scaler.scale(factor * (model(x) - y).square().mean()).backward()
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                skipped += scaler.get_scale() < before
            session.wait()
            stats = session.stats()
            session.group.barrier()
        assert skipped == (2 if rank == 1 or in_lockstep else 0)
        assert stats.rounds == 8 // round_steps
        if not in_lockstep and not isinstance(session.mode, gg.Stale):
            assert stats.outcomes["late"] == stats.outcomes["void"] == 0
        assert all(torch.isfinite(p).all() for p in model.parameters())

    on_ranks(family, rank_main)


def test_a_scaler_that_was_not_given_is_noticed(family):
    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        with attach(model, optimizer):
            x, y = next(batches(rank))
            scaler.scale((model(x) - y).square().mean()).backward()
            if rank == 0:  # warnings are caught process-wide, so on one thread only
                with pytest.warns(
                    UserWarning, match=r"Pass (gossip|sparsify|suda)\(\.\.\., scaler=scaler\)"
                ):
                    scaler.step(optimizer)

    on_ranks(family, rank_main, world_size=1)


def test_compiled_model_and_step(family):
    """The eager backend runs the graph capture of torch.compile without a C++ compiler."""
    torch._dynamo.reset()

    def rank_main(rank, attach):
        model = network()
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with attach(compiled, optimizer) as session:
            first = train(compiled, optimizer, rank, count=3)
            with session.consensus():
                assert torch.isfinite(compiled(torch.ones(1, 6))).all()
            last = train(compiled, optimizer, rank, count=20)
        assert last < first

    on_ranks(family, rank_main, world_size=1)


def test_world_size_1_is_the_plain_optimizer(family, round_steps):
    if round_steps > 1:
        pytest.skip("the outer optimizer steps without partners, too")
    plain = network()
    optimizer = torch.optim.Adam(plain.parameters())
    train(plain, optimizer, 0)

    def rank_main(rank, attach):
        model = network()
        o = torch.optim.Adam(model.parameters())
        with attach(model, o) as session:
            train(model, o, 0)
            with session.consensus():
                pass
        return [p.detach() for p in model.parameters()]

    (ours,) = on_ranks(family, rank_main, world_size=1)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain.parameters(), strict=True))


def test_hooks_are_gone_after_close(family):
    def rank_main(rank, attach):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())

        def hooks():
            of_optimizer = {k: len(v) for k, v in vars(optimizer).items() if "hooks" in k}
            of_parameters = [bool(p._post_accumulate_grad_hooks) for p in model.parameters()]
            of_model = {k: len(v) for k, v in vars(model).items() if "hooks" in k}
            return of_optimizer, of_parameters, of_model

        before = hooks()
        session = attach(model, optimizer)
        assert hooks() != before
        session.close()
        assert hooks() == before

    on_ranks(family, rank_main)

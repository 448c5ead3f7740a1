"""Optimizers that step in turn, each with its own loss, as in a GAN."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Group
from support.ranks import run_ranks
from support.sparse import same_weights


def players():
    torch.manual_seed(0)
    return [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)]


def losses(g, d, rank):
    """What the discriminator trains on, and what the generator does, through it."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return lambda: d(x).square().mean(), lambda: -10 * d(g(x)).mean()


def test_each_with_a_session_of_its_own_gets_its_own_gradients():
    """Applied means, plus the mean of what is carried over, are the sum of the mean gradients."""
    store = dist.HashStore()

    def rank_main(rank, group):
        g, d = players()
        d_loss, g_loss = losses(g, d, rank)
        g_optimizer, d_optimizer = (torch.optim.SGD(m.parameters(), lr=0.0) for m in (g, d))
        other = Group(dist.PrefixStore("other", store), rank, 2, timeout_seconds=60.0)
        got, due = [0.0, 0.0], [0.0, 0.0]
        settings = {"plan": "single", "density": 0.1}
        with (
            gg.sparsify(g, g_optimizer, process_group=group, **settings) as g_session,
            gg.sparsify(d, d_optimizer, process_group=other, **settings) as d_session,
        ):
            for _ in range(5):
                d_optimizer.zero_grad()
                with g_session.no_sync():
                    d_loss().backward()
                d_optimizer.step()
                got[1] += d.weight.grad
                g_optimizer.zero_grad()
                with d_session.no_sync():
                    g_loss().backward()
                g_optimizer.step()
                for place, (m, loss) in enumerate(((g, g_loss), (d, d_loss))):
                    due[place] += torch.autograd.grad(loss(), m.weight)[0]
                got[0] += g.weight.grad
            rest = [s.state_dict()["session"]["residuals"] for s in (g_session, d_session)]
            assert g_session.stats().rounds == d_session.stats().rounds == 5
            g_session.group.barrier()
        return got, due, [each["weight"] for each in rest]

    told = run_ranks(2, rank_main)
    for place in range(2):
        carried, due = (sum(each[part][place] for each in told) / 2 for part in (2, 1))
        torch.testing.assert_close(told[0][0][place] + carried, due, rtol=1e-9, atol=1e-9)


def in_one_session(rank, group, **settings):
    """Two players, their losses and optimizers, and the session that they share."""
    g, d = players()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, d)]
    settings = {"plan": "single", "density": 0.1, **settings}
    session = gg.sparsify(nn.ModuleList([g, d]), optimizers, process_group=group, **settings)
    return [g, d], *losses(g, d, rank), optimizers, session


def test_in_one_session_they_are_warned_of():
    def rank_main(rank, group):
        _, d_loss, g_loss, (g_optimizer, d_optimizer), session = in_one_session(rank, group)
        with session:
            for loss, optimizer in ((d_loss, d_optimizer), (g_loss, g_optimizer)):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()

    with pytest.warns(UserWarning, match="thrown away before their optimizer stepped"):
        run_ranks(2, rank_main)


def test_who_steps_less_often_with_all_that_has_met_is_not_warned():
    def rank_main(rank, group):
        both, d_loss, g_loss, optimizers, session = in_one_session(rank, group)
        with session:
            for step in range(4):
                (d_loss() + g_loss()).backward()
                for optimizer in optimizers[step % 2 :]:
                    optimizer.step()
                    optimizer.zero_grad()
        return [m.weight.detach() for m in both]

    assert same_weights(run_ranks(2, rank_main))


def test_a_step_that_a_scaler_leaves_out_is_not_warned_of_where_nothing_is_compressed():
    def rank_main(rank, group):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        (g, _), d_loss, g_loss, optimizers, session = in_one_session(
            rank, group, methods=("dense",), scaler=scaler
        )
        factors = [1.0, float("inf"), 1.0]
        g.weight.register_hook(lambda gradient: gradient * factors.pop())
        with session:
            while factors:
                scaler.scale(d_loss() + g_loss()).backward()
                for optimizer in reversed(optimizers):
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            assert scaler.get_scale() == 2.0
            session.group.barrier()

    run_ranks(2, rank_main)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_passes_whose_gradients_have_a_graph_are_not_warned_of():
    """They add up in new tensors: that is not the end of the old."""

    def rank_main(rank, group):
        _, d_loss, g_loss, (g_optimizer, d_optimizer), session = in_one_session(rank, group)
        with session:
            for create_graph in (False, True, True):
                d_loss().backward(create_graph=create_graph)
                d_optimizer.step()
                d_optimizer.zero_grad()
                g_loss().backward(create_graph=create_graph)
            g_optimizer.step()
            g_optimizer.zero_grad()
            session.group.barrier()

    run_ranks(2, rank_main)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_a_gradient_that_no_optimizer_of_a_session_has_is_warned_of_once():
    def rank_main(rank, group):
        model = layers()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        with gg.sparsify(model, optimizer, process_group=group, plan="single") as session:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            session.group.barrier()

    with pytest.warns(UserWarning, match=r"'0\.weight' .*requires_grad_\(False\)") as told:
        run_ranks(2, rank_main)
    assert len(told) == 2  # one a rank


def test_the_gradients_of_another_session_are_not():
    store = dist.HashStore()

    def rank_main(rank, group):
        model = layers()
        model[0].bias.requires_grad_(False)
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
        other = Group(dist.PrefixStore("other", store), rank, 2, timeout_seconds=60.0)
        with (
            gg.sparsify(model, first, process_group=group, plan="single") as session,
            gg.sparsify(model, second, process_group=other, plan="single"),
        ):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                first.step()
                second.step()
            session.group.barrier()

    run_ranks(2, rank_main)

"""Optimizers that step in turn, each with its own loss, as in a GAN."""

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Group
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS


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
        other = Group(dist.PrefixStore("other", store), rank, 2, timeout_seconds=HANG_SECONDS)
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

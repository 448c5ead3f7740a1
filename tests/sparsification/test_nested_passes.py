"""Backward passes inside backward passes: reentrant checkpoints, and those that users nest."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gossipgrad as gg
from support.sparse import on_ranks, same_weights


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 6, generator=generator).requires_grad_()


def plain(model, x):
    return model(x)


def each_in_one(model, x):
    """All parameters are in segments: the outer pass never has a gradient of one itself."""
    return checkpoint(model[1:], checkpoint(model[0], x, use_reentrant=True), use_reentrant=True)


def first_in_one(model, x):
    return model[1:](checkpoint(model[0], x, use_reentrant=True))


def last_in_one(model, x):
    return checkpoint(model[1:], model[0](x), use_reentrant=True)


def one_in_another(model, x):
    def inner(h):
        return checkpoint(model[1:], model[0](h), use_reentrant=True)

    return checkpoint(inner, x, use_reentrant=True)


def not_reentrant(model, x):
    return checkpoint(model, x, use_reentrant=False)


def trained(forwards, steps=4, **settings):
    """The weights after some steps in which `forwards[rank](model, x)` is the model."""

    def use(me):
        for step in range(steps):
            me.optimizer.zero_grad()
            x = batch_of(me.rank, step)
            forwards[me.rank](me.model, x).square().mean().backward()
            me.optimizer.step()
        assert me.session.stats().rounds == steps
        return me.weights()

    return on_ranks(use, **settings)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in its forward
@pytest.mark.parametrize(
    "forwards",
    [
        *([each] * 2 for each in (each_in_one, first_in_one, last_in_one, not_reentrant)),
        [one_in_another] * 2,
        [plain, each_in_one],
    ],
)
def test_a_pass_with_checkpoints_is_one_round(forwards):
    told = trained(forwards, momentum_correction=0.9)
    assert same_weights([*told, *trained([plain, plain], momentum_correction=0.9)])


def test_a_parameter_of_two_segments_is_refused_by_name_and_nobody_hangs():
    def use(me):
        h = checkpoint(me.model[0], batch_of(me.rank, 0), use_reentrant=True)
        out = each_in_one(me.model, h[:, :6])
        with pytest.raises(gg.GossipError, match="use_reentrant=False"):
            out.sum().backward()
        with pytest.raises(gg.GossipError):
            me.optimizer.step()

    on_ranks(use, together=False)


def test_a_session_whose_pass_raised_lets_go_though_its_graph_is_kept():
    def fail(grad):
        raise ZeroDivisionError

    def use(me):
        h = me.model[0](batch_of(me.rank, 0))
        h.register_hook(fail)
        loss = checkpoint(me.model[1:], h, use_reentrant=True).sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        with pytest.raises(gg.GossipError):
            me.optimizer.step()
        me.session.close()
        me.optimizer.step()
        with gg.sparsify(me.model, me.optimizer):
            return loss.item()

    on_ranks(use, together=False)

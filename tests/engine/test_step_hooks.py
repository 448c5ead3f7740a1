"""One round a step, whatever the optimizer's step does; and no hook left behind."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Hub
from support.ranks import run_ranks
from support.replicas import flat, network, set_gradients
from support.sessions import run_sessions


class Extended(torch.optim.SGD):
    """Calls its parent's step, of which torch fires the hooks, too, where that has an instance."""

    fails = False

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure=None):
        if self.fails:
            raise MemoryError
        return super().step(closure)


@pytest.fixture
def _parent():
    """A plain instance of the parent makes torch wrap its `step`, with the hooks."""
    model = network()
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.usefixtures("_parent")
@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_subclass_that_calls_its_parents_step_makes_one_round_a_step(mode):
    def use(me):
        positions = []
        for step in range(4):
            me.optimizer.fails = step == 2 and me.rank == 0
            if me.optimizer.fails:
                with pytest.raises(MemoryError):
                    me.train()
                me.optimizer.fails = False
            me.train()
            positions.append(me.session.position)
        return positions, me.session.stats().rounds

    found = run_sessions(2, use, optimizer=lambda p: Extended(p, lr=0.1), mode=mode)
    assert found == [([1, 2, 3, 4], 4)] * 2


def test_a_state_in_the_middle_of_a_round_counts_it_once():
    def use(me):
        for _ in range(4):
            me.train()
            me.session.state_dict()
        return me.session.stats().rounds

    assert run_sessions(2, use, every=2) == [2, 2]


@pytest.mark.parametrize("payload", ["weights", "gradients+weights"])
def test_a_session_that_cannot_begin_leaves_nothing_behind(payload):
    """Its ranks do not agree; each trains on alone."""
    hub = Hub(2)

    def rank_main(rank, group):
        model = network()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        with pytest.raises(gg.AgreementError):
            gg.gossip(
                model,
                optimizer,
                process_group=group,
                transport=lambda group: hub.transport(group.rank),
                scaler=scaler if payload == "weights" else None,
                every=1 + rank,
                payload=payload,
            )
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not optimizer._optimizer_load_state_dict_post_hooks
        assert "step" not in vars(scaler)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        before = flat(model)
        set_gradients(model, rank, 0)
        optimizer.step()
        assert not torch.equal(flat(model), before)

    run_ranks(2, rank_main)

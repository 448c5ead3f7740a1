"""Contests of plans lose nothing, and ranks that fail in one leave states that fit together."""

import threading

import pytest
import torch

import gossipgrad as gg
from gossipgrad.sparsification import Replan, _aggregation, _planner
from support.contests import CLOSE, FIRST, kind, kinds_of, say
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import backward_of, blocks, costs_that_say, same_weights, start


def gradients_of(model, rank, step, *, finite=True):
    """Those of this rank, before they meet."""
    found = {}
    hooks = [
        p.register_hook(lambda grad, name=name: found.update({name: grad.clone()}))
        for name, p in model.named_parameters()
    ]
    if not finite:
        hooks.append(model[2].bias.register_hook(lambda grad: grad * float("inf")))
    backward_of(model, rank, step)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("settings", [{}, {"value_dtype": torch.bfloat16}], ids=["wide", "narrow"])
def test_all_gradients_of_a_contest_are_in_the_weights_or_carried_over(monkeypatch, settings):
    """Also where steps of it are left out that were not finite on one rank."""
    say(monkeypatch, {"sparse": 1.0, "mixed": 1.0, "dense": 0.97})
    steps, left_out = FIRST + 20, (FIRST + 4, FIRST + 11)

    def rank_main(rank, group):
        model = network().double()
        model, optimizer, session = start(group, "optimal", model=model, **settings)
        with session:
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            brought = {name: torch.zeros_like(p) for name, p in before.items()}
            ran = []
            for step in range(steps):
                ran.append(kind(session._aggregation.merges))
                finite = step not in left_out
                grads = gradients_of(model, rank, step, finite=finite or rank == 0)
                if finite:
                    optimizer.step()
                    for name, grad in grads.items():
                        brought[name] += grad
            assert [kind for kind, _ in blocks(ran)] == ["sparse", "dense"] * 2 + ["sparse"]
            assert session.stats().nonfinite_rounds == len(left_out)
            carried = session.state_dict()["session"]["residuals"]
            assert carried.keys() == brought.keys()
            for name, p in model.named_parameters():
                arrived = (before[name] - p.detach()) / 0.1 + group.mean_(carried[name])
                torch.testing.assert_close(arrived, group.mean_(brought[name]))

    run_ranks(2, rank_main)


def test_a_rank_that_is_lost_in_a_contest_leaves_a_state_to_go_on_from(monkeypatch):
    say(monkeypatch, CLOSE)

    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal")
        with session:
            for step in range(FIRST + 7):
                backward_of(model, rank, step)
                optimizer.step()
            if rank == 0:
                with pytest.raises(gg.GossipError):
                    backward_of(model, rank, step)
                return session.state_dict()
        return None

    state, _ = run_ranks(2, rank_main)
    other = {**state, "session": {**state["session"], "rank": 1}}
    ran, _, _ = kinds_of(20, states=[state, other])
    assert blocks(ran)[:2] == [("sparse", 3), ("dense", 5)]


@pytest.mark.parametrize("failed_in", [5, 8], ids=["back", "at last"])
def test_states_fit_together_where_one_rank_lacked_memory_for_the_groups_of_a_plan(
    monkeypatch, failed_in
):
    """The other has them, and knows nothing of it before its next round."""
    say(monkeypatch, CLOSE)
    real, made, stepped = _aggregation.made_anew, [0, 0], threading.Barrier(2)

    def made_anew(*args):
        rank = int(threading.current_thread().name.split()[-1])
        made[rank] += 1
        if rank and made[rank] == failed_in:
            raise MemoryError("it does not fit")
        return real(*args)

    monkeypatch.setattr(_aggregation, "made_anew", made_anew)

    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal")
        with session:
            for step in range(99):
                try:
                    backward_of(model, rank, step)
                except (MemoryError, gg.GossipError):
                    if rank:  # whose last gradients have met
                        optimizer.step()
                    break
                optimizer.step()
            stepped.wait(20)
            return session.state_dict(), [p.detach() for p in model.parameters()]

    told = run_ranks(2, rank_main)
    assert same_weights([weights for _, weights in told])
    monkeypatch.setattr(_aggregation, "made_anew", real)
    ran, _, _ = kinds_of(10, states=[state for state, _ in told])
    assert ran[0] == ("dense" if failed_in == 8 else "sparse")


def test_ranks_that_would_predict_other_times_go_by_those_of_rank_0(monkeypatch):
    say(monkeypatch, CLOSE)

    def measured(settings, group, *_, density, **__):
        dense = 2e-3 if density == 0.2 else 1e-4
        return costs_that_say(sparse=1e-3 if group.rank == 0 else 1e-9, dense=dense)(settings)

    monkeypatch.setattr(_planner, "measure_costs", measured)
    monkeypatch.setattr(_planner, "_travelled", lambda aggregation: [0.5])
    course = gg.sparsification.Warmup(densities=(0.2,), steps=FIRST + 5, then=0.05)
    ran, _, _ = kinds_of(40, density=course, replan=Replan(every=2, contest=False))
    assert (ran[0], ran[-1]) == ("sparse", "dense")

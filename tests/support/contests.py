"""Sparse sessions whose plans compete, in steps that take what a test says."""

from gossipgrad.sparsification import _planner
from gossipgrad.sparsification._rivals import rivals_of
from gossipgrad.sparsification._verdicts import compresses
from support.ranks import run_ranks
from support.sparse import backward_of, costs_that_say, same_weights, start

__all__ = [
    "CLOSE",
    "DENSE_FASTER",
    "FIRST",
    "SPARSE_PREDICTED",
    "kind",
    "kinds_of",
    "say",
]

FIRST = 7  # rounds, before there is a plan
DENSE_FASTER = {"sparse": 3.0, "mixed": 3.0, "dense": 1.0}
CLOSE = {"sparse": 1.2, "mixed": 1.2, "dense": 1.0}
SPARSE_PREDICTED = {"sparse": 1e-3, "dense": 2e-3}


def say(monkeypatch, steps, costs=SPARSE_PREDICTED):
    """What is predicted for methods, and what steps take with plans of a kind.

    Steps take longer by up to 4 %, another time on each rank.
    """
    monkeypatch.setattr(_planner, "measure_costs", costs_that_say(**costs))

    def took(aggregation, since_seconds):
        noise = 1 + 0.02 * (aggregation.rounds % 2 + aggregation._group.rank % 2)
        return (steps[kind(aggregation.merges)] * noise,) * 2

    monkeypatch.setattr(_planner, "_took", took)

    def rivals(*of):
        """The best dense plan alone, so that it is known how long a contest is."""
        return [rival for rival in rivals_of(*of) if not compresses(rival)][:1]

    monkeypatch.setattr(_planner, "rivals_of", rivals)


def kind(merges):
    sparse = {merge.method == "sparse" for merge in merges}
    return "mixed" if len(sparse) > 1 else "sparse" if True in sparse else "dense"


def kinds_of(steps, ranks=2, *, model=None, states=None, **settings):
    """The plan of each step by its kind, what `stats()` gave at the end, and the state.

    All are the same on all ranks.
    """

    def rank_main(rank, group):
        model, optimizer, session = start(group, "optimal", **settings)
        ran = []
        with session:
            if states is not None:
                session.load_state_dict(states[rank])
            for step in range(steps):
                ran.append(kind(session._aggregation.merges))
                backward_of(model, rank, step)
                optimizer.step()
            session.group.barrier()
            weights = [p.detach().clone() for p in model.parameters()]
            return ran, session.stats(), session.state_dict(), weights

    told = run_ranks(ranks, rank_main)
    assert all(each[0] == told[0][0] for each in told)
    assert same_weights([each[3] for each in told])
    return told[0][0], told[0][1], [each[2] for each in told]

"""Every strategy and mode goes on bit for bit; unlike numbers of ranks, and steps, go on at all."""

import pytest

from gossipgrad.train import GossipConfig, PostLocalConfig
from support.processes import run_processes
from support.resumed_ranks import Act, play
from support.resumed_runs import assert_same_runs

pytestmark = pytest.mark.process
RANKS = 3  # where gloo's sums go by the place in a message
STALE = GossipConfig(mode="stale", topology="matching")
EXACT = {
    "sync": {"gossip": GossipConfig(mode="sync", every=2)},
    "lagged": {"gossip": GossipConfig(mode="lagged", topology="matching")},
    "ring": {"shuffle": "ring"},
    "allreduce": {"strategy": "allreduce"},
    "agd": {"strategy": "agd"},
    "every-log-p": {"strategy": "every-log-p"},
    "post-local": {
        "strategy": "post-local-sgd",
        "post_local": PostLocalConfig(post_local_after=0.5, local_steps=2),
    },
}
ACTS = [
    *(Act(name=name, options=options) for name, options in EXACT.items()),
    *(Act(name=f"{name}-again", resumes=name, options={"resume_step": 3}) for name in EXACT),
    Act(name="post-local-later", resumes="post-local", options={"resume_step": 6}),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The folder of all runs, and what each act came to by rank."""
    folder = tmp_path_factory.mktemp("runs")
    found = run_processes(RANKS, play, str(folder), RANKS, ACTS, timeout_seconds=100)
    return folder, found


def came_to(played, name):
    """What an act came to on the ranks that took part."""
    ended = [of_rank[name] for of_rank in played[1] if name in of_rank]
    for rank, one in enumerate(ended):
        assert not isinstance(one, str), f"rank {rank}: {one}"
    return ended


@pytest.mark.parametrize(
    ("again", "whole"),
    [*((f"{name}-again", name) for name in EXACT), ("post-local-later", "post-local")],
)
def test_a_run_that_was_cut_short_comes_to_what_it_would_have_bit_for_bit(played, again, whole):
    came_to(played, whole)
    came_to(played, again)
    assert_same_runs(played[0] / again, played[0] / whole, RANKS)

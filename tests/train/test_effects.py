"""Options that the length of a run, or its ranks, leave without effect."""

import pytest

from gossipgrad.train import GossipConfig, PostLocalConfig, SparseConfig, TrainConfig
from gossipgrad.train._check import check, warn_of_no_effect


def post_local(**options):
    return {"strategy": "post-local-sgd", "options": {"post_local": PostLocalConfig(**options)}}


def sparse(**options):
    return {"strategy": "topk", "options": {"sparse": SparseConfig(**options)}}


def warn_about(config):
    warn_of_no_effect(config, config.setting(2, total_steps=90))


# 2 ranks and 90 steps.
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"options": {"gossip": GossipConfig(every=91)}},
            "every is 91, but the run has 90 steps: no rank ever meets a partner",
        ),
        (
            {"options": {"gossip": GossipConfig(average_every=91)}},
            "average_every is 91, but the run has 90 steps: replicas are never averaged while",
        ),
        (
            {
                "options": {
                    "gossip": GossipConfig(faults="drop rank=0 rounds=3-91; kill rank=1 round=100")
                }
            },
            "faults name rounds up to 100, but the run has rounds 0 to 90: what comes later never",
        ),
        (
            {
                "options": {
                    "gossip": GossipConfig(
                        faults="delay rank=1 round=45 seconds=1", every=2, mode="sync"
                    )
                }
            },
            "faults name rounds up to 45, but the run has rounds 0 to 44",
        ),
        (
            post_local(post_local_after=0.5, local_steps=46),
            "local_steps is 46, but the run has 45 steps left after the all-reduced ones",
        ),
        (
            post_local(post_local_after=1.0, local_steps=4),
            "local_steps=4 is not used: post_local_after is 1.0, which leaves none of the run's 90",
        ),
        (post_local(post_local_after=0.999), "post_local_after is 0.999, which leaves none"),
        (
            sparse(density_warmup_steps=23),
            "density_warmup_steps is 23, and the warm-up has 4 times as many, but the run has 90",
        ),
        (
            sparse(density=0.25, density_warmup_steps=1),
            "density_warmup_steps=1 is not used: a warm-up sends 0.25 of a gradient at most",
        ),
    ],
    ids=str,
)
def test_warns(options, message):
    with pytest.warns(UserWarning, match=message):
        warn_about(TrainConfig(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"options": {"gossip": GossipConfig(every=90, average_every=90)}},
        {"options": {"gossip": GossipConfig(average_every="log_p")}},
        {"options": {"gossip": GossipConfig(faults="kill rank=1 round=90; drop rank=0 round=3")}},
        {"options": {"gossip": GossipConfig(faults="drop rank=0 round=44", every=2, mode="sync")}},
        post_local(post_local_after=0.5, local_steps=45),
        post_local(post_local_after=1.0),
        {"strategy": "agd"},
        sparse(density_warmup_steps=22),
        sparse(density=1.0, density_warmup_steps=0),
        sparse(density=1.0),
    ],
    ids=str,
)
def test_is_silent_of_what_has_an_effect(options):
    warn_about(TrainConfig(**options))


def test_one_rank_has_no_partner_and_is_told_before_the_start():
    with pytest.warns(UserWarning, match="mode=sync is not used: there is one rank"):
        check(TrainConfig(options={"gossip": GossipConfig(mode="sync")}), 1)
    check(TrainConfig(), 1)


@pytest.mark.parametrize("payload", ["gradients", "gradients+weights"])
def test_what_gossip_refuses_is_refused_before_the_start(payload):
    with pytest.raises(ValueError, match="leave mode='overlap'"):
        check(
            TrainConfig(options={"gossip": GossipConfig(payload=payload, mode="sync")}),
            2,
        )

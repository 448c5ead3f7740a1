"""One session over several optimizers."""

import pytest
import torch

import gossipgrad as gg
from support.ranks import run_ranks
from support.regression import batches
from support.replicas import network, transport_by_name


@pytest.mark.parametrize("payload", ["weights", "weights+state"])
def test_several_optimizers_are_one_step(payload):
    """Muon for the hidden matrix, AdamW for the rest; what both keep is mixed if it travels."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        muon = torch.optim.Muon([model[0].weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([model[0].bias, *model[2].parameters()], lr=0.1)
        losses = []
        with gg.gossip(
            model, [muon, adamw], process_group=group, transport=link, payload=payload
        ) as session:
            for x, y in batches(rank, 40):
                losses.append((model(x) - y).square().mean())
                losses[-1].backward()
                for optimizer in (muon, adamw):
                    optimizer.step()
                    optimizer.zero_grad()
            assert session.stats().rounds == 40
            session.average_()
            assert losses[-1] < losses[0] / 2
            state = [muon.state[model[0].weight]["momentum_buffer"]]
            state += [adamw.state[model[2].bias][key] for key in ("exp_avg", "exp_avg_sq")]
            return [s.clone() for s in state]

    found = zip(*run_ranks(2, rank_main), strict=True)
    assert all(torch.equal(one, other) for one, other in found) == (payload == "weights+state")

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

    link = transport_by_name("in-process", 4)

    def rank_main(rank, group):
        model = network()
        muon = torch.optim.Muon([model[0].weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([model[0].bias, *model[2].parameters()], lr=0.1)
        with gg.gossip(
            model, [muon, adamw], process_group=group, transport=link, payload=payload
        ) as session:
            first = last = 0.0
            for number, (x, y) in enumerate(batches(rank, 40)):
                loss = (model(x) - y).square().mean()
                loss.backward()
                for optimizer in (muon, adamw):
                    optimizer.step()
                    optimizer.zero_grad()
                first, last = (loss.item() if number == 0 else first), loss.item()
            sent = session.stats().bytes_sent
            session.average_()
            state = [muon.state[model[0].weight]["momentum_buffer"]]
            state += [adamw.state[model[2].bias][key] for key in ("exp_avg", "exp_avg_sq")]
            return first, last, sent, [s.clone() for s in state]

    found = run_ranks(4, rank_main)
    for first, last, sent, state in found:
        assert last < first / 2
        weights, moments = 48 + 8 + 24 + 3, 48 + 2 * (8 + 24 + 3)
        assert sent == 41 * 4 * (weights + (moments if payload == "weights+state" else 0))
        alike = [torch.equal(a, b) for a, b in zip(state, found[0][3], strict=True)]
        assert all(alike) == (payload == "weights+state" or state is found[0][3])

"""A loop of Accelerate by gossip, on two ranks."""

import re
import warnings

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.frameworks import needs, run_example, torchrun_environment
from support.processes import one_by_one, run_processes
from support.replicas import flat

pytestmark = [needs("accelerate"), pytest.mark.process]


def make(accelerator, optimizer=None, lr=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    made = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if optimizer is not None:
        made = optimizer(model)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    return model, accelerator.prepare(made)


def step(accelerator, model, optimizer, number, scale=1.0):
    draw = torch.Generator().manual_seed(10 * number + accelerator.process_index)
    for _ in range(2):
        x = torch.randn(8, 6, generator=draw)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            accelerator.backward(scale * loss)
            optimizer.step()
            optimizer.zero_grad()


def trained_saved_and_resumed(rank, store, accelerator, folder):
    from safetensors.torch import load_file

    from gossipgrad.integrations.accelerate import GossipSGD

    model, optimizer = make(accelerator)
    with GossipSGD(accelerator, model, optimizer, payload="weights+momentum") as gossip:
        for number in range(4):
            step(accelerator, model, optimizer, number)
        with gossip.session.consensus():
            mean = flat(model)
        own = flat(model)
        gossip.save_state(folder / "state")
        for number in range(4, 8):
            step(accelerator, model, optimizer, number)
    end = flat(model)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    saved, *rest = make(accelerator, lr=0.5)
    saved.load_state_dict(load_file(folder / "state" / "model.safetensors"))
    model, optimizer = saved, *rest
    with GossipSGD(accelerator, model, optimizer, payload="weights+momentum") as gossip:
        is_mean = torch.equal(flat(saved), mean)
        gossip.load_state(folder / "state")
        is_own = torch.equal(flat(model), own)
        for number in range(4, 8):
            step(accelerator, model, optimizer, number)
    return {
        "apart": not torch.equal(own, mean),
        "is_mean": is_mean,
        "is_own": is_own,
        "resumed": torch.equal(flat(model), end),
        "end": end.tolist(),
    }


def goes_on_from_another_run(rank, store, accelerator, folder):
    from gossipgrad.integrations.accelerate import GossipSGD

    accelerator.free_memory()
    model, optimizer = make(accelerator)
    accelerator.save_state(folder / "plain")
    start = flat(model)
    with GossipSGD(accelerator, model, optimizer, mode="sync") as gossip:
        for number in range(2):
            step(accelerator, model, optimizer, number)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gossip.load_state(folder / "plain")
        is_start = torch.equal(flat(model), start)
        step(accelerator, model, optimizer, 2)
    return is_start, [str(each.message) for each in said if "gossip-rank" in str(each.message)]


def other_families_and_exceptions(rank, store, accelerator, folder):
    from gossipgrad.integrations.accelerate import GossipSGD

    ends = []
    for open, optimizer in ((gg.suda, lambda m: gg.Muon(m, lr=0.02)), (gg.sparsify, None)):
        accelerator.free_memory()
        model, prepared = make(accelerator, optimizer)
        with GossipSGD(accelerator, model, prepared, open=open):
            for number in range(4):
                step(accelerator, model, prepared, number)
        ends.append(flat(model).tolist())
    model, prepared = make(accelerator)
    with pytest.raises(KeyError), GossipSGD(accelerator, model, prepared):
        step({}["of the user"], model, prepared, 0)
    with GossipSGD(accelerator, model, prepared):  # the model is in no session any more
        step(accelerator, model, prepared, 1)
    return ends


def steps_that_a_scaler_skips(rank, store, accelerator, folder):
    from gossipgrad.integrations.accelerate import GossipSGD

    accelerator.free_memory()
    kept, accelerator.scaler = accelerator.scaler, torch.amp.GradScaler("cpu", init_scale=256.0)
    model, optimizer = make(accelerator)
    skipped = []
    with GossipSGD(accelerator, model, optimizer) as gossip:
        for number in range(5):
            scale = torch.inf if (rank, number) == (0, 2) else 1.0
            step(accelerator, model, optimizer, number, scale)
            skipped.append(optimizer.step_was_skipped)
        outcomes = gossip.session.stats().outcomes
    accelerator.scaler = kept
    return skipped, outcomes["delivered"], flat(model).tolist()


def refused(rank, store, accelerator, folder):
    from accelerate import DistributedType

    from gossipgrad.integrations.accelerate import GossipSGD

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = accelerator.prepare(model)
    for given in (wrapped, model):
        why = "evaluation_mode=True" if given is wrapped else "DistributedDataParallel"
        with pytest.raises(ValueError, match=why):
            GossipSGD(accelerator, given, optimizer).__enter__()
    state = accelerator.state
    kept, state._shared_state["distributed_type"] = state.distributed_type, DistributedType.FSDP
    with pytest.raises(ValueError, match=r"DistributedType\.FSDP"):
        GossipSGD(accelerator, model, optimizer)
    state._shared_state["distributed_type"] = kept
    return True


def all_on_one_rank_each(rank, store, port, folder):
    torchrun_environment(rank, port)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = (
        trained_saved_and_resumed,
        goes_on_from_another_run,
        other_families_and_exceptions,
        refused,
        steps_that_a_scaler_skips,
    )
    page = run_example, "accelerate_loop.py", folder / "page"
    return one_by_one(rank, store, *((part, accelerator, folder) for part in parts), page)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found; the framework is loaded once for all tests."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tmp_path_factory.mktemp("accelerate")
    return run_processes(2, all_on_one_rank_each, store.port, folder, grouped=False)


def test_the_consensus_is_saved_and_each_rank_goes_on_exactly(ranks):
    for found, *_ in ranks:
        assert found["apart"]
        assert found["is_mean"], "the model in the checkpoint is the consensus"
        assert found["is_own"], "with its own replica each rank goes on"
        assert found["resumed"]
    assert ranks[0][0]["end"] == ranks[1][0]["end"]


def test_a_checkpoint_without_gossip_is_gone_on_with_from_its_model(ranks):
    assert [found[1][0] for found in ranks] == [True, True]
    assert [len(found[1][1]) for found in ranks] == [1, 0], "said by one rank"


def test_other_families_train_and_an_exception_ends_the_session(ranks):
    assert ranks[0][2] == ranks[1][2], "all end with one model"


def test_a_step_that_the_scaler_skips_on_one_rank_is_a_round_all_the_same(ranks):
    (skipped, delivered, end), (other_skipped, other_delivered, other_end) = (r[4] for r in ranks)
    assert (skipped, any(other_skipped)) == ([False, False, True, False, False], False)
    assert (delivered, other_delivered) == (5, 5)
    assert end == other_end


def test_what_does_not_fit_is_refused_by_name(ranks):
    assert [found[3] for found in ranks] == [True, True]


def test_the_script_of_the_page_runs(ranks):
    (found,) = re.findall(r"accuracy of the consensus (0\.\d+)", ranks[0][-1] + ranks[1][-1])
    assert float(found) > 0.85

"""The Trainer of Transformers by gossip, on two ranks."""

import re
import warnings

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.frameworks import needs, run_example, torchrun_environment
from support.processes import one_by_one, run_processes
from support.replicas import flat

pytestmark = [needs("transformers"), needs("accelerate"), pytest.mark.process]
STEPS = 12


class Net(nn.Module):
    """A perceptron with dropout, which returns what the Trainer takes."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 16), nn.Linear(16, 3), nn.Dropout(0.2)

    def forward(self, x, labels=None):
        logits = self.down(self.drop(torch.relu(self.up(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_trainer(folder, *, optimizer=None, max_steps=STEPS, callbacks=(), **arguments):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    net = Net()
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    rows = [{"x": each, "labels": int(each[:3].argmax())} for each in x]
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        **arguments,
    )
    optimizers = (None if optimizer is None else optimizer(net), None)
    return Trainer(
        net,
        args,
        train_dataset=rows,
        eval_dataset=rows[:30],
        compute_metrics=lambda found: {"rows": len(found.predictions)},
        optimizers=optimizers,
        callbacks=list(callbacks),
    )


def gathered(vector):
    every = [torch.empty_like(vector) for _ in range(2)]
    torch.distributed.all_gather(every, vector)
    return every


def trained_saved_and_resumed(rank, store, folder):
    from safetensors.torch import load_file

    from gossipgrad.integrations.transformers import GossipCallback

    options = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6}
    whole = make_trainer(folder, gradient_accumulation_steps=2, **options)
    callback = GossipCallback(whole, payload="weights+state")
    whole.add_callback(callback)
    seen = []
    evaluation_loop = whole.evaluation_loop

    def look(*args, **kwargs):
        out = evaluation_loop(*args, **kwargs)
        seen.append(out.metrics["eval_loss"])
        return out

    whole.evaluation_loop = look
    whole.train()
    ends = gathered(flat(whole.model))
    torch.distributed.barrier()
    saved = load_file(f"{folder}/checkpoint-6/model.safetensors")
    states = [
        torch.load(f"{folder}/checkpoint-6/gossip-rank{r}-of-2.pt", weights_only=True)["model"]
        for r in range(2)
    ]
    apart = max(float((states[0][name] - states[1][name]).abs().max()) for name in saved)
    off = max(
        float((saved[name] - (states[0][name] + states[1][name]) / 2).abs().max()) for name in saved
    )
    resumed = make_trainer(folder / "on", gradient_accumulation_steps=2, **options)
    resumed.add_callback(GossipCallback(resumed, payload="weights+state"))
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
    return {
        "equal": torch.equal(*ends),
        "resumed": torch.equal(flat(resumed.model), ends[rank]),
        "apart": apart,
        "off": off,
        "closed": callback.session is None,
        "losses": seen,
        "wrapped": type(whole.model_wrapped).__name__,
        "rows": whole.evaluate()["eval_rows"],
    }


def best_at_end(rank, store, folder):
    from safetensors.torch import load_file

    from gossipgrad.integrations.transformers import GossipCallback

    trainer = make_trainer(
        folder,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
    )
    trainer.add_callback(GossipCallback(trainer, mode="sync"))
    trainer.train()
    torch.distributed.barrier()
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    return all(torch.equal(best[n], p) for n, p in trainer.model.state_dict().items())


def what_is_evaluated(rank, store, folder):
    """Whether ranks evaluate one model: the consensus, or else each its own replica."""
    from transformers import TrainerCallback

    from gossipgrad.integrations.transformers import GossipCallback

    class Looks(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            equal.append(torch.equal(*gathered(flat(kwargs["model"]))))

    found = []
    for consensus in (True, False):
        equal = []
        options = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "no"}
        trainer = make_trainer(folder, max_steps=7, callbacks=[Looks()], **options)
        trainer.add_callback(GossipCallback(trainer, consensus=consensus))
        trainer.train()
        found.append((all(equal), any(equal)))
    return found


def with_other_families(rank, store, folder):
    from gossipgrad.integrations.transformers import GossipCallback

    def shrinking(model, optimizer):
        session = gg.gossip(model, optimizer)
        x = {"x": torch.zeros(2, 6), "labels": torch.zeros(2, dtype=torch.long)}
        options = {"every": 4, "events": 2, "batches": 2, "budget": 0.2, "round_to": 1}
        gg.shrink(model, optimizer, session=session, example_input=x, **options)
        return session

    found = {}
    for name, open, optimizer, options in (
        ("suda", gg.suda, lambda net: gg.Muon(net, lr=0.02), {}),
        ("sparsify", gg.sparsify, None, {"density": 0.1}),
        ("SOAP", None, lambda net: gg.SOAP(net, lr=0.01), {"mode": "sync"}),
        ("shrink", shrinking, None, {}),
    ):
        trainer = make_trainer(folder / name, optimizer=optimizer, save_strategy="no")
        before = trainer.evaluate()["eval_loss"]
        trainer.add_callback(GossipCallback(trainer, open=open, **options))
        trainer.train()
        equal = torch.equal(*gathered(flat(trainer.model)))
        found[name] = equal, trainer.evaluate()["eval_loss"] < before
    return found, trainer.model.up.out_features < 16


def refused(rank, store, folder):
    from transformers import TrainerCallback

    from gossipgrad.integrations.transformers import GossipCallback

    forgotten = make_trainer(folder / "forgotten", save_strategy="no")
    GossipCallback(forgotten)
    with pytest.raises(ValueError, match="add_callback"):
        forgotten.train()
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        GossipCallback(make_trainer(folder, auto_find_batch_size=True))
    alone = make_trainer(folder / "alone", save_strategy="no")
    alone.add_callback(GossipCallback(alone, open=gg.shrink, groups=[gg.Neurons("up", "down")]))
    with pytest.raises(ValueError, match=r"gg\.gossip"):
        alone.train()

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("of the user")

    fails = make_trainer(folder / "fails", save_strategy="no", callbacks=[Fails()])
    callback = GossipCallback(fails)
    fails.add_callback(callback)
    with pytest.raises(RuntimeError, match="of the user"):
        fails.train()
    return callback.session is None


def all_on_one_rank_each(rank, store, port, folder):
    torchrun_environment(rank, port)
    warnings.simplefilter("ignore")
    return one_by_one(
        rank,
        store,
        (trained_saved_and_resumed, folder / "whole"),
        (best_at_end, folder / "best"),
        (with_other_families, folder / "families"),
        (refused, folder / "refused"),
        (what_is_evaluated, folder / "evaluated"),
        (run_example, "transformers_trainer.py", folder / "page"),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found; frameworks are loaded once for all tests."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tmp_path_factory.mktemp("trainer")
    return run_processes(2, all_on_one_rank_each, store.port, folder, grouped=False)


def test_the_trainer_evaluates_and_saves_the_consensus_and_resumes_exactly(ranks):
    for found, *_ in ranks:
        assert found["apart"] > 1e-4, "replicas of unlike data are unlike"
        assert found["off"] < 1e-6, "what is saved is their mean"
        assert found["equal"], "all end with one model"
        assert found["resumed"]
        assert (found["closed"], found["wrapped"], found["rows"]) == (True, "Net", 30)
    assert ranks[0][0]["losses"] == ranks[1][0]["losses"]


def test_each_rank_evaluates_its_own_replica_by_option(ranks):
    assert [found[4] for found in ranks] == 2 * [[(True, True), (False, False)]]


def test_the_best_model_is_loaded_at_the_end(ranks):
    assert [found[1] for found in ranks] == [True, True]


def test_other_families_and_optimizers_train_in_the_same_way(ranks):
    for _, _, (found, is_narrower), *_ in ranks:
        assert is_narrower
        assert found == dict.fromkeys(("suda", "sparsify", "SOAP", "shrink"), (True, True))


def test_what_does_not_fit_is_refused_and_an_exception_ends_the_session(ranks):
    assert [found[3] for found in ranks] == [True, True]


def test_the_script_of_the_page_runs(ranks):
    (found,) = re.findall(r"accuracy of the consensus (0\.\d+)", ranks[0][-1] + ranks[1][-1])
    assert float(found) > 0.5

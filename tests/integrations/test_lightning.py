"""Lightning's Trainer by gossip, on two ranks."""

import re
import warnings

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.frameworks import needs, run_example, torchrun_environment
from support.processes import one_by_one, run_processes
from support.replicas import flat

pytestmark = [needs("lightning"), pytest.mark.process]


def make_module(optimizer=None):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
            )
            self.seen, self.steps = [], 0

        def training_step(self, batch):
            (x,) = batch
            self.steps += 1
            if self.steps == getattr(self, "fails_at", None):
                raise KeyError("of the user")
            return nn.functional.cross_entropy(self.net(x), x[:, :3].argmax(1))

        def validation_step(self, batch):
            self.log("loss", self.training_step(batch), sync_dist=True)
            self.seen.append(flat(self).tolist())

        test_step = validation_step

        def configure_optimizers(self):
            if optimizer is not None:
                return optimizer(self)
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def make_trainer(folder, *, max_epochs=2, strategy=None, keep=-1, **arguments):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gossipgrad.integrations.lightning import GossipStrategy

    saves = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=2,
        save_top_k=keep,
        monitor="step",
        mode="max",
    )
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=GossipStrategy(payload="weights+state") if strategy is None else strategy,
        max_epochs=max_epochs,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        **arguments,
    )


def loader():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x)
    return torch.utils.data.DataLoader(data, batch_size=4)


def gathered(vector):
    every = [torch.empty_like(vector) for _ in range(2)]
    torch.distributed.all_gather(every, vector)
    return every


def trained_saved_and_resumed(rank, store, folder):
    module = make_module()
    trainer = make_trainer(folder)
    trainer.fit(module, loader(), loader())
    ends = gathered(flat(module))
    end_of_test = trainer.test(module, loader(), verbose=False)
    saved = torch.load(folder / "step=4.ckpt", weights_only=False)["state_dict"]
    states = [
        torch.load(folder / "step=4.ckpt.gossip" / f"gossip-rank{r}-of-2.pt", weights_only=True)[
            "model"
        ]
        for r in range(2)
    ]
    names = [name for name in saved if "num_batches" not in name]
    resumed = make_module()
    again = make_trainer(folder / "on")
    again.fit(resumed, loader(), loader(), ckpt_path=folder / "step=4.ckpt")
    over = make_trainer(folder / "over")
    over.fit(resumed, loader(), loader(), ckpt_path=folder / "step=8.ckpt")
    return {
        "over": over.strategy.session is None and torch.equal(flat(resumed), ends[rank]),
        "steps": trainer.global_step,
        "equal": torch.equal(*ends),
        "apart": max(float((states[0][n] - states[1][n]).abs().max()) for n in names),
        "off": max(
            float((saved[n] - (states[0][n] + states[1][n]) / 2).abs().max()) for n in names
        ),
        "resumed": torch.equal(flat(resumed), ends[rank]),
        "seen": module.seen,
        "end": ends[rank].tolist(),
        "test": end_of_test,
    }


def old_checkpoints_go_and_plain_ones_are_gone_on_with(rank, store, folder):
    trainer = make_trainer(folder, strategy="gossip", keep=1, max_epochs=1)
    trainer.fit(make_module(), loader())
    trainer.strategy.barrier()
    left = sorted(path.name for path in folder.iterdir())
    plain = make_trainer(folder / "ddp", strategy="ddp", max_epochs=1)
    plain.fit(make_module(), loader())
    weights = torch.load(folder / "ddp" / "step=4.ckpt", weights_only=False)["state_dict"]
    module = make_module()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(folder / "on", strategy="gossip", max_epochs=1).fit(
            module, loader(), ckpt_path=folder / "ddp" / "step=4.ckpt"
        )
    warned = sum("gossip-rank" in str(each.message) for each in said)
    return left, warned, all(torch.equal(weights[n], v) for n, v in module.state_dict().items())


def other_families_and_exceptions(rank, store, folder):
    import lightning.pytorch as pl

    from gossipgrad.integrations.lightning import GossipStrategy

    ends = []
    for open, optimizer in ((gg.suda, lambda m: gg.Muon(m, lr=0.02)), (gg.sparsify, None)):
        module = make_module(optimizer)
        make_trainer(folder, strategy=GossipStrategy(open=open), max_epochs=1).fit(module, loader())
        ends.append(torch.equal(*gathered(flat(module))))
    module = make_module()
    module.fails_at = 5
    trainer = make_trainer(folder / "fails", strategy="gossip")
    with pytest.raises(KeyError):
        trainer.fit(module, loader())
    with pytest.raises(ValueError, match="sync_batchnorm"):
        make_trainer(folder, strategy="gossip", sync_batchnorm=True).fit(make_module(), loader())
    refused = make_trainer(folder, strategy="gossip")
    refused.callbacks.append(pl.callbacks.StochasticWeightAveraging(0.1))
    with pytest.raises(ValueError, match="StochasticWeightAveraging"):
        refused.fit(make_module(), loader())
    return ends, trainer.strategy.session is None


def all_on_one_rank_each(rank, store, port, folder):
    torchrun_environment(rank, port)
    warnings.simplefilter("ignore")
    parts = (
        trained_saved_and_resumed,
        old_checkpoints_go_and_plain_ones_are_gone_on_with,
        other_families_and_exceptions,
    )
    page = run_example, "lightning_module.py", folder / "page"
    return one_by_one(rank, store, *((part, folder / part.__name__) for part in parts), page)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found; the framework is loaded once for all tests."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tmp_path_factory.mktemp("lightning")
    return run_processes(2, all_on_one_rank_each, store.port, folder, grouped=False)


def test_the_consensus_is_validated_saved_and_tested_and_each_rank_goes_on_exactly(ranks):
    ours, theirs = ranks[0][0], ranks[1][0]
    for found in (ours, theirs):
        assert found["steps"] == 8
        assert found["apart"] > 1e-4, "replicas of unlike data are unlike"
        assert found["off"] < 1e-6, "what is saved is their mean"
        assert found["equal"], "all end with one model"
        assert found["resumed"]
        assert found["over"], "also where nothing is left to train"
        assert found["seen"][-1] == found["end"], "which is what is tested"
    assert ours["seen"] == theirs["seen"]
    assert ours["test"] == theirs["test"]


def test_checkpoints_are_removed_whole_and_those_of_other_strategies_are_gone_on_with(ranks):
    for _, (left, _, is_loaded), *_ in ranks:
        assert left == ["step=4.ckpt", "step=4.ckpt.gossip"]
        assert is_loaded
    assert [found[1][1] for found in ranks] == [1, 0], "said by one rank"


def test_other_families_train_and_an_exception_ends_the_session(ranks):
    for _, _, (ends, closed), _ in ranks:
        assert (ends, closed) == ([True, True], True)


def test_the_script_of_the_page_runs(ranks):
    (found,) = re.findall(r"accuracy of the consensus (0\.\d+)", ranks[0][-1] + ranks[1][-1])
    assert float(found) > 0.85

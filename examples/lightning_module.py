"""Lightning: the name of a strategy replaces DistributedDataParallel by gossip.

python examples/lightning_module.py
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset, TensorDataset

from gossipgrad.data import load_digits


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch):
        x, y = batch
        right = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", right, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    pl.seed_everything(0)
    data = TensorDataset(*load_digits())
    train = DataLoader(Subset(data, range(1500)), batch_size=32, shuffle=True)
    test = DataLoader(Subset(data, range(1500, len(data))), batch_size=32)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="gossip",  # was: "ddp"
        max_epochs=10,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(dirpath="checkpoints", monitor="accuracy", mode="max")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Digits()
    trainer.fit(module, train, test)
    (found,) = trainer.test(module, test, verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy of the consensus {found['accuracy']:.3f}")

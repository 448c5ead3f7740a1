"""When ranks save, and under which label: what they come to without a loop around it."""

import pytest
import torch
from torch import nn

from gossipgrad import checkpoint
from gossipgrad.train import TrainConfig, _state
from gossipgrad.train._folder import RunDir
from gossipgrad.train._state import Checkpoints, LoopState
from gossipgrad.train.strategies._local import Local
from support.ranks import run_ranks


@pytest.fixture(autouse=True)
def any_disk(monkeypatch):
    """However slow the disk is, the checkpoint before is awaited, and none left out."""
    monkeypatch.setattr(_state, "_WRITE_SECONDS", 50.0)


class Apart(Local):
    """Ranks that agree over a group."""

    meets = True

    def __init__(self, model, group):
        super().__init__(model)
        self._group = group

    def agree(self, value):
        return self._group.all_gather_object(value)


class NoBatches:
    def __len__(self):
        return 100

    def epoch(self, epoch, *, start_batch=0):
        return iter(())


class Rank:
    """Checkpoints of a rank whose replica is how many steps it has made."""

    def __init__(self, path, rank, group, *, every, resume_step=None):
        self.model, self.events = nn.Linear(1, 1), []
        self.strategy = Apart(self.model, group)
        resumed = {} if resume_step is None else {"resume": path, "resume_step": resume_step}
        config = TrainConfig(checkpoint_every=every, keep_checkpoints=9, **resumed)
        self.saves = Checkpoints(
            config.resolved(nproc=group.world_size, out=path),
            RunDir(path),
            rank=rank,
            world_size=group.world_size,
            model=self.model,
            optimizers=[torch.optim.SGD(self.model.parameters(), lr=0.1)],
            strategy=self.strategy,
            device=torch.device("cpu"),
            emit=self.events.append,
        )

    def place(self, steps):
        with torch.no_grad():
            self.model.weight.fill_(steps)
        return LoopState(epoch=0, batch=steps, metrics={"steps": steps})

    def steps(self, numbers):
        for steps in numbers:
            self.saves.after_step(steps, lambda steps=steps: self.place(steps))

    def end(self, steps):
        why = self.saves.end(steps, self.place(steps))
        self.saves.close()
        return why


def weights(path, step, ranks=2):
    """The steps that each rank had made when it saved."""
    states = [checkpoint.load(path / "checkpoints", rank=rank, step=step) for rank in range(ranks)]
    return [int(state["model"]["weight"]) for state in states]


def test_labels_meet_again_after_ranks_were_stopped_after_unequal_steps(tmp_path):
    def first(rank, group):
        one, last = Rank(tmp_path, rank, group, every=4), 10 - rank
        one.saves.begin(None)
        one.steps(range(1, last + 1))
        return one.end(last)

    assert run_ranks(2, first) == [None, None]
    assert checkpoint.steps(tmp_path / "checkpoints") == [4, 8, 10]
    assert weights(tmp_path, 10) == [10, 9]

    def second(rank, group):
        one, before = Rank(tmp_path, rank, group, every=4, resume_step=10), 10 - rank
        one.saves.begin(one.place(before))
        one.steps(range(before + 1, 21))
        return one.end(20)

    assert run_ranks(2, second) == [None, None]
    assert checkpoint.steps(tmp_path / "checkpoints") == [4, 8, 10, 12, 16, 20]
    assert weights(tmp_path, 12) == [12, 12]


def test_the_last_one_is_not_saved_again_where_all_have_it(tmp_path):
    def main(rank, group):
        one = Rank(tmp_path, rank, group, every=4)
        one.saves.begin(None)
        one.steps(range(1, 9))
        return one.end(8)

    assert run_ranks(2, main) == [None, None]
    assert checkpoint.steps(tmp_path / "checkpoints") == [4, 8]

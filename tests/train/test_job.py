"""Jobs of the user's own: `gossipgrad train --job`, in real processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossipgrad.cli import main
from gossipgrad.data import ShardedSampler
from gossipgrad.train import Job, JobError, TrainConfig, check
from support.alone import resume_alone, run_alone
from support.jobs import name_job
from support.launched import count
from support.waiting import HANG_SECONDS, until

_MODULE = """
import dataclasses

import torch
from torch import nn
from torch.utils.data import Dataset
from gossipgrad.train import Job

class Points(Dataset):
    def __init__(self, size, seed):
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"points": self.x[index]}, self.x[index].sum()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch):
        return self.layers(batch["points"]).squeeze(1)

def regression():
    return Job(
        model=Net(),
        train=Points(1600, 0),
        test=Points(100, 1),
        loss=nn.functional.mse_loss,
        metric=lambda output, target: (output - target).abs(),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    )

def no_metric():
    job = regression()
    return Job(model=job.model, train=job.train, test=job.test, loss=job.loss)

def diverged_metric():
    return dataclasses.replace(
        regression(),
        metric=lambda output, target: output / 0,
        metric_name="error",
        metric_format=".3f",
    )

def bad_loss():
    job = regression()
    return Job(model=job.model, train=job.train, test=job.test, loss=lambda output, target: output)

def other():
    return regression().model
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the user's package, whose modules this process can load."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "jobs.py").write_text(textwrap.dedent(_MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [one for one in sys.modules if one.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


def summary(run: Path) -> dict:
    """What a run has come to."""
    return json.loads((run / "summary.json").read_text())


@pytest.mark.process
@pytest.mark.filterwarnings("default:epochs is 8 instead of 6")
def test_a_job_of_the_user_survives_a_kill_and_is_resumed(project: Path):
    faults = ("--gossip.faults", "kill rank=1 round=20")
    usual = ("--nproc", "2", "--epochs", "6", "--checkpoint-every", "10", "--quiet")
    job = ("--job", "mine.jobs:regression", "--out", "run")
    assert main(["train", *job, *usual, *faults]) == 0
    first = summary(project / "run")
    assert (first["lost_ranks"], first["job"]) == ([1], "mine.jobs:regression")
    assert first["accuracy"] < 1.0, "the mean error of a model that has learned"
    more = ("--nproc", "3", "--epochs", "8", "--gossip.faults", "", "--quiet")
    assert main(["train", "--resume", "run", *more]) == 0
    second = summary(project / "run")
    assert second["lost_ranks"] == []
    assert second["accuracy"] < first["accuracy"]
    # Of the steps that these ranks made: the weights in two of three rounds, as one of three ranks
    # pauses, where all-reduce sends 4/3 of them.
    share = second["bytes_sent_per_step"] / second["all_reduce_bytes_per_step"]
    assert share == pytest.approx(0.5, rel=0.1)
    assert load_file(project / "run" / "model.safetensors")["layers.0.weight"].shape == (16, 8)
    assert (project / "run" / "report.html").exists()


@pytest.mark.process
def test_a_metric_that_is_not_finite_ends_no_rank(project: Path, capfd: pytest.CaptureFixture):
    options = ("--nproc", "2", "--epochs", "2", "--out", "run")
    assert main(["train", "--job", "mine.jobs:diverged_metric", *options]) == 0

    def refuse(constant: str) -> None:
        pytest.fail(f"summary.json has {constant}, which is not JSON")

    text = (project / "run" / "summary.json").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert (found["lost_ranks"], found["accuracy"]) == ([], None)
    assert (found["metric_name"], found["metric_format"]) == ("error", ".3f")
    lines = (project / "run" / "metrics-rank0.jsonl").read_text().splitlines()
    epochs = [one for one in map(json.loads, lines) if one["event"] == "epoch"]
    assert [one["metric_name"] for one in epochs] == ["error", "error"]
    assert "error nan" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mine.jobs:no_metric", "Job.metric"),
        ("mine.jobs:bad_loss", "Job.loss"),
        ("mine.jobs:other", "must return a gossipgrad.train.Job"),
        ("mine.jobs:missing", "no function missing"),
        ("mine.nothing:missing", "no module mine.nothing"),
        ("mine.jobs", "MODULE:FUNCTION"),
    ],
)
def test_a_job_that_cannot_work_is_refused_before_anything_starts(
    project: Path, capsys: pytest.CaptureFixture, name, told
):
    assert main(["train", "--job", name, "--nproc", "2", "--out", "run", "--quiet"]) == 2
    assert told in capsys.readouterr().err
    assert not (project / "run").exists()


@pytest.mark.process
def test_every_position_of_a_text_counts_and_ranks_share_the_evaluation(project: Path):
    """A model that repeats its input is right in three of seven positions."""
    (project / "texts.py").write_text(_TEXTS)
    assert main(["train", "--job", "texts:job", "--nproc", "3", "--epochs", "1", "--out", "a"]) == 0
    assert summary(project / "a")["accuracy"] == pytest.approx(3 / 7)
    assert [*summary(project / "a")["accuracy_per_rank"]] == pytest.approx([3 / 7] * 3)


_TEXTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from gossipgrad.train import Job

class Repeat(nn.Linear):
    def forward(self, x):
        return nn.functional.one_hot(x, 5).float() + 0 * self.weight.sum()

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

def job():
    x = torch.randint(5, (150, 7), generator=torch.Generator().manual_seed(0))
    texts = TensorDataset(x, torch.where(torch.arange(7) < 3, x, (x + 1) % 5))
    return Job(model=Repeat(1, 1), train=texts, test=texts, loss=loss)
"""


def _good() -> dict:
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    return {
        "model": nn.Linear(3, 2),
        "train": data,
        "test": data,
        "loss": nn.functional.cross_entropy,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "resnet"),
        ("model", nn.ReLU()),
        ("train", iter([1, 2])),
        ("train", DataLoader([1, 2])),
        ("test", []),
        ("loss", None),
        ("metric", 0.5),
        ("optimizer", torch.optim.SGD([torch.zeros(1)], lr=0.1)),
        ("collate", "stack"),
        ("metric_name", " "),
        ("metric_format", "percent"),
    ],
)
def test_an_attribute_that_cannot_work_is_named(name: str, value: object):
    with pytest.raises(JobError, match=rf"^Job\.{name} "):
        Job(**_good() | {name: value})


def test_samples_that_are_no_pairs_are_refused():
    job = Job(**_good() | {"train": [torch.zeros(3)] * 4})
    with pytest.raises(JobError, match=r"^Job\.train "):
        job.try_out(2, torch.device("cpu"))


def _loaded() -> Job:
    torch.manual_seed(0)
    x = torch.randn(120, 3)
    points = TensorDataset(x, (x.sum(1) > 0).long())

    def train_loader(rank: int, world_size: int) -> DataLoader:
        sampler = ShardedSampler(len(points), rank=rank, world_size=world_size, seed=1)
        return DataLoader(points, batch_size=10, sampler=sampler)

    good = _good() | {"model": nn.Linear(3, 2), "test": points}
    return Job(
        **{name: good[name] for name in ("model", "test", "loss")}, train_loader=train_loader
    )


_SLOW = """
import time
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from gossipgrad.train import Job

class Rows(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(8), 1

def job():
    test = TensorDataset(torch.ones(64, 8), torch.ones(64, dtype=torch.long))
    return Job(
        model=torch.nn.Linear(8, 2),
        train_loader=lambda rank, size: DataLoader(
            Rows(), batch_size=8, num_workers=2 * (rank == 0)
        ),
        test=test,
        loss=torch.nn.functional.cross_entropy,
    )
"""


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in map(int, children) for one in (child, *descendants(child))]


@pytest.mark.process
def test_sigterm_to_all_processes_at_once_keeps_the_run(project: Path):
    """As batch systems send it: to the workers of data loaders, too."""
    (project / "slow.py").write_text(_SLOW)
    command = [sys.executable, "-m", "gossipgrad", "train", "--job", "slow:job", "--nproc", "2"]
    options = ["--epochs", "1", "--checkpoint-every", "100000", "--log-every", "1", "--out", "run"]
    with subprocess.Popen(
        [*command, *options], cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as running:
        until(lambda: min(count(project / "run", rank) for rank in (0, 1)) > 2)
        processes = descendants(running.pid)
        assert len(processes) >= 2 + 3, "two ranks, one's two workers, and what forked these"
        for pid in (running.pid, *processes):
            os.kill(pid, signal.SIGTERM)
        _, told = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 128 + signal.SIGTERM, told
    found = summary(project / "run")
    assert (found["interrupted"], found["lost_ranks"]) == (True, [])
    assert [*(project / "run" / "checkpoints").glob("step-*")]
    assert load_file(project / "run" / "model.safetensors")["weight"].shape == (2, 8)


_KEEPS_WORKERS = """
import os
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from gossipgrad.train import Job

def note(number):
    Path(f"worker-{os.getpid()}").touch()

def job():
    points = TensorDataset(torch.ones(64, 8), torch.ones(64, dtype=torch.long))
    return Job(
        model=torch.nn.Linear(8, 2),
        train_loader=lambda rank, size: DataLoader(
            points, batch_size=8, num_workers=2, persistent_workers=True, worker_init_fn=note
        ),
        test=points,
        loss=torch.nn.functional.cross_entropy,
    )
"""


@pytest.mark.process
def test_workers_that_a_loader_keeps_end_with_the_run(project: Path):
    (project / "keeps.py").write_text(_KEEPS_WORKERS)
    options = ["--nproc", "2", "--max-steps", "3", "--out", "run", "--quiet"]
    assert main(["train", "--job", "keeps:job", *options]) == 0
    pids = [name.name.removeprefix("worker-") for name in project.glob("worker-*")]
    assert len(pids) >= 2
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


_STARTS_OTHERS = """
import subprocess
import torch
from torch.utils.data import TensorDataset
from gossipgrad.train import Job

def measured(output, target):
    with subprocess.Popen(["sleep", "600"]) as other:
        other.terminate()  # and then it is awaited
    return output.argmax(-1) == target

def job():
    points = TensorDataset(torch.ones(8, 8), torch.ones(8, dtype=torch.long))
    return Job(
        model=torch.nn.Linear(8, 2),
        train=points,
        test=points,
        loss=torch.nn.functional.cross_entropy,
        metric=measured,
    )
"""


@pytest.mark.process
def test_a_job_can_end_processes_that_it_starts(project: Path):
    """As `multiprocessing.Pool` does, too."""
    (project / "others.py").write_text(_STARTS_OTHERS)
    options = ["--nproc", "1", "--epochs", "1", "--out", "run", "--quiet"]
    assert main(["train", "--job", "others:job", *options]) == 0
    assert summary(project / "run")["accuracy"] == 1.0


def test_options_that_a_loader_decides_are_told(monkeypatch):
    config = TrainConfig(job=name_job(monkeypatch, _loaded), batch_size=64, data_threads=4)
    with pytest.warns(UserWarning, match="is not used") as warned:
        check(config, 2)
    told = [str(one.message) for one in warned]
    assert any("batch_size=64 is not used" in one for one in told)
    assert any("data_threads=4 is not used" in one for one in told)


def test_a_job_with_its_own_loader_is_resumed_in_the_middle_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = {"epochs": 3, "lr": 0.1, "job": name_job(monkeypatch, _loaded)}
    whole = run_alone(tmp_path / "whole", **options).summary
    assert whole["steps"] == 36
    assert whole["accuracy"] > 0.8
    run_alone(tmp_path / "cut", checkpoint_every=5, keep_checkpoints=9, **options)
    assert resume_alone(tmp_path / "cut", resume_step=20).summary["steps"] == 36
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_samples_come_from_a_dataset_or_a_loader():
    with pytest.raises(JobError, match=r"^Job\.train or Job\.train_loader must be given"):
        Job(**_good() | {"train": None})
    with pytest.raises(JobError, match="and not both"):
        Job(**_good(), train_loader=lambda rank, world_size: [])
    with pytest.raises(JobError, match=r"^Job\.train_loader .* must return a DataLoader"):
        Job(**_good() | {"train": None}, train_loader=lambda *_: iter([])).try_out(
            1, torch.device("cpu")
        )

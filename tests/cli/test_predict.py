"""`gossipgrad predict`: what it prints, of a job too, and what it refuses."""

import json

import pytest

from gossipgrad import cli
from gossipgrad.planning import Plan, Profile
from gossipgrad.simulate import STRATEGIES


def predicted(capsys, *options):
    assert cli.main(["predict", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_all_strategies_and_the_advice_ends_it(capsys):
    options = ["--profile", "gpt2", "--world-size", "8", "--bandwidth", "1Gbit"]
    assert cli.main(["predict", *options]) == 0
    shown = capsys.readouterr().out
    for name in STRATEGIES.keys() - {"local"}:
        assert f" {name} " in shown
    assert "\nUse " in shown
    found = predicted(capsys, *options)["advice"]
    assert found["best"]["settings"] in shown.split("\nUse ")[1]
    assert all(reason in shown for reason in found["reasons"])


def test_a_model_is_a_profile_or_a_size_and_a_time(capsys):
    found = predicted(capsys, "--parameters", "124M", "--compute-seconds", "0.3")
    profile = Profile.from_json(found["profile"])
    assert sum(profile.elements) == 124_000_000
    assert profile.compute_seconds == pytest.approx(0.3)
    found = predicted(capsys, "--profile", "resnet50")
    assert Profile.from_json(found["profile"]) == Profile.load("resnet50")


def test_workers_of_a_machine_share_its_link_and_gossip_as_an_island(capsys):
    options = ["--parameters", "10M", "--compute-seconds", "0.1", "--bandwidth", "1Gbit"]
    options += ["--world-size", "16"]

    def steps(*more):
        choices = predicted(capsys, *options, *more)["advice"]["choices"]
        return {each["prediction"]["strategy"]: each["prediction"] for each in choices}

    alone, islands = steps(), steps("--island", "4")
    slow = steps("--island", "4", "--inside", "1Gbit")
    assert islands["allreduce"] == alone["allreduce"]
    for name in ("gossip", "gossip-sync", "local-steps"):
        sent = islands[name]["bytes_sent_per_step"]
        assert 4 * sent == pytest.approx(alone[name]["bytes_sent_per_step"])
        assert islands[name]["step_seconds"] == pytest.approx(alone[name]["step_seconds"], rel=0.2)
        assert slow[name]["step_seconds"] > islands[name]["step_seconds"]
    assert islands["suda"]["step_seconds"] > 3 * alone["suda"]["step_seconds"]
    best = predicted(capsys, *options, "--island", "4", "--optimizer", "sgd")["advice"]["best"]
    assert 'island=mesh["node"]' in best["settings"]
    assert cli.main(["predict", *options, "--island", "3"]) == 2
    assert "island is 3" in capsys.readouterr().err


JOB = """
import torch
from torch.utils.data import TensorDataset

from gossipgrad.train import Job


def points():
    data = TensorDataset(torch.randn(40, 8), torch.randint(3, (40,)))
    loss = torch.nn.functional.cross_entropy
    return Job(model=torch.nn.Linear(8, 3), train=data, test=data, loss=loss)


def own():
    job = points()
    return Job(
        model=job.model,
        train=job.train,
        test=job.test,
        loss=job.loss,
        optimizer=lambda model: torch.optim.Adagrad(model.parameters()),
    )
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    name = f"job_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_job_is_measured_here(job, capsys):
    found = predicted(capsys, "--job", f"{job}:points", "--batch-size", "10")
    profile = Profile.from_json(found["profile"])
    assert (sorted(profile.names), profile.batch_size) == (["bias", "weight"], 10)
    assert profile.compute_seconds > 0


def test_an_optimizer_of_the_job_decides_what_is_known_of_accuracy(job, capsys):
    """Adagrad was not measured."""
    known = {}
    for name in ("points", "own"):
        found = predicted(capsys, "--job", f"{job}:{name}", "--optimizer", "sgd")["advice"]
        known[name] = sum(choice["loss"] is not None for choice in found["choices"])
    assert known["points"] > known["own"] == 2


def test_the_groups_are_a_plan_for_sparsify(capsys):
    options = ["--profile", "resnet50", "--world-size", "16", "--plan"]
    plan = Plan.from_json(predicted(capsys, *options)["plan"])
    assert plan.names == Profile.load("resnet50").names
    assert cli.main(["predict", *options]) == 0
    shown = capsys.readouterr().out
    compressed = sum(group.method == "sparse" for group in plan.groups)
    assert f"{compressed} of {len(plan.groups)} groups" in shown


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ("--job", "--profile", "--parameters")),
        (["--profile", "gpt2", "--parameters", "1M", "--compute-seconds", "1"], ("one way",)),
        (["--parameters", "124M"], ("--compute-seconds",)),
        (["--profile", "gpt2", "--compute-seconds", "1"], ("--parameters",)),
        (["--parameters", "many", "--compute-seconds", "1"], ("'many'", "124M")),
        (["--parameters", "1M", "--compute-seconds", "0"], ("compute_seconds",)),
        (["--profile", "gpt2", "--bandwidth", "1"], ("'1'", "1Gbit")),
        (["--profile", "gpt2", "--latency", "soon"], ("'soon'", "50us")),
        (["--profile", "gpt2", "--network", "none.json"], ("none.json", "gossipgrad probe")),
        (["--profile", "gpt2", "--network", "n", "--latency", "1ms"], ("--latency", "--network")),
        (["--profile", "gpt2", "--world-size", "0"], ("world_size",)),
        (["--profile", "gpt2", "--world-size", "1", "--plan"], ("--world-size 2",)),
        (["--profile", "gpt2", "--stragglers", "9"], ("at most 8",)),
        (["--profile", "gpt2", "--jitter", "-1"], ("jitter",)),
        (["--profile", "gpt2", "--most-loss", "-1"], ("most_loss",)),
        (["--job", "nowhere:job"], ("nowhere",)),
    ],
)
def test_mistakes_are_one_line_with_the_rule(options, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predict", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gossipgrad: error: ")
    assert err.count("\n") == 1
    assert all(part in err for part in named)

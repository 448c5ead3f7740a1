"""Fault scripts: what counts as promised."""

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.chaos._script import (
    Fault,
    Script,
    Setting,
)
from benchmarks.chaos._training import differences
from benchmarks.chaos._verdict import judge, print_table

SETTING = Setting(world_size=3, topology="matching", mode="overlap")
KILL = Fault(kind="kill", ranks=(1,), moment="between", number=20)
PAUSE = Fault(kind="pause", ranks=(2,), moment="anytime", number=3, seconds=1.5)
UNDISTURBED = {"accuracy": 0.83, "seconds": 5.0}


def found(script, accuracies, **other):
    """What a runner reports of a run in which all faults have begun."""
    lost = sorted(script.killed)
    return {
        "exit_code": 0,
        "seconds": 6.0,
        "left": [],
        "begun": [*range(len(script.faults))],
        "begun_anew": [],
        "summary": {
            "accuracy": max(accuracies.values()),
            "lost_ranks": lost,
            "lost_because": {str(rank): "was killed by SIGKILL" for rank in lost},
        },
        "results": {rank: {"own_accuracy": value} for rank, value in accuracies.items()},
        "steps_seconds": {rank: [0.01, 0.5 + rank] for rank in range(6)},
    } | other


def make(*faults):
    return Script(seed=7, setting=SETTING, kind="pause", faults=faults)


def why(script, accuracies, **other):
    return judge(script, found(script, accuracies, **other), UNDISTURBED)["why"]


def test_a_run_as_promised():
    script = make(KILL, PAUSE)
    record = judge(script, found(script, {0: 0.826, 2: 0.835}), UNDISTURBED)
    assert (record["outcome"], record["why"]) == ("as promised", [])
    assert record["points_lost"] == 0.4
    assert record["longest_survivor_step_seconds"] == 0.5  # rank 2's own pause is no stall


@pytest.mark.parametrize(
    ("accuracies", "other", "said"),
    [
        ({0: 0.83, 2: 0.819}, {}, "rank 2: accuracy 81.90 %"),
        ({2: 0.83}, {}, "rank 0 has no result"),
        ({0: 0.83, 2: 0.83}, {"seconds": 60.0}, "took 60.0 s"),
        ({0: 0.83, 2: 0.83}, {"left": ["ports left: 80"]}, "ports left: 80"),
        ({0: 0.83, 2: 0.83}, {"exit_code": 1}, "exit code 1"),
        ({0: 0.83, 2: 0.83}, {"hang": "for ever"}, "hang: for ever"),
        ({0: 0.83, 2: 0.83}, {"differs": ["rank 1 differs"]}, "rank 1 differs"),
        ({0: 0.83, 2: 0.83}, {"starts": 2}, "start 2 of 1"),
        (
            {0: 0.83, 2: 0.83},
            {"summary": {"accuracy": 0.83, "lost_ranks": [], "lost_because": {}}},
            "rank 1 was killed and is not among the lost",
        ),
    ],
)
def test_what_is_not_as_promised_is_said(accuracies, other, said, capsys):
    script = make(KILL, PAUSE)
    record = judge(script, found(script, accuracies, **other), UNDISTURBED)
    assert record["outcome"] == "failed"
    assert len(record["why"]) == 1
    assert said in record["why"][0]
    print_table([record])
    assert "again: python -m benchmarks.chaos --seed 7" in capsys.readouterr().out


def test_twins_are_compared_bit_for_bit_but_for_times(tmp_path):
    def write(name, *, loss=0.25, weight=1.0, seconds=0.1):
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"step": 1, "loss": loss, "step_seconds": seconds}, {"step": 2, "loss": 0.1}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics-rank0.jsonl").write_text(text)
        save_file({"w": torch.tensor([weight])}, folder / "model.safetensors")
        return folder

    twin = write("twin")
    assert differences(write("same", seconds=0.2), twin, 1) == []
    assert len(differences(write("loss", loss=0.26), twin, 1)) == 1
    assert len(differences(write("none", weight=-0.0), write("zero", weight=0.0), 1)) == 1
    assert len(differences(write("near", weight=1.0000001), twin, 1)) == 1
    (tmp_path / "same" / "metrics-rank0.jsonl").write_text("")
    assert len(differences(tmp_path / "same", twin, 1)) == 1

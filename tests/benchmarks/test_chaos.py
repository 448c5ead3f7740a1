"""Fault scripts: drawn by seed alone, always with a survivor; and what counts as promised."""

import json
from multiprocessing import Pipe

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.chaos.__main__ import Results
from benchmarks.chaos._director import story
from benchmarks.chaos._draw import FIRST_JOINED, FIRST_RESUMED, SCRIPTS, draw_script
from benchmarks.chaos._joiners import Joiners
from benchmarks.chaos._pool import _begun_anew
from benchmarks.chaos._script import Fault, Script, Setting
from benchmarks.chaos._training import EVALUATIONS, STEPS
from benchmarks.chaos._twin import differences
from benchmarks.chaos._verdict import judge, print_table

SETTING = Setting(world_size=3, topology="matching", mode="overlap")
KILL = Fault(kind="kill", ranks=(1,), moment="between", number=20)
PAUSE = Fault(kind="pause", ranks=(2,), moment="anytime", number=3, seconds=1.5)
UNDISTURBED = {"accuracy": 0.83, "seconds": 5.0}


def draw(seed):
    return draw_script(seed, steps=STEPS, evaluations=EVALUATIONS)


def test_a_seed_is_a_script_and_somebody_survives_it():
    scripts = [draw(seed) for seed in range(FIRST_RESUMED)]
    assert scripts == [draw(seed) for seed in range(FIRST_RESUMED)]
    for script in scripts:
        p = script.setting.world_size
        assert 1 <= len(script.faults) <= 3
        assert len(script.killed) < p
        for fault in script.faults:
            assert len(set(fault.ranks)) == len(fault.ranks)
            assert set(fault.ranks) <= {*range(p)}
            assert (fault.seconds > 0) == (fault.kind != "kill")
        assert Script.from_json(json.loads(json.dumps(script.to_json()))) == script
    kinds = {fault.kind for script in scripts for fault in script.faults}
    assert kinds == {"kill", "pause", "slow", "cut", "off"}
    assert {f.moment for s in scripts for f in s.faults} == {
        *("start", "between", "exchange", "consensus", "anytime")
    }
    assert {0} < {rank for script in scripts for rank in script.killed}
    assert any(len(script.killed) == script.setting.world_size - 1 >= 3 for script in scripts)


def found(script, accuracies, **other):
    """What a runner tells of a run in which all faults have begun."""
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
        "results": {str(rank): {"own_accuracy": value} for rank, value in accuracies.items()},
        "steps_seconds": {str(rank): [0.01, 0.5 + rank] for rank in range(3)},
    } | other


def make(*faults):
    return Script(seed=7, setting=SETTING, kind="pause", faults=faults)


def test_a_run_as_promised():
    script = make(KILL, PAUSE)
    record = judge(script, found(script, {0: 0.826, 2: 0.835}), UNDISTURBED)
    assert (record["outcome"], record["why"]) == ("as promised", [])
    assert record["survivors"] == [0, 2]
    assert record["points_lost"] == 0.4
    assert record["longest_survivor_step_seconds"] == 0.5  # rank 2's own pause is no stall
    assert record["faults"] == [
        "kill rank 1, before step 20",
        "pause rank 2 for 1.5 s, 0 ms into step 3",
    ]


@pytest.mark.parametrize(
    ("accuracies", "other", "why"),
    [
        ({0: 0.83, 2: 0.819}, {}, "rank 2: accuracy 81.90 %, undisturbed 83.00 %"),
        ({2: 0.83}, {}, "rank 0 has no result: nobody says why"),
        ({0: 0.83, 2: 0.83}, {"seconds": 60.0}, "took 60.0 s, more than 38.0 s"),
        ({0: 0.83, 2: 0.83}, {"left": ["ports left: 80"]}, "ports left: 80"),
        ({0: 0.83, 2: 0.83}, {"exit_code": 1}, "exit code 1"),
        ({0: 0.83, 2: 0.83}, {"hang": "for ever"}, "hang: for ever"),
        (
            {0: 0.83, 2: 0.83},
            {"summary": {"accuracy": 0.83, "lost_ranks": [], "lost_because": {}}},
            "rank 1 was killed and is not among the lost",
        ),
    ],
)
def test_what_is_not_as_promised_is_told(accuracies, other, why, capsys):
    script = make(KILL, PAUSE)
    record = judge(script, found(script, accuracies, **other), UNDISTURBED)
    assert record["outcome"] == "failed"
    assert record["why"] == [why]
    print_table([record])
    printed = capsys.readouterr().out
    assert f"seed 7 failed: {why}" in printed
    assert "again: python -m benchmarks.chaos --seed 7" in printed


def test_a_rank_that_the_launcher_started_again_after_its_death_is_not_lost():
    script = make(KILL)
    summary = {"accuracy": 0.83, "lost_ranks": [], "lost_because": {}}
    told = found(script, {0: 0.83, 1: 0.83, 2: 0.83}, summary=summary, begun_anew=[1])
    assert judge(script, told, UNDISTURBED)["outcome"] == "as promised"


def test_who_began_anew_is_read_from_the_events():
    begins = [{"what": "begins", "rank": rank, "at": 1.0 + rank} for rank in range(3)]
    kills = [{"what": "SIGKILL", "rank": rank, "at": 5.0} for rank in (1, 2)]
    again = [{"what": "begins", "rank": rank, "at": 6.0} for rank in (0, 1)]
    assert _begun_anew([*begins, *kills, *again]) == [1]


def test_a_rank_that_was_out_of_reach_may_be_taken_for_dead_if_it_says_so():
    script = make(PAUSE)
    summary = {"accuracy": 0.83, "lost_ranks": [2], "lost_because": {"2": "was taken for dead"}}
    told = found(script, {0: 0.83, 1: 0.83}, summary=summary)
    assert judge(script, told, UNDISTURBED)["outcome"] == "as promised"
    summary["lost_because"] = {"2": "hung"}
    assert judge(script, told, UNDISTURBED)["why"] == ["rank 2 has no result: hung"]


def test_scripts_that_are_there_are_not_run_again(tmp_path):
    path = tmp_path / "chaos.json"
    script = draw(3)
    results = Results(path)
    assert results.lacks(script)
    results.add(
        {
            "seed": 3,
            **script.to_json()["setting"],
            "faults": [str(fault) for fault in script.faults],
            "outcome": "as promised",
        }
    )
    assert not Results(path).lacks(script)
    assert Results(path, again=True).lacks(script)
    assert Results(path).lacks(draw_script(3, steps=10, evaluations=1))


def test_a_story_tells_in_order_what_happened():
    events = [
        {"at": 12.5, "what": "fault", "fault": 0, "rank": 1},
        {"at": 10.0, "what": "begins", "rank": 1, "pid": 4},
        {"at": 13.0, "what": "SIGKILL", "rank": 0},
    ]
    assert story(events, make(KILL)) == [
        "  0.000 s  rank 1 begins (process 4)",
        "  2.500 s  fault: kill rank 1, before step 20",
        "  3.000 s  SIGKILL to rank 0",
    ]


def test_a_later_seed_is_a_run_whose_ranks_all_die_and_that_is_resumed():
    scripts = [draw(seed) for seed in range(FIRST_RESUMED, FIRST_JOINED)]
    assert scripts == [draw(seed) for seed in range(FIRST_RESUMED, FIRST_JOINED)]
    for script in scripts:
        everybody = {*range(script.setting.world_size)}
        for start in range(1, script.resumes + 1):
            kills = [f for f in script.faults if f.kind == "kill" and f.start == start]
            assert {rank for fault in kills for rank in fault.ranks} == everybody
            if kills[-1].moment != "consensus":
                assert kills[-1].number > 2 * script.checkpoint_every
        assert script.killed == set(), "all come back"
        assert not script.of_links
        assert not (script.exact and script.setting.mode == "stale")
        assert Script.from_json(json.loads(json.dumps(script.to_json()))) == script
    assert {script.resumes for script in scripts} == {1, 2}
    assert sum(script.exact for script in scripts) > 15


def test_a_run_that_differs_from_its_twin_is_not_as_promised():
    script = draw(FIRST_RESUMED)
    told = found(script, dict.fromkeys(range(3), 0.83), differs=["rank 1 differs"], starts=2)
    assert judge(script, told, UNDISTURBED)["why"] == ["rank 1 differs"]
    same = judge(script, told | {"differs": []}, UNDISTURBED)
    assert (same["outcome"], same["bit_for_bit"]) == ("as promised", True)
    early = judge(script, told | {"differs": [], "starts": 1}, UNDISTURBED)
    assert early["why"] == ["came to its end in start 1 of 2"]


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
    (loss,) = differences(write("loss", loss=0.26), twin, 1)
    assert loss.startswith("metrics of rank 0 differ from its twin's in line 1: {'step': 1, 'loss'")
    none = differences(write("none", weight=-0.0), write("zero", weight=0.0), 1)
    assert none == ["the model differs from its twin's in w"]
    near = differences(write("near", weight=1.0000001), twin, 1)
    assert near == ["the model differs from its twin's in w"]
    (tmp_path / "same" / "metrics-rank0.jsonl").write_text("")
    assert differences(tmp_path / "same", twin, 1) == [
        "rank 0 wrote 0 lines of metrics, its twin 2"
    ]


def test_the_last_seeds_are_runs_that_others_join():
    scripts = [draw(seed) for seed in range(FIRST_JOINED, SCRIPTS)]
    assert scripts == [draw(seed) for seed in range(FIRST_JOINED, SCRIPTS)]
    for script in scripts:
        assert script.joins
        assert not script.of_links
        for number in script.joins:
            (clock,) = script.faults[number].ranks
            assert clock not in script.killed | script.disturbed, "somebody must tell the time"
            assert script.faults[number].count in (1, 2)
        assert Script.from_json(json.loads(json.dumps(script.to_json()))) == script
    assert {len(script.killed) for script in scripts} == {0, 1}


def test_who_could_not_join_is_told_unless_the_run_was_over():
    script = draw(FIRST_JOINED)
    told = found(script, dict.fromkeys(range(3), 0.83))

    def why(**joins):
        return judge(script, told | {"joins": joins}, UNDISTURBED)["why"]

    assert why(**{"0": {"exit_code": 0, "parts": []}}) == []
    assert why(**{"0": {"error": "RunFailedError: the run came to its end meanwhile"}}) == []
    assert why(**{"0": {"error": "GossipError: nobody answers"}}) == [
        "join 0: GossipError: nobody answers"
    ]
    assert why(**{"0": {"exit_code": 130}}) == ["join 0: exit code 130"]


class Ended:
    """A process that has ended, or will not."""

    def __init__(self, exitcode):
        self.exitcode = exitcode

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.exitcode = -9

    def join(self, timeout=None):
        pass

    close = join


@pytest.mark.parametrize(
    ("exitcode", "writes", "told"),
    [
        (0, True, {"exit_code": 0}),
        (-11, False, {"error": "ended without a word, with exit code -11"}),
        (None, False, {"error": "hang: was not over 60 s after the run"}),
        (None, True, {"error": "hang: was not over 60 s after the run"}),
    ],
)
def test_one_that_was_let_in_and_hangs_or_crashes_is_told(tmp_path, exitcode, writes, told):
    joiners = Joiners(draw(FIRST_JOINED), tmp_path, tmp_path)
    (ours, theirs), (others, _) = Pipe(), Pipe()
    joiners._words, joiners._processes = {0: ours, 1: others}, {0: Ended(exitcode), 1: Ended(0)}
    joiners.let_in(0)
    assert theirs.recv() == "join"
    if writes:
        (tmp_path / "join0.json").write_text(json.dumps(told if exitcode == 0 else {}))
    joiners.__exit__(None, None, None)
    assert joiners.outcomes() == {0: told}

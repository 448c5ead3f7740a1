"""Whether a run went as promised, and the table of all of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ._script import Script
from ._training import LONGER

_POINTS = 1.0  # of accuracy that faults may cost
_SPARE_SECONDS = 20.0  # beyond the undisturbed run and the faults themselves
_IS_OVER = ("came to its end", "is over", "has ended")
_SLOWER = 3.0  # than undisturbed, where ranks share few cores with another script


def judge(script: Script, found: dict[str, Any], undisturbed: dict[str, Any]) -> dict[str, Any]:
    """The record of a script: what it was, what became of it, and what is not as promised."""
    summary = found["summary"] or {}
    results = found["results"]
    survivors = sorted(results)
    accuracies = {rank: results[rank]["own_accuracy"] for rank in survivors}
    accuracy = summary.get("accuracy")
    lasting = sum(fault.seconds for fault in script.faults)
    starts = script.resumes + 1
    longer = (LONGER - 1) * _SLOWER * undisturbed["seconds"] if script.joins else 0.0
    bound = starts * (_SLOWER * undisturbed["seconds"] + _SPARE_SECONDS) + 2 * lasting + longer
    why = [
        *_end(script, found),
        *(
            f"rank {rank} has no result: {_because(summary, rank)}"
            for rank in range(script.setting.world_size)
            if rank not in results and rank not in script.killed | _may_be_evicted(script, summary)
        ),
        *(
            f"rank {rank} was killed and is not among the lost"
            for rank in sorted(script.killed & _fired(script, found) - {*found["begun_anew"]})
            if summary and rank not in summary["lost_ranks"]
        ),
    ]
    floor = undisturbed["accuracy"] - _POINTS / 100
    values = {
        **{f"rank {rank}": value for rank, value in accuracies.items()},
        "exported": accuracy,
    }
    why += [
        f"{who}: accuracy {100 * value:.2f} %, undisturbed {100 * undisturbed['accuracy']:.2f} %"
        for who, value in values.items()
        if value is not None and value < floor
    ]
    if found["seconds"] > bound:
        why.append(f"took {found['seconds']:.1f} s, more than {bound:.1f} s")
    why += found["left"]
    why += found.get("differs", [])
    why += _not_joined(found)
    if found.get("starts", starts) != starts:
        why.append(f"came to its end in start {found['starts']} of {starts}")
    steps = [found["steps_seconds"][rank] for rank in survivors if rank not in script.paused]
    return {
        "seed": script.seed,
        **asdict(script.setting),
        "kind": script.kind,
        "faults": [str(fault) for fault in script.faults],
        "outcome": "failed" if why else "as promised",
        "why": why,
        "seconds": round(found["seconds"], 2),
        "accuracy": accuracy,
        "points_lost": _points(undisturbed["accuracy"], [*accuracies.values()]),
        "longest_survivor_step_seconds": max((max(s) for s in steps if s), default=None),
        "summary": summary,
    }


def _not_joined(found: dict[str, Any]) -> list[str]:
    """What kept others from joining, but that the run was over before."""
    return [
        f"join {number}: {how.get('error') or 'exit code ' + str(how['exit_code'])}"
        for number, how in found.get("joins", {}).items()
        if how.get("exit_code") != 0 and not any(w in how.get("error", "") for w in _IS_OVER)
    ]


def _points(undisturbed: float, accuracies: Sequence[float]) -> float | None:
    """What the worst survivor has lost; below 0 if all have gained."""
    return round(100 * (undisturbed - min(accuracies)), 2) if accuracies else None


def _end(script: Script, found: dict[str, Any]) -> list[str]:
    if "hang" in found:
        return [f"hang: {found['hang']}"]
    if "error" in found:
        return [found["error"]]
    if "exit_code" in found:
        return [] if found["exit_code"] == 0 else [f"exit code {found['exit_code']}"]
    found_why = []
    for rank, code in found["exit_codes"].items():
        if code != 0 and rank not in script.killed | script.disturbed:
            found_why.append(f"rank {rank} ended with exit code {code}")
    if found["summary"] is None:
        found_why.append("no rank has put the run together")
    return found_why


def _fired(script: Script, found: dict[str, Any]) -> set[int]:
    """Ranks of faults that have begun: a run may be over before, or the rank dead."""
    return {rank for number in found["begun"] for rank in script.faults[number].ranks}


def _because(summary: dict[str, Any], rank: int) -> str:
    return summary.get("lost_because", {}).get(str(rank), "nobody says why")


def _may_be_evicted(script: Script, summary: dict[str, Any]) -> set[int]:
    """A rank that was out of reach may have been taken for dead, and then says so."""
    return {rank for rank in script.disturbed if "for dead" in _because(summary, rank)}


def kinds_of(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind of script, and of all: how many, how many as promised, and what they lost at most."""
    found = {}
    for kind, count in [*Counter(r["kind"] for r in records).most_common(), ("all", len(records))]:
        rows = [record for record in records if kind in (record["kind"], "all")]
        points = [r["points_lost"] for r in rows if r["points_lost"] is not None]
        steps = [r["longest_survivor_step_seconds"] or 0.0 for r in rows]
        found[kind] = {
            "scripts": count,
            "as_promised": sum(record["outcome"] == "as promised" for record in rows),
            "worst_points_lost": max(points, default=0.0),
            "longest_step_seconds": round(max(steps, default=0.0), 3),
        }
    return found


def print_table(records: Sequence[dict[str, Any]]) -> None:
    """A line a kind of script, then those that failed."""
    for kind, figures in kinds_of(records).items():
        print(f"{kind:26}", ", ".join(f"{name} {value}" for name, value in figures.items()))
    for record in records:
        if record["outcome"] != "as promised":
            print(f"seed {record['seed']} failed: {'; '.join(record.get('why', []))}")
            print(f"    {record['world_size']} ranks, {record['topology']}, {record['mode']}")
            for fault in record["faults"]:
                print(f"    {fault}")
            print(f"    again: python -m benchmarks.chaos --seed {record['seed']}")

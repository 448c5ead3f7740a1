"""Trains by `gossipgrad train` on real processes of this machine, paired by seed."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._common import ROOT, paired, tell, write

_GOSSIP = {
    "allreduce": "--strategy allreduce",
    "gossip": "--strategy gossip",
    "gossip, weights+state": "--strategy gossip --payload weights+state",
}
_TWO = {name: _GOSSIP[name] for name in ("allreduce", "gossip")}
_DIGITS = "--data digits --model mlp --epochs 20"
_FASHION = "--data fashion-mnist --model lenet --epochs 10 --lr 0.02 --batch-size"
_CIFAR = "--job benchmarks._tasks:cifar_resnet --batch-size 32 --lr 0.1 --epochs 5"
_TEXT = "--job benchmarks._tasks:shakespeare_gpt --optimizer adamw --batch-size 4 --lr 0.002"
# By group: tasks with workers, options and contestants. Differences are to the first contestant.
GROUPS: dict[str, list[tuple[str, int, str, dict[str, str]]]] = {
    "accuracy": [
        ("digits, MLP", 4, _DIGITS, _GOSSIP),
        # 256 samples a step over all ranks in both, so that equal epochs are equal steps.
        ("Fashion-MNIST, LeNet", 4, f"{_FASHION} 64", _TWO),
        ("Fashion-MNIST, LeNet", 8, f"{_FASHION} 32", _TWO),
    ],
    "workloads": [
        ("CIFAR-10 small, ResNet-20", 4, f"{_CIFAR} --warmup-epochs 1", _TWO),
        ("Shakespeare, GPT", 4, f"{_TEXT} --epochs 2 --warmup-epochs 1", _GOSSIP),
    ],
}


def trained(options: str, out: Path) -> float:
    """The accuracy of a run, in percent; from disk if it was done before."""
    if not (out / "summary.json").exists():
        command = [sys.executable, "-m", "gossipgrad", "train", *options.split(), "--trace", "0"]
        command += ["--quiet", "--out", str(out.resolve()), "--overwrite"]
        subprocess.run(command, check=True, cwd=ROOT)
    return 100 * json.loads((out / "summary.json").read_text())["accuracy"]


def compare(group: str, seeds: int) -> Path:
    """Runs what is missing of a group, and writes `results/GROUP.json`."""
    rows: list[dict[str, Any]] = []
    for task, workers, options, contestants in GROUPS[group]:
        command = f"{options} --nproc {workers}"
        found: dict[str, list[float]] = {name: [] for name in contestants}
        for seed in range(seeds):
            for name, own in contestants.items():
                folder = f"{task}-{workers}-{name}-{seed}".replace(" ", "").replace(",", "-")
                out = ROOT / "runs" / group / folder.lower()
                found[name].append(trained(f"{command} {own} --seed {seed}", out))
                tell(f"{task}, {workers} workers, {name}, seed {seed}:", found[name][-1:])
        first, *others = found
        row = {"task": task, "world_size": workers, "command": f"gossipgrad train {command}"}
        row |= {"seeds": [*range(seeds)], "accuracy": found}
        row["mean"] = {name: round(statistics.fmean(each), 3) for name, each in found.items()}
        row[f"difference_to_{first}"] = {n: paired(found[n], found[first]) for n in others}
        rows.append(row)
    return write(group, {"rows": rows}, module="equal_accuracy")

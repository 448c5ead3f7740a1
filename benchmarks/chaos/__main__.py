"""Real trainings with random faults, by seed: what survivors lose, and whether anything hangs.

Processes are killed and paused; links are slowed and cut in a network of namespaces (Linux and
root; without them scripts with such faults are left out). Runs whose workers have all died are
resumed, and compared bit for bit with their undisturbed twin where the mode allows it. Every script
is a short training, compared with the undisturbed one of the same setting. What is there already is
not run again.

    python -m benchmarks.chaos                   # 280 scripts; continues where it was stopped
    python -m benchmarks.chaos --scripts 14      # the first of them
    python -m benchmarks.chaos --seed 17         # one again, with its story
    python -m benchmarks.chaos --soak 150000     # no faults: does anything grow in so many steps?
"""

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before torch is loaded, here and in what is started from here.
os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # who connects to a store is asked for its name

from benchmarks._common import RESULTS, ends_as_ctrl_c, where, write
from benchmarks.network._namespaces import missing, sweep

from ._runner import Runner
from ._script import SCRIPTS, Script, Setting, draw_script
from ._soak import soak
from ._training import EVALUATIONS, STEPS, save_subset
from ._verdict import judge, kinds_of, print_table

_UNDISTURBED = ("accuracy", "seconds", "longest_survivor_step_seconds")


class Results:
    """Records: one a script by seed, and one an undisturbed setting.

    The file has the table of kinds; the records lie in `raw/` beside it.
    """

    def __init__(self, path: Path, *, again: bool = False, keep: bool = True) -> None:
        self._path = path
        self._keep = keep
        self._lock = threading.Lock()
        self.scripts: dict[int, dict[str, Any]] = {}
        self.undisturbed: dict[str, dict[str, Any]] = {}
        raw = path.parent / "raw" / path.name
        if raw.exists() and not again:
            kept = json.loads(raw.read_text())["raw"]
            self.scripts = {record["seed"]: record for record in kept["scripts"]}
            self.undisturbed = kept["undisturbed"]

    def lacks(self, script: Script) -> bool:
        """Whether the script, as it is drawn now, is still to be run."""
        drawn = {**asdict(script.setting), "faults": [str(fault) for fault in script.faults]}
        there = self.scripts.get(script.seed)
        return there is None or any(there[key] != value for key, value in drawn.items())

    def add(self, record: dict[str, Any]) -> None:
        """Adds or replaces a script's record."""
        with self._lock:
            self.scripts[record["seed"]] = record | {"where": where()}
            self._write()

    def add_undisturbed(self, setting: Setting, record: dict[str, Any]) -> None:
        """Adds a setting's record."""
        with self._lock:
            self.undisturbed[str(setting)] = {name: record[name] for name in _UNDISTURBED}
            self._write()

    def _write(self) -> None:
        if not self._keep:
            return
        records = [self.scripts[seed] for seed in sorted(self.scripts)]
        raw = {"undisturbed": self.undisturbed, "scripts": records}
        write("chaos", {"kinds": kinds_of(records)}, raw=raw, path=self._path)


def run_undisturbed(runner: Runner, setting: Setting, results: Results) -> None:
    """Adds the record of a setting without faults."""
    script = Script(seed=-1, setting=setting, kind="undisturbed", faults=())
    found = runner.run(script)
    if not (found["summary"] and len(found["results"]) == setting.world_size):
        kept = runner.keep(script)
        raise RuntimeError(f"{setting}: fails without any fault; {kept} has what it wrote")
    results.add_undisturbed(setting, judge(script, found, {"accuracy": 0.0, "seconds": 0.0}))
    runner.clear()


def run_disturbed(runner: Runner, script: Script, results: Results, *, tell: bool) -> None:
    """Adds the record of a script; what it wrote is kept if it failed."""
    found = runner.run(script)
    record = judge(script, found, results.undisturbed[str(script.setting)])
    lines = found["story"] if tell else []
    lines.append(f"seed {script.seed}: {script.setting}: {script.kind}: {record['outcome']}")
    if record["why"]:
        lines[-1] += f": {record['why'][0]}; see {runner.keep(script)}"
    print("\n".join(lines), flush=True)
    runner.clear()
    results.add(record)


def run_all(scripts: Sequence[Script], results: Results, at_once: int, *, tell: bool) -> None:
    """Runs undisturbed settings that lack, then the scripts, some at once."""
    lacking = {str(s.setting): s.setting for s in scripts}.values()
    lacking = [setting for setting in lacking if str(setting) not in results.undisturbed]
    pool = ThreadPoolExecutor(at_once)
    with tempfile.TemporaryDirectory(prefix="gossipgrad-chaos-") as folder:
        subset = Path(folder) / "subset.safetensors"
        save_subset(subset)
        runners = [Runner(Path(folder) / f"runner{n}", subset) for n in range(at_once)]
        free = list(runners)

        def borrow(task: Callable[[Runner], None]) -> None:
            runner = free.pop()
            try:
                task(runner)
            finally:
                free.append(runner)

        tasks: list[list[Callable[[Runner], None]]] = [
            [lambda r, s=setting: run_undisturbed(r, s, results) for setting in lacking],
            [lambda r, s=script: run_disturbed(r, s, results, tell=tell) for script in scripts],
        ]
        try:
            for stage in tasks:
                left = {pool.submit(borrow, task) for task in stage}
                while left:  # in short turns, for Ctrl-C
                    done, left = wait(left, 0.2, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for runner in runners:
                runner.end()
            if not missing():
                sweep()


def main() -> int:
    """Runs what is missing and prints the table; the exit status tells whether any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scripts", type=int, default=SCRIPTS, help="seeds 0, 1, ... so many")
    parser.add_argument("--seed", type=int, help="this one alone, with its story, not kept")
    parser.add_argument("--again", action="store_true", help="run once more what is there")
    parser.add_argument("--soak", type=int, help="steps of each of four ranks")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos.json")
    options = parser.parse_args()
    if options.soak:
        return soak(options.soak)
    one = options.seed is not None
    results = Results(options.out, again=options.again, keep=not one)
    seeds = [options.seed] if one else range(options.scripts)
    scripts = [draw_script(seed, steps=STEPS, evaluations=EVALUATIONS) for seed in seeds]
    todo = [script for script in scripts if one or results.lacks(script)]
    if lacks := missing():
        print(f"faults of links are left out: {'; '.join(lacks)}", file=sys.stderr)
        todo = [script for script in todo if not script.of_links]
    try:
        with ends_as_ctrl_c():
            run_all(todo, results, 1 if one else options.at_once, tell=one)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return 130
    shown = [results.scripts[seed] for seed in seeds if seed in results.scripts]
    print_table(shown)
    return int(any(record["outcome"] == "failed" for record in shown))


if __name__ == "__main__":
    sys.exit(main())

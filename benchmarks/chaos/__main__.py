"""Real trainings with random faults, by seed: what survivors lose, and whether anything hangs.

Processes are killed and paused; links are slowed and cut in the network laboratory (Linux and root;
without them scripts with such faults are left out). Runs whose workers have all died are resumed,
and compared bit for bit with their undisturbed twin where nobody waits in vain. Every script is a
short training, compared with the undisturbed one of the same setting. What is there already is not
run again.

    python -m benchmarks.chaos                   # 280 scripts; goes on where it was stopped
    python -m benchmarks.chaos --seed 17         # one again, with its story
    python -m benchmarks.chaos --table           # what is there, nothing run
"""

import argparse
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import gossipgrad
from benchmarks._common import RESULTS, ends_as_ctrl_c, write
from benchmarks.network._namespaces import missing

from ._draw import SCRIPTS, draw_script
from ._pool import Runner, Workplace
from ._script import Script, Setting
from ._training import EVALUATIONS, STEPS
from ._verdict import judge, print_table


def digest_of_sources() -> str:
    """Tells with which state of the library a script was run."""
    folder = Path(gossipgrad.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


_QUOTED = ("seed", "world_size", "topology", "mode", "kind", "faults", "outcome", "why")
_QUOTED += ("points_lost", "longest_survivor_step_seconds", "engine")


class Results:
    """What is written down: a record a script by seed, and one an undisturbed setting.

    Each script tells by `engine` with which state of the library it was run. The file has what
    the table shows; whole records of this run lie in `raw/` beside it.
    """

    def __init__(self, path: Path, *, again: bool = False, keep: bool = True) -> None:
        self._path = path
        self._keep = keep
        self._engine = digest_of_sources()
        self._lock = threading.Lock()
        self.scripts: dict[int, dict[str, Any]] = {}
        self.undisturbed: dict[str, dict[str, Any]] = {}
        if path.exists() and not again:
            kept = json.loads(path.read_text())
            self.scripts = {record["seed"]: record for record in kept["scripts"]}
            self.undisturbed = kept["undisturbed"]

    def lacks(self, script: Script) -> bool:
        """Whether the script, as it is drawn now, is still to be run."""
        there = self.scripts.get(script.seed)
        told = [str(fault) for fault in script.faults]
        return (
            there is None
            or there["outcome"] == "left out"
            or there["faults"] != told
            or {k: there[k] for k in ("world_size", "topology", "mode")}
            != script.to_json()["setting"]
        )

    def add(self, record: dict[str, Any]) -> None:
        """Adds or replaces a script's record."""
        with self._lock:
            self.scripts[record["seed"]] = record | {"engine": self._engine}
            self._write()

    def add_undisturbed(self, setting: Setting, record: dict[str, Any]) -> None:
        """Adds a setting's record."""
        with self._lock:
            self.undisturbed[str(setting)] = record
            self._write()

    def records(self) -> list[dict[str, Any]]:
        """Of the scripts, by seed."""
        return [self.scripts[seed] for seed in sorted(self.scripts)]

    def _write(self) -> None:
        if not self._keep:
            return
        write(
            self._path.stem,
            {
                "undisturbed": dict(sorted(self.undisturbed.items())),
                "scripts": [
                    {name: record[name] for name in _QUOTED if name in record}
                    for record in self.records()
                ],
            },
            raw=self.records(),
            path=self._path,
        )


def run_undisturbed(runner: Runner, setting: Setting) -> dict[str, Any]:
    """The record of a setting without faults.

    Raises:
        RuntimeError: Even so it failed.
    """
    script = Script(seed=-1, setting=setting, kind="undisturbed", faults=())
    found = runner.run(script, tell=True)
    if not (found["summary"] and len(found["results"]) == setting.world_size):
        kept = runner.keep(script)
        raise RuntimeError(f"{setting}: fails without any fault; {kept} has what it wrote")
    record = judge(script, found, {"accuracy": 0.0, "seconds": 0.0})
    runner.clear()
    return {
        name: record[name]
        for name in (
            "accuracy",
            "accuracy_per_survivor",
            "seconds",
            "longest_survivor_step_seconds",
            "median_survivor_step_seconds",
        )
    }


def run_one(runner: Runner, script: Script, results: Results, *, tell: bool) -> dict[str, Any]:
    """Runs a script; what it wrote is kept if it failed."""
    found = runner.run(script, tell=tell)
    record = judge(script, found, results.undisturbed[str(script.setting)])
    for line in found["story"]:
        print(line)
    if record["outcome"] == "failed":
        print(f"seed {script.seed} failed: {record['why'][0]}; see {runner.keep(script)}")
    runner.clear()
    return record


def run_all(scripts: Sequence[Script], results: Results, at_once: int, *, tell: bool) -> None:
    """Runs undisturbed settings that lack, then the scripts, some at once."""
    settings = {
        str(s.setting): s.setting for s in scripts if str(s.setting) not in results.undisturbed
    }
    free: list[Runner] = []
    with Workplace() as place:
        pool = ThreadPoolExecutor(at_once)
        try:
            free += [place.runner() for _ in range(at_once)]

            def borrow(task: Callable[[Runner], None]) -> None:
                runner = free.pop()
                try:
                    task(runner)
                finally:
                    free.append(runner)

            def undisturbed(setting: Setting) -> Callable[[Runner], None]:
                return lambda runner: results.add_undisturbed(
                    setting, run_undisturbed(runner, setting)
                )

            def disturbed(number: int, script: Script) -> Callable[[Runner], None]:
                def task(runner: Runner) -> None:
                    record = run_one(runner, script, results, tell=tell)
                    results.add(record)
                    print(
                        f"{number}/{len(scripts)} seed {script.seed}: {script.setting}: "
                        f"{script.kind}: {record['outcome']}, {record['seconds']:.1f} s",
                        flush=True,
                    )

                return task

            first = [undisturbed(setting) for setting in settings.values()]
            then = [disturbed(n, script) for n, script in enumerate(scripts, 1)]
            for tasks in (first, then):
                _wait_for([pool.submit(borrow, task) for task in tasks])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _wait_for(futures: list[Future[None]]) -> None:
    """Waits in short turns, so that Ctrl-C is heard; the first failure is raised."""
    left = set(futures)
    while left:
        done, left = wait(left, 0.2, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()


def main() -> int:
    """Runs what is missing and prints the table; the exit status tells whether any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scripts", type=int, default=SCRIPTS, help="seeds 0, 1, ... so many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone, with its story, not kept")
    parser.add_argument("--again", action="store_true", help="run anew what is there")
    parser.add_argument("--failed", action="store_true", help="run anew those that failed")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos.json")
    options = parser.parse_args()
    results = Results(options.out, again=options.again, keep=options.seed is None)
    seeds = (
        [options.seed]
        if options.seed is not None
        else range(options.first, options.first + options.scripts)
    )
    scripts = [draw_script(seed, steps=STEPS, evaluations=EVALUATIONS) for seed in seeds]
    if options.table:
        print_table(results.records())
        return 0
    scripts = [
        script
        for script in scripts
        if options.seed is not None
        or results.lacks(script)
        or (options.failed and results.scripts[script.seed]["outcome"] == "failed")
    ]
    if lacks := missing():
        print(f"faults of links are left out: {'; '.join(lacks)}", file=sys.stderr)
        for script in scripts:
            if script.of_links:
                results.add(_left_out(script))
        scripts = [script for script in scripts if not script.of_links]
    try:
        with ends_as_ctrl_c():
            run_all(scripts, results, options.at_once, tell=options.seed is not None)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    shown = [results.scripts[seed] for seed in seeds if seed in results.scripts]
    print_table(shown)
    if options.seed is None:
        print(options.out)
    return int(any(record["outcome"] == "failed" for record in shown))


def _left_out(script: Script) -> dict[str, Any]:
    return {
        "seed": script.seed,
        **script.to_json()["setting"],
        "kind": script.kind,
        "faults": [str(fault) for fault in script.faults],
        "outcome": "left out",
    }


if __name__ == "__main__":
    sys.exit(main())

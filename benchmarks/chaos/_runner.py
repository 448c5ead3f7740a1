"""Runs scripts as they are ordered, one after the other, and looks what each leaves behind.

A process of its own, the leader of its session: whoever ordered can end all of it at once, and the
end of the orders ends all of it as well. It has torch loaded, and so has its fork server.
"""

import faulthandler
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.network import Network

from ._director import Director
from ._inside import Events
from ._joiners import Joiners
from ._leaks import Traces
from ._script import Script
from ._twin import differences
from ._ways import PRELOAD, run_by_launcher, run_on_hosts

_RATE_BITS_PER_SECOND = 1e9


def run_script(script: Script, folder: Path, subset: Path) -> dict[str, Any]:
    """Runs a script to its end; what became of it, as plain values."""
    folder.mkdir()
    events = Events(folder)
    before = Traces()
    start = time.monotonic()
    if script.of_links:
        hosts = script.setting.world_size + 1
        with (
            Network(hosts=hosts, rate_bits_per_second=_RATE_BITS_PER_SECOND) as network,
            Director(script, events, network, _RATE_BITS_PER_SECOND),
        ):
            found = run_on_hosts(script, folder, subset, network)
    else:
        with (
            Joiners(script, folder, subset) as joiners,
            Director(script, events, None, 0.0, joiners.let_in),
        ):
            start = time.monotonic()
            found = run_by_launcher(script, folder, subset)
        found["joins"] = joiners.outcomes()
    seconds = time.monotonic() - start
    if script.exact and "exit_code" in found:
        twin = _twin(script, folder.parent, subset)
        found["differs"] = differences(folder / "run", twin, script.setting.world_size)
    summary = folder / "run" / "summary.json"
    left = before.left()
    if (folder / "run" / "partial").exists():
        left.append("temporary files left: run/partial")
    return {
        **found,
        "seconds": seconds,
        "left": left,
        "summary": json.loads(summary.read_text()) if summary.exists() else None,
        "results": {
            rank: json.loads(path.read_text())
            for rank in range(script.setting.world_size)
            if (path := folder / f"result-rank{rank}.json").exists()
        },
        "steps_seconds": {
            rank: _steps_of(folder / "run" / f"metrics-rank{rank}.jsonl")
            for rank in range(script.setting.world_size)
        },
    }


def _twin(script: Script, folder: Path, subset: Path) -> Path:
    """The folder of a run of the same setting that nothing disturbs, and that saves nothing."""
    setting = script.setting
    place = folder / f"twin-{str(setting).replace(', ', '-').replace(' ', '-')}"
    if not place.exists():
        place.mkdir()
        twin = Script(seed=-1, setting=setting, kind="undisturbed", faults=())
        found = run_by_launcher(twin, place, subset)
        assert found.get("exit_code") == 0, f"{setting}: fails without any fault: {found}"
    return place / "run"


def _steps_of(metrics: Path) -> list[float]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().split("\n")[:-1]
    events = (json.loads(line) for line in lines)
    return [event["step_seconds"] for event in events if event["event"] == "step"]


def main() -> None:
    """Takes orders from its input, a JSON object a line, and answers each with one."""
    # What workers print must not get in between.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    # The fork server's first child waits until it has loaded; that is no script's time.
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    while True:
        order = json.loads(orders.get())
        answer = run_script(
            Script.from_json(order["script"]), Path(order["folder"]), Path(order["subset"])
        )
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _nothing() -> None:
    """All there is to do for a process that is only to begin."""


def _listen(orders: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        orders.put(line)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()

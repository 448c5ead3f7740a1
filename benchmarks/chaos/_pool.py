"""Runners, kept alive from script to script; one that hangs is shown, ended and made anew."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.network._namespaces import missing, sweep

from ._director import story
from ._inside import Events
from ._leaks import processes_of
from ._script import Script
from ._training import save_subset

__all__ = ["KEPT", "Runner", "Workplace"]

_ROOT = Path(__file__).parents[2]
KEPT = Path("runs/chaos")
_HANG_SECONDS = 120.0
_START_SECONDS = 60.0
_STACKS_SECONDS = 1.0


class Workplace:
    """A folder for everything that scripts write, and the runners in it; all gone on leaving."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gossipgrad-chaos-")
        self.path = Path(self._folder.name)
        self.subset = self.path / "subset.safetensors"
        self._runners: list[Runner] = []

    def __enter__(self) -> Self:
        save_subset(self.subset)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for runner in self._runners:
            runner.end()
        if not missing():
            sweep()
        self._folder.cleanup()

    def runner(self) -> "Runner":
        """A new one."""
        runner = Runner(self.path / f"runner{len(self._runners)}", self.subset)
        self._runners.append(runner)
        return runner


class Runner:
    """One process that runs scripts, one at a time, with its fork server and all workers."""

    def __init__(self, folder: Path, subset: Path) -> None:
        self._folder = folder
        self._subset = subset
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._scripts = 0
        self._lock = threading.Lock()
        self._ended = False

    def run(self, script: Script, *, tell: bool = False) -> dict[str, Any]:
        """What became of a script; with `tell`, its story, too."""
        self._start()
        self._scripts += 1
        folder = self._folder / f"script{self._scripts}"
        log = self._folder / "log.txt"
        logged = log.stat().st_size
        assert self._process is not None
        assert self._process.stdin is not None
        order = {
            "script": script.to_json(),
            "folder": str(folder),
            "subset": str(self._subset),
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        hangs_at = (script.resumes + 1) * _HANG_SECONDS + 2 * sum(
            fault.seconds for fault in script.faults
        )
        try:
            answer = self._answers.get(timeout=hangs_at)
            found = json.loads(answer.replace(f"{folder}/", ""))  # paths as any machine has them
        except (queue.Empty, ValueError):
            found = self._hung(script, folder, hangs_at)
        events = Events(folder).read()
        found["begun"] = sorted({e["fault"] for e in events if e["what"] == "fault"})
        found["begun_anew"] = _begun_anew(events)
        lines = story(events, script)
        said = log.read_bytes()[logged:].decode(errors="replace")
        said += "".join(
            f"rank {path.stem[4:]}: {line}\n"
            for path in sorted(folder.glob("rank*.log"))
            for line in path.read_text(errors="replace").splitlines()
        )
        found["story"] = [*lines, *said.splitlines()] if tell else []
        return found

    def keep(self, script: Script) -> Path:
        """Copies what the last script has written to where it stays; its story beside it."""
        kept = KEPT / f"seed{script.seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self._folder / f"script{self._scripts}", kept)
        shutil.copy(self._folder / "log.txt", kept)
        return kept

    def clear(self) -> None:
        """Removes what the last script has written."""
        shutil.rmtree(self._folder / f"script{self._scripts}", ignore_errors=True)

    def end(self) -> None:
        """Ends it and all that it has started; it does not start again."""
        with self._lock:
            self._ended = True
            self._kill()

    def _start(self) -> None:
        with self._lock:
            if self._ended:
                raise RuntimeError("this runner was ended")
            if self._process is not None and self._process.poll() is None:
                return
            temporary = self._folder / "tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            with (self._folder / "log.txt").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.chaos._runner"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=_ROOT,
                    env=os.environ
                    | {
                        "TMPDIR": str(temporary),
                        "OMP_NUM_THREADS": "1",
                        "TORCH_CPP_LOG_LEVEL": "ERROR",
                        # Whoever connects to a store is asked for its name.
                        "RES_OPTIONS": "timeout:1",
                    },
                    start_new_session=True,
                )
        self._answers = queue.SimpleQueue()
        threading.Thread(
            target=self._listen, args=(self._process, self._answers), daemon=True
        ).start()

    @staticmethod
    def _listen(process: "subprocess.Popen[str]", answers: "queue.SimpleQueue[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put("")  # it has ended

    def _hung(self, script: Script, folder: Path, seconds: float) -> dict[str, Any]:
        """Shows where everything stands, then ends it."""
        assert self._process is not None
        if self._process.poll() is not None:
            what = f"the runner ended with {self._process.returncode}"
        else:
            what = f"not over after {seconds:.0f} s, stacks in {KEPT / f'seed{script.seed}'}"
        begun = {event["pid"] for event in Events(folder).read() if event["what"] == "begins"}
        for pid in (processes_of(self._process.pid) & begun) | {self._process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
        with self._lock:
            self._kill()
        if not missing():
            sweep()
        return {
            "hang": what,
            "seconds": seconds,
            "left": [],
            "summary": None,
            "results": {},
            "steps_seconds": {},
        }

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 5.0
        while processes_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)


def _begun_anew(events: list[dict[str, Any]]) -> list[int]:
    """Ranks that were killed as the launcher ended them to start all anew: it cannot tell."""
    killed = {e["rank"]: e["at"] for e in events if e["what"] == "SIGKILL"}
    return sorted(
        {
            e["rank"]
            for e in events
            if e["what"] == "begins" and e["at"] > killed.get(e["rank"], e["at"])
        }
    )

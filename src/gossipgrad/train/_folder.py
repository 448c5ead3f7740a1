"""The folder of a run: its files, who holds it, and whether all ranks see the same one."""

import fcntl
import json
import os
import re
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gossipgrad import checkpoint

_METRICS = re.compile(r"metrics-rank(\d+)\.jsonl")
# All that a run leaves in its folder, but for its lock and its checkpoints.
_FILES = re.compile(
    r"""(config|summary|invitation)\.json(\.partial)?
    | (model|best)\.safetensors(\.(\w+\.)?partial)?
    | trace\.json | report\.html | (former/)?metrics-rank\d+(-\d+)?\.jsonl
    | errors-(rank|join)\d+\.txt | evicted-rank\d+(-\d+)?\.safetensors
    | tensorboard/rank\d+/events\.out\.tfevents\.[^/]+
    | partial/(opened|resumes|(result|model|trace|lives)-rank\d+(\.\w+)+)""",
    re.VERBOSE,
)
_POLL_SECONDS = 0.05
# A process that was killed may hold its lock for a moment longer.
_PATIENCE_SECONDS = 1.0
# A network file system may show a new file to other machines after a while.
_VISIBLE_SECONDS = 15.0


class RunDir:
    """The folder of one run and what lies where in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.best = path / "best.safetensors"
        self.trace = path / "trace.json"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.invitation = path / "invitation.json"
        self.lock = path / ".lock"
        self.partial = path / "partial"
        # By it ranks of other machines see whether theirs is the same folder.
        self.opened = self.partial / "opened"
        # There from when a run is resumed until its ranks have what they continue from.
        self.resumes = self.partial / "resumes"

    def metrics(self, rank: int) -> Path:
        return self.path / f"metrics-rank{rank}.jsonl"

    def metrics_ranks(self) -> list[int]:
        """The ranks that have written metrics, in order."""
        names = [_METRICS.fullmatch(path.name) for path in self.path.glob("metrics-rank*.jsonl")]
        return sorted(int(name[1]) for name in names if name is not None)

    def errors(self, rank: int) -> Path:
        """Traceback of a rank that failed."""
        return self.path / f"errors-rank{rank}.txt"

    def join_errors(self, pid: int) -> Path:
        """Traceback of a process that could not join."""
        return self.path / f"errors-join{pid}.txt"

    def evicted_model(self, rank: int) -> Path:
        """Free for the weights of a rank that the others had given up while it hung."""
        return _free(self.path / f"evicted-rank{rank}.safetensors")

    def put_aside(self, rank: int) -> None:
        """Move the metrics of a rank that the run continues without into `former`."""
        if self.metrics(rank).exists():
            former = self.path / "former"
            former.mkdir(exist_ok=True)
            self.metrics(rank).rename(_free(former / self.metrics(rank).name))

    def tensorboard(self, rank: int) -> Path:
        return self.path / "tensorboard" / f"rank{rank}"

    def rank_result(self, rank: int) -> Path:
        """What a rank hands in."""
        return self.partial / f"result-rank{rank}.json"

    def rank_lock(self, rank: int) -> Path:
        """Locked by a rank for as long as it lives."""
        return self.partial / f"lives-rank{rank}.lock"

    def ranks_seen(self) -> list[int]:
        """Ranks that have begun, with those that joined."""
        names = [path.stem for path in self.partial.glob("lives-rank*.lock")]
        return [int(name.removeprefix("lives-rank")) for name in names]

    def rank_model(self, rank: int) -> Path:
        return self.partial / f"model-rank{rank}.safetensors"

    def rank_trace(self, rank: int) -> Path:
        return self.partial / f"trace-rank{rank}.jsonl"

    @property
    def holds_run(self) -> bool:
        """Whether there is something to lose: more than what a start that failed leaves."""
        reached = [self.summary, self.model]
        for pattern in ("metrics-rank*.jsonl", "evicted-rank*.safetensors"):
            reached += self.path.glob(pattern)
        return (
            (self.partial.exists() and self.config.exists())
            or self.holds_checkpoints
            or any(file.exists() and file.stat().st_size for file in reached)
        )

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached an end, and does not continue from there."""
        return self.summary.exists() and not self.resumes.exists()

    @property
    def holds_checkpoints(self) -> bool:
        """Whether there are checkpoints, of a run of the command or of a loop of the user's own."""
        return any(self.checkpoints.glob("step-*"))

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run: `config.json` is one that the command wrote."""
        with suppress(OSError, ValueError):
            content = json.loads(self.config.read_text())
            return isinstance(content, dict) and {"strategy", "versions"} <= content.keys()
        return False

    def files(self) -> list[Path]:
        """What is there under a name that a run gives its files."""
        patterns = ("*", "former/*", "partial/*", "tensorboard/*/*")
        found = (path for pattern in patterns for path in self.path.glob(pattern))
        # Exact names: what is here may be removed, and a copy beside it is the user's.
        return [path for path in found if _FILES.fullmatch(path.relative_to(self.path).as_posix())]

    def check_replaceable(self) -> None:
        """Raise `ValueError` if a run would remove or replace what no run has left there."""
        not_a_runs = {*self.partial.glob("*")} - {*self.files()}
        if not self.is_run:
            not_a_runs |= {*self.files(), *self.checkpoints.glob("step-*")}
        if not_a_runs:
            raise ValueError(
                f"a run in {self.path} would replace {min(not_a_runs)}, which is no file of a run "
                f"that {self.config.name} is of: name another folder with --out, or move that file "
                "away. Nothing was removed."
            )

    def remove_partial(self) -> None:
        """Remove what ranks left to be put together, and invite nobody any more."""
        for file in (self.invitation, *self.files()):
            if file == self.invitation or file.parent == self.partial:
                with suppress(OSError):
                    file.unlink()
        with suppress(OSError):  # where somebody else keeps something there, it stays
            self.partial.rmdir()

    def clear(self) -> None:
        """Remove the files of an earlier run, and those alone; not the lock of who does this."""
        self.remove_partial()
        checkpoint.remove_all(self.checkpoints)
        with suppress(OSError):  # the same
            self.checkpoints.rmdir()
        for file in self.files():
            file.unlink()

    def reopen(self) -> None:
        """Make room for a run to continue; what its last end has left stays until that is sure."""
        self.remove_partial()
        for file in self.files():
            if file.name.startswith("errors-"):
                file.unlink()
        self.partial.mkdir(exist_ok=True)
        self.resumes.touch()


def claim(out: Path | None, stack: ExitStack, *, name: str, overwrite: bool) -> RunDir:
    """Make the folder of a run, or the next free `runs/NAME-N` when `out` is None."""
    try:
        number = 1
        while out is None:
            path = Path("runs") / f"{name}-{number}"
            number += 1
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                out = path
        folder = RunDir(out)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.check_replaceable()
        if not overwrite and folder.holds_run:
            resumes = f"continue it by --resume {out}, " if folder.holds_checkpoints else ""
            raise ValueError(
                f"{out} holds a run already; {resumes}name another folder with --out, or "
                "replace it with --overwrite."
            )
        stack.enter_context(hold_lock(folder, first=True))
        if folder.is_run:
            folder.clear()
        folder.partial.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write to {error.filename}: {error.strerror}; name another folder with --out."
        ) from error
    return folder


def _free(path: Path) -> Path:
    """The path, or, where that is taken, the first of NAME-2, NAME-3 and so on that is not."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


@contextmanager
def hold_lock(run_dir: RunDir, *, first: bool = False) -> Iterator[None]:
    """Share the lock of a run, so that no other command replaces or resumes it."""
    try:
        file = run_dir.lock.open("a")
    except OSError:  # not ours to write
        yield
        return
    with file:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while first and not _lock(file.fileno(), fcntl.LOCK_EX):  # all who take part are in its way
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the run in {run_dir.path} trains: a process that takes part in it holds "
                    f"{run_dir.lock}. Stop it first; if it was on a machine that is gone, remove "
                    "that file."
                )
            time.sleep(_POLL_SECONDS)
        _lock(file.fileno(), fcntl.LOCK_SH)
        yield


def _lock(file: int, how: int) -> bool:
    """Lock a file if nobody is in the way; True also where files cannot be locked."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock a file of this process alone, until the block or the process ends."""
    # Locked before it has its name: a file that is there and not locked is that of a dead process.
    partial = path.with_name(path.name + ".partial")
    try:
        file = partial.open("a")
    except OSError:
        yield
        return
    with file:
        _lock(file.fileno(), fcntl.LOCK_EX)
        with suppress(OSError):
            partial.replace(path)
        yield


def is_held(path: Path, *, otherwise: bool) -> bool:
    """Whether a process is in a block of `held`; `otherwise` if there is no file, or no locks."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return otherwise


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a text beside, wait until it is on the disk, and have it take the name of the file."""
    partial = path.with_name(path.name + ".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def where_weights_are(run_dir: RunDir) -> str:
    """Where the weights are of a run without results, and how to continue."""
    text = f"the weights of each rank that reached its end are in {run_dir.partial}"
    if run_dir.holds_checkpoints:
        text += f"; gossipgrad train --resume {run_dir.path} writes the rest"
    return text


def write_errors(path: Path) -> str:
    """Write the traceback of the error that is handled; where it is, in words."""
    try:
        path.write_text(traceback.format_exc())
    except OSError:
        return ""
    return f" (traceback in {path})"


def leave_token(run_dir: RunDir) -> str:
    """Leave a file that is new, and give what stands in it."""
    token = secrets.token_hex(8)
    run_dir.opened.write_text(token)
    return token


def check_shared(run_dir: RunDir, token: str, *, unless: Callable[[], object]) -> None:
    """Refuse a folder that has the name of the one that rank 0 opened, and is another one."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        with suppress(OSError):
            if run_dir.opened.read_text() == token:
                return
        unless()
        if time.monotonic() > deadline:
            raise ValueError(
                f"{run_dir.path} is not the same folder as on the machine of rank 0, which puts "
                "together what all ranks leave there: name one that all machines share with --out."
            )
        time.sleep(0.1)
